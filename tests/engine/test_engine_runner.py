"""The engine's step with a model small enough to work out: it remembers token ids.

``TallyModel`` keeps ids as its KV and makes a token's hidden state from every id
that its row's block table reaches, so a wrong slot, table, position or gathered
row changes the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headwater.core.blocks import BlockId, blocks_for
from headwater.core.errors import EngineFault
from headwater.core.request import ModelInfo, SampledToken, SamplingParams
from headwater.core.step import RowResult, SampleSpec, SequenceId, StepPlan, StepRow
from headwater.engine.kv_cache import KVCache
from headwater.engine.kv_plan import KVPlan
from headwater.engine.runner import ModelEngine
from headwater.model.config import ModelConfig
from headwater.model.family import CacheGroup
from headwater.model.toy_source import ToyOptions
from headwater.numerics.ops import LayerKV, Need, RaggedBatch

BLOCK_TOKENS = 4
NUM_BLOCKS = 64
CONTEXT_TOKENS = 100
VOCAB_SIZE = 32
HIDDEN = 16
NAN_TOKEN = 31  # a sequence with it has no finite logits from there on
CRASH_TOKEN = 30
GREEDY = SamplingParams(temperature=0.0, num_logprobs=2)


class IdsKV:
    """KV of a model that needs only ids."""

    def __init__(self) -> None:
        self.ids = torch.zeros(NUM_BLOCKS * BLOCK_TOKENS, dtype=torch.int64)

    @property
    def num_blocks(self) -> int:
        return NUM_BLOCKS


class TallyModel:
    """hidden = sum over the context of sin((id + 1) * (position + 1) * k), k = 1..H."""

    cache_plan: tuple[CacheGroup, ...] = ()
    weights_bytes = full_weights_bytes = step_weights_bytes = 0
    flops_per_token = late_flops_per_token = 0
    needs: frozenset[Need] = frozenset()

    def __init__(self) -> None:
        self.largest_head_rows = 0
        self._head = torch.randn(
            HIDDEN, VOCAB_SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )

    @property
    def config(self) -> ModelConfig:
        return ToyOptions().config()

    def forward(self, ids: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        [layer] = kv
        assert isinstance(layer, IdsKV)
        if CRASH_TOKEN in ids:
            raise RuntimeError("kernel fell over\nwith a long story")
        layer.ids[batch.slots] = ids
        hidden = []
        starts = batch.row_starts.tolist()
        for r, table in enumerate(batch.block_tables):
            slots = table[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
            context = layer.ids[slots.flatten()][: batch.context_lens[r]]
            for position in batch.positions[starts[r] : starts[r + 1]].tolist():
                seen = context[: position + 1]
                phases = (seen + 1) * (torch.arange(position + 1) + 1)
                state = torch.sin(phases[:, None] * torch.arange(1.0, HIDDEN + 1)).sum(dim=0)
                hidden.append(state * torch.nan if NAN_TOKEN in seen else state)
        return torch.stack(hidden)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        self.largest_head_rows = max(self.largest_head_rows, len(hidden_rows))
        return (hidden_rows.double() @ self._head).float()


class Ticks:
    """A clock that moves one second per look."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        self.time_s += 1.0
        return self.time_s


def engine(model: TallyModel | None = None, max_logits_bytes: int = 2**20) -> ModelEngine:
    plan = KVPlan(
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        kv_bytes=NUM_BLOCKS * BLOCK_TOKENS * 8,
        reason="test",
    )
    info = ModelInfo(
        model_id="tally",
        family="tally",
        fingerprint="0",
        vocab_size=VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
        block_tokens=BLOCK_TOKENS,
        num_blocks=NUM_BLOCKS,
        kv_bytes_per_token=8,
        weights_format="none",
        weights_bytes=0,
        numerics="test",
        device="cpu",
    )
    return ModelEngine(
        model=model or TallyModel(),
        kv=KVCache(layers=(IdsKV(),), groups=(), plan=plan, bytes_per_token=8, layout="test/1"),
        info=info,
        device=torch.device("cpu"),
        clock=Ticks(),
        max_logits_bytes=max_logits_bytes,
    )


