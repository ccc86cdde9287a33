"""Products of many tokens with their experts' (or groups') weights on plain vectors.

Computed transposed, as ``cpu_chunk_attention`` does: tokens lie along the lanes, weights are
read where they lie, and both products are of pairs of bfloat16 (``cpu_loops.pair_tile``):

    lines of a block   [in / 2, lanes] pairs of the block's tokens    gather_kernel
    inner              [F / 2, lanes] pairs, silu(gate) * up          gate_up_kernel
    parts              float32 [P, out], a row for each pair          product_kernel
    result             weight * part, summed over a token's pairs     combine_kernel

Gate and up of a tile of rows leave their results as the pairs that the next product reads,
so that nothing is transposed but the parts. An item of work is (block, some rows); a block's
neighbours of the same expert come next, while its rows are in the cache. A result's bits depend
on its token only. Knows addresses and sizes only; the plan is of ``cpu_experts_sort``, called
by ``cpu_experts.py``.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics import cpu_vector as vec
from headwater.numerics.cpu_experts_sort import (
    BLOCK_WORDS,
    BLOCKS,
    COUNT,
    EXPERT,
    FIRST,
    FIRSTS,
    LANES_BEFORE,
    NARROW_LANES,
    NUM_BLOCKS,
    ORDER,
    WIDE_LANES,
    WIDE_VECTORS,
)
from headwater.numerics.cpu_intrinsics import (
    F32,
    I32,
    I64,
    Context,
    Type,
    Typed,
    Typing,
    Values,
    element,
)
from headwater.numerics.cpu_linear import INT8
from headwater.numerics.cpu_loops import pair_tile
from headwater.numerics.cpu_team import compiled

# Rows of a tile of sums: with the operands it just fits the machine's registers.
_WIDE_ROWS, _NARROW_ROWS = (8, 16) if hw.LANES == 16 else (4, 8)
ROWS = _NARROW_ROWS  # what numbers of rows are a multiple of
_VECTOR_BYTES = hw.LANES * 4
_LINE_BYTES = WIDE_LANES * 4
_ZERO, _ONE = hw.f32(0), hw.f32(1)
_MINUS_LOG2_E = hw.f32(-1.4426950408889634)


@compiled
def tile_scratch_bytes(length: int) -> int:
    """Scratch of one thread: a tile's rows of int8 weights in bfloat16; sums of two tiles, the
    second of which may be where a block's parts go. A multiple of a cache line."""
    return _NARROW_ROWS * length * 2 + 2 * _NARROW_ROWS * _LINE_BYTES


_REALS = ir.VectorType(F32, hw.LANES)


