"""Where each sequence of a worker is: which queue, which state, with which blocks.

    siblings -> (leader) -> waiting -> loading -> prefilling -> decoding
                               ^          |           |  |         |
                               +----------+-----------+--+---------+    preempted
    beside them: compiling, looking (``tiering``), holding and stranded (``handover``)

Moves sequences between the places and gives blocks back; plans and computes nothing.
``scheduler`` alone uses it. ``audit`` says whether everybody is in exactly one place.
"""

from __future__ import annotations

from collections.abc import Callable

from headwater.core.blocks import CacheIdentity
from headwater.core.errors import AuditError
from headwater.core.request import FinishReason, RequestId, SampledToken, SequenceOutput
from headwater.core.sequence import Ended, LoadEnded, Preempted
from headwater.core.step import SequenceId
from headwater.kv.manager import KVManager
from headwater.worker.choice import Choice, ChoiceGroup
from headwater.worker.handover import Handover
from headwater.worker.tiering import Tiering
from headwater.worker.waiting import WaitingQueue


class Places:
    """All unfinished sequences. One per scheduler."""

    def __init__(
        self,
        kv: KVManager,
        tiering: Tiering,
        handover: Handover,
        identity_of: Callable[[str], CacheIdentity],
    ) -> None:
        self._kv = kv
        self._tiering = tiering
        self._handover = handover
        self._identity_of = identity_of
        self.groups: dict[RequestId, ChoiceGroup] = {}
        self.choices: dict[SequenceId, Choice] = {}  # in any place
        self.compiling: dict[RequestId, ChoiceGroup] = {}  # all their choices are siblings
        self.waiting = WaitingQueue()
        self.loading: dict[SequenceId, Choice] = {}
        self.prefilling: dict[SequenceId, Choice] = {}
        self.decoding: dict[SequenceId, Choice] = {}

    @property
    def is_awaiting(self) -> bool:
        """Whether somebody waits for what comes by itself."""
        is_held_up = self.compiling or self.loading or self._handover.holding
        return bool(is_held_up or self._tiering.num_looking)

    @property
    def holders(self) -> dict[SequenceId, Choice]:
        """Those that hold blocks."""
        return self.decoding | self.loading | self.prefilling | self._handover.holding

    @property
    def num_running(self) -> int:
        """How many those are."""
        num_holding = len(self._handover.holding)
        return len(self.loading) + len(self.prefilling) + len(self.decoding) + num_holding

    def add(self, group: ChoiceGroup) -> None:
        """A request that came: its choices are siblings that nobody leads yet."""
        self.groups[group.request.request_id] = group
        self.choices.update((choice.sequence_id, choice) for choice in group.siblings)

    def appoint_leader(self, group: ChoiceGroup) -> None:
        leader = group.siblings.popleft()
        leader.is_leader = True
        self._enter(leader)

    def release_siblings(self, group: ChoiceGroup) -> None:
        while group.siblings:
            self.queue(group.siblings.popleft())

    def _enter(self, choice: Choice) -> None:
        """To the queue, by way of a look at the tiers where that may help."""
        if self._handover.lead(choice):
            return
        identity = self._identity_of(choice.sequence.request.tenant)
        if not self._tiering.enter(choice, identity):
            self.queue(choice)

    def strand(self, choice: Choice) -> None:
        """Its prompt does not come: without blocks, it waits for the router's word."""
        if self._give_blocks_back(choice):
            choice.sequence.advance(LoadEnded())
        elif choice.sequence_id not in self._handover.stranded:
            self.waiting.remove(choice.order, choice.sequence_id)
        self._handover.strand(choice)

    def queue(self, choice: Choice) -> None:
        self.waiting.add(choice.order, choice.sequence_id)

    def _give_blocks_back(self, choice: Choice) -> bool:
        """Whatever blocks ``choice`` holds; False if it holds none."""
        if self.loading.pop(choice.sequence_id, None) is not None:
            self._tiering.give_up_load(choice)
        elif any(
            choices.pop(choice.sequence_id, None) is not None
            for choices in (self.prefilling, self.decoding, self._handover.holding)
        ):
            self._kv.free(choice.sequence_id)
        else:
            return False
        return True

    def preempt(self, choice: Choice) -> None:
        sequence = choice.sequence
        self._handover.give_way(choice)
        choice.give_blocks_back()
        self._give_blocks_back(choice)
        sequence.advance(Preempted())
        self._enter(choice)

    def finish(
        self,
        choice: Choice,
        reason: FinishReason,
        *,
        tokens: tuple[SampledToken, ...] = (),
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        """End ``choice`` in whatever state it is, and give back its blocks."""
        sequence, group = choice.sequence, choice.group
        holders = (self.prefilling, self.decoding, self._handover.holding)
        if any(choice.sequence_id in choices for choices in holders):
            self._tiering.finish(choice, reason)
        self._handover.end(choice, reason, error)
        if choice in group.siblings:
            group.siblings.remove(choice)
        elif not (
            self._give_blocks_back(choice)
            or self._tiering.forget(choice)
            or self._handover.unstrand(choice)
        ):
            self.waiting.remove(choice.order, choice.sequence_id)
        sequence.advance(Ended(reason))
        del self.choices[choice.sequence_id]
        del group.choices[sequence.index]
        if not group.choices:
            del self.groups[sequence.request.request_id]
            self.compiling.pop(sequence.request.request_id, None)
            if group.compiling is not None:
                group.compiling.cancel()  # has no effect once it runs
        elif choice.is_leader and group.siblings:  # it ended before the prompt was published
            self.appoint_leader(group)
        return choice.output(tokens, finish=reason, stop_token_id=stop_token_id, error=error)

    def audit(self) -> None:
        """Raises AuditError if blocks or queues do not add up. O(blocks): when idle, in tests."""
        self._kv.check_integrity()
        siblings = sum(len(group.siblings) for group in self.groups.values())
        placed = siblings + self._tiering.num_looking + len(self.waiting) + self.num_running
        placed += len(self._handover.stranded)
        if placed != len(self.choices):
            raise AuditError(f"{len(self.choices)} sequences, {placed} in queues")
        if self._tiering.num_loading != len(self.loading):
            raise AuditError(f"{len(self.loading)} sequences load, which is not what tiering says")
        num_held = self._kv.counters().num_held_blocks
        if not self.choices and not self._tiering.is_keeping and num_held:
            raise AuditError(f"no sequences, but {num_held} blocks are held")
