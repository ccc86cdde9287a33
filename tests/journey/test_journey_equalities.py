"""Promises about results: the same ids alone, in a crowd, cut anyhow, after preemption.

The worker's real parts (scheduler, kv, engine, model) with the toy model and
reference numerics, without processes in between.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headwater.app.assemble import WorkerParts, build_worker
from headwater.app.groups import CacheSettings, EngineSettings, ModelSettings
from headwater.app.settings import Settings
from headwater.core.request import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    StopParams,
)

NUM_OUTPUT = 24


class Clock:
    def now_s(self) -> float:
        return time.monotonic()


def build(
    *, num_blocks: int = 256, max_step_tokens: int = 512, max_mixed_prefill_tokens: int = 128
) -> WorkerParts:
    settings = Settings(
        model=ModelSettings(model="toy", numerics="reference", context_tokens=1024),
        engine=EngineSettings(
            threads=1, block_tokens=16, num_blocks=num_blocks, max_running=32,
            max_step_tokens=max_step_tokens, max_mixed_prefill_tokens=max_mixed_prefill_tokens,
        ),
        cache=CacheSettings(cache_dir=None),
    )  # fmt: skip
    return build_worker(settings, Clock())


def request(name: str, prompt: Sequence[int], temperature: float = 0.0, n: int = 1) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_tokens=tuple(prompt),
        num_choices=n,
        sampling=SamplingParams(temperature=temperature, seed=11, num_logprobs=0),
        stop=StopParams(max_output_tokens=NUM_OUTPUT, ignore_end=True),
    )


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.randrange(3, 300))] for _ in range(count)]


def run(parts: WorkerParts, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
    """Everything at once, to its end; the blocks must add up after every step."""
    scheduler, engine = parts.scheduler, parts.engine
    for asked in requests:
        scheduler.submit(asked)
    ids: dict[tuple[str, int], list[int]] = {}
    for _ in range(100_000):
        plan = scheduler.plan()
        if plan is None:
            break
        for output in scheduler.apply(plan, engine.run(plan)):
            key = (output.request_id, output.index)
            ids.setdefault(key, []).extend(token.token_id for token in output.tokens)
            assert output.finish in (None, FinishReason.LENGTH)
        scheduler.audit()
    assert not scheduler.has_work
    return ids


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], list[int]]:
    """Each of 16 requests in a worker that never saw another."""
    ids: dict[tuple[str, int], list[int]] = {}
    for index, prompt in enumerate(prompts(16)):
        ids |= run(build(), [request(str(index), prompt)])
    return ids


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_alone_and_among_fifteen_others_give_the_same_ids(temperature: float) -> None:
    asked = [request(str(i), p, temperature) for i, p in enumerate(prompts(16))]
    together = run(build(), asked)
    for index in (0, 7, 15):
        assert run(build(), [asked[index]])[str(index), 0] == together[str(index), 0]


@pytest.mark.parametrize("chunk_tokens", [32, 33, 64, 100, 512])
def test_any_chunk_size_gives_the_same_ids(
    chunk_tokens: int, alone: dict[tuple[str, int], list[int]]
) -> None:
    parts = build(max_step_tokens=chunk_tokens, max_mixed_prefill_tokens=min(chunk_tokens, 17))
    asked = [request(str(i), p) for i, p in enumerate(prompts(16))]
    assert run(parts, asked) == alone


def test_e03_preemption_changes_nothing_and_everybody_finishes(
    alone: dict[tuple[str, int], list[int]],
) -> None:
    parts = build(num_blocks=64)  # 1,024 tokens for prompts of up to 300 each
    asked = [request(str(i), p) for i, p in enumerate(prompts(16))]
    assert run(parts, asked) == alone
    load = parts.scheduler.load()
    assert load.num_held_blocks == 0


def test_e03_a_pool_that_forces_preemption_does_preempt() -> None:
    grown = [
        replace(
            request(str(i), [i, 1, 2, 3]),
            stop=StopParams(max_output_tokens=400, ignore_end=True),
        )
        for i in range(8)
    ]
    parts = build(num_blocks=64)
    crowded = run(parts, grown)
    assert parts.scheduler.load().num_preemptions > 0
    assert parts.scheduler.load().num_recomputed_tokens > 0
    assert run(build(num_blocks=256), grown) == crowded


def test_hit_and_miss_give_the_same_ids_and_are_counted_once() -> None:
    parts = build()
    prompt = prompts(1, seed=3)[0] + list(range(100))
    cold = run(parts, [request("cold", prompt)])
    before = parts.scheduler.load()
    warm = run(parts, [request("warm", prompt)])
    after = parts.scheduler.load()
    assert warm["warm", 0] == cold["cold", 0]
    num_hit = after.num_hit_tokens - before.num_hit_tokens
    num_miss = after.num_miss_tokens - before.num_miss_tokens
    assert num_hit + num_miss == len(prompt)
    assert num_hit >= len(prompt) - 16


def test_choices_of_one_request_share_the_prompt_and_differ_by_seed() -> None:
    parts = build()
    prompt = list(range(100, 200))
    ids = run(parts, [request("n", prompt, temperature=1.0, n=4)])
    assert len({tuple(v) for v in ids.values()}) == 4
    load = parts.scheduler.load()
    assert load.num_hit_tokens + load.num_miss_tokens == len(prompt), "the prompt counts once"
    first = run(build(), [request("one", prompt, temperature=1.0)])
    assert first["one", 0] == ids["n", 0], "choice 0 is what n = 1 gives"


def test_a_thousand_requests_with_aborts_leave_the_free_blocks_where_they_began() -> None:
    parts = build(num_blocks=96)
    scheduler, engine = parts.scheduler, parts.engine
    start = scheduler.load()
    draw = random.Random(1)
    num_submitted, ended = 0, 0
    open_ids: set[RequestId] = set()
    while num_submitted < 1000 or scheduler.has_work:
        while num_submitted < 1000 and len(open_ids) < 24:
            asked = replace(
                request(str(num_submitted), [draw.randrange(256)] * draw.randrange(1, 60)),
                stop=StopParams(max_output_tokens=draw.randrange(0, 6), ignore_end=True),
            )
            scheduler.submit(asked)
            open_ids.add(asked.request_id)
            num_submitted += 1
        plan = scheduler.plan()
        outputs = []
        if draw.random() < 0.7 and open_ids:
            outputs += scheduler.abort(draw.choice(sorted(open_ids)))
        if plan is not None:
            outputs += scheduler.apply(plan, engine.run(plan))
        for output in outputs:
            if output.finish is not None:
                open_ids.discard(output.request_id)
                ended += 1
        if not scheduler.has_work:
            scheduler.audit()
    end = scheduler.load()
    assert ended == 1000
    assert end.num_held_blocks == start.num_held_blocks == 0
    assert end.num_free_blocks + end.num_cached_blocks == start.num_free_blocks
