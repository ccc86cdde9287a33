"""The fast path with each of its kernels for chunks; AMX tiles in plain loops where there
are none, so that the tile kernels run on any machine.

The kernels look their instructions up by name when they are compiled: here they find
these instead. One thread only, as there is one set of tiles. Used where
``tiles_available()`` is false; elsewhere the tests run the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numba import cfunc, njit, types

from headwater.numerics import cpu_amx, cpu_amx_attention, cpu_team
from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics.cpu import CpuOps
from headwater.numerics.cpu_amx import TILE_BYTES, TILE_DEPTH, TILE_ROWS, tiles_available
from headwater.numerics.cpu_intrinsics import LANES
from headwater.numerics.cpu_kv import ChunkKernel, CpuKV
from headwater.numerics.ops import KVFormat, Need

_MEMORY = np.zeros(8 * TILE_BYTES, np.uint8)
_TILES = int(_MEMORY.ctypes.data)
_LINE_BYTES = TILE_BYTES // TILE_ROWS


def _zero(tile: int, _b: int, _c: int) -> None:
    for i in range(TILE_BYTES // 4):
        hw.store_i32(_TILES + tile * TILE_BYTES, i, np.int32(0))


def _load(tile: int, address: int, stride_bytes: int) -> None:
    for row in range(TILE_ROWS):
        line = _TILES + tile * TILE_BYTES + row * _LINE_BYTES
        for i in range(TILE_ROWS):
            hw.store_i32(line, i, hw.load_i32(address + row * stride_bytes, i))


def _store(tile: int, address: int, stride_bytes: int) -> None:
    for row in range(TILE_ROWS):
        line = _TILES + tile * TILE_BYTES + row * _LINE_BYTES
        for i in range(TILE_ROWS):
            hw.store_i32(address + row * stride_bytes, i, hw.load_i32(line, i))


def _multiply_add(c: int, a: int, b: int) -> None:
    """c [16, 16] += a [16, 32] @ b, which is [16 pairs, 16, 2]."""
    left, right = _TILES + a * TILE_BYTES, _TILES + b * TILE_BYTES
    for row in range(TILE_ROWS):
        sums = _TILES + c * TILE_BYTES + row * _LINE_BYTES
        for i in range(TILE_DEPTH):
            factor = hw.load_bf16(left, row * TILE_DEPTH + i)
            for column in range(TILE_ROWS):
                value = hw.load_bf16(right, (i // 2 * TILE_ROWS + column) * 2 + i % 2)
                hw.store_f32(sums, column, hw.load_f32(sums, column) + factor * value)


def _compiled(function: Callable[[int, int, int], None]) -> tuple[object, int]:
    """The code, which must outlive its address, and the address."""
    code = cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy")(function)
    return code, int(code.address)


# Compiled apart: a kernel that calls them compiles in half the time of one that they
# become part of.
_ZERO_CODE, _ZERO = _compiled(_zero)
_LOAD_CODE, _LOAD = _compiled(_load)
_STORE_CODE, _STORE = _compiled(_store)
_MULTIPLY_ADD_CODE, _MULTIPLY_ADD = _compiled(_multiply_add)

_INSTRUCTIONS: dict[str, Callable[..., None]] = {
    "configure_tiles": lambda config: None,
    "release_tiles": lambda: None,
    "tile_zero": lambda tile: hw.call_kernel(_ZERO, tile, 0, 0),
    "tile_load": lambda tile, address, stride: hw.call_kernel(_LOAD, tile, address, stride),
    "tile_store": lambda tile, address, stride: hw.call_kernel(_STORE, tile, address, stride),
    "tile_multiply_add": lambda c, a, b: hw.call_kernel(_MULTIPLY_ADD, c, a, b),
}
_TILE_KERNELS = ("attend_chunk_kernel", "linear_tiles_kernel")


def _compile_kernel(
    signature: object, *, cache: bool, error_model: str
) -> Callable[[Callable[..., None]], object]:
    """``cfunc`` that keeps kernels with emulated tiles off the disk: their addresses are
    this process's."""

    def compiled(function: Callable[..., None]) -> object:
        emulated = function.__name__ in _TILE_KERNELS
        return cfunc(signature, cache=cache and not emulated, error_model=error_model)(function)

    return compiled


def _emulated_ops() -> CpuOps:
    """``CpuOps`` whose tile kernels were compiled for emulated tiles."""
    with pytest.MonkeyPatch.context() as patch:
        for name, instruction in _INSTRUCTIONS.items():
            emulated = njit(error_model="numpy")(instruction)
            for module in (cpu_amx, cpu_amx_attention):
                patch.setattr(module, name, emulated)
        patch.setattr(cpu_amx, "tiles_available", lambda: True)
        patch.setattr(cpu_team, "cfunc", _compile_kernel)
        ops = CpuOps(1, tiles=True)
        ops.warm_up([Need.PAGED_KV])  # compiled here, with these instructions
        return ops


class _GatheringOps(CpuOps):
    """Attends to every chunk as to those whose shape no kernel takes."""

    def allocate_kv(
        self, num_blocks: int, block_tokens: int, num_kv_heads: int, head_dim: int,
        kv_format: KVFormat,
    ) -> CpuKV:  # fmt: skip
        kv = super().allocate_kv(num_blocks, block_tokens, num_kv_heads, head_dim, kv_format)
        return replace(kv, chunk_kernel=ChunkKernel.GATHER)


@cache
def fast_ops(kernels: str) -> CpuOps:
    """The fast path whose chunks are attended to by "vectors", "tiles" or "gather", one for
    the whole run: emulated tiles take seconds to compile."""
    if kernels == "gather":
        return _GatheringOps(2, tiles=False)
    if kernels == "vectors":
        return CpuOps(2, tiles=False)
    if tiles_available():
        return CpuOps(2, tiles=True)
    if LANES != TILE_ROWS:
        pytest.skip("the tile kernels need vectors as wide as a tile")
    return _emulated_ops()
