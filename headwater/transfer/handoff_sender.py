"""Hands KV over to decode workers: the prefill side's door, its thread and its sockets.

    offer -> told_prompt -> ready ... -> (retract) ... -> poll: HandoffReport

Called from the step's thread; nothing here waits. One connection to each decode worker, kept
while there is something to hand over. What is agreed when is ``handoff_source``'s.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence

import zmq

from headwater.core.blocks import BlockId
from headwater.core.cache import CacheReport
from headwater.core.fleet import HandoffRef, HandoffReport
from headwater.core.ports import BlockMemory, Clock
from headwater.transfer import handoff_wire as wire
from headwater.transfer.handoff_memory import allow_siblings
from headwater.transfer.handoff_plan import HandoffPlan
from headwater.transfer.handoff_pump import Pump, log
from headwater.transfer.handoff_source import HandoffSource, Outgoing, SendJob
from headwater.transfer.handoff_states import HandoffLimits
from headwater.transfer.peer import FleetKeys, PeerContract

MAX_HEARD = 256  # of one connection, before others have their turn
MAX_JOBS = 16  # copies before messages have their turn
MAX_QUEUED = 4096  # messages of one connection; the credit of each handoff is far less
LINGER_MS = 200  # the last words of a worker that ends


class HandoffSender:
    """One per prefill worker."""

    def __init__(
        self,
        contract: PeerContract,
        memory: BlockMemory,
        keys: FleetKeys,
        clock: Clock,
        limits: HandoffLimits | None = None,
    ) -> None:
        limits = limits or HandoffLimits()
        allow_siblings()
        self._memory = memory
        self._keys = keys
        self._clock = clock
        self._tick_s = limits.alive_s / 2
        self._lock = threading.Lock()
        nonce = secrets.token_bytes(wire.TICKET_BYTES)
        self._source = HandoffSource(contract, limits, pid=os.getpid(), nonce=nonce)
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._pump = Pump(
            "headwater-handoff-send", turn=self._turn, fault=self._fault, end=self._end
        )
        self._poller.register(self._pump.wake.fileno, zmq.POLLIN)
        self._pump.start()

    # From the step's thread

    def offer(self, ref: HandoffRef, plan: HandoffPlan) -> None:
        """Raises InvalidChange for an id that is offered already, or one too many."""
        with self._lock:
            self._source.offer(ref, plan, self._clock.now_s())
        self._pump.wake.ring()

    def told_prompt(self, handoff_id: str, num_hit_tokens: int, cache: CacheReport) -> None:
        """What of the prompt was a hit here; before the first ``ready``."""
        with self._lock:
            self._source.told_prompt(handoff_id, num_hit_tokens, cache)
        self._pump.wake.ring()

    def ready(self, handoff_id: str, block_table: Sequence[BlockId], num_computed: int) -> None:
        """The first ``num_computed`` tokens have KV in these blocks, which stay as they are
        until a report, ``retract`` or ``abort``."""
        with self._lock:
            self._source.ready(handoff_id, block_table, num_computed)
        self._pump.wake.ring()

    def retract(self, handoff_id: str) -> None:
        """Before the blocks are given up, to be computed again."""
        with self._lock:
            self._source.retract(handoff_id)

    def abort(self, handoff_id: str, reason: str) -> None:
        """Before the blocks are given up for good. No report follows."""
        with self._lock:
            self._source.abort(handoff_id, reason, self._clock.now_s())
        self._pump.wake.ring()

    def poll(self) -> list[HandoffReport]:
        """Handoffs that are over since the last call: their blocks are free to go."""
        with self._lock:
            return self._source.poll()

    def close(self) -> None:
        """Within a moment; what is not over fails."""
        self._pump.close()

    # In the thread

    def _turn(self) -> None:
        self._hear()
        with self._lock:
            self._source.tick(self._clock.now_s())
        for _ in range(MAX_JOBS):
            with self._lock:
                job = self._source.next_job()
            if job is None:
                break
            self._do(job)
            self._flush()
        else:
            self._pump.wake.ring()  # there may be more
        self._flush()

    def _hear(self) -> None:
        for ready, _ in self._poller.poll(round(self._tick_s * 1000)):
            if ready == self._pump.wake.fileno:
                self._pump.wake.silence()
        for address, socket in self._sockets.items():
            for _ in range(MAX_HEARD):
                try:
                    parts = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(address, parts)

    def _take(self, address: str, parts: Sequence[bytes]) -> None:
        now_s = self._clock.now_s()
        try:
            message = wire.decode_from_decode(parts)
        except wire.HandoffWireError as error:
            log.warning("handoff: %s sent what is no message: %s", address, error)
            with self._lock:
                self._source.malformed(address, error, now_s)
            return
        with self._lock:
            self._source.heard(address, message, now_s)

    def _do(self, job: SendJob) -> None:
        try:
            views, frames = job.run(self._memory)
        except Exception as error:  # whatever it is, it is this handoff's and nobody else's
            log.exception("handoff %s: a block could not be read", job.handoff_id)
            with self._lock:
                self._source.fail(
                    job.handoff_id, f"a block could not be read: {error}", self._clock.now_s()
                )
            return
        with self._lock:
            self._source.finish(job, views, frames)

    def _flush(self) -> None:
        with self._lock:
            outbox = list(self._source.outbox)
            self._source.outbox.clear()
        for outgoing in outbox:
            self._send(outgoing)
        with self._lock:
            gone = self._sockets.keys() - self._source.addresses
        for address in gone:
            self._drop(address)

    def _send(self, outgoing: Outgoing) -> None:
        parts = [wire.encode(outgoing.message)]
        if outgoing.payload:
            parts.append(outgoing.payload)
        try:
            socket = self._sockets.get(outgoing.address) or self._connect(outgoing.address)
            socket.send_multipart(parts, zmq.NOBLOCK, copy=len(parts) == 1)
        except zmq.ZMQError as error:
            with self._lock:
                self._source.unreachable(
                    outgoing.address,
                    f"nothing can be sent to {outgoing.address}: {error.strerror}",
                    self._clock.now_s(),
                )

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        self._keys.join(socket)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IPV6, 1 if "[" in address else 0)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        self._sockets[address] = socket
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _drop(self, address: str) -> None:
        socket = self._sockets.pop(address)
        self._poller.unregister(socket)
        socket.close()

    def _fault(self) -> None:
        self._give_up_all("a fault of this prefill worker; its log says which")

    def _give_up_all(self, reason: str) -> None:
        with self._lock:
            self._source.give_up_all(reason, self._clock.now_s())

    def _end(self) -> None:
        self._give_up_all("this prefill worker ends")
        self._flush()
        for address in list(self._sockets):
            self._drop(address)
        self._context.term()
