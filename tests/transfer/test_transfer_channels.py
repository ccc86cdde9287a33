"""One contract suite for every control channel, and the wire form's refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from headwater.core.control import (
    Abort,
    FromWorker,
    Hello,
    StepDone,
    Stop,
    Submit,
    ToWorker,
    WorkerLoad,
)
from headwater.core.errors import WorkerLost
from headwater.core.ports import WorkerChannel, WorkerPort
from headwater.core.request import (
    FinishReason,
    ModelInfo,
    PromptReport,
    Request,
    RequestId,
    SampledToken,
    SamplingParams,
    SequenceOutput,
    StopParams,
    TokenLogprob,
)
from headwater.core.tokenizer_source import TokenizerSource
from headwater.transfer import channels
from headwater.transfer.channels import (
    SocketWorkerChannel,
    SocketWorkerPort,
    ThreadWorkerChannel,
    ThreadWorkerPort,
)
from headwater.transfer.joining import JoinedChannel, JoinListener, JoinPort
from headwater.transfer.peer import FleetKeys
from headwater.transfer.wire import WireError, decode_from_worker, decode_to_worker, encode

LOAD = WorkerLoad(
    num_waiting=1, num_prefilling=0, num_decoding=2, num_free_blocks=3, num_cached_blocks=4,
    num_held_blocks=5, num_steps=6, num_preemptions=0, num_recomputed_tokens=0,
    num_hit_tokens=7, num_miss_tokens=8, num_output_tokens=9,
)  # fmt: skip
REQUEST = Request(
    request_id=RequestId("r1"),
    prompt_tokens=(1, 2, 3),
    sampling=SamplingParams(logit_bias=((5, -100.0),), seed=2**64 - 1, num_logprobs=2),
    stop=StopParams(max_output_tokens=4, stop_token_ids=frozenset({7, 8})),
    tenant="t",
)
OUTPUT = SequenceOutput(
    request_id=RequestId("r1"),
    index=0,
    tokens=(SampledToken(3, -0.5, (TokenLogprob(3, -0.5), TokenLogprob(4, -1.5))),),
    prompt=PromptReport(num_hit_tokens=1, num_miss_tokens=2),
    finish=FinishReason.STOP,
    stop_token_id=7,
)
HELLO = Hello(
    protocol_version=1,
    worker_id="w",
    pid=1,
    info=ModelInfo(
        model_id="m", family="llama", fingerprint="f", vocab_size=9, context_tokens=64,
        block_tokens=16, num_blocks=8, kv_bytes_per_token=4, weights_format="bf16",
        weights_bytes=10, numerics="reference", device="cpu", kernels={"linear": "x"},
    ),
    tokenizer=TokenizerSource(
        kind="gguf", vocab_size=9, gguf_metadata={"a": ["b", "c"], "d": 1, "e": True}
    ),
)  # fmt: skip

Pair = tuple[WorkerChannel, WorkerPort, Callable[[str], None]]


KEYS = FleetKeys.of(b"a secret that only tests have")


@pytest.fixture(params=["socket", "thread", "joined"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Both ends, and a way to declare the worker dead."""
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def end_worker() -> None:
        pass

    def die(reason: str) -> None:
        if not lost.done():
            lost.set_result(reason)

    if request.param == "socket":
        endpoint = f"ipc://{tmp_path}/control"
        channel: WorkerChannel = SocketWorkerChannel(endpoint, lost, end_worker)
        socket_port = SocketWorkerPort(endpoint)
        yield channel, socket_port, die
        socket_port.close()
    elif request.param == "joined":
        arrived: asyncio.Future[JoinedChannel] = asyncio.get_running_loop().create_future()

        async def join(joined: WorkerChannel) -> None:
            assert isinstance(joined, JoinedChannel)
            arrived.set_result(joined)

        listener = JoinListener("tcp://127.0.0.1:*", KEYS, join, silent_s=20)
        joined_port = await asyncio.to_thread(JoinPort, listener.endpoint, KEYS, silent_s=20)
        joined_port.send(HELLO)
        channel = await asyncio.wait_for(arrived, 5)
        assert await anext(channel.messages()) == HELLO
        yield channel, joined_port, arrived.result().declare_lost
        await asyncio.to_thread(joined_port.close)
        await listener.close()
    else:
        thread_port = ThreadWorkerPort()
        channel = ThreadWorkerChannel(thread_port, lost, end_worker)
        yield channel, thread_port, die
    await channel.close()


