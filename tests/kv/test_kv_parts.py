"""Pool, prefix index, eviction order and audit: each part by itself."""

from __future__ import annotations

import doctest
from dataclasses import dataclass, field

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
    entry = index.add(parent, tokens, BlockId(block), has_window=True)
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
    assert index.add(ROOT, (9, 9), BlockId(1), has_window=True) is None
    assert index.add(head, (1, 2), BlockId(1), has_window=True) is None
    assert len(index) == 1


def test_the_same_prefix_keeps_its_first_block() -> None:
    index = PrefixIndex()
    first = added(index, ROOT, (1, 2), 0)
    assert index.add(ROOT, (1, 2), BlockId(7), has_window=True) is first
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
    assert index.add(last, (6,), BlockId(9), has_window=True) is None  # its parent is gone


def test_children_come_the_last_used_first_and_a_roots_children_too() -> None:
    index = PrefixIndex()
    heads = [added(index, ROOT, (n,), n) for n in range(5)]
    assert list(index.children(ROOT, 3)) == heads[:1:-1]
    index.use(heads[1])
    index.remove(heads[4])
    assert list(index.children(ROOT, 9)) == [heads[1], heads[3], heads[2], heads[0]]
    assert list(index.children(heads[0], 9)) == []
    assert [entry.row for entry in (heads[0], added(index, heads[0], (7,), 7))] == [0, 1]


def test_a_tail_gives_way_to_the_full_block_in_the_same_place() -> None:
    index = PrefixIndex()
    tail = added(index, ROOT, (1,), 0)
    full = added(index, ROOT, (1, 2), 0)
    assert index.entry_of(BlockId(0)) is full
    assert tail not in index
    assert list(index.children(ROOT, 9)) == [full]


def test_an_entry_moves_to_a_block_that_has_the_window_and_stays_what_it_is() -> None:
    index = PrefixIndex()
    entry = index.add(ROOT, (1, 2), BlockId(0), has_window=False)
    assert entry is not None
    child = added(index, entry, (3, 4), 1)
    version = index.version
    assert index.move(entry, BlockId(5)) == 0
    assert (entry.block, entry.has_window) == (5, True)
    assert index.entry_of(BlockId(5)) is entry
    assert index.entry_of(BlockId(0)) is None
    assert index.find(entry, (3, 4)) is child
    assert index.version > version


def test_a_look_changes_the_version_of_nothing_and_every_change_does() -> None:
    index = PrefixIndex()
    seen = {index.version}
    head = added(index, ROOT, (1, 2), 0)
    seen.add(index.version)
    index.find(ROOT, (1, 2))
    list(index.children(ROOT, 9))
    assert index.version in seen
    index.use(head)
    seen.add(index.version)
    index.remove(head)
    seen.add(index.version)
    assert len(seen) == 4


def test_eviction_order_examples_in_its_docstring_hold() -> None:
    result = doctest.testmod(eviction)
    assert result.attempted
    assert not result.failed


def test_choosing_victims_changes_nothing() -> None:
    order = EvictionOrder()
    order.retire([BlockId(1), BlockId(2)])
    assert order.choose(1) == order.choose(1) == (2,)
    assert order.choose(5) == (2, 1)
    assert order.choose(2, skipped={BlockId(2)}) == (1,)
    order.discard([BlockId(2), BlockId(8)])
    assert tuple(order) == (1,)
    assert BlockId(1) in order


@dataclass
class Books:
    """Block 0: cached head, block 1: its cached tail, block 2: held by one table, 3: free."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(4))
    index: PrefixIndex = field(default_factory=PrefixIndex)
    order: EvictionOrder = field(default_factory=EvictionOrder)
    tables: list[tuple[BlockId, ...]] = field(default_factory=list)
    pins: dict[BlockId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table = (self.pool.take(), self.pool.take(), self.pool.take())
        head = added(self.index, ROOT, (1, 2), table[0])
        added(self.index, head, (3, 4), table[1])
        for block in table[:2]:
            self.pool.release(block, keep=True)
        self.order.retire(table[:2])
        self.tables.append(table[2:])

    def check(self, *, has_windows: bool = False) -> None:
        check_integrity(
            self.pool,
            self.index,
            self.order,
            self.tables,
            self.pins,
            block_tokens=2,
            has_windows=has_windows,
        )


def test_the_audit_accepts_sound_books() -> None:
    Books().check()


def test_the_audit_sees_a_leaked_block() -> None:
    books = Books()
    books.tables.clear()
    with pytest.raises(AuditError, match=r"block 2 is Held\(refcount=1\) but is in 0 tables"):
        books.check()


def test_the_audit_sees_a_table_with_a_block_that_was_freed() -> None:
    books = Books()
    books.tables.append((BlockId(3),))
    with pytest.raises(AuditError, match=r"block 3 is Free\(\) but is in 1 tables"):
        books.check()


def test_the_audit_sees_a_pin_that_holds_nothing_and_a_hold_without_a_pin() -> None:
    books = Books()
    books.pins[BlockId(1)] = 1
    with pytest.raises(AuditError, match=r"block 1 is Cached\(\) .* has 1 pins"):
        books.check()
    books.pool.share(BlockId(1))
    books.check()  # pinned: it keeps its place in the order
    del books.pins[BlockId(1)]
    with pytest.raises(AuditError, match=r"block 1 is Held\(refcount=1\) .* has 0 pins"):
        books.check()


def test_the_audit_sees_a_cached_block_that_nothing_can_evict() -> None:
    books = Books()
    books.order.discard([BlockId(0)])
    with pytest.raises(AuditError, match="1 blocks in the order, 2 are idle"):
        books.check()


def test_the_audit_sees_a_block_that_could_be_evicted_under_its_sequence() -> None:
    books = Books()
    books.order.retire([BlockId(2)])
    with pytest.raises(AuditError, match="3 blocks in the order, 2 are idle"):
        books.check()


def test_the_audit_sees_a_tail_that_would_outlive_its_head() -> None:
    books = Books()
    books.order.retire([BlockId(1)])
    with pytest.raises(AuditError, match="block 1 would outlive its head 0"):
        books.check()


def test_the_audit_sees_a_key_of_a_free_block() -> None:
    books = Books()
    added(books.index, ROOT, (9, 9), 3)
    with pytest.raises(AuditError, match="indexed block 3 is free"):
        books.check()


def test_the_audit_sees_what_follows_a_tail() -> None:
    books = Books()
    tail = added(books.index, ROOT, (7,), 2)
    books.check()
    books.tables.append((books.pool.take(),))
    added(books.index, tail, (8, 9), books.tables[-1][0])
    with pytest.raises(AuditError, match="block 3 follows a tail, block 2"):
        books.check()


def test_the_audit_sees_a_missing_window_where_there_are_no_windows() -> None:
    books = Books()
    books.index.add(ROOT, (7,), BlockId(2), has_window=False)
    books.check(has_windows=True)
    with pytest.raises(AuditError, match="block 2 lacks window KV"):
        books.check()
