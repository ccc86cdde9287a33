"""The whole worker behind the router in one process: the same ids, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from headwater.app.assemble import WorkerParts, build_worker
from headwater.app.groups import CacheSettings, EngineSettings, ModelSettings
from headwater.app.processes import ThreadLauncher
from headwater.app.settings import Settings
from headwater.core.errors import PromptTooLong, WorkerLost
from headwater.core.request import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    StopParams,
)
from headwater.router.service import Router, RouterConfig
from headwater.transfer.channels import ThreadWorkerPort


class Clock:
    def now_s(self) -> float:
        return time.monotonic()


def build() -> WorkerParts:
    settings = Settings(
        model=ModelSettings(model="toy", numerics="reference", context_tokens=512),
        engine=EngineSettings(threads=1, block_tokens=16, num_blocks=64),
        cache=CacheSettings(cache_dir=None),
    )
    return build_worker(settings, Clock())


def request(name: str, num_output: int, n: int = 1) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_tokens=tuple(range(40)),
        num_choices=n,
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_output_tokens=num_output, ignore_end=True),
    )


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    parts = build()

    def work(port: ThreadWorkerPort, stopping: Callable[[], bool]) -> None:
        parts.loop("thread", port, Clock(), stopping).run()

    made = Router(ThreadLauncher(work), RouterConfig(backoff_first_s=0.01), Clock())
    running = asyncio.create_task(made.run())
    await asyncio.wait_for(made.wait_ready(), 20)
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def ids(router: Router, asked: Request) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    async for output in router.generate(asked):
        found.setdefault(output.index, []).extend(token.token_id for token in output.tokens)
        if output.finish is not None:
            assert output.finish is FinishReason.LENGTH
    return found


async def test_ids_through_router_and_channel_are_those_of_the_bare_worker(router: Router) -> None:
    scheduler, engine = (bare := build()).scheduler, bare.engine
    scheduler.submit(request("bare", 20))
    expected: list[int] = []
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.apply(plan, engine.run(plan)):
            expected += [token.token_id for token in output.tokens]
    together = await asyncio.gather(
        ids(router, request("a", 20)), ids(router, request("b", 20, n=3))
    )
    assert together[0] == {0: expected}
    assert together[1] == {0: expected, 1: expected, 2: expected}


async def test_a_stream_that_is_closed_gives_its_blocks_back(router: Router) -> None:
    stream = router.generate(request("left", 400))
    await anext(stream)
    await stream.aclose()
    assert router.status().num_in_flight == 0
    async with asyncio.timeout(10):
        while True:
            load = router.status().load
            assert load is not None
            if load.num_held_blocks == 0:
                break
            await asyncio.sleep(0.005)
    assert len((await ids(router, request("next", 5)))[0]) == 5


async def test_what_can_never_fit_is_refused_before_the_worker(router: Router) -> None:
    asked = Request(
        request_id=RequestId("long"),
        prompt_tokens=tuple([1] * 600),
        sampling=SamplingParams(),
        stop=StopParams(max_output_tokens=1),
    )
    with pytest.raises(PromptTooLong, match="600 tokens > 512"):
        await anext(router.generate(asked))


async def test_a_worker_that_cannot_start_ends_the_router_with_its_reason() -> None:
    def work(port: ThreadWorkerPort, stopping: Callable[[], bool]) -> None:
        raise WorkerLost("the model is not there")

    router = Router(ThreadLauncher(work), RouterConfig(), Clock())
    with pytest.raises(WorkerLost, match="the model is not there"):
        await asyncio.wait_for(router.run(), 5)
