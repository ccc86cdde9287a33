"""Loads: in order, by turns, cancelled between records, and every way in which they fail."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from disk_parts import BLOCK, WEEK, chain
from disk_tiers_harness import (
    SIZES,
    ArrayMemory,
    Damaged,
    DoorStore,
    RealClock,
    keep,
    moves,
    payload,
    wait_until,
    windows,
)

from headwater.core.blocks import BlockId
from headwater.core.cache import KVPart, MissReason, StoredRecord, Tier
from headwater.core.ports import Load, RecordMove
from headwater.disk.tiers import Tiers
from headwater.disk.tiers_cost import HALF_S, CostGuess, LoadCost

BLANK = bytes(SIZES[KVPart.GLOBAL])


class Both:
    def __init__(self, *, has_window: bool = False, close_s: float = 5.0) -> None:
        self.host, self.disk = DoorStore(Tier.HOST), DoorStore(Tier.DISK)
        self.memory = ArrayMemory(has_window=has_window)
        self.tiers = Tiers(
            self.memory,
            block_tokens=BLOCK,
            clock=RealClock(),
            host=self.host,
            disk=self.disk,
            close_s=close_s,
        )

    def loaded(self, wanted: list[RecordMove]) -> Load:
        load = self.tiers.load(wanted)
        wait_until(lambda: load.is_done)
        return load


@pytest.fixture
def both() -> Iterator[Both]:
    both = Both()
    yield both
    both.tiers.close()


def test_every_record_comes_from_the_fastest_tier_into_its_own_block_in_order(both: Both) -> None:
    metas = chain(range(6 * BLOCK))
    keep(both.host, metas[::2])
    keep(both.disk, metas)
    wanted = [RecordMove(meta, BlockId(20 - i)) for i, meta in enumerate(metas)]
    load = both.loaded(wanted)
    assert (load.num_loaded, load.failure) == (6, None)
    assert [both.memory.bytes_of(move.block) for move in wanted] == [payload(m) for m in metas]
    assert both.memory.complete == [(move.block, KVPart.GLOBAL) for move in wanted]
    assert [meta for name, meta in both.disk.calls if name == "read"] == metas[1::2]


def test_a_blocks_parts_are_loaded_side_by_side() -> None:
    both = Both(has_window=True)
    metas = chain(range(2 * BLOCK))
    keep(both.disk, [*metas, *windows(metas)])
    load = both.loaded(moves(metas) + moves(windows(metas)))
    assert load.failure is None
    for block, meta in enumerate(metas):
        assert both.memory.bytes_of(block) == payload(meta)
        assert both.memory.bytes_of(block, KVPart.WINDOW) == payload(windows([meta])[0])
    both.tiers.close()


def test_a_load_of_nothing_is_done(both: Both) -> None:
    load = both.tiers.load([])
    assert (load.is_done, load.num_loaded, load.failure) == (True, 0, None)


def test_cancelling_lets_the_record_in_progress_end_and_touches_no_later_block(both: Both) -> None:
    metas = chain(range(4 * BLOCK))
    keep(both.disk, metas)
    both.disk.doors["read"].shut()
    load = both.tiers.load(moves(metas))
    wait_until(lambda: both.disk.doors["read"].num_waiting == 1)
    load.cancel()
    assert not load.is_done, "one record may still be written"
    both.disk.doors["read"].open()
    wait_until(lambda: load.is_done)
    assert (load.num_loaded, load.failure) == (1, MissReason.SLOW)
    assert both.memory.bytes_of(0) == payload(metas[0])
    assert [both.memory.bytes_of(block) for block in (1, 2, 3)] == [BLANK] * 3
    assert both.loaded(moves(metas)).num_loaded == 4, "the thread goes on with others"


def test_cancelling_what_has_not_begun_is_done_at_once_and_what_has_ended_stays(both: Both) -> None:
    metas = chain(range(2 * BLOCK))
    keep(both.disk, metas)
    ended = both.loaded(moves(metas))
    both.disk.doors["read"].shut()
    first = both.tiers.load(moves(metas))
    wait_until(lambda: both.disk.doors["read"].num_waiting == 1)
    second = both.tiers.load(moves(metas, 8))
    second.cancel()
    ended.cancel()
    assert (second.is_done, second.num_loaded, second.failure) == (True, 0, MissReason.SLOW)
    assert (ended.num_loaded, ended.failure) == (2, None)
    both.disk.doors["read"].open()
    wait_until(lambda: first.is_done)
    assert both.memory.bytes_of(8) == BLANK


def test_loads_at_once_take_turns_and_a_look_goes_before_both(both: Both) -> None:
    one, two = chain(range(4 * BLOCK)), chain(range(100, 100 + 3 * BLOCK))
    keep(both.disk, one + two)
    both.disk.doors["read"].shut()
    loads = [both.tiers.load(moves(one)), both.tiers.load(moves(two, 8))]
    wait_until(lambda: both.disk.doors["read"].num_waiting == 1)
    both.tiers.look(range(9), one[0].identity, 0)
    both.disk.doors["read"].open()
    wait_until(lambda: all(load.is_done for load in loads))
    calls = [call for call in both.disk.calls if call[0] in ("read", "find")]
    assert [name for name, _ in calls[:3]] == ["read", "find", "read"]
    order = [meta for name, meta in calls if name == "read"]
    assert order == [one[0], two[0], one[1], two[1], one[2], two[2], one[3]]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_c01_a_record_that_is_lost_ends_the_load_before_it(both: Both, is_damaged: bool) -> None:
    metas = chain(range(4 * BLOCK))
    both.disk.inner = Damaged(metas[2].key)
    keep(both.disk, metas if is_damaged else [*metas[:2], metas[3]])
    load = both.loaded(moves(metas))
    reason = MissReason.DAMAGED if is_damaged else MissReason.EVICTED
    assert (load.num_loaded, load.failure) == (2, reason)
    assert both.memory.complete == [(BlockId(0), KVPart.GLOBAL), (BlockId(1), KVPart.GLOBAL)]
    assert both.memory.bytes_of(3) == BLANK


def test_what_is_damaged_in_one_tier_is_read_from_the_other(both: Both) -> None:
    metas = chain(range(2 * BLOCK))
    both.host.inner = Damaged(metas[0].key)
    keep(both.host, metas)
    keep(both.disk, metas)
    load = both.loaded(moves(metas))
    assert (load.num_loaded, load.failure) == (2, None)
    assert both.memory.bytes_of(0) == payload(metas[0])


def test_what_the_system_cannot_read_is_unavailable_counted_and_said_once(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    metas = chain(range(2 * BLOCK))
    keep(both.disk, metas)
    both.disk.doors["read"].error = OSError(5, "Input/output error")
    for _ in range(3):
        load = both.loaded(moves(metas))
        assert (load.num_loaded, load.failure) == (0, MissReason.UNAVAILABLE)
    assert [stats.num_errors for stats in both.tiers.stats()] == [0, 3]
    assert len([r for r in caplog.records if "could not load" in r.getMessage()]) == 1
    both.disk.doors["read"].error = None
    assert both.loaded(moves(metas)).num_loaded == 2


def test_a_fault_of_ours_ends_one_load_and_tells_no_content(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    metas = chain(range(BLOCK))
    keep(both.disk, metas)
    both.disk.doors["read"].error = KeyError(metas[0].tokens)
    assert both.loaded(moves(metas)).failure is MissReason.UNAVAILABLE
    (record,) = caplog.records
    assert "KeyError at pass_through" in record.getMessage()
    assert str(metas[0].tokens) not in record.getMessage()
    beyond = both.tiers.load([RecordMove(metas[0], BlockId(10_000))])  # the device fails
    wait_until(lambda: beyond.is_done)
    assert beyond.failure is MissReason.UNAVAILABLE
    both.disk.doors["read"].error = None
    assert both.loaded(moves(metas)).failure is None


def test_a_disk_that_hangs_holds_up_neither_caller_nor_writes_to_the_host(both: Both) -> None:
    metas = chain(range(2 * BLOCK))
    keep(both.disk, metas)
    both.disk.doors["read"].shut()
    load = both.tiers.load(moves(metas))
    wait_until(lambda: both.disk.doors["read"].num_waiting == 1)
    demoted = both.tiers.demote(moves(chain(range(50, 50 + BLOCK)), 30), WEEK)
    wait_until(lambda: demoted.is_done)
    assert not load.is_done
    assert both.tiers.predicted_load_s([]) == 0
    both.disk.doors["read"].open()
    wait_until(lambda: load.is_done)


def test_purge_during_a_load_ends_it_and_what_came_before_is_whole(both: Both) -> None:
    metas = chain(range(20 * BLOCK))
    for _ in range(10):
        keep(both.disk, metas)
        load = both.tiers.load(moves(metas))
        purge = threading.Thread(target=both.disk.inner.remove, args=([m.key for m in metas],))
        purge.start()
        wait_until(lambda load=load: load.is_done)  # type: ignore[misc]
        purge.join()
        assert load.failure in (None, MissReason.EVICTED)
        assert (load.failure is None) == (load.num_loaded == 20)
        for block in range(load.num_loaded):
            assert both.memory.bytes_of(block) == payload(metas[block])


def test_random_loads_and_cancels_never_write_a_block_that_was_given_back(both: Both) -> None:
    """Blocks of ended loads are used again at once by others, as the worker does."""
    draw = random.Random(2)
    metas = chain(range(30 * BLOCK))
    keep(both.disk, metas)
    keep(both.host, metas[::3])
    for turn in range(60):
        running = [
            (both.tiers.load(moves(metas[: (n := draw.randrange(1, 8))], 10 * k)), n)
            for k in range(3)
        ]
        for load, _ in running:
            if draw.random() < 0.6:
                num_wanted = draw.randrange(2)
                wait_until(lambda load=load, n=num_wanted: load.num_loaded >= n)  # type: ignore[misc]
                load.cancel()
        wait_until(lambda running=running: all(load.is_done for load, _ in running))  # type: ignore[misc]
        for k, (load, n) in enumerate(running):
            assert load.num_loaded <= n
            assert (load.failure is None) == (load.num_loaded == n)
            for block in range(load.num_loaded):
                assert both.memory.bytes_of(10 * k + block) == payload(metas[block]), turn
        num_complete = len(both.memory.complete)
        assert num_complete == sum(load.num_loaded for load, _ in running)
        both.memory.complete.clear()


def test_loads_at_the_end_are_unavailable() -> None:
    both = Both(close_s=0.05)
    metas = chain(range(3 * BLOCK))
    keep(both.disk, metas)
    both.disk.doors["read"].shut()
    hanging = both.tiers.load(moves(metas))
    wait_until(lambda: both.disk.doors["read"].num_waiting == 1)
    queued = both.tiers.load(moves(metas, 8))
    both.tiers.close()
    late = both.tiers.load(moves(metas, 16))
    for load in (queued, late):
        assert (load.is_done, load.failure) == (True, MissReason.UNAVAILABLE)
    assert not hanging.is_done, "its block may still be written"
    assert not both.disk.is_closed, "nor is the store closed under it"
    both.disk.doors["read"].open()
    wait_until(lambda: hanging.is_done)
    assert (hanging.num_loaded, hanging.failure) == (1, MissReason.UNAVAILABLE)


# What a load will take


def stored(num_records: int, tier: Tier = Tier.DISK) -> list[StoredRecord]:
    return [
        StoredRecord(meta, tier, SIZES[KVPart.GLOBAL]) for meta in chain(range(num_records * BLOCK))
    ]


def test_predictions_grow_with_records_tier_and_queue(both: Both) -> None:
    few, many = stored(2), stored(20)
    predict = both.tiers.predicted_load_s
    assert 0 < predict(few) < predict(many)
    assert predict(stored(2, Tier.HOST)) < predict(few)
    metas = chain(range(30 * BLOCK))
    keep(both.disk, metas)
    alone_s = predict(few)
    both.disk.doors["read"].shut()
    load = both.tiers.load(moves(metas))
    wait_until(lambda: both.disk.doors["read"].num_waiting == 1)
    assert predict(few) == pytest.approx(2 * alone_s, rel=0.01), "it gets every second turn"
    load.cancel()
    assert predict(few) == pytest.approx(alone_s, rel=0.01)
    both.disk.doors["read"].open()
    wait_until(lambda: load.is_done)


def test_costs_follow_what_was_seen_for_either_size_and_forget_it_in_time() -> None:
    guess = CostGuess(fixed_s=0.01, bytes_per_s=1e8)
    cost = LoadCost(guess)
    small, large = 100_000, 700_000
    assert cost.predict_s(large, 0.0) == pytest.approx(0.01 + large / 1e8)
    for number in range(60):
        size = (small, large)[number % 2]
        cost.observe(size, 0.001 + size / 1e9, 1.0)
    for size in (small, large):
        assert cost.predict_s(size, 1.0) == pytest.approx(0.001 + size / 1e9, rel=0.1)
    for _ in range(60):
        cost.observe(large, 0.2, 2.0)
    assert cost.predict_s(large, 2.0) == pytest.approx(0.2, rel=0.1)
    # So slow that nobody loads any more: it must be tried again some day.
    assert cost.predict_s(large, 2.0 + 30 * HALF_S) == pytest.approx(0.01 + large / 1e8, rel=0.1)


def test_costs_are_never_below_nothing_whatever_the_noise() -> None:
    draw = random.Random(1)
    for _ in range(50):
        cost = LoadCost(CostGuess(fixed_s=0.002, bytes_per_s=3e8))
        for at_s in range(20):
            cost.observe(draw.randrange(1, 10**6), draw.expovariate(200), float(at_s))
            assert cost.predict_s(0, float(at_s)) >= 0
            assert cost.predict_s(10**6, float(at_s)) > 0
