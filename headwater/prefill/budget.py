"""How many tokens of a prompt fit in a step that may take so many seconds. Pure.

    step   [ decode rows | chunk of a | chunk of b | ... )  predicted seconds <= budget_s

Decode rows are in it whatever they take. Prompts get what is left, and never less than a
minimum: else a worker full of running answers would compute no prompt at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.core.cost import NO_STEP, StepCost, StepShape
from headwater.core.errors import ConfigError

# Even where nothing is left; small, since deep in a long prompt a token costs many pairs.
MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step's seconds, and what of them is taken by the rows that are in it already."""

    cost: StepCost
    budget_s: float
    window_tokens: int | None = None  # of the model's layers with a window
    used: StepShape = NO_STEP
    min_chunk_tokens: int = MIN_CHUNK_TOKENS

    def __post_init__(self) -> None:
        if self.budget_s <= 0 or self.min_chunk_tokens < 1:
            raise ConfigError(
                f"budget_s must be > 0 and min_chunk_tokens >= 1, "
                f"got {self.budget_s} and {self.min_chunk_tokens}"
            )

    def with_row(self, start: int, num_tokens: int, late_start: int | None = None) -> StepTime:
        """The same step with one more row, of tokens [start, start + num_tokens)."""
        return replace(self, used=self._used_with(start, num_tokens, late_start))

    def fits(self, start: int, num_tokens: int, late_start: int | None = None) -> bool:
        used = self._used_with(start, num_tokens, late_start)
        return self.cost.predict_s(used) <= self.budget_s

    def _used_with(self, start: int, num_tokens: int, late_start: int | None) -> StepShape:
        return self.used + StepShape.of_row(start, num_tokens, self.window_tokens, late_start)


def largest_chunk(
    time: StepTime, start: int, max_tokens: int, late_start: int | None = None
) -> int:
    """The most tokens from ``start`` on, up to ``max_tokens``, that fit; 0 if none do. Those
    before ``late_start`` cost less, where late layers leave them out.

    More tokens never cost less, so halving finds it: O(log max_tokens).

    >>> cost = StepCost(base_s=1, token_s=1, pair_s=0, window_pair_s=0, sequence_s=0)
    >>> largest_chunk(StepTime(cost=cost, budget_s=9.5), 0, 100)
    8
    """
    fit, too_many = 0, max_tokens + 1
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        if time.fits(start, middle, late_start):
            fit = middle
        else:
            too_many = middle
    return fit


def chunk_tokens(
    time: StepTime, start: int, max_tokens: int, late_start: int | None = None, *, is_first: bool
) -> int:
    """What a prompt gets of the step. The first is never left without: it has the minimum,
    also where that takes the step over its budget."""
    fit = largest_chunk(time, start, max_tokens, late_start)
    return max(fit, min(time.min_chunk_tokens, max_tokens)) if is_first else fit
