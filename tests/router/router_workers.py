"""Workers that a test drives word by word: they take Submits and Aborts as real ones do.

What a choice says is a function of its place, so a lost or doubled token shows at once:
token ``i`` of choice ``c`` is ``1000 * c + i``. A worker checks that what it is told to
resume from is exactly what was committed. KV goes from worker to worker through a ``Fabric``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from headwater.core.control import (
    PROTOCOL_VERSION,
    Abort,
    FromWorker,
    Hello,
    StepDone,
    Submit,
    ToWorker,
    WorkerLoad,
)
from headwater.core.errors import WorkerLost
from headwater.core.fleet import HandoffEnd, HandoffReport, Phase, Resume, Role
from headwater.core.ports import WorkerChannel
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
from headwater.core.tokenizer_source import TokenizerSource

LOAD = WorkerLoad(
    num_waiting=0, num_prefilling=0, num_decoding=0, num_free_blocks=0, num_cached_blocks=0,
    num_held_blocks=0, num_steps=0, num_preemptions=0, num_recomputed_tokens=0,
    num_hit_tokens=0, num_miss_tokens=0, num_output_tokens=0,
)  # fmt: skip
INFO = ModelInfo(
    model_id="m", family="llama", fingerprint="f", vocab_size=9, context_tokens=512,
    block_tokens=16, num_blocks=400, kv_bytes_per_token=4, weights_format="bf16",
    weights_bytes=1, numerics="reference", device="cpu", layout="l",
)  # fmt: skip


def say_hello(role: Role, worker_id: str = "w", info: ModelInfo = INFO) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION, worker_id=worker_id, pid=1, info=info, role=role,
        tokenizer=TokenizerSource(kind="byte", vocab_size=9),
        handoff_address="" if role is Role.PREFILL else f"kv://{worker_id}",
    )  # fmt: skip


def ask(
    name: str, *, num_prompt: int = 20, num_output: int = 5, num_choices: int = 1,
    tenant: str = "",
) -> Request:  # fmt: skip
    return Request(
        request_id=RequestId(name), prompt_tokens=tuple(range(num_prompt)),
        num_choices=num_choices, sampling=SamplingParams(),
        stop=StopParams(max_output_tokens=num_output), tenant=tenant,
    )  # fmt: skip


def expected_ids(request: Request) -> dict[int, list[int]]:
    return {
        index: [1000 * index + i for i in range(request.stop.max_output_tokens)]
        for index in range(request.num_choices)
    }


@dataclass(slots=True)
class Fabric:
    """Handoffs under way: which sides have heard of them, and how far they are."""

    taken: set[str] = field(default_factory=set)  # the decode side waits for these
    sent: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)


@dataclass(slots=True)
class FakeJob:
    submit: Submit
    done: dict[int, int]  # tokens committed, by open choice
    reported: set[int] = field(default_factory=set)
    is_ready: bool = True


class FakeWorker:
    """One life of one worker; the front's channel to it, too."""

    def __init__(self, worker_id: str, role: Role, fabric: Fabric) -> None:
        self.worker_id = worker_id
        self.role = role
        self.fabric = fabric
        self.jobs: dict[str, FakeJob] = {}
        self.sent: list[ToWorker] = []
        self.words: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        self.is_dead = False
        self.is_closed = False
        self.hangs = False
        self.seen_ids: set[str] = set()

    # The channel

    async def send(self, message: ToWorker) -> None:
        if self.is_dead or self.is_closed:
            raise WorkerLost("the worker is gone")
        self.sent.append(message)
        if isinstance(message, Submit):
            self._take(message)
        elif isinstance(message, Abort) and not self.hangs:
            self._abort(message)

    async def messages(self) -> AsyncIterator[FromWorker]:
        while True:
            word = await self.words.get()
            if word is None:
                raise WorkerLost(f"{self.worker_id} ended with signal 9")
            yield word

    async def close(self) -> None:
        self.is_closed = True
        self.fabric.broken |= {
            job.submit.handoff.handoff_id for job in self.jobs.values() if job.submit.handoff
        }
        self.jobs.clear()

    # What the test makes it do

    def hello(self, info: ModelInfo = INFO) -> None:
        self.words.put_nowait(say_hello(self.role, self.worker_id, info))

    def die(self) -> None:
        self.is_dead = True
        self.words.put_nowait(None)

    def step(self) -> bool:
        """Let every job go on by one. False when none could."""
        if self.is_dead or self.is_closed or self.hangs:
            return False
        outputs: list[SequenceOutput] = []
        reports: list[HandoffReport] = []
        for key, job in list(self.jobs.items()):
            self._go_on(key, job, outputs, reports)
        if outputs or reports:
            self.words.put_nowait(
                StepDone(outputs=tuple(outputs), load=LOAD, handoffs=tuple(reports))
            )
        return bool(outputs or reports)

    def fail_handoff(self, key: str) -> None:
        """This side gives the handoff up. Prefill: its job ends. Decode: it waits."""
        job = self.jobs[key]
        assert job.submit.handoff is not None
        self.fabric.broken.add(job.submit.handoff.handoff_id)
        if job.submit.phase is Phase.PREFILL:
            del self.jobs[key]
        self._report(HandoffReport(handoff_id=key, end=HandoffEnd.FAILED, reason="cut off"))

    def _report(self, report: HandoffReport) -> None:
        self.words.put_nowait(StepDone(outputs=(), load=LOAD, handoffs=(report,)))

    def _take(self, submit: Submit) -> None:
        request, key = submit.request, str(submit.request.request_id)
        assert key not in self.seen_ids, "a name is never used twice"
        self.seen_ids.add(key)
        resume = submit.resume or tuple(
            Resume(index=index, tokens=()) for index in range(request.num_choices)
        )
        for part in resume:
            ids = expected_ids(request)[part.index][: len(part.tokens)]
            assert list(part.tokens) == ids, "resumed from something else than was committed"
        job = FakeJob(submit, {part.index: len(part.tokens) for part in resume})
        self.jobs[key] = job
        if submit.phase is Phase.WHOLE:
            assert submit.handoff is None
            return
        assert submit.handoff is not None
        job.is_ready = False
        if submit.phase is Phase.DECODE:
            self.fabric.taken.add(submit.handoff.handoff_id)

    def _abort(self, abort: Abort) -> None:
        key = str(abort.request_id)
        job = self.jobs.get(key)
        if job is None:
            return
        gone = list(job.done) if abort.index is None else [abort.index]
        outputs = []
        for index in gone:
            if job.done.pop(index, None) is not None and job.submit.phase is not Phase.PREFILL:
                outputs.append(
                    SequenceOutput(
                        request_id=abort.request_id, index=index, finish=FinishReason.ABORTED
                    )
                )
        if not job.done:
            del self.jobs[key]
            if job.submit.handoff is not None:
                self.fabric.broken.add(job.submit.handoff.handoff_id)
        self.words.put_nowait(StepDone(outputs=tuple(outputs), load=LOAD))

    def _go_on(
        self, key: str, job: FakeJob, outputs: list[SequenceOutput], reports: list[HandoffReport]
    ) -> None:
        if job.submit.handoff is not None and not job.is_ready:
            handoff_id = job.submit.handoff.handoff_id
            if handoff_id in self.fabric.broken:
                return
            if job.submit.phase is Phase.PREFILL:
                if handoff_id in self.fabric.taken:
                    self.fabric.sent.add(handoff_id)
                    del self.jobs[key]
                    reports.append(HandoffReport(handoff_id=handoff_id, end=HandoffEnd.DONE))
                return
            if handoff_id not in self.fabric.sent:
                return
            job.is_ready = True
            reports.append(HandoffReport(handoff_id=handoff_id, end=HandoffEnd.DONE, num_tokens=1))
        request = job.submit.request
        for index in list(job.done):
            outputs.append(self._commit(request, job, index))
        if not job.done:
            del self.jobs[key]

    def _commit(self, request: Request, job: FakeJob, index: int) -> SequenceOutput:
        ids = expected_ids(request)[index]
        token = SampledToken(ids[job.done[index]])
        job.done[index] += 1
        is_last = job.done[index] == len(ids)
        prompt = None
        if index not in job.reported:
            job.reported.add(index)
            prompt = PromptReport(num_hit_tokens=0, num_miss_tokens=request.num_prompt_tokens)
        if is_last:
            del job.done[index]
        return SequenceOutput(
            request_id=request.request_id, index=index, tokens=(token,), prompt=prompt,
            finish=FinishReason.LENGTH if is_last else None,
        )  # fmt: skip


class FakeLauncher:
    """Starts FakeWorkers; ``first`` decides what each says first (by default: Hello)."""

    def __init__(self, first: Callable[[FakeWorker], None] | None = None) -> None:
        self.fabric = Fabric()
        self.workers: list[FakeWorker] = []
        self.first = first or (lambda worker: worker.hello())

    async def launch(self, role: Role = Role.BOTH) -> WorkerChannel:
        worker = FakeWorker(f"{role}-{len(self.workers)}", role, self.fabric)
        self.workers.append(worker)
        self.first(worker)
        return worker

    @property
    def alive(self) -> list[FakeWorker]:
        return [w for w in self.workers if not (w.is_dead or w.is_closed)]

    def one(self, role: Role) -> FakeWorker:
        """The newest of this role that lives."""
        return [worker for worker in self.alive if worker.role is role][-1]
