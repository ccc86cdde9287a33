"""Workers that join over a network: who may speak, who is heard, and who is lost when."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import zmq
from test_transfer_channels import HELLO, KEYS, LOAD

from headwater.core.control import StepDone, Stop, ToWorker
from headwater.core.errors import WorkerLost
from headwater.core.ports import WorkerChannel
from headwater.transfer.joining import FrontUnreachable, JoinListener, JoinPort, JoinRefused
from headwater.transfer.peer import FleetKeys

OTHER_KEYS = FleetKeys.of(b"some other secret of other people")
BEAT_S = 0.05


class Front:
    """Takes in everybody, or refuses with ``refusal``."""

    def __init__(self, *, silent_s: float = 20.0, beat_s: float = BEAT_S) -> None:
        self.channels: list[WorkerChannel] = []
        self.refusal = ""
        self.listener = JoinListener(
            "tcp://127.0.0.1:*", KEYS, self._join, silent_s=silent_s, beat_s=beat_s
        )

    async def _join(self, channel: WorkerChannel) -> None:
        if self.refusal:
            await channel.close()
            raise WorkerLost(self.refusal)
        self.channels.append(channel)

    async def wait_for(self, num_channels: int) -> WorkerChannel:
        async with asyncio.timeout(5):
            while len(self.channels) < num_channels:
                await asyncio.sleep(0.01)
        return self.channels[num_channels - 1]


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    made = Front()
    yield made
    await made.listener.close()


async def connect(
    front: Front, keys: FleetKeys = KEYS, *, silent_s: float = 20.0, beat_s: float = BEAT_S
) -> JoinPort:
    return await asyncio.to_thread(
        JoinPort, front.listener.endpoint, keys, silent_s=silent_s, beat_s=beat_s
    )


async def received(port: JoinPort, limit_s: float = 5.0) -> list[ToWorker]:
    return list(await asyncio.to_thread(port.receive, limit_s))


async def loss(channel: WorkerChannel) -> str:
    """Why the worker is lost, whatever it still says before."""
    try:
        async with asyncio.timeout(5):
            async for _ in channel.messages():
                pass
    except WorkerLost as error:
        return str(error)
    raise AssertionError("the messages ended without a loss")


class Cable:
    """A way to the front that can be cut."""

    def __init__(self, endpoint: str) -> None:
        self._target = urlsplit(endpoint)
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Cable:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _carry(
        self, near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection(
            self._target.hostname, self._target.port
        )
        self._writers += [near_writer, far_writer]
        for reader, writer in ((near_reader, far_writer), (far_reader, near_writer)):
            self._tasks.append(asyncio.create_task(self._pump(reader, writer)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)


async def test_a_wrong_secret_is_refused_and_logged_without_any_key(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(JoinRefused, match="same secret"):
            await connect(front, OTHER_KEYS)
        await asyncio.sleep(3 * BEAT_S)
    assert "1 connections" in caplog.text
    assert "secret" in caplog.text
    for keys in (KEYS, OTHER_KEYS):
        assert keys.server_public.decode() not in caplog.text
    assert front.channels == []


async def test_many_strangers_make_one_line_of_the_log(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        with pytest.raises(JoinRefused):
            await connect(front, OTHER_KEYS)
        await asyncio.sleep(BEAT_S)
    assert len(caplog.records) == 1


async def test_i08_who_speaks_without_the_keys_is_not_heard(front: Front) -> None:
    address = urlsplit(front.listener.endpoint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(front.listener.endpoint)
        plain.send(b"A\x80")  # a Hello, as far as its first byte goes
        with socket.create_connection((address.hostname, address.port)) as raw:
            raw.sendall(b"\x80\x04." * 100)
            await asyncio.sleep(3 * BEAT_S)
    assert front.channels == []
    port = await connect(front)
    port.send(HELLO)
    await front.wait_for(1)
    await asyncio.to_thread(port.close)


async def test_where_no_front_is_the_worker_may_try_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FrontUnreachable, match="no front answers"):
            await asyncio.to_thread(JoinPort, endpoint, KEYS, silent_s=5)


async def test_d06_a_worker_that_is_refused_is_told_why(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    front.refusal = "worker w serves block_tokens 64, the front serves 32"
    port = await connect(front)
    port.send(HELLO)
    assert await received(port) == [Stop()]
    assert isinstance(port.ending, JoinRefused)
    assert "block_tokens 64" in str(port.ending)
    assert "block_tokens 64" in caplog.text
    await asyncio.to_thread(port.close)
    assert front.listener.num_joined == 0


async def test_d06_a_hello_of_another_version_is_refused_with_what_to_do(front: Front) -> None:
    port = await connect(front)
    port._inner.send(b"A\x80")
    assert await received(port) == [Stop()]
    assert isinstance(port.ending, JoinRefused)
    await asyncio.to_thread(port.close)
    assert front.channels == []


async def test_a_worker_that_loads_or_computes_for_long_is_not_silent() -> None:
    front = Front(silent_s=0.4)
    port = await connect(front, silent_s=0.4)
    await asyncio.sleep(1.0)  # loads its model
    assert port.ending is None
    port.send(HELLO)
    channel = await front.wait_for(1)
    await asyncio.sleep(1.0)  # a long step: its thread neither sends nor receives
    port.send(StepDone(outputs=(), load=LOAD))
    stream = channel.messages()
    assert await anext(stream) == HELLO
    assert isinstance(await asyncio.wait_for(anext(stream), 5), StepDone)
    assert port.ending is None
    await asyncio.to_thread(port.close)
    await front.listener.close()


async def test_a_silent_worker_is_lost_and_must_begin_anew_when_it_comes_back() -> None:
    front = Front(silent_s=0.2)
    port = await connect(front, beat_s=0.8)
    port.send(HELLO)
    assert "silent for" in await loss(await front.wait_for(1))
    # Its next beat is of a life that was given up.
    assert await received(port) == [Stop()]
    await asyncio.to_thread(port.close)
    await front.listener.close()


async def test_a_front_that_was_busy_hears_what_was_said_before_it_judges_silence() -> None:
    front = Front(silent_s=0.3)
    port = await connect(front)
    port.send(HELLO)
    channel = await front.wait_for(1)
    for _ in range(3):
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251 - longer than a worker may be silent
        front.listener._judge()  # some loops run what is due before what has arrived
    await channel.send(Stop())
    assert await received(port) == [Stop()]
    await asyncio.to_thread(port.close)
    await front.listener.close()


async def test_a_silent_front_is_lost() -> None:
    front = Front(beat_s=60.0)
    port = await connect(front, silent_s=0.3)
    port.send(HELLO)
    assert await received(port) == [Stop()]
    assert isinstance(port.ending, FrontUnreachable)
    assert "silent" in str(port.ending)
    await asyncio.to_thread(port.close)
    await front.listener.close()


async def test_a_worker_that_leaves_is_lost_at_once_after_its_last_words(front: Front) -> None:
    port = await connect(front)
    last = StepDone(outputs=(), load=LOAD)
    port.send(HELLO)
    channel = await front.wait_for(1)
    for _ in range(3):
        port.send(last)
    await asyncio.to_thread(port.close)
    stream = channel.messages()
    assert [await anext(stream) for _ in range(4)] == [HELLO, last, last, last]
    with pytest.raises(WorkerLost, match="left"):
        await asyncio.wait_for(anext(stream), 5)
    with pytest.raises(WorkerLost):
        await channel.send(Stop())


async def test_a_cut_connection_ends_the_life_on_both_sides(front: Front) -> None:
    async with Cable(front.listener.endpoint) as cable:
        port = await asyncio.to_thread(JoinPort, cable.endpoint, KEYS, silent_s=20, beat_s=BEAT_S)
        port.send(HELLO)
        channel = await front.wait_for(1)
        cable.cut()
        assert "gone" in await loss(channel)
        assert await received(port) == [Stop()]
        assert isinstance(port.ending, FrontUnreachable)
        await asyncio.to_thread(port.close)


async def test_a_worker_that_joins_again_takes_the_place_of_its_old_life(front: Front) -> None:
    old, new, other = [await connect(front) for _ in range(3)]
    for port, name in ((old, "a"), (other, "b"), (new, "a")):
        port.send(replace(HELLO, worker_id=name))
        await front.wait_for(len(front.channels) + 1)
    assert "joined again" in await loss(front.channels[0])
    await front.channels[1].send(Stop())
    await front.channels[2].send(Stop())
    assert await received(other) == [Stop()]
    assert await received(new) == [Stop()]
    for port in (old, new, other):
        await asyncio.to_thread(port.close)


async def test_a_front_that_ends_stops_its_workers(front: Front) -> None:
    port = await connect(front)
    port.send(HELLO)
    await front.wait_for(1)
    await front.listener.close()
    assert Stop() in await received(port)
    assert not isinstance(port.ending, JoinRefused)
    await asyncio.to_thread(port.close)


async def test_an_address_that_is_taken_is_an_error_and_leaves_nothing_open() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        async def nobody(_: WorkerChannel) -> None:
            raise AssertionError

        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(zmq.ZMQError):
            JoinListener(endpoint, KEYS, nobody, silent_s=5)
