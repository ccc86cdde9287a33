"""Tensors of a Hugging Face folder: ``model.safetensors``, or shards with an index.

Opening maps every shard, which makes the library compare its header with its
length, and compares the shards with the index: a missing, cut or swapped file
is named before gigabytes are read. Called by ``load``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.model.weights import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


class _Slice(Protocol):
    def get_shape(self) -> Sequence[int]: ...
    def get_dtype(self) -> str: ...


class _Shard(Protocol):
    """The part of ``safetensors.safe_open`` used here, which carries no types."""

    def keys(self) -> Sequence[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class SafetensorsSource:
    """Opens a folder; raises ModelError naming the file or tensor that is wrong."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shard_of = _open_shards(folder)
        self._infos = {name: _info(name, shard) for name, shard in self._shard_of.items()}
        for name, info in self._infos.items():
            if info.dtype not in _DTYPES:
                raise ModelError(
                    f"{folder}: tensor {name} has dtype {info.dtype}; "
                    f"supported: {', '.join(_DTYPES)}"
                )

    @property
    def where(self) -> str:
        return str(self._folder)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> Tensor:
        # The library maps the file; a copy stays valid when the file is replaced.
        return self._shard_of[name].get_tensor(name).clone()

    def stored_bytes(self, name: str) -> memoryview:
        mapped = self._shard_of[name].get_tensor(name)
        return mapped.reshape(-1).view(torch.uint8).numpy().data

    def close(self) -> None:
        self._shard_of.clear()  # the last reference to a shard unmaps it


def _open_shards(folder: Path) -> dict[str, _Shard]:
    """Each tensor's shard."""
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if not single.is_file():
            raise ModelError(_no_weights(folder))
        shard = _open_shard(single)
        return dict.fromkeys(shard.keys(), shard)

    file_of = _weight_map(index)
    for name in dict.fromkeys(file_of.values()):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder / name} is missing: {INDEX_FILE} lists it; "
                "download or copy the folder again"
            )
    shards = {name: _open_shard(folder / name) for name in dict.fromkeys(file_of.values())}
    held = {name: set(shard.keys()) for name, shard in shards.items()}
    for tensor, name in file_of.items():
        if tensor not in held[name]:
            raise ModelError(
                f"{folder / name} does not hold tensor {tensor}, which {INDEX_FILE} places there"
            )
    return {tensor: shards[name] for tensor, name in file_of.items()}


def _open_shard(path: Path) -> _Shard:
    try:
        shard: _Shard = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ModelError(
            f"{path} is truncated or damaged at {path.stat().st_size:,} bytes ({error}); "
            "download or copy it again"
        ) from error
    return shard


def _info(name: str, shard: _Shard) -> TensorInfo:
    stored = shard.get_slice(name)
    return TensorInfo(tuple(stored.get_shape()), stored.get_dtype())


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes())
    except ValueError as error:
        raise ModelError(f"{index} is not valid JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty")
    for name in weight_map.values():
        # The index comes from outside: it may only name files beside it.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index}: {name!r} is not the name of a file in its folder")
    return weight_map


def _no_weights(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds an adapter, not a model; merge it into its base model first"
    if any(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder} holds pickled weights (pytorch_model.bin), which can run code when read; "
            "convert them to safetensors"
        )
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
