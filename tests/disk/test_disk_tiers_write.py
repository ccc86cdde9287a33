"""Stores, demotions, touches: the order of work, what is done when, and how it all ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from disk_parts import BLOCK, US, WEEK, chain
from disk_tiers_harness import (
    LIMIT_S,
    SIZES,
    ArrayMemory,
    DoorStore,
    RealClock,
    keep,
    moves,
    num_threads,
    payload,
    wait_until,
    windows,
)

from headwater.core.cache import KVPart, RecordMeta, Retention, RetentionClass, Tier
from headwater.core.errors import ConfigError
from headwater.core.ports import KVTiers
from headwater.disk import tiers_writer
from headwater.disk.host import HostStore
from headwater.disk.publishing import NewRecord
from headwater.disk.tiers import Tiers

AGENT = Retention(RetentionClass.AGENT, 86400.0)


class BatchDoorStore(DoorStore):
    """One that commits several records at once."""

    def put_many(self, records: Sequence[NewRecord]) -> list[bool]:
        self.calls.append(("put_many", [record.meta for record in records]))
        return [self.put(record.meta, record.data, record.retention) for record in records]


MakeTiers = Callable[..., Tiers]


@pytest.fixture
def made() -> Iterator[MakeTiers]:
    """Makes tiers; all are closed, and their threads gone, at the end."""
    every: list[Tiers] = []

    def make(
        memory: ArrayMemory,
        host: DoorStore | None = None,
        disk: DoorStore | None = None,
        close_s: float = 5.0,
    ) -> Tiers:
        tiers = Tiers(
            memory, block_tokens=BLOCK, clock=RealClock(), host=host, disk=disk, close_s=close_s
        )
        every.append(tiers)
        return tiers

    yield make
    for tiers in every:
        tiers.close()
    wait_until(lambda: num_threads() == 0)


def filled(memory: ArrayMemory, metas: Sequence[RecordMeta], first_block: int = 0) -> None:
    for move in moves(metas, first_block):
        memory.fill(move)


def read_back(store: DoorStore, meta: RecordMeta) -> bytes:
    into = bytearray(SIZES[meta.part])
    store.inner.read(meta, [memoryview(into)])
    return bytes(into)


def test_stores_go_to_the_disk_and_demotions_to_the_host_with_all_their_bytes(
    made: MakeTiers,
) -> None:
    host, disk, memory = DoorStore(Tier.HOST), DoorStore(Tier.DISK), ArrayMemory(has_window=True)
    tiers = made(memory, host, disk)
    metas = chain(range(3 * BLOCK + 1))
    parts = windows(metas)
    filled(memory, metas)
    filled(memory, parts)
    stored = tiers.store(moves(metas) + moves(parts), WEEK)
    demoted = tiers.demote(moves(metas), AGENT)
    wait_until(lambda: stored.is_done and demoted.is_done)
    assert tiers.num_queued_writes == 0
    for meta in [*metas, *parts]:
        assert read_back(disk, meta) == payload(meta)
    for meta in metas:
        assert read_back(host, meta) == payload(meta)
    assert host.inner.find([part.key for part in parts]) == [None] * 4


def test_what_was_stored_is_looked_up_and_loaded_by_another_worker(made: MakeTiers) -> None:
    disk, first, second = DoorStore(Tier.DISK), ArrayMemory(), ArrayMemory()
    metas = chain(range(5 * BLOCK))
    filled(first, metas)
    writing, reading = made(first, disk=disk), made(second, disk=disk)
    stored = writing.store(moves(metas), WEEK)
    wait_until(lambda: stored.is_done)
    lookup = reading.look(range(5 * BLOCK), US, 0)
    wait_until(lambda: lookup.is_done)
    load = reading.load(moves([row.record.meta for row in lookup.result().rows], 7))
    wait_until(lambda: load.is_done)
    assert [second.bytes_of(7 + i) for i in range(5)] == [payload(meta) for meta in metas]


def test_a_tier_that_is_not_there_takes_nothing_and_holds_nobody_up(made: MakeTiers) -> None:
    only_disk: KVTiers = made(ArrayMemory(), disk=DoorStore(Tier.DISK))
    only_host: KVTiers = made(ArrayMemory(), host=DoorStore(Tier.HOST))
    wanted = moves(chain(range(BLOCK)))
    assert (only_disk.has_host, only_disk.has_disk) == (False, True)
    assert (only_host.has_host, only_host.has_disk) == (True, False)
    assert only_disk.demote(wanted, WEEK).is_done
    assert only_host.store(wanted, WEEK).is_done
    assert only_host.store([], WEEK).is_done
    with pytest.raises(ConfigError, match="host or a disk"):
        made(ArrayMemory())


def test_blocks_are_held_until_their_bytes_have_left_and_counted_until_then(
    made: MakeTiers,
) -> None:
    disk, memory = DoorStore(Tier.DISK), ArrayMemory()
    tiers = made(memory, disk=disk)
    metas = chain(range(3 * BLOCK))
    filled(memory, metas)
    disk.doors["put"].shut()
    stored = tiers.store(moves(metas), WEEK)
    wait_until(lambda: disk.doors["put"].num_waiting == 1)
    assert not stored.is_done
    assert tiers.num_queued_writes == 3
    disk.doors["put"].open()
    wait_until(lambda: stored.is_done)
    wait_until(lambda: tiers.num_queued_writes == 0)


def test_one_commit_covers_a_batch_up_to_its_bytes(
    made: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_writer, "BATCH_BYTES", 3 * SIZES[KVPart.GLOBAL])
    disk, memory = BatchDoorStore(Tier.DISK), ArrayMemory()
    tiers = made(memory, disk=disk)
    metas, others = chain(range(8 * BLOCK)), chain(range(100, 100 + 2 * BLOCK))
    filled(memory, metas)
    filled(memory, others, 20)
    disk.doors["put"].shut()
    stores = [tiers.store(moves(metas[:1]), WEEK)]
    wait_until(lambda: disk.doors["put"].num_waiting == 1)
    stores += [tiers.store(moves(metas)[1:], WEEK), tiers.store(moves(others, 20), AGENT)]
    disk.doors["put"].open()
    wait_until(lambda: all(store.is_done for store in stores))
    batches = [what for name, what in disk.calls if name == "put_many"]
    assert batches == [metas[:1], metas[1:4], metas[4:7], [metas[7], *others]]
    for meta in [*metas, *others]:
        assert read_back(disk, meta) == payload(meta)


def test_the_order_is_read_then_remove_then_write(made: MakeTiers) -> None:
    """A prompt waits for its read; nobody waits for a write."""
    disk, memory = DoorStore(Tier.DISK), ArrayMemory()
    tiers = made(memory, disk=disk)
    metas = chain(range(6 * BLOCK))
    keep(disk, metas)
    forged = chain([9, 9, 9, 9])[0]
    assert disk.inner.put(forged, [memoryview(bytes(7))], WEEK)  # of a wrong size: to be removed
    fresh = chain(range(100, 100 + 3 * BLOCK))
    filled(memory, fresh, 30)

    disk.doors["read"].shut()
    load = tiers.load(moves(metas))
    wait_until(lambda: disk.doors["read"].num_waiting == 1)
    stored = tiers.store(moves(fresh, 30), WEEK)
    lookup = tiers.look([9, 9, 9, 9], US, 0)
    disk.doors["read"].open()
    wait_until(lambda: load.is_done and stored.is_done and lookup.is_done)
    order = disk.names("read", "remove", "put")
    assert [name for name in order if name != "remove"] == ["read"] * 6 + ["put"] * 3
    wait_until(lambda: disk.inner.find([forged.key]) == [None])


def test_reads_without_end_do_not_keep_writes_out_for_ever(
    made: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_writer, "MAX_WAIT_S", 0.01)
    disk, memory = DoorStore(Tier.DISK), ArrayMemory()
    tiers = made(memory, disk=disk)
    metas = chain(range(2 * BLOCK))
    keep(disk, metas)
    filled(memory, metas, 30)
    disk.doors["read"].shut()
    load = tiers.load(moves(metas))
    wait_until(lambda: disk.doors["read"].num_waiting == 1)
    stored = tiers.store(moves(metas, 30), WEEK)
    wait_until(lambda: stored.is_done)
    assert not load.is_done
    disk.doors["read"].open()


def test_removals_and_touches_go_before_the_next_batch(
    made: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_writer, "UPKEEP_S", 0.01)
    disk, memory = BatchDoorStore(Tier.DISK), ArrayMemory()
    monkeypatch.setattr(tiers_writer, "BATCH_BYTES", 1)
    tiers = made(memory, disk=disk)
    metas = chain(range(3 * BLOCK))
    forged = chain([9, 9, 9, 9])[0]
    assert disk.inner.put(forged, [memoryview(bytes(7))], WEEK)
    filled(memory, metas)
    disk.doors["put"].shut()
    stored = tiers.store(moves(metas), WEEK)
    wait_until(lambda: disk.doors["put"].num_waiting == 1)
    lookup = tiers.look([9, 9, 9, 9], US, 0)
    wait_until(lambda: lookup.is_done)
    tiers.touch([metas[0].key], AGENT)
    wait_until(lambda: due(tiers))
    disk.doors["put"].open()
    wait_until(lambda: stored.is_done)
    assert disk.names("put", "remove", "touch")[:3] == ["put", "remove", "touch"]


def due(tiers: Tiers) -> bool:
    """Whether the upkeep's time has come."""
    writer = tiers._writers[Tier.DISK]
    return RealClock().now_s() >= writer._upkeep_s


