"""A fleet on a simulated clock: the real dispatcher, workers that are a few lines of arithmetic.

A worker's step computes one token for each sequence that decodes and up to ``chunk_tokens``
of its prompts, in order of (wire priority, given first), and lasts as long as its cost says.
Handoffs take no time. Nothing here sleeps; a run is a heap of events.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from headwater.core.blocks import CacheIdentity, PrefixKey, block_keys, blocks_for
from headwater.core.control import WorkerLoad
from headwater.core.cost import NO_STEP, StepCost, StepShape
from headwater.core.fleet import KVEvents, Role
from headwater.core.request import ModelInfo, Request, RequestId, SamplingParams, StopParams
from headwater.router.dispatch import Ask, DispatchConfig, Dispatcher, Placement

COST = StepCost(base_s=0.02, token_s=5e-4, pair_s=1e-8, window_pair_s=0.0, sequence_s=1e-3)


def sim_info(
    *, context_tokens: int = 8192, block_tokens: int = 32, num_blocks: int = 4096
) -> ModelInfo:
    return ModelInfo(
        model_id="m", family="llama", fingerprint="f", vocab_size=9,
        context_tokens=context_tokens, block_tokens=block_tokens, num_blocks=num_blocks,
        kv_bytes_per_token=4, weights_format="bf16", weights_bytes=1, numerics="reference",
        device="cpu", layout="l",
    )  # fmt: skip


def sim_request(
    name: str, tokens: tuple[int, ...] | range, *, num_output: int = 1, tenant: str = "",
    priority: int = 0, num_choices: int = 1,
) -> Request:  # fmt: skip
    return Request(
        request_id=RequestId(name), prompt_tokens=tuple(tokens), sampling=SamplingParams(),
        stop=StopParams(max_output_tokens=num_output), tenant=tenant, priority=priority,
        num_choices=num_choices,
    )  # fmt: skip


@dataclass(slots=True)
class Job:
    """One request's life, and when what happened."""

    request: Request
    arrived_s: float
    num_left: int = 0  # prompt tokens to compute, on the worker that does
    num_output: int = 0
    placed_s: float | None = None
    first_s: float | None = None
    done_s: float | None = None
    placement: Placement | None = None

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.arrived_s

    @property
    def took_s(self) -> float:
        assert self.done_s is not None
        return self.done_s - self.arrived_s


@dataclass(slots=True)
class SimWorker:
    worker_id: str
    cost: StepCost
    prompts: list[tuple[int, int, Job]] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    expected: int = 0  # jobs whose prompt is computed elsewhere
    keys: set[PrefixKey] = field(default_factory=set)
    is_busy: bool = False
    busy_s: float = 0.0
    num_jobs: int = 0


