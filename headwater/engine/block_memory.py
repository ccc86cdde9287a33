"""``core.ports.BlockMemory``: the bytes of the engine's KV blocks, for those who keep them.

    part     layers, in their order        buffers of a block
    GLOBAL   of kind global, persisted     k, v of the first layer, k, v of the next, ...
    WINDOW   of kind window, persisted     the same of those

A layer whose rows are keys and values has one buffer for both; what it keeps of a row that is
not whole yet stays on the device, since a prefix that is kept ends with a row.

``DeviceBlocks`` hands out the memory itself; ``StagedBlocks`` serves devices that the host
cannot address. What a layer's bytes mean is between the kernels; ``KVCache.layout`` names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headwater.core.blocks import BlockId
from headwater.core.cache import KVPart
from headwater.core.errors import ConfigError
from headwater.core.ports import BlockMemory
from headwater.engine.kv_cache import KVCache
from headwater.model.family import CacheGroup, CacheKind
from headwater.numerics.ops import LayerKV, Ops

_KINDS = {KVPart.GLOBAL: CacheKind.GLOBAL, KVPart.WINDOW: CacheKind.WINDOW}


@runtime_checkable
class BlockTensors(Protocol):
    """A layer's KV that shows a block as contiguous tensors on its device."""

    def block(self, block: int) -> tuple[Tensor, ...]: ...


def block_memory(ops: Ops, kv: KVCache, cache_plan: Sequence[CacheGroup]) -> BlockMemory:
    """The blocks of ``kv``, which ``ops`` allocated; ``cache_plan`` is ``kv.groups``.

    Raises ConfigError where their bytes cannot be had in either way.
    """
    if ops.kv_buffers(kv.layers[0], 0) is not None:
        return DeviceBlocks(ops, kv, cache_plan)
    return StagedBlocks(ops, kv, cache_plan)


class DeviceBlocks:
    """In place: writing a buffer writes the block. Holds nothing but the layers."""

    def __init__(self, ops: Ops, kv: KVCache, cache_plan: Sequence[CacheGroup]) -> None:
        self._ops = ops
        self._kv = kv
        self._layers = part_layers(kv, cache_plan)
        self._part_bytes = {
            part: sum(len(buffer) for buffer in self._buffers(0, part)) for part in KVPart
        }

    def part_bytes(self, part: KVPart) -> int:
        return self._part_bytes[part]

    def write_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        return self._buffers(block, part)

    def written(self, block: BlockId, part: KVPart) -> None:
        """They were the block's own."""

    def read_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        return self._buffers(block, part)

    def copy(self, source: BlockId, target: BlockId) -> None:
        for layer in self._kv.layers:
            self._ops.copy_kv_block(layer, source, target)

    def _buffers(self, block: int, part: KVPart) -> list[memoryview]:
        ops, layers = self._ops, self._layers[part]
        return [buffer for layer in layers for buffer in ops.kv_buffers(layer, block) or ()]


class StagedBlocks:
    """Through pinned buffers of the host. A write buffer that is never given back is kept until
    its block is written again."""

    def __init__(self, ops: Ops, kv: KVCache, cache_plan: Sequence[CacheGroup]) -> None:
        self._ops = ops
        self._kv = kv
        self._layers = {
            part: [_shown(layer) for layer in layers]
            for part, layers in part_layers(kv, cache_plan).items()
        }
        self._sizes = {
            part: [_bytes_of(tensor).numel() for layer in layers for tensor in layer.block(0)]
            for part, layers in self._layers.items()
        }
        # A stream of its own: nothing that steps compute is waited for.
        self._stream = torch.Stream(ops.device) if ops.device.type != "cpu" else None
        self._written: dict[tuple[BlockId, KVPart], Tensor] = {}

    def part_bytes(self, part: KVPart) -> int:
        return sum(self._sizes[part])

    def write_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        staging = self._staging(part)
        self._written[block, part] = staging
        return self._cut(staging, part)

    def written(self, block: BlockId, part: KVPart) -> None:
        staging = self._written.pop((block, part))
        self._copy_all(staging.split(self._sizes[part]), self._tensors(block, part))

    def read_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        staging = self._staging(part)
        self._copy_all(self._tensors(block, part), staging.split(self._sizes[part]))
        return self._cut(staging, part)

    def copy(self, source: BlockId, target: BlockId) -> None:
        for layer in self._kv.layers:
            self._ops.copy_kv_block(layer, source, target)

    def _staging(self, part: KVPart) -> Tensor:
        # torch keeps pinned memory that is no longer used and gives it out again.
        return torch.empty(
            self.part_bytes(part), dtype=torch.uint8, pin_memory=self._stream is not None
        )

    def _tensors(self, block: BlockId, part: KVPart) -> list[Tensor]:
        return [_bytes_of(t) for layer in self._layers[part] for t in layer.block(block)]

    def _cut(self, staging: Tensor, part: KVPart) -> list[memoryview]:
        whole, start, pieces = staging.numpy().data, 0, []
        for size in self._sizes[part]:
            pieces.append(whole[start : start + size])
            start += size
        return pieces

    def _copy_all(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Complete when it returns."""
        with self._stream or contextlib.nullcontext():
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def part_layers(kv: KVCache, cache_plan: Sequence[CacheGroup]) -> dict[KVPart, list[LayerKV]]:
    """Which layers' KV each part holds, in the order of the layers."""
    places = {layer: i for i, layer in enumerate(sorted(n for g in cache_plan for n in g.layers))}
    return {
        part: [
            kv.layers[places[layer]]
            for layer in sorted(
                layer
                for group in cache_plan
                if group.kind is kind and group.persisted
                for layer in group.layers
            )
        ]
        for part, kind in _KINDS.items()
    }


def _shown(layer: LayerKV) -> BlockTensors:
    if not isinstance(layer, BlockTensors):
        raise ConfigError(
            "KV cannot leave this device: its kernels show no block's bytes; "
            "set cache.cache_dir to none and cache.host_cache_bytes to 0"
        )
    return layer


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).flatten()
