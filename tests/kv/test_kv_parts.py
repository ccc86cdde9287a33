"""Pool, prefix index, eviction order and audit: each part by itself."""

from __future__ import annotations

import doctest

import pytest

from headwater.core.blocks import BlockId, CacheIdentity
from headwater.core.errors import AuditError, ConfigError, InvalidChange
from headwater.kv import eviction
from headwater.kv.audit import check_integrity
from headwater.kv.eviction import EvictionOrder
from headwater.kv.pool import BlockPool, Cached, Free, Held
from headwater.kv.prefix_index import PrefixEntry, PrefixIndex, PrefixRoot

ROOT = PrefixRoot.of(CacheIdentity("model", "layout"))


def added(
    index: PrefixIndex, parent: PrefixRoot | PrefixEntry, tokens: tuple[int, ...], block: int
) -> PrefixEntry:
    entry = index.add(parent, tokens, BlockId(block))
    assert entry is not None
    return entry


def test_a_block_goes_round_all_its_states() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert pool.state(block) == Held(1)
    pool.share(block)
    assert pool.release(block, keep=True) == Held(1)
    assert pool.release(block, keep=True) == Cached()
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 1, 0)
    pool.share(block)
    assert pool.state(block) == Held(1)
    assert pool.release(block, keep=False) == Free()
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 0, 0)


def test_a_change_that_a_state_does_not_have_names_the_state() -> None:
    pool = BlockPool(1)
    with pytest.raises(InvalidChange, match=r"Free\(\) cannot be shared"):
        pool.share(BlockId(0))
    with pytest.raises(InvalidChange, match=r"Free\(\) cannot be released"):
        pool.release(BlockId(0), keep=True)
    block = pool.take()
    with pytest.raises(InvalidChange, match=r"Held\(refcount=1\) cannot be evicted"):
        pool.evict(block)
    with pytest.raises(InvalidChange, match="no block is free"):
        pool.take()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(0)


def test_a_hit_needs_the_same_tokens_under_the_same_parent() -> None:
    index = PrefixIndex()
    head = added(index, ROOT, (1, 2), 0)
    tail = added(index, head, (3, 4), 1)
    assert index.find(ROOT, (1, 2)) is head
    assert index.find(head, (3, 4)) is tail
    assert index.find(ROOT, (3, 4)) is None
    assert index.find(head, (3, 5)) is None
    assert index.find(PrefixRoot.of(CacheIdentity("model", "layout", "x")), (1, 2)) is None


def test_a_forced_hash_collision_is_a_miss_and_never_another_prefix() -> None:
    index = PrefixIndex(hash_block=lambda parent, tokens: parent)  # everything collides
    head = added(index, ROOT, (1, 2), 0)
    assert head.key == ROOT.key
    assert index.find(ROOT, (1, 2)) is head
    assert index.find(ROOT, (9, 9)) is None
    assert index.find(head, (1, 2)) is None  # same tokens, same key, other parent
    assert index.add(ROOT, (9, 9), BlockId(1)) is None
    assert index.add(head, (1, 2), BlockId(1)) is None
    assert len(index) == 1


def test_the_same_prefix_keeps_its_first_block() -> None:
    index = PrefixIndex()
    first = added(index, ROOT, (1, 2), 0)
    assert index.add(ROOT, (1, 2), BlockId(7)) is first
    assert index.entry_of(BlockId(7)) is None


def test_removing_a_head_removes_what_can_no_longer_be_reached() -> None:
    index = PrefixIndex()
    head = added(index, ROOT, (1,), 0)
    tail = added(index, head, (2,), 1)
    other = added(index, head, (3,), 2)
    last = added(index, tail, (4,), 3)
    stays = added(index, ROOT, (5,), 4)
    dropped = index.remove(head)
    assert dropped[0] is head
    assert set(dropped) == {head, tail, other, last}
    assert list(index) == [stays]
    assert index.add(last, (6,), BlockId(9)) is None  # its parent is gone


def test_eviction_order_examples_in_its_docstring_hold() -> None:
    result = doctest.testmod(eviction)
    assert result.attempted
    assert not result.failed


def test_choosing_victims_changes_nothing() -> None:
    order = EvictionOrder()
    order.retire([BlockId(1), BlockId(2)])
    assert order.choose(1) == order.choose(1) == (2,)
    assert order.choose(5) == (2, 1)
    order.discard([BlockId(2), BlockId(8)])
    assert tuple(order) == (1,)


def audit_parts() -> tuple[BlockPool, PrefixIndex, EvictionOrder, list[tuple[BlockId, ...]]]:
    """Block 0: cached head, block 1: its cached tail, block 2: held by one table, 3: free."""
    pool, index, order = BlockPool(4), PrefixIndex(), EvictionOrder()
    table = (pool.take(), pool.take(), pool.take())
    head = added(index, ROOT, (1,), table[0])
    added(index, head, (2,), table[1])
    for block in table[:2]:
        pool.release(block, keep=True)
    order.retire(table[:2])
    return pool, index, order, [table[2:]]


def test_the_audit_accepts_sound_books() -> None:
    check_integrity(*audit_parts())


def test_the_audit_sees_a_leaked_block() -> None:
    pool, index, order, _ = audit_parts()
    with pytest.raises(AuditError, match=r"block 2 is Held\(refcount=1\) but is in 0 tables"):
        check_integrity(pool, index, order, [])


def test_the_audit_sees_a_table_with_a_block_that_was_freed() -> None:
    pool, index, order, tables = audit_parts()
    with pytest.raises(AuditError, match=r"block 3 is Free\(\) but is in 1 tables"):
        check_integrity(pool, index, order, [*tables, (BlockId(3),)])


def test_the_audit_sees_a_cached_block_that_nothing_can_evict() -> None:
    pool, index, order, tables = audit_parts()
    order.discard([BlockId(0)])
    with pytest.raises(AuditError, match="1 evictable blocks, 2 cached"):
        check_integrity(pool, index, order, tables)


def test_the_audit_sees_a_tail_that_would_outlive_its_head() -> None:
    pool, index, order, tables = audit_parts()
    order.retire([BlockId(1)])
    with pytest.raises(AuditError, match="block 1 would outlive its head 0"):
        check_integrity(pool, index, order, tables)


def test_the_audit_sees_a_key_of_a_free_block() -> None:
    pool, index, order, tables = audit_parts()
    added(index, ROOT, (9,), 3)
    with pytest.raises(AuditError, match="indexed block 3 is free"):
        check_integrity(pool, index, order, tables)
