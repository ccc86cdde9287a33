"""Attention over rows that are keys and values, for sequences with few queries (decode, drafts).

One item of work is (token, span): all heads over one span of SPAN_ROWS rows, of the window
first, then of the closed rows. A second pass joins a token's spans and its sinks. Spans are
cut at fixed places, so a token's bits depend on neither the batch nor the threads, and a
long context is spread over the team even for one sequence.

A row is read once for all heads. Both products are of pairs of bfloat16
(``cpu_loops.pair_tile``), with heads along the lanes for the scores and entries of D for
the values:

    S^T [rows, heads] = rows [rows, D] @ Q^T [D, heads]
    O [heads, D]      = P [heads, rows] @ rows [rows, D], rows in pairs made for each span

    partial of an item, float32:
        [heads, D]        sum of exp(score - max) * row, in columns of MIX_COLUMNS
        [2, heads]        max, sum of exp(score - max)
    where heads are padded to lanes and D to MIX_COLUMNS.

Blocks may hold anything, also what is not a number, in rows that a token does not see.
Knows addresses and sizes only. Used by ``cpu_rows.py``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics import cpu_vector as vec
from headwater.numerics.cpu_attention import SPLIT_TOKENS, ask_for, row_of
from headwater.numerics.cpu_loops import pair_tile
from headwater.numerics.cpu_team import ARGS, MAX_CHUNKS, compiled, run

SPAN_ROWS = SPLIT_TOKENS
# Rows, or heads, of a tile of sums.
TILE_ROWS = 8 if hw.LANES == 16 else 4
_MIX_VECTORS = 2
MIX_COLUMNS = _MIX_VECTORS * hw.LANES
_LINE_BYTES = hw.LANES * 4
_LOWEST = hw.f32(-3.0e38)
_ZERO, _ONE = hw.f32(0), hw.f32(1)
_LOG2_E = hw.f32(1.4426950408889634)
# Joining up to this many tokens takes less time than sharing the work.
_JOIN_ALONE = 2

# The arguments of both kernels, in the order of ``attend_few_rows``.
(
    _Q, _Q_STRIDE, _TABLES, _TABLE_STRIDE, _POSITIONS, _ROW_STARTS, _WINDOW_STARTS, _NUM_ROWS,
    _SCRATCH, _PARTIALS, _OUT, _SINKS, _NUM_HEADS, _DIM, _DIM_PADDED, _BLOCK_TOKENS, _WINDOW,
    _CLOSED, _RATIO, _WINDOW_SPANS, _NUM_SPANS, _FIRST_TOKEN, _NUM_TOKENS, _ITEMS_PER_CHUNK,
    _WINDOW_TOKENS, _SCALE,
) = range(26)  # fmt: skip


@compiled
def partial_floats(num_heads: int, dim_padded: int) -> int:
    lanes = (num_heads + hw.LANES - 1) // hw.LANES * hw.LANES
    return lanes * (dim_padded + 2)


@compiled
def few_scratch_bytes(dim_padded: int) -> int:
    """Scratch of one thread: Q^T and P in pairs, S^T, a column of results; rows in pairs, and
    one row of zeros. A multiple of a cache line."""
    lines = dim_padded // 2 + SPAN_ROWS // 2 + SPAN_ROWS + 4
    return lines * _LINE_BYTES + (SPAN_ROWS + 2) * dim_padded * 2


@njit(nogil=True, error_model="numpy")
def _first_seen(args: int, row: int, position: int) -> int:
    """The first position in the window of the query at ``position``."""
    first = max(0, position - hw.load_i64(args, _WINDOW_TOKENS) + 1)
    window_starts = hw.load_i64(args, _WINDOW_STARTS)
    if window_starts != 0:
        first = max(first, np.int64(hw.load_i32(window_starts, row)))
    return first


@njit(nogil=True, error_model="numpy")
def _place(table: int, number: int, block_rows: int, row_bytes: int) -> int:
    """Byte offset in the blocks of row ``number`` of a sequence."""
    block = hw.load_i32(table, number // block_rows)
    return (block * block_rows + number % block_rows) * row_bytes


@njit(nogil=True, error_model="numpy")
def _load_queries(args: int, token: int, first_head: int, queries: int) -> None:
    """Queries of LANES heads to lines of pairs of D; zeros past the last head."""
    num_pairs = hw.load_i64(args, _DIM) // 2
    start = token * hw.load_i64(args, _Q_STRIDE) + first_head * num_pairs * 2
    source = hw.load_i64(args, _Q) + start * 2
    for i in range(hw.LANES):
        if first_head + i < hw.load_i64(args, _NUM_HEADS):
            for pair in range(num_pairs):
                word = hw.load_i32(source, i * num_pairs + pair)
                hw.store_i32(queries, pair * hw.LANES + i, word)
        else:
            for pair in range(num_pairs):
                hw.store_i32(queries, pair * hw.LANES + i, np.int32(0))


@njit(nogil=True, error_model="numpy")
def _pair_rows(
    rows: int, table: int, block_rows: int, dim_padded: int, begin: int, end: int,
    first: int, last: int, pairs: int, zeros: int,
) -> None:  # fmt: skip
    """Rows [first, last), whole tiles, to columns of [SPAN_ROWS / 2 pairs, MIX_COLUMNS]; zeros
    for what is not in [begin, end)."""
    place = rows
    for number in range(first, last, 2):
        if number % TILE_ROWS == 0:
            place = rows + _place(table, number, block_rows, dim_padded * 2)
        low = place + number % TILE_ROWS * dim_padded * 2
        high = low + dim_padded * 2
        if number < begin or number >= end:
            low = zeros
        if number + 1 < begin or number + 1 >= end:
            high = zeros
        target = pairs + (number - first) // 2 * _MIX_VECTORS * _LINE_BYTES
        for d in range(0, dim_padded, MIX_COLUMNS):
            for n in range(_MIX_VECTORS):
                column = (d + n * hw.LANES) * 2
                vec.pair_bf16(target + n * _LINE_BYTES, low + column, high + column)
            target += SPAN_ROWS // 2 * _MIX_VECTORS * _LINE_BYTES


@njit(nogil=True, error_model="numpy")
def _softmax(
    scores: int, num_rows: int, factor: float, shares: int, highest: int, total: int
) -> None:
    """Shares of LANES heads in pairs of rows, their maximum and their sum."""
    most = vec.spread(_LOWEST)
    for number in range(num_rows):
        most = vec.larger(most, vec.load(scores + number * _LINE_BYTES))
    scale, offset = vec.spread(factor), vec.mul(most, vec.spread(-factor))
    added = vec.spread(_ZERO)
    for pair in range(num_rows // 2):
        line = scores + 2 * pair * _LINE_BYTES
        low = vec.exp2(vec.fma(vec.load(line), scale, offset))
        high = vec.exp2(vec.fma(vec.load(line + _LINE_BYTES), scale, offset))
        added = vec.add(added, vec.add(low, high))
        vec.store_bf16_pairs(shares + pair * _LINE_BYTES, low, high)
    vec.store(highest, most)
    vec.store(total, added)


@njit(nogil=True, error_model="numpy")
def _attend_span(
    args: int, token: int, table: int, rows: int, block_rows: int, begin: int, end: int,
    scratch: int, partial: int,
) -> None:  # fmt: skip
    """The partial result of all heads over rows [begin, end), which are of one span."""
    num_heads, dim = hw.load_i64(args, _NUM_HEADS), hw.load_i64(args, _DIM)
    dim_padded = hw.load_i64(args, _DIM_PADDED)
    row_bytes = dim_padded * 2
    factor = np.float32(hw.load_f64(args, _SCALE)) * _LOG2_E
    queries = scratch
    shares = queries + dim_padded // 2 * _LINE_BYTES
    scores = shares + SPAN_ROWS // 2 * _LINE_BYTES
    pairs = scores + (SPAN_ROWS + 4) * _LINE_BYTES
    zeros = pairs + SPAN_ROWS * row_bytes
    for i in range(dim_padded // 2):
        hw.store_i32(zeros, i, np.int32(0))
    # Whole tiles lie in one block each.
    first = begin // TILE_ROWS * TILE_ROWS
    last = (end + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    for number in range(first, last, TILE_ROWS):
        ask_for(rows + _place(table, number, block_rows, row_bytes), TILE_ROWS * row_bytes)
    _pair_rows(rows, table, block_rows, dim_padded, begin, end, first, last, pairs, zeros)
    lanes = (num_heads + hw.LANES - 1) // hw.LANES * hw.LANES
    ends = partial + lanes * dim_padded * 4
    for head in range(0, num_heads, hw.LANES):
        _load_queries(args, token, head, queries)
        for number in range(first, last, TILE_ROWS):
            tile = rows + _place(table, number, block_rows, row_bytes)
            line = scores + (number - first) * _LINE_BYTES
            pair_tile(TILE_ROWS, 1, tile, row_bytes, 4, queries, dim // 2, line, 0)
        for number in range(first, begin):
            vec.store(scores + (number - first) * _LINE_BYTES, vec.spread(_LOWEST))
        for number in range(end, last):
            vec.store(scores + (number - first) * _LINE_BYTES, vec.spread(_LOWEST))
        _softmax(scores, last - first, factor, shares, ends + head * 4, ends + (lanes + head) * 4)
        for row in range(head, min(head + hw.LANES, num_heads), TILE_ROWS):
            column = pairs
            target = partial + row * dim_padded * 4
            for _ in range(0, dim_padded, MIX_COLUMNS):
                pair_tile(
                    TILE_ROWS, _MIX_VECTORS, shares + (row - head) * 4, 4, _LINE_BYTES, column,
                    (last - first) // 2, target, 0,
                )  # fmt: skip
                column += SPAN_ROWS // 2 * _MIX_VECTORS * _LINE_BYTES
                target += TILE_ROWS * MIX_COLUMNS * 4


def attend_rows_span_kernel(args: int, chunk: int, thread: int) -> None:
    """Partial results of the items of one chunk."""
    num_spans, window_spans = hw.load_i64(args, _NUM_SPANS), hw.load_i64(args, _WINDOW_SPANS)
    dim_padded = hw.load_i64(args, _DIM_PADDED)
    scratch = hw.load_i64(args, _SCRATCH) + thread * few_scratch_bytes(dim_padded)
    size = partial_floats(hw.load_i64(args, _NUM_HEADS), dim_padded) * 4
    block_tokens, ratio = hw.load_i64(args, _BLOCK_TOKENS), hw.load_i64(args, _RATIO)
    per_chunk = hw.load_i64(args, _ITEMS_PER_CHUNK)
    num_items = hw.load_i64(args, _NUM_TOKENS) * num_spans
    for item in range(chunk * per_chunk, min((chunk + 1) * per_chunk, num_items)):
        span = item % num_spans
        token = hw.load_i64(args, _FIRST_TOKEN) + item // num_spans
        position = np.int64(hw.load_i32(hw.load_i64(args, _POSITIONS), token))
        row = row_of(token, hw.load_i64(args, _ROW_STARTS), hw.load_i64(args, _NUM_ROWS))
        table = hw.load_i64(args, _TABLES) + row * hw.load_i64(args, _TABLE_STRIDE) * 4
        partial = hw.load_i64(args, _PARTIALS) + item * size
        # One call for both, so that there is one copy of its code.
        rows, block_rows = hw.load_i64(args, _WINDOW), block_tokens
        first, end = _first_seen(args, row, position), position + 1
        begin = (first // SPAN_ROWS + span) * SPAN_ROWS
        if span >= window_spans:
            rows, block_rows = hw.load_i64(args, _CLOSED), block_tokens // ratio
            first, end = 0, (position + 1) // ratio
            begin = (span - window_spans) * SPAN_ROWS
        end = min(begin + SPAN_ROWS, end)
        begin = max(begin, first)
        if begin < end:
            _attend_span(args, token, table, rows, block_rows, begin, end, scratch, partial)


@njit(nogil=True, error_model="numpy")
def _join_lanes(
    args: int, first: int, size: int, used_window: int, used: int, head: int, scratch: int
) -> None:
    """For LANES heads: the partials' maxima become what each is to be multiplied with."""
    num_heads, dim_padded = hw.load_i64(args, _NUM_HEADS), hw.load_i64(args, _DIM_PADDED)
    window_spans = hw.load_i64(args, _WINDOW_SPANS)
    lanes = (num_heads + hw.LANES - 1) // hw.LANES * hw.LANES
    ends = first + (lanes * dim_padded + head) * 4
    scale = np.float32(hw.load_f64(args, _SCALE))
    for i in range(hw.LANES):
        sink = hw.load_f32(hw.load_i64(args, _SINKS), min(head + i, num_heads - 1))
        hw.store_f32(scratch, i, sink / scale)
    sinks = vec.load(scratch)
    most = sinks
    for index in range(used):
        span = index if index < used_window else window_spans + index - used_window
        most = vec.larger(most, vec.load(ends + span * size))
    factor = vec.spread(scale * _LOG2_E)
    offset = vec.mul(most, vec.spread(-scale * _LOG2_E))
    total = vec.exp2(vec.fma(sinks, factor, offset))
    for index in range(used):
        span = index if index < used_window else window_spans + index - used_window
        share = vec.exp2(vec.fma(vec.load(ends + span * size), factor, offset))
        total = vec.fma(share, vec.load(ends + span * size + lanes * 4), total)
        vec.store(ends + span * size, share)
    inverse = vec.div(vec.spread(_ONE), total)
    for index in range(used):
        span = index if index < used_window else window_spans + index - used_window
        vec.store(ends + span * size, vec.mul(vec.load(ends + span * size), inverse))


