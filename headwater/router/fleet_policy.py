"""What the fleet can do as it stands, and what all its workers come to together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

from headwater.core.cache import StoreStats
from headwater.core.control import StepTiming, WorkerLoad
from headwater.core.fleet import HandoffEnd, HandoffReport, Role
from headwater.core.ports import HandoffTotals, WorkerState, WorkerStatus


def decide_readiness(workers: Sequence[WorkerStatus]) -> tuple[bool, str]:
    """Whether a request could be served now, and what is missing if not (J01): a worker that
    does it all, or one for each phase. A worker that is stuck serves nobody."""
    up = {worker.role for worker in workers if worker.state is WorkerState.UP}
    if Role.BOTH in up or up >= {Role.PREFILL, Role.DECODE}:
        return True, "ready"
    others = [worker for worker in workers if worker.state is not WorkerState.UP]
    if len(workers) == 1 and others:
        return False, others[0].reason
    lacking = [role for role in (Role.PREFILL, Role.DECODE) if role not in up]
    missing = " and ".join(f"no {role} worker" for role in lacking)
    reasons = [
        f"{worker.worker_id} {worker.reason}"
        for worker in others
        if worker.role in lacking or worker.role is Role.BOTH
    ]
    return False, "; ".join([f"{missing} is up", *reasons])


def total_load(loads: Sequence[WorkerLoad]) -> WorkerLoad | None:
    """The sum, field by field. Of errors in prediction the worst; a step's cost is each
    worker's own, so a fleet has none."""
    if len(loads) < 2:
        return loads[0] if loads else None
    counts = {
        field.name: sum(getattr(load, field.name) for load in loads)
        for field in fields(WorkerLoad)
        if field.name.startswith("num_")
    }
    misses: Counter[str] = Counter()
    tiers: dict[str, StoreStats] = {}
    for load in loads:
        misses.update(dict(load.misses))
        for stats in load.tiers:
            known = tiers.get(stats.tier)
            tiers[stats.tier] = stats if known is None else _tier_sum(known, stats)
    return WorkerLoad(
        **counts,
        misses=tuple(sorted(misses.items())),
        tiers=tuple(tiers.values()),
        step_error=max((e for load in loads if (e := load.step_error) is not None), default=None),
    )


def phase_seconds(timing: StepTiming, acting: Role) -> tuple[float, float]:
    """A step's seconds, divided between prompts and output by their tokens: in a step of both,
    one more token costs about the same on either side. What a decode worker computes of a
    prompt (its last tokens through late layers, say) no prefill worker would do for it."""
    seconds = timing.plan_s + timing.forward_s + timing.sample_s + timing.apply_s
    if acting is Role.DECODE:
        return 0.0, seconds
    num_tokens = timing.num_prefill_tokens + timing.num_decode_tokens
    prefill_s = seconds * timing.num_prefill_tokens / num_tokens if num_tokens else 0.0
    return prefill_s, seconds - prefill_s


def with_report(totals: HandoffTotals, report: HandoffReport) -> HandoffTotals:
    """The totals with one more handoff that ended."""
    is_done = report.end is HandoffEnd.DONE
    return HandoffTotals(
        num_done=totals.num_done + is_done,
        num_failed=totals.num_failed + (not is_done),
        num_tokens=totals.num_tokens + report.num_tokens,
        num_bytes=totals.num_bytes + report.num_bytes,
        seconds=totals.seconds + report.seconds,
    )


def _tier_sum(one: StoreStats, other: StoreStats) -> StoreStats:
    sums = {
        field.name: getattr(one, field.name) + getattr(other, field.name)
        for field in fields(StoreStats)
        if field.name not in ("tier", "is_writable", "last_error")
    }
    return replace(
        one,
        **sums,
        is_writable=one.is_writable and other.is_writable,
        last_error=one.last_error or other.last_error,
    )
