"""Matrix kernels of the CPU path for few rows: weights are read once, whatever the rows.

Bound by memory for few tokens, by arithmetic from about eight. Many tokens go to
the GEMM library instead (``cpu.py`` decides). Knows addresses and sizes only.

Weights are [out, in] row-major, both padded with zeros (to PAD_OUT and PAD_IN), so
that no vector loop has a tail. x comes as float32 with the same padded ``in``.
A result's bits depend on its token and its weight row, not on the other tokens.
"""

from __future__ import annotations

import numpy as np
from numba import literally, njit

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics import cpu_loops as loops
from headwater.numerics.cpu_team import ARGS, compiled, run

BF16, INT8, F32 = (int(kind) for kind in hw.Kind)
PAD_IN = 32
PAD_OUT = 4
_ZERO = hw.f32(0)
# Tiles of 8 tokens pay where 16 sums fit the registers and 8 rows of x the first cache.
_WIDE_TILE_MAX_IN = 1_024 if hw.LANES == 16 else 0


@njit(nogil=True, error_model="numpy")
def dot_rows(
    kind: int, weights: int, stride_bytes: int,
    x: int, x_stride: int, num_tokens: int, length: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """out[t, r] = weights[r] . x[t] for 4 rows and all tokens. ``kind`` is a literal.

    x and out are float32; ``length`` is a multiple of hw.LANES.
    """
    literally(kind)
    done = 0
    while done < num_tokens:
        left = num_tokens - done
        x_t, out_t = x + done * x_stride * 4, out + done * out_stride * 4
        if left >= 8 and length <= _WIDE_TILE_MAX_IN:
            low, high = weights, weights + 2 * stride_bytes
            loops.dot_tile(kind, 2, 8, low, stride_bytes, x_t, x_stride, length, out_t, out_stride)
            loops.dot_tile(
                kind, 2, 8, high, stride_bytes, x_t, x_stride, length, out_t + 8, out_stride
            )
            done += 8
        elif left >= 4:
            loops.dot_tile(
                kind, 4, 4, weights, stride_bytes, x_t, x_stride, length, out_t, out_stride
            )
            done += 4
        elif left == 3:
            loops.dot_tile(
                kind, 4, 3, weights, stride_bytes, x_t, x_stride, length, out_t, out_stride
            )
            done += 3
        elif left == 2:
            loops.dot_tile(
                kind, 4, 2, weights, stride_bytes, x_t, x_stride, length, out_t, out_stride
            )
            done += 2
        else:
            loops.dot_tile(
                kind, 4, 1, weights, stride_bytes, x_t, x_stride, length, out_t, out_stride
            )
            done += 1


def linear_kernel(args: int, chunk: int, thread: int) -> None:
    """out = (x @ weights.T) * scales + bias, for one chunk of output columns.

    args: x, weights, scales or 0, bias or 0, sums (float32 [threads, tokens, chunk_rows]),
    out, out_is_f32, num_tokens, in_padded, out_features, chunk_rows, kind.
    """
    x, weights = hw.load_i64(args, 0), hw.load_i64(args, 1)
    scales, bias = hw.load_i64(args, 2), hw.load_i64(args, 3)
    out, out_is_f32 = hw.load_i64(args, 5), hw.load_i64(args, 6)
    num_tokens, length = hw.load_i64(args, 7), hw.load_i64(args, 8)
    out_features, chunk_rows = hw.load_i64(args, 9), hw.load_i64(args, 10)
    kind = hw.load_i64(args, 11)
    sums = hw.load_i64(args, 4) + thread * num_tokens * chunk_rows * 4
    begin = chunk * chunk_rows
    end = min(begin + chunk_rows, out_features)
    if kind == INT8:
        for row in range(begin, end, 4):
            w, s = weights + row * length, sums + (row - begin) * 4
            dot_rows(INT8, w, length, x, length, num_tokens, length, s, chunk_rows)
    else:
        for row in range(begin, end, 4):
            w, s = weights + row * length * 2, sums + (row - begin) * 4
            dot_rows(BF16, w, length * 2, x, length, num_tokens, length, s, chunk_rows)
    for token in range(num_tokens):
        s = sums + token * chunk_rows * 4
        if scales != 0:
            for i in range(end - begin):
                hw.store_f32(s, i, hw.load_f32(s, i) * hw.load_f32(scales, begin + i))
        if bias != 0:
            for i in range(end - begin):
                hw.store_f32(s, i, hw.load_f32(s, i) + hw.load_f32(bias, begin + i))
        target = token * out_features + begin
        if out_is_f32 != 0:
            for i in range(end - begin):
                hw.store_f32(out, target + i, hw.load_f32(s, i))
        else:
            for i in range(end - begin):
                hw.store_bf16(out, target + i, hw.load_f32(s, i))


@compiled
def linear_few_rows(
    state: int, kernel: int, num_chunks: int,
    x: int, x_stride: int, x_wide: int, in_features: int, in_padded: int,
    weights: int, scales: int, bias: int, sums: int, out: int, out_is_f32: int,
    num_tokens: int, out_features: int, chunk_rows: int, kind: int,
) -> None:  # fmt: skip
    """Widen bfloat16 x [num_tokens, in] to ``x_wide`` and run ``linear_kernel`` over it."""
    for token in range(num_tokens):
        source, target = x + token * x_stride * 2, x_wide + token * in_padded * 4
        for i in range(in_features):
            hw.store_f32(target, i, hw.load_bf16(source, i))
        for i in range(in_features, in_padded):
            hw.store_f32(target, i, _ZERO)
    args = state + ARGS
    hw.store_i64(args, 0, x_wide)
    hw.store_i64(args, 1, weights)
    hw.store_i64(args, 2, scales)
    hw.store_i64(args, 3, bias)
    hw.store_i64(args, 4, sums)
    hw.store_i64(args, 5, out)
    hw.store_i64(args, 6, out_is_f32)
    hw.store_i64(args, 7, num_tokens)
    hw.store_i64(args, 8, in_padded)
    hw.store_i64(args, 9, out_features)
    hw.store_i64(args, 10, chunk_rows)
    hw.store_i64(args, 11, kind)
    run(state, kernel, num_chunks)


def dequantise_kernel(args: int, chunk: int, thread: int) -> None:
    """int8 rows times their scale to bfloat16, one chunk of rows.

    args: weights, scales, out, in_padded, num_rows, rows_per_chunk.
    """
    weights, scales, out = hw.load_i64(args, 0), hw.load_i64(args, 1), hw.load_i64(args, 2)
    length, num_rows = hw.load_i64(args, 3), hw.load_i64(args, 4)
    rows_per_chunk = hw.load_i64(args, 5)
    begin = chunk * rows_per_chunk
    for row in range(begin, min(begin + rows_per_chunk, num_rows)):
        scale = hw.load_f32(scales, row)
        source, target = weights + row * length, out + row * length * 2
        for i in range(length):
            hw.store_bf16(target, i, np.float32(hw.load_i8(source, i)) * scale)
