"""The worker's loop: receive, plan, run, apply, send; one message per step.

Knows the scheduler, an Engine and a WorkerPort; not where the messages go nor
how a step is computed. Runs in one thread, which is the only one that touches
the scheduler and the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from headwater.core.ports import Clock, Engine, WorkerPort
from headwater.core.request import FinishReason, Request, RequestId, SequenceOutput
from headwater.core.step import StepPlan, StepResult
from headwater.core.tokenizer_source import TokenizerSource

log = logging.getLogger("headwater.worker")

IDLE_WAIT_S = 1.0
COMPILE_WAIT_S = 0.002  # while nobody but a constraint's compilation is waited for


class StepScheduler(Protocol):
    """What the loop needs of ``worker.scheduler.Scheduler``."""

    @property
    def has_work(self) -> bool: ...
    @property
    def is_compiling(self) -> bool: ...
    def take_compiled(self) -> list[SequenceOutput]: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: RequestId, index: int | None = None) -> list[SequenceOutput]: ...
    def plan(self) -> StepPlan | None: ...
    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]: ...
    def fail(self, plan: StepPlan, error: EngineFault) -> list[SequenceOutput]: ...
    def load(self) -> WorkerLoad: ...
    def audit(self) -> None: ...


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
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._port = port
        self._clock = clock
        self._stopping = stopping
        self._hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=worker_id,
            pid=pid,
            info=engine.info,
            tokenizer=tokenizer,
        )

    def run(self) -> None:
        self._port.send(self._hello)
        # The front's gauges then show the pool before the first request.
        self._port.send(StepDone(outputs=(), load=self._scheduler.load()))
        while not self._stopping() and self._turn():
            pass

    def _turn(self) -> bool:
        """One round; False after a Stop."""
        if self._scheduler.has_work:
            wait_s = 0.0
        else:
            wait_s = COMPILE_WAIT_S if self._scheduler.is_compiling else IDLE_WAIT_S
        outputs: list[SequenceOutput] = []
        for message in self._port.receive(wait_s):
            if isinstance(message, Stop):
                return False
            outputs.extend(self._handle(message))
        outputs.extend(self._scheduler.take_compiled())
        timing = self._step(outputs)
        if outputs or timing is not None:
            self._port.send(
                StepDone(outputs=tuple(outputs), load=self._scheduler.load(), timing=timing)
            )
        if not self._scheduler.has_work:
            self._scheduler.audit()
        return True

    def _handle(self, message: Submit | Abort) -> list[SequenceOutput]:
        if isinstance(message, Abort):
            return self._scheduler.abort(message.request_id, message.index)
        request = message.request
        try:
            self._scheduler.submit(request)
        except InvalidRequest as error:
            # The front has checked already; a worker still trusts nobody (D04).
            return [_refusal(request, index, str(error)) for index in range(request.num_choices)]
        return []

    def _step(self, outputs: list[SequenceOutput]) -> StepTiming | None:
        """Plan, run, apply; adds to ``outputs``. None when there was nothing to run."""
        start_s = self._clock.now_s()
        plan = self._scheduler.plan()
        if plan is None:
            return None
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
        return StepTiming(
            plan_s=planned_s - start_s,
            forward_s=result.forward_s,
            sample_s=result.sample_s,
            apply_s=self._clock.now_s() - ran_s,
            num_prefill_tokens=plan.num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
        )


def _refusal(request: Request, index: int, message: str) -> SequenceOutput:
    return SequenceOutput(
        request_id=request.request_id, index=index, finish=FinishReason.FAILED, error=message
    )
