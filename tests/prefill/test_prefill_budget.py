"""The time budget of a step: chunks that fit, and prompts that go on whatever is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.cost import NO_STEP, StepCost, StepShape
from headwater.core.errors import ConfigError
from headwater.core.step import SequenceId
from headwater.prefill.budget import StepTime, chunk_tokens, largest_chunk
from headwater.prefill.plan import (
    OLDEST_EVERY,
    PrefillCandidate,
    PrefillRoom,
    ServiceOrder,
    WaitingCandidate,
    plan_prefill,
)

COST = StepCost(base_s=8e-3, token_s=4e-4, pair_s=4e-7, window_pair_s=0.0, sequence_s=3e-4)

costs = st.builds(
    StepCost,
    base_s=st.floats(0, 0.05),
    token_s=st.floats(0, 1e-2),
    pair_s=st.floats(0, 1e-5),
    window_pair_s=st.floats(0, 1e-5),
    sequence_s=st.floats(0, 1e-2),
    late_token_s=st.floats(0, 1e-2),
    late_pair_s=st.floats(0, 1e-5),
)
late_starts = st.none() | st.integers(0, 104_000)
times = st.builds(
    StepTime,
    cost=costs,
    budget_s=st.floats(1e-3, 0.5),
    window_tokens=st.none() | st.integers(1, 256),
    used=st.builds(
        lambda n, context: StepShape(n, n * context, 0, n), st.integers(0, 64), st.integers(1, 999)
    ),
    min_chunk_tokens=st.integers(1, 64),
)


def step_time(budget_s: float, *, num_decoding: int = 0) -> StepTime:
    used = NO_STEP
    for _ in range(num_decoding):
        used += StepShape.of_row(500, 1, None)
    return StepTime(cost=COST, budget_s=budget_s, used=used)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    time=times,
    start=st.integers(0, 100_000),
    max_tokens=st.integers(0, 4096),
    late_start=late_starts,
)
def test_the_largest_chunk_fits_and_one_token_more_does_not(
    time: StepTime, start: int, max_tokens: int, late_start: int | None
) -> None:
    fit = largest_chunk(time, start, max_tokens, late_start)
    assert 0 <= fit <= max_tokens
    assert fit == 0 or time.fits(start, fit, late_start)
    assert fit == max_tokens or not time.fits(start, fit + 1, late_start)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(time=times, start=st.integers(0, 100_000), max_tokens=st.integers(1, 4096))
def test_e01_the_first_prompt_is_never_left_without(
    time: StepTime, start: int, max_tokens: int
) -> None:
    first = chunk_tokens(time, start, max_tokens, is_first=True)
    assert first >= min(time.min_chunk_tokens, max_tokens)
    assert first <= time.min_chunk_tokens or time.fits(start, first)
    other = chunk_tokens(time, start, max_tokens, is_first=False)
    assert other == 0 or time.fits(start, other)


def test_a_deep_chunk_is_smaller_than_a_shallow_one() -> None:
    shallow, deep = (largest_chunk(step_time(0.1), start, 2048) for start in (0, 6000))
    assert shallow > 3 * deep > 0


def test_tokens_that_late_layers_leave_out_take_less_of_a_step() -> None:
    cost = replace(COST, token_s=2e-4, late_token_s=2e-4)
    time = replace(step_time(0.1), cost=cost)
    early, mixed, late = (largest_chunk(time, 0, 2048, start) for start in (2048, 300, 0))
    assert early > 1.4 * late
    assert late < mixed < early
    # The plan asks for each candidate's own.
    order = ServiceOrder(0, True, 0)
    for late_start, expected in ((2048, early), (0, late)):
        ready = PrefillCandidate(SequenceId(0), order, 5000, 0, late_start)
        [chunk] = plan_prefill([ready], [], room(time, budget_tokens=2048)).chunks
        assert chunk.num_tokens == expected
        comer = WaitingCandidate(SequenceId(0), order, 5000, 1, late_start=late_start)
        assert plan_prefill([], [comer], room(time, budget_tokens=2048)).chunks == (chunk,)


def test_running_answers_leave_less_to_prompts() -> None:
    alone, among = (largest_chunk(step_time(0.1, num_decoding=n), 0, 2048) for n in (0, 32))
    assert 0 < among < alone


@pytest.mark.parametrize("wrong", [{"budget_s": 0.0}, {"min_chunk_tokens": 0}])
def test_a_budget_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="budget_s"):
        StepTime(**({"cost": COST, "budget_s": 1.0} | wrong))  # type: ignore[arg-type]


# The plan


def running(number: int, tokens: int, *, start: int = 0, priority: int = 0) -> PrefillCandidate:
    order = ServiceOrder(priority, True, number)
    return PrefillCandidate(SequenceId(number), order, tokens, start)


def waiting(number: int, tokens: int, *, start: int = 0, load: bool = False) -> WaitingCandidate:
    order = ServiceOrder(0, True, number)
    return WaitingCandidate(SequenceId(number), order, tokens, 1, must_load=load, start=start)


def room(time: StepTime | None, *, turn: int = 0, budget_tokens: int = 2048) -> PrefillRoom:
    return PrefillRoom(
        budget_tokens=budget_tokens,
        num_available_blocks=1000,
        num_running=4,
        max_running_sequences=64,
        reserve_blocks_per_sequence=0,
        time=time,
        turn=turn,
    )


def test_what_the_first_leaves_of_the_step_goes_to_others() -> None:
    time = step_time(0.1)
    plan = plan_prefill([running(1, 40)], [waiting(2, 6000)], room(time))
    assert [chunk.sequence_id for chunk in plan.chunks] == [1, 2]
    assert plan.chunks[0].num_tokens == 40
    assert plan.chunks[1].num_tokens == largest_chunk(time.with_row(0, 40), 0, 6000)


def test_nobody_starts_for_whom_no_time_is_left() -> None:
    plan = plan_prefill([running(1, 6000)], [waiting(2, 100)], room(step_time(0.001)))
    # The one with less to compute goes first, and that alone is over the budget.
    assert plan.admitted == (2,)
    assert [(c.sequence_id, c.num_tokens) for c in plan.chunks] == [(2, 16)]
    plan = plan_prefill([running(1, 90)], [waiting(2, 100)], room(step_time(0.001)))
    assert plan.admitted == ()
    assert [(c.sequence_id, c.num_tokens) for c in plan.chunks] == [(1, 16)]


def test_a_load_starts_also_where_no_time_is_left() -> None:
    queue = [waiting(1, 10, load=True), waiting(2, 500), waiting(3, 20)]
    plan = plan_prefill([], queue, room(step_time(0.001)))
    assert plan.admitted == (1, 2)
    assert [(c.sequence_id, c.num_tokens) for c in plan.chunks] == [(2, 16)]


def test_a_short_prompt_passes_a_long_one_that_runs_and_not_one_of_its_own_class() -> None:
    long, time = running(1, 6000, start=500), step_time(0.1)
    plan = plan_prefill([long], [waiting(2, 200)], room(time))
    assert plan.chunks[0].sequence_id == 2
    plan = plan_prefill([long], [waiting(2, 2500)], room(time))
    assert [chunk.sequence_id for chunk in plan.chunks] == [1]
    # So it is between two that run.
    plan = plan_prefill([long, running(3, 200)], [], room(time))
    assert plan.chunks[0].sequence_id == 3


@pytest.mark.parametrize("priority", [0, 3])
def test_e01_a_long_prompt_goes_on_in_its_turn_whatever_passes_it(priority: int) -> None:
    long = running(0, 6000, priority=priority)
    turns = [
        plan_prefill(
            [long, running(100 + turn, 200)],
            [waiting(200 + n, 250) for n in range(20)],
            room(step_time(0.1), turn=turn),
        )
        for turn in range(4 * OLDEST_EVERY)
    ]
    first = [plan.chunks[0].sequence_id for plan in turns]
    assert first.count(SequenceId(0)) == 4
    # And it has the whole step then, not what others leave.
    for plan in turns:
        if plan.chunks[0].sequence_id == 0:
            assert len(plan.chunks) == 1
            assert plan.admitted == ()


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    time=times,
    ready=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 9000), st.integers(0, 9000)), max_size=6
    ),
    queue=st.lists(
        st.tuples(st.integers(1, 9000), st.integers(0, 9000), st.booleans()), max_size=6
    ),
    turn=st.integers(0, 7),
    budget_tokens=st.integers(1, 2048),
)
def test_a_plan_is_within_the_budget_but_for_one_minimum_chunk_and_always_goes_on(
    time: StepTime,
    ready: list[tuple[int, int, int]],
    queue: list[tuple[int, int, bool]],
    turn: int,
    budget_tokens: int,
) -> None:
    in_prefill = [running(i, n, start=s, priority=p) for i, (p, n, s) in enumerate(ready)]
    in_queue = [waiting(100 + i, n, start=s, load=ld) for i, (n, s, ld) in enumerate(queue)]
    plan = plan_prefill(in_prefill, in_queue, room(time, turn=turn, budget_tokens=budget_tokens))
    both: list[PrefillCandidate | WaitingCandidate] = [*in_prefill, *in_queue]
    candidates = {c.sequence_id: c for c in both}
    used = time.used
    for chunk in plan.chunks:
        used += StepShape.of_row(
            candidates[chunk.sequence_id].start, chunk.num_tokens, time.window_tokens
        )
    is_minimal = len(plan.chunks) == 1 and plan.chunks[0].num_tokens <= time.min_chunk_tokens
    assert not plan.chunks or is_minimal or time.cost.predict_s(used) <= time.budget_s
    assert sum(chunk.num_tokens for chunk in plan.chunks) <= budget_tokens
    # Whenever there is somebody to compute, somebody is computed.
    assert plan.chunks or not (in_prefill or any(not load for _, _, load in queue))
    # Only the last one is cut.
    for chunk in plan.chunks[:-1]:
        assert chunk.num_tokens == candidates[chunk.sequence_id].num_remaining_tokens


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    prompts=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    short_every=st.integers(1, 3),
    budget_s=st.floats(0.02, 0.3),
)
def test_e01_every_prompt_finishes_while_short_ones_never_stop_coming(
    prompts: list[int], short_every: int, budget_s: float
) -> None:
    """Each started prompt ends within the steps that a fixed share of them gives."""
    left = dict(enumerate(prompts))
    done = dict.fromkeys(left, 0)
    next_id, num_steps = len(prompts), 0
    # Every fourth step computes at least the minimum chunk of the oldest.
    limit = OLDEST_EVERY * (sum(-(-n // 16) for n in prompts) + 1)
    while any(i < len(prompts) for i in left):
        if num_steps % short_every == 0 and len(left) < 8:
            left[next_id], done[next_id] = 200, 0
            next_id += 1
        candidates = [running(i, n, start=done[i]) for i, n in left.items()]
        plan = plan_prefill(candidates, [], room(step_time(budget_s), turn=num_steps))
        for chunk in plan.chunks:
            number = int(chunk.sequence_id)
            left[number] -= chunk.num_tokens
            done[number] += chunk.num_tokens
            if not left[number]:
                del left[number]
        num_steps += 1
        assert num_steps <= limit
