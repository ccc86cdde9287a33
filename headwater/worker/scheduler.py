"""What one worker computes next: a step is planned, run by the engine, applied.

    submit -> (compiling) -> waiting --admit--> prefilling --last chunk--> decoding -> finished
                                ^                   |                         |
                                +------preempt------+-------------------------+

Asks ``prefill`` and ``decode`` for the policy and ``kv`` for the blocks, and
carries both out; knows no tensors, clocks, sockets or text. The worker's loop
calls it, from one thread. Planning is O(running sequences) besides probing
the prompts that start.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from headwater.core.blocks import CacheIdentity, blocks_for
from headwater.core.control import WorkerLoad
from headwater.core.errors import AuditError, EngineFault, InvalidChange, InvalidRequest
from headwater.core.request import FinishReason, Request, RequestId, SampledToken, SequenceOutput
from headwater.core.sequence import Admitted, Committed, Computed, Ended, Preempted, Prefilling
from headwater.core.step import RowResult, SequenceId, StepPlan, StepResult, StepRow
from headwater.decode.plan import RunningCandidate, plan_decode
from headwater.kv.manager import KVManager
from headwater.prefill.plan import (
    PrefillCandidate,
    PrefillChunk,
    PrefillRoom,
    ServiceOrder,
    WaitingCandidate,
    plan_prefill,
)
from headwater.worker.choice import Choice, ChoiceGroup, check_result
from headwater.worker.compiling import CompileQueue
from headwater.worker.limits import SchedulerConfig, check_fits


class Scheduler:
    """All sequences of one worker. One step at a time: plan, then apply or fail."""

    def __init__(
        self,
        kv: KVManager,
        config: SchedulerConfig,
        identity_of: Callable[[str], CacheIdentity],
        compile_queue: CompileQueue | None = None,
    ) -> None:
        """``identity_of(tenant)`` names what the KV of that tenant's tokens depends on.
        Without ``compile_queue``, constraints are refused."""
        self._kv = kv
        self._config = config
        self._identity_of = identity_of
        self._compile_queue = compile_queue
        self._groups: dict[RequestId, ChoiceGroup] = {}
        self._choices: dict[SequenceId, Choice] = {}  # unfinished, in any state
        self._compiling: dict[RequestId, ChoiceGroup] = {}  # all their choices are siblings
        self._waiting: list[tuple[ServiceOrder, SequenceId]] = []  # sorted
        self._prefilling: dict[SequenceId, Choice] = {}
        self._decoding: dict[SequenceId, Choice] = {}
        self._in_flight: StepPlan | None = None
        self._in_flight_ids: frozenset[SequenceId] = frozenset()
        self._num_submitted = 0  # sequences; the next id and arrival
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._num_output_tokens = 0

    # The door

    @property
    def has_work(self) -> bool:
        """Whether there is something to plan."""
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def is_compiling(self) -> bool:
        """Whether somebody waits for a constraint: ask ``take_compiled`` again soon."""
        return bool(self._compiling)

    def submit(self, request: Request) -> None:
        """Queue all choices. Raises PromptTooLong or InvalidRequest if one could never finish."""
        if request.request_id in self._groups:
            raise InvalidRequest("this request id is in use", code="duplicate_request_id")
        check_fits(
            request,
            context_tokens=self._config.context_tokens,
            pool_tokens=self._kv.group.num_tokens,
        )
        group = ChoiceGroup(request)
        if request.constraint is not None:
            if self._compile_queue is None:
                raise InvalidRequest("this worker cannot enforce output constraints")
            group.compiling = self._compile_queue.start(request.constraint)
        self._groups[request.request_id] = group
        for index in range(request.num_choices):
            choice = Choice.of(
                group,
                index,
                sequence_id=SequenceId(self._num_submitted),
                arrival=self._num_submitted,
                context_tokens=self._config.context_tokens,
            )
            self._num_submitted += 1
            self._choices[choice.sequence_id] = choice
            group.choices[index] = choice
            group.siblings.append(choice)
        if group.compiling is None:
            self._appoint_leader(group)
        else:
            self._compiling[request.request_id] = group

    def take_compiled(self) -> list[SequenceOutput]:
        """Queue those whose constraint is ready; the outputs of those that it ended."""
        outputs = []
        for group in list(self._compiling.values()):
            if group.compiling is None or not group.compiling.done():
                continue
            del self._compiling[group.request.request_id]
            try:
                new_matcher = group.compiling.result()
            except InvalidRequest as error:
                for choice in list(group.choices.values()):
                    outputs.append(self._finish(choice, FinishReason.FAILED, error=str(error)))
                continue
            for choice in list(group.choices.values()):
                wrong = choice.begin_matching(new_matcher())
                if wrong is not None:
                    outputs.append(self._finish(choice, FinishReason.FAILED, error=wrong))
            if group.siblings:
                self._appoint_leader(group)
        return outputs

    def abort(self, request_id: RequestId, index: int | None = None) -> list[SequenceOutput]:
        """End one choice, or all. Gives the outputs of those that ended now; one in a
        running step ends when that step is applied. Unknown ids give nothing."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        outputs = []
        for choice in [c for i, c in group.choices.items() if index is None or i == index]:
            if choice.sequence_id in self._in_flight_ids:
                choice.abort_asked = True
            else:
                outputs.append(self._finish(choice, FinishReason.ABORTED))
        return outputs

    def plan(self) -> StepPlan | None:
        """The next step, with its blocks taken; None when there is nothing to compute."""
        if self._in_flight is not None:
            raise InvalidChange("plan: the last step was neither applied nor failed")
        rows = self._plan_decode()
        rows += self._plan_prefill(num_decode_rows=len(rows))
        if not rows:
            if self.has_work:
                raise AuditError(f"{len(self._choices)} sequences, but no step can be planned")
            return None
        self._in_flight = StepPlan(tuple(rows))
        self._in_flight_ids = frozenset(row.sequence_id for row in rows)
        return self._in_flight

    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Commit what the step computed. Raises EngineFault, with nothing changed, if
        ``result`` does not answer ``plan``; the step can then still be failed."""
        if len(result.rows) != len(plan.rows):
            raise EngineFault(f"{len(plan.rows)} rows were planned, {len(result.rows)} came back")
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            check_result(row, row_result)
        self._land(plan)
        self._num_steps += 1
        outputs = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            output = self._apply_row(self._choices[row.sequence_id], row, row_result)
            if output is not None:
                outputs.append(output)
        return outputs

    def fail(self, plan: StepPlan, error: EngineFault) -> list[SequenceOutput]:
        """The step could not be run: its sequences end and give back their blocks, whose
        unpublished KV nobody will read. All others go on."""
        self._land(plan)
        outputs = []
        for row in plan.rows:
            choice = self._choices[row.sequence_id]
            if choice.abort_asked:
                outputs.append(self._finish(choice, FinishReason.ABORTED))
            else:
                outputs.append(self._finish(choice, FinishReason.FAILED, error=str(error)))
        return outputs

    def load(self) -> WorkerLoad:
        kv = self._kv.counters()
        num_running = len(self._prefilling) + len(self._decoding)
        return WorkerLoad(
            num_waiting=len(self._choices) - num_running,
            num_prefilling=len(self._prefilling),
            num_decoding=len(self._decoding),
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.num_cached_blocks,
            num_held_blocks=kv.num_held_blocks,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_hit_tokens=kv.num_hit_tokens,
            num_miss_tokens=kv.num_miss_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_grammars=(
                0 if self._compile_queue is None else self._compile_queue.num_cached_grammars
            ),
        )

    def audit(self) -> None:
        """Raises AuditError if blocks or queues do not add up. O(blocks): when idle, in tests."""
        self._kv.check_integrity()
        siblings = sum(len(group.siblings) for group in self._groups.values())
        placed = len(self._waiting) + len(self._prefilling) + len(self._decoding) + siblings
        if placed != len(self._choices):
            raise AuditError(f"{len(self._choices)} sequences, {placed} in queues")
        num_held = self._kv.counters().num_held_blocks
        if not self._choices and num_held:
            raise AuditError(f"no sequences, but {num_held} blocks are held")

    # Plan

    def _plan_decode(self) -> list[StepRow]:
        kv, block_tokens = self._kv, self._kv.group.block_tokens
        running = [
            RunningCandidate(
                sequence_id,
                choice.sequence.request.priority,
                choice.sequence.arrival,
                blocks_for(choice.sequence.num_tokens, block_tokens)
                - len(kv.block_table(sequence_id)),
                True,
            )
            for sequence_id, choice in self._decoding.items()
        ]
        running += [
            RunningCandidate(i, c.sequence.request.priority, c.sequence.arrival, 0, False)
            for i, c in self._prefilling.items()
        ]
        plan = plan_decode(running, kv.num_available_blocks, kv.num_private_blocks)
        for sequence_id in plan.preempted:
            self._preempt(self._choices[sequence_id])
        rows = []
        for sequence_id in plan.rows:
            choice = self._decoding[sequence_id]
            if not kv.grow(sequence_id, choice.sequence.num_tokens):
                raise AuditError(f"sequence {sequence_id} was planned without a block to grow into")
            rows.append(choice.decode_row(kv.block_table(sequence_id)))
        return rows

    def _plan_prefill(self, *, num_decode_rows: int) -> list[StepRow]:
        config = self._config
        budget_tokens = config.max_step_tokens - num_decode_rows
        if num_decode_rows:
            budget_tokens = min(budget_tokens, config.max_mixed_prefill_tokens)
        running = [
            PrefillCandidate(i, c.order, c.sequence.num_tokens - c.sequence.num_computed)
            for i, c in self._prefilling.items()
        ]
        room = PrefillRoom(
            budget_tokens=budget_tokens,
            num_available_blocks=self._kv.num_available_blocks,
            num_running=len(self._prefilling) + len(self._decoding),
            max_running_sequences=config.max_running_sequences,
            reserve_blocks_per_sequence=config.reserve_blocks_per_sequence,
        )
        plan = plan_prefill(running, self._probe_waiting(), room)
        for sequence_id in plan.admitted:
            # An admission may have evicted what the next one would have hit; it then
            # needs more than planned, and waits for the next step.
            if not self._admit(self._choices[sequence_id]):
                break
        return [self._chunk_row(c) for c in plan.chunks if c.sequence_id in self._prefilling]

    def _probe_waiting(self) -> Iterator[WaitingCandidate]:
        """Looks at the waiting sequences in service order, as far as the plan reads."""
        for order, sequence_id in self._waiting:
            choice = self._choices[sequence_id]
            sequence = choice.sequence
            choice.probe = self._kv.probe(
                sequence.tokens,
                self._identity_of(sequence.request.tenant),
                max_hit_tokens=choice.max_hit_tokens,
                earlier=choice.probe,
            )
            yield WaitingCandidate(
                sequence_id,
                order,
                sequence.num_tokens - choice.probe.num_hit_tokens,
                self._kv.num_blocks_to_admit(choice.probe, sequence.num_tokens),
            )

    def _admit(self, choice: Choice) -> bool:
        sequence, group = choice.sequence, choice.group
        if choice.probe is None:
            raise AuditError(f"sequence {choice.sequence_id} was planned without a probe")
        is_first = not group.is_prompt_counted
        lease = self._kv.admit(
            choice.sequence_id, choice.probe, sequence.num_tokens, count_prompt=is_first
        )
        if lease is None:
            return False
        if is_first:
            group.is_prompt_counted = choice.reports_prompt = True
        self._num_recomputed_tokens += max(choice.num_computed_before - lease.num_hit_tokens, 0)
        self._leave_queue(choice)
        choice.probe = None
        sequence.advance(Admitted(lease.num_hit_tokens))
        self._prefilling[choice.sequence_id] = choice
        return True

    def _chunk_row(self, chunk: PrefillChunk) -> StepRow:
        choice = self._prefilling[chunk.sequence_id]
        return choice.chunk_row(chunk.num_tokens, self._kv.block_table(chunk.sequence_id))

    def _preempt(self, choice: Choice) -> None:
        sequence = choice.sequence
        choice.num_computed_before = sequence.num_computed
        self._kv.free(choice.sequence_id)
        self._prefilling.pop(choice.sequence_id, None)
        self._decoding.pop(choice.sequence_id, None)
        sequence.advance(Preempted())
        insort(self._waiting, (choice.order, choice.sequence_id))
        self._num_preemptions += 1

    # Apply

    def _land(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise InvalidChange("this is not the step that was planned last")
        self._in_flight = None
        self._in_flight_ids = frozenset()

    def _apply_row(self, choice: Choice, row: StepRow, result: RowResult) -> SequenceOutput | None:
        sequence = choice.sequence
        if result.error is not None:  # before anything of it is published
            reason = FinishReason.ABORTED if choice.abort_asked else FinishReason.FAILED
            return self._finish(choice, reason, error=result.error)
        if isinstance(sequence.state, Prefilling):
            sequence.advance(Computed(row.end))
            choice.keep_prompt_scores(row, result)
        block_tokens = self._kv.group.block_tokens
        if row.end // block_tokens > row.start // block_tokens:
            self._kv.publish(choice.sequence_id, sequence.tokens, row.end)
        if (
            choice.is_leader
            and choice.group.siblings
            and row.end >= sequence.request.num_prompt_tokens
        ):
            self._release_siblings(choice.group)
        if choice.abort_asked:
            return self._finish(choice, FinishReason.ABORTED)
        if result.token is not None:
            return self._commit(choice, result.token)
        if sequence.num_computed == sequence.num_tokens:  # nothing to generate was asked
            return self._finish(choice, FinishReason.LENGTH)
        return None

    def _commit(self, choice: Choice, token: SampledToken) -> SequenceOutput:
        sequence, stop = choice.sequence, choice.stop
        if stop.is_end(token.token_id, sequence.num_output_tokens):
            return self._finish(choice, FinishReason.STOP, stop_token_id=token.token_id)
        sequence.advance(Committed(token.token_id))
        self._num_output_tokens += 1
        wrong = choice.match(token.token_id)
        if wrong is not None:
            return self._finish(choice, FinishReason.FAILED, tokens=(token,), error=wrong)
        if choice.is_matched:  # no step for an end id that would say nothing new
            return self._finish(choice, FinishReason.STOP, tokens=(token,))
        if stop.is_full(sequence.num_output_tokens):
            return self._finish(choice, FinishReason.LENGTH, tokens=(token,))
        if self._prefilling.pop(choice.sequence_id, None) is not None:
            self._decoding[choice.sequence_id] = choice
        return SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            tokens=(token,),
            prompt=choice.take_prompt_report(),
        )

    def _finish(
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
        if choice.sequence_id in self._prefilling or choice.sequence_id in self._decoding:
            self._kv.free(choice.sequence_id)
            self._prefilling.pop(choice.sequence_id, None)
            self._decoding.pop(choice.sequence_id, None)
        elif choice in group.siblings:
            group.siblings.remove(choice)
        else:
            self._leave_queue(choice)
        sequence.advance(Ended(reason))
        del self._choices[choice.sequence_id]
        del group.choices[sequence.index]
        if not group.choices:
            del self._groups[sequence.request.request_id]
            self._compiling.pop(sequence.request.request_id, None)
            if group.compiling is not None:
                group.compiling.cancel()  # has no effect once it runs
        elif choice.is_leader and group.siblings:  # it ended before the prompt was published
            self._appoint_leader(group)
        return SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            tokens=tokens,
            prompt=choice.take_prompt_report(),
            finish=reason,
            stop_token_id=stop_token_id,
            error=error,
        )

    # Queues

    def _appoint_leader(self, group: ChoiceGroup) -> None:
        leader = group.siblings.popleft()
        leader.is_leader = True
        insort(self._waiting, (leader.order, leader.sequence_id))

    def _release_siblings(self, group: ChoiceGroup) -> None:
        while group.siblings:
            sibling = group.siblings.popleft()
            insort(self._waiting, (sibling.order, sibling.sequence_id))

    def _leave_queue(self, choice: Choice) -> None:
        place = bisect_left(self._waiting, (choice.order, choice.sequence_id))
        if place == len(self._waiting) or self._waiting[place][1] != choice.sequence_id:
            raise AuditError(f"sequence {choice.sequence_id} is not in the queue")
        del self._waiting[place]
