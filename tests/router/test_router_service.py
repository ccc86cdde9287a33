"""The router against a scripted worker: every accepted request ends exactly once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from headwater.core.control import (
    PROTOCOL_VERSION,
    Abort,
    FromWorker,
    Hello,
    StepDone,
    Submit,
    ToWorker,
    WorkerLoad,
)
from headwater.core.errors import EngineFault, NotReady, Overloaded, PromptTooLong, WorkerLost
from headwater.core.fleet import Role
from headwater.core.ports import WorkerChannel
from headwater.core.request import (
    FinishReason,
    ModelInfo,
    Request,
    RequestId,
    SampledToken,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from headwater.core.tokenizer_source import TokenizerSource
from headwater.router.policy import AdmissionLimits
from headwater.router.service import Router, RouterConfig

LOAD = WorkerLoad(
    num_waiting=0, num_prefilling=0, num_decoding=0, num_free_blocks=0, num_cached_blocks=0,
    num_held_blocks=0, num_steps=0, num_preemptions=0, num_recomputed_tokens=0,
    num_hit_tokens=0, num_miss_tokens=0, num_output_tokens=0,
)  # fmt: skip


def hello(fingerprint: str = "f", protocol_version: int = PROTOCOL_VERSION) -> Hello:
    info = ModelInfo(
        model_id="m", family="llama", fingerprint=fingerprint, vocab_size=9, context_tokens=64,
        block_tokens=16, num_blocks=100, kv_bytes_per_token=4, weights_format="bf16",
        weights_bytes=1, numerics="reference", device="cpu",
    )  # fmt: skip
    tokenizer = TokenizerSource(kind="byte", vocab_size=9)
    return Hello(
        protocol_version=protocol_version, worker_id="w", pid=1, info=info, tokenizer=tokenizer
    )


class ScriptedChannel:
    """A worker whose words the test chooses."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.words: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        self.closed = False

    async def send(self, message: ToWorker) -> None:
        if self.closed:
            raise WorkerLost("closed")
        self.sent.append(message)

    async def messages(self) -> AsyncIterator[FromWorker]:
        while True:
            word = await self.words.get()
            if word is None:
                raise WorkerLost("exit code -9")
            yield word

    async def close(self) -> None:
        self.closed = True

    def commit(self, *outputs: SequenceOutput) -> None:
        self.words.put_nowait(StepDone(outputs=outputs, load=LOAD))


class ScriptedLauncher:
    def __init__(self, first: Callable[[ScriptedChannel], None]) -> None:
        self.channels: list[ScriptedChannel] = []
        self.first = first

    async def launch(self, role: Role = Role.BOTH) -> WorkerChannel:
        channel = ScriptedChannel()
        self.first(channel)
        self.channels.append(channel)
        return channel


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


class House:
    """A running router, its launcher and its clock."""

    def __init__(self, hello_message: Hello, limits: AdmissionLimits) -> None:
        self.launcher = ScriptedLauncher(lambda c: c.words.put_nowait(hello_message))
        self.clock = ManualClock()
        self.router = Router(
            self.launcher, RouterConfig(limits=limits, backoff_first_s=0.01), self.clock
        )

    @property
    def channel(self) -> ScriptedChannel:
        return self.launcher.channels[-1]

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def house(
    hello_message: Hello | None = None, limits: AdmissionLimits | None = None
) -> AsyncIterator[House]:
    made = House(hello_message or hello(), limits or AdmissionLimits())
    task = asyncio.create_task(made.router.run())
    await asyncio.wait_for(made.router.wait_ready(), 1.0)
    yield made
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert made.channel.closed, "the worker is ended with the router"


def request(name: str = "r", num_choices: int = 1, num_prompt_tokens: int = 3) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_tokens=tuple(range(num_prompt_tokens)),
        num_choices=num_choices,
        sampling=SamplingParams(),
        stop=StopParams(max_output_tokens=8),
    )


def token(name: str, index: int = 0, finish: FinishReason | None = None) -> SequenceOutput:
    return SequenceOutput(
        request_id=RequestId(name), index=index, tokens=(SampledToken(5),), finish=finish
    )


async def collect(stream: AsyncIterator[SequenceOutput]) -> list[SequenceOutput]:
    return [output async for output in stream]


async def test_outputs_of_all_choices_arrive_in_order_and_the_stream_ends_with_the_last() -> None:
    async with house() as h:
        task = asyncio.create_task(collect(h.router.generate(request("a", 2))))
        await h.settle()
        assert h.channel.sent == [Submit(request=request("a", 2))]
        outputs = [
            token("a", 0), token("a", 1), token("a", 0, FinishReason.STOP),
            token("a", 1, FinishReason.LENGTH),
        ]  # fmt: skip
        h.channel.commit(*outputs[:2])
        h.channel.commit(outputs[2])
        h.channel.commit(outputs[3])
        assert await asyncio.wait_for(task, 1.0) == outputs
        assert h.router.status().num_in_flight == 0
        assert len(h.channel.sent) == 1, "a finished request is not aborted"


async def test_e06_leaving_early_aborts_at_the_worker_and_forgets_the_request() -> None:
    async with house() as h:
        stream = h.router.generate(request("a"))
        first = asyncio.ensure_future(anext(stream))
        await h.settle()
        h.channel.commit(token("a"))
        await first
        await stream.aclose()
        assert h.channel.sent[-1] == Abort(request_id=RequestId("a"))
        assert h.router.status().num_in_flight == 0
        h.channel.commit(token("a"))  # the step that was under way
        await h.settle()
        assert h.router.status().ready


