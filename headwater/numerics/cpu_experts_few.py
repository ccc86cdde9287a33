"""Routed experts for few tokens: an expert's weights are read once, for all its tokens.

Two kernels on the vector loops of ``cpu_linear``; activations between them stay float32:

    gate_up_few   an item is some rows of gate and up of one expert
    down_few      a chunk is some rows of the result: of every used expert in turn, added up
                  token by token, so that a token's experts are added in ascending order

A result's bits depend on its token only. Knows addresses and sizes only; the plan is of
``cpu_experts_sort``, called by ``cpu_experts.py``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics.cpu_elementwise import exp_f32
from headwater.numerics.cpu_experts_sort import NUM_USED, ORDER, STARTS, USED
from headwater.numerics.cpu_linear import BF16, INT8, dot_rows

_ZERO, _ONE = hw.f32(0), hw.f32(1)


@njit(nogil=True, error_model="numpy")
def _dot(
    kind: int, weights: int, scales: int, first: int, end: int, length: int,
    x: int, num_tokens: int, out: int, out_stride: int,
) -> None:  # fmt: skip
    """out[t, r - first] = weights[r] . x[t] for rows [first, end), with its scale."""
    if kind == INT8:
        for row in range(first, end, 4):
            w, o = weights + row * length, out + (row - first) * 4
            dot_rows(INT8, w, length, x, length, num_tokens, length, o, out_stride)
        for t in range(num_tokens):
            line = out + t * out_stride * 4
            for r in range(end - first):
                hw.store_f32(line, r, hw.load_f32(line, r) * hw.load_f32(scales, first + r))
    else:
        for row in range(first, end, 4):
            w, o = weights + row * length * 2, out + (row - first) * 4
            dot_rows(BF16, w, length * 2, x, length, num_tokens, length, o, out_stride)


@njit(nogil=True, error_model="numpy")
def _silu_mul_clamped(gates: int, ups: int, out: int, count: int, limit: float) -> None:
    for r in range(count):
        gate, up = hw.load_f32(gates, r), hw.load_f32(ups, r)
        # Written so that what is not a number stays so.
        gate = limit if gate > limit else gate
        up = limit if up > limit else up
        up = -limit if up < -limit else up
        hw.store_f32(out, r, gate / (_ONE + exp_f32(-gate)) * up)


def gate_up_few_kernel(args: int, chunk: int, thread: int) -> None:
    """inner[pair] = silu_mul_clamped of gate and up, for sorted pairs.

    args: plan, x (float32 [P, length]), weights [E, 2, inner, length], scales [E, 2, inner] or 0,
    kind, length, inner (columns, padded), out (float32 [P, inner]), rows_per_item,
    sums (float32 [threads, P, 2 rows_per_item]), num_pairs, num_chunks; real: limit.
    """
    plan, x = hw.load_i64(args, 0), hw.load_i64(args, 1)
    kind, length, inner = hw.load_i64(args, 4), hw.load_i64(args, 5), hw.load_i64(args, 6)
    rows = hw.load_i64(args, 8)
    sums = hw.load_i64(args, 9) + thread * hw.load_i64(args, 10) * 2 * rows * 4
    limit = np.float32(hw.load_f64(args, 14))
    starts, used = hw.load_i64(plan, STARTS), hw.load_i64(plan, USED)
    items_of_one = (inner + rows - 1) // rows
    num_items = hw.load_i64(plan, NUM_USED) * items_of_one
    for item in range(chunk, num_items, hw.load_i64(args, 11)):
        e = hw.load_i64(used, item // items_of_one)
        first = item % items_of_one * rows
        end = min(first + rows, inner)
        begin = hw.load_i64(starts, e)
        num_tokens = hw.load_i64(starts, e + 1) - begin
        gate = hw.load_i64(args, 2) + 2 * e * inner * length * (1 if kind == INT8 else 2)
        up = gate + inner * length * (1 if kind == INT8 else 2)
        scale = hw.load_i64(args, 3) + 2 * e * inner * 4
        tokens = x + begin * length * 4
        _dot(kind, gate, scale, first, end, length, tokens, num_tokens, sums, 2 * rows)
        _dot(
            kind, up, scale + inner * 4, first, end, length, tokens, num_tokens,
            sums + rows * 4, 2 * rows,
        )  # fmt: skip
        for t in range(num_tokens):
            line = sums + t * 2 * rows * 4
            target = hw.load_i64(args, 7) + ((begin + t) * inner + first) * 4
            _silu_mul_clamped(line, line + rows * 4, target, end - first, limit)


def down_few_kernel(args: int, chunk: int, thread: int) -> None:
    """out[token] = sum over its experts of weight * down(inner), for one chunk of columns.

    args: plan, inner (float32 [P, length]), weights [E, columns, length], scales [E, columns]
    or 0, kind, length, columns (padded), shares (float32 [T, k]), num_chosen,
    out (bfloat16 [T, features]), features, num_tokens, columns_per_chunk,
    sums (float32 [threads, T + P, columns_per_chunk]).
    """
    plan, inner = hw.load_i64(args, 0), hw.load_i64(args, 1)
    kind, length, columns = hw.load_i64(args, 4), hw.load_i64(args, 5), hw.load_i64(args, 6)
    shares, num_chosen = hw.load_i64(args, 7), hw.load_i64(args, 8)
    features, num_tokens = hw.load_i64(args, 10), hw.load_i64(args, 11)
    width = hw.load_i64(args, 12)
    totals = hw.load_i64(args, 13) + thread * num_tokens * (1 + num_chosen) * width * 4
    sums = totals + num_tokens * width * 4
    starts, used = hw.load_i64(plan, STARTS), hw.load_i64(plan, USED)
    order = hw.load_i64(plan, ORDER)
    first = chunk * width
    end = min(first + width, columns)
    for i in range(num_tokens * width):
        hw.store_f32(totals, i, _ZERO)
    for number in range(hw.load_i64(plan, NUM_USED)):
        e = hw.load_i64(used, number)
        begin = hw.load_i64(starts, e)
        count = hw.load_i64(starts, e + 1) - begin
        weights = hw.load_i64(args, 2) + e * columns * length * (1 if kind == INT8 else 2)
        scales = hw.load_i64(args, 3) + e * columns * 4
        _dot(
            kind, weights, scales, first, end, length, inner + begin * length * 4, count,
            sums, width,
        )  # fmt: skip
        for t in range(count):
            pair = hw.load_i64(order, begin + t)
            share = hw.load_f32(shares, pair)
            total, line = totals + pair // num_chosen * width * 4, sums + t * width * 4
            for r in range(end - first):
                hw.store_f32(total, r, hw.load_f32(total, r) + share * hw.load_f32(line, r))
    for token in range(num_tokens):
        target = hw.load_i64(args, 9) + (token * features + first) * 2
        for r in range(min(end, features) - first):
            hw.store_bf16(target, r, hw.load_f32(totals + token * width * 4, r))
