"""Models with window layers, and KV that comes from beyond the device: loads, replays, pins."""

from __future__ import annotations

import pytest
from kv_tools import IDENTITY, admitted, look, manager, plan_of, run, start, stored_rows

from headwater.core.blocks import PrefixKey
from headwater.core.cache import KVPart, StoredRecord, Tier, WindowKV, part_key
from headwater.core.errors import InvalidChange
from headwater.core.ports import StoredPrefix, StoredRow
from headwater.core.step import SequenceId
from headwater.kv.manager import KVGroup, KVManager
from headwater.kv.prefix_index import PrefixEntry

PROMPT = list(range(20))
HOLDER = SequenceId(-1)


def windows_of(kv: KVManager) -> dict[int, bool]:
    """Row to whether its block has window KV, for the one prefix that is published."""
    return {entry.row: entry.has_window for entry in kv._index}


# Loads


def test_loads_come_in_chain_order_and_are_hits_for_others_once_loaded() -> None:
    kv = manager(16)
    stored = stored_rows(kv, PROMPT[:18])
    plan = plan_of(kv, kv.probe(PROMPT, IDENTITY), stored)
    assert (plan.num_hit_tokens, plan.num_disk_tokens, plan.num_load_bytes) == (18, 18, 500)
    lease = admitted(kv, 0, plan, 20)
    assert [move.meta.start for move in lease.loads] == [0, 4, 8, 12, 16]
    assert tuple(move.block for move in lease.loads) == lease.block_table
    assert look(kv, PROMPT).num_hit_tokens == 0  # nothing is there yet
    for wrong in (
        lambda: kv.free(SequenceId(0)),
        lambda: kv.grow(SequenceId(0), 24),
        lambda: kv.publish(SequenceId(0), PROMPT, 18),
    ):
        with pytest.raises(InvalidChange, match="sequence 0 is loading"):
            wrong()
    kv.loaded(SequenceId(0))
    assert look(kv, PROMPT).num_device_tokens == 16
    kv.publish(SequenceId(0), PROMPT, 20)
    kv.publish_tail(SequenceId(0), PROMPT, 20)
    kv.free(SequenceId(0))
    assert look(kv, PROMPT).num_hit_tokens == 19
    kv.check_integrity()


def test_what_the_device_has_is_not_loaded() -> None:
    kv = manager(16)
    run(kv, 0, PROMPT[:9])
    probe = kv.probe(PROMPT, IDENTITY)
    plan = plan_of(kv, probe, stored_rows(kv, PROMPT[:18], first_row=len(probe.hits)))
    assert (plan.num_device_tokens, plan.num_disk_tokens) == (8, 10)
    lease = admitted(kv, 1, plan, 20)
    assert [move.meta.start for move in lease.loads] == [8, 12, 16]
    kv.loaded(SequenceId(1))
    assert look(kv, PROMPT).num_device_tokens == 16


def test_a_load_that_ends_early_leaves_what_it_brought_to_be_hit() -> None:
    kv = manager(10)
    plan = plan_of(kv, kv.probe(PROMPT, IDENTITY), stored_rows(kv, PROMPT[:18]))
    lease = admitted(kv, 0, plan, 20)
    kv.detach(SequenceId(0), 2, HOLDER)
    kv.check_integrity()
    assert kv.counters().num_held_blocks == 3  # may still be written
    assert look(kv, PROMPT).num_device_tokens == 8
    again = admitted(kv, 0, look(kv, PROMPT), 20)
    assert not {move.block for move in lease.loads[2:]} & set(again.block_table)
    with pytest.raises(InvalidChange, match="already holds"):
        kv.admit(HOLDER, look(kv, PROMPT), 20)
    kv.free(HOLDER)
    kv.publish(SequenceId(0), PROMPT, 20)
    kv.free(SequenceId(0))
    kv.check_integrity()
    assert look(kv, [*PROMPT, 0]).num_hit_tokens == 20