def test_touches_are_gathered_by_retention_and_reach_every_tier(
    made: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_writer, "UPKEEP_S", 0.05)
    host, disk = DoorStore(Tier.HOST), DoorStore(Tier.DISK)
    tiers = made(ArrayMemory(), host, disk)
    keys = [meta.key for meta in chain(range(6 * BLOCK))]
    tiers.touch(keys[:2], WEEK)
    tiers.touch(keys[1:4], WEEK)
    tiers.touch(keys[4:], AGENT)
    for store in (host, disk):
        wait_until(lambda store=store: len(store.names("touch")) == 2)  # type: ignore[misc]
        touched = [what for name, what in store.calls if name == "touch"]
        assert touched == [tuple(keys[:4]), tuple(keys[4:])]


def test_numbers_are_the_last_known_ones_and_asking_for_them_asks_no_store(
    made: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_writer, "UPKEEP_S", 0.01)
    disk, memory = DoorStore(Tier.DISK), ArrayMemory()
    keep(disk, chain(range(2 * BLOCK)))
    tiers = made(memory, disk=disk)
    (stats,) = tiers.stats()
    assert (stats.tier, stats.num_records) == (Tier.DISK, 2)
    keep(disk, chain(range(50, 50 + BLOCK)))
    wait_until(lambda: tiers.stats()[0].num_records == 3)
    disk.doors["stats"].shut()
    wait_until(lambda: disk.doors["stats"].num_waiting == 1)
    assert tiers.stats()[0].num_records == 3
    disk.doors["stats"].open()


