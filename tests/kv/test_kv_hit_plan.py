"""plan_hit against the definition of a hit, tried for every length; and its reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_tools import IDENTITY

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.cache import KVPart, MissReason, RecordMeta, StoredRecord, Tier, WindowKV
from headwater.core.ports import StoredPrefix, StoredRow
from headwater.kv.hit_plan import (
    CopiedRow,
    HitPlan,
    LoadedRow,
    SharedRow,
    plan_hit,
)


@dataclass(frozen=True)
class Entry:
    key: PrefixKey
    tokens: tuple[int, ...]
    has_window: bool


@dataclass(frozen=True)
class Device:
    num_tokens: int
    hits: tuple[Entry, ...] = ()
    tail: Entry | None = None
    num_tail_tokens: int = 0
    differs: bool = False
    identity: CacheIdentity = IDENTITY


def entry(row: int, num_tokens: int, has_window: bool) -> Entry:
    return Entry(PrefixKey(bytes([row, num_tokens])), tuple(range(num_tokens)), has_window)


def stored_row(row: int, num_tokens: int, has_window: bool, tier: Tier = Tier.DISK) -> StoredRow:
    def record(part: KVPart, num_bytes: int) -> StoredRecord:
        key = PrefixKey(bytes([row, num_tokens]) + part.encode())
        tokens = tuple(range(num_tokens))
        meta = RecordMeta(
            key=key, parent=key, identity=IDENTITY, part=part, start=row, tokens=tokens
        )
        return StoredRecord(meta, tier, num_bytes)

    window = record(KVPart.WINDOW, 10) if has_window else None
    return StoredRow(record=record(KVPart.GLOBAL, 100), window=window)


@dataclass(frozen=True)
class Case:
    device: Device
    stored: StoredPrefix | None
    block_tokens: int
    window_tokens: int | None
    window_kv: WindowKV
    limit_tokens: int
    alignment: int = 1
    restart_tokens: int | None = None

    def plan(self) -> HitPlan:
        return plan_hit(
            self.device,
            self.stored,
            block_tokens=self.block_tokens,
            window_tokens=self.window_tokens,
            window_kv=self.window_kv,
            limit_tokens=self.limit_tokens,
            alignment=self.alignment,
            restart_tokens=self.restart_tokens,
        )

    def starts_at(self, num_hit: int) -> int:
        """Where computation begins after an exact hit of so many tokens."""
        return num_hit if self.restart_tokens is None else min(num_hit, self.restart_tokens)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    alignment = draw(st.sampled_from([1, 1, 2]))
    b = alignment * draw(st.integers(1, 4 // alignment))
    flags = st.booleans()
    windows = draw(st.one_of(st.none(), st.integers(2, 10)))

    def has_window() -> bool:
        return True if windows is None else draw(flags)

    num_hits = draw(st.integers(0, 6))
    hits = tuple(entry(row, b, has_window()) for row in range(num_hits))
    num_tail = draw(st.integers(0, b - 1))
    # A tail is longer than what it shares, as long, or a full block.
    tail = entry(num_hits, draw(st.integers(num_tail, b)), has_window()) if num_tail else None
    stored = None
    if draw(flags):
        first_row = draw(st.integers(0, 7))
        rows = tuple(
            stored_row(first_row + i, b, draw(flags), draw(st.sampled_from([Tier.HOST, Tier.DISK])))
            for i in range(draw(st.integers(0, 6)))
        )
        num_stored_tail = draw(st.integers(0, b - 1))
        stored = StoredPrefix(
            first_row=first_row,
            rows=rows,
            tail=stored_row(50, b, draw(flags)) if num_stored_tail else None,
            num_tail_tokens=num_stored_tail,
        )
    num_tokens = draw(st.integers(1, 14 * b))
    return Case(
        device=Device(num_tokens, hits, tail, num_tail),
        stored=stored,
        block_tokens=b,
        window_tokens=windows,
        window_kv=draw(st.sampled_from(WindowKV)),
        limit_tokens=draw(st.integers(0, num_tokens - 1)),
        alignment=alignment,
        # Late layers come with windows. A prompt is computed again with some output behind it.
        restart_tokens=None
        if windows is None
        else draw(st.one_of(st.none(), st.integers(0, num_tokens - 1))),
    )


def has(case: Case, row: int, num_tokens: int, *, window: bool) -> tuple[bool, bool]:
    """Whether (device, tiers) have the first ``num_tokens`` of ``row``."""
    device, stored = case.device, case.stored
    of_device: tuple[Entry | None, int] = (None, 0)
    if row < len(device.hits):
        of_device = device.hits[row], case.block_tokens
    elif row == len(device.hits):
        of_device = device.tail, device.num_tail_tokens
    of_stored: tuple[StoredRow | None, int] = (None, 0)
    if stored is not None and row >= stored.first_row:
        place = row - stored.first_row
        if place < len(stored.rows):
            of_stored = stored.rows[place], case.block_tokens
        elif place == len(stored.rows):
            of_stored = stored.tail, stored.num_tail_tokens
    return (
        of_device[0] is not None
        and of_device[1] >= num_tokens
        and (of_device[0].has_window or not window),
        of_stored[0] is not None
        and of_stored[1] >= num_tokens
        and (of_stored[0].window is not None or not window),
    )


def is_there(case: Case, num_hit: int, *, exact: bool) -> bool:
    """The definition: all rows of [0, L), and the window KV of [C-W+1, C) too if ``exact``, where
    computation begins at C."""
    b, start = case.block_tokens, case.starts_at(num_hit)
    for row in range(-(-num_hit // b)):
        num_tokens = min(b, num_hit - row * b)
        needs_window = False
        if exact and case.window_tokens is not None:
            needs_window = row * b < start and (row + 1) * b > start - case.window_tokens + 1
        if not any(has(case, row, num_tokens, window=needs_window)):
            return False
    return True


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_a_plan_is_the_longest_hit_that_is_truly_there(case: Case) -> None:
    b, window = case.block_tokens, case.window_tokens
    lengths = [n for n in range(case.limit_tokens, 0, -1) if n % case.alignment == 0]
    exact = next((n for n in lengths if is_there(case, n, exact=True)), 0)
    longest = next((n for n in lengths if is_there(case, n, exact=False)), 0)
    expected, start = exact, case.starts_at(exact)
    if window is not None and case.window_kv is WindowKV.REPLAY:
        replay_start = case.starts_at(longest - window)
        if replay_start > start:
            expected, start = longest, replay_start

    plan = case.plan()
    assert (plan.num_hit_tokens, plan.computed_from) == (
        (expected, start) if start >= b else (0, 0)
    )
    assert len(plan.sources) == -(-plan.num_hit_tokens // b)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_every_row_of_a_plan_comes_from_who_has_it(case: Case) -> None:
    b, window = case.block_tokens, case.window_tokens
    plan = case.plan()
    end, computed_from = plan.num_hit_tokens, plan.computed_from
    assert case.restart_tokens is None or computed_from <= case.restart_tokens
    num_by_tier = dict.fromkeys(Tier, 0)
    num_bytes = 0
    for row, source in enumerate(plan.sources):
        num_tokens = min(b, end - row * b)
        in_device, _ = has(case, row, num_tokens, window=False)
        # Window KV that the sequence will look at, and that no replay writes.
        is_read = window is not None and row * b >= plan.window_start and row * b < computed_from
        match source:
            case SharedRow(entry=shared):
                assert num_tokens == b, "a shared row is whole"
                assert (row + 1) * b <= computed_from, "a shared row is never written"
                assert shared == case.device.hits[row]
                assert shared.has_window or not is_read
                num_by_tier[Tier.DEVICE] += b
            case CopiedRow(entry=copied, num_tokens=n):
                assert in_device
                assert n == num_tokens
                assert copied in (*case.device.hits[row : row + 1], case.device.tail)
                assert copied.has_window or not is_read
                assert (row + 1) * b > computed_from, "copied without need"
                num_by_tier[Tier.DEVICE] += n
            case LoadedRow(row=stored, num_tokens=n, loads_window=loads_window):
                assert n == num_tokens
                assert has(case, row, n, window=loads_window)[1]
                assert loads_window or not is_read
                assert loads_window or not in_device, "loaded without need"
                num_by_tier[stored.record.tier] += n
                num_bytes += 110 if loads_window else 100
    assert num_by_tier == {
        Tier.DEVICE: plan.num_device_tokens,
        Tier.PEER: 0,
        Tier.HOST: plan.num_host_tokens,
        Tier.DISK: plan.num_disk_tokens,
    }
    assert sum(num_by_tier.values()) == end
    assert plan.num_load_bytes == num_bytes
    if window is None or not end:
        assert plan.window_start == 0
    elif plan.window_start != computed_from or not plan.num_replayed_tokens:
        assert plan.window_start <= max(0, computed_from - window + 1)
        assert plan.window_start % b == 0
        if plan.window_start:  # as far back as it goes
            before = plan.sources[plan.window_start // b - 1]
            assert isinstance(before, LoadedRow) or not before.entry.has_window


DEVICE = Device(100, tuple(entry(row, 4, True) for row in range(3)))
PLAIN = Case(DEVICE, None, 4, None, WindowKV.CHECKPOINT, 99)


def reason(
    device: Device = DEVICE, stored: StoredPrefix | None = None, limit_tokens: int = 99
) -> MissReason:
    return replace(PLAIN, device=device, stored=stored, limit_tokens=limit_tokens).plan().reason


@pytest.mark.parametrize("why", [MissReason.EXPIRED, MissReason.UNAVAILABLE, MissReason.EVICTED])
def test_the_tiers_reason_is_told_where_they_end_the_hit(why: MissReason) -> None:
    assert reason(stored=StoredPrefix(first_row=3, reason=why)) is why
    rows = (stored_row(3, 4, False),)
    assert reason(stored=StoredPrefix(first_row=3, rows=rows, reason=why)) is why
    # A look from before the device had more speaks of another place.
    assert reason(stored=StoredPrefix(first_row=1, reason=why)) is MissReason.NEW


def test_where_the_device_goes_on_differently_the_prompt_differs() -> None:
    assert reason() is MissReason.NEW
    assert reason(replace(DEVICE, differs=True)) is MissReason.DIFFERS
    known = StoredPrefix(first_row=3, reason=MissReason.DIFFERS)
    assert reason(stored=known) is MissReason.DIFFERS


def test_all_but_the_last_token_is_no_miss() -> None:
    assert reason(replace(DEVICE, num_tokens=13)) is MissReason.NONE
    assert reason(replace(DEVICE, num_tokens=12)) is MissReason.NONE
    assert reason(replace(DEVICE, num_tokens=14)) is MissReason.NEW


def test_a_prompt_that_must_be_computed_says_so() -> None:
    assert reason(limit_tokens=0) is MissReason.ASKED
    assert reason(limit_tokens=7) is MissReason.ASKED
    assert reason(Device(100), limit_tokens=7) is MissReason.NEW


def test_a_hit_that_ends_for_want_of_window_kv_says_so() -> None:
    rows = tuple(entry(row, 4, row == 0) for row in range(3))
    case = replace(PLAIN, device=Device(100, rows), window_tokens=4)
    assert (case.plan().num_hit_tokens, case.plan().reason) == (4, MissReason.NO_WINDOW)


def test_less_than_a_block_in_common_is_too_short() -> None:
    tail = entry(0, 4, True)
    assert reason(Device(100, (), tail, 3)) is MissReason.TOO_SHORT
    assert reason(Device(3)) is MissReason.TOO_SHORT
    assert reason(Device(1)) is MissReason.TOO_SHORT
    plan = replace(PLAIN, device=Device(100, (), tail, 3)).plan()
    assert plan.num_hit_tokens == 0


def test_the_three_cases_of_the_picture() -> None:
    hits = (entry(0, 4, False), entry(1, 4, True), entry(2, 4, True))
    device = Device(100, hits, entry(3, 4, True), 2)
    case = Case(device, None, 4, None, WindowKV.REPLAY, 99)
    no_window = case.plan()
    assert [type(source) for source in no_window.sources] == [SharedRow] * 3 + [CopiedRow]
    assert no_window.num_hit_tokens == 14

    exact = replace(case, window_tokens=6).plan()
    assert exact.sources == no_window.sources
    assert (exact.num_hit_tokens, exact.num_replayed_tokens, exact.window_start) == (14, 0, 4)

    bare = replace(device, hits=tuple(entry(i, 4, False) for i in range(3)))
    replay = replace(case, device=replace(bare, tail=entry(3, 4, False)), window_tokens=9).plan()
    assert [type(source) for source in replay.sources] == [SharedRow] + [CopiedRow] * 3
    assert (replay.num_hit_tokens, replay.num_replayed_tokens, replay.window_start) == (14, 9, 5)


def test_a_row_without_window_is_loaded_from_the_tier_that_has_both() -> None:
    hits = tuple(entry(row, 4, row < 2) for row in range(4))
    rows = tuple(stored_row(row, 4, True) for row in range(4))
    case = Case(
        Device(100, hits), StoredPrefix(first_row=0, rows=rows), 4, 5, WindowKV.CHECKPOINT, 99
    )
    plan = case.plan()
    assert plan.num_hit_tokens == 16
    assert [type(source) for source in plan.sources] == [SharedRow] * 3 + [LoadedRow]
    assert plan.num_load_bytes == 110
    assert replace(case, stored=None).plan().num_hit_tokens == 8


def test_a_row_with_window_for_a_part_of_it_ends_the_run_there() -> None:
    device = Device(100, (entry(0, 4, True), entry(1, 4, True)), entry(2, 4, True), 3)
    rows = (stored_row(2, 4, False), stored_row(3, 4, True))
    case = Case(device, StoredPrefix(first_row=2, rows=rows), 4, 6, WindowKV.CHECKPOINT, 99)
    plan = case.plan()  # 16 would need the window KV of token 11
    assert (plan.num_hit_tokens, plan.window_start, plan.num_load_bytes) == (11, 0, 0)
    plan = replace(case, window_tokens=5).plan()
    assert (plan.num_hit_tokens, plan.window_start, plan.num_load_bytes) == (16, 12, 210)
