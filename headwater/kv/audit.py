"""Does the bookkeeping add up? Compares every part of ``kv`` with every other.

O(blocks): for tests and for the moments when a worker is idle. Changes
nothing. ``KVManager.check_integrity`` calls it with its own parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from headwater.core.blocks import BlockId
from headwater.core.errors import AuditError
from headwater.kv.eviction import EvictionOrder
from headwater.kv.pool import BlockPool, Cached, Free, Held
from headwater.kv.prefix_index import PrefixEntry, PrefixIndex


def check_integrity(
    pool: BlockPool,
    index: PrefixIndex,
    order: EvictionOrder,
    tables: Iterable[tuple[BlockId, ...]],
    pins: Mapping[BlockId, int],
    *,
    block_tokens: int,
    has_windows: bool,
) -> None:
    """Raises AuditError at the first thing that does not add up.

    - free + cached + held == total, and the states agree with the counts
    - a held block's refcount is the number of tables with it, and of its pins
    - a cached block is indexed and evictable, a free one is neither; a published one that
      is only pinned has its place in the order too
    - each entry's ancestors are indexed, full, one per row; nothing follows a tail
    - a chain's tail is evicted before its head
    """
    uses: Counter[BlockId] = Counter()
    for table in tables:
        _require(len(set(table)) == len(table), "a block is twice in one table")
        uses.update(table)
    _check_pool(pool, uses, pins)
    _check_index(pool, index, block_tokens, has_windows)
    _check_order(pool, index, order, uses)


def _check_pool(pool: BlockPool, uses: Mapping[BlockId, int], pins: Mapping[BlockId, int]) -> None:
    states = [pool.state(BlockId(i)) for i in range(pool.num_blocks)]
    kinds = Counter(type(state) for state in states)
    counted = (kinds[Free], kinds[Cached], kinds[Held])
    claimed = (pool.num_free, pool.num_cached, pool.num_held)
    _require(counted == claimed, f"(free, cached, held) is {counted}, counters say {claimed}")
    _require(
        sum(claimed) == pool.num_blocks, f"{claimed} does not add up to {pool.num_blocks} blocks"
    )

    free = pool.free_blocks
    _require(len(set(free)) == len(free), "a block is twice on the free list")
    for block in free:
        _require(isinstance(states[block], Free), f"free list has block {block}: {states[block]}")

    for i, state in enumerate(states):
        refcount = state.refcount if isinstance(state, Held) else 0
        used, pinned = uses.get(BlockId(i), 0), pins.get(BlockId(i), 0)
        _require(
            refcount == used + pinned,
            f"block {i} is {state} but is in {used} tables and has {pinned} pins",
        )


def _check_index(pool: BlockPool, index: PrefixIndex, block_tokens: int, has_windows: bool) -> None:
    for entry in index:
        _require(index.entry_of(entry.block) is entry, f"block {entry.block} and its key disagree")
        _require(
            not isinstance(pool.state(entry.block), Free), f"indexed block {entry.block} is free"
        )
        _require(
            0 < len(entry.tokens) <= block_tokens,
            f"block {entry.block} is published with {len(entry.tokens)} tokens",
        )
        _require(
            has_windows or entry.has_window,
            f"block {entry.block} lacks window KV of a model that has none",
        )
        row = 0
        if isinstance(entry.parent, PrefixEntry):
            _require(entry.parent in index, f"block {entry.block} has an evicted ancestor")
            _require(
                len(entry.parent.tokens) == block_tokens,
                f"block {entry.block} follows a tail, block {entry.parent.block}",
            )
            row = entry.parent.row + 1
        _require(entry.row == row, f"block {entry.block} is in row {entry.row}, not {row}")


def _check_order(
    pool: BlockPool, index: PrefixIndex, order: EvictionOrder, uses: Mapping[BlockId, int]
) -> None:
    rank = {block: place for place, block in enumerate(order)}
    idle = {entry.block for entry in index if not uses.get(entry.block, 0)}
    _require(len(rank) == len(idle), f"{len(rank)} blocks in the order, {len(idle)} are idle")
    num_cached = sum(pool.is_cached(block) for block in idle)
    _require(
        num_cached == pool.num_cached,
        f"{num_cached} evictable blocks, {pool.num_cached} cached",
    )
    for block, place in rank.items():
        _require(block in idle, f"evictable block {block} is {pool.state(block)}")
        entry = index.entry_of(block)
        _require(entry is not None, f"cached block {block} has no key")
        if entry is not None and isinstance(entry.parent, PrefixEntry):
            # A held parent has no rank: it outlives its cached child anyhow.
            head = rank.get(entry.parent.block, place + 1)
            _require(place < head, f"block {block} would outlive its head {entry.parent.block}")


def _require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise AuditError(f"kv: {otherwise}")
