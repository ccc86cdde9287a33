"""The profile at the start: short, on any pool, and good enough for a first prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worker_hidden_cost import TRUE_COST, HiddenCostEngine, ManualClock

from headwater.core.cost import NO_STEP, StepShape
from headwater.core.fleet import Holding
from headwater.core.step import StepPlan, StepResult
from headwater.worker.cost_book import CostBook
from headwater.worker.cost_profile import profile


class RecordingEngine(HiddenCostEngine):
    def __init__(self, clock: ManualClock, **how: object) -> None:
        super().__init__(clock, is_checked=False, **how)  # type: ignore[arg-type]
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().run(plan)


def test_a_profile_predicts_steps_that_were_not_in_it() -> None:
    clock = ManualClock()
    book = CostBook()
    book.learn(profile(RecordingEngine(clock, noise=0.05), clock, limit_s=5.0))
    assert book.cost is not None
    for shape in (
        StepShape.of_row(300, 1, None),
        StepShape.of_row(0, 400, None),
        StepShape.of_row(3000, 100, None),
        StepShape.of_row(0, 100, None) + StepShape.of_row(900, 1, None),
    ):
        assert book.cost.predict_s(shape) == pytest.approx(TRUE_COST.predict_s(shape), rel=0.25)


@pytest.mark.parametrize("slowness", [0.01, 1.0, 10.0, 100.0])
def test_it_takes_about_as_long_as_it_may_however_slow_the_machine(slowness: float) -> None:
    clock = ManualClock()
    engine = RecordingEngine(clock, slowness=lambda step: slowness)
    start_s = clock.now_s()
    found = profile(engine, clock, limit_s=1.0)
    assert found, "one observation there is always"
    # The step under way ends; no other begins.
    assert clock.now_s() - start_s <= 1.0 + engine.seconds[-1]
    if slowness <= 1:
        assert len(found) == 8


@pytest.mark.parametrize(
    ("num_blocks", "block_tokens", "context_tokens"),
    [(2, 8, 16), (4, 32, 128), (40, 32, 1024), (9, 8, 8192), (1024, 32, 100), (64, 512, 20)],
)
def test_it_keeps_to_the_pool_and_the_context(
    num_blocks: int, block_tokens: int, context_tokens: int
) -> None:
    clock = ManualClock()
    engine = RecordingEngine(
        clock, num_blocks=num_blocks, block_tokens=block_tokens, context_tokens=context_tokens
    )
    assert profile(engine, clock)
    for plan in engine.plans:
        blocks = [block for row in plan.rows for block in row.block_table]
        assert len(set(blocks)) == len(blocks), "each row has blocks of its own"
        assert all(0 <= block < num_blocks for block in blocks)
        for row in plan.rows:
            assert row.end <= min(context_tokens, len(row.block_table) * block_tokens)
            assert all(0 <= token < engine.info.vocab_size for token in row.tokens)


class LateCostEngine(RecordingEngine):
    """Half of a token's cost is that of late layers."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.info = replace(self.info, window_tokens=128, decoder_replay_tokens=140)

    def run(self, plan: StepPlan) -> StepResult:
        start_s = self.clock.time_s
        result = super().run(plan)
        self.clock.time_s = start_s + LATE_COST.predict_s(late_shape(plan))
        return result


LATE_COST = replace(TRUE_COST, token_s=2e-4, late_token_s=2e-4, late_pair_s=8e-7)


def late_shape(plan: StepPlan) -> StepShape:
    shape = NO_STEP
    for row in plan.rows:
        shape += StepShape.of_row(row.start, len(row.tokens), 128, row.late_start)
    return shape


def test_where_late_layers_leave_tokens_out_the_profile_tells_what_they_cost() -> None:
    clock = ManualClock()
    book = CostBook(window_tokens=128, counts_late=True)
    book.learn(profile(LateCostEngine(clock), clock, limit_s=5.0))
    assert book.cost is not None
    for late_start in (0, 300, 400):
        shape = StepShape.of_row(0, 400, 128, late_start)
        assert book.cost.predict_s(shape) == pytest.approx(LATE_COST.predict_s(shape), rel=0.25)


def test_an_engine_without_late_layers_is_asked_for_nothing_of_them() -> None:
    clock = ManualClock()
    engine = LateCostEngine(clock)
    assert profile(engine, clock, holds=Holding.EARLY, limit_s=5.0)
    for plan in engine.plans:
        for row in plan.rows:
            assert row.late_start >= row.end
            assert row.sample is None


def test_a_step_that_fails_ends_it_with_what_there_is() -> None:
    clock = ManualClock()
    engine = RecordingEngine(clock)
    engine.fail_next = True
    assert profile(engine, clock) == []
