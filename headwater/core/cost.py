"""What a step costs, as a line through what steps cost: the model behind every prediction.

    seconds = base + token x tokens + pair x attention pairs + window x window pairs
              + sequence x sequences + late x late tokens + late pair x pairs of those

A *pair* is one query that looks at one key in a layer that sees every token; a window pair
the same in a layer with a window. A *late token* is one that late layers compute too, where
they do not compute all of them (decoder replay); elsewhere there are none. Its pairs count
again, as those layers may see more rows of KV than all others. A worker profiles and refits
its own (``worker``), and says it in each ``WorkerLoad``; ``router`` predicts with it. Plain
values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes, in counts."""

    num_tokens: int
    num_pairs: int
    num_window_pairs: int
    num_sequences: int
    num_late_tokens: int = 0
    num_late_pairs: int = 0

    def __add__(self, other: StepShape) -> StepShape:
        return StepShape(
            self.num_tokens + other.num_tokens,
            self.num_pairs + other.num_pairs,
            self.num_window_pairs + other.num_window_pairs,
            self.num_sequences + other.num_sequences,
            self.num_late_tokens + other.num_late_tokens,
            self.num_late_pairs + other.num_late_pairs,
        )

    @classmethod
    def of_row(
        cls, start: int, num_tokens: int, window_tokens: int | None, late_start: int | None = None
    ) -> StepShape:
        """One row of tokens [start, start + num_tokens), of which those from ``late_start`` on
        are late.

        >>> StepShape.of_row(10, 2, None, late_start=11)  # doctest: +NORMALIZE_WHITESPACE
        StepShape(num_tokens=2, num_pairs=23, num_window_pairs=0, num_sequences=1,
                  num_late_tokens=1, num_late_pairs=12)
        """
        num_pairs = _num_pairs(start, num_tokens)
        num_window_pairs = 0
        if window_tokens is not None:
            num_growing = min(max(window_tokens - start, 0), num_tokens)  # not yet a whole window
            num_window_pairs = (
                _num_pairs(start, num_growing) + (num_tokens - num_growing) * window_tokens
            )
        num_late = num_late_pairs = 0
        if late_start is not None:
            num_late = min(max(start + num_tokens - late_start, 0), num_tokens)
            num_late_pairs = _num_pairs(start + num_tokens - num_late, num_late)
        return cls(num_tokens, num_pairs, num_window_pairs, 1, num_late, num_late_pairs)


def _num_pairs(start: int, num_tokens: int) -> int:
    """Of tokens [start, start + num_tokens) with all up to their own."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


NO_STEP = StepShape(0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Coefficients in seconds; none is negative."""

    base_s: float
    token_s: float
    pair_s: float
    window_pair_s: float
    sequence_s: float
    late_token_s: float = 0.0
    late_pair_s: float = 0.0

    def predict_s(self, shape: StepShape) -> float:
        """Seconds of one step of ``shape``."""
        return (
            self.base_s
            + self.token_s * shape.num_tokens
            + self.pair_s * shape.num_pairs
            + self.window_pair_s * shape.num_window_pairs
            + self.sequence_s * shape.num_sequences
            + self.late_token_s * shape.num_late_tokens
            + self.late_pair_s * shape.num_late_pairs
        )
