"""Prompts whose KV changes hands: what this worker gives to others, and takes from them.

    gives   submit -> ... -> prefilling --all computed--> holding --taken--> ended
                                 |--- rows that are ready ---> sender
    takes   submit -> waiting --admitted--> loading --all there--> prefilling (the last token) ...
                         |                     |
                         +------- failed ------+--> stranded: no blocks, until the router's word

A request has at most one handoff, of its prompt less the last token, or less all that late
layers compute (``core.fleet.handed_tokens``); on the taking side its leader takes. Joins
choices with a sender and a receiver (``transfer``); knows no scheduling, no blocks' states and
no bytes. ``scheduler`` calls it, from its one thread; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headwater.core.blocks import BlockId, CacheIdentity
from headwater.core.cache import CacheReport, KVPart
from headwater.core.errors import InvalidChange, InvalidRequest
from headwater.core.fleet import (
    HandoffEnd,
    HandoffRef,
    HandoffReport,
    Holding,
    Phase,
    handed_tokens,
)
from headwater.core.ports import Load, RecordMove, StoredPrefix
from headwater.core.request import FinishReason, Request, RequestId, StopParams
from headwater.core.step import SequenceId
from headwater.kv.manager import KVManager
from headwater.transfer.handoff_plan import HandoffPlan, plan_handoff
from headwater.transfer.handoff_taking import PromptTold
from headwater.worker.choice import Choice, ChoiceGroup


class Sender(Protocol):
    """What is needed of ``transfer.handoff_sender.HandoffSender``."""

    def offer(self, ref: HandoffRef, plan: HandoffPlan) -> None: ...
    def told_prompt(self, handoff_id: str, num_hit_tokens: int, cache: CacheReport) -> None: ...
    def ready(self, handoff_id: str, block_table: Sequence[BlockId], num_computed: int) -> None: ...
    def retract(self, handoff_id: str) -> None: ...
    def abort(self, handoff_id: str, reason: str) -> None: ...
    def poll(self) -> list[HandoffReport]: ...
    def close(self) -> None: ...


class Receiver(Protocol):
    """What is needed of ``transfer.handoff_receiver.HandoffReceiver``."""

    @property
    def address(self) -> str: ...
    def expect(self, ref: HandoffRef, num_tokens: int) -> None: ...
    def take(self, handoff_id: str, moves: Sequence[RecordMove]) -> Load: ...
    def nothing_lacks(self, handoff_id: str) -> None: ...
    def forget(self, handoff_id: str, reason: str) -> None: ...
    def poll(self) -> list[PromptTold | HandoffReport]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverParts:
    """``app`` hands them in: a worker gives with a sender, and takes with a receiver. One that
    does not hold the whole model gives, and does nothing else. The rest as in ``ModelInfo``."""

    part_bytes: Callable[[KVPart], int]
    sender: Sender | None = None
    receiver: Receiver | None = None
    holds: Holding = Holding.ALL
    alignment: int = 1
    decoder_replay_tokens: int | None = None

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        if self.receiver is not None:
            self.receiver.close()


@dataclass(slots=True)
class _Giving:
    handoff_id: str
    plan: HandoffPlan
    choice: Choice


@dataclass(slots=True)
class _Taking:
    handoff_id: str
    plan: HandoffPlan
    stored: StoredPrefix  # the plan as a hit's source
    group: ChoiceGroup
    leader: Choice | None = None
    prompt: PromptTold | None = None  # not told to the leader yet
    has_failed: bool = False


class Handover:
    """One per scheduler."""

    def __init__(self, kv: KVManager, parts: HandoverParts | None = None) -> None:
        self._kv = kv
        self._parts = parts
        self._giving: dict[RequestId, _Giving] = {}
        self._taking: dict[RequestId, _Taking] = {}
        self._requests: dict[str, RequestId] = {}  # by handoff
        self._reports: list[HandoffReport] = []
        self._told: list[Choice] = []
        self.holding: dict[SequenceId, Choice] = {}  # all computed, not all taken
        self.stranded: dict[SequenceId, Choice] = {}

    # Beginning

    def check(self, phase: Phase) -> None:
        """Raises InvalidRequest for a phase that this worker does not hold the weights for."""
        parts = self._parts
        if parts is not None and parts.holds is not Holding.ALL and phase is not Phase.PREFILL:
            raise InvalidRequest(
                f"this worker holds only the {parts.holds} part of its model: it computes "
                f"prompts for others, and was asked for the phase {phase}"
            )

    def giving_request(self, request: Request) -> Request:
        """What is computed of ``request`` to hand its prompt over: one sequence of the tokens
        whose KV changes hands, and no output. The prompt may come out empty."""
        return replace(
            request,
            prompt_tokens=request.prompt_tokens[: self._num_handed(request)],
            stop=StopParams(max_output_tokens=0),
            num_choices=1,
            num_prompt_logprobs=None,
            constraint=None,
        )

    def give(self, ref: HandoffRef | None, choice: Choice, identity: CacheIdentity) -> None:
        """``choice`` computes a prompt for another worker; ``giving_request`` made its request.

        Raises InvalidRequest."""
        parts = self._parts
        if parts is None or parts.sender is None or ref is None:
            raise InvalidRequest("this worker hands no prompts over")
        request = choice.sequence.request
        # What was computed is what is handed over: a token more, which nobody computes, ends it.
        plan = self._plan((*request.prompt_tokens, 0), identity)
        try:
            parts.sender.offer(ref, plan)
        except InvalidChange as error:
            raise InvalidRequest(str(error)) from error
        self._giving[request.request_id] = _Giving(ref.handoff_id, plan, choice)
        self._requests[ref.handoff_id] = request.request_id

    def expect(self, ref: HandoffRef | None, group: ChoiceGroup, identity: CacheIdentity) -> None:
        """The prompt of ``group`` comes from another worker. Raises InvalidRequest."""
        parts = self._parts
        if parts is None or parts.receiver is None or ref is None:
            raise InvalidRequest("this worker takes no prompts over")
        request = group.request
        plan = self._plan(request.prompt_tokens[: self._num_handed(request) + 1], identity)
        if not plan.rows:
            self.report_nothing(ref)
            return
        try:
            parts.receiver.expect(ref, plan.num_tokens)
        except InvalidChange as error:
            raise InvalidRequest(str(error)) from error
        self._taking[request.request_id] = _Taking(
            ref.handoff_id, plan, plan.as_stored(parts.part_bytes), group
        )
        self._requests[ref.handoff_id] = request.request_id

    def report_nothing(self, ref: HandoffRef) -> None:
        """The prompt is too short to be handed over: both sides know that by themselves."""
        self._reports.append(HandoffReport(handoff_id=ref.handoff_id, end=HandoffEnd.DONE))

    def _num_handed(self, request: Request) -> int:
        parts = self._parts
        if parts is None:
            return handed_tokens(request, None, 1)
        return handed_tokens(request, parts.decoder_replay_tokens, parts.alignment)

    def _plan(self, tokens: Sequence[int], identity: CacheIdentity) -> HandoffPlan:
        return plan_handoff(
            tokens,
            identity,
            block_tokens=self._kv.group.block_tokens,
            window_tokens=self._kv.window_tokens,
        )

    # Giving

    def tell_prompt(self, choice: Choice, report: CacheReport) -> bool:
        """The hit of a giving choice is settled: its taker tells the caller. False: it gives
        nothing, so it tells by itself."""
        giving = self._giving_of(choice)
        if giving is None:
            return False
        self._sender.told_prompt(
            giving.handoff_id, choice.sequence.num_prompt_hit_tokens or 0, report
        )
        return True

    def wrote(self, choice: Choice, num_computed: int) -> None:
        """The first ``num_computed`` tokens have KV in the blocks of ``choice``."""
        giving = self._giving_of(choice)
        if giving is not None:
            table = self._kv.block_table(choice.sequence_id)
            self._sender.ready(giving.handoff_id, table, num_computed)

    def hold(self, choice: Choice) -> bool:
        """All is computed: keep the blocks until they are taken. False: nobody takes them."""
        if self._giving_of(choice) is None:
            return False
        self.holding[choice.sequence_id] = choice
        return True

    def give_way(self, choice: Choice) -> None:
        """It is about to give its blocks back, and computes them again later."""
        giving = self._giving_of(choice)
        if giving is not None:
            self._sender.retract(giving.handoff_id)

    # Taking

    def lead(self, choice: Choice) -> bool:
        """``choice`` is about to wait for blocks. True: it is stranded instead.

        If its prompt comes from elsewhere, its hit is planned with that."""
        taking = self._taking.get(choice.sequence.request.request_id)
        if taking is None or not choice.is_leader:
            return False
        taking.leader = choice
        self._tell(taking)
        if taking.has_failed:
            self.stranded[choice.sequence_id] = choice
            return True
        choice.search.stored, choice.search.is_from_peer = taking.stored, True
        return False

    def takes(self, choice: Choice) -> bool:
        """Whether its prompt comes, or should have come, from another worker."""
        return choice.sequence.request.request_id in self._taking

    def load_of(self, choice: Choice, moves: Sequence[RecordMove]) -> Load | None:
        """Take what lacks into its blocks; None when nothing does, or comes from no peer."""
        taking = self._taking.get(choice.sequence.request.request_id)
        if taking is None or taking.leader is not choice:
            return None
        if moves:
            return self._receiver.take(taking.handoff_id, moves)
        self._receiver.nothing_lacks(taking.handoff_id)
        return None

    # Ending

    def poll(self) -> list[tuple[Choice, str | None]]:
        """Whom the end of a handoff concerns that no choice here ended: givers, with the
        reason if it failed, and leaders of takers where it failed."""
        over: list[tuple[Choice, str | None]] = []
        if self._parts is None:
            return over
        events: list[PromptTold | HandoffReport] = []
        if self._parts.sender is not None:
            events += self._parts.sender.poll()
        if self._parts.receiver is not None:
            events += self._parts.receiver.poll()
        for event in events:
            request_id = self._requests.get(event.handoff_id)
            if isinstance(event, PromptTold):
                if request_id is not None:
                    self._taking[request_id].prompt = event
                    self._tell(self._taking[request_id])
                continue
            self._reports.append(event)
            if request_id is not None:
                over += self._over(request_id, event)
        return over

    def _over(
        self, request_id: RequestId, report: HandoffReport
    ) -> list[tuple[Choice, str | None]]:
        reason = report.reason if report.end is HandoffEnd.FAILED else None
        del self._requests[report.handoff_id]
        giving = self._giving.pop(request_id, None)
        if giving is not None:
            return [(giving.choice, reason)]
        if reason is None:  # its load, if it had one, says so too
            del self._taking[request_id]
            return []
        taking = self._taking[request_id]
        taking.has_failed = True
        return [] if taking.leader is None else [(taking.leader, reason)]

    def take_told(self) -> list[Choice]:
        """Leaders whose prompt's report came from the giving side since the last call."""
        told, self._told = self._told, []
        return told

    def _tell(self, taking: _Taking) -> None:
        """Let the leader tell what is known of the prompt, once there are both."""
        prompt, choice, group = taking.prompt, taking.leader, taking.group
        if prompt is None or choice is None:
            return
        taking.prompt = None
        if not group.is_prompt_counted and choice.reports_early:
            choice.sequence.num_prompt_hit_tokens = prompt.num_hit_tokens
            choice.cache = prompt.cache
            group.is_prompt_counted = choice.reports_prompt = True
            # The giving side counted the others.
            self._kv.count_prompt(0, group.request.num_prompt_tokens - taking.plan.num_tokens)
            self._told.append(choice)

    def take_reports(self) -> tuple[HandoffReport, ...]:
        """Of handoffs that ended since the last call; for the router."""
        reports, self._reports = tuple(self._reports), []
        return reports

    def strand(self, choice: Choice) -> bool:
        """It holds no blocks and is in no queue. False: its prompt comes from nowhere else."""
        if not choice.search.is_from_peer:
            return False
        self.stranded[choice.sequence_id] = choice
        return True

    def unstrand(self, choice: Choice) -> bool:
        """The router's word has come: it ends. False if it was not stranded."""
        return self.stranded.pop(choice.sequence_id, None) is not None

    def end(self, choice: Choice, reason: FinishReason, error: str | None) -> None:
        """``choice`` is about to end, and to give its blocks back: so does its handoff, unless
        it is over or another choice of the request can take it."""
        request_id = choice.sequence.request.request_id
        why = error or f"its sequence ended: {reason}"
        giving = self._giving.pop(request_id, None)
        if giving is not None:
            del self._requests[giving.handoff_id]
            self._sender.abort(giving.handoff_id, why)
            if reason is FinishReason.FAILED:
                self._reports.append(
                    HandoffReport(handoff_id=giving.handoff_id, end=HandoffEnd.FAILED, reason=why)
                )
        taking = self._taking.get(request_id)
        if taking is None or taking.leader not in (choice, None):
            return
        taking.leader = None
        if any(sibling is not choice for sibling in choice.group.siblings):
            return
        del self._taking[request_id]
        if not taking.has_failed:
            del self._requests[taking.handoff_id]
            self._receiver.forget(taking.handoff_id, why)

    def close(self) -> None:
        if self._parts is not None:
            self._parts.close()

    # Inside

    def _giving_of(self, choice: Choice) -> _Giving | None:
        return self._giving.get(choice.sequence.request.request_id)

    @property
    def _sender(self) -> Sender:
        assert self._parts is not None
        assert self._parts.sender is not None
        return self._parts.sender

    @property
    def _receiver(self) -> Receiver:
        assert self._parts is not None
        assert self._parts.receiver is not None
        return self._parts.receiver