def test_a_row_whose_window_part_is_on_its_way_is_hit_for_its_global_part() -> None:
    kv = manager(16, window_tokens=6)
    stored = stored_rows(kv, PROMPT[:16], windows=frozenset({2, 3}))
    plan = plan_of(kv, kv.probe(PROMPT, IDENTITY), stored)
    assert plan.window_start == 8
    lease = admitted(kv, 0, plan, 20)
    assert [(m.meta.start, m.meta.part) for m in lease.loads] == [
        (0, KVPart.GLOBAL),
        (4, KVPart.GLOBAL),
        (8, KVPart.GLOBAL),
        (8, KVPart.WINDOW),
        (12, KVPart.GLOBAL),
        (12, KVPart.WINDOW),
    ]
    kv.detach(SequenceId(0), 5, HOLDER)
    kv.check_integrity()
    assert windows_of(kv) == {0: False, 1: False, 2: True, 3: False}
    assert kv.counters().num_held_blocks == 1
    kv.free(HOLDER)
    kv.check_integrity()


# Windows


def test_an_exact_hit_needs_window_kv_for_its_last_window_only() -> None:
    kv = manager(16, window_tokens=6)
    stored = stored_rows(kv, PROMPT[:18], windows=frozenset({3, 4}))
    plan = plan_of(kv, kv.probe(PROMPT, IDENTITY), stored)
    assert (plan.num_hit_tokens, plan.num_replayed_tokens, plan.window_start) == (18, 0, 12)
    admitted(kv, 0, plan, 20)
    kv.loaded(SequenceId(0))
    kv.publish(SequenceId(0), PROMPT, 20)
    assert windows_of(kv) == {0: False, 1: False, 2: False, 3: True, 4: True}
    # Its rows are hits for others where the window is there, and only there.
    kv.free(SequenceId(0))
    assert look(kv, PROMPT).num_hit_tokens == 19
    assert look(kv, [*PROMPT[:15], 99]).num_hit_tokens == 0
    kv.check_integrity()


def test_who_computes_what_others_have_without_window_gives_them_the_window() -> None:
    """Else a shared system prompt that came from disk would be computed again for ever."""
    kv = manager(32, window_tokens=6)
    stored = stored_rows(kv, PROMPT[:16], windows=frozenset({2, 3}))
    admitted(kv, 0, plan_of(kv, kv.probe(PROMPT, IDENTITY), stored), 20)
    kv.loaded(SequenceId(0))
    assert windows_of(kv) == {0: False, 1: False, 2: True, 3: True}
    entries = kv.published(SequenceId(0))

    fork = [*PROMPT[:8], 50, 51]
    lease = start(kv, 1, fork)
    assert lease.num_hit_tokens == 0
    assert windows_of(kv) == {0: True, 1: True, 2: True, 3: True}
    assert [e.block for e in entries[:2]] == list(lease.block_table[:2])  # the same entries
    kv.check_integrity()
    assert look(kv, [*PROMPT[:8], 70, 71]).num_hit_tokens == 8
    kv.free(SequenceId(0))
    kv.check_integrity()
    assert look(kv, PROMPT[:18]).num_hit_tokens == 16
    assert kv.counters().num_cached_blocks == 2


def test_a_block_that_is_published_again_has_no_more_window_than_it_had() -> None:
    kv = manager(10, window_tokens=6)
    stored = stored_rows(kv, PROMPT[:16], windows=frozenset({2, 3}))
    admitted(kv, 0, plan_of(kv, kv.probe(PROMPT, IDENTITY), stored), 20)
    kv.loaded(SequenceId(0))
    kv.free(SequenceId(0))
    lease = start(kv, 1, PROMPT[:18])  # shares rows 0 and 1 without their window
    assert lease.window_start == 8
    start(kv, 2, [*PROMPT[:8], 50, 51])  # gives these two the window, in blocks of its own
    assert windows_of(kv) == {0: True, 1: True, 2: True, 3: True}
    kv.free(SequenceId(2))
    start(kv, 3, range(70, 89))  # needs those blocks
    assert windows_of(kv) == dict.fromkeys(range(4), True)  # of the last prompt
    assert look(kv, PROMPT).num_hit_tokens == 0
    kv.free(SequenceId(3))
    [*entries] = kv.publish(SequenceId(1), PROMPT, 16)
    assert [entry.has_window for entry in entries] == [False, False, True, True]
    kv.check_integrity()


