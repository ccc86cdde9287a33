"""The host tier: its cap, what goes first, retention, and what it says of what is gone."""

from __future__ import annotations

import random
import threading

import pytest
from disk_parts import (
    BLOCK,
    SIZE,
    US,
    WEEK,
    SetClock,
    chain,
    content,
    kept,
    meta_of,
    pieces,
    put,
    read,
)

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.cache import MissReason, Retention, RetentionClass
from headwater.core.errors import ConfigError, RecordLost
from headwater.disk import host
from headwater.disk.host import RECORD_OVERHEAD_BYTES, HostStore

SPAN = SIZE + RECORD_OVERHEAD_BYTES


def store_for(num_records: int, clock: SetClock | None = None) -> HostStore:
    return HostStore(max_bytes=num_records * SPAN, clock=clock or SetClock())


def test_c05_the_cap_holds_at_every_moment_and_counts_what_a_record_costs_besides_its_kv() -> None:
    store = HostStore(max_bytes=10 * SPAN + 17, clock=SetClock())
    for number in range(50):
        put(store, chain(range(number * 100, number * 100 + 3 * BLOCK)))
        stats = store.stats()
        assert stats.num_bytes == stats.num_records * SPAN <= stats.max_bytes
    assert store.stats().num_records == 10
    assert store.stats().num_evicted == 140


def test_a_record_larger_than_the_cap_is_refused_and_evicts_nothing() -> None:
    store = store_for(2)
    (small,) = chain(range(BLOCK))
    (large,) = chain(range(50, 50 + BLOCK))
    assert put(store, [small]) == [True]
    assert not store.put(large, [memoryview(bytes(2 * SPAN))], WEEK)
    assert kept(store, [small, large]) == [True, False]
    assert store.stats().num_errors == 1
    with pytest.raises(ConfigError, match="host_cache_bytes"):
        HostStore(max_bytes=0, clock=SetClock())


def test_records_of_other_sizes_take_each_others_room() -> None:
    """Global and window parts share one cap; neither may starve behind the other's buffers."""
    store = HostStore(max_bytes=8 * SPAN, clock=SetClock())
    draw = random.Random(3)
    for number in range(300):
        (meta,) = chain(range(number * 10, number * 10 + BLOCK))
        size = draw.choice((600, SIZE, 2 * SIZE))
        assert put(store, [meta], size=size) == [True]
        assert read(store, meta, size) == content(meta, size)
        assert store.stats().num_bytes <= 8 * SPAN


def test_the_least_recently_used_chain_goes_first_and_its_tail_before_its_head() -> None:
    store = store_for(6)
    old, new = chain(range(3 * BLOCK)), chain(range(100, 100 + 3 * BLOCK))
    put(store, old)
    put(store, new)
    put(store, chain(range(200, 200 + BLOCK)))
    assert kept(store, old + new) == [True, True, False, True, True, True]
    put(store, chain(range(300, 300 + 2 * BLOCK)))
    assert kept(store, old + new) == [False, False, False, True, True, True]


def test_a_use_saves_a_whole_chain_whatever_the_order_of_its_keys() -> None:
    store = store_for(6)
    used, other = chain(range(3 * BLOCK)), chain(range(100, 100 + 3 * BLOCK))
    put(store, used)
    put(store, other)
    store.touch([meta.key for meta in used], WEEK)
    put(store, chain(range(200, 200 + 2 * BLOCK)))
    assert kept(store, used + other) == [True, True, True, True, False, False]


def test_a_chain_longer_than_the_cap_keeps_its_head() -> None:
    long = chain(range(7 * BLOCK))
    store = store_for(4)
    put(store, long[::-1])  # as demotion does: tail first
    assert kept(store, long) == [True] * 4 + [False] * 3
    assert put(store, long[4:5]) == [False], "only its own parent could make room for it"
    assert kept(store, long) == [True] * 4 + [False] * 3


def test_retention_counts_from_the_last_use_and_is_never_shortened() -> None:
    clock = SetClock()
    store = store_for(8, clock)
    metas = chain(range(2 * BLOCK))
    day, hour = (Retention(RetentionClass.AGENT, s) for s in (86400.0, 3600.0))
    put(store, metas, day)
    clock.at_s += 80_000
    store.touch([metas[0].key], hour)  # ends before the day does
    clock.at_s += 6_399
    assert kept(store, metas) == [True, True]
    store.touch([metas[0].key], hour)
    clock.at_s += 1
    assert kept(store, metas) == [True, False]
    assert store.absence(metas[1].key) is MissReason.EXPIRED
    assert [child.meta for child in store.children(metas[0].key, 9)] == []
    with pytest.raises(RecordLost) as lost:
        read(store, metas[1])
    assert not lost.value.is_damaged
    clock.at_s += 3_599
    assert kept(store, metas) == [False, False]
    stats = store.stats()
    assert (stats.num_records, stats.num_expired, stats.num_evicted) == (0, 2, 0)


def test_what_is_expired_makes_room_before_anything_is_evicted() -> None:
    clock = SetClock()
    store = store_for(3, clock)
    (lasting,) = chain(range(BLOCK))
    put(store, [lasting])
    put(store, chain(range(100, 100 + 2 * BLOCK)), Retention(RetentionClass.AGENT, 10.0))
    clock.at_s += 11
    put(store, chain(range(200, 200 + 2 * BLOCK)))
    assert kept(store, [lasting]) == [True]
    assert store.stats().num_evicted == 0


