"""The engine with a real model: the seeded toy in plain fp32 numerics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from headwater.core.blocks import BlockId
from headwater.core.errors import ConfigError
from headwater.core.request import SampledToken, SamplingParams
from headwater.core.step import RowResult, SampleSpec, SequenceId, StepPlan, StepRow
from headwater.engine.build import build_engine
from headwater.engine.kv_plan import GIB, KVLimits
from headwater.engine.runner import ModelEngine
from headwater.model.catalogue import ToyLocation
from headwater.model.load import LoadedModel, load_model
from headwater.model.toy_source import ToyOptions
from headwater.numerics.ops import KVFormat, WeightFormat
from headwater.numerics.reference import ReferenceOps

BLOCK_TOKENS = 8
NUM_OUTPUT_TOKENS = 12
PROMPTS = [
    b"Once upon a time",
    b"a",
    b"The quick brown fox jumps over the lazy dog.",
    b"0123456789",
]
GREEDY = SamplingParams(temperature=0.0, num_logprobs=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, num_logprobs=1)


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    location = ToyLocation(options=ToyOptions(seed=5, context=256), model_id="toy")
    return load_model(location, ReferenceOps(), WeightFormat.FP32)


def engine(loaded: LoadedModel, **limits: int) -> ModelEngine:
    return build_engine(
        loaded,
        ops=ReferenceOps(),
        weight_format=WeightFormat.FP32,
        kv_format=KVFormat.FP32,
        limits=KVLimits(**{"block_tokens": BLOCK_TOKENS, "num_blocks": 64, **limits}),
        clock=SystemClock(),
        free_bytes=GIB,
    )


@dataclass
class Generation:
    """A sequence and how far it is; its blocks are ``first_block`` and every fourth after."""

    sequence_id: int
    tokens: list[int]
    first_block: int
    params: SamplingParams
    chosen: list[SampledToken] = field(default_factory=list)
    num_computed: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.chosen) == NUM_OUTPUT_TOKENS

    def row(self, chunk_tokens: int) -> StepRow:
        end = min(len(self.tokens), self.num_computed + chunk_tokens)
        return StepRow(
            sequence_id=SequenceId(self.sequence_id),
            start=self.num_computed,
            tokens=tuple(self.tokens[self.num_computed : end]),
            block_table=tuple(BlockId(b) for b in range(self.first_block, 64, 4)),
            sample=SampleSpec(params=self.params, position=end)
            if end == len(self.tokens)
            else None,
        )

    def apply(self, row: StepRow, result: RowResult) -> None:
        self.num_computed = row.end
        if row.sample is not None:
            assert result.token is not None
            self.chosen.append(result.token)
            self.tokens.append(result.token.token_id)


def advance(some_engine: ModelEngine, generations: Sequence[Generation], chunk_tokens: int) -> None:
    rows = tuple(generation.row(chunk_tokens) for generation in generations)
    results = some_engine.run(StepPlan(rows)).rows
    for generation, row, result in zip(generations, rows, results, strict=True):
        generation.apply(row, result)


def fresh(params: SamplingParams) -> list[Generation]:
    return [Generation(i, list(prompt), i, params) for i, prompt in enumerate(PROMPTS)]


def alone(loaded: LoadedModel, params: SamplingParams) -> list[Generation]:
    generations = fresh(params)
    for generation in generations:
        own_engine = engine(loaded)
        while not generation.is_done:
            advance(own_engine, [generation], 1000)
    return generations


def assert_same(got: Sequence[Generation], want: Sequence[Generation]) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.tokens == w.tokens
        for token, expected in zip(g.chosen, w.chosen, strict=True):
            assert token.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 11, 1000])
def test_ids_are_the_same_alone_mixed_and_chunked(
    loaded: LoadedModel, params: SamplingParams, chunk_tokens: int
) -> None:
    want = alone(loaded, params)
    crowd = engine(loaded)
    generations = fresh(params)
    while busy := [g for g in generations if not g.is_done]:
        advance(crowd, busy, chunk_tokens)
    assert_same(generations, want)
    # Equal ids of a constant output would prove little.
    assert len({token.token_id for g in generations for token in g.chosen}) > 8


def test_ids_are_the_same_after_preemption_into_other_blocks(loaded: LoadedModel) -> None:
    want = alone(loaded, GREEDY)
    crowd = engine(loaded)
    generations = fresh(GREEDY)
    num_steps = 0
    while busy := [g for g in generations if not g.is_done]:
        advance(crowd, busy, 16)
        num_steps += 1
        if num_steps == 7:  # both give up their KV and start again where the other was
            first, second = generations[:2]
            first.first_block, second.first_block = second.first_block, first.first_block
            first.num_computed = second.num_computed = 0
    assert_same(generations, want)


def test_prompt_logprobs_in_chunks_are_those_of_one_pass(loaded: LoadedModel) -> None:
    prompt = tuple(PROMPTS[2])
    whole_row = replace(
        fresh(GREEDY)[2].row(1000), num_prompt_logprobs=2, next_tokens=prompt[1:], sample=None
    )
    [whole] = engine(loaded).run(StepPlan((whole_row,))).rows
    chunked: list[SampledToken] = []
    other = engine(loaded)
    for start in range(0, len(prompt), 10):
        end = min(start + 10, len(prompt))
        chunk = replace(
            whole_row,
            start=start,
            tokens=prompt[start:end],
            next_tokens=prompt[start + 1 : end + 1],
        )
        chunked.extend(other.run(StepPlan((chunk,))).rows[0].prompt_logprobs)
    assert [token.token_id for token in chunked] == list(prompt[1:])
    for got, expected in zip(chunked, whole.prompt_logprobs, strict=True):
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [t.token_id for t in got.top] == [t.token_id for t in expected.top]


def test_the_info_says_what_is_served(loaded: LoadedModel) -> None:
    info = engine(loaded).info
    assert info.model_id == "toy"
    assert info.fingerprint == loaded.fingerprint
    assert info.vocab_size == loaded.config.vocab_size
    assert (info.num_blocks, info.block_tokens, info.context_tokens) == (64, BLOCK_TOKENS, 256)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, head size, fp32
    assert info.weights_format == "fp32"
    assert info.kernels
    assert info.layout == engine(loaded).layout
    assert info.window_tokens is None


def test_d06_the_layout_names_kernels_format_block_size_and_shape(loaded: LoadedModel) -> None:
    name = ReferenceOps().name
    assert engine(loaded).layout == f"kv1/{name}/fp32/block8/global:2x2x16"
    assert engine(loaded, block_tokens=16).layout == f"kv1/{name}/fp32/block16/global:2x2x16"


def test_kv_too_short_for_the_models_context_lowers_it(loaded: LoadedModel) -> None:
    assert engine(loaded, num_blocks=10).info.context_tokens == 80
    with pytest.raises(ConfigError, match=r"model\.context_tokens"):
        engine(loaded, num_blocks=10, context_tokens=256)


def test_kv_larger_than_memory_is_a_config_error(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="are free"):
        engine(loaded, num_blocks=2**20)
