"""Matrix tiles of x86 server CPUs (AMX) for few rows: arithmetic 10 times cheaper than vectors.

    C [16 rows, 16 tokens] += A [16 rows, 32] @ B [32, 16 tokens]      (bfloat16, float32 sums)

A tile is 16 lines of 64 bytes. Our weights are row-major, so a tile of A is read
where it lies; only the tokens are re-ordered, once, into B's form (pairs of
neighbours in a row lie together: [16 pairs, 16 tokens, 2]). So a step of 16 rows
stays bound by memory. Used by ``cpu.py`` where ``tiles_available()``; a machine
without them never compiles this. Knows addresses and sizes only.
"""

from __future__ import annotations

import ctypes
import platform
import sys

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics.cpu_intrinsics import I8, Context, Type, Typed, Typing, Values
from headwater.numerics.cpu_linear import INT8
from headwater.numerics.cpu_team import ARGS, compiled, run

TILE_BYTES = 1_024
TILE_ROWS = 16
TILE_DEPTH = 32  # elements of the shared axis
_CONFIG_BYTES = 64
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def tiles_available() -> bool:
    """Whether this process may use bfloat16 tiles; asks the kernel for them (Linux)."""
    if not {"amx-tile", "amx-bf16"} <= hw.HOST_FEATURES or sys.platform != "linux":
        return False
    if platform.machine() != "x86_64":
        return False
    request = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return bool(ctypes.CDLL(None).syscall(*request) == 0)


def tile_config() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The 64-byte configuration: palette 1, eight tiles of 16 rows of 64 bytes."""
    config = np.zeros(_CONFIG_BYTES, np.uint8)
    config[0] = 1
    config[16:32:2] = 64
    config[48:56] = TILE_ROWS
    return config


# ---- instructions; tile numbers are literals ----------------------------------------


def _call(builder: ir.IRBuilder, name: str, *operands: ir.Value) -> None:
    signature = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.{name}")
    builder.call(function, operands)


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I8.as_pointer())


@intrinsic
def configure_tiles(_ctx: Typing, config: Type) -> Typed:
    """Set this thread's tiles up from the 64 bytes at ``config``."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        _call(builder, "ldtilecfg", _pointer(builder, args[0]))
        return ctx.get_dummy_value()

    return types.void(types.int64), lower


