"""Both ends of the control channel between the front and one worker.

Two carriers behind the ports of ``core.ports``: sockets between processes, and
queues between a thread and an event loop. One pair of endpoints serves one
life of one worker, so no message of a dead worker can reach its successor.

High-water marks are off: a dropped message would be a lost token. What is in
flight is bounded by admission (``router``) and by one message per step.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from headwater.core.control import FromWorker, Stop, ToWorker
from headwater.core.errors import WorkerLost
from headwater.transfer.wire import decode_from_worker, decode_to_worker, encode

T = TypeVar("T")


async def _unless_lost(receive: Awaitable[T], lost: asyncio.Future[str]) -> T:
    """What ``receive`` brings, or WorkerLost once ``lost`` is done. What has arrived comes first:
    the last step of a dying worker still counts."""
    arrived = asyncio.ensure_future(receive)
    try:
        either: set[asyncio.Future[Any]] = {arrived, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if arrived.done():
            return arrived.result()
        raise WorkerLost(lost.result())
    finally:
        arrived.cancel()


class SocketWorkerPort:
    """The worker's end: a blocking socket, used from the worker's one thread."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # The last words of a worker that ends (a failed load, say) still leave.
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(endpoint)

    def receive(self, timeout_s: float) -> Sequence[ToWorker]:
        messages: list[ToWorker] = []
        if timeout_s > 0 and not self._socket.poll(round(timeout_s * 1000)):
            return messages
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(decode_to_worker(frame))

    def send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class SocketWorkerChannel:
    """The front's end. ``lost`` is completed, with the reason, by whoever watches the process."""

    def __init__(
        self, endpoint: str, lost: asyncio.Future[str], end_worker: Callable[[], Awaitable[None]]
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._lost = lost
        self._end_worker = end_worker
        self._closed = False

    async def send(self, message: ToWorker) -> None:
        if self._lost.done() or self._closed:
            raise WorkerLost("the worker is gone")
        await self._socket.send(encode(message))

    async def messages(self) -> AsyncIterator[FromWorker]:
        while True:
            yield decode_from_worker(await _unless_lost(self._socket.recv(), self._lost))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._end_worker()
        self._socket.close()
        self._context.term()


class ThreadWorkerPort:
    """The worker's end when it runs in a thread of the front's process (tests)."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self._deliver: Callable[[FromWorker], None] | None = None

    def connect(self, deliver: Callable[[FromWorker], None]) -> None:
        """``deliver`` is called from the worker's thread with each message."""
        self._deliver = deliver

    def wake(self) -> None:
        """End a wait in ``receive``, so that the worker looks whether it should stop."""
        self.inbox.put(Stop())

    def receive(self, timeout_s: float) -> Sequence[ToWorker]:
        messages: list[ToWorker] = []
        try:
            messages.append(
                self.inbox.get(timeout=timeout_s) if timeout_s > 0 else self.inbox.get_nowait()
            )
            while True:
                messages.append(self.inbox.get_nowait())
        except queue.Empty:
            return messages

    def send(self, message: FromWorker) -> None:
        assert self._deliver is not None
        # Through the wire form: a message that only works in one process is found here.
        self._deliver(decode_from_worker(encode(message)))


class ThreadWorkerChannel:
    """The front's end to a worker thread. ``lost`` as for :class:`SocketWorkerChannel`."""

    def __init__(
        self,
        port: ThreadWorkerPort,
        lost: asyncio.Future[str],
        end_worker: Callable[[], Awaitable[None]],
    ) -> None:
        self._port = port
        self._lost = lost
        self._end_worker = end_worker
        self._arrived: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._closed = False
        loop = asyncio.get_running_loop()

        def deliver(message: FromWorker) -> None:
            # The loop may be gone while the thread winds down; then nobody listens any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._arrived.put_nowait, message)

        port.connect(deliver)

    async def send(self, message: ToWorker) -> None:
        if self._lost.done() or self._closed:
            raise WorkerLost("the worker is gone")
        self._port.inbox.put(decode_to_worker(encode(message)))

    async def messages(self) -> AsyncIterator[FromWorker]:
        while True:
            yield await _unless_lost(self._arrived.get(), self._lost)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._end_worker()
