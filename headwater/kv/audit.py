"""Does the bookkeeping add up? Compares every part of ``kv`` with every other.

O(blocks): for tests and for the moments when a worker is idle. Changes
nothing. ``KVManager.check_integrity`` calls it with its own parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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
) -> None:
    """Raises AuditError at the first thing that does not add up.

    - free + cached + held == total, and the states agree with the counts
    - a held block's refcount is the number of tables with it
    - a cached block is indexed and evictable, a free one is neither
    - each entry's ancestors are indexed; a chain's tail is evicted before its head
    """
    _check_pool(pool, tables)
    _check_index(pool, index)
    _check_order(pool, index, order)


def _check_pool(pool: BlockPool, tables: Iterable[tuple[BlockId, ...]]) -> None:
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

    uses: Counter[BlockId] = Counter()
    for table in tables:
        _require(len(set(table)) == len(table), "a block is twice in one table")
        uses.update(table)
    for i, state in enumerate(states):
        refcount = state.refcount if isinstance(state, Held) else 0
        used = uses[BlockId(i)]
        _require(refcount == used, f"block {i} is {state} but is in {used} tables")


def _check_index(pool: BlockPool, index: PrefixIndex) -> None:
    for entry in index:
        _require(index.entry_of(entry.block) is entry, f"block {entry.block} and its key disagree")
        _require(
            not isinstance(pool.state(entry.block), Free), f"indexed block {entry.block} is free"
        )
        if isinstance(entry.parent, PrefixEntry):
            _require(entry.parent in index, f"block {entry.block} has an evicted ancestor")


def _check_order(pool: BlockPool, index: PrefixIndex, order: EvictionOrder) -> None:
    rank = {block: place for place, block in enumerate(order)}
    _require(
        len(rank) == pool.num_cached, f"{len(rank)} evictable blocks, {pool.num_cached} cached"
    )
    for block, place in rank.items():
        _require(pool.is_cached(block), f"evictable block {block} is {pool.state(block)}")
        entry = index.entry_of(block)
        _require(entry is not None, f"cached block {block} has no key")
        if entry is not None and isinstance(entry.parent, PrefixEntry):
            # A held parent has no rank: it outlives its cached child anyhow.
            head = rank.get(entry.parent.block, place + 1)
            _require(place < head, f"block {block} would outlive its head {entry.parent.block}")


def _require(fact: bool, otherwise: str) -> None:
    if not fact:
        raise AuditError(f"kv: {otherwise}")
