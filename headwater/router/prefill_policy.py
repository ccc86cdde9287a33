"""Where a prompt is computed: the least predicted finish, within a load bound. Pure.

    finish = queue ahead of it + loading what a cheaper tier has + computing its miss

Cache affinity is only the smaller miss in that sum. It may draw work to a worker as far as
the bound allows: the recent work of no worker goes over ``max_over_mean`` of the pool's mean
by more than the hit saves, also when nothing is in flight any more (E08).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.core.errors import ConfigError


class PrefillOption(NamedTuple):
    """One worker, as it looks to one prompt. All in seconds."""

    worker_id: str
    queue_s: float  # predicted work that it would be computed behind
    compute_s: float  # predicted, for the miss on this worker
    recent_s: float  # work given to it lately, fading with time
    is_open: bool = True  # may be given this prompt now
    load_s: float = 0.0  # until what a cheaper tier has would be there


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """``max_ahead_s``: predicted seconds in flight to a worker ahead of the next prompt; the
    rest waits in the front, where later short prompts overtake it. ``passing_share``: of a
    worker's time, what may be given to prompts that pass one it has begun. ``max_over_mean``
    and ``grace_s`` bound the recent work, see above."""

    max_ahead_s: float = 1.0
    passing_share: float = 0.75
    max_over_mean: float = 1.25
    grace_s: float = 0.25

    def __post_init__(self) -> None:
        if self.max_ahead_s <= 0 or self.grace_s < 0:
            raise ConfigError("router.max_ahead_s must be > 0 and router.grace_s >= 0")
        if not 0 < self.passing_share < 1:
            raise ConfigError(f"router.passing_share must be in (0, 1), got {self.passing_share}")
        if self.max_over_mean < 1:
            raise ConfigError(f"router.max_over_mean must be >= 1, got {self.max_over_mean}")


def choose_prefill(
    options: Sequence[PrefillOption], limits: PrefillLimits, *, may_wait: bool = True
) -> PrefillOption | None:
    """The option to take now. None: it is better to wait, or nobody is open.

    With ``may_wait`` the best may be one that is not open yet: then its finish is still before
    everybody else's. Ties go to the one with less recent work.
    """
    if not options:
        return None
    recent_s = most_s = 0.0
    for option in options:
        recent_s += option.recent_s
        most_s = max(most_s, option.compute_s + option.load_s)
    fair_s = limits.max_over_mean * recent_s / len(options)
    best: PrefillOption | None = None
    best_key = (0.0, 0.0, "")
    for option in options:
        if not (option.is_open or may_wait):
            continue
        cost_s = option.compute_s + option.load_s
        if option.recent_s > fair_s + max(limits.grace_s, most_s - cost_s):
            continue
        finish_s = option.queue_s + cost_s
        if best is None or finish_s <= best_key[0]:
            key = (finish_s, option.recent_s, option.worker_id)
            if best is None or key < best_key:
                best, best_key = option, key
    if best is None:  # only busy ones are open: the least busy of them
        open_ones = [option for option in options if option.is_open]
        return min(open_ones, key=lambda o: (o.recent_s, o.worker_id), default=None)
    return best if best.is_open else None


def may_pass(passed_s: float, since_s: float, cost_s: float, limits: PrefillLimits) -> bool:
    """Whether a prompt of ``cost_s`` may pass one that a worker began ``since_s`` ago and that
    ``passed_s`` of others have passed: what was begun keeps its share of the worker."""
    return passed_s + cost_s <= limits.passing_share * since_s + limits.max_ahead_s
