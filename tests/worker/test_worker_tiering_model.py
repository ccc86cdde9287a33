"""Random conversations through device, host and disk, against a slow, obvious model.

Whatever is lost, late, damaged, aborted, preempted or restarted: the ids are those of a
cold run, and no hit is longer than what was computed before. Where nothing goes wrong,
the hit is exactly the longest common prefix with anything that the tenant had computed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_fake_tiers import Habits, Stack, sometimes
from worker_scripted_engine import VOCAB, make_request

from headwater.core.cache import WindowKV
from headwater.core.request import FinishReason, Request

DAYS = 86400.0
TENANTS = ("", "other")

run_settings = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass
class Model:
    """All token runs that were computed, by tenant: what a perfect cache has."""

    block_tokens: int
    computed: dict[str, list[list[int]]] = field(default_factory=lambda: {t: [] for t in TENANTS})

    def num_hit_tokens(self, tenant: str, tokens: list[int]) -> int:
        longest = 0
        for run in self.computed[tenant]:
            shared = 0
            for ours, theirs in zip(tokens[:-1], run, strict=False):
                if ours != theirs:
                    break
                shared += 1
            longest = max(longest, shared)
        return longest if longest >= self.block_tokens else 0

    def add(self, tenant: str, tokens: list[int]) -> None:
        self.computed[tenant].append(tokens)


def next_prompt(rng: random.Random, conversations: list[list[int]]) -> list[int]:
    """A new conversation, the next turn of one, a fork of one, or one again."""
    fresh = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
    if not conversations or rng.random() < 0.15:
        return fresh
    old = rng.choice(conversations)
    match rng.randrange(4):
        case 0:
            return old[: rng.randrange(1, len(old) + 1)] + fresh
        case 1:
            return list(old)
        case _:
            return old + fresh


@pytest.mark.parametrize("block_tokens", [4, 8])
@run_settings
@given(seed=st.integers(0, 10**9))
def test_one_after_another_every_prompt_hits_all_that_was_ever_computed(
    block_tokens: int, seed: int
) -> None:
    rng = random.Random(seed)
    stack = Stack(num_blocks=100, block_tokens=block_tokens)
    model = Model(block_tokens)
    conversations: list[list[int]] = []
    for number in range(16):
        tokens = next_prompt(rng, conversations)[:90]
        tenant = rng.choice(TENANTS)
        request = make_request(
            f"r{number}", tokens, rng.randrange(0, 10), tenant=tenant, keep_s=DAYS
        )
        expected = model.num_hit_tokens(tenant, tokens)
        report = stack.ask(request)
        cache = report.cache
        assert cache is not None
        assert report.num_hit_tokens == expected
        assert cache.num_hit_tokens == report.num_hit_tokens
        ids = stack.driver.ids[f"r{number}", 0]
        run = tokens + ids[:-1]
        model.add(tenant, run)
        conversations.append(tokens + ids)
        if rng.random() < 0.3:
            stack.restart()


@pytest.mark.parametrize(
    ("window", "has_late"),
    [
        (None, False),
        (WindowKV.CHECKPOINT, False),
        (WindowKV.REPLAY, False),
        (WindowKV.CHECKPOINT, True),
        (WindowKV.REPLAY, True),
    ],
)
@run_settings
@given(seed=st.integers(0, 10**9))
def test_a_crowd_on_bad_tiers_gets_the_ids_of_a_cold_run(
    window: WindowKV | None, has_late: bool, seed: int
) -> None:
    rng = random.Random(seed)
    share = rng.choice((0.0, 0.05, 0.3))
    habits = Habits(
        look_ticks=rng.choice((1, 3, 60)),
        load_ticks=rng.choice((1, 2, 30)),
        store_ticks=rng.choice((1, 4, 20)),
        load_s=rng.choice((0.0, 0.001, 0.1)),
        fails_load=sometimes(rng, share),
        loses_store=sometimes(rng, share),
        has_host=rng.random() < 0.5,
        has_disk=rng.random() < 0.8,
    )
    window_tokens = None if window is None else rng.choice((3, 4, 7, 12))
    stack = Stack(
        habits,
        num_blocks=rng.choice((16, 24, 60)),
        window_tokens=window_tokens,
        alignment=rng.choice((1, 2)) if has_late else 1,
        decoder_replay_tokens=(window_tokens or 0) + rng.choice((0, 2, 5)) if has_late else None,
        window_kv=window or WindowKV.CHECKPOINT,
        max_step_tokens=rng.choice((8, 24, 64)),
        max_mixed_prefill_tokens=rng.choice((3, 8)),
        reserve_blocks_per_sequence=rng.choice((0, 1)),
        context_tokens=60,
    )
    stack.engine.tokens_per_s = rng.choice((0.0, 2000.0))
    conversations: list[list[int]] = []
    requests: list[Request] = []

    def end_all() -> None:
        stack.driver.run()
        for request in requests:
            name = str(request.request_id)
            stack.check(request)
            for index in range(request.num_choices):
                if stack.driver.reason(name, index) is FinishReason.LENGTH:
                    ids = stack.driver.ids[name, index]
                    assert len(ids) == request.stop.max_output_tokens
                    conversations.append([*request.prompt_tokens, *ids][:50])
        load = stack.scheduler.load()
        reports = stack.driver.prompts.values()
        assert load.num_hit_tokens == sum(p.num_hit_tokens for p in reports)
        assert load.num_miss_tokens == sum(p.num_miss_tokens for p in reports)
        caches = [p.cache for p in reports if p.cache is not None]
        assert len(caches) == len(reports)
        for report in reports:
            assert report.cache is not None
            assert report.cache.num_hit_tokens == report.num_hit_tokens
        assert load.num_disk_hit_tokens == sum(c.num_disk_tokens for c in caches)
        assert load.num_host_hit_tokens == sum(c.num_host_tokens for c in caches)
        requests.clear()

    for number in range(30):
        name = f"r{number}"
        request = make_request(
            name,
            next_prompt(rng, conversations)[:50],
            rng.randrange(0, 9),
            n=rng.choice((1, 1, 1, 2)),
            tenant=rng.choice(TENANTS),
            priority=rng.choice((0, 0, 1)),
            num_prompt_logprobs=rng.choice((None, None, None, 0)),
            keep_s=rng.choice((0.0, DAYS, 2 * DAYS)),
        )
        stack.driver.submit(request)
        requests.append(request)
        if rng.random() < 0.2:
            stack.driver.abort(f"r{rng.randrange(max(0, number - 5), number + 1)}")
        if rng.random() < 0.05:
            stack.engine.fail_next = True
        for _ in range(rng.randrange(0, 12)):
            stack.driver.step()
        if rng.random() < 0.1:
            if rng.random() < 0.5:
                end_all()
                stack.restart()
            else:  # killed in the middle of everything
                requests.clear()
                stack.restart(orderly=False)
    end_all()
    load = stack.scheduler.load()
    assert load.num_held_blocks == 0
    assert not stack.tiers.num_queued_writes
