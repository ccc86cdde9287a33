"""What one worker computes next: a step is planned, run by the engine, applied.

    submit -> (compiling) -> (looking) -> waiting --admit--> prefilling --last chunk--> decoding
                                           ^ ^ |                ^ |                        |
                                           | | +--> loading ----+ |                        |
                                           | +--dropped-+         |                        |
                                           +------preempt---------+------------------------+

A prompt that is computed for another worker (``handover``) ends when that one took its KV.
Asks ``prefill`` and ``decode`` for the policy, ``kv`` for the blocks and ``tiering``
for what is kept elsewhere, and carries all out; knows no tensors, clocks, sockets or
text. The worker's loop calls it, from one thread. Planning is O(running sequences)
besides probing the prompts that start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headwater.core.blocks import CacheIdentity
from headwater.core.control import WorkerLoad
from headwater.core.errors import AuditError, EngineFault, InvalidChange, InvalidRequest
from headwater.core.fleet import HandoffRef, HandoffReport, KVEvents, Phase, Resume
from headwater.core.request import (
    FinishReason,
    Request,
    RequestId,
    SampledToken,
    SequenceOutput,
    late_start,
)
from headwater.core.sequence import (
    Admitted,
    Committed,
    Computed,
    LoadEnded,
    Prefilling,
    Reserved,
)
from headwater.core.step import RowResult, SequenceId, StepPlan, StepResult, StepRow
from headwater.decode.plan import plan_decode
from headwater.kv.hit_plan import HitPlan
from headwater.kv.manager import KVManager, Lease, StalePlan
from headwater.prefill.plan import PrefillRoom, WaitingCandidate, plan_prefill
from headwater.worker.choice import Choice, ChoiceGroup, check_result
from headwater.worker.compiling import CompileQueue
from headwater.worker.cost_book import CostBook
from headwater.worker.counts import Counts
from headwater.worker.handover import Handover, HandoverParts
from headwater.worker.limits import SchedulerConfig, check_fits
from headwater.worker.places import Places
from headwater.worker.tiering import Tiering, TierParts


class Scheduler:
    """All sequences of one worker. One step at a time: plan, then apply or fail."""

    def __init__(
        self,
        kv: KVManager,
        config: SchedulerConfig,
        identity_of: Callable[[str], CacheIdentity],
        compile_queue: CompileQueue | None = None,
        tier_parts: TierParts | None = None,
        cost_book: CostBook | None = None,
        handover_parts: HandoverParts | None = None,
    ) -> None:
        """``identity_of(tenant)`` names what the KV of that tenant's tokens depends on.
        Without ``compile_queue``, constraints are refused; without ``tier_parts``, hits
        are whole blocks of the device; without ``cost_book``, only tokens bound a step;
        without ``handover_parts``, it does only whole requests."""
        self._kv = kv
        self._tiering = Tiering(kv, tier_parts, config.decoder_replay_tokens)
        self._handover = Handover(kv, handover_parts)
        self._config = config
        self._identity_of = identity_of
        self._compile_queue = compile_queue
        self._places = Places(kv, self._tiering, self._handover, identity_of)
        self._in_flight: StepPlan | None = None
        self._in_flight_ids: frozenset[SequenceId] = frozenset()
        self._settled: list[Choice] = []  # since reports were taken last
        self._num_submitted = 0  # sequences; the next id and arrival
        self._counts = Counts()
        self._cost_book = cost_book

    # The door

    @property
    def has_work(self) -> bool:
        """Whether there is something to plan."""
        return bool(self._places.waiting or self._places.prefilling or self._places.decoding)

    @property
    def is_awaiting(self) -> bool:
        """Whether somebody waits for what comes by itself: ask ``take_ready`` again soon."""
        return self._places.is_awaiting

    @property
    def is_keeping(self) -> bool:
        """Whether KV is still on its way out: ask ``take_ready`` again, nobody waits for it."""
        return self._tiering.is_keeping

    def submit(
        self,
        request: Request,
        *,
        phase: Phase = Phase.WHOLE,
        handoff: HandoffRef | None = None,
        resume: Sequence[Resume] = (),
    ) -> None:
        """Queue all choices, or those of ``resume``. Raises PromptTooLong or InvalidRequest
        if one could never finish, or if this worker has no part in ``phase``."""
        if request.request_id in self._places.groups:
            raise InvalidRequest("this request id is in use", code="duplicate_request_id")
        self._handover.check(phase)
        # Of the whole prompt as it was asked for, whatever part of it this worker computes.
        first_late = late_start(request, self._config.decoder_replay_tokens)
        if phase is Phase.PREFILL:
            request, resume = self._handover.giving_request(request), ()
            if request.num_prompt_tokens < self._kv.group.block_tokens and handoff is not None:
                self._handover.report_nothing(handoff)
                return
        check_fits(
            request,
            context_tokens=self._config.context_tokens,
            pool_tokens=self._kv.group.num_tokens,
        )
        group = ChoiceGroup.of(
            request,
            resume,
            first_number=self._num_submitted,
            context_tokens=self._config.context_tokens,
            late_start=first_late,
        )
        if request.constraint is not None and self._compile_queue is None:
            raise InvalidRequest("this worker cannot enforce output constraints")
        identity = self._identity_of(request.tenant)
        if phase is Phase.PREFILL:
            self._handover.give(handoff, group.siblings[0], identity)
        elif phase is Phase.DECODE:
            self._handover.expect(handoff, group, identity)
        self._places.add(group)
        self._num_submitted += len(group.siblings)
        if request.constraint is not None and self._compile_queue is not None:
            group.compiling = self._compile_queue.start(request.constraint)
            self._places.compiling[request.request_id] = group
        else:
            self._places.appoint_leader(group)

    def take_ready(self) -> list[SequenceOutput]:
        """Go on with all that waited for a constraint, a look, a load or a handoff that is there
        now. Gives the outputs of those whose constraint or handoff ended them."""
        outputs = self._take_compiled()
        for choice in self._tiering.take_looked():
            self._places.queue(choice)
        all_ended, all_over = self._tiering.take_ended(), self._handover.poll()
        self._settled += self._handover.take_told()
        for ended in all_ended:
            choice = self._places.loading.pop(ended.choice.sequence_id)
            if ended.failure is None:
                self._settle(choice, ended.lease, ended.hit)
            else:
                choice.sequence.advance(LoadEnded())
                if not self._handover.strand(choice):
                    self._places.queue(choice)
        for choice, reason in all_over:
            if self._handover.takes(choice):
                self._places.strand(choice)
            elif reason is None:
                outputs.append(self._places.finish(choice, FinishReason.HANDED_OVER))
            else:
                outputs.append(self._places.finish(choice, FinishReason.FAILED, error=reason))
        self._tiering.pump()
        return outputs

    def take_reports(self) -> list[SequenceOutput]:
        """Prompt reports of those that ``plan`` or ``take_ready`` let begin. They come before
        the first chunk is computed, so that a caller's header can tell the hit."""
        settled, self._settled = self._settled, []
        return [choice.output() for choice in settled if choice.reports_prompt]

    def take_handoffs(self) -> tuple[HandoffReport, ...]:
        """Of handoffs that ended since the last call; their blocks are given back."""
        return self._handover.take_reports()

    def take_kv_events(self) -> KVEvents | None:
        """What can be hit now and could not at the last call, and the other way round."""
        return self._kv.take_events()

    def close(self) -> None:
        """Nothing more will be planned: let go of peers and tiers, in bounded time."""
        self._handover.close()
        self._tiering.close()

    def _take_compiled(self) -> list[SequenceOutput]:
        outputs = []
        for group in list(self._places.compiling.values()):
            if group.compiling is None or not group.compiling.done():
                continue
            del self._places.compiling[group.request.request_id]
            try:
                new_matcher = group.compiling.result()
            except InvalidRequest as error:
                for choice in list(group.choices.values()):
                    outputs.append(
                        self._places.finish(choice, FinishReason.FAILED, error=str(error))
                    )
                continue
            for choice in list(group.choices.values()):
                wrong = choice.begin_matching(new_matcher())
                if wrong is not None:
                    outputs.append(self._places.finish(choice, FinishReason.FAILED, error=wrong))
            if group.siblings:
                self._places.appoint_leader(group)
        return outputs

    def abort(self, request_id: RequestId, index: int | None = None) -> list[SequenceOutput]:
        """End one choice, or all. Gives the outputs of those that ended now; one in a
        running step ends when that step is applied. Unknown ids give nothing."""
        group = self._places.groups.get(request_id)
        if group is None:
            return []
        outputs = []
        for choice in [c for i, c in group.choices.items() if index is None or i == index]:
            if choice.sequence_id in self._in_flight_ids:
                choice.abort_asked = True
            else:
                outputs.append(self._places.finish(choice, FinishReason.ABORTED))
        return outputs

    def plan(self) -> StepPlan | None:
        """The next step, with its blocks taken; None when there is nothing to compute."""
        if self._in_flight is not None:
            raise InvalidChange("plan: the last step was neither applied nor failed")
        rows = self._plan_decode()
        rows += self._plan_prefill(rows)
        if not rows:
            # Blocks on their way out or in come back by themselves; else nothing ever would.
            if self.has_work and not (self.is_awaiting or self.is_keeping):
                raise AuditError(
                    f"{len(self._places.choices)} sequences, but no step can be planned"
                )
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
        self._counts.num_steps += 1
        self._tiering.pace.note(plan, result)
        outputs = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            output = self._apply_row(self._places.choices[row.sequence_id], row, row_result)
            if output is not None:
                outputs.append(output)
        return outputs

    def fail(self, plan: StepPlan, error: EngineFault) -> list[SequenceOutput]:
        """The step could not be run: its sequences end and give back their blocks, whose
        unpublished KV nobody will read. All others go on."""
        self._land(plan)
        return [self._fail(self._places.choices[row.sequence_id], str(error)) for row in plan.rows]

    def load(self) -> WorkerLoad:
        load = self._counts.load(
            self._kv.counters(),
            choices=self._places.choices,
            decoding=self._places.decoding,
            num_loading=len(self._places.loading),
            num_prefilling=len(self._places.prefilling),
            num_cached_grammars=(
                0 if self._compile_queue is None else self._compile_queue.num_cached_grammars
            ),
        )
        load = self._tiering.add_to(load)
        return load if self._cost_book is None else self._cost_book.add_to(load)

    def audit(self) -> None:
        """Raises AuditError if blocks or places do not add up. O(blocks): when idle, in tests."""
        self._places.audit()

    # Plan

    def _plan_decode(self) -> list[StepRow]:
        kv, block_tokens = self._kv, self._kv.group.block_tokens
        running = [
            choice.running_candidate(len(kv.block_table(sequence_id)), block_tokens)
            for sequence_id, choice in self._places.holders.items()
        ]
        num_soon = self._tiering.num_soon_blocks
        plan = plan_decode(running, kv.num_available_blocks + num_soon, kv.num_private_blocks)
        for sequence_id in plan.preempted:
            self._places.preempt(self._places.choices[sequence_id])
        self._counts.num_preemptions += len(plan.preempted)
        rows = []
        for sequence_id in plan.rows:
            choice = self._places.decoding[sequence_id]
            if not kv.grow(sequence_id, choice.sequence.num_tokens):
                if self.is_keeping:
                    continue  # it sits out until they are here
                raise AuditError(f"sequence {sequence_id} was planned without a block to grow into")
            rows.append(choice.decode_row(kv.block_table(sequence_id)))
        return rows

    def _plan_prefill(self, decode_rows: list[StepRow]) -> list[StepRow]:
        config, kv = self._config, self._kv
        is_alone = len(self._places.choices) == 1
        time = None
        if self._cost_book is not None:
            time = self._cost_book.time_left(decode_rows, is_alone=is_alone)
        budget_tokens = config.max_step_tokens - len(decode_rows)
        if decode_rows and time is None:  # else its seconds bound the wait of those that decode
            budget_tokens = min(budget_tokens, config.max_mixed_prefill_tokens)
        room = PrefillRoom(
            budget_tokens=budget_tokens,
            num_available_blocks=kv.num_available_blocks,
            num_running=self._places.num_running,
            max_running_sequences=config.max_running_sequences,
            reserve_blocks_per_sequence=config.reserve_blocks_per_sequence,
            time=time,
            turn=self._counts.num_prompt_steps,
        )
        running = [choice.prefill_candidate() for choice in self._places.prefilling.values()]
        plan = plan_prefill(running, self._probe_waiting(), room)
        self._counts.num_prompt_steps += bool(plan.chunks)
        for sequence_id in plan.admitted:
            # An admission may have evicted what the next one would have hit; it then
            # needs more than planned, and waits for the next step.
            if not self._admit(self._places.choices[sequence_id]):
                break
        return [
            self._places.prefilling[c.sequence_id].chunk_row(
                c.num_tokens, kv.block_table(c.sequence_id)
            )
            for c in plan.chunks
            if c.sequence_id in self._places.prefilling
        ]

    def _probe_waiting(self) -> Iterator[WaitingCandidate]:
        """Looks at the waiting sequences in service order, as far as the plan reads."""
        for sequence_id in self._places.waiting:
            choice = self._places.choices[sequence_id]
            sequence = choice.sequence
            identity = self._identity_of(sequence.request.tenant)
            if self._tiering.look_again(choice, identity):
                self._places.waiting.remove(choice.order, sequence_id)
                continue
            hit = self._tiering.plan_hit(choice, identity)
            yield WaitingCandidate(
                sequence_id,
                choice.order,
                sequence.num_tokens - hit.computed_from,
                self._kv.num_blocks_to_admit(hit, sequence.num_tokens),
                must_load=hit.num_load_bytes > 0,
                start=hit.computed_from,
                late_start=choice.group.late_start,
            )

    def _admit(self, choice: Choice) -> bool:
        hit = choice.hit
        if hit is None:
            raise AuditError(f"sequence {choice.sequence_id} was planned without a look")
        lease = self._kv.admit(choice.sequence_id, hit, choice.sequence.num_tokens)
        if lease is None or isinstance(lease, StalePlan):
            return False
        self._places.waiting.remove(choice.order, choice.sequence_id)
        load = self._handover.load_of(choice, lease.loads)
        if self._tiering.begin(choice, lease, hit, load):
            choice.sequence.advance(Reserved())
            self._places.loading[choice.sequence_id] = choice
        else:
            self._settle(choice, lease, hit)
        return True

    def _settle(self, choice: Choice, lease: Lease, hit: HitPlan) -> None:
        """The hit is in its blocks: what is left is computed from the next step on."""
        sequence, group = choice.sequence, choice.group
        is_first = not group.is_prompt_counted
        report = self._tiering.settle(choice, hit)
        choice.take_lease(lease)
        self._counts.num_recomputed_tokens += max(
            choice.num_computed_before - lease.num_hit_tokens, 0
        )
        sequence.advance(Admitted(lease.num_hit_tokens, lease.num_replayed_tokens))
        self._places.prefilling[choice.sequence_id] = choice
        if is_first:
            choice.cache = report
            group.is_prompt_counted = True
            choice.reports_prompt = not self._handover.tell_prompt(choice, report)
            if choice.reports_prompt and choice.reports_early:
                self._settled.append(choice)
        self._handover.wrote(choice, sequence.num_computed)

    # Apply

    def _land(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise InvalidChange("this is not the step that was planned last")
        self._in_flight = None
        self._in_flight_ids = frozenset()

    def _apply_row(self, choice: Choice, row: StepRow, result: RowResult) -> SequenceOutput | None:
        sequence = choice.sequence
        if result.error is not None:  # before anything of it is published
            return self._fail(choice, result.error)
        if isinstance(sequence.state, Prefilling):
            sequence.advance(Computed(row.end))
            choice.keep_prompt_scores(row, result)
        choice.num_written = row.end
        self._tiering.wrote(choice, row.start)
        self._handover.wrote(choice, row.end)
        if (
            choice.is_leader
            and choice.group.siblings
            and row.end >= sequence.request.num_prompt_tokens
        ):
            self._places.release_siblings(choice.group)
        if choice.abort_asked:
            return self._places.finish(choice, FinishReason.ABORTED)
        if result.token is not None:
            return self._commit(choice, result.token)
        if sequence.num_computed < sequence.num_tokens:
            return None
        if self._handover.hold(choice):
            del self._places.prefilling[choice.sequence_id]
            return None
        return self._places.finish(choice, FinishReason.LENGTH)  # nothing to generate was asked

    def _commit(self, choice: Choice, token: SampledToken) -> SequenceOutput:
        sequence, stop = choice.sequence, choice.stop
        if stop.is_end(token.token_id, sequence.num_output_tokens):
            return self._places.finish(choice, FinishReason.STOP, stop_token_id=token.token_id)
        sequence.advance(Committed(token.token_id))
        self._counts.num_output_tokens += 1
        wrong = choice.match(token.token_id)
        if wrong is not None:
            return self._places.finish(choice, FinishReason.FAILED, tokens=(token,), error=wrong)
        if choice.is_matched:  # no step for an end id that would say nothing new
            return self._places.finish(choice, FinishReason.STOP, tokens=(token,))
        if stop.is_full(sequence.num_output_tokens):
            return self._places.finish(choice, FinishReason.LENGTH, tokens=(token,))
        if self._places.prefilling.pop(choice.sequence_id, None) is not None:
            self._places.decoding[choice.sequence_id] = choice
        return choice.output(tokens=(token,))

    def _fail(self, choice: Choice, error: str) -> SequenceOutput:
        choice.num_written = 0  # what its row wrote is worth nothing, nor what it wrote over
        if choice.abort_asked:
            return self._places.finish(choice, FinishReason.ABORTED)
        return self._places.finish(choice, FinishReason.FAILED, error=error)