def test_a_load_publishes_again_what_its_rows_hang_on() -> None:
    kv = manager(10, window_tokens=6)
    stored = stored_rows(kv, PROMPT[:16], windows=frozenset({2, 3}))
    admitted(kv, 0, plan_of(kv, kv.probe(PROMPT, IDENTITY), stored), 20)
    kv.detach(SequenceId(0), 2, HOLDER)
    kv.free(HOLDER)
    assert windows_of(kv) == {0: False, 1: False}
    lease = admitted(kv, 1, plan_of(kv, kv.probe(PROMPT, IDENTITY), stored), 18)
    assert len(lease.loads) == 4
    start(kv, 2, [*PROMPT[:8], 50, 51])  # its blocks stand for rows 0 and 1 now,
    kv.free(SequenceId(2))
    start(kv, 3, range(70, 89))  # and are gone
    kv.free(SequenceId(3))
    kv.loaded(SequenceId(1))
    assert [e.has_window for e in kv.published(SequenceId(1))] == [False, False, True, True]
    kv.check_integrity()


def test_a_replay_writes_only_blocks_of_its_own() -> None:
    kv = manager(32, window_tokens=6)
    bare = stored_rows(kv, PROMPT[:16])
    admitted(kv, 0, plan_of(kv, kv.probe(PROMPT, IDENTITY), bare, window_kv=WindowKV.REPLAY), 20)
    kv.loaded(SequenceId(0))
    # Rows [10, 16) are replayed: they are published when that is computed.
    assert windows_of(kv) == {0: False, 1: False}
    kv.publish(SequenceId(0), PROMPT, 16)
    assert windows_of(kv) == {0: False, 1: False, 2: False, 3: True}

    probe = kv.probe([*PROMPT[:15], 99], IDENTITY)
    plan = plan_of(kv, probe, window_kv=WindowKV.REPLAY)
    assert (plan.num_hit_tokens, plan.num_replayed_tokens, plan.window_start) == (15, 6, 9)
    lease = admitted(kv, 1, plan, 16)
    shared = set(lease.block_table) & set(kv.block_table(SequenceId(0)))
    assert shared == set(lease.block_table[:2])
    assert [target for _, target in lease.copies] == list(lease.block_table[2:])
    kv.check_integrity()


def test_a_replay_that_saves_less_than_a_block_is_not_made() -> None:
    kv = manager(32, window_tokens=6)
    for num_stored, num_hit in ((4, 0), (6, 0), (9, 0), (10, 10)):
        stored = stored_rows(kv, PROMPT[:num_stored])
        probe = kv.probe(PROMPT, IDENTITY)
        plan = plan_of(kv, probe, stored, window_kv=WindowKV.REPLAY)
        assert plan.num_hit_tokens == num_hit


def test_models_without_windows_have_nothing_to_miss() -> None:
    kv = manager(16)
    admitted(kv, 0, plan_of(kv, kv.probe(PROMPT, IDENTITY), stored_rows(kv, PROMPT[:16])), 20)
    kv.loaded(SequenceId(0))
    assert all(windows_of(kv).values())
    [*_, last] = kv.published(SequenceId(0))
    with pytest.raises(InvalidChange, match="no KV of window layers"):
        kv.meta_of(last, KVPart.WINDOW)


def test_c13_global_hits_are_kept_and_a_replay_is_never_longer_than_the_window() -> None:
    """Six sessions in turn, growing, in a pool that holds a third of them; what is evicted is
    kept without its window KV, as in ``replay`` mode."""
    block_tokens, window = 16, 64
    kv = KVManager(KVGroup(num_blocks=120, block_tokens=block_tokens), window_tokens=window)
    kept: dict[PrefixKey, StoredRow] = {}
    sessions = [[1000 * i + j % 7 for j in range(200)] for i in range(6)]
    num_replays = 0
    num_lost_turns = 0
    for turn in range(10):
        for i, tokens in enumerate(sessions):
            probe = kv.probe(tokens, IDENTITY)
            plan = plan_of(kv, probe, _lookup(kept, tokens, kv), window_kv=WindowKV.REPLAY)
            assert plan.num_replayed_tokens <= window
            if turn:
                # What is new, and the last turn's tail: less than a block. A window more at most.
                num_work = len(tokens) - plan.num_hit_tokens + plan.num_replayed_tokens
                assert num_work < 50 + block_tokens + window
            num_replays += plan.num_replayed_tokens > 0
            num_lost_turns += probe.num_hit_tokens == 0
            sequence = SequenceId(100 * turn + i)
            lease = admitted(kv, sequence, plan, len(tokens))
            if lease.loads:
                kv.loaded(sequence)
            computed = plan.num_hit_tokens - plan.num_replayed_tokens
            while computed < len(tokens):
                computed = min(computed + 40, len(tokens))
                for entry in kv.publish(sequence, tokens, computed):
                    meta = kv.meta_of(entry, KVPart.GLOBAL)
                    kept.setdefault(meta.key, StoredRow(record=StoredRecord(meta, Tier.HOST, 1)))
            kv.free(sequence)
            kv.check_integrity()
            tokens += [2000 + turn] * 50
    assert num_replays > 20
    assert num_lost_turns > 6  # the pool is small indeed