def table_of(sequence_id: int, num_tokens: int = 40) -> tuple[BlockId, ...]:
    """Scattered blocks that no other sequence id (0..5) gets."""
    num_blocks = blocks_for(num_tokens, BLOCK_TOKENS)
    return tuple(BlockId(63 - sequence_id - 6 * i) for i in range(num_blocks))


def row(
    sequence_id: int,
    tokens: Sequence[int],
    start: int = 0,
    end: int | None = None,
    *,
    params: SamplingParams | None = GREEDY,
    num_prompt_logprobs: int | None = None,
) -> StepRow:
    """Tokens [start, end) of a sequence that has ``tokens``; samples when it ends them."""
    end = len(tokens) if end is None else end
    samples = end == len(tokens) and params is not None
    return StepRow(
        sequence_id=SequenceId(sequence_id),
        start=start,
        tokens=tuple(tokens[start:end]),
        block_table=table_of(sequence_id),
        sample=SampleSpec(params=params, position=end) if samples and params else None,
        num_prompt_logprobs=num_prompt_logprobs,
        next_tokens=() if num_prompt_logprobs is None else tuple(tokens[start + 1 : end + 1]),
    )


def run(some_engine: ModelEngine, *rows: StepRow) -> tuple[RowResult, ...]:
    return some_engine.run(StepPlan(rows)).rows


def following(token: SampledToken) -> int:
    """The token to go on with: the chosen one, unless the model treats that one specially."""
    return token.token_id % CRASH_TOKEN


def generate(some_engine: ModelEngine, sequence_id: int, prompt: list[int]) -> list[SampledToken]:
    """Prefill, then five decode steps, alone."""
    tokens = list(prompt)
    chosen = []
    start = 0
    for _ in range(6):
        [result] = run(some_engine, row(sequence_id, tokens, start))
        assert result.token is not None
        chosen.append(result.token)
        start = len(tokens)
        tokens.append(following(result.token))
    return chosen


PROMPTS = [[1, 2, 3], [9] * 13, [4, 5, 6, 7, 8, 9, 10, 11], [2], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 5, 8, 100])
def test_a_sequence_gets_the_same_tokens_alone_in_a_crowd_and_in_chunks(chunk_tokens: int) -> None:
    alone = [generate(engine(), i, prompt) for i, prompt in enumerate(PROMPTS)]
    crowd = engine()
    tokens = [list(prompt) for prompt in PROMPTS]
    computed = [0] * len(PROMPTS)
    chosen: list[list[SampledToken]] = [[] for _ in PROMPTS]
    # Short prompts decode while long ones still prefill: every step is a mix.
    while any(len(c) < 6 for c in chosen):
        busy = [i for i in range(len(PROMPTS)) if len(chosen[i]) < 6]
        ends = [min(len(tokens[i]), computed[i] + chunk_tokens) for i in busy]
        rows = [row(i, tokens[i], computed[i], end) for i, end in zip(busy, ends, strict=True)]
        results = run(crowd, *rows)
        assert [result.sequence_id for result in results] == busy
        for i, end, result in zip(busy, ends, results, strict=True):
            assert (result.token is not None) == (end == len(tokens[i]))
            computed[i] = end
            if result.token is not None:
                chosen[i].append(result.token)
                tokens[i].append(following(result.token))
    assert chosen == alone


def test_blocks_written_by_one_sequence_serve_another_that_shares_them() -> None:
    shared = engine()
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    [first] = run(shared, row(0, prompt))
    borrowed = table_of(0)[:2] + table_of(1)[2:]
    hit = row(1, prompt, start=8)
    [second] = shared.run(
        StepPlan(
            (
                StepRow(
                    sequence_id=hit.sequence_id,
                    start=8,
                    tokens=hit.tokens,
                    block_table=borrowed,
                    sample=hit.sample,
                ),
            )
        )
    ).rows
    assert second.token == first.token