class Sim:
    """``roles``: one worker each. With ``is_fcfs`` requests go straight to the only worker,
    in order of arrival: what the buckets are compared with."""

    def __init__(
        self, roles: list[Role], *, info: ModelInfo | None = None, chunk_tokens: int = 512,
        config: DispatchConfig | None = None, is_fcfs: bool = False, keeps_kv: bool = False,
        cost: StepCost = COST,
    ) -> None:  # fmt: skip
        self.info = info or sim_info()
        self.dispatcher = Dispatcher(self.info, config or DispatchConfig())
        self.workers: dict[str, SimWorker] = {}
        self.jobs: dict[str, Job] = {}
        self.now_s = 0.0
        self._chunk_tokens = chunk_tokens
        self._is_fcfs = is_fcfs
        self._keeps_kv = keeps_kv
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = itertools.count()
        for role in roles:
            number = sum(name.startswith(role) for name in self.workers)
            worker = SimWorker(f"{role}-{number}", cost)
            self.workers[worker.worker_id] = worker
            self.dispatcher.join(worker.worker_id, role, self.info, 0.0)
            self.dispatcher.told(worker.worker_id, self._load(worker))

    def arrive(self, request: Request, at_s: float) -> Job:
        job = self.jobs[str(request.request_id)] = Job(request, at_s)
        self._push(at_s, "arrival", job)
        return job

    def run(self, until_s: float = 1e9) -> None:
        """Raises AssertionError when requests are left that nothing will ever serve."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, kind, item = heapq.heappop(self._events)
            if kind == "arrival":
                assert isinstance(item, Job)
                self._start(item)
            elif kind == "step":
                assert isinstance(item, tuple)
                self._finish_step(*item)
            self._place_all()
        if until_s == 1e9:
            left = [name for name, job in self.jobs.items() if job.done_s is None]
            assert not left, f"{len(left)} requests were never served: {left[:5]}"

    def _push(self, at_s: float, kind: str, item: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), kind, item))

    def _start(self, job: Job) -> None:
        if self._is_fcfs:
            (worker,) = self.workers.values()
            job.num_left = job.request.num_prompt_tokens
            self._give(worker, job, 0)
            return
        key = str(job.request.request_id)
        ask = Ask(key=key, request=job.request, num_choices=job.request.num_choices)
        self.dispatcher.add(ask, self.now_s)

    def _place_all(self) -> None:
        while (placement := self.dispatcher.next(self.now_s)) is not None:
            job = self.jobs[placement.key]
            job.placement, job.placed_s = placement, self.now_s
            worker = self.workers[placement.prefill_id or placement.decode_id]
            job.num_left = job.request.num_prompt_tokens - self._hit_tokens(worker, job)
            if placement.prefill_id is not None:
                self.workers[placement.decode_id].expected += 1
            self._give(worker, job, placement.priority)

    def _give(self, worker: SimWorker, job: Job, order: int) -> None:
        worker.num_jobs += 1
        worker.prompts.append((order, next(self._numbers), job))
        worker.prompts.sort(key=lambda item: item[:2])
        self._wake(worker)

    def _wake(self, worker: SimWorker) -> None:
        if worker.is_busy or not (worker.prompts or worker.decoding):
            return
        shape, budget = NO_STEP, self._chunk_tokens
        chunks: list[tuple[Job, int]] = []
        for _, _, job in worker.prompts:
            if budget <= 0:
                break
            num = min(job.num_left, budget)
            budget -= num
            chunks.append((job, num))
            start = job.request.num_prompt_tokens - job.num_left
            shape += StepShape.of_row(start, num, None)
        for job in worker.decoding:
            shape += StepShape.of_row(job.request.num_prompt_tokens + job.num_output, 1, None)
        seconds = worker.cost.predict_s(shape)
        worker.is_busy = True
        worker.busy_s += seconds
        self._push(self.now_s + seconds, "step", (worker, chunks, list(worker.decoding)))

    def _finish_step(
        self, worker: SimWorker, chunks: list[tuple[Job, int]], decoded: list[Job]
    ) -> None:
        if not self._is_fcfs:
            self.dispatcher.computed(worker.worker_id, sum(num for _, num in chunks))
        ended: list[Job] = []
        for job, num in chunks:
            job.num_left -= num
            if job.num_left == 0:
                worker.prompts = [item for item in worker.prompts if item[2] is not job]
                self._hand_over(worker, job)
                self._commit(job, ended)
        for job in decoded:
            self._commit(job, ended)
        if not self._is_fcfs:
            for name in self.dispatcher.books:
                self.dispatcher.told(name, self._load(self.workers[name]))
        worker.is_busy = False  # only now: the next step is planned on what this one left
        self._wake(worker)

    def _hand_over(self, worker: SimWorker, job: Job) -> None:
        if self._keeps_kv:
            keys = tuple(key for key in self._keys(job) if key not in worker.keys)
            worker.keys.update(keys)
            self.dispatcher.learned(worker.worker_id, KVEvents(added=keys))
        if job.placement is None:
            worker.decoding.append(job)
            return
        decoder = self.workers[job.placement.decode_id]
        if job.placement.prefill_id is not None:
            self.dispatcher.ended(worker.worker_id, job.placement.key)
            decoder.expected -= 1
        decoder.decoding.append(job)
        self.dispatcher.settled(decoder.worker_id, job.placement.key)
        self.dispatcher.prefilled(decoder.worker_id, job.placement.key)
        self._wake(decoder)

    def _commit(self, job: Job, ended: list[Job]) -> None:
        job.num_output += 1
        if job.first_s is None:
            job.first_s = self.now_s
        if job.placement is not None:
            self.dispatcher.grew(job.placement.decode_id, job.placement.key, 1)
        if job.num_output >= job.request.stop.max_output_tokens:
            job.done_s = self.now_s
            for worker in self.workers.values():
                worker.decoding = [other for other in worker.decoding if other is not job]
            if job.placement is not None:
                self.dispatcher.ended(job.placement.decode_id, job.placement.key)
                self.dispatcher.finished(job.num_output)

    def _keys(self, job: Job) -> list[PrefixKey]:
        root = CacheIdentity(self.info.fingerprint, self.info.layout, job.request.tenant).root_key()
        tokens = job.request.prompt_tokens
        return [key for key, _ in block_keys(root, tokens, self.info.block_tokens)]

    def _hit_tokens(self, worker: SimWorker, job: Job) -> int:
        num_blocks = 0
        if worker.keys:
            most = (job.request.num_prompt_tokens - 1) // self.info.block_tokens
            for key in self._keys(job)[:most]:
                if key not in worker.keys:
                    break
                num_blocks += 1
        return num_blocks * self.info.block_tokens

    def _load(self, worker: SimWorker) -> WorkerLoad:
        jobs = [job for _, _, job in worker.prompts] + worker.decoding
        num_held = sum(
            blocks_for(job.request.num_prompt_tokens + job.num_output, self.info.block_tokens)
            for job in jobs
        )
        return WorkerLoad(
            num_waiting=0, num_prefilling=0, num_decoding=0, num_free_blocks=0,
            num_cached_blocks=0, num_held_blocks=num_held, num_steps=0, num_preemptions=0,
            num_recomputed_tokens=0, num_hit_tokens=0, num_miss_tokens=0, num_output_tokens=0,
            cost=worker.cost,
        )  # fmt: skip


def percentile(values: list[float], share: float) -> float:
    """The smallest value that is not below ``share`` of all."""
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]