def _turn(builder: ir.IRBuilder, lines: Values) -> Values:
    """Lines of lanes, read one after the other, become lanes of lines; their number is a power
    of two. A round of interleaving the first half of the lines with the second turns the bits
    of an element's index (line, lane) left by one."""
    rows, half = len(lines), hw.LANES // 2
    for _ in range(rows.bit_length() - 1):
        mixed = []
        for low, high in zip(lines[: rows // 2], lines[rows // 2 :], strict=True):
            for first in (0, half):
                places = [i for j in range(half) for i in (first + j, hw.LANES + first + j)]
                mask = ir.Constant(ir.VectorType(I32, hw.LANES), places)
                mixed.append(builder.shuffle_vector(low, high, mask))
        lines = mixed
    return lines


@intrinsic(prefer_literal=True)
def _scatter_rows(
    _ctx: Typing, num_rows: Type, source: Type, line_bytes: Type, targets: Type, offset: Type
) -> Typed:
    """Lane l of ``num_rows`` lines to num_rows neighbours at targets[l] + offset, float32.
    ``num_rows``, a literal, is a power of two up to LANES."""
    rows = num_rows.literal_value

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        source, line_bytes, targets, offset = args[1:]
        lines = []
        for r in range(rows):
            address = builder.add(source, builder.mul(line_bytes, I64(r)))
            lines.append(builder.load(builder.inttoptr(address, _REALS.as_pointer()), align=4))
        lines = _turn(builder, lines)
        per_line = hw.LANES // rows
        for lane in range(hw.LANES):
            first = lane % per_line * rows
            mask = ir.Constant(ir.VectorType(I32, rows), list(range(first, first + rows)))
            line = lines[lane // per_line]
            column = builder.shuffle_vector(line, line, mask)
            place = builder.load(element(builder, targets, I64(lane), I64))
            target = builder.inttoptr(
                builder.add(place, offset), ir.VectorType(F32, rows).as_pointer()
            )
            builder.store(column, target, align=4)
        return ctx.get_dummy_value()

    return types.void(num_rows, *[types.int64] * 4), lower


@intrinsic
def _gather_rows(
    _ctx: Typing, sources: Type, offset: Type, target: Type, line_bytes: Type
) -> Typed:
    """LANES words at sources[l] + offset to lane l of LANES lines."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        sources, offset, target, line_bytes = args
        rows = []
        for lane in range(hw.LANES):
            address = builder.add(builder.load(element(builder, sources, I64(lane), I64)), offset)
            rows.append(builder.load(builder.inttoptr(address, _REALS.as_pointer()), align=2))
        for r, line in enumerate(_turn(builder, rows)):
            address = builder.add(target, builder.mul(line_bytes, I64(r)))
            builder.store(line, builder.inttoptr(address, _REALS.as_pointer()), align=4)
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 4), lower


@njit(nogil=True, error_model="numpy")
def _lanes_of(block: int) -> int:
    return NARROW_LANES if hw.load_i64(block, COUNT) <= NARROW_LANES else WIDE_LANES


@njit(nogil=True, error_model="numpy")
def _block(plan: int, number: int) -> int:
    return hw.load_i64(plan, BLOCKS) + number * 8 * BLOCK_WORDS


@njit(nogil=True, error_model="numpy")
def _pair_of(plan: int, block: int, lane: int) -> int:
    """The pair in ``lane``; lanes past the last are like it."""
    place = hw.load_i64(block, FIRST) + min(lane, hw.load_i64(block, COUNT) - 1)
    return hw.load_i64(hw.load_i64(plan, ORDER), place)


def gather_kernel(args: int, chunk: int, thread: int) -> None:
    """Tokens of blocks to lines of pairs.

    args: plan, x (bfloat16), x_stride (elements), num_chosen (pairs that share a row of x),
    features, length (features padded), lines, scratch, num_chunks.
    """
    plan, x, stride = hw.load_i64(args, 0), hw.load_i64(args, 1), hw.load_i64(args, 2)
    num_chosen, features = hw.load_i64(args, 3), hw.load_i64(args, 4)
    num_pairs = hw.load_i64(args, 5) // 2
    sources = hw.load_i64(args, 7) + thread * 8 * WIDE_LANES
    for number in range(chunk, hw.load_i64(plan, NUM_BLOCKS), hw.load_i64(args, 8)):
        block = _block(plan, number)
        lanes = _lanes_of(block)
        lines = hw.load_i64(args, 6) + hw.load_i64(block, LANES_BEFORE) * num_pairs * 4
        for lane in range(lanes):
            row = _pair_of(plan, block, lane) // num_chosen
            hw.store_i64(sources, lane, x + row * stride * 2)
        whole = features // (2 * hw.LANES) * hw.LANES
        for pair in range(0, whole, hw.LANES):
            for lane in range(0, lanes, hw.LANES):
                target = lines + (pair * lanes + lane) * 4
                _gather_rows(sources + lane * 8, pair * 4, target, lanes * 4)
        for lane in range(lanes):
            source = hw.load_i64(sources, lane)
            for pair in range(whole, num_pairs):
                word = np.int32(0)
                if 2 * pair + 1 < features:
                    word = hw.load_i32(source, pair)
                elif 2 * pair < features:
                    word = np.int32(hw.load_i16(source, 2 * pair)) & np.int32(0xFFFF)
                hw.store_i32(lines, pair * lanes + lane, word)


@njit(nogil=True, error_model="numpy")
def _multiply(
    kind: int, weights: int, length: int, lanes: int, lines: int, out: int, wide: int
) -> None:
    """out [rows, lanes] = a tile's rows of weights times a block's lines; ``wide`` has room
    for the rows in bfloat16."""
    rows = _WIDE_ROWS if lanes == WIDE_LANES else _NARROW_ROWS
    if kind == INT8:
        # Whole numbers up to 127 are exact in bfloat16; the scale comes at the end.
        for i in range(rows * length):
            hw.store_exact_bf16(wide, i, np.float32(hw.load_i8(weights, i)))
        weights = wide
    if lanes == WIDE_LANES:
        pair_tile(_WIDE_ROWS, WIDE_VECTORS, weights, length * 2, 4, lines, length // 2, out, 0)
    else:
        pair_tile(_NARROW_ROWS, 1, weights, length * 2, 4, lines, length // 2, out, 0)


@njit(nogil=True, error_model="numpy")
def _scale(sums: int, rows: int, lanes: int, scales: int, first: int) -> None:
    for r in range(rows):
        factor = hw.load_f32(scales, first + r)
        for i in range(r * lanes, (r + 1) * lanes):
            hw.store_f32(sums, i, hw.load_f32(sums, i) * factor)


@njit(nogil=True, error_model="numpy")
def _silu_mul_clamped(gate, up, limit, lowest):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  (numba infers the vectors)
    """Of vectors; what is not a number stays so."""
    zero, one = vec.spread(_ZERO), vec.spread(_ONE)
    gate, up = vec.smaller(limit, gate), vec.larger(lowest, vec.smaller(limit, up))
    # 1 / (1 + exp(-gate)) with an exponent that is never positive.
    shrunk = vec.exp2(vec.mul(vec.larger(gate, vec.sub(zero, gate)), vec.spread(_MINUS_LOG2_E)))
    share = vec.div(vec.keep_ordered(one, zero, gate, shrunk), vec.add(one, shrunk))
    return vec.mul(vec.mul(gate, share), up)


@njit(nogil=True, error_model="numpy")
def _item(plan: int, item: int, num_parts: int) -> tuple[int, int]:
    """(block, part of the rows): an expert's blocks one after the other, then its next part."""
    expert = hw.load_i64(_block(plan, item // num_parts), EXPERT)
    firsts = hw.load_i64(plan, FIRSTS)
    first = hw.load_i64(firsts, expert)
    num_blocks = hw.load_i64(firsts, expert + 1) - first
    number = item - first * num_parts
    return _block(plan, first + number % num_blocks), number // num_blocks


def gate_up_kernel(args: int, chunk: int, thread: int) -> None:
    """Lines of inner numbers of the items of one chunk.

    args: plan, lines, weights [E, 2, inner, length], scales [E, 2, inner] or 0, kind, length,
    inner, out (lines), rows_per_part, scratch, num_chunks; real: limit.
    """
    plan, kind = hw.load_i64(args, 0), hw.load_i64(args, 4)
    length, inner = hw.load_i64(args, 5), hw.load_i64(args, 6)
    part_rows = hw.load_i64(args, 8)
    wide = hw.load_i64(args, 9) + thread * tile_scratch_bytes(length)
    gates = wide + _NARROW_ROWS * length * 2
    ups = gates + _NARROW_ROWS * _LINE_BYTES
    limit = vec.spread(np.float32(hw.load_f64(args, 14)))
    lowest = vec.spread(np.float32(-hw.load_f64(args, 14)))
    row_bytes = length if kind == INT8 else length * 2
    num_parts = (inner + part_rows - 1) // part_rows
    num_items = hw.load_i64(plan, NUM_BLOCKS) * num_parts
    for item in range(chunk, num_items, hw.load_i64(args, 10)):
        block, part = _item(plan, item, num_parts)
        expert, before = hw.load_i64(block, EXPERT), hw.load_i64(block, LANES_BEFORE)
        lanes = _lanes_of(block)
        rows = _WIDE_ROWS if lanes == WIDE_LANES else _NARROW_ROWS
        lines = hw.load_i64(args, 1) + before * length * 2
        out = hw.load_i64(args, 7) + before * inner * 2
        gate = hw.load_i64(args, 2) + 2 * expert * inner * row_bytes
        up = gate + inner * row_bytes
        scales = hw.load_i64(args, 3) + 2 * expert * inner * 4
        for first in range(part * part_rows, min((part + 1) * part_rows, inner), rows):
            _multiply(kind, gate + first * row_bytes, length, lanes, lines, gates, wide)
            _multiply(kind, up + first * row_bytes, length, lanes, lines, ups, wide)
            if kind == INT8:
                _scale(gates, rows, lanes, scales, first)
                _scale(ups, rows, lanes, scales + inner * 4, first)
            for r in range(0, rows, 2):
                for i in range(r * lanes * 4, (r + 1) * lanes * 4, _VECTOR_BYTES):
                    next_i = i + lanes * 4
                    low = _silu_mul_clamped(vec.load(gates + i), vec.load(ups + i), limit, lowest)
                    high = _silu_mul_clamped(
                        vec.load(gates + next_i), vec.load(ups + next_i), limit, lowest
                    )
                    target = out + (first + r) * lanes * 2 + (i - r * lanes * 4)
                    vec.store_bf16_pairs(target, low, high)


def product_kernel(args: int, chunk: int, thread: int) -> None:
    """parts[pair] = weights of its expert times the pair's lane, for the items of one chunk.

    args: plan, lines, weights [E, features, length], scales [E, features] or 0, kind, length,
    features, parts (float32 [P, features]), rows_per_part, scratch, num_chunks.
    """
    plan, kind = hw.load_i64(args, 0), hw.load_i64(args, 4)
    length, features = hw.load_i64(args, 5), hw.load_i64(args, 6)
    part_rows = hw.load_i64(args, 8)
    wide = hw.load_i64(args, 9) + thread * tile_scratch_bytes(length)
    sums = wide + _NARROW_ROWS * length * 2
    targets = sums + _NARROW_ROWS * _LINE_BYTES
    row_bytes = length if kind == INT8 else length * 2
    num_parts = (features + part_rows - 1) // part_rows
    num_items = hw.load_i64(plan, NUM_BLOCKS) * num_parts
    for item in range(chunk, num_items, hw.load_i64(args, 10)):
        block, part = _item(plan, item, num_parts)
        expert, lanes = hw.load_i64(block, EXPERT), _lanes_of(block)
        rows = _WIDE_ROWS if lanes == WIDE_LANES else _NARROW_ROWS
        lines = hw.load_i64(args, 1) + hw.load_i64(block, LANES_BEFORE) * length * 2
        weights = hw.load_i64(args, 2) + expert * features * row_bytes
        scales = hw.load_i64(args, 3) + expert * features * 4
        for lane in range(lanes):
            row = hw.load_i64(args, 7) + _pair_of(plan, block, lane) * features * 4
            hw.store_i64(targets, lane, row)
        for first in range(part * part_rows, min((part + 1) * part_rows, features), rows):
            _multiply(kind, weights + first * row_bytes, length, lanes, lines, sums, wide)
            if kind == INT8:
                _scale(sums, rows, lanes, scales, first)
            if lanes == WIDE_LANES:
                for lane in range(0, WIDE_LANES, hw.LANES):
                    _scatter_rows(
                        _WIDE_ROWS, sums + lane * 4, WIDE_LANES * 4, targets + lane * 8, first * 4
                    )
            else:
                _scatter_rows(_NARROW_ROWS, sums, NARROW_LANES * 4, targets, first * 4)


def combine_kernel(args: int, chunk: int, thread: int) -> None:
    """out[row] = sum over its pairs, in order, of share * part, rounded once.

    args: parts (float32 [T * k, stride], overwritten), stride, shares (float32 [T * k]) or 0 for
    1, num_chosen (k), out (bfloat16 [T, features]), features, num_rows (T), rows_per_chunk.
    """
    stride, shares = hw.load_i64(args, 1), hw.load_i64(args, 2)
    num_chosen, features = hw.load_i64(args, 3), hw.load_i64(args, 5)
    begin = chunk * hw.load_i64(args, 7)
    for row in range(begin, min(begin + hw.load_i64(args, 7), hw.load_i64(args, 6))):
        parts = hw.load_i64(args, 0) + row * num_chosen * stride * 4
        if shares != 0:
            for i in range(0, stride * 4, _VECTOR_BYTES):
                total = vec.spread(_ZERO)
                for n in range(num_chosen):
                    share = vec.spread(hw.load_f32(shares, row * num_chosen + n))
                    total = vec.fma(share, vec.load(parts + n * stride * 4 + i), total)
                vec.store(parts + i, total)
        target = hw.load_i64(args, 4) + row * features * 2
        for i in range(features):
            hw.store_bf16(target, i, hw.load_f32(parts, i))