def _lookup(kept: dict[PrefixKey, StoredRow], tokens: list[int], kv: KVManager) -> StoredPrefix:
    rows: list[StoredRow] = []
    parent = IDENTITY.root_key()
    by_place = {(r.record.meta.parent, r.record.meta.tokens): r for r in kept.values()}
    size = kv.group.block_tokens
    while (row := by_place.get((parent, tuple(tokens[len(rows) * size :][:size])))) is not None:
        rows.append(row)
        parent = row.record.meta.key
    return StoredPrefix(first_row=0, rows=tuple(rows))


# Pins, victims and records


def entries_of(kv: KVManager, number: int) -> tuple[PrefixEntry, ...]:
    return kv.published(SequenceId(number))


def test_a_pinned_block_is_neither_evicted_nor_reused() -> None:
    kv = manager(4)
    start(kv, 0, PROMPT[:9])
    head, tail = entries_of(kv, 0)
    assert kv.pin(tail)
    kv.free(SequenceId(0))
    kv.check_integrity()
    assert kv.victims(9) == (head,)
    assert kv.num_available_blocks == 3
    start(kv, 1, range(50, 62))  # takes all others: the head goes, so its tail has no key now
    assert tail.block not in kv.block_table(SequenceId(1))
    kv.check_integrity()
    assert not kv.pin(tail)
    kv.unpin(tail.block)
    kv.check_integrity()
    assert kv.counters().num_free_blocks == 1


def test_a_pin_does_not_count_as_use() -> None:
    kv = manager(8)
    start(kv, 0, PROMPT[:9])
    entries = entries_of(kv, 0)
    kv.free(SequenceId(0))
    run(kv, 1, range(50, 59))
    before = kv.victims(9)
    assert before[:2] == entries[::-1]
    for entry in entries:
        assert kv.pin(entry)
        assert kv.pin(entry)
        kv.check_integrity()
    assert kv.victims(9) == before[2:]
    for entry in entries * 2:
        kv.unpin(entry.block)
        kv.check_integrity()
    assert kv.victims(9) == before


def test_a_pinned_block_can_be_hit_and_outlives_its_sequence() -> None:
    kv = manager(8)
    run(kv, 0, PROMPT[:9])
    first = kv.probe(PROMPT[:9], IDENTITY).hits[1]
    assert kv.pin(first)
    assert start(kv, 1, PROMPT[:9]).block_table[1] == first.block
    kv.unpin(first.block)
    kv.check_integrity()
    assert kv.pin(first)
    kv.free(SequenceId(1))
    kv.check_integrity()
    kv.unpin(first.block)
    assert kv.counters().num_held_blocks == 0


def test_victims_are_who_goes_next() -> None:
    kv = manager(6)
    run(kv, 0, PROMPT[:9])
    run(kv, 1, range(50, 59))
    named = kv.victims(3)
    start(kv, 2, range(70, 89))  # 5 blocks: 2 free, 3 evicted
    left = set(kv._index)
    assert not left & set(named)
    assert kv.counters().num_evicted_blocks == 3


def test_a_record_is_named_by_its_part_and_chained_within_it() -> None:
    kv = manager(8, window_tokens=6)
    start(kv, 0, PROMPT[:10], tail=True)
    first, second = entries_of(kv, 0)
    root = IDENTITY.root_key()
    for part in KVPart:
        metas = [kv.meta_of(entry, part) for entry in (first, second)]
        assert [meta.start for meta in metas] == [0, 4]
        assert metas[0].parent == part_key(root, part)
        assert metas[1].parent == metas[0].key == part_key(first.key, part)
        assert metas[1].tokens == (4, 5, 6, 7)
        assert metas[1].identity == IDENTITY
    [tail] = [entry for entry in kv._index if len(entry.tokens) == 2]
    meta = kv.meta_of(tail, KVPart.GLOBAL)
    assert (meta.start, meta.end, meta.parent) == (8, 10, second.key)
