"""The prefill side of handoffs, without sockets or threads: who is offered what, and when
to give up.

    step's thread   offer  told_prompt  ready  retract  abort      -> poll
    the sender's    heard  unreachable  tick   next_job  finish    -> outbox

Not safe for threads by itself: ``HandoffSender`` holds a lock around every call but
``Job.run``. Blocks are the sequence's from ``ready`` until the handoff is over or
``retract``; both wipe the ticket first, so that nobody takes for KV what is written then.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.core.blocks import BlockId
from headwater.core.cache import CacheReport, KVPart
from headwater.core.errors import InvalidChange
from headwater.core.fleet import HandoffEnd, HandoffRef, HandoffReport
from headwater.core.ports import BlockMemory
from headwater.transfer import handoff_wire as wire
from headwater.transfer.handoff_memory import address_of
from headwater.transfer.handoff_plan import HandoffPlan
from headwater.transfer.handoff_states import (
    Accepted,
    Done,
    Failed,
    HandoffLimits,
    Moving,
    Offered,
    State,
    attempt_of,
    changed,
    is_over,
)
from headwater.transfer.peer import PeerContract

IDLE_LINK_S = 30.0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """To the decode worker at ``address``."""

    address: str
    message: wire.FromPrefill
    payload: bytes = b""


@dataclass(slots=True)
class _Link:
    """One decode worker, as long as there is something to say to it."""

    heard_s: float
    said_s: float
    used_s: float  # a handoff was on it
    greeted_s: float
    is_open: bool = False
    refusal: str | None = None
    ids: dict[str, None] = field(default_factory=dict)  # in turn


@dataclass(slots=True)
class _Handoff:
    ref: HandoffRef
    plan: HandoffPlan
    progress_s: float
    state: State = field(default_factory=Offered)
    is_sent: bool = False  # the offer
    prompt: wire.Prompt | None = None
    blocks: list[BlockId] = field(default_factory=list)  # of the first rows, complete
    ticket: bytearray = field(default_factory=bytearray)
    is_direct: bool = False
    wanted: tuple[tuple[int, KVPart], ...] = ()
    num_sent: int = 0
    num_taken: int = 0
    start_s: float | None = None
    # Staging that the peer reads stays as it is until it was taken.
    untaken: deque[Sequence[memoryview]] = field(default_factory=deque)


@dataclass(frozen=True, slots=True, eq=False)
class SendJob:
    """One part of one row, to be looked up or copied. ``run`` needs no lock."""

    handoff_id: str
    attempt: int
    number: int  # of what was accepted
    row: int
    part: KVPart
    key: bytes
    block: BlockId
    is_direct: bool
    ticket: bytearray

    def run(self, memory: BlockMemory) -> tuple[Sequence[memoryview], list[bytes]]:
        """Where the bytes lie; or a copy of them in frames."""
        views = memory.read_buffers(self.block, self.part)
        if self.is_direct:
            return views, []
        whole = b"".join(views)
        size = wire.FRAME_BYTES
        return (), [whole[start : start + size] for start in range(0, len(whole), size)]


class HandoffSource:
    """All handoffs of one prefill worker."""

    def __init__(
        self, contract: PeerContract, limits: HandoffLimits, *, pid: int, nonce: bytes
    ) -> None:
        """``nonce`` must lie still as long as this lives."""
        self._contract = contract
        self._limits = limits
        self._part_bytes = contract.part_bytes
        self._nonce = nonce
        self._greet = wire.Greet(
            contract=contract,
            pid=pid,
            nonce_address=address_of(memoryview(nonce)),
            nonce=nonce,
        )
        self._links: dict[str, _Link] = {}
        self._handoffs: dict[str, _Handoff] = {}
        self._turns: deque[str] = deque()  # ids, in turn
        self._reports: list[HandoffReport] = []
        self.outbox: deque[Outgoing] = deque()

    # From the step's thread

    def offer(self, ref: HandoffRef, plan: HandoffPlan, now_s: float) -> None:
        """Raises InvalidChange for an id that was used, or when there are too many."""
        if ref.handoff_id in self._handoffs:
            raise InvalidChange(f"handoff {ref.handoff_id} is offered already")
        if len(self._handoffs) >= self._limits.max_handoffs:
            raise InvalidChange(f"there are {len(self._handoffs)} handoffs, the most there may be")
        self._handoffs[ref.handoff_id] = _Handoff(ref, plan, progress_s=now_s, ticket=_new_ticket())
        self._turns.append(ref.handoff_id)
        link = self._links.get(ref.address)
        if link is None:
            link = self._links[ref.address] = _Link(now_s, now_s, now_s, now_s)
            self.outbox.append(Outgoing(ref.address, self._greet))
        link.ids[ref.handoff_id] = None
        if link.refusal is not None:
            self._fail(ref.handoff_id, link.refusal, now_s)
        elif link.is_open:
            self._send_offer(ref.handoff_id)

    def told_prompt(self, handoff_id: str, num_hit_tokens: int, cache: CacheReport) -> None:
        """What of the prompt was a hit here; before the first row is ready."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None and not is_over(handoff.state) and handoff.prompt is None:
            handoff.prompt = wire.Prompt(
                handoff_id=handoff_id, num_hit_tokens=num_hit_tokens, cache=cache
            )
            if handoff.is_sent:
                self._say(handoff, handoff.prompt)

    def ready(self, handoff_id: str, block_table: Sequence[BlockId], num_computed: int) -> None:
        """The first ``num_computed`` tokens have KV, in these blocks."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None and not is_over(handoff.state):
            num_rows = handoff.plan.num_whole_rows(num_computed)
            handoff.blocks += block_table[len(handoff.blocks) : num_rows]

    def retract(self, handoff_id: str) -> None:
        """The blocks are about to be given up; what was not taken comes again later."""
        handoff = self._handoffs.get(handoff_id)
        if handoff is not None and not is_over(handoff.state):
            _wipe(handoff.ticket)
            handoff.ticket = _new_ticket()
            handoff.blocks.clear()
            handoff.num_sent = handoff.num_taken
            handoff.untaken.clear()

    def abort(self, handoff_id: str, reason: str, now_s: float) -> None:
        """The blocks are about to be given up for good. No report: the caller knows."""
        if handoff_id in self._handoffs:
            self._fail(handoff_id, reason, now_s, tell=True)
            self._reports = [r for r in self._reports if r.handoff_id != handoff_id]

    def poll(self) -> list[HandoffReport]:
        """Handoffs that are over since the last call."""
        reports, self._reports = self._reports, []
        return reports

    # From the sender's thread

    @property
    def addresses(self) -> set[str]:
        """Of the workers that a connection is kept to."""
        return set(self._links)

    def heard(self, address: str, message: wire.FromDecode, now_s: float) -> None:
        """Raises HandoffWireError when it does not fit; that handoff has failed then."""
        link = self._links.get(address)
        if link is None:
            return
        link.heard_s = now_s
        match message:
            case wire.Welcome():
                self._welcome(address, link, message, now_s)
            case wire.Stranger():
                self._greet_again(address, link, now_s)
            case wire.Alive():
                pass
            case wire.Abort(handoff_id=handoff_id, reason=reason):
                if handoff_id in link.ids:
                    self._fail(handoff_id, reason[: wire.MAX_REASON_CHARS], now_s)
            case _:
                if message.handoff_id in link.ids:
                    self._heard_of(self._handoffs[message.handoff_id], message, now_s)

    def malformed(self, address: str, error: wire.HandoffWireError, now_s: float) -> None:
        """The peer said nonsense: of one handoff if that can be told, else of all on the link."""
        link = self._links.get(address)
        if link is None:
            return
        ids = list(link.ids) if error.handoff_id is None else [error.handoff_id]
        for handoff_id in ids:
            if handoff_id in link.ids:
                self._fail(handoff_id, f"the decode worker sent {error}", now_s, tell=True)

    def unreachable(self, address: str, reason: str, now_s: float) -> None:
        """Nothing can be sent there any more."""
        link = self._links.pop(address, None)
        if link is not None:
            for handoff_id in list(link.ids):
                self._fail(handoff_id, reason, now_s)

    def tick(self, now_s: float) -> None:
        """Say that we live; give up what nobody goes on with."""
        limits = self._limits
        for address, link in list(self._links.items()):
            if link.ids:
                link.used_s = now_s
            # A greeting can be lost, if a connection was cut and made anew under it.
            since_s = link.heard_s if link.is_open else link.greeted_s
            if now_s - since_s > limits.lease_s and not link.refusal:
                said = "is silent" if link.is_open else "did not answer, or has another secret"
                self.unreachable(address, f"the decode worker at {address} {said}", now_s)
            elif now_s - link.used_s > IDLE_LINK_S:
                del self._links[address]
            elif now_s - link.said_s > limits.alive_s:
                self._post(address, wire.Alive())
                link.said_s = now_s
        for handoff_id, handoff in list(self._handoffs.items()):
            if now_s - handoff.progress_s > limits.stall_s and not is_over(handoff.state):
                self._fail(handoff_id, f"no KV moved for {limits.stall_s:g} s", now_s, tell=True)

    def next_job(self) -> SendJob | None:
        """One part to send, by turns; None when nobody can go on now."""
        for _ in range(len(self._turns)):
            handoff_id = self._turns[0]
            self._turns.rotate(-1)
            handoff = self._handoffs[handoff_id]
            attempt = attempt_of(handoff.state)
            if attempt is None or handoff.num_sent == len(handoff.wanted):
                continue
            row, part = handoff.wanted[handoff.num_sent]
            if row >= len(handoff.blocks):
                continue
            under_way = handoff.wanted[handoff.num_taken : handoff.num_sent]
            num_bytes = sum(self._part_bytes[p] for _, p in (*under_way, (row, part)))
            if under_way and num_bytes > self._limits.max_untaken_bytes:
                continue
            meta = handoff.plan.rows[row].part(part)
            assert meta is not None
            handoff.num_sent += 1
            return SendJob(
                handoff_id=handoff_id,
                attempt=attempt,
                number=handoff.num_sent - 1,
                row=row,
                part=part,
                key=meta.key,
                block=handoff.blocks[row],
                is_direct=handoff.is_direct,
                ticket=handoff.ticket,
            )
        return None

    def finish(self, job: SendJob, views: Sequence[memoryview], frames: Sequence[bytes]) -> None:
        """``job`` ran: send what it found, unless its block was given up meanwhile."""
        handoff = self._handoffs.get(job.handoff_id)
        if (
            handoff is None
            or handoff.ticket is not job.ticket
            or attempt_of(handoff.state) != job.attempt
        ):
            return
        if job.is_direct:
            handoff.untaken.append(views)
            place = wire.Place(
                job.row, job.part, job.key, wire.pack_addresses([address_of(v) for v in views])
            )
            rows = wire.Rows(
                handoff_id=job.handoff_id,
                attempt=job.attempt,
                ticket_address=address_of(memoryview(job.ticket)),
                ticket=bytes(job.ticket),
                places=(place,),
            )
            self._say(handoff, rows)
        for number, frame in enumerate(frames):
            message = wire.Frame(
                handoff_id=job.handoff_id,
                attempt=job.attempt,
                row=job.row,
                part=job.part,
                key=job.key,
                offset=number * wire.FRAME_BYTES,
            )
            self._post(handoff.ref.address, message, frame)

    def fail(self, handoff_id: str, reason: str, now_s: float) -> None:
        """Something of ours went wrong with this one; the others go on (D05)."""
        self._fail(handoff_id, reason, now_s, tell=True)

    def give_up_all(self, reason: str, now_s: float) -> None:
        """The end of this worker."""
        for handoff_id in list(self._handoffs):
            self._fail(handoff_id, reason, now_s, tell=True)

    # Inside

    def _welcome(self, address: str, link: _Link, message: wire.Welcome, now_s: float) -> None:
        refusal = message.refusal or self._contract.difference(message.contract)
        if refusal is not None:
            link.refusal = f"refused: {refusal[: wire.MAX_REASON_CHARS]}"
            for handoff_id in list(link.ids):
                self._fail(handoff_id, link.refusal, now_s)
        elif not link.is_open:
            link.is_open = True
            for handoff_id in link.ids:
                self._send_offer(handoff_id)

    def _greet_again(self, address: str, link: _Link, now_s: float) -> None:
        if not link.is_open and now_s - link.greeted_s < self._limits.alive_s:
            return  # it was done just now; more than one message met a stranger
        link.is_open, link.greeted_s = False, now_s
        for handoff_id in list(link.ids):
            if attempt_of(self._handoffs[handoff_id].state) is not None:
                self._fail(handoff_id, f"the decode worker at {address} let go of it", now_s)
        self._post(address, self._greet)

    def _send_offer(self, handoff_id: str) -> None:
        handoff = self._handoffs[handoff_id]
        handoff.is_sent = True
        self._say(handoff, wire.Offer(handoff_id=handoff_id))
        if handoff.prompt is not None:
            self._say(handoff, handoff.prompt)

    def _heard_of(
        self, handoff: _Handoff, message: wire.Accept | wire.Took | wire.Done, now_s: float
    ) -> None:
        try:
            match message:
                case wire.Accept():
                    self._accepted(handoff, message, now_s)
                case wire.Took():
                    self._took(handoff, message, now_s)
                case wire.Done(num_bytes=num_bytes):
                    self._end(handoff, Done(), now_s, num_bytes=num_bytes)
        except (InvalidChange, wire.HandoffWireError) as error:
            self._fail(handoff.ref.handoff_id, str(error), now_s, tell=True)

    def _accepted(self, handoff: _Handoff, message: wire.Accept, now_s: float) -> None:
        rows = handoff.plan.rows
        wanted = [(row, KVPart.GLOBAL) for row in message.rows]
        wanted += [(row, KVPart.WINDOW) for row in message.window_rows]
        for row, part in wanted:
            if not 0 <= row < len(rows) or rows[row].part(part) is None:
                raise wire.HandoffWireError(f"it wants {part} of row {row} of {len(rows)}")
        if len(set(wanted)) != len(wanted) or not wanted:
            raise wire.HandoffWireError(f"it wants {len(wanted)} parts, not each one once")
        handoff.state = changed(handoff.state, Accepted(message.attempt))
        # By row, the global part first: the order of kv's loads. GLOBAL sorts before WINDOW.
        handoff.wanted = tuple(sorted(wanted))
        handoff.is_direct = message.is_direct
        handoff.num_sent = handoff.num_taken = 0
        handoff.untaken.clear()
        handoff.progress_s = now_s
        if handoff.start_s is None:
            handoff.start_s = now_s

    def _took(self, handoff: _Handoff, message: wire.Took, now_s: float) -> None:
        if attempt_of(handoff.state) != message.attempt:
            return  # of an attempt that is over
        # Not more than was ever sent: a retraction may have put ``num_sent`` back.
        if not handoff.num_taken < message.num_moves <= len(handoff.wanted):
            raise wire.HandoffWireError(
                f"it took {message.num_moves} parts after {handoff.num_taken} of "
                f"{len(handoff.wanted)}"
            )
        handoff.state = changed(handoff.state, Moving(message.attempt))
        while handoff.num_taken < message.num_moves:
            if handoff.untaken:
                handoff.untaken.popleft()
            handoff.num_taken += 1
        handoff.num_sent = max(handoff.num_sent, handoff.num_taken)
        handoff.progress_s = now_s

    def _fail(self, handoff_id: str, reason: str, now_s: float, *, tell: bool = False) -> None:
        handoff = self._handoffs.get(handoff_id)
        if handoff is None:
            return
        if tell and handoff.is_sent:
            self._say(handoff, wire.Abort(handoff_id=handoff_id, reason=reason))
        self._end(handoff, Failed(reason), now_s)

    def _end(
        self, handoff: _Handoff, state: Done | Failed, now_s: float, *, num_bytes: int = 0
    ) -> None:
        handoff.state = changed(handoff.state, state)
        _wipe(handoff.ticket)
        ref = handoff.ref
        is_done = isinstance(state, Done)
        self._reports.append(
            HandoffReport(
                handoff_id=ref.handoff_id,
                end=HandoffEnd.DONE if is_done else HandoffEnd.FAILED,
                num_tokens=handoff.plan.num_tokens if is_done else 0,
                num_bytes=num_bytes,
                seconds=0.0 if handoff.start_s is None else now_s - handoff.start_s,
                reason="" if isinstance(state, Done) else state.reason,
            )
        )
        del self._handoffs[ref.handoff_id]
        self._turns.remove(ref.handoff_id)
        link = self._links.get(ref.address)
        if link is not None:
            link.ids.pop(ref.handoff_id, None)

    def _say(self, handoff: _Handoff, message: wire.FromPrefill) -> None:
        self._post(handoff.ref.address, message)

    def _post(self, address: str, message: wire.FromPrefill, payload: bytes = b"") -> None:
        self.outbox.append(Outgoing(address, message, payload))


def _new_ticket() -> bytearray:
    return bytearray(secrets.token_bytes(wire.TICKET_BYTES))


def _wipe(ticket: bytearray) -> None:
    ticket[:] = bytes(len(ticket))
