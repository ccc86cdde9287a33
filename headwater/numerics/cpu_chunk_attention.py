"""Flash attention of prefill chunks on plain vectors, straight from paged KV.

Computed transposed, so that queries lie along the lanes and the softmax over keys needs
no exchange between lanes:

    S^T [keys, lanes]  = K [keys, D] @ Q^T [D, lanes]
    P^T                = exp(S^T - max over keys)
    O^T [D, lanes]    += V^T [D, keys] @ P^T [keys, lanes]

Both products are of pairs of bfloat16 (``cpu_loops.pair_tile``): K's pairs of D are read
where they lie in their blocks, V's pairs of keys are made for each span of SPAN_KEYS.

A lane is (query, query head) of one key/value head, queries first: a group's heads are
more queries of their key head. One item of work is ITEM_LANES of them; all rows of a
step are one call. Where that gives too few items for the team, each is split over its
keys, and who finishes an item's last part joins the parts. Blocks may hold anything, also
what is not a number, at positions that the row does not see. Used by ``cpu_kv.py`` and, with
what ``MoreKeys`` names, by ``cpu_rows.py``. Knows addresses and sizes only.

    plan, int64:  num_rows, num_parts, parts_per_chunk, window
                  closed rows' address, tokens of such a row, address of the sinks; or 0
                  for each row: its first part, parts of an item, first token, num_tokens,
                  context, first position that any query sees, address of its block table
                  for each part: 0 (at an item's first one: how many are finished)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics import cpu_vector as vec
from headwater.numerics.cpu_attention import ask_for
from headwater.numerics.cpu_loops import HAS_PAIR_DOT, pair_tile
from headwater.numerics.cpu_team import MAX_CHUNKS, compiled

NAME = f"{'bfloat16 pair' if HAS_PAIR_DOT else f'{hw.LANES}-lane'} kernel"
SPAN_KEYS = 128
# A tile of sums: ROWS keys, or elements of D, by _VECTORS vectors of lanes. With the
# operands it just fits the machine's registers.
ROWS, _VECTORS = (8, 3) if hw.LANES == 16 else (4, 2)
ITEM_LANES = _VECTORS * hw.LANES
_VECTOR_BYTES = hw.LANES * 4
_LINE_BYTES = _VECTORS * _VECTOR_BYTES
_LOWEST = hw.f32(-3.0e38)
_ZERO, _ONE = hw.f32(0), hw.f32(1)
_LOG2_E = hw.f32(1.4426950408889634)

(
    _Q, _Q_STRIDE, _K_BLOCKS, _V_BLOCKS, _OUT, _PLAN, _SCRATCH, _GROUP, _NUM_KV_HEADS,
    _HEAD_DIM, _HEAD_PADDED, _BLOCK_TOKENS, _PARTIALS,
) = range(13)  # fmt: skip
_SCALE = 14  # where ``cpu_team.launch`` puts the real one

_NUM_ROWS, _NUM_PARTS, _PER_CHUNK, _WINDOW, _CLOSED, _RATIO, _SINKS = range(7)
_FIRST_PART, _ITEM_PARTS, _FIRST_TOKEN, _NUM_TOKENS, _CONTEXT, _FIRST, _TABLE = range(7)
_HEADER_WORDS, _ROW_WORDS = 7, 7
# Items, or parts of them, for each thread, so that all end about together; and how many
# spans make a part worth it.
_PARTS_PER_THREAD = 3
_PART_SPANS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """A row with many queries: tokens [first_token, end_token) of the batch."""

    number: int  # of the row in the batch
    first_token: int
    end_token: int
    context: int  # positions, the queries' own included
    first_seen: int  # no query sees a position before it
    table_address: int  # of int32 block numbers from position 0 on


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreKeys:
    """What the softmax is over besides the window: closed rows, which are keys and values
    (``Ops.attend_rows``), and a sink for each head."""

    rows_address: int  # 0: there are none
    ratio: int  # tokens of a closed row
    sinks_address: int  # float32 [N]; 0: without


_NO_MORE = MoreKeys(rows_address=0, ratio=1, sinks_address=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    words: np.ndarray[tuple[int], np.dtype[np.int64]]
    num_chunks: int
    num_partials: int  # results of parts that are to be joined


def plan_chunks(
    rows: Sequence[ChunkRow], group: int, num_kv_heads: int, window: int, num_threads: int,
    more: MoreKeys = _NO_MORE,
) -> ChunkPlan:  # fmt: skip
    """What ``attend_chunks_kernel`` is to do."""
    items = [
        num_kv_heads * -(-(row.end_token - row.first_token) * group // ITEM_LANES) for row in rows
    ]
    wanted = -(-_PARTS_PER_THREAD * num_threads // sum(items))
    words: list[int] = []
    num_parts = num_partials = 0
    for row, num_items in zip(rows, items, strict=True):
        num_spans = -(-min(row.context - row.first_seen, window) // SPAN_KEYS)
        if more.rows_address:
            num_spans += row.context // more.ratio // SPAN_KEYS
        item_parts = max(1, min(wanted, num_spans // _PART_SPANS))
        num_tokens = row.end_token - row.first_token
        words += num_parts, item_parts, row.first_token, num_tokens
        words += row.context, row.first_seen, row.table_address
        num_parts += num_items * item_parts
        if item_parts > 1:
            num_partials = num_parts
    per_chunk = -(-num_parts // MAX_CHUNKS)
    header = len(rows), num_parts, per_chunk, window
    keys = more.rows_address, more.ratio, more.sinks_address
    return ChunkPlan(
        words=np.array([*header, *keys, *words, *(0,) * num_parts], np.int64),
        num_chunks=-(-num_parts // per_chunk),
        num_partials=num_partials,
    )


@compiled
def partial_bytes(head_padded: int) -> int:
    """O^T, and two lines: the highest score, the sum of shares."""
    return (head_padded + 2) * _LINE_BYTES


@compiled
def chunk_scratch_bytes(head_padded: int) -> int:
    """Scratch of one thread: Q^T and P^T in pairs, S^T, a result, five lines; V in pairs, and
    one pair of zeros. A multiple of a cache line."""
    lines = head_padded // 2 + SPAN_KEYS // 2 + SPAN_KEYS + (head_padded + 2) + 5
    return lines * _LINE_BYTES + (SPAN_KEYS + 2) * head_padded * 2


@njit(nogil=True, error_model="numpy")
def _place(args: int, table: int, kv_head: int, key: int, block_keys: int) -> int:
    """Byte offset of key (or value) ``key`` within the blocks of ``block_keys``."""
    block = np.int64(hw.load_i32(table, key // block_keys))
    row = (block * hw.load_i64(args, _NUM_KV_HEADS) + kv_head) * block_keys
    return (row + key % block_keys) * hw.load_i64(args, _HEAD_PADDED) * 2


@njit(nogil=True, error_model="numpy")
def _head_of(args: int, kv_head: int, lane: int) -> int:
    return kv_head * hw.load_i64(args, _GROUP) + lane % hw.load_i64(args, _GROUP)


@njit(nogil=True, error_model="numpy")
def _load_lanes(
    args: int, row: int, kv_head: int, first_lane: int, queries: int, newest: int, oldest: int,
    last_closed: int,
) -> None:  # fmt: skip
    """Queries to lines of pairs of D, the last and first position that each lane sees, and
    the last closed row (-1: none). Lanes past the row's last are like it."""
    group, num_pairs = hw.load_i64(args, _GROUP), hw.load_i64(args, _HEAD_DIM) // 2
    num_tokens, context = hw.load_i64(row, _NUM_TOKENS), hw.load_i64(row, _CONTEXT)
    plan = hw.load_i64(args, _PLAN)
    window, ratio = hw.load_i64(plan, _WINDOW), hw.load_i64(plan, _RATIO)
    for i in range(ITEM_LANES):
        lane = min(first_lane + i, num_tokens * group - 1)
        token = hw.load_i64(row, _FIRST_TOKEN) + lane // group
        start = token * hw.load_i64(args, _Q_STRIDE)
        start += _head_of(args, kv_head, lane) * num_pairs * 2
        source = hw.load_i64(args, _Q) + start * 2
        for pair in range(num_pairs):
            hw.store_i32(queries, pair * ITEM_LANES + i, hw.load_i32(source, pair))
        position = context - num_tokens + lane // group
        hw.store_f32(newest, i, np.float32(position))
        seen = max(hw.load_i64(row, _FIRST), position - window + 1)
        hw.store_f32(oldest, i, np.float32(seen))
        hw.store_f32(last_closed, i, np.float32((position + 1) // ratio - 1))


@njit(nogil=True, error_model="numpy")
def _pair_values(
    args: int, table: int, kv_head: int, blocks: int, block_keys: int, first: int, limit: int,
    begin: int, end: int, values: int, zeros: int,
) -> None:  # fmt: skip
    """Values of keys [begin, end) to [pairs of keys, D]; zeros outside [first, limit), which
    no query of the row sees."""
    head_padded = hw.load_i64(args, _HEAD_PADDED)
    for key in range(begin, end, 2):
        low = blocks + _place(args, table, kv_head, key, block_keys)
        high = low + head_padded * 2
        if key < first or key >= limit:
            low = zeros
        if key + 1 < first or key + 1 >= limit:
            high = zeros
        target = values + (key - begin) * head_padded * 2
        for d in range(0, head_padded, hw.LANES):
            vec.pair_bf16(target + d * 4, low + d * 2, high + d * 2)


@njit(nogil=True, error_model="numpy")
def _mask(scores: int, begin: int, end: int, newest: int, oldest: int) -> None:
    """Replace the scores of keys [begin, end) that their lane does not see."""
    lowest = vec.spread(_LOWEST)
    for position in range(begin, end):
        key = vec.spread(np.float32(position))
        for n in range(_VECTORS):
            offset = n * _VECTOR_BYTES
            line = scores + (position - begin) * _LINE_BYTES + offset
            score = vec.keep_ordered(vec.load(line), key, vec.load(newest + offset), lowest)
            vec.store(line, vec.keep_ordered(score, vec.load(oldest + offset), key, lowest))


@njit(nogil=True, error_model="numpy")
def _softmax_span(
    scores: int, num_keys: int, factor: float, shares: int, highest: int, total: int, shrink: int
) -> None:
    """P^T of a span in pairs of keys; updates maximum and sum, and says in ``shrink`` what
    earlier sums must be multiplied with."""
    scale = vec.spread(factor)
    for n in range(_VECTORS):
        column = n * _VECTOR_BYTES
        before = vec.load(highest + column)
        most = before
        for key in range(num_keys):
            most = vec.larger(most, vec.load(scores + key * _LINE_BYTES + column))
        offset = vec.mul(most, vec.spread(-factor))
        added = vec.spread(_ZERO)
        for pair in range(num_keys // 2):
            line = scores + 2 * pair * _LINE_BYTES + column
            low = vec.exp2(vec.fma(vec.load(line), scale, offset))
            high = vec.exp2(vec.fma(vec.load(line + _LINE_BYTES), scale, offset))
            added = vec.add(added, vec.add(low, high))
            vec.store_bf16_pairs(shares + pair * _LINE_BYTES + column, low, high)
        less = vec.exp2(vec.fma(before, scale, offset))
        vec.store(highest + column, most)
        vec.store(total + column, vec.fma(vec.load(total + column), less, added))
        vec.store(shrink + column, less)


@njit(nogil=True, error_model="numpy")
def _store_lanes(
    args: int, row: int, kv_head: int, first_lane: int, sums: int, total: int, pairs: int
) -> None:
    """O^T / sum of shares to the lanes' places in ``out``; ``pairs`` is scratch."""
    group, num_pairs = hw.load_i64(args, _GROUP), hw.load_i64(args, _HEAD_DIM) // 2
    num_heads = group * hw.load_i64(args, _NUM_KV_HEADS)
    for n in range(_VECTORS):
        column = n * _VECTOR_BYTES
        inverse = vec.div(vec.spread(_ONE), vec.load(total + column))
        for pair in range(num_pairs):
            line = sums + 2 * pair * _LINE_BYTES + column
            low, high = vec.load(line), vec.load(line + _LINE_BYTES)
            vec.store_bf16_pairs(
                pairs + pair * _LINE_BYTES + column, vec.mul(low, inverse), vec.mul(high, inverse)
            )
    num_lanes = min(ITEM_LANES, hw.load_i64(row, _NUM_TOKENS) * group - first_lane)
    for i in range(num_lanes):
        lane = first_lane + i
        token = hw.load_i64(row, _FIRST_TOKEN) + lane // group
        head = token * num_heads + _head_of(args, kv_head, lane)
        target = hw.load_i64(args, _OUT) + head * num_pairs * 4
        for pair in range(num_pairs):
            hw.store_i32(target, pair, hw.load_i32(pairs, pair * ITEM_LANES + i))


@njit(nogil=True, error_model="numpy")
def _join(args: int, partials: int, num_parts: int, factor: float) -> None:
    """The results of an item's parts to one, in the place of the first."""
    head_padded = hw.load_i64(args, _HEAD_PADDED)
    highest = head_padded * _LINE_BYTES
    size = partial_bytes(head_padded)
    scale = vec.spread(factor)
    for n in range(_VECTORS):
        first = partials + n * _VECTOR_BYTES
        most = vec.load(first + highest)
        for part in range(1, num_parts):
            most = vec.larger(most, vec.load(first + part * size + highest))
        offset = vec.mul(most, vec.spread(-factor))
        for part in range(num_parts):
            ours = first + part * size
            less = vec.exp2(vec.fma(vec.load(ours + highest), scale, offset))
            # O^T, and in the place of the highest score the sum of shares.
            vec.store(ours + highest, vec.load(ours + highest + _LINE_BYTES))
            for d in range(head_padded + 1):
                place = d * _LINE_BYTES
                share = vec.mul(vec.load(ours + place), less)
                if part > 0:
                    share = vec.add(vec.load(first + place), share)
                vec.store(first + place, share)
        vec.store(first + highest + _LINE_BYTES, vec.load(first + highest))


@njit(nogil=True, error_model="numpy")
def _start_lanes(
    args: int, kv_head: int, first_lane: int, is_first: bool, highest: int, total: int
) -> None:
    """Maximum and sum before the first key: of the sink, or of nothing."""
    sinks = hw.load_i64(hw.load_i64(args, _PLAN), _SINKS)
    scale = np.float32(hw.load_f64(args, _SCALE))
    for i in range(ITEM_LANES):
        if sinks != 0 and is_first:
            sink = hw.load_f32(sinks, _head_of(args, kv_head, first_lane + i))
            hw.store_f32(highest, i, sink / scale)
            hw.store_f32(total, i, _ONE)
        else:
            hw.store_f32(highest, i, _LOWEST)
            hw.store_f32(total, i, _ZERO)


@njit(nogil=True, error_model="numpy")
def _attend_span(
    args: int, row: int, kv_head: int, k_blocks: int, v_blocks: int, block_keys: int,
    first: int, limit: int, begin: int, end: int, until: int, newest: int, oldest: int,
    scratch: int, sums: int, before: int,
) -> int:  # fmt: skip
    """Keys [begin, end), which are of one span, added to ``sums``, each lane's from oldest to
    newest; none outside [first, limit) is read, and the next spans end at ``until``.
    ``before`` and the result: ``pair_tile``'s shrink, or 0."""
    head_dim, head_padded = hw.load_i64(args, _HEAD_DIM), hw.load_i64(args, _HEAD_PADDED)
    table = hw.load_i64(row, _TABLE)
    factor = np.float32(hw.load_f64(args, _SCALE)) * _LOG2_E
    shares = scratch + head_padded // 2 * _LINE_BYTES
    scores = shares + SPAN_KEYS // 2 * _LINE_BYTES
    shrink = scores + SPAN_KEYS * _LINE_BYTES + partial_bytes(head_padded)
    values = shrink + 5 * _LINE_BYTES
    zeros = values + SPAN_KEYS * head_padded * 2
    highest = sums + head_padded * _LINE_BYTES
    for key in range(begin, end, ROWS):
        place = _place(args, table, kv_head, key, block_keys)
        tile_bytes = ROWS * head_padded * 2
        # Blocks are anywhere in memory: ask for these values, which follow when all scores
        # are known, and for the next span's keys.
        ask_for(v_blocks + place, tile_bytes)
        if key + SPAN_KEYS < until:
            next_place = _place(args, table, kv_head, key + SPAN_KEYS, block_keys)
            ask_for(k_blocks + next_place, tile_bytes)
        pair_tile(
            ROWS, _VECTORS, k_blocks + place, head_padded * 2, 4, scratch, head_dim // 2,
            scores + (key - begin) * _LINE_BYTES, 0,
        )  # fmt: skip
    # Every key of [all_from, all_until) is seen by all lanes.
    all_from = np.int64(hw.load_f32(oldest, ITEM_LANES - 1))
    all_until = np.int64(hw.load_f32(newest, 0)) + 1
    if begin < all_from or end > all_until:
        _mask(scores, begin, end, newest, oldest)
    _softmax_span(scores, end - begin, factor, shares, highest, highest + _LINE_BYTES, shrink)
    _pair_values(
        args, table, kv_head, v_blocks, block_keys, first, limit, begin, end, values, zeros
    )
    for d in range(0, head_padded, ROWS):
        pair_tile(
            ROWS, _VECTORS, values + d * 4, 4, head_padded * 4, shares, (end - begin) // 2,
            sums + d * _LINE_BYTES, before,
        )  # fmt: skip
    return shrink


@njit(nogil=True, error_model="numpy")
def _attend_part(args: int, row: int, number: int, scratch: int) -> None:
    """Part ``number`` of the row's. One head after the other, so that its keys and values
    stay in the cache; in each the last lanes first, because they see most keys: the team then
    ends together."""
    group, head_padded = hw.load_i64(args, _GROUP), hw.load_i64(args, _HEAD_PADDED)
    plan, block_tokens = hw.load_i64(args, _PLAN), hw.load_i64(args, _BLOCK_TOKENS)
    context = hw.load_i64(row, _CONTEXT)
    closed_rows, ratio = hw.load_i64(plan, _CLOSED), hw.load_i64(plan, _RATIO)
    num_parts = hw.load_i64(row, _ITEM_PARTS)
    item, part = number // num_parts, number % num_parts
    first_part = hw.load_i64(row, _FIRST_PART) + item * num_parts
    per_head = (hw.load_i64(row, _NUM_TOKENS) * group + ITEM_LANES - 1) // ITEM_LANES
    kv_head = item // per_head
    first_lane = (per_head - 1 - item % per_head) * ITEM_LANES
    queries = scratch
    sums = queries + (head_padded // 2 + SPAN_KEYS // 2 + SPAN_KEYS) * _LINE_BYTES
    newest = sums + partial_bytes(head_padded) + _LINE_BYTES
    oldest, last_closed = newest + _LINE_BYTES, newest + 2 * _LINE_BYTES
    from_zero = newest + 3 * _LINE_BYTES
    zeros = from_zero + _LINE_BYTES + SPAN_KEYS * head_padded * 2
    partials = hw.load_i64(args, _PARTIALS) + first_part * partial_bytes(head_padded)
    if num_parts > 1:
        sums = partials + part * partial_bytes(head_padded)
    total = sums + (head_padded + 1) * _LINE_BYTES
    for i in range(head_padded // 2):
        hw.store_i32(zeros, i, np.int32(0))
    for i in range(ITEM_LANES):
        hw.store_f32(from_zero, i, _ZERO)
    _start_lanes(args, kv_head, first_lane, part == 0, total - _LINE_BYTES, total)
    _load_lanes(args, row, kv_head, first_lane, queries, newest, oldest, last_closed)
    # This part's spans, of the window's positions and then of the closed rows. The last parts
    # of an item with few spans have none.
    begin = np.int64(hw.load_f32(oldest, 0)) // ROWS * ROWS
    end = np.int64(hw.load_f32(newest, ITEM_LANES - 1)) // ROWS * ROWS + ROWS
    end_closed = np.int64(hw.load_f32(last_closed, ITEM_LANES - 1)) // ROWS * ROWS + ROWS
    first_span = begin // SPAN_KEYS
    in_window = (end - 1) // SPAN_KEYS - first_span + 1
    num_spans = in_window
    if closed_rows != 0:
        num_spans += (end_closed + SPAN_KEYS - 1) // SPAN_KEYS
    num_used = min(num_parts, num_spans)
    # Not the literal 0, which would give that call's code twice.
    before = np.int64(0)
    for span in range(
        num_spans * min(part, num_used) // num_used, num_spans * min(part + 1, num_used) // num_used
    ):
        k_blocks, v_blocks = hw.load_i64(args, _K_BLOCKS), hw.load_i64(args, _V_BLOCKS)
        block_keys, first, limit = block_tokens, hw.load_i64(row, _FIRST), context
        start, until, last_seen, first_seen = (first_span + span) * SPAN_KEYS, end, newest, oldest
        if span >= in_window:
            k_blocks = v_blocks = closed_rows
            block_keys, first, limit = block_tokens // ratio, 0, context // ratio
            start, until = (span - in_window) * SPAN_KEYS, end_closed
            last_seen, first_seen = last_closed, from_zero
        # One call for both, so that there is one copy of its code.
        before = _attend_span(
            args, row, kv_head, k_blocks, v_blocks, block_keys, first, limit,
            max(start, begin if span < in_window else 0), min(start + SPAN_KEYS, until), until,
            last_seen, first_seen, scratch, sums, before,
        )  # fmt: skip
    if num_parts > 1:
        counters = plan + (_HEADER_WORDS + hw.load_i64(plan, _NUM_ROWS) * _ROW_WORDS) * 8
        if hw.atomic_add(counters + first_part * 8, 1) < num_parts - 1:
            return
        _join(args, partials, num_used, np.float32(hw.load_f64(args, _SCALE)) * _LOG2_E)
        sums, total = partials, partials + (head_padded + 1) * _LINE_BYTES
    _store_lanes(args, row, kv_head, first_lane, sums, total, queries)


def attend_chunks_kernel(args: int, chunk: int, thread: int) -> None:
    """Attention of all rows of a plan: the parts of one chunk."""
    plan = hw.load_i64(args, _PLAN)
    num_rows, per_chunk = hw.load_i64(plan, _NUM_ROWS), hw.load_i64(plan, _PER_CHUNK)
    scratch = hw.load_i64(args, _SCRATCH) + thread * chunk_scratch_bytes(
        hw.load_i64(args, _HEAD_PADDED)
    )
    last = min((chunk + 1) * per_chunk, hw.load_i64(plan, _NUM_PARTS))
    for number in range(chunk * per_chunk, last):
        index = num_rows - 1
        while hw.load_i64(plan, _HEADER_WORDS + index * _ROW_WORDS + _FIRST_PART) > number:
            index -= 1
        row = plan + (_HEADER_WORDS + index * _ROW_WORDS) * 8
        _attend_part(args, row, number - hw.load_i64(row, _FIRST_PART), scratch)
