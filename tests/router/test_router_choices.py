"""Where a prompt is computed, where output is produced, who may join, who is ready: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_workers import LOAD, say_hello

from headwater.core.cache import StoreStats, Tier
from headwater.core.errors import ConfigError
from headwater.core.fleet import Holding, Role
from headwater.core.ports import WorkerState, WorkerStatus
from headwater.router.decode_policy import DecodeOption, choose_decode, has_room, needed_blocks
from headwater.router.fleet_policy import decide_readiness, total_load
from headwater.router.peer_policy import model_mismatch, protocol_mismatch, role_mismatch
from headwater.router.prefill_policy import (
    PrefillLimits,
    PrefillOption,
    choose_prefill,
    may_pass,
)

LIMITS = PrefillLimits()
SECONDS = st.floats(0, 100, allow_nan=False)


def option(
    name: str, queue_s: float = 0.0, compute_s: float = 1.0, recent_s: float = 0.0,
    is_open: bool = True, load_s: float = 0.0,
) -> PrefillOption:  # fmt: skip
    return PrefillOption(name, queue_s, compute_s, recent_s, is_open, load_s)


def chosen(*options: PrefillOption, may_wait: bool = True) -> str | None:
    best = choose_prefill(options, LIMITS, may_wait=may_wait)
    return best.worker_id if best else None


def test_the_earliest_finish_wins_hit_queue_and_loading_together() -> None:
    assert chosen(option("cold", 0.0, 2.0), option("warm", 0.5, 0.1)) == "warm"
    assert chosen(option("cold", 0.0, 2.0), option("warm", 3.0, 0.1)) == "cold"
    assert chosen(option("cold", 0.0, 2.0), option("disk", 0.0, 0.1, load_s=0.5)) == "disk"
    assert chosen(option("cold", 0.0, 2.0), option("disk", 0.0, 0.1, load_s=5.0)) == "cold"


def test_it_waits_for_the_better_one_unless_it_has_waited_enough() -> None:
    warm = option("warm", 1.0, 0.1, is_open=False)
    assert chosen(option("cold", 0.0, 9.0), warm) is None
    assert chosen(option("cold", 0.0, 9.0), warm, may_wait=False) == "cold"
    assert chosen(option("cold", 0.0, 0.5), warm) == "cold"
    assert chosen(warm, may_wait=False) is None
    assert chosen() is None


def test_e08_affinity_holds_only_within_the_load_bound() -> None:
    others = [option(name, 0.0, 1.0, recent_s=1.0) for name in "bcd"]
    assert chosen(option("a", 0.0, 0.1, recent_s=1.5), *others) == "a"
    assert chosen(option("a", 0.0, 0.1, recent_s=9.0), *others) == "b"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.booleans()), max_size=8), st.booleans())
def test_a_choice_is_open_and_within_the_bound_or_the_least_busy(
    rows: list[tuple[float, float, float, bool]], may_wait: bool
) -> None:
    options = [option(str(n), *row) for n, row in enumerate(rows)]
    best = choose_prefill(options, LIMITS, may_wait=may_wait)
    open_ones = [o for o in options if o.is_open]
    if best is None:
        assert may_wait or not open_ones
        return
    assert best in open_ones
    mean_s = sum(o.recent_s for o in options) / len(options)
    most_s = max(o.compute_s for o in options)
    allowed_s = LIMITS.max_over_mean * mean_s + max(LIMITS.grace_s, most_s - best.compute_s)
    is_least_busy = best.recent_s == min(o.recent_s for o in open_ones)
    assert best.recent_s <= allowed_s or is_least_busy


def test_what_was_begun_keeps_its_share_of_the_worker() -> None:
    passed_s, now_s = 0.0, 0.0
    while now_s < 100.0:
        if may_pass(passed_s, now_s, 0.25, LIMITS):
            passed_s += 0.25
        now_s += 0.1
    assert passed_s <= LIMITS.passing_share * 100.0 + LIMITS.max_ahead_s
    assert passed_s >= 0.9 * LIMITS.passing_share * 100.0


@pytest.mark.parametrize(
    "bad", [{"max_ahead_s": 0.0}, {"passing_share": 1.0}, {"max_over_mean": 0.5}]
)
def test_limits_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        PrefillLimits(**bad)


def fits(taken: int, active: int, *, needed: int = 10, new: int = 1) -> bool:
    return has_room(
        num_blocks=100, num_taken_blocks=taken, num_needed_blocks=needed, num_active=active,
        num_new=new, max_active=10,
    )  # fmt: skip


def seat(name: str, blocks: int, active: int, *, step_s: float = 0.0) -> DecodeOption:
    return DecodeOption(name, 100, blocks, active, 10, step_s)


def where(*options: DecodeOption) -> str | None:
    best = choose_decode(options)
    return best.worker_id if best else None


def test_the_larger_of_kv_and_sequences_is_what_counts() -> None:
    assert where(seat("a", 80, 1), seat("b", 20, 6)) == "b"
    assert where(seat("a", 40, 1), seat("b", 20, 9)) == "a"
    assert where(seat("slow", 10, 1, step_s=0.2), seat("quick", 10, 1, step_s=0.1)) == "quick"
    assert where() is None


def test_nobody_is_let_in_where_the_expected_growth_would_not_fit() -> None:
    assert fits(90, 1)
    assert not fits(91, 1)
    assert fits(0, 9)
    assert not fits(0, 10)
    assert not fits(0, 9, new=2)
    assert fits(95, 0), "alone it must only fit at all"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10)), max_size=8))
def test_no_other_seat_is_emptier(rows: list[tuple[int, int]]) -> None:
    options = [seat(str(n), blocks, active) for n, (blocks, active) in enumerate(rows)]
    best = choose_decode(options)
    shares = [max(blocks / 100, active / 10) for blocks, active in rows]
    assert (best is None) == (not rows)
    assert best is None or shares[int(best.worker_id)] == min(shares)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 500), st.integers(0, 100), st.integers(1, 4), st.integers(0, 40))
def test_choices_share_full_blocks_and_a_hit_saves_those_it_has(
    num_tokens: int, num_growth: int, num_choices: int, num_hit: int
) -> None:
    num = needed_blocks(
        num_tokens=num_tokens, num_growth_tokens=num_growth, num_choices=num_choices,
        num_hit_blocks=num_hit, block_tokens=16,
    )  # fmt: skip
    shared = set(range(num_tokens // 16))
    owned = [
        {(c, b) for b in range(-(-(num_tokens + num_growth) // 16)) if b not in shared}
        for c in range(num_choices)
    ]
    assert num == len(shared - set(range(num_hit))) + sum(map(len, owned))


def test_d06_equals_join_and_a_difference_names_both_values() -> None:
    first = say_hello(Role.BOTH)
    assert model_mismatch(say_hello(Role.BOTH, "w2"), first) is None
    other = replace(first, info=replace(first.info, block_tokens=32))
    assert model_mismatch(other, first) == (
        "worker w serves block_tokens 32, the front serves 16; start all workers with the same "
        "model and settings, or restart the server"
    )
    old = protocol_mismatch(replace(first, protocol_version=1))
    assert old is not None
    assert "protocol 1" in old


def test_a_decode_worker_must_say_where_it_takes_kv() -> None:
    deaf = replace(say_hello(Role.DECODE), handoff_address="")
    assert "no address" in (role_mismatch(deaf, Role.DECODE) or "")
    assert role_mismatch(say_hello(Role.DECODE), Role.DECODE) is None
    assert "role decode, the front wants both" in (
        role_mismatch(say_hello(Role.DECODE), Role.BOTH) or ""
    )


@pytest.mark.parametrize("role", list(Role))
def test_only_a_prefill_worker_may_hold_the_early_part_alone(role: Role) -> None:
    hello = replace(say_hello(role), holds=Holding.EARLY)
    why = role_mismatch(hello, role)
    if role is Role.PREFILL:
        assert why is None
        assert model_mismatch(hello, say_hello(Role.DECODE)) is None
    else:
        assert why is not None
        assert f"role {role} and holds only the early part" in why


def worker(role: Role, state: WorkerState = WorkerState.UP, reason: str = "") -> WorkerStatus:
    return WorkerStatus(worker_id=f"{role}-0", role=role, state=state, reason=reason)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(Role), st.sampled_from(WorkerState)), min_size=1))
def test_j01_ready_means_that_every_phase_has_a_worker_that_is_up(
    rows: list[tuple[Role, WorkerState]],
) -> None:
    ready, reason = decide_readiness([worker(role, state) for role, state in rows])
    up = [role for role, state in rows if state is WorkerState.UP]
    assert ready == (Role.BOTH in up or (Role.PREFILL in up and Role.DECODE in up))
    assert ready == (reason == "ready")


def test_j01_the_reason_names_the_role_and_the_worker() -> None:
    down = worker(Role.DECODE, WorkerState.DOWN, "restarting: it ended with signal 9")
    ready, reason = decide_readiness([worker(Role.PREFILL), down])
    assert not ready
    assert reason == "no decode worker is up; decode-0 restarting: it ended with signal 9"
    assert decide_readiness([down]) == (False, down.reason), "a lone worker's own words"


def test_the_total_load_is_the_sum_of_every_count() -> None:
    disk = StoreStats(tier=Tier.DISK, num_records=2, num_bytes=10, max_bytes=100)
    one = replace(LOAD, num_steps=3, num_free_blocks=5, misses=(("new", 2),), tiers=(disk,))
    other = replace(LOAD, num_steps=4, misses=(("new", 1), ("slow", 1)), tiers=(disk,))
    total = total_load([one, other])
    assert total is not None
    assert (total.num_steps, total.num_free_blocks) == (7, 5)
    assert total.misses == (("new", 3), ("slow", 1))
    assert [(t.tier, t.num_bytes, t.max_bytes) for t in total.tiers] == [(Tier.DISK, 20, 200)]
    assert total_load([one]) is one
    assert total_load([]) is None
