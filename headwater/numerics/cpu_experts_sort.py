"""Which tokens meet which expert: pairs of (token, expert) sorted by expert, without Python.

A step's routing is known only when it runs, so what the kernels of ``cpu_experts_few`` and
``cpu_experts_many`` are to do lies in memory: a plan that one kernel writes and the others
read. Knows addresses and sizes only; ``cpu_experts.py`` makes room for it.

    pair p     token p // k with its (p % k)-th expert
    plan       int64: num_blocks, num_used, addresses of the five lists that follow
    starts     [E + 1]    sorted pairs [starts[e], starts[e + 1]) are those of expert e
    firsts     [E + 1]    blocks [firsts[e], firsts[e + 1]) too
    used       [E]        the num_used experts that have a pair, ascending
    order      [P]        sorted pairs, by expert, then by token
    blocks     [.., 4]    expert, first sorted pair, number of pairs, lanes of the blocks before

A block is what one tile of sums holds along its lanes: WIDE_LANES pairs, or NARROW_LANES
at the end of an expert's pairs if these are enough.
"""

from __future__ import annotations

from numba import njit

from headwater.numerics import cpu_intrinsics as hw

WIDE_VECTORS = 3 if hw.LANES == 16 else 2
WIDE_LANES = WIDE_VECTORS * hw.LANES
NARROW_LANES = hw.LANES
_ZERO = hw.f32(0)

NUM_BLOCKS, NUM_USED, STARTS, FIRSTS, USED, ORDER, BLOCKS = range(7)
_HEADER_WORDS, BLOCK_WORDS = 7, 4
EXPERT, FIRST, COUNT, LANES_BEFORE = range(4)


def most_blocks(num_pairs: int, num_experts: int) -> int:
    """Each expert has at most one block that is not full."""
    return num_pairs // WIDE_LANES + min(num_pairs, num_experts)


def most_lanes(num_pairs: int, num_experts: int) -> int:
    """An expert's last block is wide only if more than NARROW_LANES of it are used."""
    unused = max(NARROW_LANES - 1, WIDE_LANES - NARROW_LANES - 1)
    return num_pairs + min(num_pairs, num_experts) * unused


def plan_bytes(num_pairs: int, num_experts: int) -> int:
    lists = 3 * (num_experts + 1) + num_pairs + BLOCK_WORDS * most_blocks(num_pairs, num_experts)
    return 8 * (_HEADER_WORDS + lists)


@njit(nogil=True, error_model="numpy")
def _list_all(plan: int, num_pairs: int, num_experts: int) -> None:
    """Every token has all experts."""
    starts, order = hw.load_i64(plan, STARTS), hw.load_i64(plan, ORDER)
    num_tokens = num_pairs // num_experts
    for e in range(num_experts):
        hw.store_i64(starts, e, e * num_tokens)
        for token in range(num_tokens):
            hw.store_i64(order, e * num_tokens + token, token * num_experts + e)
    hw.store_i64(starts, num_experts, num_pairs)


@njit(nogil=True, error_model="numpy")
def _sort(plan: int, ids: int, num_pairs: int, num_experts: int) -> None:
    """Counting sort."""
    starts, order = hw.load_i64(plan, STARTS), hw.load_i64(plan, ORDER)
    # starts[e + 1] counts expert e, then is where its next pair goes, then where they end.
    for e in range(num_experts + 1):
        hw.store_i64(starts, e, 0)
    for pair in range(num_pairs):
        e = hw.load_i32(ids, pair)
        hw.store_i64(starts, e + 1, hw.load_i64(starts, e + 1) + 1)
    total = 0
    for e in range(num_experts):
        count = hw.load_i64(starts, e + 1)
        hw.store_i64(starts, e + 1, total)
        total += count
    for pair in range(num_pairs):
        e = hw.load_i32(ids, pair)
        place = hw.load_i64(starts, e + 1)
        hw.store_i64(order, place, pair)
        hw.store_i64(starts, e + 1, place + 1)


@njit(nogil=True, error_model="numpy")
def _cut(plan: int, num_experts: int) -> None:
    """Blocks, and the experts that have one."""
    starts, firsts = hw.load_i64(plan, STARTS), hw.load_i64(plan, FIRSTS)
    used, block = hw.load_i64(plan, USED), hw.load_i64(plan, BLOCKS)
    num_blocks, num_used, lanes = 0, 0, 0
    for e in range(num_experts):
        hw.store_i64(firsts, e, num_blocks)
        pair, end = hw.load_i64(starts, e), hw.load_i64(starts, e + 1)
        if pair < end:
            hw.store_i64(used, num_used, e)
            num_used += 1
        while pair < end:
            width = NARROW_LANES if end - pair <= NARROW_LANES else WIDE_LANES
            hw.store_i64(block, EXPERT, e)
            hw.store_i64(block, FIRST, pair)
            hw.store_i64(block, COUNT, min(width, end - pair))
            hw.store_i64(block, LANES_BEFORE, lanes)
            block += 8 * BLOCK_WORDS
            num_blocks += 1
            lanes += width
            pair += width
    hw.store_i64(firsts, num_experts, num_blocks)
    hw.store_i64(plan, NUM_BLOCKS, num_blocks)
    hw.store_i64(plan, NUM_USED, num_used)


def sort_kernel(args: int, chunk: int, thread: int) -> None:
    """Write the plan; one chunk. With ``x``, also its tokens in the order of sorted pairs.

    args: plan, ids (int32 [P]) or 0 for all experts, num_pairs, num_experts, x (bfloat16) or 0,
    x_stride (elements), num_chosen, features, wide (float32 [P, padded]), padded.
    """
    plan, ids = hw.load_i64(args, 0), hw.load_i64(args, 1)
    num_pairs, num_experts = hw.load_i64(args, 2), hw.load_i64(args, 3)
    starts = plan + 8 * _HEADER_WORDS
    firsts = starts + 8 * (num_experts + 1)
    used = firsts + 8 * (num_experts + 1)
    order = used + 8 * (num_experts + 1)
    hw.store_i64(plan, STARTS, starts)
    hw.store_i64(plan, FIRSTS, firsts)
    hw.store_i64(plan, USED, used)
    hw.store_i64(plan, ORDER, order)
    hw.store_i64(plan, BLOCKS, order + 8 * num_pairs)
    if ids == 0:
        _list_all(plan, num_pairs, num_experts)
    else:
        _sort(plan, ids, num_pairs, num_experts)
    _cut(plan, num_experts)
    x, stride, num_chosen = hw.load_i64(args, 4), hw.load_i64(args, 5), hw.load_i64(args, 6)
    features, padded = hw.load_i64(args, 7), hw.load_i64(args, 9)
    if x != 0:
        for place in range(num_pairs):
            source = x + hw.load_i64(order, place) // num_chosen * stride * 2
            target = hw.load_i64(args, 8) + place * padded * 4
            for i in range(features):
                hw.store_f32(target, i, hw.load_bf16(source, i))
            for i in range(features, padded):
                hw.store_f32(target, i, _ZERO)
