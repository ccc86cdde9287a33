"""Workers that join a front by address: the control channel over a network.

    worker                                  front
    JoinPort    -- beat until it is loaded --> JoinListener   (one socket for all)
                -- Hello -->                   a JoinedChannel for this life
                <-- Submit ..., StepDone -->   and beats, both ways, from then on

A connection is one life of one worker. It never reconnects by itself: what was under way
would be lost unseen. Both ends beat from outside the worker's steps, so a long step or a model
that loads is not silence. Both ends are authenticated and the channel is encrypted (CURVE,
keys from a shared secret). Control frames beside those of ``wire`` are of one byte.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from headwater.core.control import FromWorker, Hello, Stop, ToWorker
from headwater.core.errors import HeadwaterError, WorkerLost
from headwater.core.ports import WorkerChannel
from headwater.transfer.channels import MAX_QUEUED, Inbox
from headwater.transfer.peer import FleetKeys
from headwater.transfer.wire import (
    HELLO_KIND,
    WireError,
    decode_from_worker,
    decode_to_worker,
    encode,
)

log = logging.getLogger("headwater.transfer")

BEAT_S = 1.0
HANDSHAKE_S = 5.0
MAX_MESSAGE_BYTES = 256 * 2**20  # a Hello carries a whole tokenizer
LOG_EVERY_S = 10.0  # refusals of strangers

_LOADING = b"\x20"  # worker: alive, not yet ready for Hello
_BEAT = b"\x21"  # worker: alive, after Hello
_LEAVING = b"\x22"  # worker: this life is over
_FRONT_BEAT = b"\x23"
_REFUSED = b"\x24"  # front: followed by why, for the worker's log

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class FrontUnreachable(HeadwaterError):
    """Nothing answers at the front's address now; it may later."""


class JoinRefused(HeadwaterError):
    """The front does not want this worker: trying again would not help."""


class JoinListener:
    """The front's end: accepts workers with the right secret, and makes a channel of each.

    ``join`` is given the channel of each worker that said Hello; its first message is that
    Hello. What ``join`` raises on purpose is told to the worker. Everything happens in the
    loop that made the listener.
    """

    def __init__(
        self,
        endpoint: str,
        keys: FleetKeys,
        join: Callable[[WorkerChannel], Awaitable[object]],
        *,
        silent_s: float,
        beat_s: float = BEAT_S,
    ) -> None:
        """Raises zmq.ZMQError when the address cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._join = join
        self._joining: set[asyncio.Task[None]] = set()
        self._silent_s = silent_s
        self._beat_s = beat_s
        self._channels: dict[bytes, JoinedChannel] = {}
        self._logged_s = -LOG_EVERY_S
        self._num_strangers = 0
        self._closed = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        keys.serve(self._socket)
        _set_bounds(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, round(1000 * beat_s))
        self._socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self.endpoint: str = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._timer = self._loop.call_later(beat_s, self._beat)

    @property
    def num_joined(self) -> int:
        return len(self._channels)

    async def close(self) -> None:
        """Tell all workers to stop, and let go of the address."""
        if self._closed:
            return
        for task in list(self._joining):
            task.cancel()
        for channel in list(self._channels.values()):
            channel.is_accepted = True
            await channel.close()
        self._closed = True
        self._timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        await asyncio.to_thread(self._close_sockets)

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def post(self, peer: bytes, frame: bytes) -> None:
        """Raises WorkerLost when the peer is gone or does not read."""
        if self._closed:
            raise WorkerLost("the server is ending")
        try:
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.Again:
            raise WorkerLost("the joined worker does not take its messages") from None
        except zmq.ZMQError as error:
            raise WorkerLost(f"the joined worker is gone ({error.strerror})") from None
        finally:
            # The descriptor tells only of changes, and a send may have used one up.
            self._loop.call_soon(self._drain)

    def forget(self, peer: bytes) -> None:
        self._channels.pop(peer, None)

    def _drain(self) -> None:
        while not self._closed:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 1:
                self._take(peer, frames[0])

    def _take(self, peer: bytes, frame: bytes) -> None:
        channel = self._channels.get(peer)
        if channel is not None:
            channel.take(frame, self._loop.time())
        elif frame == _LOADING:
            self._reply(peer, _FRONT_BEAT)
        elif frame[:1] == HELLO_KIND:
            self._welcome(peer, frame)
        elif frame != _LEAVING:
            # A life that was given up here, as silent say: it must begin a new one.
            self._reply(peer, encode(Stop()))

    def _welcome(self, peer: bytes, frame: bytes) -> None:
        try:
            hello = decode_from_worker(frame)
        except WireError as error:
            log.warning("a joining worker is refused: %s; start both from one installation", error)
            self._reply(peer, _REFUSED + str(error).encode())
            return
        assert isinstance(hello, Hello)
        for other in list(self._channels.values()):
            if other.name == hello.worker_id:
                other.declare_lost("the worker joined again")
        channel = JoinedChannel(self, peer, hello.worker_id, self._loop.time())
        self._channels[peer] = channel
        channel.take(frame, self._loop.time())
        task = self._loop.create_task(self._introduce(channel))
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def _introduce(self, channel: JoinedChannel) -> None:
        try:
            await self._join(channel)
            channel.is_accepted = True
        except HeadwaterError as error:
            log.warning("worker %s may not join: %s", channel.name, error)
            channel.refuse(str(error))

    def _reply(self, peer: bytes, frame: bytes) -> None:
        try:
            self.post(peer, frame)
        except WorkerLost as error:
            log.debug("no reply to a joining worker: %s", error)

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._beat_s, self._beat)
        self._tell_of_strangers()
        self._judge()

    def _judge(self) -> None:
        """Beat to those that live, and find those that do not."""
        self._drain()  # after a turn of the loop that took long, what was said meanwhile counts
        now_s = self._loop.time()
        for peer, channel in list(self._channels.items()):
            silent_s = now_s - channel.heard_s
            if silent_s > self._silent_s:
                channel.declare_lost(f"the joined worker was silent for {silent_s:.0f} s")
                continue
            try:
                self.post(peer, _FRONT_BEAT)
            except WorkerLost as error:
                channel.declare_lost(str(error))

    def _tell_of_strangers(self) -> None:
        """One line for all that were refused since the last one."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._num_strangers += 1
        now_s = self._loop.time()
        if self._num_strangers and now_s - self._logged_s >= LOG_EVERY_S:
            log.warning(
                "%d connections to %s were refused: not the secret that this front has",
                self._num_strangers,
                self.endpoint,
            )
            self._logged_s, self._num_strangers = now_s, 0


