"""Takes KV from prefill workers: the decode side's door, its thread and its socket.

    expect -> take -> Load ... -> poll: PromptTold, HandoffReport

Called from the step's thread; nothing here waits. Listens on loopback unless told otherwise,
and only to those who have the fleet's secret. What is agreed when is ``handoff_sink``'s.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zmq

from headwater.core.errors import ConfigError
from headwater.core.fleet import HandoffRef, HandoffReport
from headwater.core.ports import BlockMemory, Clock, RecordMove
from headwater.transfer import handoff_wire as wire
from headwater.transfer.handoff_load import CopyJob, HandoffLoad
from headwater.transfer.handoff_memory import ProcessReader
from headwater.transfer.handoff_pump import Pump, log
from headwater.transfer.handoff_sink import HandoffSink
from headwater.transfer.handoff_states import HandoffLimits
from headwater.transfer.handoff_taking import PromptTold
from headwater.transfer.peer import FleetKeys, PeerContract

LOOPBACK = "tcp://127.0.0.1:*"
MAX_HEARD = 256
MAX_JOBS = 16  # copies before messages have their turn
MAX_QUEUED = 4096


class HandoffReceiver:
    """One per decode worker. ``address`` is what prefill workers connect to."""

    def __init__(
        self,
        contract: PeerContract,
        memory: BlockMemory,
        keys: FleetKeys,
        clock: Clock,
        limits: HandoffLimits | None = None,
        *,
        bind: str = LOOPBACK,
        may_read: bool = True,
    ) -> None:
        """``may_read``: straight from the memory of peers on this machine. Raises
        ConfigError when ``bind`` cannot be listened on."""
        limits = limits or HandoffLimits()
        self._memory = memory
        self._clock = clock
        self._tick_s = limits.alive_s / 2
        self._lock = threading.Lock()
        self._reader = ProcessReader()
        self._sink = HandoffSink(contract, limits, self._lock, self._reader, may_read=may_read)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        keys.serve(self._socket)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.IPV6, 1 if "[" in bind else 0)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(f"cannot take KV at {bind}: {error.strerror}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._pump = Pump(
            "headwater-handoff-take", turn=self._turn, fault=self._fault, end=self._end
        )
        self._poller.register(self._pump.wake.fileno, zmq.POLLIN)
        self._pump.start()

    # From the step's thread

    def expect(self, ref: HandoffRef, num_tokens: int) -> None:
        """It is waited for from now on. Raises InvalidChange for an id that was used."""
        with self._lock:
            self._sink.expect(ref, num_tokens, self._clock.now_s())

    def take(self, handoff_id: str, moves: Sequence[RecordMove]) -> HandoffLoad:
        """There are blocks for ``moves``, by row, a row's global part first: at least one.
        The load owns them until it is done. Takes the place of an earlier take."""
        with self._lock:
            load = self._sink.take(handoff_id, moves, self._clock.now_s())
        self._pump.wake.ring()
        return load

    def nothing_lacks(self, handoff_id: str) -> None:
        """All of it is here already; the prefill side is told."""
        with self._lock:
            self._sink.nothing_lacks(handoff_id, self._clock.now_s())
        self._pump.wake.ring()

    def forget(self, handoff_id: str, reason: str) -> None:
        """Nobody waits for it any more; the prefill side is told. No report follows."""
        with self._lock:
            self._sink.forget(handoff_id, reason, self._clock.now_s())
        self._pump.wake.ring()

    def poll(self) -> list[PromptTold | HandoffReport]:
        """What was heard of prompts, and which handoffs are over, since the last call."""
        with self._lock:
            return self._sink.poll()

    def close(self) -> None:
        """Within a moment; loads that are not done fail."""
        self._pump.close()

    # In the thread

    def _turn(self) -> None:
        self._hear()
        with self._lock:
            self._sink.tick(self._clock.now_s())
        for _ in range(MAX_JOBS):
            with self._lock:
                job = self._sink.next_job(self._clock.now_s())
            if job is None:
                break
            self._do(job)
        else:
            self._pump.wake.ring()  # there may be more
        self._flush()

    def _hear(self) -> None:
        for ready, _ in self._poller.poll(round(self._tick_s * 1000)):
            if ready == self._pump.wake.fileno:
                self._pump.wake.silence()
        for _ in range(MAX_HEARD):
            try:
                link_id, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(link_id, parts)

    def _take(self, link_id: bytes, parts: Sequence[bytes]) -> None:
        now_s = self._clock.now_s()
        try:
            message, payload = wire.decode_from_prefill(parts)
        except wire.HandoffWireError as error:
            log.warning("handoff: a prefill worker sent what is no message: %s", error)
            with self._lock:
                self._sink.malformed(link_id, error, now_s)
            return
        with self._lock:
            self._sink.heard(link_id, message, payload, now_s)

    def _do(self, job: CopyJob) -> None:
        outcome: bool | Exception
        try:
            outcome = job.run(self._memory, self._reader)
        except Exception as error:  # whatever it is, it is this handoff's and nobody else's
            log.warning("handoff %s: %s: %s", job.handoff_id, type(error).__name__, error)
            outcome = error
        with self._lock:
            self._sink.finish(job, outcome, self._clock.now_s())

    def _flush(self) -> None:
        with self._lock:
            outbox = list(self._sink.outbox)
            self._sink.outbox.clear()
        for outgoing in outbox:
            # A connection that is gone, or full because its peer stands still: the lease ends it.
            try:
                self._socket.send_multipart(
                    (outgoing.link, wire.encode(outgoing.message)), zmq.NOBLOCK
                )
            except zmq.ZMQError as error:
                log.debug("handoff: not said: %s", error.strerror)

    def _fault(self) -> None:
        self._give_up_all("a fault of this decode worker; its log says which")

    def _give_up_all(self, reason: str) -> None:
        with self._lock:
            self._sink.give_up_all(reason, self._clock.now_s())

    def _end(self) -> None:
        self._give_up_all("this decode worker ends")
        self._flush()
        self._socket.close()
        self._context.term()
