"""``core.ports.RecordStore`` as one suite, run over every implementation.

To add one, add a line to ``IMPLEMENTATIONS``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from disk_parts import (
    BLOCK,
    DAY_S,
    DAYS,
    MIB,
    SIZE,
    WEEK,
    SetClock,
    chain,
    content,
    first_blocks,
    kept,
    open_store,
    pieces,
    put,
    read,
)

from headwater.core.blocks import CacheIdentity
from headwater.core.cache import KVPart, MissReason, Retention, RetentionClass, StoredRecord
from headwater.core.errors import RecordLost
from headwater.core.ports import RecordStore
from headwater.disk.host import HostStore

Open = Callable[[Path, SetClock], RecordStore]

IMPLEMENTATIONS: dict[str, Open] = {
    "disk": lambda folder, clock: open_store(folder / "kv", clock),
    "host": lambda folder, clock: HostStore(max_bytes=16 * MIB, clock=clock),
}


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: SetClock) -> Iterator[RecordStore]:
    with contextlib.closing(IMPLEMENTATIONS[request.param](tmp_path, clock)) as opened:
        yield opened


def test_what_was_put_is_found_and_read_back(store: RecordStore) -> None:
    metas = chain(range(3 * BLOCK + 2))
    assert put(store, metas) == [True] * 4
    found = store.find([meta.key for meta in metas])
    assert found == [StoredRecord(meta, store.stats().tier, SIZE) for meta in metas]
    assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]


def test_find_keeps_the_order_and_the_gaps(store: RecordStore) -> None:
    metas = chain(range(700 * BLOCK))
    put(store, metas[::7], size=310)
    asked = list(reversed(metas))
    assert kept(store, asked) == [meta in metas[::7] for meta in asked]
    assert store.find([]) == []


def test_a_record_is_a_copy(store: RecordStore) -> None:
    (meta,) = first_blocks([1])
    data = bytearray(content(meta))
    assert store.put(meta, [memoryview(data)], WEEK)
    data[:] = bytes(len(data))
    assert read(store, meta) == content(meta)


def test_the_first_put_stays(store: RecordStore) -> None:
    (meta,) = first_blocks([1])
    assert put(store, [meta]) == [True]
    assert store.put(meta, [memoryview(bytes(SIZE))], WEEK)
    assert read(store, meta) == content(meta)
    stats = store.stats()
    assert (stats.num_records, stats.num_put, stats.num_refused) == (1, 1, 1)


def test_each_part_and_tenant_has_records_of_its_own(store: RecordStore) -> None:
    metas = [
        first_blocks([1], CacheIdentity("model", "layout", tenant))[0] for tenant in ("", "a", "b")
    ]
    window = replace(metas[0], part=KVPart.WINDOW, key=first_blocks([9])[0].key)
    put(store, [*metas, window])
    assert [read(store, meta) for meta in (*metas, window)] == [
        content(meta) for meta in (*metas, window)
    ]


def test_children_are_those_of_the_parent_the_last_used_first(
    store: RecordStore, clock: SetClock
) -> None:
    head = list(range(BLOCK))
    children = [chain([*head, *([number] * BLOCK)])[1] for number in range(5)]
    for child in children:
        clock.at_s += 1
        put(store, [child])
    put(store, chain(head))
    clock.at_s += 1
    store.touch([children[1].key], WEEK)
    found = store.children(children[0].parent, 3)
    assert [record.meta for record in found] == [children[1], children[4], children[3]]
    assert store.children(children[0].key, 3) == []


def test_a_tail_goes_when_a_longer_record_begins_with_it(store: RecordStore) -> None:
    head = list(range(BLOCK))
    short = chain([*head, 1])[1]
    longer = chain([*head, 1, 2])[1]
    other = chain([*head, 7])[1]
    full = chain([*head, 1, 2, 3, 4])[1]
    put(store, [*chain(head), short, other])
    put(store, [longer])
    assert kept(store, [short, other, longer]) == [False, True, True]
    put(store, [full])
    assert kept(store, [longer, other, full, *chain(head)]) == [False, True, True, True]


def test_a_read_checks_what_it_was_asked_for(store: RecordStore) -> None:
    (meta,) = first_blocks([1])
    wrong = [
        replace(meta, identity=CacheIdentity("other", "layout", "tenant")),
        replace(meta, identity=CacheIdentity("model", "layout", "other!")),
        replace(meta, parent=meta.key),
        replace(meta, start=BLOCK),
        replace(meta, tokens=(1, 1, 1, 2)),
        replace(meta, part=KVPart.WINDOW),
    ]
    for other in wrong:
        put(store, [meta])
        with pytest.raises(RecordLost):
            read(store, other)
    put(store, [meta])
    assert read(store, meta) == content(meta)
    with pytest.raises(RecordLost):
        read(store, meta, SIZE - 1)


def test_reading_what_is_gone_is_a_loss_and_no_damage(store: RecordStore) -> None:
    (meta,) = first_blocks([1])
    put(store, [meta])
    store.remove([meta.key, first_blocks([2])[0].key])
    with pytest.raises(RecordLost) as lost:
        read(store, meta)
    assert not lost.value.is_damaged
    assert kept(store, [meta]) == [False]
    assert store.stats().num_damaged == 0


def test_a_removed_record_can_be_put_again(store: RecordStore) -> None:
    (meta,) = first_blocks([1])
    put(store, [meta])
    store.remove([meta.key])
    assert store.absence(meta.key) is MissReason.NEW
    assert put(store, [meta]) == [True]
    assert read(store, meta) == content(meta)


def test_a_record_expires_after_its_last_use(store: RecordStore, clock: SetClock) -> None:
    used, unused = first_blocks([1, 2])
    put(store, [used, unused], DAYS)
    clock.at_s += 2 * DAY_S
    store.touch([used.key], DAYS)
    clock.at_s += DAY_S
    assert kept(store, [used, unused]) == [True, False]
    assert store.absence(unused.key) is MissReason.EXPIRED
    with pytest.raises(RecordLost):
        read(store, unused)
    clock.at_s += 2 * DAY_S
    assert kept(store, [used]) == [False]
    store.touch([used.key], DAYS)
    assert kept(store, [used]) == [False]


def test_an_expired_record_can_be_put_again(store: RecordStore, clock: SetClock) -> None:
    (meta,) = first_blocks([1])
    put(store, [meta], DAYS)
    clock.at_s += 4 * DAY_S
    assert store.children(meta.parent, 5) == []
    assert put(store, [meta], DAYS) == [True]
    assert kept(store, [meta]) == [True]
    assert read(store, meta) == content(meta)
    assert store.absence(first_blocks([3])[0].key) is MissReason.NEW


def test_a_touch_never_shortens(store: RecordStore, clock: SetClock) -> None:
    (meta,) = first_blocks([1])
    put(store, [meta], WEEK)
    store.touch([meta.key], Retention(RetentionClass.AGENT, 10.0))
    clock.at_s += 6 * DAY_S
    assert kept(store, [meta]) == [True]


def test_nothing_is_kept_without_a_retention(store: RecordStore) -> None:
    (meta,) = first_blocks([1])
    assert put(store, [meta], Retention(RetentionClass.CHAT, 0.0)) == [False]
    assert kept(store, [meta]) == [False]


def test_stats_count_the_work(store: RecordStore) -> None:
    metas = chain(range(3 * BLOCK))
    put(store, metas)
    store.find([metas[0].key, first_blocks([77])[0].key])
    read(store, metas[0])
    stats = store.stats()
    assert (stats.num_records, stats.num_put, stats.num_put_bytes) == (3, 3, 3 * SIZE)
    assert (stats.num_found, stats.num_loaded, stats.num_loaded_bytes) == (1, 1, SIZE)
    assert 3 * SIZE <= stats.num_bytes <= stats.max_bytes
    assert stats.is_writable


def test_threads_share_it(store: RecordStore) -> None:
    groups = [chain([number] * (5 * BLOCK)) for number in range(4)]
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for meta in groups[number]:
                put(store, [meta])
                assert read(store, meta) == content(meta)
                store.touch([meta.key], WEEK)
                for other in groups:
                    for found in store.find([meta.key for meta in other]):
                        assert found is None or read(store, found.meta) == content(found.meta)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert store.stats().num_records == 20


def test_closing_twice_is_harmless(store: RecordStore) -> None:
    (meta,) = first_blocks([1])
    put(store, [meta])
    store.close()
    store.close()
    assert put(store, [meta]) == [False]


def test_many_small_pieces_are_one_record(store: RecordStore) -> None:
    """More than the system takes in one call."""
    (meta,) = first_blocks([1])
    data = content(meta, 3000)
    assert store.put(meta, [memoryview(data)[i : i + 1] for i in range(3000)], WEEK)
    into = bytearray(3000)
    store.read(meta, [memoryview(into)[i : i + 1] for i in range(3000)])
    assert bytes(into) == data


def test_pieces_are_filled_in_order(store: RecordStore) -> None:
    (meta,) = first_blocks([1])
    store.put(meta, pieces(content(meta)), WEEK)
    first, empty, rest = bytearray(4097), bytearray(), bytearray(SIZE - 4097)
    store.read(meta, [memoryview(first), memoryview(empty), memoryview(rest)])
    assert bytes(first + rest) == content(meta)