class JoinedChannel:
    """The front's end of one joined worker's life (WorkerChannel)."""

    def __init__(self, listener: JoinListener, peer: bytes, name: str, now_s: float) -> None:
        self.name = name
        self.heard_s = now_s
        self.is_accepted = False  # until then only :meth:`refuse` tells the worker of its end
        self._listener = listener
        self._peer = peer
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._inbox = Inbox(self._lost)
        self._closed = False

    def take(self, frame: bytes, now_s: float) -> None:
        self.heard_s = now_s
        if frame in (_BEAT, _LOADING):
            return
        if frame == _LEAVING:
            self.declare_lost("the worker left")
            return
        try:
            self._inbox.put(decode_from_worker(frame))
        except WireError as error:
            self.declare_lost(str(error))

    def declare_lost(self, reason: str) -> None:
        self._listener.forget(self._peer)
        if not self._lost.done():
            self._lost.set_result(f"{self.name}: {reason}")

    async def send(self, message: ToWorker) -> None:
        if self._lost.done() or self._closed:
            raise WorkerLost("the worker is gone")
        try:
            self._listener.post(self._peer, encode(message))
        except WorkerLost as error:
            self.declare_lost(str(error))
            raise

    def messages(self) -> AsyncIterator[FromWorker]:
        return self._inbox.messages()

    def refuse(self, reason: str) -> None:
        """Tell the worker that it may not join, and why."""
        self._closed = True
        self._tell_end(_REFUSED + reason.encode())

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self.is_accepted:
                self._tell_end(encode(Stop()))

    def _tell_end(self, last: bytes) -> None:
        self._listener.forget(self._peer)
        try:
            self._listener.post(self._peer, last)
        except WorkerLost as error:
            log.debug("not told to stop: %s", error)