async def test_e06_a_caller_that_is_cancelled_while_queued_aborts_too() -> None:
    async with house() as h:
        task = asyncio.create_task(collect(h.router.generate(request("a"))))
        await h.settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert h.channel.sent[-1] == Abort(request_id=RequestId("a"))


async def test_one_choice_ends_early_while_the_other_goes_on() -> None:
    async with house() as h:
        ask = request("a", 2)
        task = asyncio.create_task(collect(h.router.generate(ask)))
        await h.settle()
        await h.router.abort_choice(ask, 1)
        assert h.channel.sent[-1] == Abort(request_id=ask.request_id, index=1)
        h.channel.commit(token("a", 1, FinishReason.ABORTED))
        h.channel.commit(token("a", 0, FinishReason.STOP))
        assert len(await asyncio.wait_for(task, 1.0)) == 2
        await h.router.abort_choice(ask, 1)  # already gone: nothing happens


async def test_a_dead_worker_fails_what_it_held_and_another_is_started() -> None:
    async with house() as h:
        task = asyncio.create_task(collect(h.router.generate(request("a"))))
        await h.settle()
        h.channel.words.put_nowait(None)
        with pytest.raises(WorkerLost, match="send the request again"):
            await asyncio.wait_for(task, 1.0)
        status = h.router.status()
        assert not status.ready
        assert "exit code -9" in status.reason
        with pytest.raises(NotReady):
            await anext(h.router.generate(request("b")))
        async with asyncio.timeout(2.0):
            while not h.router.status().ready:
                await asyncio.sleep(0.005)
        assert h.router.status().num_worker_restarts == 1
        again = asyncio.create_task(collect(h.router.generate(request("c"))))
        await h.settle()
        h.channel.commit(token("c", 0, FinishReason.STOP))
        assert len(await asyncio.wait_for(again, 1.0)) == 1


async def test_outputs_that_came_before_the_death_are_delivered_before_the_error() -> None:
    async with house() as h:
        stream = h.router.generate(request("a"))
        first = asyncio.ensure_future(anext(stream))
        await h.settle()
        h.channel.commit(token("a"))
        h.channel.words.put_nowait(None)
        assert (await asyncio.wait_for(first, 1.0)).tokens[0].token_id == 5
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(anext(stream), 1.0)


async def test_a_failed_step_reaches_the_caller_as_an_engine_fault() -> None:
    async with house() as h:
        task = asyncio.create_task(collect(h.router.generate(request("a"))))
        await h.settle()
        h.channel.commit(
            SequenceOutput(
                request_id=RequestId("a"), index=0, finish=FinishReason.FAILED, error="bad step"
            )
        )
        with pytest.raises(EngineFault, match="bad step"):
            await asyncio.wait_for(task, 1.0)


async def test_e05_fifty_at_a_door_for_twelve_leaves_thirty_eight_refusals() -> None:
    limits = AdmissionLimits(max_running_sequences=4, max_waiting_sequences=8)
    async with house(limits=limits) as h:
        tasks = [
            asyncio.create_task(collect(h.router.generate(request(str(n))))) for n in range(50)
        ]
        await h.settle()
        refused = [t for t in tasks if t.done() and isinstance(t.exception(), Overloaded)]
        assert len(refused) == 38
        for number in range(50):
            h.channel.commit(token(str(number), 0, FinishReason.STOP))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(r, list) for r in results) == 12


async def test_a06_an_oversized_prompt_is_refused_before_the_worker_hears_of_it() -> None:
    async with house() as h:
        with pytest.raises(PromptTooLong, match="prompt is too long: 100 tokens > 64"):
            await anext(h.router.generate(request("a", num_prompt_tokens=100)))
        assert h.channel.sent == []


async def test_j01_readiness_is_false_when_work_is_pending_and_no_step_ends() -> None:
    async with house() as h:
        h.clock.time_s += 1000.0
        assert h.router.status().ready, "idle is not stuck"
        task = asyncio.create_task(collect(h.router.generate(request("a"))))
        await h.settle()
        h.clock.time_s += 29.0
        assert h.router.status().ready
        h.clock.time_s += 2.0
        status = h.router.status()
        assert not status.ready
        assert "stuck" in status.reason
        h.channel.commit(token("a"))
        await h.settle()
        assert h.router.status().ready, "progress heals it"
        h.channel.commit(token("a", 0, FinishReason.STOP))
        await task


async def test_d06_a_worker_of_another_version_is_refused_with_both_versions_named() -> None:
    other = hello(protocol_version=PROTOCOL_VERSION + 1)
    launcher = ScriptedLauncher(lambda c: c.words.put_nowait(other))
    router = Router(launcher, RouterConfig(), ManualClock())
    with pytest.raises(WorkerLost, match=f"{PROTOCOL_VERSION + 1}.*{PROTOCOL_VERSION}"):
        await asyncio.wait_for(router.run(), 1.0)
    assert launcher.channels[0].closed
    assert not router.status().ready


async def test_a_worker_that_never_says_hello_is_given_up_with_the_setting_named() -> None:
    launcher = ScriptedLauncher(lambda channel: None)
    router = Router(launcher, RouterConfig(start_limit_s=0.02), ManualClock())
    with pytest.raises(WorkerLost, match=r"worker\.start_timeout_s"):
        await asyncio.wait_for(router.run(), 1.0)
    assert launcher.channels[0].closed
