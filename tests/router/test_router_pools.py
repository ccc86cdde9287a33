"""Pool balance from counters, and BOTH workers that change their phase without flapping."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_sim import Sim, sim_info, sim_request

from headwater.core.errors import ConfigError
from headwater.core.fleet import Role
from headwater.core.ports import BucketStatus, WorkerState, WorkerStatus
from headwater.router.dispatch import DispatchConfig, Dispatcher
from headwater.router.elastic import Elastic
from headwater.router.elastic_policy import (
    Demand,
    ElasticLimits,
    ElasticPlan,
    ElasticWorker,
    Imbalance,
    plan_elastic,
)
from headwater.router.pools_policy import divide_workers, pool_balance

LIMITS = ElasticLimits()


def counted(
    name: str, role: Role, *, up_s: float, prefill_s: float = 0.0, decode_s: float = 0.0,
    queue_s: float = 0.0,
) -> WorkerStatus:  # fmt: skip
    return WorkerStatus(
        worker_id=name, role=role, state=WorkerState.UP, up_s=up_s, prefill_s=prefill_s,
        decode_s=decode_s, queue_s=queue_s,
    )  # fmt: skip


def test_what_lies_between_two_readings_is_what_is_judged() -> None:
    before = [
        counted("p", Role.PREFILL, up_s=100, prefill_s=90),
        counted("d", Role.DECODE, up_s=100, decode_s=1),
    ]
    after = [
        counted("p", Role.PREFILL, up_s=110, prefill_s=96),
        counted("d", Role.DECODE, up_s=110, decode_s=3),
    ]
    balance = pool_balance(before, after)
    assert [(u.role, u.num_workers) for u in balance.pools] == [(Role.PREFILL, 1), (Role.DECODE, 1)]
    assert [u.utilisation for u in balance.pools] == pytest.approx([0.6, 0.2])
    assert balance.prefill_share == pytest.approx(0.75)
    assert (balance.num_prefill, balance.num_decode) == (1, 1)


def test_prompts_that_wait_are_asked_for_too() -> None:
    workers = [counted(f"b{n}", Role.BOTH, up_s=10, prefill_s=1, decode_s=4) for n in range(4)]
    bucket = BucketStatus(max_miss_tokens=None, num_waiting=3, queue_s=44.0, oldest_s=9.0)
    balance = pool_balance([], workers, [bucket])
    assert balance.queue_s == 44.0
    assert balance.prefill_share == pytest.approx(48 / 64)
    assert (balance.num_prefill, balance.num_decode) == (3, 1)


def test_prompts_that_wait_in_decode_workers_ask_for_decode_workers() -> None:
    workers = [
        counted("p", Role.PREFILL, up_s=10, prefill_s=3, queue_s=1),
        counted("d", Role.DECODE, up_s=10, decode_s=2, queue_s=2),
    ]
    assert pool_balance([], workers).prefill_share == pytest.approx(0.5)


def test_a_fleet_that_did_nothing_has_no_ratio_and_one_worker_no_division() -> None:
    idle = pool_balance([], [counted("b", Role.BOTH, up_s=0.0)])
    assert (idle.prefill_share, idle.num_prefill, idle.num_decode) == (0.0, 0, 0)
    assert idle.pools[0].utilisation == 0.0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 100), st.floats(0, 1))
def test_each_phase_gets_a_worker_and_together_they_are_all(num: int, share: float) -> None:
    num_prefill = divide_workers(num, share)
    if num < 2:
        assert num_prefill == 0
    else:
        assert 1 <= num_prefill <= num - 1
        assert abs(num_prefill - share * num) <= 1


def worker(
    name: str, acting: Role, *, acting_for_s: float = 1000.0, is_idle: bool = True
) -> ElasticWorker:
    return ElasticWorker(worker_id=name, acting=acting, acting_for_s=acting_for_s, is_idle=is_idle)


def plan(
    workers: list[ElasticWorker], prefill_s: float, decode_s: float,
    imbalance: Imbalance | None = None, now_s: float = 0.0, fixed: tuple[int, int] = (0, 0),
) -> ElasticPlan:  # fmt: skip
    return plan_elastic(
        workers, num_fixed_prefill=fixed[0], num_fixed_decode=fixed[1],
        demand=Demand(prefill_s=prefill_s, decode_s=decode_s), imbalance=imbalance, now_s=now_s,
        limits=LIMITS,
    )  # fmt: skip


FOUR = [worker("a", Role.PREFILL), *(worker(name, Role.DECODE) for name in "bcd")]


def test_a_lasting_lack_moves_one_idle_worker_and_a_burst_none() -> None:
    first = plan(FOUR, 30.0, 10.0)
    assert first.worker_id is None
    assert first.imbalance == Imbalance(lacking=Role.PREFILL, since_s=0.0)
    early = plan(FOUR, 30.0, 10.0, first.imbalance, LIMITS.patience_s - 1)
    assert (early.worker_id, early.imbalance) == (None, first.imbalance)
    moved = plan(FOUR, 30.0, 10.0, first.imbalance, LIMITS.patience_s)
    assert (moved.worker_id, moved.acting) == ("b", Role.PREFILL)
    over = plan(FOUR, 10.0, 30.0, first.imbalance, LIMITS.patience_s)
    assert over == ElasticPlan(imbalance=None), "it is balanced again: the wait starts anew"


def test_busy_workers_and_those_that_just_changed_stay() -> None:
    lack = Imbalance(lacking=Role.PREFILL, since_s=-100.0)
    busy = [FOUR[0], *(worker(name, Role.DECODE, is_idle=False) for name in "bcd")]
    fresh = [FOUR[0], *(worker(name, Role.DECODE, acting_for_s=5.0) for name in "bcd")]
    for workers in (busy, fresh):
        assert plan(workers, 30.0, 10.0, lack).worker_id is None


def test_those_that_do_both_are_divided_at_once_when_idle() -> None:
    both = [worker(name, Role.BOTH) for name in "ab"]
    assert plan(both, 0.0, 0.0).acting is Role.PREFILL
    assert plan([worker("a", Role.PREFILL), both[1]], 0.0, 0.0).acting is Role.DECODE
    assert plan(both[:1], 5.0, 5.0).worker_id is None, "one alone does both"
    assert plan(both[:1], 5.0, 5.0, fixed=(1, 0)).acting is Role.DECODE


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from((Role.PREFILL, Role.DECODE, Role.BOTH)), min_size=2, max_size=6),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=60),
)
def test_no_phase_loses_its_last_worker_and_nobody_changes_twice_within_the_dwell(
    acting: list[Role], demands: list[tuple[float, float]]
) -> None:
    roles = {str(n): role for n, role in enumerate(acting)}
    changed_s = dict.fromkeys(roles, -1000.0)
    imbalance: Imbalance | None = None
    for number, (prefill_s, decode_s) in enumerate(demands):
        now_s = 7.0 * number
        before = Counter(roles.values())
        decided = plan(
            [worker(n, r, acting_for_s=now_s - changed_s[n]) for n, r in roles.items()],
            prefill_s, decode_s, imbalance, now_s,
        )  # fmt: skip
        imbalance = decided.imbalance
        if decided.worker_id is None:
            continue
        was = roles[decided.worker_id]
        if was is not Role.BOTH:
            assert now_s - changed_s[decided.worker_id] >= LIMITS.dwell_s
            assert before[was] > 1
        roles[decided.worker_id] = decided.acting
        changed_s[decided.worker_id] = now_s


@pytest.mark.parametrize("bad", [{"min_prefill": 0}, {"slack_workers": 0.5}])
def test_elastic_limits_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="elastic"):
        ElasticLimits(**bad)  # type: ignore[arg-type]


def test_a_fleet_follows_its_traffic_and_settles() -> None:
    dispatcher = Dispatcher(sim_info(), DispatchConfig())
    for number in range(4):
        dispatcher.join(f"b{number}", Role.BOTH, sim_info(), 0.0)
    elastic = Elastic(LIMITS)
    changes: list[Counter[Role]] = []
    for second in range(600):
        share = 0.25 if second < 200 else 0.75
        elastic.worked(share, 1 - share)
        elastic.look(dispatcher, float(second))
        now = Counter(book.acting for book in dispatcher.books.values())
        if not changes or changes[-1] != now:
            changes.append(now)
    assert changes[-1] == {Role.PREFILL: 3, Role.DECODE: 1}
    assert len(changes) <= 7, "four are divided, two change, nobody comes back"


def test_workers_that_take_no_kv_are_left_alone() -> None:
    dispatcher = Dispatcher(sim_info(), DispatchConfig())
    for number in range(2):
        dispatcher.join(f"b{number}", Role.BOTH, sim_info(), 0.0, takes_kv=False)
    Elastic(LIMITS).look(dispatcher, 1.0)
    assert {book.acting for book in dispatcher.books.values()} == {Role.BOTH}


def test_who_can_do_both_does_both_while_a_phase_has_nobody() -> None:
    sim = Sim([Role.BOTH, Role.BOTH])
    sim.dispatcher.act_as("both-0", Role.PREFILL, 0.0)
    sim.dispatcher.act_as("both-1", Role.DECODE, 0.0)
    split = sim.arrive(sim_request("split", range(100)), 0.0)
    sim.run()
    assert split.placement is not None
    assert split.placement.prefill_id == "both-0"
    sim.dispatcher.leave("both-1")
    alone = sim.arrive(sim_request("alone", range(100)), 5.0)
    sim.run()
    assert alone.placement is not None
    assert (alone.placement.decode_id, alone.placement.prefill_id) == ("both-0", None)