def attend_rows_join_kernel(args: int, chunk: int, thread: int) -> None:
    """Join the spans of every head of one token."""
    num_heads, dim = hw.load_i64(args, _NUM_HEADS), hw.load_i64(args, _DIM)
    dim_padded, num_spans = hw.load_i64(args, _DIM_PADDED), hw.load_i64(args, _NUM_SPANS)
    window_spans = hw.load_i64(args, _WINDOW_SPANS)
    scratch = hw.load_i64(args, _SCRATCH) + thread * few_scratch_bytes(dim_padded)
    size = partial_floats(num_heads, dim_padded) * 4
    lanes = (num_heads + hw.LANES - 1) // hw.LANES * hw.LANES
    token = hw.load_i64(args, _FIRST_TOKEN) + chunk
    position = np.int64(hw.load_i32(hw.load_i64(args, _POSITIONS), token))
    row = row_of(token, hw.load_i64(args, _ROW_STARTS), hw.load_i64(args, _NUM_ROWS))
    used_window = position // SPAN_ROWS - _first_seen(args, row, position) // SPAN_ROWS + 1
    used = used_window
    if hw.load_i64(args, _CLOSED) != 0:
        num_closed = (position + 1) // hw.load_i64(args, _RATIO)
        used += (num_closed + SPAN_ROWS - 1) // SPAN_ROWS
    first = hw.load_i64(args, _PARTIALS) + chunk * num_spans * size
    for head in range(0, num_heads, hw.LANES):
        _join_lanes(args, first, size, used_window, used, head, scratch)
    for head in range(num_heads):
        shares = first + (lanes * dim_padded + head) * 4
        column = first + head // TILE_ROWS * TILE_ROWS * dim_padded * 4
        column += head % TILE_ROWS * MIX_COLUMNS * 4
        target = hw.load_i64(args, _OUT) + (token * num_heads + head) * dim * 2
        for d in range(0, dim_padded, MIX_COLUMNS):
            for n in range(_MIX_VECTORS):
                place = column + n * _LINE_BYTES
                mixed = vec.spread(_ZERO)
                for index in range(used):
                    span = index if index < used_window else window_spans + index - used_window
                    share = vec.spread(hw.load_f32(shares + span * size, 0))
                    mixed = vec.fma(share, vec.load(place + span * size), mixed)
                vec.store(scratch + n * _LINE_BYTES, mixed)
            for i in range(min(MIX_COLUMNS, dim - d)):
                hw.store_bf16(target, d + i, hw.load_f32(scratch, i))
            column += TILE_ROWS * MIX_COLUMNS * 4


