"""From a location to a model that can run: read config, check, read weights, build.

Everything that can be wrong with a checkpoint is found before its weights are
read. Called by ``app`` when a worker starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.core.errors import ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.catalogue import (
    FolderLocation,
    GgufLocation,
    ModelLocation,
    ToyLocation,
)
from headwater.model.ced import CedFamily
from headwater.model.config import ModelConfig
from headwater.model.family import Family, Model, ModelPart
from headwater.model.fingerprint import FingerprintingReader
from headwater.model.gemma3 import Gemma3Family
from headwater.model.gguf_source import GgufSource
from headwater.model.hf_config import config_from_hf
from headwater.model.joined_file import PartsLocation, joined_file
from headwater.model.llama import LlamaFamily
from headwater.model.safetensors_source import SafetensorsSource
from headwater.model.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf
from headwater.model.toy_source import ToySource, toy_tokenizer
from headwater.model.weights import TensorSource, check_tensors
from headwater.numerics.ops import Ops, WeightFormat

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (LlamaFamily(), Gemma3Family(), CedFamily())
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what names and describes it.

    ``full_weights_bytes`` is what the weights would take with ``ModelPart.ALL``. The
    fingerprint is the whole model's, whichever part was loaded.
    """

    model: Model
    config: ModelConfig
    fingerprint: str
    tokenizer_source: TokenizerSource
    model_id: str
    weights_bytes: int
    full_weights_bytes: int
    part: ModelPart


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A checkpoint whose config and tensor list passed every check; no weight read yet."""

    model_id: str
    config: ModelConfig
    source: TensorSource
    tokenizer_source: TokenizerSource


def load_model(
    location: ModelLocation,
    ops: Ops,
    weight_format: WeightFormat,
    *,
    context_tokens: int | None = None,
    part: ModelPart = ModelPart.ALL,
) -> LoadedModel:
    """Load ``location`` onto ``ops``' device.

    ``context_tokens`` lowers the served context (and with it the rotary table).
    With ``ModelPart.EARLY`` late layers, where the model has any, are read and hashed, not
    kept; of another model all is loaded, and the result's ``part`` says so.
    Raises ModelError, before any weight is read, for everything wrong with the
    config, the list of tensors or the files' lengths.
    """
    opened = open_model(location, context_tokens=context_tokens)
    family = FAMILIES[opened.config.family]
    try:
        with FingerprintingReader(opened.source) as reader:
            model = family.build(opened.config, reader, ops, weight_format, part)
            reader.cover(family.expected_tensors(opened.config))
            fingerprint = reader.fingerprint(opened.config, weight_format, ops.name)
    finally:
        opened.source.close()
    return LoadedModel(
        model=model,
        config=opened.config,
        fingerprint=fingerprint,
        tokenizer_source=opened.tokenizer_source,
        model_id=opened.model_id,
        weights_bytes=model.weights_bytes,
        full_weights_bytes=model.full_weights_bytes,
        part=part if model.full_weights_bytes > model.weights_bytes else ModelPart.ALL,
    )


def open_model(location: ModelLocation, *, context_tokens: int | None = None) -> OpenedModel:
    """Read and check everything but the weights. The caller closes ``source``."""
    match location:
        case FolderLocation(path=path, model_id=model_id):
            opened = _open_folder(path, model_id)
        case GgufLocation(path=path, model_id=model_id):
            opened = _open_gguf(path, model_id)
        case PartsLocation(model_id=model_id):
            opened = _open_gguf(joined_file(location), model_id)
        case ToyLocation():
            opened = _open_toy(location)
    try:
        config = _limited(opened.config, context_tokens, opened.source.where)
        family = FAMILIES[config.family]
        check_tensors(opened.source, family.expected_tensors(config), family.unused_tensors(config))
    except ModelError:
        opened.source.close()
        raise
    return replace(opened, config=config)


def _open_folder(folder: Path, model_id: str) -> OpenedModel:
    config_path = folder / "config.json"
    try:
        values = json.loads(config_path.read_bytes())
    except FileNotFoundError:
        advice = "; pass the .gguf file inside it" if any(folder.glob("*.gguf")) else ""
        raise ModelError(f"{folder} is not a model folder: it has no config.json{advice}") from None
    except ValueError as error:
        raise ModelError(f"{config_path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{config_path} must hold a JSON object")
    config = config_from_hf(values, str(config_path))
    return OpenedModel(
        model_id=model_id,
        config=config,
        tokenizer_source=tokenizer_from_folder(folder, config, model_id),
        source=SafetensorsSource(folder),
    )


def _open_gguf(path: Path, model_id: str) -> OpenedModel:
    source = GgufSource(path)
    return OpenedModel(
        model_id=model_id,
        config=source.config,
        tokenizer_source=tokenizer_from_gguf(source.metadata, source.config, model_id, str(path)),
        source=source,
    )


def _open_toy(location: ToyLocation) -> OpenedModel:
    config = location.options.config()
    shapes = FAMILIES[config.family].expected_tensors(config)
    return OpenedModel(
        model_id=location.model_id,
        config=config,
        tokenizer_source=toy_tokenizer(location.model_id),
        source=ToySource(location.options, shapes),
    )


def _limited(config: ModelConfig, context_tokens: int | None, where: str) -> ModelConfig:
    if context_tokens is None:
        return config
    if not 1 <= context_tokens <= config.context_tokens:
        raise ModelError(
            f"{where}: a context of {context_tokens} tokens was asked for; "
            f"this model has 1 to {config.context_tokens}"
        )
    return replace(config, context_tokens=context_tokens)