def test_a_second_put_keeps_the_first_bytes_and_counts_as_a_use() -> None:
    clock = SetClock()
    store = store_for(3, clock)
    (meta,) = chain(range(BLOCK))
    assert store.put(meta, pieces(content(meta)), Retention(RetentionClass.AGENT, 10.0))
    clock.at_s += 9
    assert store.put(meta, [memoryview(bytes(SIZE))], Retention(RetentionClass.AGENT, 10.0))
    clock.at_s += 9
    assert read(store, meta) == content(meta)
    assert store.stats().num_refused == 1


def test_a_longer_record_of_the_same_place_replaces_its_tails_and_no_others() -> None:
    store = store_for(9)
    full = chain(range(BLOCK))[0]
    tails = [chain(tokens)[0] for tokens in ([0], [0, 1, 2], [0, 9], [8])]
    put(store, tails)
    put(store, [full])
    assert kept(store, [*tails, full]) == [False, False, True, True, True]
    assert store.absence(tails[0].key) is MissReason.NEW


def test_c01_a_record_is_read_only_as_what_it_is() -> None:
    store = store_for(3)
    (meta,) = chain(range(BLOCK))
    others = [
        meta_of(meta.key, meta.parent, 0, (9, 9, 9, 9), US),
        meta_of(meta.key, meta.parent, 4, meta.tokens, US),
        meta_of(meta.key, PrefixKey(b"x" * 16), 0, meta.tokens, US),
        meta_of(meta.key, meta.parent, 0, meta.tokens, CacheIdentity("model", "layout", "else")),
    ]
    for other in others:
        put(store, [meta])
        with pytest.raises(RecordLost) as lost:
            read(store, other)
        assert lost.value.is_damaged
        assert store.absence(meta.key) is MissReason.DAMAGED
    put(store, [meta])
    assert not store.put(others[0], pieces(content(meta)), WEEK), "it is not what is there"
    with pytest.raises(RecordLost):
        read(store, meta, SIZE + 1)
    assert store.stats().num_damaged == 5


def test_evicted_is_said_until_it_is_forgotten_and_never_of_what_was_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "MAX_TOMBSTONES", 3)
    store = store_for(1)
    metas = [chain(range(n * 10, n * 10 + BLOCK))[0] for n in range(6)]
    put(store, metas)
    assert [store.absence(meta.key) for meta in metas] == [
        *[MissReason.NEW] * 2, *[MissReason.EVICTED] * 3, MissReason.NEW
    ]  # fmt: skip
    store.remove([metas[5].key, metas[4].key])
    assert [store.absence(meta.key) for meta in metas[4:]] == [MissReason.NEW] * 2
    assert store.stats().num_bytes == 0


def test_first_blocks_say_who_else_has_them() -> None:
    store = store_for(9)
    them, later = CacheIdentity("model", "layout", "them"), CacheIdentity("model-2", "layout")
    tokens = tuple(range(BLOCK))
    put(store, chain(tokens, them) + chain([*range(9, 9 + BLOCK), *tokens], later))
    assert store.identities_of_first_block(tokens) == [them]
    assert store.identities_of_first_block((1, 2, 3, 4)) == []


def test_random_use_keeps_every_count_right_and_every_kept_byte_true() -> None:
    """Against the obvious: what is found reads back whole; what was never evicted, expired,
    replaced or removed is found; heads outlive tails."""
    draw = random.Random(11)
    clock = SetClock()
    store = store_for(20, clock)
    prefixes = [
        [draw.randrange(3) for _ in range(5 * BLOCK + draw.randrange(4))] for _ in range(40)
    ]
    every = {meta.key: meta for tokens in prefixes for meta in chain(tokens)}
    by_prefix = [chain(tokens) for tokens in prefixes]
    for _ in range(600):
        metas = draw.choice(by_prefix)
        keys = [meta.key for meta in metas]
        match draw.randrange(6):
            case 0 | 1 | 2:
                keep_s = draw.choice((50.0, 5000.0))
                put(store, metas, Retention(RetentionClass.CHAT, keep_s))
            case 3:
                store.touch(keys, Retention(RetentionClass.CHAT, 60.0))
            case 4:
                store.remove(draw.sample(keys, 1))
            case _:
                clock.at_s += draw.randrange(40)
        found = store.find(list(every))
        assert store.stats().num_records == sum(record is not None for record in found)
        for record in found:
            if record is not None:
                assert record.meta == every[record.meta.key]
                assert read(store, record.meta) == content(record.meta)
        assert store.stats().num_bytes == store.stats().num_records * SPAN <= 20 * SPAN
    stats = store.stats()
    assert stats.num_evicted
    assert stats.num_expired
    assert stats.num_damaged == stats.num_errors == 0
    gone = stats.num_put - stats.num_records
    assert stats.num_evicted + stats.num_expired <= gone


def test_threads_share_it_and_no_reader_sees_another_records_bytes() -> None:
    """Buffers are used again at once when a record is evicted; a read must not be in one."""
    store = store_for(4)
    metas = [chain(range(n * 10, n * 10 + BLOCK))[0] for n in range(12)]
    wrong: list[str] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            put(store, metas)

    def look() -> None:
        draw = random.Random(threading.get_ident())
        for _ in range(1500):
            meta = draw.choice(metas)
            try:
                if read(store, meta) != content(meta):
                    wrong.append("other bytes")
            except RecordLost as lost:
                if lost.is_damaged:
                    wrong.append("damaged")

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=look) for _ in range(2)]
    for thread in [writer, *readers]:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    writer.join()
    assert not wrong
