"""Paged attention kernels of the CPU path for rows with few queries (decode, drafts).

One item of work is (token, kv head, split): the head's group of query heads over
one span of SPLIT_TOKENS positions, the first being the one where the token's window
begins. A second pass joins the spans. Spans are cut at fixed positions, so a token's
bits depend on neither the batch nor the threads, and a long context is spread over
the team even for one row.
Knows addresses and sizes only; prefill chunks take another way (``cpu.py``).

    partial of an item, float32:
        [group, head_padded]  sum of exp(score - max) * value
        [group, 2]            max, sum of exp(score - max)
"""

from __future__ import annotations

import numpy as np
from numba import literally, njit

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics import cpu_loops as loops
from headwater.numerics.cpu_elementwise import exp_f32
from headwater.numerics.cpu_linear import BF16, F32, dot_rows
from headwater.numerics.cpu_team import ARGS, MAX_CHUNKS, compiled, run

SPLIT_TOKENS = 128
# Scores of one query head; a tile of 4 rows may run past the last position.
SCORES_STRIDE = SPLIT_TOKENS + 4
PAD_HEAD = 16
NO_WINDOW = 1 << 40  # tokens; no context is as long
_LOWEST = hw.f32(-3.0e38)
_ZERO = hw.f32(0)
# Joining up to this many tokens takes less time than sharing the work.
_JOIN_ALONE = 2