async def test_messages_arrive_whole_and_in_order_both_ways(pair: Pair) -> None:
    channel, port, _ = pair
    sent: list[ToWorker] = [Submit(request=REQUEST), Abort(request_id=REQUEST.request_id), Stop()]
    for message in sent:
        await channel.send(message)
    received: list[object] = []
    while len(received) < 3:
        batch = await asyncio.to_thread(port.receive, 2.0)
        assert batch, "a message was lost"
        received.extend(batch)
    assert received == sent

    answers: list[FromWorker] = [HELLO, StepDone(outputs=(OUTPUT,), load=LOAD)]
    for answer in answers:
        await asyncio.to_thread(port.send, answer)
    stream = channel.messages()
    assert [await anext(stream), await anext(stream)] == answers


async def test_receive_without_messages_returns_after_its_timeout(pair: Pair) -> None:
    _, port, _ = pair
    assert list(await asyncio.to_thread(port.receive, 0.0)) == []
    assert list(await asyncio.to_thread(port.receive, 0.02)) == []


async def test_a_burst_larger_than_any_default_high_water_mark_is_not_dropped(pair: Pair) -> None:
    channel, port, _ = pair
    for number in range(5000):
        await channel.send(Abort(request_id=RequestId(str(number))))
    received: list[object] = []
    while batch := await asyncio.to_thread(port.receive, 0.5):
        received.extend(batch)
        if len(received) == 5000:
            break
    assert received == [Abort(request_id=RequestId(str(n))) for n in range(5000)]


async def test_a_dead_worker_is_seen_at_once_and_its_last_words_still_count(pair: Pair) -> None:
    channel, port, die = pair
    last = StepDone(outputs=(OUTPUT,), load=LOAD)
    await asyncio.to_thread(port.send, last)
    stream = channel.messages()
    assert await anext(stream) == last
    waiting: Awaitable[FromWorker] = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    die("exit code -9")
    with pytest.raises(WorkerLost, match="exit code -9"):
        await asyncio.wait_for(waiting, 1.0)
    with pytest.raises(WorkerLost):
        await channel.send(Stop())


async def test_a_worker_that_speaks_another_language_is_lost_with_the_reason(
    tmp_path: Path,
) -> None:
    async def end_worker() -> None:
        pass

    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    endpoint = f"ipc://{tmp_path}/control"
    channel = SocketWorkerChannel(endpoint, lost, end_worker)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send(b"\x00garbage")
        with pytest.raises(WorkerLost, match="unknown message kind"):
            await asyncio.wait_for(anext(channel.messages()), 2.0)
    await channel.close()


async def test_a_worker_that_takes_nothing_is_given_up_instead_of_queued_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MAX_QUEUED", 10)

    async def end_worker() -> None:
        pass

    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    channel = SocketWorkerChannel(f"ipc://{tmp_path}/control", lost, end_worker)
    for _ in range(10):
        await channel.send(Stop())
    with pytest.raises(WorkerLost, match="does not take"):
        await channel.send(Stop())
    await channel.close()


async def test_a_worker_that_says_more_than_is_read_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "MAX_QUEUED", 10)
    inbox = channels.Inbox(asyncio.get_running_loop().create_future())
    for _ in range(11):
        inbox.put(HELLO)
    stream = inbox.messages()
    for _ in range(11):
        assert await anext(stream) == HELLO
    with pytest.raises(WorkerLost, match="were not read"):
        await anext(stream)


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x01", b"\x01\xc0", b"\xff\x80", b"\x80\x04."])
def test_i08_a_frame_that_is_not_a_message_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_to_worker(frame)
    with pytest.raises(WireError):
        decode_from_worker(frame)


def test_a_message_for_the_other_direction_is_refused() -> None:
    with pytest.raises(WireError):
        decode_from_worker(encode(Stop()))
    with pytest.raises(WireError):
        decode_to_worker(encode(HELLO))
