"""Flash attention of one row's prefill chunk on matrix tiles, straight from paged KV.

Everything is computed transposed, so that queries lie along the 16 lanes and the
softmax over keys needs no exchange between lanes:

    S^T [keys, 16 queries]  = K [keys, D] @ Q^T [D, 16 queries]
    P^T                     = exp(S^T - max over keys)
    O^T [D, 16 queries]    += V^T [D, keys] @ P^T [keys, 16 queries]

K's tiles are read where they lie in their blocks. V is transposed once per row.
One item of work is (16 positions, key/value head) for the head's whole group of
query heads; keys come in spans of SPAN_KEYS with a running maximum and sum, from
the span on where the window of the first of the 16 begins. Blocks may hold anything,
also what is not a number, at positions that the row does not see.
Used by ``cpu.py`` where tiles are available. Knows addresses and sizes only.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics import cpu_vector as vec
from headwater.numerics.cpu_amx import (
    TILE_BYTES,
    TILE_DEPTH,
    TILE_ROWS,
    configure_tiles,
    release_tiles,
    tile_load,
    tile_multiply_add,
    tile_store,
    tile_zero,
)
from headwater.numerics.cpu_team import ARGS, compiled, run

SPAN_KEYS = 128
MAX_HEAD_DIM = 2 * SPAN_KEYS  # the result, as pairs of bfloat16, fits where the scores were
_LANES_BYTES = 64  # 16 float32
_LOWEST = hw.f32(-3.0e38)
_ZERO, _ONE = hw.f32(0), hw.f32(1)
_LOG2_E = hw.f32(1.4426950408889634)

# The arguments of both kernels, in the order of ``attend_chunk_tiles``.
(
    _CONFIG, _Q, _Q_STRIDE, _K_BLOCKS, _V_BLOCKS, _TABLE, _OUT, _VALUES, _SCRATCH, _GROUP,
    _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_TOKENS, _PAST, _CONTEXT, _FIRST, _WINDOW, _FUTURE_KEYS,
    _OLD_KEYS, _SCALE,
) = range(20)  # fmt: skip


def future_keys() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The most that a tile's scores [16 keys, 16 queries] of the same positions may be."""
    later = np.tril(np.ones((TILE_ROWS, TILE_ROWS), np.bool_), -1)
    return np.where(later, _LOWEST, np.inf).astype(np.float32)


def old_keys() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Line n: the most that a key's scores [16 queries] may be where the first n see it."""
    return np.where(np.tri(TILE_ROWS, k=-1), np.inf, _LOWEST).astype(np.float32)


@njit(nogil=True, error_model="numpy")
def _span_of(position: int) -> int:
    """The first position of its span. Values are kept from that of the first seen on."""
    return position // SPAN_KEYS * SPAN_KEYS