@njit(nogil=True, error_model="numpy")
def row_of(token: int, row_starts: int, num_rows: int) -> int:
    """The row r with row_starts[r] <= token < row_starts[r + 1]."""
    low, high = 0, num_rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if hw.load_i32(row_starts, middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@njit(nogil=True, error_model="numpy")
def _mix_rows(
    kind: int, shares: int, group: int, values: int, stride_bytes: int, length: int,
    out: int, head_padded: int, element_bytes: int,
) -> None:  # fmt: skip
    """out[g] += sum over t of shares[g, t] * values[t] over the whole head."""
    literally(kind)
    for first in range(0, head_padded, hw.LANES):
        column = values + first * element_bytes
        done = 0
        while done < group:
            s = shares + done * SCORES_STRIDE * 4
            o = out + (done * head_padded + first) * 4
            if group - done >= 4:
                loops.mix_tile(
                    kind, 4, s, SCORES_STRIDE, column, stride_bytes, length, o, head_padded
                )
                done += 4
            elif group - done == 3:
                loops.mix_tile(
                    kind, 3, s, SCORES_STRIDE, column, stride_bytes, length, o, head_padded
                )
                done += 3
            elif group - done == 2:
                loops.mix_tile(
                    kind, 2, s, SCORES_STRIDE, column, stride_bytes, length, o, head_padded
                )
                done += 2
            else:
                loops.mix_tile(
                    kind, 1, s, SCORES_STRIDE, column, stride_bytes, length, o, head_padded
                )
                done += 1


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nnan", "nsz"})
def _highest(scores: int, length: int) -> float:
    highest = _LOWEST
    for t in range(length):
        highest = max(highest, hw.load_f32(scores, t))
    return highest


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def _sum(scores: int, length: int) -> float:
    total = _ZERO
    for t in range(length):
        total += hw.load_f32(scores, t)
    return total


@njit(nogil=True, error_model="numpy")
def _softmax_shares(scores: int, length: int) -> tuple[float, float]:
    """Scores to exp(score - max) in place; returns (max, sum)."""
    highest = _highest(scores, length)
    for t in range(length):
        hw.store_f32(scores, t, exp_f32(hw.load_f32(scores, t) - highest))
    return highest, _sum(scores, length)


# The arguments of both kernels, in the order of ``attend_few``.
(
    _Q, _Q_STRIDE, _TABLES, _TABLE_STRIDE, _POSITIONS, _ROW_STARTS, _WINDOW_STARTS, _NUM_ROWS,
    _SCRATCH, _SCRATCH_FLOATS, _PARTIALS, _OUT, _GROUP, _K_BLOCKS, _V_BLOCKS, _NUM_KV_HEADS,
    _HEAD_DIM, _HEAD_PADDED, _BLOCK_TOKENS, _KV_IS_F32, _NUM_SPLITS, _FIRST_TOKEN, _NUM_TOKENS,
    _ITEMS_PER_CHUNK, _WINDOW_TOKENS, _SCALE,
) = range(26)  # fmt: skip


def most_splits(max_context: int, window_tokens: int) -> int:
    """The most spans that a token's visible positions touch."""
    visible = min(window_tokens, max_context)
    # A window may begin at the last position of a span.
    return min(-(-max_context // SPLIT_TOKENS), (visible + SPLIT_TOKENS - 2) // SPLIT_TOKENS + 1)


@njit(nogil=True, error_model="numpy")
def _first_seen(args: int, row: int, position: int) -> int:
    """The first position that the query at ``position`` sees."""
    window_tokens = hw.load_i64(args, _WINDOW_TOKENS)
    if window_tokens == NO_WINDOW:
        return 0
    first = max(0, position - window_tokens + 1)
    window_starts = hw.load_i64(args, _WINDOW_STARTS)
    if window_starts != 0:
        first = max(first, np.int64(hw.load_i32(window_starts, row)))
    return first


@njit(nogil=True, error_model="numpy")
def _place(args: int, table: int, kv_head: int, position: int) -> int:
    """Byte offset in the blocks of the key, or value, of ``position``."""
    block_tokens = hw.load_i64(args, _BLOCK_TOKENS)
    block = np.int64(hw.load_i32(table, position // block_tokens))
    row = (block * hw.load_i64(args, _NUM_KV_HEADS) + kv_head) * block_tokens
    element_bytes = 4 if hw.load_i64(args, _KV_IS_F32) != 0 else 2
    return (row + position % block_tokens) * hw.load_i64(args, _HEAD_PADDED) * element_bytes


@njit(nogil=True, error_model="numpy")
def _load_queries(args: int, token: int, kv_head: int, queries: int) -> None:
    """The group's queries times the scale, as float32 [group, head_padded]."""
    group, head_dim = hw.load_i64(args, _GROUP), hw.load_i64(args, _HEAD_DIM)
    head_padded = hw.load_i64(args, _HEAD_PADDED)
    scale = np.float32(hw.load_f64(args, _SCALE))
    start = token * hw.load_i64(args, _Q_STRIDE) + kv_head * group * head_dim
    for g in range(group):
        source = hw.load_i64(args, _Q) + (start + g * head_dim) * 2
        target = queries + g * head_padded * 4
        for i in range(head_dim):
            hw.store_f32(target, i, hw.load_bf16(source, i) * scale)
        for i in range(head_dim, head_padded):
            hw.store_f32(target, i, _ZERO)


@njit(nogil=True, error_model="numpy")
def ask_for(address: int, num_bytes: int) -> None:
    for line in range(0, num_bytes, 64):
        hw.prefetch(address + line)


@njit(nogil=True, error_model="numpy")
def _score_span(
    args: int, table: int, kv_head: int, begin: int, end: int, queries: int, scores: int
) -> None:
    """Scores [group, SPLIT_TOKENS + 4] of the keys of positions [begin, end)."""
    group, head_padded = hw.load_i64(args, _GROUP), hw.load_i64(args, _HEAD_PADDED)
    keys, values = hw.load_i64(args, _K_BLOCKS), hw.load_i64(args, _V_BLOCKS)
    block_tokens, is_f32 = hw.load_i64(args, _BLOCK_TOKENS), hw.load_i64(args, _KV_IS_F32)
    stride = head_padded * (4 if is_f32 != 0 else 2)
    position = begin
    while position < end:
        length = min(block_tokens - position % block_tokens, end - position)
        place = _place(args, table, kv_head, position)
        # Blocks are anywhere in memory: ask for the next one's keys while these are scored,
        # and for these values, which follow when all scores are known.
        if position + length < end:
            ask_for(keys + _place(args, table, kv_head, position + length), block_tokens * stride)
        ask_for(values + place, length * stride)
        for t in range(0, length, 4):
            rows, out = keys + place + t * stride, scores + (position - begin + t) * 4
            if is_f32 != 0:
                dot_rows(
                    F32, rows, stride, queries, head_padded, group, head_padded, out, SCORES_STRIDE
                )
            else:
                dot_rows(
                    BF16,
                    rows,
                    stride,
                    queries,
                    head_padded,
                    group,
                    head_padded,
                    out,
                    SCORES_STRIDE,
                )
        position += length


@njit(nogil=True, error_model="numpy")
def _mix_span(
    args: int, table: int, kv_head: int, begin: int, end: int, shares: int, mixed: int
) -> None:
    """mixed [group, head_padded] = shares @ values of positions [begin, end)."""
    group, head_padded = hw.load_i64(args, _GROUP), hw.load_i64(args, _HEAD_PADDED)
    values, block_tokens = hw.load_i64(args, _V_BLOCKS), hw.load_i64(args, _BLOCK_TOKENS)
    is_f32 = hw.load_i64(args, _KV_IS_F32)
    for i in range(group * head_padded):
        hw.store_f32(mixed, i, _ZERO)
    position = begin
    while position < end:
        length = min(block_tokens - position % block_tokens, end - position)
        rows = values + _place(args, table, kv_head, position)
        part = shares + (position - begin) * 4
        if is_f32 != 0:
            _mix_rows(F32, part, group, rows, head_padded * 4, length, mixed, head_padded, 4)
        else:
            _mix_rows(BF16, part, group, rows, head_padded * 2, length, mixed, head_padded, 2)
        position += length


def attend_split_kernel(args: int, chunk: int, thread: int) -> None:
    """Partial results of the items of one chunk."""
    group, num_kv_heads = hw.load_i64(args, _GROUP), hw.load_i64(args, _NUM_KV_HEADS)
    head_padded, num_splits = hw.load_i64(args, _HEAD_PADDED), hw.load_i64(args, _NUM_SPLITS)
    queries = hw.load_i64(args, _SCRATCH) + thread * hw.load_i64(args, _SCRATCH_FLOATS) * 4
    scores = queries + group * head_padded * 4
    per_chunk = hw.load_i64(args, _ITEMS_PER_CHUNK)
    num_items = hw.load_i64(args, _NUM_TOKENS) * num_kv_heads * num_splits
    for item in range(chunk * per_chunk, min((chunk + 1) * per_chunk, num_items)):
        split, pair = item % num_splits, item // num_splits
        kv_head = pair % num_kv_heads
        token = hw.load_i64(args, _FIRST_TOKEN) + pair // num_kv_heads
        position = np.int64(hw.load_i32(hw.load_i64(args, _POSITIONS), token))
        row = row_of(token, hw.load_i64(args, _ROW_STARTS), hw.load_i64(args, _NUM_ROWS))
        first = _first_seen(args, row, position)
        begin = (first // SPLIT_TOKENS + split) * SPLIT_TOKENS
        end = min(begin + SPLIT_TOKENS, position + 1)
        begin = max(begin, first)
        if begin >= end:
            continue
        table = hw.load_i64(args, _TABLES) + row * hw.load_i64(args, _TABLE_STRIDE) * 4
        _load_queries(args, token, kv_head, queries)
        _score_span(args, table, kv_head, begin, end, queries, scores)
        mixed = hw.load_i64(args, _PARTIALS) + item * group * (head_padded + 2) * 4
        ends = mixed + group * head_padded * 4
        for g in range(group):
            highest, total = _softmax_shares(scores + g * SCORES_STRIDE * 4, end - begin)
            hw.store_f32(ends, 2 * g, highest)
            hw.store_f32(ends, 2 * g + 1, total)
        _mix_span(args, table, kv_head, begin, end, scores, mixed)


def attend_join_kernel(args: int, chunk: int, thread: int) -> None:
    """Join the splits of every query head of one token."""
    partials, out = hw.load_i64(args, _PARTIALS), hw.load_i64(args, _OUT)
    group, num_kv_heads = hw.load_i64(args, _GROUP), hw.load_i64(args, _NUM_KV_HEADS)
    head_dim, head_padded = hw.load_i64(args, _HEAD_DIM), hw.load_i64(args, _HEAD_PADDED)
    num_splits = hw.load_i64(args, _NUM_SPLITS)
    token = hw.load_i64(args, _FIRST_TOKEN) + chunk
    position = np.int64(hw.load_i32(hw.load_i64(args, _POSITIONS), token))
    row = row_of(token, hw.load_i64(args, _ROW_STARTS), hw.load_i64(args, _NUM_ROWS))
    first_split = _first_seen(args, row, position) // SPLIT_TOKENS
    used = position // SPLIT_TOKENS - first_split + 1
    partial_bytes = group * (head_padded + 2) * 4
    for kv_head in range(num_kv_heads):
        first = partials + (chunk * num_kv_heads + kv_head) * num_splits * partial_bytes
        for g in range(group):
            ends = first + (group * head_padded + 2 * g) * 4
            highest = _LOWEST
            for split in range(used):
                highest = max(highest, hw.load_f32(ends + split * partial_bytes, 0))
            total = _ZERO
            for split in range(used):
                end = ends + split * partial_bytes
                share = exp_f32(hw.load_f32(end, 0) - highest)
                total += share * hw.load_f32(end, 1)
                # The share takes the place of the maximum for the loop below.
                hw.store_f32(end, 0, share)
            target = ((token * num_kv_heads + kv_head) * group + g) * head_dim
            for i in range(head_dim):
                value = _ZERO
                for split in range(used):
                    share = hw.load_f32(ends + split * partial_bytes, 0)
                    value += share * hw.load_f32(first + split * partial_bytes, g * head_padded + i)
                hw.store_bf16(out, target + i, value / total)


@compiled
def attend_few(
    state: int, split_kernel: int, join_kernel: int, num_chunks: int, scale: float,
    q: int, q_stride: int, block_tables: int, table_stride: int, positions: int,
    row_starts: int, window_starts: int, num_rows: int, scratch: int, scratch_floats: int,
    partials: int, out: int, group: int, k_blocks: int, v_blocks: int, num_kv_heads: int,
    head_dim: int, head_padded: int, block_tokens: int, kv_is_f32: int, num_splits: int,
    first_token: int, num_tokens: int, items_per_chunk: int, window_tokens: int,
) -> None:  # fmt: skip
    """Both passes over tokens [first_token, first_token + num_tokens).

    ``num_splits`` is ``most_splits``. Without a window, ``window_tokens`` is NO_WINDOW;
    ``window_starts`` is 0 where every row's window KV begins at position 0.
    """
    args = state + ARGS
    hw.store_i64(args, _Q, q)
    hw.store_i64(args, _Q_STRIDE, q_stride)
    hw.store_i64(args, _K_BLOCKS, k_blocks)
    hw.store_i64(args, _V_BLOCKS, v_blocks)
    hw.store_i64(args, _TABLES, block_tables)
    hw.store_i64(args, _TABLE_STRIDE, table_stride)
    hw.store_i64(args, _POSITIONS, positions)
    hw.store_i64(args, _ROW_STARTS, row_starts)
    hw.store_i64(args, _WINDOW_STARTS, window_starts)
    hw.store_i64(args, _NUM_ROWS, num_rows)
    hw.store_i64(args, _SCRATCH, scratch)
    hw.store_i64(args, _SCRATCH_FLOATS, scratch_floats)
    hw.store_i64(args, _PARTIALS, partials)
    hw.store_i64(args, _OUT, out)
    hw.store_i64(args, _GROUP, group)
    hw.store_i64(args, _NUM_KV_HEADS, num_kv_heads)
    hw.store_i64(args, _HEAD_DIM, head_dim)
    hw.store_i64(args, _HEAD_PADDED, head_padded)
    hw.store_i64(args, _BLOCK_TOKENS, block_tokens)
    hw.store_i64(args, _KV_IS_F32, kv_is_f32)
    hw.store_i64(args, _NUM_SPLITS, num_splits)
    hw.store_i64(args, _FIRST_TOKEN, first_token)
    hw.store_i64(args, _NUM_TOKENS, num_tokens)
    hw.store_i64(args, _ITEMS_PER_CHUNK, items_per_chunk)
    hw.store_i64(args, _WINDOW_TOKENS, window_tokens)
    hw.store_f64(args, _SCALE, scale)
    run(state, split_kernel, num_chunks)
    if _JOIN_ALONE < num_tokens <= MAX_CHUNKS:
        run(state, join_kernel, num_tokens)
    else:
        for token in range(num_tokens):
            hw.call_kernel(join_kernel, args, token, 0)
