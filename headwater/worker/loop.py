"""The worker's loop: receive, plan, run, apply, send; one message per step.

A prompt whose hit is settled is told of before its first step, in a message of its own.

Knows the scheduler, an Engine and a WorkerPort; not where the messages go nor
how a step is computed. Runs in one thread, which is the only one that touches
the scheduler and the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from headwater.core.control import (
    PROTOCOL_VERSION,
    Abort,
    Hello,
    StepDone,
    StepTiming,
    Stop,
    Submit,
    WorkerLoad,
)
from headwater.core.errors import EngineFault, InvalidRequest
from headwater.core.fleet import (
    HandoffRef,
    HandoffReport,
    Holding,
    KVEvents,
    Phase,
    Resume,
    Role,
)
from headwater.core.ports import Clock, Engine, WorkerPort
from headwater.core.request import FinishReason, Request, RequestId, SequenceOutput
from headwater.core.step import StepPlan, StepResult
from headwater.core.tokenizer_source import TokenizerSource
from headwater.worker.cost_book import CostBook

log = logging.getLogger("headwater.worker")

IDLE_WAIT_S = 1.0
AWAIT_S = 0.001  # somebody waits for a constraint, a look, a load or a block
KEEP_S = 0.005  # nobody waits, but KV is on its way out


class StepScheduler(Protocol):
    """What the loop needs of ``worker.scheduler.Scheduler``."""

    @property
    def has_work(self) -> bool: ...
    @property
    def is_awaiting(self) -> bool: ...
    @property
    def is_keeping(self) -> bool: ...
    def take_ready(self) -> list[SequenceOutput]: ...
    def take_reports(self) -> list[SequenceOutput]: ...
    def submit(
        self,
        request: Request,
        *,
        phase: Phase = Phase.WHOLE,
        handoff: HandoffRef | None = None,
        resume: Sequence[Resume] = (),
    ) -> None: ...
    def abort(self, request_id: RequestId, index: int | None = None) -> list[SequenceOutput]: ...
    def plan(self) -> StepPlan | None: ...
    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]: ...
    def fail(self, plan: StepPlan, error: EngineFault) -> list[SequenceOutput]: ...
    def load(self) -> WorkerLoad: ...
    def take_handoffs(self) -> tuple[HandoffReport, ...]: ...
    def take_kv_events(self) -> KVEvents | None: ...
    def audit(self) -> None: ...
    def close(self) -> None: ...


class WorkerLoop:
    """Runs until a Stop message, or until ``stopping`` says so."""

    def __init__(
        self,
        *,
        worker_id: str,
        pid: int,
        engine: Engine,
        scheduler: StepScheduler,
        tokenizer: TokenizerSource,
        port: WorkerPort,
        clock: Clock,
        stopping: Callable[[], bool] = lambda: False,
        cost_book: CostBook | None = None,
        role: Role = Role.BOTH,
        handoff_address: str = "",
        holds: Holding = Holding.ALL,
    ) -> None:
        """``cost_book`` is the scheduler's, to be told what steps took. ``role``,
        ``handoff_address`` and ``holds`` are told to the front: see ``Hello``."""
        self._engine = engine
        self._scheduler = scheduler
        self._port = port
        self._clock = clock
        self._stopping = stopping
        self._cost_book = cost_book
        self._is_stalled = False  # there is work, but its blocks are still on their way
        self._hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=worker_id,
            pid=pid,
            info=engine.info,
            tokenizer=tokenizer,
            role=role,
            handoff_address=handoff_address,
            holds=holds,
        )

    def run(self) -> None:
        self._port.send(self._hello)
        # The front's gauges then show the pool before the first request.
        self._send([])
        while not self._stopping() and self._turn():
            pass
        self._scheduler.close()

    def _turn(self) -> bool:
        """One round; False after a Stop."""
        outputs: list[SequenceOutput] = []
        for message in self._port.receive(self._wait_s()):
            if isinstance(message, Stop):
                return False
            outputs.extend(self._handle(message))
        was_keeping = self._scheduler.is_keeping
        outputs.extend(self._scheduler.take_ready())
        timing = self._step(outputs)
        is_idle = not (self._scheduler.has_work or self._scheduler.is_awaiting)
        has_kept = was_keeping and not self._scheduler.is_keeping
        handoffs = self._scheduler.take_handoffs()
        if outputs or handoffs or timing is not None or (is_idle and has_kept):
            self._send(outputs, timing, handoffs)
        if is_idle and not self._scheduler.is_keeping:
            self._scheduler.audit()
        return True

    def _wait_s(self) -> float:
        if self._scheduler.has_work and not self._is_stalled:
            return 0.0
        if self._is_stalled or self._scheduler.is_awaiting:
            return AWAIT_S
        return KEEP_S if self._scheduler.is_keeping else IDLE_WAIT_S

    def _send(
        self,
        outputs: list[SequenceOutput],
        timing: StepTiming | None = None,
        handoffs: tuple[HandoffReport, ...] = (),
    ) -> None:
        self._port.send(
            StepDone(
                outputs=tuple(outputs),
                load=self._scheduler.load(),
                timing=timing,
                kv_events=self._scheduler.take_kv_events(),
                handoffs=handoffs,
            )
        )
        outputs.clear()

    def _handle(self, message: Submit | Abort) -> list[SequenceOutput]:
        if isinstance(message, Abort):
            return self._scheduler.abort(message.request_id, message.index)
        request = message.request
        try:
            self._scheduler.submit(
                request, phase=message.phase, handoff=message.handoff, resume=message.resume
            )
        except InvalidRequest as error:
            # The front has checked already; a worker still trusts nobody (D04).
            return [_refusal(request, index, str(error)) for index in range(request.num_choices)]
        return []

    def _step(self, outputs: list[SequenceOutput]) -> StepTiming | None:
        """Plan, run, apply; adds to ``outputs``. None when there was nothing to run."""
        start_s = self._clock.now_s()
        plan = self._scheduler.plan()
        self._is_stalled = plan is None and self._scheduler.has_work
        reports = self._scheduler.take_reports()
        if reports:
            outputs.extend(reports)
            self._send(outputs)
        if plan is None:
            return None
        predicted_s = 0.0 if self._cost_book is None else self._cost_book.predict_s(plan)
        planned_s = self._clock.now_s()
        try:
            result = self._engine.run(plan)
            ran_s = self._clock.now_s()
            outputs.extend(self._scheduler.apply(plan, result))
        except EngineFault as error:
            log.error("step of %d rows failed: %s", len(plan.rows), error)
            outputs.extend(self._scheduler.fail(plan, error))
            return None
        # A one-token tail of a prompt counts as decode: it costs what a decode row costs.
        num_decode_tokens = sum(1 for row in plan.rows if len(row.tokens) == 1)
        end_s = self._clock.now_s()
        if self._cost_book is not None:
            self._cost_book.note(plan, predicted_s, end_s - start_s)
        return StepTiming(
            plan_s=planned_s - start_s,
            forward_s=result.forward_s,
            sample_s=result.sample_s,
            apply_s=end_s - ran_s,
            num_prefill_tokens=plan.num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            predicted_s=predicted_s,
        )


def _refusal(request: Request, index: int, message: str) -> SequenceOutput:
    return SequenceOutput(
        request_id=request.request_id, index=index, finish=FinishReason.FAILED, error=message
    )
