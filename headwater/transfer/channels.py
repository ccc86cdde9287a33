"""Both ends of the control channel between the front and one worker.

Two carriers behind the ports of ``core.ports``: sockets between processes, and
queues between a thread and an event loop. One pair of endpoints serves one
life of one worker, so no message of a dead worker can reach its successor.

Every queue is bounded and nothing is dropped: a dropped message would be a lost token.
Admission (``router``) and one message per step keep what is in flight far below the bound;
a front that finds a queue full gives the worker up, a worker waits. A worker's process on
this machine is watched by whoever started it; one that joins over a network is the business
of ``joining``.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import zmq

from headwater.core.control import FromWorker, Stop, ToWorker
from headwater.core.errors import WorkerLost
from headwater.transfer.wire import WireError, decode_from_worker, decode_to_worker, encode

MAX_QUEUED = 2**16  # messages in each direction


class Inbox:
    """What has arrived from a worker, and whether it is lost. What has arrived comes first:
    the last step of a dying worker still counts."""

    def __init__(self, lost: asyncio.Future[str]) -> None:
        self.lost = lost
        self._arrived: deque[FromWorker] = deque()
        self._wake = asyncio.Event()
        lost.add_done_callback(lambda _: self._wake.set())

    def put(self, message: FromWorker) -> None:
        if len(self._arrived) >= MAX_QUEUED and not self.lost.done():
            self.lost.set_result(f"{MAX_QUEUED} messages of the worker were not read")
        self._arrived.append(message)
        self._wake.set()

    async def messages(self) -> AsyncIterator[FromWorker]:
        while True:
            while self._arrived:
                yield self._arrived.popleft()
            if self.lost.done():
                raise WorkerLost(self.lost.result())
            self._wake.clear()
            await self._wake.wait()


class SocketWorkerPort:
    """The worker's end: a blocking socket, used from the worker's one thread."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
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
    """The front's end. ``lost`` is completed, with the reason, by whoever watches the process.

    The loop watches the socket's descriptor itself: at one message per step, a
    task and a future for each would be most of the work.
    """

    def __init__(
        self, endpoint: str, lost: asyncio.Future[str], end_worker: Callable[[], Awaitable[None]]
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._inbox = Inbox(lost)
        self._outbox: deque[bytes] = deque()  # what the socket does not take yet
        self._end_worker = end_worker
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)

    def _drain(self) -> None:
        """Send what waits, and take every message that is there. The descriptor only tells of
        changes, and any call on the socket may use one up: so until nothing is left to do."""
        events = zmq.POLLIN
        while events and not self._closed:
            with contextlib.suppress(zmq.Again):
                while self._outbox:
                    self._socket.send(self._outbox[0], zmq.NOBLOCK)
                    self._outbox.popleft()
            with contextlib.suppress(zmq.Again):
                while True:
                    self._take(self._socket.recv(zmq.NOBLOCK))
            wanted = zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0)
            events = int(self._socket.getsockopt(zmq.EVENTS)) & wanted

    def _take(self, frame: bytes) -> None:
        try:
            self._inbox.put(decode_from_worker(frame))
        except WireError as error:
            # A worker of another kind or version: nothing more from it can be believed.
            if not self._inbox.lost.done():
                self._inbox.lost.set_result(str(error))

    async def send(self, message: ToWorker) -> None:
        if self._inbox.lost.done() or self._closed:
            raise WorkerLost("the worker is gone")
        if len(self._outbox) >= MAX_QUEUED:
            raise WorkerLost("the worker does not take its messages")
        self._outbox.append(encode(message))
        self._drain()

    def messages(self) -> AsyncIterator[FromWorker]:
        return self._inbox.messages()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        # So that a worker that is idle need not find out by itself. One that is gone has
        # no more room for it.
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(Stop()), zmq.NOBLOCK)
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
        self._inbox = inbox = Inbox(lost)
        self._end_worker = end_worker
        self._closed = False
        loop = asyncio.get_running_loop()

        def deliver(message: FromWorker) -> None:
            # The loop may be gone while the thread winds down; then nobody listens any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(inbox.put, message)

        port.connect(deliver)

    async def send(self, message: ToWorker) -> None:
        if self._inbox.lost.done() or self._closed:
            raise WorkerLost("the worker is gone")
        self._port.inbox.put(decode_to_worker(encode(message)))

    def messages(self) -> AsyncIterator[FromWorker]:
        return self._inbox.messages()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._end_worker()
