"""What steps were predicted to take, what they took, and what a step may give to prompts.

    start: profile --> fit            each step: predict --> run --> note --> fit
    plan:  decode rows --> time_left --> the prompts' chunks

The fit is for the middle of what may happen; who keeps a budget needs the upper end. So the
budget that is planned with is smaller than the one asked for, by as much as the slowest of
the last steps were over their prediction: then few steps go over it, however restless the
machine is. Knows no clock and no engine. ``loop`` and ``scheduler`` share one, in one thread.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from headwater.core.control import WorkerLoad
from headwater.core.cost import NO_STEP, StepCost, StepShape
from headwater.core.errors import ConfigError
from headwater.core.step import StepPlan, StepRow
from headwater.prefill.budget import StepTime
from headwater.worker.cost_fit import CostFit
from headwater.worker.cost_profile import Observation

TOLERANCE = 1.25  # up to so many times of its budget, a step has kept it
KEPT_SHARE = 0.97  # of the steps that compute prompts are to keep it
# Of a sequence that is alone on its worker; who comes meanwhile waits for one such step.
LONE_BUDGETS = 5
NUM_ERRORS = 128  # steps that the exported error is of
NUM_RATIOS = 64  # steps with prompts that the margin is of
MIN_RATIOS = 16
MAX_MARGIN = 2.0


class CostBook:
    """One per worker."""

    def __init__(
        self,
        *,
        window_tokens: int | None = None,
        counts_late: bool = False,
        budget_s: float | None = None,
    ) -> None:
        """``window_tokens`` of the model's layers with a window. ``counts_late``: late layers
        leave tokens out, so those that they compute cost more. ``budget_s``: what a step may
        take; None: as long as it takes."""
        if budget_s is not None and budget_s <= 0:
            raise ConfigError(f"a step's budget must be > 0 s, got {budget_s}")
        self._window_tokens = window_tokens
        self._counts_late = counts_late
        self._budget_s = budget_s
        self._fit = CostFit()
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self._last: tuple[StepPlan, StepShape] | None = None  # of ``predict_s``, for ``note``
        self._num_budgeted = 0
        self._num_within = 0
        self._is_lone = False  # the step that was planned last

    @property
    def cost(self) -> StepCost | None:
        """As fitted by now; None while nothing was measured."""
        return self._fit.cost

    def learn(self, observations: Iterable[Observation]) -> None:
        """Steps that were measured before the first one was predicted."""
        for shape, seconds in observations:
            self._fit.note(shape, seconds)

    def predict_s(self, plan: StepPlan) -> float:
        """What ``plan`` will take; 0 while nothing was measured."""
        cost, shape = self.cost, self._shape(plan.rows)
        self._last = plan, shape
        return 0.0 if cost is None else cost.predict_s(shape)

    def note(self, plan: StepPlan, predicted_s: float, seconds: float) -> None:
        """``plan`` took ``seconds``, all in all."""
        last = self._last
        shape = last[1] if last is not None and last[0] is plan else self._shape(plan.rows)
        self._fit.note(shape, seconds)
        if self._budget_s is not None and not self._is_lone:
            self._num_budgeted += 1
            self._num_within += seconds <= TOLERANCE * self._budget_s
        if predicted_s > 0:
            ratio = seconds / predicted_s
            self._errors.append(abs(ratio - 1))
            if shape.num_tokens > shape.num_sequences:
                self._ratios.append(ratio)

    def time_left(self, rows: Sequence[StepRow], *, is_alone: bool = False) -> StepTime | None:
        """What a step with ``rows`` may give to prompts. None: there is no limit. One that
        ``is_alone`` has several budgets a step: nobody waits yet, and larger ones are cheaper."""
        cost = self.cost
        self._is_lone = is_alone
        if self._budget_s is None or cost is None:
            return None
        return StepTime(
            cost=cost,
            budget_s=self._budget_s * (LONE_BUDGETS if is_alone else 1) / self._margin(),
            window_tokens=self._window_tokens,
            used=self._shape(rows),
        )

    def _margin(self) -> float:
        """How far below the budget steps are planned."""
        if len(self._ratios) < MIN_RATIOS:
            return 1.0
        ranked = sorted(self._ratios)
        high = ranked[min(int(KEPT_SHARE * len(ranked)), len(ranked) - 1)]
        return min(max(high / TOLERANCE, 1.0), MAX_MARGIN)

    def add_to(self, load: WorkerLoad) -> WorkerLoad:
        """``load`` with what only this file knows."""
        return replace(
            load,
            cost=self.cost,
            step_error=statistics.median(self._errors) if self._errors else None,
            num_budgeted_steps=self._num_budgeted,
            num_steps_within=self._num_within,
        )

    def _shape(self, rows: Iterable[StepRow]) -> StepShape:
        """O(rows), and quick for those of one token: there are many, in every step."""
        window_tokens, counts_late = self._window_tokens, self._counts_late
        chunks = NO_STEP
        num_single = num_pairs = num_window_pairs = num_late = num_late_pairs = 0
        for row in rows:
            if len(row.tokens) > 1:
                late_start = row.late_start if counts_late else None
                chunks += StepShape.of_row(row.start, len(row.tokens), window_tokens, late_start)
                continue
            num_single += 1
            num_pairs += row.start + 1
            if window_tokens is not None:
                num_window_pairs += min(row.start + 1, window_tokens)
            if counts_late and row.start >= row.late_start:
                num_late += 1
                num_late_pairs += row.start + 1
        return chunks + StepShape(
            num_single, num_pairs, num_window_pairs, num_single, num_late, num_late_pairs
        )
