"""An engine that computes nothing but remembers everything, for scheduler tests.

Its "KV" of a token is a digest of the whole prefix, written to the slot that the
row's block table names; the next token is a function of the newest digest. The
history is read back through the block tables only. So a wrong block, a wrong
hit, a write over another's block or a skipped token changes the ids, or breaks
the chain of digests and is reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from headwater.core.blocks import BlockId, CacheIdentity
from headwater.core.errors import EngineFault
from headwater.core.randomness import keyed_bits
from headwater.core.request import (
    FinishReason,
    PromptReport,
    Request,
    RequestId,
    SampledToken,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from headwater.core.step import RowResult, SampleSpec, StepPlan, StepResult, StepRow
from headwater.kv.manager import KVGroup, KVManager
from headwater.worker.limits import SchedulerConfig
from headwater.worker.scheduler import Scheduler

VOCAB = 50
START = 0


def digest(before: int, token: int) -> int:
    message = before.to_bytes(8, "little") + token.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")


def score(state: int, token: int) -> float:
    return -float(digest(state, token) % 1000) / 100


def choose(state: int, sample: SampleSpec) -> int:
    bits = state
    if sample.params.temperature > 0:
        bits ^= keyed_bits(sample.params.seed, sample.position, "sample")
    for step in range(VOCAB):
        token = (bits + step) % VOCAB
        if token not in sample.banned_ids:
            return token
    raise AssertionError("all tokens are banned")


class ScriptedEngine:
    """Runs plans over a dict of slots. ``fail_next`` makes the next run raise."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._slots: dict[tuple[BlockId, int], tuple[int, int]] = {}  # digest before, digest
        self.fail_next = False
        self.num_runs = 0
        self.num_computed_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.num_runs += 1
        self.num_computed_tokens += plan.num_tokens
        if self.fail_next:
            self.fail_next = False
            raise EngineFault("the device is on fire")
        written = [slot for row in plan.rows for slot in self._written_slots(row)]
        assert len(set(written)) == len(written), "two rows write the same slot"
        return StepResult(tuple(self._run_row(row) for row in plan.rows))

    def _slot(self, row: StepRow, position: int) -> tuple[BlockId, int]:
        block, offset = divmod(position, self._block_tokens)
        return row.block_table[block], offset

    def _written_slots(self, row: StepRow) -> list[tuple[BlockId, int]]:
        return [self._slot(row, position) for position in range(row.start, row.end)]

    def _run_row(self, row: StepRow) -> RowResult:
        state = START
        for position in range(row.start):
            before, after = self._slots[self._slot(row, position)]
            assert before == state, f"position {position} holds another sequence's KV"
            state = after
        states = []
        for position, token in enumerate(row.tokens, row.start):
            before, state = state, digest(state, token)
            self._slots[self._slot(row, position)] = (before, state)
            states.append(state)
        sampled = None
        if row.sample is not None:
            assert row.sample.position == row.end
            token = choose(state, row.sample)
            sampled = SampledToken(token, score(state, token))
        scores = tuple(
            SampledToken(token, score(state, token))
            for state, token in zip(states, row.next_tokens, strict=False)
        )
        return RowResult(row.sequence_id, sampled, scores)


def expected_ids(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What greedy decoding gives when nothing goes wrong."""
    state = START
    for token in prompt:
        state = digest(state, token)
    ids = []
    for _ in range(num_tokens):
        ids.append(state % VOCAB)
        state = digest(state, ids[-1])
    return ids


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    context_tokens: int = 256,
    max_step_tokens: int = 64,
    max_mixed_prefill_tokens: int = 16,
    max_running_sequences: int = 8,
    reserve_blocks_per_sequence: int = 1,
) -> Scheduler:
    return Scheduler(
        KVManager(KVGroup(num_blocks=num_blocks, block_tokens=block_tokens)),
        SchedulerConfig(
            context_tokens=context_tokens,
            max_step_tokens=max_step_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            max_running_sequences=max_running_sequences,
            reserve_blocks_per_sequence=reserve_blocks_per_sequence,
        ),
        lambda tenant: CacheIdentity("model", "layout", tenant),
    )


def make_request(
    name: str,
    prompt: Sequence[int],
    max_output_tokens: int = 8,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    n: int = 1,
    priority: int = 0,
    tenant: str = "",
    num_prompt_logprobs: int | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    end_token_ids: frozenset[int] = frozenset(),
    min_output_tokens: int = 0,
    ignore_end: bool = False,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(
            temperature=temperature,
            seed=seed,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
        ),
        stop=StopParams(
            max_output_tokens=max_output_tokens,
            min_output_tokens=min_output_tokens,
            stop_token_ids=stop_token_ids,
            end_token_ids=end_token_ids,
            ignore_end=ignore_end,
        ),
        num_choices=n,
        priority=priority,
        tenant=tenant,
        num_prompt_logprobs=num_prompt_logprobs,
    )


class Driver:
    """Steps a scheduler with a ScriptedEngine and collects what each choice got."""

    def __init__(self, scheduler: Scheduler, *, block_tokens: int = 4) -> None:
        self.scheduler = scheduler
        self.engine = ScriptedEngine(block_tokens)
        self.ids: dict[tuple[str, int], list[int]] = {}
        self.prompts: dict[tuple[str, int], PromptReport] = {}
        self.finishes: dict[tuple[str, int], SequenceOutput] = {}
        self.plans: list[StepPlan] = []

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.submit(request)

    def abort(self, name: str, index: int | None = None) -> None:
        self.collect(self.scheduler.abort(RequestId(name), index))

    def step(self) -> bool:
        """One step, audited; False when there was nothing to do."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.plans.append(plan)
        try:
            result = self.engine.run(plan)
        except EngineFault as error:
            self.collect(self.scheduler.fail(plan, error))
        else:
            self.collect(self.scheduler.apply(plan, result))
        self.scheduler.audit()
        return True

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                assert not self.scheduler.has_work
                load = self.scheduler.load()
                assert load.num_held_blocks == 0
                return
        raise AssertionError(f"not finished after {max_steps} steps")

    def collect(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = (str(output.request_id), output.index)
            assert key not in self.finishes, "an output after the last one"
            first = key not in self.ids
            self.ids.setdefault(key, []).extend(token.token_id for token in output.tokens)
            if output.prompt is not None:
                assert first, "the prompt is reported with the first output"
                self.prompts[key] = output.prompt
            if output.finish is not None:
                self.finishes[key] = output

    def reason(self, name: str, index: int = 0) -> FinishReason | None:
        return self.finishes[name, index].finish