@pytest.mark.parametrize("slice_rows", [1, 2, 3, 7, 1000])
def test_prompt_logprobs_in_slices_and_chunks_are_those_of_one_pass(slice_rows: int) -> None:
    prompt = PROMPTS[4]
    [whole] = run(engine(), row(0, prompt, num_prompt_logprobs=3))
    assert [token.token_id for token in whole.prompt_logprobs] == prompt[1:]
    model = TallyModel()
    sliced = engine(model, max_logits_bytes=slice_rows * VOCAB_SIZE * 4)
    scored: list[SampledToken] = []
    for start, end in ((0, 4), (4, 9), (9, 11)):
        neighbour = row(1, PROMPTS[1], params=None)
        results = run(sliced, neighbour, row(0, prompt, start, end, num_prompt_logprobs=3))
        assert results[0] == RowResult(SequenceId(1))
        scored.extend(results[1].prompt_logprobs)
    assert results[1].token == whole.token
    assert [t.token_id for t in scored] == prompt[1:]
    for got, want in zip(scored, whole.prompt_logprobs, strict=True):
        assert got.logprob == pytest.approx(want.logprob, abs=1e-6)
        assert [t.token_id for t in got.top] == [t.token_id for t in want.top]
    assert model.largest_head_rows <= slice_rows


def test_sampled_rows_also_go_through_the_head_in_slices() -> None:
    rows = [row(i, prompt) for i, prompt in enumerate(PROMPTS)]
    model = TallyModel()
    want = run(engine(model), *rows)
    assert model.largest_head_rows == len(PROMPTS)
    sliced = TallyModel()
    assert run(engine(sliced, max_logits_bytes=1), *rows) == want
    assert sliced.largest_head_rows == 1


def test_a_prompts_logprobs_agree_with_sampling_them_one_by_one() -> None:
    prompt = PROMPTS[2]
    [scored] = run(engine(), row(0, prompt, params=None, num_prompt_logprobs=1))
    for i in range(1, len(prompt)):
        [sampled] = run(engine(), row(0, prompt[:i]))
        assert sampled.token is not None
        assert scored.prompt_logprobs[i - 1].top == sampled.token.top[:1]


def test_a_sequence_without_finite_logits_fails_alone() -> None:
    sick = [1, NAN_TOKEN, 2]
    results = run(
        engine(),
        row(0, PROMPTS[0]),
        row(1, sick),
        row(2, PROMPTS[2]),
        row(3, sick, params=None, num_prompt_logprobs=0),
    )
    assert results[0].token is not None
    assert results[2].token is not None
    for failed in (results[1], results[3]):
        assert failed.token is None
        assert failed.prompt_logprobs == ()
        assert failed.error is not None
        assert "no usable numbers" in failed.error


def test_a_chunk_that_broke_down_fails_before_its_blocks_are_published() -> None:
    """No logits are computed for it, so only its hidden states can tell."""
    sick = [1, 2, NAN_TOKEN, 4, 5, 6, 7, 8]
    healthy, broken = run(engine(), row(0, PROMPTS[1], 0, 8), row(1, sick, 0, 5))
    assert healthy == RowResult(SequenceId(0))
    assert broken.error is not None


def test_a_kernel_error_is_an_engine_fault_and_the_next_step_runs() -> None:
    survivor = engine()
    with pytest.raises(EngineFault, match=r"2 rows and 5 tokens failed: .* kernel fell over$"):
        run(survivor, row(0, [1, 2]), row(1, [1, CRASH_TOKEN, 2]))
    [again] = run(survivor, row(0, [1, 2]))
    assert again == run(engine(), row(0, [1, 2]))[0]


def test_a_plan_beyond_the_context_is_an_engine_fault() -> None:
    with pytest.raises(EngineFault, match="context of 100"):
        run(engine(), row(0, [1] * 101))


def test_seconds_are_split_between_forward_and_sampling() -> None:
    result = engine().run(StepPlan((row(0, [1, 2], num_prompt_logprobs=0),)))
    # One lap each of: forward, head, sampling, the prompt's head, its scoring.
    assert (result.forward_s, result.sample_s) == (3.0, 2.0)


def test_the_engine_says_what_it_serves_and_in_which_layout() -> None:
    assert engine().info.model_id == "tally"
    assert engine().layout == "test/1"
