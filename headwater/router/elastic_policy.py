"""Whether an idle BOTH worker should do another phase now. Pure.

    wanted prefill workers = share of prefill in the seconds that the traffic asks for

A worker changes only when it is idle, when the fleet has been out of balance by more than
``slack_workers`` for ``patience_s``, and when it has done what it does for ``dwell_s``. So a
burst changes nothing, and nobody goes back and forth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.errors import ConfigError
from headwater.core.fleet import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticLimits:
    """At least ``min_prefill`` and ``min_decode`` workers keep each phase. ``slack_workers``
    above one half: nearer than that no whole worker is missing anywhere."""

    min_prefill: int = 1
    min_decode: int = 1
    slack_workers: float = 0.75
    patience_s: float = 15.0
    dwell_s: float = 60.0

    def __post_init__(self) -> None:
        if self.min_prefill < 1 or self.min_decode < 1:
            raise ConfigError("router.elastic needs at least 1 worker of each phase")
        if self.slack_workers <= 0.5:
            raise ConfigError(
                f"router.elastic slack_workers must be > 0.5, got {self.slack_workers}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticWorker:
    """A worker of role BOTH as the policy sees it."""

    worker_id: str
    acting: Role
    acting_for_s: float
    is_idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Seconds of work that the traffic asked for lately, by phase; queued prompts included."""

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Which phase lacks workers, and since when."""

    lacking: Role
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlan:
    """``imbalance`` goes into the next plan. ``worker_id`` acts as ``acting`` from now on."""

    imbalance: Imbalance | None
    worker_id: str | None = None
    acting: Role = Role.BOTH


def plan_elastic(
    workers: Sequence[ElasticWorker],
    *,
    num_fixed_prefill: int,
    num_fixed_decode: int,
    demand: Demand,
    imbalance: Imbalance | None,
    now_s: float,
    limits: ElasticLimits,
) -> ElasticPlan:
    """``num_fixed_*``: workers that have one role for good. BOTH workers that still do both
    are divided first, by the same rules but without waiting: they have no phase to leave.

    With 4 workers, 1 acting as prefill, and three quarters of the seconds asked for prefill,
    3 are wanted: after ``patience_s`` one that decodes and is idle changes.
    """
    total_s = demand.prefill_s + demand.decode_s
    num_prefill = num_fixed_prefill + sum(w.acting is Role.PREFILL for w in workers)
    num_decode = num_fixed_decode + sum(w.acting is Role.DECODE for w in workers)
    num_all = num_fixed_prefill + num_fixed_decode + len(workers)
    if num_all < limits.min_prefill + limits.min_decode:
        return ElasticPlan(imbalance=None)  # too few to divide: each does both
    share = demand.prefill_s / total_s if total_s > 0 else 0.5
    wanted = min(max(share * num_all, limits.min_prefill), num_all - limits.min_decode)
    for worker in workers:
        if worker.acting is Role.BOTH and worker.is_idle:
            # The phase that is further from its part takes it.
            is_prefill = num_prefill * (num_all - wanted) <= num_decode * wanted
            return ElasticPlan(
                imbalance=None,
                worker_id=worker.worker_id,
                acting=Role.PREFILL if is_prefill else Role.DECODE,
            )
    if abs(wanted - num_prefill) <= limits.slack_workers or total_s <= 0:
        return ElasticPlan(imbalance=None)
    lacking = Role.PREFILL if wanted > num_prefill else Role.DECODE
    if imbalance is None or imbalance.lacking is not lacking:
        return ElasticPlan(imbalance=Imbalance(lacking=lacking, since_s=now_s))
    if now_s - imbalance.since_s < limits.patience_s:
        return ElasticPlan(imbalance=imbalance)
    giver = Role.DECODE if lacking is Role.PREFILL else Role.PREFILL
    spare = (
        num_decode - limits.min_decode if giver is Role.DECODE else num_prefill - limits.min_prefill
    )
    if spare < 1:
        return ElasticPlan(imbalance=imbalance)
    for worker in sorted(workers, key=lambda w: -w.acting_for_s):
        if worker.acting is giver and worker.is_idle and worker.acting_for_s >= limits.dwell_s:
            return ElasticPlan(imbalance=None, worker_id=worker.worker_id, acting=lacking)
    return ElasticPlan(imbalance=imbalance)
