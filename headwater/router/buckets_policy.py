"""Four length buckets by miss tokens, and whose turn it is. Pure.

    miss tokens   [0, b0)   [b0, b1)   [b1, b2)   [b2, ...)
    bucket           0         1          2           3

A bucket's *virtual time* is the predicted seconds it was given, divided by its weight. The
one that got least is served next, so each backlogged bucket has its share of the fleet:
many short prompts cannot starve a long one, nor the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.errors import ConfigError

NUM_BUCKETS = 4
_TOP_TOKENS = 128 * 1024
_STEP = 8  # each bound is an eighth of the next: 2k, 16k, 128k
_MIN_TOKENS = 256  # prompts below are alike


def bucket_bounds(context_tokens: int) -> tuple[int, ...]:
    """Where buckets 1, 2 and 3 begin, for a model with this context.

    >>> bucket_bounds(1 << 20)
    (2048, 16384, 131072)
    >>> bucket_bounds(8192)
    (256, 512, 4096)
    """
    top = min(_TOP_TOKENS, context_tokens // 2)
    bounds: list[int] = []
    for power in reversed(range(NUM_BUCKETS - 1)):
        floor = bounds[-1] * 2 if bounds else _MIN_TOKENS
        bounds.append(max(top // _STEP**power, floor))
    return tuple(bounds)


def bucket_of(num_miss_tokens: int, bounds: Sequence[int]) -> int:
    return sum(num_miss_tokens >= bound for bound in bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketShares:
    """``weights``: shares of the fleet's prefill seconds while all buckets have work.
    ``overdue_s``: who has waited longer is no longer overtaken by those that need less room."""

    weights: tuple[float, ...] = (8.0, 4.0, 2.0, 1.0)
    overdue_s: float = 30.0

    def __post_init__(self) -> None:
        if len(self.weights) != NUM_BUCKETS or min(self.weights) <= 0:
            raise ConfigError(
                f"router bucket weights must be {NUM_BUCKETS} numbers > 0, got {self.weights}"
            )
        if self.overdue_s <= 0:
            raise ConfigError(f"router.overdue_s must be > 0, got {self.overdue_s}")


def turn_order(virtual_s: Sequence[float], has_work: Sequence[bool]) -> tuple[int, ...]:
    """Buckets with work, whose turn it is first; the shorter prompts on a tie.

    >>> turn_order([3.0, 1.0, 1.0, 0.0], [True, True, True, False])
    (1, 2, 0)
    """
    buckets = [bucket for bucket, work in enumerate(has_work) if work]
    return tuple(sorted(buckets, key=lambda bucket: (virtual_s[bucket], bucket)))


def wire_priority(priority: int, bucket: int) -> int:
    """What a worker sorts by: the caller's priority, then shorter prompts before longer ones,
    so that a short prompt is computed in the next step of a worker that has a long one."""
    return priority * NUM_BUCKETS + bucket
