"""plan_prefill: order, budget, and who may start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import ConfigError
from headwater.core.step import SequenceId
from headwater.prefill.plan import (
    PrefillCandidate,
    PrefillChunk,
    PrefillRoom,
    ServiceOrder,
    WaitingCandidate,
    plan_prefill,
)


def running(number: int, tokens: int, *, priority: int = 0, new: bool = True) -> PrefillCandidate:
    return PrefillCandidate(SequenceId(number), ServiceOrder(priority, new, number), tokens)


def waiting(
    number: int, tokens: int, *, blocks: int = 1, priority: int = 0, new: bool = True
) -> WaitingCandidate:
    return WaitingCandidate(SequenceId(number), ServiceOrder(priority, new, number), tokens, blocks)


def room(
    budget_tokens: int = 100,
    *,
    blocks: int = 100,
    num_running: int = 0,
    max_running: int = 8,
    reserve: int = 0,
) -> PrefillRoom:
    return PrefillRoom(
        budget_tokens=budget_tokens,
        num_available_blocks=blocks,
        num_running=num_running,
        max_running_sequences=max_running,
        reserve_blocks_per_sequence=reserve,
    )


def chunks(*pairs: tuple[int, int]) -> tuple[PrefillChunk, ...]:
    return tuple(PrefillChunk(SequenceId(number), tokens) for number, tokens in pairs)


def test_the_budget_goes_whole_remainders_first_to_first() -> None:
    plan = plan_prefill([running(1, 6)], [waiting(2, 30)], room(10))
    assert plan.chunks == chunks((1, 6), (2, 4))
    assert plan.admitted == (2,)


def test_order_is_priority_then_preempted_then_arrival() -> None:
    plan = plan_prefill(
        [running(5, 1), running(1, 1, priority=1), running(4, 1)],
        [waiting(6, 1, priority=-1), waiting(3, 1, new=False), waiting(2, 1)],
        room(),
    )
    assert [chunk.sequence_id for chunk in plan.chunks] == [6, 3, 2, 4, 5, 1]


def test_nobody_overtakes_a_waiting_sequence_that_does_not_fit() -> None:
    plan = plan_prefill([], [waiting(1, 9, blocks=50), waiting(2, 1)], room(blocks=10))
    assert plan.admitted == ()
    # A running one is not new work: it goes on.
    plan = plan_prefill([running(3, 4)], [waiting(1, 9, blocks=50)], room(blocks=10, num_running=1))
    assert plan.chunks == chunks((3, 4))


def test_a_sequence_starts_only_in_a_step_that_computes_some_of_it() -> None:
    plan = plan_prefill([running(1, 10)], [waiting(2, 1)], room(10, num_running=1))
    assert plan.admitted == ()
    assert plan_prefill([running(1, 10)], [waiting(2, 1)], room(0)).chunks == ()


def test_the_waiting_are_read_only_as_far_as_needed() -> None:
    looked_at = []

    def queue() -> Iterator[WaitingCandidate]:
        for number in range(100):
            looked_at.append(number)
            yield waiting(number, 10)

    plan_prefill([], queue(), room(20))
    assert len(looked_at) <= 3


def test_running_sequences_are_limited() -> None:
    queue = [waiting(number, 1) for number in range(10)]
    assert len(plan_prefill([], queue, room(num_running=5)).admitted) == 3


def test_e03_a_start_leaves_blocks_to_grow_into_unless_nothing_runs() -> None:
    assert plan_prefill([], [waiting(1, 9, blocks=10)], room(blocks=10, reserve=4)).admitted == (1,)
    busy = room(blocks=10, reserve=2, num_running=1)  # two would run: 4 blocks stay
    assert plan_prefill([], [waiting(1, 9, blocks=7)], busy).admitted == ()
    assert plan_prefill([], [waiting(1, 9, blocks=6)], busy).admitted == (1,)


def test_blocks_and_reserve_are_counted_over_all_that_start_in_one_step() -> None:
    queue = [waiting(number, 1, blocks=3) for number in range(5)]
    # 3; 6 + reserve 2; 9 + reserve 3 = 12 > 11
    assert plan_prefill([], queue, room(blocks=11, reserve=1)).admitted == (0, 1)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget_tokens"):
        room(-1)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    ready=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 40)), max_size=8),
    queue=st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 40), st.integers(0, 9)),
        max_size=8,
    ),
    budget=st.integers(0, 80),
    blocks=st.integers(0, 30),
    reserve=st.integers(0, 2),
)
def test_any_plan_keeps_its_limits_and_its_order(
    ready: list[tuple[int, bool, int]],
    queue: list[tuple[int, bool, int, int]],
    budget: int,
    blocks: int,
    reserve: int,
) -> None:
    in_prefill = [running(i, t, priority=p, new=n) for i, (p, n, t) in enumerate(ready)]
    in_queue = sorted(
        (waiting(100 + i, t, blocks=b, priority=p, new=n) for i, (p, n, t, b) in enumerate(queue)),
        key=lambda candidate: candidate.order,
    )
    plan = plan_prefill(
        in_prefill,
        in_queue,
        room(
            budget,
            blocks=blocks,
            num_running=len(ready),
            max_running=len(ready) + 3,
            reserve=reserve,
        ),
    )
    candidates: list[PrefillCandidate | WaitingCandidate] = [*in_prefill, *in_queue]
    remaining = {c.sequence_id: c.num_remaining_tokens for c in candidates}
    order = {c.sequence_id: c.order for c in candidates}
    needed = {c.sequence_id: c.num_needed_blocks for c in in_queue}

    ids = [chunk.sequence_id for chunk in plan.chunks]
    assert len(set(ids)) == len(ids)
    assert [order[i] for i in ids] == sorted(order[i] for i in ids)
    assert sum(chunk.num_tokens for chunk in plan.chunks) <= budget
    assert all(1 <= chunk.num_tokens <= remaining[chunk.sequence_id] for chunk in plan.chunks)
    # Only the last one may be cut, and only because the budget ended.
    cut = [chunk for chunk in plan.chunks if chunk.num_tokens < remaining[chunk.sequence_id]]
    assert all(chunk is plan.chunks[-1] for chunk in cut)
    assert not cut or sum(chunk.num_tokens for chunk in plan.chunks) == budget
    assert plan.admitted == tuple(c.sequence_id for c in in_queue[: len(plan.admitted)])
    assert set(plan.admitted) <= set(ids)
    assert len(plan.admitted) <= 3
    assert sum(needed[i] for i in plan.admitted) <= blocks


def test_one_that_must_load_takes_blocks_but_no_budget_and_holds_nobody_up() -> None:
    loads = WaitingCandidate(SequenceId(1), ServiceOrder(0, True, 1), 5, 6, must_load=True)
    plan = plan_prefill([running(9, 3)], [loads, waiting(2, 30, blocks=3)], room(10, blocks=9))
    assert plan.admitted == (1, 2)
    assert plan.chunks == chunks((2, 10))
    plan = plan_prefill([running(9, 3)], [loads, waiting(2, 30, blocks=4)], room(10, blocks=9))
    assert plan.admitted == (1,)
    assert plan.chunks == chunks((9, 3))
