"""The requests that wait in the front: four fair queues, and how much each was given.

Knows keys, buckets and predicted seconds; whose turn it is says ``buckets_policy``, where
somebody is placed says ``dispatch``. No clock of its own.
"""

from __future__ import annotations

from headwater.core.ports import BucketStatus
from headwater.router.buckets_policy import (
    NUM_BUCKETS,
    BucketShares,
    bucket_bounds,
    bucket_of,
    turn_order,
)
from headwater.router.fair_queue import FairQueue

AGE_S = 10.0  # of waiting, per level of priority


class Buckets:
    """Every key is in at most one bucket, by the miss tokens it came with."""

    def __init__(self, context_tokens: int, shares: BucketShares) -> None:
        self._bounds = bucket_bounds(context_tokens)
        self._shares = shares
        self._queues = tuple(FairQueue(AGE_S) for _ in range(NUM_BUCKETS))
        self._virtual_s = [0.0] * NUM_BUCKETS
        self._served_virtual_s = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    @property
    def queue_s(self) -> float:
        """Predicted seconds of all that wait."""
        return sum(queue.cost_s for queue in self._queues)

    def bucket_of(self, num_miss_tokens: int) -> int:
        return bucket_of(num_miss_tokens, self._bounds)

    def add(
        self, key: str, bucket: int, *, tenant: str, priority: int, cost_s: float, now_s: float
    ) -> None:
        queue = self._queues[bucket]
        if not queue:
            # Having had nothing to do earns no claim on the time of the others.
            self._virtual_s[bucket] = max(self._virtual_s[bucket], self._served_virtual_s)
        queue.add(key, tenant=tenant, priority=priority, cost_s=cost_s, now_s=now_s)

    def heads(self, now_s: float) -> list[tuple[int, str, float]]:
        """(bucket, its next key, how long that has waited), whose turn it is first."""
        heads = []
        for bucket in turn_order(self._virtual_s, [len(queue) > 0 for queue in self._queues]):
            queue = self._queues[bucket]
            key = queue.head(now_s)
            assert key is not None
            heads.append((bucket, key, queue.waited_s(key, now_s)))
        return heads

    def serve(self, bucket: int, key: str, now_s: float) -> None:
        """``key``, a head, was placed."""
        cost_s = self._queues[bucket].cost_of_s(key)
        self._queues[bucket].serve(key, now_s)
        self._served_virtual_s = max(self._served_virtual_s, self._virtual_s[bucket])
        self._virtual_s[bucket] += cost_s / self._shares.weights[bucket]

    def remove(self, bucket: int, key: str) -> None:
        self._queues[bucket].remove(key)

    def status(self, now_s: float) -> tuple[BucketStatus, ...]:
        return tuple(
            BucketStatus(
                max_miss_tokens=bound,
                num_waiting=len(queue),
                queue_s=queue.cost_s,
                oldest_s=queue.oldest_s(now_s),
            )
            for bound, queue in zip((*self._bounds, None), self._queues, strict=True)
        )
