"""How busy each pool is, and how many workers of each phase the traffic asks for. Pure.

Works on counters that only grow, read twice: what lies between is what is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.fleet import Role
from headwater.core.ports import BucketStatus, WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """One pool over a time. ``utilisation``: share of its workers' up time spent in steps."""

    role: Role
    num_workers: int
    utilisation: float
    prefill_s: float  # of those steps
    decode_s: float
    queue_s: float  # predicted, of prompts given to its workers and not computed yet


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBalance:
    """``prefill_share``: of the seconds that the traffic asks for, queued prompts included.
    ``num_prefill : num_decode`` divides the workers there are by it, at least one each (with
    fewer than two, both are 0: one worker does it all)."""

    pools: tuple[PoolUse, ...]
    buckets: tuple[BucketStatus, ...]
    queue_s: float  # of all buckets
    prefill_share: float
    num_prefill: int
    num_decode: int


def pool_balance(
    before: Sequence[WorkerStatus],
    after: Sequence[WorkerStatus],
    buckets: Sequence[BucketStatus] = (),
) -> PoolBalance:
    """``before`` and ``after`` are the same fleet's workers at two times; an empty ``before``
    stands for the front's start. Workers that came between are counted from their start.

    One prefill worker that was busy 6 of 10 s and one decode worker that was busy 2 of 10 s:
    utilisations 0.6 and 0.2, prefill share 0.75.
    """
    starts = {worker.worker_id: worker for worker in before}
    uses = []
    for role in Role:
        pool = [worker for worker in after if worker.role is role]
        if not pool:
            continue
        firsts = [starts.get(worker.worker_id) for worker in pool]
        up_s = sum(w.up_s - (f.up_s if f else 0.0) for w, f in zip(pool, firsts, strict=True))
        prefill_s = sum(
            w.prefill_s - (f.prefill_s if f else 0.0) for w, f in zip(pool, firsts, strict=True)
        )
        decode_s = sum(
            w.decode_s - (f.decode_s if f else 0.0) for w, f in zip(pool, firsts, strict=True)
        )
        uses.append(
            PoolUse(
                role=role,
                num_workers=len(pool),
                utilisation=(prefill_s + decode_s) / up_s if up_s > 0 else 0.0,
                prefill_s=prefill_s,
                decode_s=decode_s,
                queue_s=sum(worker.queue_s for worker in pool),
            )
        )
    queue_s = sum(bucket.queue_s for bucket in buckets)
    # What waits in decode workers is the part of prompts that is theirs to compute.
    at_decode_s = sum(use.queue_s for use in uses if use.role is Role.DECODE)
    asked_prefill_s = queue_s + sum(use.prefill_s + use.queue_s for use in uses) - at_decode_s
    asked_s = asked_prefill_s + at_decode_s + sum(use.decode_s for use in uses)
    share = asked_prefill_s / asked_s if asked_s > 0 else 0.0
    num_prefill = divide_workers(len(after), share)
    return PoolBalance(
        pools=tuple(uses),
        buckets=tuple(buckets),
        queue_s=queue_s,
        prefill_share=share,
        num_prefill=num_prefill,
        num_decode=len(after) - num_prefill if num_prefill else 0,
    )


def divide_workers(num_workers: int, prefill_share: float) -> int:
    """How many of them should prefill; each phase gets at least one. 0: too few to divide.

    >>> divide_workers(4, 0.75), divide_workers(4, 1.0), divide_workers(1, 0.5)
    (3, 3, 0)
    """
    if num_workers < 2:
        return 0
    return min(max(round(prefill_share * num_workers), 1), num_workers - 1)
