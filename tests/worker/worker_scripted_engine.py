"""An engine that computes nothing but remembers everything, for scheduler tests.

Its "KV" of a token is a digest of the whole prefix, written to the slot that the
row's block table names; the next token is a function of the newest digest. The
history is read back through the block tables only. So a wrong block, a wrong
hit, a write over another's block or a skipped token changes the ids, or breaks
the chain of digests and is reported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from headwater.core.blocks import BlockId, CacheIdentity
from headwater.core.cache import KVPart, Retention, RetentionClass
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
from headwater.worker.handover import HandoverParts
from headwater.worker.limits import SchedulerConfig
from headwater.worker.scheduler import Scheduler
from headwater.worker.tiering import TierParts

VOCAB = 50
START = 0

Slot = tuple[BlockId, int]  # block, offset
Digests = tuple[int, int]  # of the prefix before the token, and with it
Content = tuple[Digests | None, ...]  # a block's slots
GARBAGE: Digests = (-1, -1)


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
    """Runs plans over a dict of slots. ``fail_next`` makes the next run raise.

    With ``window_tokens`` there is window KV beside it: the same digests, in slots of
    their own, of which a token reads only its window and never before ``window_start``.
    Also the ``BlockMemory`` of its blocks, as far as ``worker`` uses one.
    """

    def __init__(self, block_tokens: int, window_tokens: int | None = None) -> None:
        self.block_tokens = block_tokens
        self.window_tokens = window_tokens
        self.slots: dict[Slot, Digests] = {}
        self.window_slots: dict[Slot, Digests] = {}
        self.fail_next = False
        self.num_runs = 0
        self.num_computed_tokens = 0
        self.num_copies = 0
        self.tokens_per_s = 0.0  # what results say of the pace; 0: nothing

    def run(self, plan: StepPlan) -> StepResult:
        self.num_runs += 1
        self.num_computed_tokens += plan.num_tokens
        written = [slot for row in plan.rows for slot in self._written_slots(row)]
        assert len(set(written)) == len(written), "two rows write the same slot"
        if self.fail_next:
            self.fail_next = False
            for slot in written:  # KV of a failed step is undefined
                self.slots[slot] = self.window_slots[slot] = GARBAGE
            raise EngineFault("the device is on fire")
        forward_s = plan.num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0
        return StepResult(tuple(self._run_row(row) for row in plan.rows), forward_s=forward_s)

    def _slot(self, row: StepRow, position: int) -> Slot:
        block, offset = divmod(position, self.block_tokens)
        return row.block_table[block], offset

    def _written_slots(self, row: StepRow) -> list[Slot]:
        return [self._slot(row, position) for position in range(row.start, row.end)]

    def _run_row(self, row: StepRow) -> RowResult:
        state = START
        for position in range(row.start):
            before, after = self.slots[self._slot(row, position)]
            assert before == state, f"position {position} holds another sequence's KV"
            state = after
        states = []
        for position, token in enumerate(row.tokens, row.start):
            before, state = state, digest(state, token)
            slot = self._slot(row, position)
            if position - row.start < row.num_replayed:
                assert self.slots[slot] == (before, state), "replayed over another's KV"
            self.slots[slot] = self.window_slots[slot] = (before, state)
            self._check_window(row, position)
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

    def _check_window(self, row: StepRow, position: int) -> None:
        if self.window_tokens is None:
            return
        first = max(position - self.window_tokens + 1, row.window_start)
        for seen in range(first, position + 1):
            slot = self._slot(row, seen)
            assert self.window_slots.get(slot) == self.slots[slot], (
                f"position {position} sees window KV of {seen} that is not there"
            )

    # BlockMemory

    def part_bytes(self, part: KVPart) -> int:
        return 0 if part is KVPart.WINDOW and self.window_tokens is None else 1

    def write_buffers(self, block: BlockId, part: KVPart) -> list[memoryview]:
        raise AssertionError("the worker moves no bytes")

    def written(self, block: BlockId, part: KVPart) -> None:
        raise AssertionError("the worker moves no bytes")

    def read_buffers(self, block: BlockId, part: KVPart) -> list[memoryview]:
        raise AssertionError("the worker moves no bytes")

    def copy(self, source: BlockId, target: BlockId) -> None:
        self.num_copies += 1
        for part in KVPart:
            self.fill(target, part, self.content(source, part))

    def content(self, block: BlockId, part: KVPart) -> Content:
        slots = self._slots_of(part)
        return tuple(slots.get((block, offset)) for offset in range(self.block_tokens))

    def fill(self, block: BlockId, part: KVPart, content: Content) -> None:
        slots = self._slots_of(part)
        for offset, digests in enumerate(content):
            slots[block, offset] = digests if digests is not None else GARBAGE

    def _slots_of(self, part: KVPart) -> dict[Slot, Digests]:
        return self.slots if part is KVPart.GLOBAL else self.window_slots


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
    window_tokens: int | None = None,
    alignment: int = 1,
    decoder_replay_tokens: int | None = None,
    tier_parts: TierParts | None = None,
    handover_parts: HandoverParts | None = None,
) -> Scheduler:
    return Scheduler(
        KVManager(
            KVGroup(num_blocks=num_blocks, block_tokens=block_tokens, alignment=alignment),
            window_tokens=window_tokens,
        ),
        SchedulerConfig(
            context_tokens=context_tokens,
            max_step_tokens=max_step_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            max_running_sequences=max_running_sequences,
            reserve_blocks_per_sequence=reserve_blocks_per_sequence,
            decoder_replay_tokens=decoder_replay_tokens,
        ),
        lambda tenant: CacheIdentity("model", "layout", tenant),
        tier_parts=tier_parts,
        handover_parts=handover_parts,
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
    keep_s: float = 0.0,
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
        retention=Retention(RetentionClass.CHAT, keep_s),
    )


class Driver:
    """Steps a scheduler with a ScriptedEngine and collects what each choice got."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        block_tokens: int = 4,
        engine: ScriptedEngine | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """``tick`` lets the tiers go on, once per step."""
        self.scheduler = scheduler
        self.engine = engine or ScriptedEngine(block_tokens)
        self.tick = tick
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
        """One turn, audited; False when there was nothing to do."""
        self.tick()
        self.collect(self.scheduler.take_ready())
        plan = self.scheduler.plan()
        self.collect(self.scheduler.take_reports())
        if plan is None:
            self.scheduler.audit()
            return self.is_busy
        self.plans.append(plan)
        try:
            result = self.engine.run(plan)
        except EngineFault as error:
            self.collect(self.scheduler.fail(plan, error))
        else:
            self.collect(self.scheduler.apply(plan, result))
        self.scheduler.audit()
        return True

    @property
    def is_busy(self) -> bool:
        scheduler = self.scheduler
        return scheduler.has_work or scheduler.is_awaiting or scheduler.is_keeping

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                assert not self.is_busy
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