@compiled
def attend_few_rows(
    state: int, span_kernel: int, join_kernel: int, num_chunks: int, scale: float,
    q: int, q_stride: int, block_tables: int, table_stride: int, positions: int,
    row_starts: int, window_starts: int, num_rows: int, scratch: int, partials: int, out: int,
    sinks: int, num_heads: int, dim: int, dim_padded: int, block_tokens: int, window: int,
    closed: int, ratio: int, window_spans: int, num_spans: int, first_token: int,
    num_tokens: int, items_per_chunk: int, window_tokens: int,
) -> None:  # fmt: skip
    """Both passes over tokens [first_token, first_token + num_tokens).

    ``window_spans`` and ``num_spans``: the most that a token's window touches, and that with
    its closed rows. ``closed`` is 0 where there are none, ``window_starts`` where every
    sequence's window begins at position 0.
    """
    args = state + ARGS
    hw.store_i64(args, _Q, q)
    hw.store_i64(args, _Q_STRIDE, q_stride)
    hw.store_i64(args, _TABLES, block_tables)
    hw.store_i64(args, _TABLE_STRIDE, table_stride)
    hw.store_i64(args, _POSITIONS, positions)
    hw.store_i64(args, _ROW_STARTS, row_starts)
    hw.store_i64(args, _WINDOW_STARTS, window_starts)
    hw.store_i64(args, _NUM_ROWS, num_rows)
    hw.store_i64(args, _SCRATCH, scratch)
    hw.store_i64(args, _PARTIALS, partials)
    hw.store_i64(args, _OUT, out)
    hw.store_i64(args, _SINKS, sinks)
    hw.store_i64(args, _NUM_HEADS, num_heads)
    hw.store_i64(args, _DIM, dim)
    hw.store_i64(args, _DIM_PADDED, dim_padded)
    hw.store_i64(args, _BLOCK_TOKENS, block_tokens)
    hw.store_i64(args, _WINDOW, window)
    hw.store_i64(args, _CLOSED, closed)
    hw.store_i64(args, _RATIO, ratio)
    hw.store_i64(args, _WINDOW_SPANS, window_spans)
    hw.store_i64(args, _NUM_SPANS, num_spans)
    hw.store_i64(args, _FIRST_TOKEN, first_token)
    hw.store_i64(args, _NUM_TOKENS, num_tokens)
    hw.store_i64(args, _ITEMS_PER_CHUNK, items_per_chunk)
    hw.store_i64(args, _WINDOW_TOKENS, window_tokens)
    hw.store_f64(args, _SCALE, scale)
    run(state, span_kernel, num_chunks)
    if _JOIN_ALONE < num_tokens <= MAX_CHUNKS:
        run(state, join_kernel, num_tokens)
    else:
        for token in range(num_tokens):
            hw.call_kernel(join_kernel, args, token, 0)