def test_c02_a_write_that_fails_is_counted_said_once_and_not_there(
    made: MakeTiers, caplog: pytest.LogCaptureFixture
) -> None:
    disk, memory = DoorStore(Tier.DISK), ArrayMemory()
    tiers = made(memory, disk=disk)
    metas = chain(range(5 * BLOCK))
    filled(memory, metas)
    disk.doors["put"].error = OSError(28, "No space left on device")
    stored = tiers.store(moves(metas), WEEK)
    wait_until(lambda: stored.is_done)
    assert disk.inner.find([meta.key for meta in metas]) == [None] * 5
    assert list(stored.failed) == moves(metas)
    (stats,) = tiers.stats()
    assert (stats.num_errors, stats.last_error) == (5, "OSError: No space left on device")
    assert len(caplog.records) == 1
    disk.doors["put"].error = None
    again = tiers.store(moves(metas), WEEK)
    wait_until(lambda: again.is_done)
    assert list(again.failed) == []
    assert read_back(disk, metas[4]) == payload(metas[4])


@pytest.mark.parametrize("call", ["touch", "stats", "remove"])
def test_a_store_that_fails_in_its_upkeep_does_not_end_the_thread(
    made: MakeTiers, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(tiers_writer, "UPKEEP_S", 0.01)
    disk, memory = DoorStore(Tier.DISK), ArrayMemory()
    disk.doors[call].error = RuntimeError("broken")
    forged = chain([9, 9, 9, 9])[0]
    assert disk.inner.put(forged, [memoryview(bytes(7))], WEEK)
    tiers = made(memory, disk=disk)
    tiers.touch([forged.key], WEEK)
    tiers.look([9, 9, 9, 9], US, 0)
    wait_until(lambda: disk.doors[call].num_calls > 0)
    metas = chain(range(BLOCK))
    filled(memory, metas)
    stored = tiers.store(moves(metas), WEEK)
    wait_until(lambda: stored.is_done)
    assert read_back(disk, metas[0]) == payload(metas[0])
    assert tiers.stats()[0].num_errors >= 1


def test_a_full_queue_takes_no_more_and_says_so(
    made: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_writer, "MAX_QUEUED_MOVES", 3)
    monkeypatch.setattr(tiers_writer, "MAX_QUEUED_KEYS", 3)
    disk, memory = DoorStore(Tier.DISK), ArrayMemory()
    tiers = made(memory, disk=disk)
    metas = chain(range(6 * BLOCK))
    disk.doors["put"].shut()
    first = tiers.store(moves(metas[:2]), WEEK)
    refused = tiers.store(moves(metas)[2:4], WEEK)
    assert (first.is_done, refused.is_done, tiers.num_queued_writes) == (False, True, 2)
    tiers.touch([meta.key for meta in metas], WEEK)
    assert tiers.stats()[0].num_errors == 2 + 6
    disk.doors["put"].open()
    wait_until(lambda: first.is_done)
    assert tiers.store(moves(metas)[2:4], WEEK).is_done is False


def test_no_call_of_a_step_waits_whatever_hangs(
    made: MakeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread hangs in its store in turn, in every kind of call that it makes there."""
    monkeypatch.setattr(tiers_writer, "UPKEEP_S", 0.001)
    metas = chain(range(4 * BLOCK))
    for hanging in ("find", "children", "absence", "read", "put", "touch", "stats", "remove"):
        host, disk, memory = DoorStore(Tier.HOST), DoorStore(Tier.DISK), ArrayMemory()
        keep(disk, metas[:2])
        tiers = made(memory, host, disk)
        door = disk.doors[hanging]
        door.shut()
        forged = chain([9, 9, 9, 9])[0]
        assert disk.inner.put(forged, [memoryview(bytes(7))], WEEK)

        def step(tiers: Tiers = tiers) -> None:
            tiers.look(range(6 * BLOCK), US, 0)
            tiers.look([9, 9, 9, 9], US, 0)
            tiers.load(moves(metas[:2]))
            tiers.load(moves(metas[:2], 4)).cancel()
            tiers.store(moves(metas, 20), WEEK)
            tiers.demote(moves(chain(range(500, 500 + BLOCK)), 30), WEEK)
            tiers.touch([metas[0].key], WEEK)
            assert tiers.predicted_load_s([]) == 0.0
            assert len(tiers.stats()) == 2
            assert tiers.num_queued_writes >= 0

        step()
        wait_until(lambda door=door: door.num_waiting > 0)  # type: ignore[misc]
        caller = threading.Thread(target=step)
        caller.start()
        caller.join(LIMIT_S / 2)
        assert not caller.is_alive(), hanging
        door.open()


# The end


def test_close_finishes_what_is_queued_and_lets_go_of_everything(made: MakeTiers) -> None:
    host, disk, memory = DoorStore(Tier.HOST), DoorStore(Tier.DISK), ArrayMemory()
    tiers = made(memory, host, disk)
    disk.inner.close = lambda: None  # type: ignore[method-assign]
    metas = chain(range(20 * BLOCK))
    filled(memory, metas)
    disk.doors["put"].shut()
    stored = tiers.store(moves(metas), WEEK)
    tiers.touch([metas[0].key], AGENT)
    disk.doors["put"].open()
    tiers.close()
    assert stored.is_done
    assert [read_back(disk, meta) for meta in metas] == [payload(meta) for meta in metas]
    assert disk.names("touch") == ["touch"]
    assert (host.is_closed, disk.is_closed) == (True, True)
    assert num_threads() == 0
    tiers.close()
    assert tiers.store(moves(metas), WEEK).is_done
    assert tiers.num_queued_writes == 0


def test_close_with_a_full_queue_and_a_slow_store_gives_up_in_time_and_counts(
    made: MakeTiers, caplog: pytest.LogCaptureFixture
) -> None:
    disk, memory = DoorStore(Tier.DISK), ArrayMemory()
    tiers = made(memory, disk=disk, close_s=0.05)
    metas = chain(range(20 * BLOCK))
    disk.doors["put"].shut()
    stored = tiers.store(moves(metas), WEEK)
    wait_until(lambda: disk.doors["put"].num_waiting == 1)
    with caplog.at_level(logging.WARNING):
        tiers.close()
    assert "did not answer" in caplog.text
    assert not stored.is_done, "one of its blocks may still be read"
    disk.doors["put"].open()
    wait_until(lambda: stored.is_done and num_threads() == 0)
    assert disk.doors["put"].num_calls == len(disk.names("put")) < 20
    assert tiers.stats()[0].num_errors >= 1
    assert disk.is_closed


def test_twenty_tiers_opened_and_closed_leave_no_thread(made: MakeTiers) -> None:
    for _ in range(20):
        tiers = made(ArrayMemory(), DoorStore(Tier.HOST), DoorStore(Tier.DISK))
        assert num_threads() == 3
        tiers.look(range(9), US, 0)
        tiers.close()
        assert num_threads() == 0


def test_the_host_store_serves_as_it_is(made: MakeTiers) -> None:
    """Without doors: what the tiers find in the real one is labelled as the host's."""
    memory = ArrayMemory()
    store = HostStore(max_bytes=2**20, clock=RealClock())
    tiers = Tiers(memory, block_tokens=BLOCK, clock=RealClock(), host=store)
    metas = chain(range(2 * BLOCK))
    filled(memory, metas)
    demoted = tiers.demote(moves(metas), WEEK)
    wait_until(lambda: demoted.is_done)
    lookup = tiers.look(range(2 * BLOCK), US, 0)
    wait_until(lambda: lookup.is_done)
    assert [row.record.tier for row in lookup.result().rows] == [Tier.HOST] * 2
    load = tiers.load(moves(metas, 9))
    wait_until(lambda: load.is_done)
    assert memory.bytes_of(10) == payload(metas[1])
    tiers.close()
    assert num_threads() == 0
