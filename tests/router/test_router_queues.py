"""Buckets and fair queues: short prompts pass, nobody starves, tenants share."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import ConfigError
from headwater.router.buckets import Buckets
from headwater.router.buckets_policy import (
    NUM_BUCKETS,
    BucketShares,
    bucket_bounds,
    bucket_of,
    turn_order,
    wire_priority,
)
from headwater.router.fair_queue import FairQueue


@settings(max_examples=100, deadline=None, derandomize=True)
@given(context_tokens=st.integers(1, 1 << 21), num_miss=st.integers(0, 1 << 21))
def test_every_prompt_has_one_bucket_and_longer_ones_never_a_lower_one(
    context_tokens: int, num_miss: int
) -> None:
    bounds = bucket_bounds(context_tokens)
    assert len(bounds) == NUM_BUCKETS - 1
    assert all(low < high for low, high in itertools.pairwise(bounds))
    bucket = bucket_of(num_miss, bounds)
    assert 0 <= bucket < NUM_BUCKETS
    assert bucket <= bucket_of(num_miss + 1, bounds)


def test_the_bounds_are_those_of_the_design_where_the_context_is_long() -> None:
    assert bucket_bounds(1 << 20) == (2048, 16384, 131072)
    assert bucket_bounds(1 << 18) == (2048, 16384, 131072)
    assert bucket_bounds(32768) == (256, 2048, 16384)


def test_shorter_prompts_go_first_among_equal_priorities_only() -> None:
    assert wire_priority(0, 0) == 0, "the shortest keep the caller's own"
    assert wire_priority(0, 0) < wire_priority(0, 3) < wire_priority(1, 0)
    assert wire_priority(-1, 3) < wire_priority(0, 0)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0, 0.0)])
def test_shares_are_checked_whole(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="weights"):
        BucketShares(weights=weights)
    with pytest.raises(ConfigError, match="overdue_s"):
        BucketShares(overdue_s=0.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4))
def test_who_got_least_is_next(virtual_s: list[float], has_work: list[bool]) -> None:
    order = turn_order(virtual_s, has_work[:4])
    assert sorted(order) == [b for b in range(4) if has_work[b]]
    assert [virtual_s[b] for b in order] == sorted(virtual_s[b] for b in order)


def test_backlogged_buckets_get_seconds_by_their_weights() -> None:
    shares = BucketShares(weights=(8, 4, 2, 1))
    buckets = Buckets(1 << 20, shares)
    costs = (0.1, 0.2, 0.5, 1.0)
    for bucket, cost_s in enumerate(costs):
        for number in range(2000):
            buckets.add(
                f"{bucket}-{number}", bucket, tenant="", priority=0, cost_s=cost_s, now_s=0.0
            )
    given_s = [0.0] * 4
    while sum(given_s) < 300:
        bucket, key, _ = buckets.heads(0.0)[0]
        buckets.serve(bucket, key, 0.0)
        given_s[bucket] += costs[bucket]
    shares_got = [seconds / sum(given_s) for seconds in given_s]
    for got, weight in zip(shares_got, shares.weights, strict=True):
        assert got == pytest.approx(weight / 15, rel=0.1)


def test_a_bucket_that_was_empty_has_no_claim_on_the_past() -> None:
    buckets = Buckets(1 << 20, BucketShares(weights=(1, 1, 1, 1)))
    for number in range(20):
        buckets.add(f"a{number}", 0, tenant="", priority=0, cost_s=1.0, now_s=0.0)
    for number in range(10):
        buckets.serve(0, f"a{number}", 0.0)
    for number in range(10):
        buckets.add(f"b{number}", 3, tenant="", priority=0, cost_s=1.0, now_s=0.0)
    served = []
    for _ in range(8):
        bucket, key, _ = buckets.heads(0.0)[0]
        buckets.serve(bucket, key, 0.0)
        served.append(bucket)
    assert sorted(served) == [0] * 4 + [3] * 4


def fill(queue: FairQueue, keys: str, tenant: str, *, priority: int = 0, now_s: float = 0) -> None:
    for key in keys.split():
        queue.add(key, tenant=tenant, priority=priority, cost_s=1.0, now_s=now_s)


def drain(queue: FairQueue, now_s: float = 0.0) -> list[str]:
    served = []
    while (key := queue.head(now_s)) is not None:
        queue.serve(key, now_s)
        served.append(key)
    return served


def test_one_tenants_burst_does_not_delay_anothers_single_request() -> None:
    queue = FairQueue(age_s=10.0)
    fill(queue, " ".join(f"burst{n}" for n in range(50)), "noisy")
    fill(queue, "single", "quiet")
    assert drain(queue)[:2] == ["burst0", "single"]


def test_tenants_with_queues_take_turns() -> None:
    queue = FairQueue(age_s=10.0)
    fill(queue, "a1 a2 a3", "a")
    fill(queue, "b1 b2 b3", "b")
    assert drain(queue) == ["a1", "b1", "a2", "b2", "a3", "b3"]


def test_priority_is_strict_until_waiting_lifts_the_others() -> None:
    queue = FairQueue(age_s=10.0)
    fill(queue, "low", "a", priority=2)
    fill(queue, "high", "a", priority=0, now_s=5.0)
    assert queue.head(5.0) == "high"
    assert queue.head(19.0) == "high"
    queue.remove("high")
    fill(queue, "later", "a", priority=0, now_s=29.0)
    assert queue.head(29.0) == "low", "two levels in more than twenty seconds"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_whatever_comes_and_goes_each_is_served_once_in_its_tenants_order(
    data: st.DataObject,
) -> None:
    queue = FairQueue(age_s=10.0)
    waiting: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    served: set[str] = set()
    for number in range(data.draw(st.integers(0, 60))):
        tenant = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(("add", "add", "serve", "remove"))):
            case "add":
                queue.add(str(number), tenant=tenant, priority=0, cost_s=1.0 + number, now_s=0.0)
                waiting[tenant].append(str(number))
            case "serve":
                key = queue.head(0.0)
                assert (key is None) == (not any(waiting.values()))
                if key is not None:
                    assert key in {keys[0] for keys in waiting.values() if keys}
                    queue.serve(key, 0.0)
                    served.add(key)
                    for keys in waiting.values():
                        keys[:] = [other for other in keys if other != key]
            case "remove":
                if waiting[tenant]:
                    place = data.draw(st.integers(0, len(waiting[tenant]) - 1))
                    queue.remove(waiting[tenant].pop(place))
        assert len(queue) == sum(map(len, waiting.values()))
        assert queue.cost_s == pytest.approx(
            sum(1.0 + int(key) for keys in waiting.values() for key in keys)
        )
    assert sorted(drain(queue)) == sorted(key for keys in waiting.values() for key in keys)


def test_those_that_leave_unserved_leave_nothing_behind() -> None:
    queue = FairQueue(age_s=10.0)
    fill(queue, "head", "a")
    for number in range(1000):
        fill(queue, str(number), f"tenant-{number}")
        queue.remove(str(number))
    level = queue._levels[0]
    assert len(level.heap) < 50
    assert drain(queue) == ["head"]
    assert not queue._levels
