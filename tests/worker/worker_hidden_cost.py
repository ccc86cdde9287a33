"""A scripted engine on a clock of its own, which moves by a cost that nobody else knows."""

from __future__ import annotations

import random
from collections.abc import Callable

from worker_scripted_engine import VOCAB, ScriptedEngine

from headwater.core.cost import NO_STEP, StepCost, StepShape
from headwater.core.errors import EngineFault
from headwater.core.request import ModelInfo
from headwater.core.step import StepPlan, StepResult

# About what two CPU cores take for a model of 135 million weights.
TRUE_COST = StepCost(base_s=8e-3, token_s=4e-4, pair_s=4e-7, window_pair_s=0.0, sequence_s=3e-4)


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


def shape_of(plan: StepPlan) -> StepShape:
    shape = NO_STEP
    for row in plan.rows:
        shape += StepShape.of_row(row.start, len(row.tokens), None)
    return shape


class HiddenCostEngine(ScriptedEngine):
    """``core.ports.Engine``. ``slowness(step)`` times the true cost is what a step takes."""

    def __init__(
        self,
        clock: ManualClock,
        *,
        block_tokens: int = 32,
        num_blocks: int = 1024,
        context_tokens: int = 16384,
        noise: float = 0.0,
        slowness: Callable[[int], float] = lambda step: 1.0,
        is_checked: bool = True,
    ) -> None:
        """Not ``is_checked``: rows may look at KV that nobody wrote."""
        super().__init__(block_tokens)
        self.clock = clock
        self.seconds: list[float] = []
        self.shapes: list[StepShape] = []
        self._noise = noise
        self._slowness = slowness
        self._is_checked = is_checked
        self._rng = random.Random(0)
        self.info = ModelInfo(
            model_id="scripted", family="scripted", fingerprint="0", vocab_size=VOCAB,
            context_tokens=context_tokens, block_tokens=block_tokens, num_blocks=num_blocks,
            kv_bytes_per_token=1, weights_format="none", weights_bytes=0, numerics="none",
            device="none",
        )  # fmt: skip

    def run(self, plan: StepPlan) -> StepResult:
        shape = shape_of(plan)
        factor = self._slowness(len(self.seconds)) * (1 + self._rng.uniform(-1, 1) * self._noise)
        seconds = TRUE_COST.predict_s(shape) * factor
        self.clock.time_s += seconds
        self.seconds.append(seconds)
        self.shapes.append(shape)
        if self._is_checked:
            return super().run(plan)
        if self.fail_next:
            raise EngineFault("the device is on fire")
        return StepResult(())
