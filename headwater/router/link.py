"""The front's end of one worker's life: its channel, what waits to be sent, what it said last.

Messages leave in the order in which they were posted, from a task of the link's own, so that
whoever posts may be cancelled. Knows messages; not what they mean for a request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from headwater.core.control import FromWorker, Hello, ToWorker, WorkerLoad
from headwater.core.errors import WorkerLost
from headwater.core.ports import WorkerChannel

LinkEar = Callable[["Link", FromWorker], None]


class Link:
    """From Hello to loss. ``worker_id`` is the fleet's name for it, unique among its links."""

    def __init__(self, worker_id: str, channel: WorkerChannel, hello: Hello, now_s: float) -> None:
        self.worker_id = worker_id
        self.hello = hello
        self.load: WorkerLoad | None = None
        self.progress_s = now_s  # of the last message, or when it got work after having none
        self.up_since_s = now_s
        self.keys: set[str] = set()  # attempts that it holds a part of
        self.expected: set[str] = set()  # of them, those that it can go on with by itself
        self.given_up: str | None = None
        self._channel = channel
        self._outbox: deque[ToWorker] = deque()
        self._posted = asyncio.Event()
        self._sent = asyncio.Event()
        self._sent.set()
        self._reader: asyncio.Task[None] | None = None
        self._is_lost = False

    def post(self, message: ToWorker) -> None:
        """To be sent soon. A worker that is lost meanwhile never hears it."""
        if self._is_lost:
            return
        self._outbox.append(message)
        self._sent.clear()
        self._posted.set()

    async def flush(self) -> None:
        """Until all that was posted is sent, or the worker is lost."""
        await self._sent.wait()

    def expect(self, key: str, now_s: float) -> None:
        """The worker has all it needs for ``key``: from now on silence is suspicious."""
        if not self.expected:
            self.progress_s = now_s  # idle until now, not stuck
        self.expected.add(key)

    def forget(self, key: str) -> None:
        self.keys.discard(key)
        self.expected.discard(key)

    def silent_s(self, now_s: float) -> float:
        """How long it has owed a word; 0 while it owes none."""
        return now_s - self.progress_s if self.expected else 0.0

    def give_up(self, reason: str) -> None:
        """End :meth:`live` with WorkerLost(reason)."""
        self.given_up = reason
        if self._reader is not None:
            self._reader.cancel()

    async def live(self, messages: AsyncIterator[FromWorker], hear: LinkEar) -> None:
        """Send what is posted and hand each message to ``hear``, until the worker is lost:
        raises WorkerLost. The channel stays open."""
        sender = asyncio.create_task(self._send_all())
        self._reader = asyncio.create_task(self._read_all(messages, hear))
        try:
            await asyncio.wait({self._reader})
            if self._reader.cancelled():
                raise WorkerLost(self.given_up or "the worker was given up")
            self._reader.result()
            raise WorkerLost("the worker said no more")
        finally:
            for task in (sender, self._reader):
                task.cancel()
            await asyncio.gather(sender, self._reader, return_exceptions=True)
            self._close()

    async def _read_all(self, messages: AsyncIterator[FromWorker], hear: LinkEar) -> None:
        async for message in messages:
            hear(self, message)

    async def _send_all(self) -> None:
        try:
            while True:
                await self._posted.wait()
                self._posted.clear()
                while self._outbox:
                    await self._channel.send(self._outbox.popleft())
                self._sent.set()
        except WorkerLost:
            self._close()  # the reader is told as well, with the reason

    def _close(self) -> None:
        """Nothing can be sent any more, and nobody waits for it."""
        self._is_lost = True
        self._outbox.clear()
        self._sent.set()
