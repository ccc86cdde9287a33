"""The decode side of handoffs, without sockets or threads: what is taken from whom, and when
to give up.

    step's thread     expect  take  nothing_lacks  forget            -> poll
    the receiver's    heard   malformed  tick  next_job  finish      -> outbox

Not safe for threads by itself: ``HandoffReceiver`` holds a lock around every call but
``CopyJob.run``. Whatever comes, it is written only to blocks of a load that is not over,
and it counts only when it is known to be what the prefill side meant: its key fits, and its
ticket was still there after its bytes had been read.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace

from headwater.core.cache import KVPart, MissReason
from headwater.core.errors import InvalidChange
from headwater.core.fleet import HandoffEnd, HandoffRef, HandoffReport
from headwater.core.ports import RecordMove
from headwater.transfer import handoff_wire as wire
from headwater.transfer.handoff_load import (
    CopyJob,
    Direct,
    Framed,
    HandoffLoad,
    Piece,
)
from headwater.transfer.handoff_memory import ProcessReader
from headwater.transfer.handoff_states import (
    Accepted,
    Done,
    Failed,
    HandoffLimits,
    Moving,
    Offered,
    attempt_of,
    changed,
)
from headwater.transfer.handoff_taking import Link, Outgoing, Over, PromptTold, Taking
from headwater.transfer.peer import PeerContract

MAX_LINKS = 1024
MAX_OVER = 4096
# What may wait here, beside what the bound allows, before the peer does not keep to it.
MAX_QUEUED_PIECES = 4096


class HandoffSink:
    """All handoffs of one decode worker."""

    def __init__(
        self,
        contract: PeerContract,
        limits: HandoffLimits,
        lock: threading.Lock,
        reader: ProcessReader,
        *,
        may_read: bool = True,
    ) -> None:
        """``lock`` is the one that the caller holds. ``may_read``: from a peer's memory,
        where the system allows it."""
        self._contract = contract
        self._limits = limits
        self._lock = lock
        self._reader = reader
        self._may_read = may_read
        self._part_bytes = contract.part_bytes
        self._links: dict[bytes, Link] = {}
        self._handoffs: dict[str, Taking] = {}
        self._turns: deque[str] = deque()
        self._over: OrderedDict[str, Over] = OrderedDict()  # the oldest are forgotten
        self._events: list[PromptTold | HandoffReport] = []
        self.outbox: deque[Outgoing] = deque()

    # From the step's thread

    def expect(self, ref: HandoffRef, num_tokens: int, now_s: float) -> None:
        """Somebody waits for it from now on. Raises InvalidChange for an id that was used."""
        handoff, over = self._handoffs.get(ref.handoff_id), self._over.get(ref.handoff_id)
        if (over is not None and over.was_expected) or (
            handoff is not None and handoff.ref is not None
        ):
            raise InvalidChange(f"handoff {ref.handoff_id} is expected already, or was")
        if over is not None:  # the prefill side gave it up before we were told of it
            self._over[ref.handoff_id] = replace(over, was_expected=True)
            reason = over.answer.reason if isinstance(over.answer, wire.Abort) else ""
            self._events.append(
                HandoffReport(handoff_id=ref.handoff_id, end=HandoffEnd.FAILED, reason=reason)
            )
            return
        if handoff is None:
            handoff = self._add(ref.handoff_id, now_s)
        handoff.ref, handoff.num_tokens, handoff.progress_s = ref, num_tokens, now_s
        if handoff.prompt is not None:
            self._events.append(handoff.prompt)

    def take(self, handoff_id: str, moves: Sequence[RecordMove], now_s: float) -> HandoffLoad:
        """There are blocks for ``moves``, by row, a row's global part first. They take the
        place of those of an earlier take."""
        load = HandoffLoad(moves, self._contract.block_tokens, self._lock)
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:  # it failed, which a report says or has said
            load.end(MissReason.UNAVAILABLE)
            return load
        if handoff.load is not None:
            handoff.load.end(MissReason.SLOW)
        handoff.load, handoff.progress_s = load, now_s
        self._accept(handoff_id, handoff)
        return load

    def nothing_lacks(self, handoff_id: str, now_s: float) -> None:
        """All of it is here already: the prefill side need not go on."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None:
            self._end(handoff_id, handoff, Done(), now_s)

    def forget(self, handoff_id: str, reason: str, now_s: float) -> None:
        """Nobody waits for it any more: the prefill side is told. No report."""
        self._fail(handoff_id, reason, now_s)
        self._events = [event for event in self._events if event.handoff_id != handoff_id]

    def poll(self) -> list[PromptTold | HandoffReport]:
        """What was heard of prompts, and which handoffs are over, since the last call."""
        events, self._events = self._events, []
        return events

    # From the receiver's thread

    @property
    def num_handoffs(self) -> int:
        return len(self._handoffs)

    def heard(
        self, link_id: bytes, message: wire.FromPrefill, payload: bytes, now_s: float
    ) -> None:
        """What does not fit ends its handoff and no other (D05)."""
        if isinstance(message, wire.Greet):
            self._greet(link_id, message, now_s)
            return
        link = self._links.get(link_id)
        if link is None:  # it was silent for too long, or knew one that was here before us
            self._post(link_id, wire.Stranger())
            return
        link.heard_s = now_s
        if isinstance(message, wire.Alive):
            return
        handoff_id = message.handoff_id
        if isinstance(message, wire.Offer):
            self._offered(link_id, link, handoff_id, now_s)
        elif handoff_id in link.ids:
            try:
                self._heard_of(handoff_id, link, message, payload, now_s)
            except wire.HandoffWireError as error:
                self._fail(handoff_id, f"the prefill worker sent {error}", now_s)

    def malformed(self, link_id: bytes, error: wire.HandoffWireError, now_s: float) -> None:
        """It ends the handoff that it speaks of. Where it speaks of none, a stranger is told
        what is spoken here, and a peer loses all that it had."""
        link = self._links.get(link_id)
        if link is None:
            refusal = f"not understood: {error}"
            self._post(link_id, wire.Welcome(contract=self._contract, refusal=refusal))
            return
        ids = list(link.ids) if error.handoff_id is None else [error.handoff_id]
        for handoff_id in ids:
            if handoff_id in link.ids:
                self._fail(handoff_id, f"the prefill worker sent {error}", now_s)

    def tick(self, now_s: float) -> None:
        """Say that we live; give up what nobody goes on with."""
        limits = self._limits
        for link_id, link in list(self._links.items()):
            if now_s - link.heard_s > limits.lease_s:
                for handoff_id in list(link.ids):
                    self._fail(handoff_id, "the prefill worker is silent", now_s)
                del self._links[link_id]
            elif now_s - link.said_s > limits.alive_s:
                self._post(link_id, wire.Alive())
                link.said_s = now_s
        for handoff_id, handoff in list(self._handoffs.items()):
            waited_s = now_s - handoff.progress_s
            if handoff.ref is None or handoff.link is None:
                if waited_s > limits.offer_s:
                    who = "decode" if handoff.ref is None else "prefill"
                    self._fail(handoff_id, f"the {who} side was never told of it", now_s)
            elif waited_s > limits.stall_s:
                self._fail(handoff_id, f"no KV moved for {limits.stall_s:g} s", now_s)

    def next_job(self, now_s: float) -> CopyJob | None:
        """One copy to make, by turns. Its load is not done before ``finish``."""
        for _ in range(len(self._turns)):
            if not self._turns:  # the last one failed just now
                break
            handoff_id = self._turns[0]
            self._turns.rotate(-1)
            handoff = self._handoffs[handoff_id]
            load = handoff.load
            if load is None or load.is_over:
                handoff.drop_queue()
                continue
            try:
                piece = self._next_piece(handoff, load)
            except wire.HandoffWireError as error:
                self._fail(handoff_id, f"the prefill worker sent {error}", now_s)
                continue
            if piece is not None:
                load.is_writing = True
                move = load.moves[load.num_loaded]
                return CopyJob(handoff_id, load, move, piece, handoff.open_part)
        return None

    def finish(self, job: CopyJob, outcome: bool | Exception, now_s: float) -> None:
        """``job`` ran, with this answer or error."""
        job.load.is_writing = False
        handoff = self._handoffs.get(job.handoff_id)
        if handoff is None or handoff.load is not job.load or job.load.is_over:
            return
        match outcome:
            case OSError(errno=(errno.EPERM | errno.ENOSYS)):
                # The kernel does not allow it (any more): the same in frames.
                assert handoff.link is not None
                self._links[handoff.link].is_direct = False
                self._accept(job.handoff_id, handoff)
            case Exception():
                self._fail(job.handoff_id, f"a copy failed: {outcome}", now_s)
            case True:
                self._copied(job, handoff, now_s)
            case _:  # given up while it was read: it comes again, or an Abort does
                if isinstance(job.piece, Direct):
                    handoff.dead_ticket = job.piece.ticket

    def give_up_all(self, reason: str, now_s: float) -> None:
        """The end of this worker."""
        for handoff_id in list(self._handoffs):
            self._fail(handoff_id, reason, now_s)

    # Inside: talking

    def _greet(self, link_id: bytes, message: wire.Greet, now_s: float) -> None:
        refusal = self._contract.difference(message.contract)
        if refusal is None and link_id not in self._links:
            if len(self._links) < MAX_LINKS:
                is_direct = self._may_read and self._can_read(message)
                self._links[link_id] = Link(now_s, now_s, message.pid, is_direct)
            else:
                refusal = f"there are {MAX_LINKS} connections, the most there may be"
        self._post(link_id, wire.Welcome(contract=self._contract, refusal=refusal))

    def _can_read(self, message: wire.Greet) -> bool:
        """Whether that process is on this machine: then its nonce lies where it says."""
        seen = bytearray(wire.TICKET_BYTES)
        try:
            self._reader.read(message.pid, [(message.nonce_address, memoryview(seen))])
        except OSError:
            return False
        return seen == message.nonce

    def _offered(self, link_id: bytes, link: Link, handoff_id: str, now_s: float) -> None:
        over = self._over.get(handoff_id)
        if over is not None:
            self._post(link_id, over.answer)
            return
        handoff = self._handoffs.get(handoff_id)
        try:
            if handoff is None:
                handoff = self._add(handoff_id, now_s)
            handoff.state = changed(handoff.state, Offered())
        except InvalidChange as error:
            self._refuse(link_id, handoff_id, str(error))
            return
        handoff.link, handoff.progress_s = link_id, now_s
        link.ids[handoff_id] = None
        self._accept(handoff_id, handoff)

    def _accept(self, handoff_id: str, handoff: Taking) -> None:
        """Say what lacks, once there are an offer and blocks for it."""
        link_id, load = handoff.link, handoff.load
        if link_id is None or load is None or load.is_over:
            return
        handoff.num_attempts += 1
        handoff.state = changed(handoff.state, Accepted(handoff.num_attempts))
        handoff.drop_queue()
        handoff.num_before = load.num_loaded
        left = load.places[load.num_loaded :]
        self._post(
            link_id,
            wire.Accept(
                handoff_id=handoff_id,
                attempt=handoff.num_attempts,
                is_direct=self._links[link_id].is_direct,
                rows=tuple(row for row, part in left if part is KVPart.GLOBAL),
                window_rows=tuple(row for row, part in left if part is KVPart.WINDOW),
            ),
        )

    def _refuse(self, link_id: bytes, handoff_id: str, reason: str) -> None:
        self._post(link_id, wire.Abort(handoff_id=handoff_id, reason=reason))

    def _post(self, link_id: bytes, message: wire.FromDecode) -> None:
        self.outbox.append(Outgoing(link_id, message))

    # Inside: taking

    def _heard_of(
        self,
        handoff_id: str,
        link: Link,
        message: wire.Prompt | wire.Rows | wire.Frame | wire.Abort,
        payload: bytes,
        now_s: float,
    ) -> None:
        handoff = self._handoffs[handoff_id]
        match message:
            case wire.Abort(reason=reason):
                self._fail(handoff_id, reason[: wire.MAX_REASON_CHARS], now_s, tell=False)
            case wire.Prompt():
                handoff.prompt = PromptTold(handoff_id, message.num_hit_tokens, message.cache)
                if handoff.ref is not None:
                    self._events.append(handoff.prompt)
            case _ if attempt_of(handoff.state) == message.attempt:
                if handoff.start_s is None:
                    handoff.start_s = now_s
                self._queue(handoff, message, payload, link.pid)

    def _queue(
        self, handoff: Taking, message: wire.Rows | wire.Frame, payload: bytes, pid: int
    ) -> None:
        if isinstance(message, wire.Rows):
            handoff.queue += [
                Direct(
                    row=place.row,
                    part=place.part,
                    key=place.key,
                    pid=pid,
                    addresses=place.addresses,
                    ticket_address=message.ticket_address,
                    ticket=message.ticket,
                )
                for place in message.places
            ]
        else:
            end, size = message.offset + len(payload), self._part_bytes[message.part]
            if message.offset < 0 or end > size:
                raise wire.HandoffWireError(f"bytes up to {end} of a part of {size}")
            handoff.queued_bytes += len(payload)
            handoff.queue.append(
                Framed(
                    row=message.row,
                    part=message.part,
                    key=message.key,
                    payload=payload,
                    offset=message.offset,
                    is_last=end == size,
                )
            )
        # Twice: what was sent before a retraction may still be here when it comes again.
        most_bytes = 2 * (self._limits.max_untaken_bytes + max(self._part_bytes.values()))
        if handoff.queued_bytes > most_bytes or len(handoff.queue) > MAX_QUEUED_PIECES:
            raise wire.HandoffWireError("more than was asked for")

    def _next_piece(self, handoff: Taking, load: HandoffLoad) -> Piece | None:
        """The next one that the load's next move needs. Raises HandoffWireError for one that
        does not belong here."""
        while handoff.queue:
            piece = handoff.queue.popleft()
            if isinstance(piece, Framed):
                handoff.queued_bytes -= len(piece.payload)
            elif piece.ticket == handoff.dead_ticket:
                continue
            number = load.number(piece.row, piece.part)
            if number is None or number > load.num_loaded:
                raise wire.HandoffWireError(f"{piece.part} of row {piece.row} out of its turn")
            if number < load.num_loaded:
                continue  # it came before a retraction, and came again
            if piece.key != load.moves[number].meta.key:
                raise wire.HandoffWireError(f"row {piece.row} of other tokens or another model")
            if isinstance(piece, Framed) and piece.offset != handoff.offset:
                raise wire.HandoffWireError(f"bytes at {piece.offset}, not at {handoff.offset}")
            return piece
        return None

    def _copied(self, job: CopyJob, handoff: Taking, now_s: float) -> None:
        load, piece = job.load, job.piece
        handoff.progress_s = now_s
        if isinstance(piece, Framed) and not piece.is_last:
            handoff.offset += len(piece.payload)
            return
        handoff.offset = 0
        load.complete_one()
        handoff.num_bytes += self._part_bytes[piece.part]
        handoff.state = changed(handoff.state, Moving(handoff.num_attempts))
        if load.is_over:
            self._end(job.handoff_id, handoff, Done(), now_s)
            return
        assert handoff.link is not None
        took = wire.Took(
            handoff_id=job.handoff_id,
            attempt=handoff.num_attempts,
            num_moves=load.num_loaded - handoff.num_before,
        )
        self._post(handoff.link, took)

    # Inside: beginning and ending

    def _add(self, handoff_id: str, now_s: float) -> Taking:
        if len(self._handoffs) >= self._limits.max_handoffs:
            raise InvalidChange(f"there are {len(self._handoffs)} handoffs, the most there may be")
        handoff = self._handoffs[handoff_id] = Taking(now_s)
        self._turns.append(handoff_id)
        return handoff

    def _fail(self, handoff_id: str, reason: str, now_s: float, *, tell: bool = True) -> None:
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None:
            self._end(handoff_id, handoff, Failed(reason), now_s, tell=tell)

    def _end(
        self,
        handoff_id: str,
        handoff: Taking,
        state: Done | Failed,
        now_s: float,
        *,
        tell: bool = True,
    ) -> None:
        handoff.state = changed(handoff.state, state)
        # First the event, then the load: who sees that the load is over finds out why.
        answer: wire.Done | wire.Abort
        if isinstance(state, Done):
            answer = wire.Done(handoff_id=handoff_id, num_bytes=handoff.num_bytes)
            reason, end = "", HandoffEnd.DONE
        else:
            reason, end = state.reason, HandoffEnd.FAILED
            answer = wire.Abort(handoff_id=handoff_id, reason=reason)
        if handoff.ref is not None:
            self._events.append(
                HandoffReport(
                    handoff_id=handoff_id,
                    end=end,
                    num_tokens=handoff.num_tokens if isinstance(state, Done) else 0,
                    num_bytes=handoff.num_bytes,
                    seconds=0.0 if handoff.start_s is None else now_s - handoff.start_s,
                    reason=reason,
                )
            )
        if handoff.load is not None:
            handoff.load.end(MissReason.UNAVAILABLE)
        del self._handoffs[handoff_id]
        self._turns.remove(handoff_id)
        self._over[handoff_id] = Over(answer, handoff.ref is not None)
        while len(self._over) > MAX_OVER:
            self._over.popitem(last=False)
        if handoff.link is not None:
            link = self._links.get(handoff.link)
            if link is not None:
                link.ids.pop(handoff_id, None)
            if tell:
                self._post(handoff.link, answer)