class JoinPort:
    """The worker's end (WorkerPort). The connection belongs to a thread of its own, which beats
    while the worker computes; the worker's one thread talks to it over a bounded queue.

    When the connection is lost, ``receive`` gives a Stop and ``ending`` says why.
    """

    def __init__(
        self, endpoint: str, keys: FleetKeys, *, silent_s: float, beat_s: float = BEAT_S
    ) -> None:
        """Connects. Raises FrontUnreachable, or JoinRefused when the secrets differ."""
        self.ending: HeadwaterError | None = None
        self._silent_s = silent_s
        self._beat_s = beat_s
        self._context = zmq.Context()
        self._outer = self._context.socket(zmq.DEALER)
        self._monitor = self._outer.get_monitor_socket(
            _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        keys.join(self._outer)
        _set_bounds(self._outer)
        self._outer.setsockopt(zmq.ROUTING_ID, b"w" + os.urandom(15))
        self._outer.setsockopt(zmq.RECONNECT_IVL, -1)
        self._outer.setsockopt(zmq.CONNECT_TIMEOUT, round(1000 * HANDSHAKE_S))
        # The last words of a worker that ends (a failed load, say) still leave.
        self._outer.setsockopt(zmq.LINGER, 1000)
        self._outer.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        self._inner, self._far = (self._context.socket(zmq.PAIR) for _ in range(2))
        for pair in (self._inner, self._far):
            pair.setsockopt(zmq.SNDHWM, MAX_QUEUED)
            pair.setsockopt(zmq.RCVHWM, MAX_QUEUED)
            pair.setsockopt(zmq.LINGER, 0)
        self._far.bind("inproc://far")
        self._inner.connect("inproc://far")
        try:
            self._connect(endpoint)
        except HeadwaterError:
            self._outer.setsockopt(zmq.LINGER, 0)
            for pair in (self._inner, self._far):
                pair.close()
            self._close_outer()
            self._context.term()
            raise
        self._thread = threading.Thread(target=self._carry, name="control", daemon=True)
        self._thread.start()

    def receive(self, timeout_s: float) -> Sequence[ToWorker]:
        messages: list[ToWorker] = []
        if timeout_s > 0 and not self._inner.poll(round(timeout_s * 1000)):
            return messages
        while True:
            try:
                frame = self._inner.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(decode_to_worker(frame))

    def send(self, message: FromWorker) -> None:
        self._inner.send(encode(message))

    def close(self) -> None:
        """Say that this life is over, after all that was sent."""
        self._inner.send(_LEAVING)
        self._thread.join()
        self._inner.close()
        self._context.term()

    def _connect(self, endpoint: str) -> None:
        try:
            self._outer.connect(endpoint)
        except zmq.ZMQError as error:
            raise FrontUnreachable(f"cannot connect to {endpoint}: {error.strerror}") from None
        give_up_s = time.monotonic() + 2 * HANDSHAKE_S
        while self._monitor.poll(max(round(1000 * (give_up_s - time.monotonic())), 0)):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            if event & _FAILED or event == zmq.EVENT_DISCONNECTED:
                raise JoinRefused(
                    f"the front at {endpoint} refused the connection: both need the same secret, "
                    "and the address must be the front's --control-listen"
                )
            if event == zmq.EVENT_CLOSED:
                break
        raise FrontUnreachable(f"no front answers at {endpoint}; is it there, with that address?")

    # What follows runs in the thread.

    def _carry(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        held: bytes | None = None  # of the worker's; the network takes no more now
        beat = _LOADING
        heard_s = next_beat_s = time.monotonic()
        while held != _LEAVING:
            now_s = time.monotonic()
            if now_s - heard_s > self._silent_s:
                self._end(FrontUnreachable(f"the front was silent for {now_s - heard_s:.0f} s"))
            if now_s >= next_beat_s:
                next_beat_s = now_s + self._beat_s
                self._try_send(beat)
            poller.register(self._outer, zmq.POLLIN if held is None else zmq.POLLIN | zmq.POLLOUT)
            poller.register(self._far, zmq.POLLIN if held is None else 0)
            ready: dict[Any, int] = dict(poller.poll(max(round(1000 * (next_beat_s - now_s)), 1)))
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                self._end(FrontUnreachable("the connection to the front was cut"))
            if ready.get(self._outer, 0) & zmq.POLLIN:
                self._hear(self._outer.recv(zmq.NOBLOCK))
                heard_s = time.monotonic()
            if self._far in ready:
                held = self._far.recv()
                if held[:1] == HELLO_KIND:
                    beat = _BEAT
            if held is not None and held != _LEAVING and self._try_send(held):
                held = None
        self._try_send(_LEAVING)
        self._far.close()
        self._close_outer()

    def _hear(self, frame: bytes) -> None:
        if frame[:1] == _REFUSED:
            self._end(JoinRefused(f"the front refused: {frame[1:].decode(errors='replace')}"))
        elif frame != _FRONT_BEAT and self.ending is None:
            self._far.send(frame)

    def _try_send(self, frame: bytes) -> bool:
        """False when the network takes no more now. After the end nobody takes anything."""
        if self.ending is None:
            try:
                self._outer.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                return False
        return True

    def _end(self, why: HeadwaterError) -> None:
        if self.ending is None:
            self.ending = why
            self._far.send(encode(Stop()))

    def _close_outer(self) -> None:
        self._outer.disable_monitor()
        self._monitor.close()
        self._outer.close()


def _set_bounds(zsocket: zmq.Socket[bytes]) -> None:
    zsocket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    zsocket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    zsocket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    zsocket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_S))
