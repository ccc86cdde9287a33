"""The fit of step costs: finds the truth through noise, follows changes, is never negative."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.cost import NO_STEP, StepCost, StepShape
from headwater.worker.cost_fit import CostFit, solve_non_negative

CPU = StepCost(base_s=8e-3, token_s=4e-4, pair_s=4e-7, window_pair_s=0.0, sequence_s=3e-4)

costs = st.builds(
    StepCost,
    base_s=st.floats(1e-3, 0.05),
    token_s=st.floats(1e-5, 1e-2),
    pair_s=st.floats(0, 1e-5),
    window_pair_s=st.floats(0, 1e-5),
    sequence_s=st.floats(0, 1e-2),
    late_token_s=st.floats(0, 1e-2),
    late_pair_s=st.floats(0, 1e-5),
)


def shape_of(
    rng: random.Random, *, window_tokens: int | None = None, has_late: bool = False
) -> StepShape:
    """Some answers, and in half of the steps a chunk. ``has_late``: of most chunks late layers
    compute nothing, of the others the last tokens."""
    num_decoding = rng.choice([1, 2, 4, 8, 16])
    late_start = 0 if has_late else None
    shape = NO_STEP
    for _ in range(num_decoding):
        shape += StepShape.of_row(rng.randrange(10, 4000), 1, window_tokens, late_start)
    if rng.random() < 0.5:
        num_tokens = rng.choice([16, 40, 128, 300, 700])
        start = rng.randrange(0, 6000)
        if has_late:
            late_start = start + num_tokens - (min(140, num_tokens) if rng.random() < 0.2 else 0)
        shape += StepShape.of_row(start, num_tokens, window_tokens, late_start)
    return shape


def decode_shape(rng: random.Random) -> StepShape:
    shape = NO_STEP
    for _ in range(4):
        shape += StepShape.of_row(rng.randrange(100, 2000), 1, None)
    return shape


def fitted(fit: CostFit) -> StepCost:
    cost = fit.cost
    assert cost is not None
    return cost


def errors(fit: CostFit, truth: StepCost, shapes: list[StepShape]) -> list[float]:
    return sorted(abs(fitted(fit).predict_s(s) / truth.predict_s(s) - 1) for s in shapes)


def scaled(cost: StepCost, by: float) -> StepCost:
    return StepCost(
        base_s=cost.base_s * by,
        token_s=cost.token_s * by,
        pair_s=cost.pair_s * by,
        window_pair_s=cost.window_pair_s * by,
        sequence_s=cost.sequence_s * by,
        late_token_s=cost.late_token_s * by,
        late_pair_s=cost.late_pair_s * by,
    )


def test_nothing_is_said_before_the_first_step() -> None:
    fit = CostFit()
    assert fit.cost is None
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        fit.note(StepShape.of_row(0, 1, None), seconds)
    fit.note(NO_STEP, 1.0)
    assert fit.cost is None
    fit.note(StepShape.of_row(0, 1, None), 0.01)
    assert fitted(fit).predict_s(StepShape.of_row(0, 1, None)) == pytest.approx(0.01, rel=1e-3)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    truth=costs,
    seed=st.integers(0, 99),
    window_tokens=st.sampled_from([None, 512]),
    has_late=st.booleans(),
)
def test_without_noise_any_true_cost_is_found(
    truth: StepCost, seed: int, window_tokens: int | None, has_late: bool
) -> None:
    rng, fit = random.Random(seed), CostFit()
    for _ in range(120):
        shape = shape_of(rng, window_tokens=window_tokens, has_late=has_late)
        fit.note(shape, truth.predict_s(shape))
    if not has_late:
        cost = fitted(fit)
        assert cost.late_token_s == cost.late_pair_s == 0, "nothing is known of what there is not"
    shapes = [shape_of(rng, window_tokens=window_tokens, has_late=has_late) for _ in range(50)]
    assert errors(fit, truth, shapes)[-1] < 0.02


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 99),
    noise=st.floats(0, 0.15),
    outlier_share=st.floats(0, 0.1),
    outlier_times=st.floats(2, 20),
)
def test_noise_and_a_neighbour_that_takes_the_machine_now_and_then_hardly_move_it(
    seed: int, noise: float, outlier_share: float, outlier_times: float
) -> None:
    rng, fit = random.Random(seed), CostFit()
    for _ in range(400):
        shape = shape_of(rng)
        factor = 1 + rng.uniform(-noise, noise)
        if rng.random() < outlier_share:
            factor *= outlier_times
        fit.note(shape, CPU.predict_s(shape) * factor)
    ranked = errors(fit, CPU, [shape_of(rng) for _ in range(50)])
    assert ranked[len(ranked) // 2] < 0.15


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 99), times=st.sampled_from([0.3, 0.6, 1.7, 3.0]))
def test_a_machine_that_changes_for_good_is_followed(seed: int, times: float) -> None:
    rng, fit = random.Random(seed), CostFit()
    for truth in (CPU, scaled(CPU, times)):
        for _ in range(200):
            shape = shape_of(rng)
            fit.note(shape, truth.predict_s(shape) * (1 + rng.uniform(-0.05, 0.05)))
    ranked = errors(fit, scaled(CPU, times), [shape_of(rng) for _ in range(50)])
    assert ranked[len(ranked) // 2] < 0.1


def test_a_machine_that_becomes_slower_is_known_after_a_few_steps() -> None:
    rng, fit = random.Random(1), CostFit()
    for _ in range(100):
        shape = shape_of(rng)
        fit.note(shape, CPU.predict_s(shape))
    for _ in range(8):
        shape = shape_of(rng)
        fit.note(shape, 1.8 * CPU.predict_s(shape))
    ranked = errors(fit, scaled(CPU, 1.8), [shape_of(rng) for _ in range(50)])
    assert ranked[len(ranked) // 2] < 0.15


def test_hours_of_decoding_do_not_forget_what_prefill_costs() -> None:
    rng, fit = random.Random(2), CostFit()
    for _ in range(100):
        shape = shape_of(rng)
        fit.note(shape, CPU.predict_s(shape) * (1 + rng.uniform(-0.05, 0.05)))
    # A lone query pays for reading what it looks at, which a chunk's share among them.
    decoding = replace(CPU, pair_s=2.5 * CPU.pair_s)
    for _ in range(5_000):
        shape = decode_shape(rng)
        fit.note(shape, decoding.predict_s(shape) * (1 + rng.uniform(-0.05, 0.05)))
    chunks = [StepShape.of_row(start, 200, None) for start in (0, 2000, 5000)]
    assert errors(fit, CPU, chunks)[-1] < 0.25


def test_long_prompts_do_not_forget_what_their_last_tokens_cost() -> None:
    """One chunk in thirty has late tokens; what the others say of their size is another thing."""
    rng, fit = random.Random(4), CostFit()
    truth = replace(CPU, late_token_s=4e-4, late_pair_s=8e-7)
    end = 30 * 200

    def chunk(start: int) -> StepShape:
        return StepShape.of_row(start, 200, None, late_start=end - 140)

    first = [shape_of(rng, has_late=True) for _ in range(60)]
    for shape in [*first, *(chunk(step % 30 * 200) for step in range(900))]:
        fit.note(shape, truth.predict_s(shape) * (1 + rng.uniform(-0.05, 0.05)))
    assert errors(fit, truth, [chunk(start) for start in range(0, end, 200)])[-1] < 0.1
    ranked = errors(fit, truth, [shape_of(rng, has_late=True) for _ in range(50)])
    assert ranked[45] < 0.25


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 8000),
            st.integers(1, 2048),
            st.integers(0, 32),
            st.floats(1e-6, 1e3),
        ),
        min_size=1,
        max_size=60,
    ),
    late_start=st.none() | st.integers(0, 9000),
)
def test_whatever_is_seen_no_cost_is_negative_and_more_work_is_never_cheaper(
    steps: list[tuple[int, int, int, float]], late_start: int | None
) -> None:
    fit = CostFit()
    for start, num_tokens, num_decoding, seconds in steps:
        shape = StepShape.of_row(start, num_tokens, 128, late_start)
        for _ in range(num_decoding):
            shape += StepShape.of_row(start, 1, 128, late_start)
        fit.note(shape, seconds)
        cost = fitted(fit)
        values = (
            cost.base_s, cost.token_s, cost.pair_s, cost.window_pair_s, cost.sequence_s,
            cost.late_token_s, cost.late_pair_s,
        )  # fmt: skip
        assert all(0 <= value < float("inf") for value in values)
        more = cost.predict_s(shape + StepShape.of_row(0, 10, 128, late_start))
        assert more >= cost.predict_s(shape)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=8),
    right=st.lists(st.integers(-20, 20), min_size=8, max_size=8),
)
def test_the_solution_is_the_least_among_those_that_are_not_negative(
    rows: list[list[int]], right: list[int]
) -> None:
    size = 4
    gram = [
        [sum(float(row[i] * row[j]) for row in rows) + (1e-6 if i == j else 0) for j in range(size)]
        for i in range(size)
    ]
    moment = [
        sum(float(row[i] * y) for row, y in zip(rows, right, strict=False)) for i in range(size)
    ]
    x = solve_non_negative([list(line) for line in gram], list(moment))
    # What makes it the least: no slope down, but where x would become negative.
    for i in range(size):
        slope = moment[i] - sum(gram[i][j] * x[j] for j in range(size))
        limit = 1e-5 * (1 + abs(moment[i]) + max(gram[i]))
        assert x[i] >= 0
        assert slope <= limit
        assert x[i] == 0 or slope >= -limit


def test_slow_steps_of_one_kind_do_not_make_that_kind_look_slow() -> None:
    """A median over all steps would not help here: most of them decode only."""
    rng, fit = random.Random(5), CostFit()
    for _ in range(600):
        chunk = rng.random() < 0.3
        shape = StepShape.of_row(rng.randrange(3000), 200, None) if chunk else decode_shape(rng)
        outlier = 3 if chunk and rng.random() < 0.25 else 1
        fit.note(shape, CPU.predict_s(shape) * outlier * (1 + rng.uniform(-0.05, 0.05)))
    chunks = [StepShape.of_row(start, 200, None) for start in (0, 1000, 2900)]
    assert errors(fit, CPU, chunks)[-1] < 0.1


def test_one_cost_that_changes_alone_is_followed() -> None:
    rng, fit = random.Random(6), CostFit()
    changed = replace(CPU, token_s=3 * CPU.token_s)
    for truth in (CPU, changed):
        for _ in range(300):
            shape = shape_of(rng)
            fit.note(shape, truth.predict_s(shape) * (1 + rng.uniform(-0.03, 0.03)))
    ranked = errors(fit, changed, [shape_of(rng) for _ in range(50)])
    assert ranked[45] < 0.1
