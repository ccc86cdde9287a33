"""The loop against a scripted scheduler, engine and port: what is said to whom, and when."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.blocks import BlockId
from headwater.core.control import Abort, FromWorker, Hello, StepDone, Stop, Submit, ToWorker
from headwater.core.control import WorkerLoad as Load
from headwater.core.errors import EngineFault, PromptTooLong
from headwater.core.fleet import (
    HandoffRef,
    HandoffReport,
    KVEvents,
    Phase,
    Resume,
)
from headwater.core.request import (
    FinishReason,
    ModelInfo,
    PromptReport,
    Request,
    RequestId,
    SampledToken,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from headwater.core.step import RowResult, SequenceId, StepPlan, StepResult, StepRow
from headwater.core.tokenizer_source import TokenizerSource
from headwater.worker.loop import AWAIT_S, IDLE_WAIT_S, KEEP_S, WorkerLoop

LOAD = Load(
    num_waiting=0, num_prefilling=0, num_decoding=0, num_free_blocks=0, num_cached_blocks=0,
    num_held_blocks=0, num_steps=0, num_preemptions=0, num_recomputed_tokens=0,
    num_hit_tokens=0, num_miss_tokens=0, num_output_tokens=0,
)  # fmt: skip
INFO = ModelInfo(
    model_id="m", family="llama", fingerprint="f", vocab_size=9, context_tokens=64,
    block_tokens=16, num_blocks=4, kv_bytes_per_token=4, weights_format="fp32",
    weights_bytes=1, numerics="reference", device="cpu",
)  # fmt: skip


def request(name: str = "a", num_prompt_tokens: int = 2, num_choices: int = 1) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_tokens=tuple(range(num_prompt_tokens)),
        num_choices=num_choices,
        sampling=SamplingParams(),
        stop=StopParams(max_output_tokens=1),
    )


def row(num_tokens: int) -> StepRow:
    return StepRow(
        sequence_id=SequenceId(1),
        start=0,
        tokens=tuple(range(num_tokens)),
        block_table=(BlockId(0),),
    )


class FakeScheduler:
    """Plans one step for each submitted request, then has nothing to do."""

    def __init__(self) -> None:
        self.queue: list[Request] = []
        self.aborted: list[tuple[RequestId, int | None]] = []
        self.num_audits = 0
        self.num_awaiting_turns = 0
        self.num_keeping_turns = 0
        self.num_stalled_turns = 0
        self.reports: list[SequenceOutput] = []
        self.handoffs: list[HandoffReport] = []
        self.kv_events: list[KVEvents] = []
        self.parts: list[tuple[Phase, HandoffRef | None, tuple[Resume, ...]]] = []
        self.is_closed = False
        self.failed: list[EngineFault] = []

    @property
    def has_work(self) -> bool:
        return bool(self.queue)

    @property
    def is_awaiting(self) -> bool:
        return self.num_awaiting_turns > 0

    @property
    def is_keeping(self) -> bool:
        return self.num_keeping_turns > 0

    def take_ready(self) -> list[SequenceOutput]:
        self.num_awaiting_turns = max(self.num_awaiting_turns - 1, 0)
        self.num_keeping_turns = max(self.num_keeping_turns - 1, 0)
        return []

    def take_reports(self) -> list[SequenceOutput]:
        reports, self.reports = self.reports, []
        return reports

    def close(self) -> None:
        self.is_closed = True

    def take_handoffs(self) -> tuple[HandoffReport, ...]:
        handoffs, self.handoffs = tuple(self.handoffs), []
        return handoffs

    def take_kv_events(self) -> KVEvents | None:
        return self.kv_events.pop(0) if self.kv_events else None

    def submit(
        self,
        request: Request,
        *,
        phase: Phase = Phase.WHOLE,
        handoff: HandoffRef | None = None,
        resume: Sequence[Resume] = (),
    ) -> None:
        self.parts.append((phase, handoff, tuple(resume)))
        if request.num_prompt_tokens > 64:
            raise PromptTooLong(request.num_prompt_tokens, 64)
        self.queue.append(request)

    def abort(self, request_id: RequestId, index: int | None = None) -> list[SequenceOutput]:
        self.aborted.append((request_id, index))
        return [SequenceOutput(request_id=request_id, index=0, finish=FinishReason.ABORTED)]

    def plan(self) -> StepPlan | None:
        if self.num_stalled_turns:
            self.num_stalled_turns -= 1
            return None
        return StepPlan((row(3), row(1))) if self.queue else None

    def _finish(self, finish: FinishReason) -> list[SequenceOutput]:
        done = self.queue.pop(0)
        return [SequenceOutput(request_id=done.request_id, index=0, finish=finish)]

    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        return self._finish(FinishReason.LENGTH)

    def fail(self, plan: StepPlan, error: EngineFault) -> list[SequenceOutput]:
        self.failed.append(error)
        return self._finish(FinishReason.FAILED)

    def load(self) -> Load:
        return LOAD

    def audit(self) -> None:
        self.num_audits += 1


class FakeEngine:
    info = INFO

    def __init__(self, faults: int = 0) -> None:
        self.faults = faults
        self.num_runs = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_runs += 1
        if self.num_runs <= self.faults:
            raise EngineFault("injected")
        rows = tuple(RowResult(r.sequence_id, SampledToken(1)) for r in plan.rows)
        return StepResult(rows, forward_s=0.5, sample_s=0.25)


class ScriptedPort:
    """Hands out one batch of messages per receive, then Stop."""

    def __init__(self, *batches: Sequence[ToWorker]) -> None:
        self.batches = list(batches)
        self.sent: list[FromWorker] = []
        self.waits: list[float] = []

    def receive(self, timeout_s: float) -> Sequence[ToWorker]:
        self.waits.append(timeout_s)
        return self.batches.pop(0) if self.batches else [Stop()]

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def steps(self) -> list[StepDone]:
        """All but the one that opens the conversation."""
        return [message for message in self.sent[2:] if isinstance(message, StepDone)]


class StepClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        self.time_s += 1.0
        return self.time_s


def run(
    port: ScriptedPort, scheduler: FakeScheduler | None = None, engine: FakeEngine | None = None
) -> None:
    WorkerLoop(
        worker_id="w",
        pid=1,
        engine=engine or FakeEngine(),
        scheduler=scheduler or FakeScheduler(),
        tokenizer=TokenizerSource(kind="byte", vocab_size=9),
        port=port,
        clock=StepClock(),
    ).run()


def test_the_first_words_say_what_is_served_and_what_is_free() -> None:
    port = ScriptedPort()
    run(port)
    assert isinstance(port.sent[0], Hello)
    assert port.sent[0].info == INFO
    assert port.sent[1] == StepDone(outputs=(), load=LOAD)


def test_one_message_per_step_with_its_timing_by_part() -> None:
    port = ScriptedPort([Submit(request=request())])
    run(port)
    (done,) = port.steps()
    assert done.outputs[0].finish is FinishReason.LENGTH
    assert done.timing is not None
    assert (done.timing.num_prefill_tokens, done.timing.num_decode_tokens) == (3, 1)
    assert (done.timing.forward_s, done.timing.sample_s) == (0.5, 0.25)
    assert done.timing.plan_s == 1.0


def test_it_waits_only_when_there_is_nothing_to_do_and_audits_then() -> None:
    port = ScriptedPort([Submit(request=request()), Submit(request=request("b"))], [])
    scheduler = FakeScheduler()
    run(port, scheduler)
    assert port.waits[0] > 0, "idle at first"
    assert port.waits[1] == 0, "one request is left"
    assert port.waits[2] > 0
    assert scheduler.num_audits == 1, "once the second was done"


def test_an_abort_is_answered_even_when_no_step_follows() -> None:
    port, scheduler = ScriptedPort([Abort(request_id=RequestId("x"), index=2)]), FakeScheduler()
    run(port, scheduler)
    assert scheduler.aborted == [("x", 2)]
    (done,) = port.steps()
    assert done.timing is None
    assert done.outputs[0].finish is FinishReason.ABORTED


def test_a_failed_step_ends_its_own_sequences_and_the_next_step_runs() -> None:
    port = ScriptedPort([Submit(request=request())], [Submit(request=request("b"))])
    scheduler, engine = FakeScheduler(), FakeEngine(faults=1)
    run(port, scheduler, engine)
    assert [done.outputs[0].finish for done in port.steps()] == [
        FinishReason.FAILED,
        FinishReason.LENGTH,
    ]
    assert [str(error) for error in scheduler.failed] == ["injected"]


def test_d04_an_oversized_prompt_that_passed_the_front_is_refused_again_for_every_choice() -> None:
    port = ScriptedPort([Submit(request=request("big", 100, num_choices=2))])
    run(port)
    (done,) = port.steps()
    assert [(o.index, o.finish) for o in done.outputs] == [
        (0, FinishReason.FAILED),
        (1, FinishReason.FAILED),
    ]
    assert "prompt is too long" in (done.outputs[0].error or "")


def test_stop_ends_the_loop_before_another_step() -> None:
    engine = FakeEngine()
    run(ScriptedPort([Submit(request=request()), Stop()]), engine=engine)
    assert engine.num_runs == 0


def test_it_looks_again_soon_while_somebody_waits_for_what_comes_by_itself() -> None:
    port, scheduler = ScriptedPort([], [], []), FakeScheduler()
    scheduler.num_awaiting_turns = 2
    run(port, scheduler)
    assert port.waits == [AWAIT_S, AWAIT_S, IDLE_WAIT_S, IDLE_WAIT_S]
    assert scheduler.num_audits == 2, "not while somebody waits"


def test_work_whose_blocks_are_not_there_yet_does_not_spin() -> None:
    port, scheduler = ScriptedPort([Submit(request=request())], [], [], []), FakeScheduler()
    scheduler.num_stalled_turns = 2
    run(port, scheduler)
    assert port.waits == [IDLE_WAIT_S, AWAIT_S, AWAIT_S, IDLE_WAIT_S, IDLE_WAIT_S]
    assert len(port.steps()) == 1


def test_the_front_hears_when_the_last_kv_is_out() -> None:
    port, scheduler = ScriptedPort([], [], []), FakeScheduler()
    scheduler.num_keeping_turns = 2
    run(port, scheduler)
    assert port.waits == [KEEP_S, KEEP_S, IDLE_WAIT_S, IDLE_WAIT_S]
    assert port.steps() == [StepDone(outputs=(), load=LOAD)]
    assert scheduler.is_closed


def test_a_settled_hit_is_told_before_the_step_that_computes_the_rest() -> None:
    port, scheduler = ScriptedPort([Submit(request=request())]), FakeScheduler()
    report = SequenceOutput(
        request_id=RequestId("a"), index=0, prompt=PromptReport(num_hit_tokens=1, num_miss_tokens=1)
    )
    scheduler.reports = [report]

    class LookingEngine(FakeEngine):
        def run(self, plan: StepPlan) -> StepResult:
            assert [step.outputs for step in port.steps()] == [(report,)]
            return super().run(plan)

    run(port, scheduler, LookingEngine())
    assert [step.timing is None for step in port.steps()] == [True, False]