@intrinsic
def release_tiles(_ctx: Typing) -> Typed:
    """Give the tiles up: other code of this thread then saves less at a switch."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, _args: Values) -> ir.Value:
        _call(builder, "tilerelease")
        return ctx.get_dummy_value()

    return types.void(), lower


@intrinsic(prefer_literal=True)
def tile_zero(_ctx: Typing, tile: Type) -> Typed:
    number = tile.literal_value

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, _args: Values) -> ir.Value:
        _call(builder, "tilezero", I8(number))
        return ctx.get_dummy_value()

    return types.void(tile), lower


@intrinsic(prefer_literal=True)
def tile_load(_ctx: Typing, tile: Type, address: Type, stride_bytes: Type) -> Typed:
    number = tile.literal_value

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        _call(builder, "tileloadd64", I8(number), _pointer(builder, args[1]), args[2])
        return ctx.get_dummy_value()

    return types.void(tile, types.int64, types.int64), lower


@intrinsic(prefer_literal=True)
def tile_store(_ctx: Typing, tile: Type, address: Type, stride_bytes: Type) -> Typed:
    number = tile.literal_value

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        _call(builder, "tilestored64", I8(number), _pointer(builder, args[1]), args[2])
        return ctx.get_dummy_value()

    return types.void(tile, types.int64, types.int64), lower


@intrinsic(prefer_literal=True)
def tile_multiply_add(_ctx: Typing, c: Type, a: Type, b: Type) -> Typed:
    """Tile c += tile a @ tile b."""
    numbers = [tile.literal_value for tile in (c, a, b)]

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, _args: Values) -> ir.Value:
        _call(builder, "tdpbf16ps", *(I8(number) for number in numbers))
        return ctx.get_dummy_value()

    return types.void(c, a, b), lower


# ---- linear -------------------------------------------------------------------------


@compiled
def linear_scratch_bytes(in_padded: int) -> int:
    """Scratch of one thread: 32 dequantised rows and four C tiles."""
    return 2 * TILE_ROWS * in_padded * 2 + 4 * TILE_BYTES


@njit(nogil=True, error_model="numpy")
def _multiply_rows(
    rows: int, row_bytes: int, tokens: int, num_token_tiles: int, first_tile: int,
    depth: int, later: int, out: int,
) -> None:  # fmt: skip
    """C tiles (rows 0-15 and 16-31) x (token tile first_tile and, if there is one, the next)
    to out [2, 2, 16, 16] float32; asks for ``later`` and on, one line per element of depth."""
    two = first_tile + 1 < num_token_tiles
    low, high = rows, rows + TILE_ROWS * row_bytes
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    for step in range(depth // TILE_DEPTH):
        b = tokens + (step * num_token_tiles + first_tile) * TILE_BYTES
        tile_load(4, low + step * 64, row_bytes)
        tile_load(5, high + step * 64, row_bytes)
        tile_load(6, b, 64)
        tile_multiply_add(0, 4, 6)
        tile_multiply_add(1, 5, 6)
        if two:
            tile_load(7, b + TILE_BYTES, 64)
            tile_multiply_add(2, 4, 7)
            tile_multiply_add(3, 5, 7)
        if first_tile == 0:
            for line in range(TILE_DEPTH):
                hw.prefetch(later + (step * TILE_DEPTH + line) * 64)
    tile_store(0, out, 64)
    tile_store(1, out + TILE_BYTES, 64)
    if two:
        tile_store(2, out + 2 * TILE_BYTES, 64)
        tile_store(3, out + 3 * TILE_BYTES, 64)


# The arguments of the kernel, in the order of ``linear_tiles``.
(
    _CONFIG, _TOKENS, _WEIGHTS, _SCALES, _BIAS, _SCRATCH, _OUT, _OUT_IS_F32, _NUM_TOKENS,
    _IN_PADDED, _OUT_FEATURES, _CHUNK_ROWS, _KIND,
) = range(13)  # fmt: skip


def linear_tiles_kernel(args: int, chunk: int, thread: int) -> None:
    """out = (x @ weights.T) * scales + bias for one chunk of output columns, 32 at a time."""
    weights, tokens = hw.load_i64(args, _WEIGHTS), hw.load_i64(args, _TOKENS)
    scales, bias = hw.load_i64(args, _SCALES), hw.load_i64(args, _BIAS)
    out, out_is_f32 = hw.load_i64(args, _OUT), hw.load_i64(args, _OUT_IS_F32)
    num_tokens, depth = hw.load_i64(args, _NUM_TOKENS), hw.load_i64(args, _IN_PADDED)
    out_features, kind = hw.load_i64(args, _OUT_FEATURES), hw.load_i64(args, _KIND)
    sums = hw.load_i64(args, _SCRATCH) + thread * linear_scratch_bytes(depth)
    wide_rows = sums + 4 * TILE_BYTES
    num_tiles = (num_tokens + TILE_ROWS - 1) // TILE_ROWS
    begin = chunk * hw.load_i64(args, _CHUNK_ROWS)
    end = min(begin + hw.load_i64(args, _CHUNK_ROWS), out_features)
    configure_tiles(hw.load_i64(args, _CONFIG))
    for first in range(begin, end, 2 * TILE_ROWS):
        if kind == INT8:
            # Whole numbers up to 127 are exact in bfloat16; the scale comes at the end.
            rows, source = wide_rows, weights + first * depth
            later = source + 2 * TILE_ROWS * depth
            for i in range(2 * TILE_ROWS * depth):
                hw.store_exact_bf16(rows, i, np.float32(hw.load_i8(source, i)))
        else:
            rows = weights + first * depth * 2
            later = rows + 2 * TILE_ROWS * depth * 2
        count = min(2 * TILE_ROWS, end - first)
        for tile in range(0, num_tiles, 2):
            _multiply_rows(rows, depth * 2, tokens, num_tiles, tile, depth, later, sums)
            last_token = min(num_tokens, (tile + 2) * TILE_ROWS)
            for token in range(tile * TILE_ROWS, last_token):
                lane = token - tile * TILE_ROWS
                column = sums + (lane // TILE_ROWS) * 2 * TILE_BYTES + (lane % TILE_ROWS) * 4
                target = token * out_features + first
                for r in range(count):
                    value = hw.load_f32(column, r * TILE_ROWS)
                    if scales != 0:
                        value *= hw.load_f32(scales, first + r)
                    if bias != 0:
                        value += hw.load_f32(bias, first + r)
                    if out_is_f32 != 0:
                        hw.store_f32(out, target + r, value)
                    else:
                        hw.store_bf16(out, target + r, value)
    release_tiles()


@compiled
def linear_tiles(
    state: int, kernel: int, num_chunks: int, config: int,
    x: int, x_stride: int, tokens: int, weights: int, scales: int, bias: int, scratch: int,
    out: int, out_is_f32: int, num_tokens: int, depth: int, out_features: int,
    chunk_rows: int, kind: int,
) -> None:  # fmt: skip
    """Re-order bfloat16 x [num_tokens, depth] into B tiles and run the kernel over them.

    ``tokens`` is [depth / 32, token tiles, 16 pairs, 16 tokens, 2]; ``depth`` is a multiple
    of 32.
    """
    num_tiles = (num_tokens + TILE_ROWS - 1) // TILE_ROWS
    for token in range(num_tiles * TILE_ROWS):
        place = tokens + (token // TILE_ROWS) * TILE_BYTES + (token % TILE_ROWS) * 4
        source = x + token * x_stride * 2
        for step in range(depth // TILE_DEPTH):
            tile = place + step * num_tiles * TILE_BYTES
            for pair in range(TILE_ROWS):
                value = np.int32(0)
                if token < num_tokens:
                    value = hw.load_i32(source, step * TILE_ROWS + pair)
                hw.store_i32(tile, pair * TILE_ROWS, value)
    args = state + ARGS
    hw.store_i64(args, _CONFIG, config)
    hw.store_i64(args, _TOKENS, tokens)
    hw.store_i64(args, _WEIGHTS, weights)
    hw.store_i64(args, _SCALES, scales)
    hw.store_i64(args, _BIAS, bias)
    hw.store_i64(args, _SCRATCH, scratch)
    hw.store_i64(args, _OUT, out)
    hw.store_i64(args, _OUT_IS_F32, out_is_f32)
    hw.store_i64(args, _NUM_TOKENS, num_tokens)
    hw.store_i64(args, _IN_PADDED, depth)
    hw.store_i64(args, _OUT_FEATURES, out_features)
    hw.store_i64(args, _CHUNK_ROWS, chunk_rows)
    hw.store_i64(args, _KIND, kind)
    run(state, kernel, num_chunks)