def values_bytes(num_kv_heads: int, head_dim: int, first: int, context: int) -> int:
    """Size of the row's transposed values."""
    num_steps = -(-context // TILE_DEPTH) - first // SPAN_KEYS * (SPAN_KEYS // TILE_DEPTH)
    return num_kv_heads * num_steps * TILE_DEPTH * head_dim * 2


@compiled
def chunk_scratch_bytes(group: int, head_dim: int) -> int:
    """Scratch of one thread: Q tiles, S^T, P^T, O^T, and two lines of lanes per query head."""
    per_head = head_dim * 32 + SPAN_KEYS * 64 + SPAN_KEYS * 32 + head_dim * 64 + 2 * _LANES_BYTES
    return group * per_head


@njit(nogil=True, error_model="numpy")
def _place(args: int, position: int, kv_head: int) -> int:
    """Byte offset of the key (or value) of ``position`` within the blocks."""
    block_tokens = hw.load_i64(args, _BLOCK_TOKENS)
    block = np.int64(hw.load_i32(hw.load_i64(args, _TABLE), position // block_tokens))
    row = (block * hw.load_i64(args, _NUM_KV_HEADS) + kv_head) * block_tokens
    return (row + position % block_tokens) * hw.load_i64(args, _HEAD_DIM) * 2


def transpose_values_kernel(args: int, chunk: int, thread: int) -> None:
    """32 values of every head to A tiles [head, 32 keys, D / 16, 16, 32]; zeros outside what
    the row sees."""
    context, head_dim = hw.load_i64(args, _CONTEXT), hw.load_i64(args, _HEAD_DIM)
    first = hw.load_i64(args, _FIRST)
    kept = _span_of(first)
    num_steps = (context - kept + TILE_DEPTH - 1) // TILE_DEPTH
    for kv_head in range(hw.load_i64(args, _NUM_KV_HEADS)):
        tiles = (
            hw.load_i64(args, _VALUES) + (kv_head * num_steps + chunk) * TILE_DEPTH * head_dim * 2
        )
        for key in range(TILE_DEPTH):
            position = kept + chunk * TILE_DEPTH + key
            if first <= position < context:
                source = hw.load_i64(args, _V_BLOCKS) + _place(args, position, kv_head)
                for d in range(head_dim):
                    hw.store_i16(tiles, d * TILE_DEPTH + key, hw.load_i16(source, d))
            else:
                for d in range(head_dim):
                    hw.store_i16(tiles, d * TILE_DEPTH + key, np.int16(0))


@njit(nogil=True, error_model="numpy")
def _load_queries(args: int, first: int, kv_head: int, queries: int) -> None:
    """Queries at positions [first, first + 16) to B tiles [group, D / 32, 16 pairs, 16, 2].
    Lanes outside the chunk are zeros."""
    group, head_dim = hw.load_i64(args, _GROUP), hw.load_i64(args, _HEAD_DIM)
    past, context = hw.load_i64(args, _PAST), hw.load_i64(args, _CONTEXT)
    for lane in range(TILE_ROWS):
        position = first + lane
        inside = past <= position < context
        token = hw.load_i64(args, _Q) + (position - past) * hw.load_i64(args, _Q_STRIDE) * 2
        for g in range(group):
            source = token + (kv_head * group + g) * head_dim * 2
            target = queries + g * head_dim * 32 + lane * 4
            if inside:
                for pair in range(head_dim // 2):
                    hw.store_i32(target, pair * TILE_ROWS, hw.load_i32(source, pair))
            else:
                for pair in range(head_dim // 2):
                    hw.store_i32(target, pair * TILE_ROWS, np.int32(0))


@njit(nogil=True, error_model="numpy")
def _score_keys(
    low: int, high: int, row_bytes: int, queries: int, head_dim: int, scores: int
) -> None:
    """S^T of 16 keys at ``low`` and 16 at ``high`` to [32, 16] float32."""
    tile_zero(0)
    tile_zero(1)
    for step in range(head_dim // TILE_DEPTH):
        tile_load(2, low + step * 64, row_bytes)
        tile_load(3, high + step * 64, row_bytes)
        tile_load(4, queries + step * TILE_BYTES, 64)
        tile_multiply_add(0, 2, 4)
        tile_multiply_add(1, 3, 4)
    tile_store(0, scores, 64)
    tile_store(1, scores + TILE_BYTES, 64)


@njit(nogil=True, error_model="numpy")
def _mask_future(scores: int, tile: int, own_tile: int, future_keys: int) -> None:
    """Take from the scores of key tile ``tile`` the keys later than their query."""
    if tile == own_tile:
        for r in range(TILE_ROWS):
            line = scores + r * _LANES_BYTES
            limit = vec.load(future_keys + r * _LANES_BYTES)
            vec.store(line, vec.smaller(vec.load(line), limit))
    elif tile > own_tile:
        for r in range(TILE_ROWS):
            vec.store(scores + r * _LANES_BYTES, vec.spread(_LOWEST))


@njit(nogil=True, error_model="numpy")
def _mask_old(scores: int, key: int, query: int, first: int, window: int, old_keys: int) -> None:
    """Take from the scores of the 16 keys from ``key`` on those before ``first`` and those
    that are out of the window of their query; ``query`` is the first of the 16."""
    if key >= first and key + window >= query + TILE_ROWS:
        return
    for r in range(TILE_ROWS):
        line = scores + r * _LANES_BYTES
        # The query at position p sees the key at k until p = k + window - 1.
        num_seeing = key + r + window - query
        if key + r < first or num_seeing <= 0:
            vec.store(line, vec.spread(_LOWEST))
        elif num_seeing < TILE_ROWS:
            limit = vec.load(old_keys + num_seeing * _LANES_BYTES)
            vec.store(line, vec.smaller(vec.load(line), limit))


@njit(nogil=True, error_model="numpy")
def _softmax_span(scores: int, num_keys: int, factor: float, shares: int, state: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """P^T of a span as bfloat16 pairs of keys [num_keys / 2, 16, 2]; updates maximum and sum
    (two lines at ``state``). Returns what earlier sums must be multiplied with."""
    before = vec.load(state)
    highest = before
    for key in range(num_keys):
        highest = vec.larger(highest, vec.load(scores + key * _LANES_BYTES))
    scale = vec.spread(factor)
    offset = vec.mul(highest, vec.spread(-factor))
    total = vec.spread(_ZERO)
    for pair in range(num_keys // 2):
        row = scores + pair * 2 * _LANES_BYTES
        low = vec.exp2(vec.fma(vec.load(row), scale, offset))
        high = vec.exp2(vec.fma(vec.load(row + _LANES_BYTES), scale, offset))
        total = vec.add(total, vec.add(low, high))
        vec.store_bf16_pairs(shares + pair * _LANES_BYTES, low, high)
    shrink = vec.exp2(vec.fma(before, scale, offset))
    vec.store(state, highest)
    vec.store(state + _LANES_BYTES, vec.fma(vec.load(state + _LANES_BYTES), shrink, total))
    return shrink


@njit(nogil=True, error_model="numpy")
def _mix_values(
    values: int,
    value_step: int,
    shares: int,
    num_steps: int,
    count: int,
    sums: int,
    head_bytes: int,
) -> None:
    """O^T [16 of D, 16 queries] += V^T @ P^T for up to 4 query heads, ``head_bytes`` apart."""
    tile_load(0, sums, 64)
    if count > 1:
        tile_load(1, sums + head_bytes, 64)
    if count > 2:
        tile_load(2, sums + 2 * head_bytes, 64)
    if count > 3:
        tile_load(3, sums + 3 * head_bytes, 64)
    for step in range(num_steps):
        p = shares + step * TILE_BYTES
        tile_load(4, values + step * value_step, 64)
        tile_load(5, p, 64)
        tile_multiply_add(0, 4, 5)
        if count > 1:
            tile_load(6, p + SPAN_KEYS * 32, 64)
            tile_multiply_add(1, 4, 6)
        if count > 2:
            tile_load(7, p + 2 * SPAN_KEYS * 32, 64)
            tile_multiply_add(2, 4, 7)
        if count > 3:
            tile_load(5, p + 3 * SPAN_KEYS * 32, 64)
            tile_multiply_add(3, 4, 5)
    tile_store(0, sums, 64)
    if count > 1:
        tile_store(1, sums + head_bytes, 64)
    if count > 2:
        tile_store(2, sums + 2 * head_bytes, 64)
    if count > 3:
        tile_store(3, sums + 3 * head_bytes, 64)


def attend_chunk_kernel(args: int, chunk: int, thread: int) -> None:
    """One item: 16 positions of one key/value head's group. One head after the other, so
    that its keys and values stay in the cache; in each the last positions first, because
    they see most keys: the team then ends together."""
    group, head_dim = hw.load_i64(args, _GROUP), hw.load_i64(args, _HEAD_DIM)
    num_kv_heads, context = hw.load_i64(args, _NUM_KV_HEADS), hw.load_i64(args, _CONTEXT)
    past = hw.load_i64(args, _PAST)
    first_seen, window = hw.load_i64(args, _FIRST), hw.load_i64(args, _WINDOW)
    num_tiles = (context - 1) // TILE_ROWS - past // TILE_ROWS + 1
    kv_head = chunk // num_tiles
    first = ((context - 1) // TILE_ROWS - chunk % num_tiles) * TILE_ROWS
    factor = np.float32(hw.load_f64(args, _SCALE)) * _LOG2_E
    queries = hw.load_i64(args, _SCRATCH) + thread * chunk_scratch_bytes(group, head_dim)
    scores = queries + group * head_dim * 32
    shares = scores + group * SPAN_KEYS * 64
    sums = shares + group * SPAN_KEYS * 32
    states = sums + group * head_dim * 64
    kept = _span_of(first_seen)
    num_steps = (context - kept + TILE_DEPTH - 1) // TILE_DEPTH
    value_step = TILE_DEPTH * head_dim * 2
    values = hw.load_i64(args, _VALUES) + kv_head * num_steps * value_step
    keys = hw.load_i64(args, _K_BLOCKS)
    _load_queries(args, first, kv_head, queries)
    for i in range(group * head_dim):
        vec.store(sums + i * _LANES_BYTES, vec.spread(_ZERO))
    for g in range(group):
        vec.store(states + 2 * g * _LANES_BYTES, vec.spread(_LOWEST))
        vec.store(states + (2 * g + 1) * _LANES_BYTES, vec.spread(_ZERO))
    future, old = hw.load_i64(args, _FUTURE_KEYS), hw.load_i64(args, _OLD_KEYS)
    configure_tiles(hw.load_i64(args, _CONFIG))
    end = first + TILE_ROWS
    oldest = max(first_seen, max(first, past) - window + 1)
    for span in range(_span_of(oldest), end, SPAN_KEYS):
        num_span_steps = (min(SPAN_KEYS, end - span) + TILE_DEPTH - 1) // TILE_DEPTH
        for step in range(num_span_steps):
            key = span + step * TILE_DEPTH
            low = keys + _place(args, key, kv_head)
            # Past the queries' own tile there may be no block: score the lower keys twice,
            # the mask takes the second result.
            high = low
            if key + TILE_ROWS < end:
                high = keys + _place(args, key + TILE_ROWS, kv_head)
            for g in range(group):
                q, s = (
                    queries + g * head_dim * 32,
                    scores + (g * SPAN_KEYS + step * TILE_DEPTH) * 64,
                )
                _score_keys(low, high, head_dim * 2, q, head_dim, s)
                _mask_future(s, key // TILE_ROWS, first // TILE_ROWS, future)
                _mask_future(s + TILE_BYTES, key // TILE_ROWS + 1, first // TILE_ROWS, future)
                _mask_old(s, key, first, oldest, window, old)
                _mask_old(s + TILE_BYTES, key + TILE_ROWS, first, oldest, window, old)
        for g in range(group):
            shrink = _softmax_span(
                scores + g * SPAN_KEYS * 64, num_span_steps * TILE_DEPTH, factor,
                shares + g * SPAN_KEYS * 32, states + 2 * g * _LANES_BYTES,
            )  # fmt: skip
            head_sums = sums + g * head_dim * _LANES_BYTES
            for d in range(head_dim):
                line = head_sums + d * _LANES_BYTES
                vec.store(line, vec.mul(vec.load(line), shrink))
        span_values = values + (span - kept) // TILE_DEPTH * value_step
        for d in range(0, head_dim, TILE_ROWS):
            for g in range(0, group, 4):
                _mix_values(
                    span_values + d * TILE_DEPTH * 2, value_step, shares + g * SPAN_KEYS * 32,
                    num_span_steps, min(4, group - g),
                    sums + (g * head_dim + d) * _LANES_BYTES, head_dim * _LANES_BYTES,
                )  # fmt: skip
    release_tiles()
    for g in range(group):
        head_sums = sums + g * head_dim * _LANES_BYTES
        totals = vec.load(states + (2 * g + 1) * _LANES_BYTES)
        inverse = vec.div(vec.spread(_ONE), totals)
        for pair in range(head_dim // 2):
            line = head_sums + 2 * pair * _LANES_BYTES
            low, high = vec.load(line), vec.load(line + _LANES_BYTES)
            # Pairs of D as bfloat16 take the place of the scores.
            vec.store_bf16_pairs(
                scores + pair * _LANES_BYTES, vec.mul(low, inverse), vec.mul(high, inverse)
            )
        for position in range(max(first, past), min(end, context)):
            head = ((position - past) * num_kv_heads + kv_head) * group + g
            target = hw.load_i64(args, _OUT) + head * head_dim * 2
            column = scores + (position - first) * 4
            for pair in range(head_dim // 2):
                hw.store_i32(target, pair, hw.load_i32(column, pair * TILE_ROWS))


@compiled
def attend_chunk_tiles(
    state: int, transpose_kernel: int, attend_kernel: int, config: int, scale: float,
    q: int, q_stride: int, k_blocks: int, v_blocks: int, table: int, out: int, values: int,
    scratch: int, group: int, num_kv_heads: int, head_dim: int, block_tokens: int,
    past: int, context: int, first: int, window: int, future: int, old: int,
) -> None:  # fmt: skip
    """Queries of positions [past, context) to ``out`` [context - past, N, head_dim].

    The query at position p sees [max(first, p - window + 1), p]. ``future`` is
    ``future_keys()``, ``old`` is ``old_keys()``; head_dim is a multiple of 32, at most
    MAX_HEAD_DIM, and block_tokens of 16; KV is bfloat16.
    """
    args = state + ARGS
    hw.store_i64(args, _CONFIG, config)
    hw.store_i64(args, _Q, q)
    hw.store_i64(args, _Q_STRIDE, q_stride)
    hw.store_i64(args, _K_BLOCKS, k_blocks)
    hw.store_i64(args, _V_BLOCKS, v_blocks)
    hw.store_i64(args, _TABLE, table)
    hw.store_i64(args, _OUT, out)
    hw.store_i64(args, _VALUES, values)
    hw.store_i64(args, _SCRATCH, scratch)
    hw.store_i64(args, _GROUP, group)
    hw.store_i64(args, _NUM_KV_HEADS, num_kv_heads)
    hw.store_i64(args, _HEAD_DIM, head_dim)
    hw.store_i64(args, _BLOCK_TOKENS, block_tokens)
    hw.store_i64(args, _PAST, past)
    hw.store_i64(args, _CONTEXT, context)
    hw.store_i64(args, _FIRST, first)
    hw.store_i64(args, _WINDOW, window)
    hw.store_i64(args, _FUTURE_KEYS, future)
    hw.store_i64(args, _OLD_KEYS, old)
    hw.store_f64(args, _SCALE, scale)
    run(state, transpose_kernel, (context - _span_of(first) + TILE_DEPTH - 1) // TILE_DEPTH)
    num_tiles = (context - 1) // TILE_ROWS - past // TILE_ROWS + 1
    run(state, attend_kernel, num_tiles * num_kv_heads)
