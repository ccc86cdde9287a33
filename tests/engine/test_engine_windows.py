"""Steps of a model with a global layer and a window layer: cold, hit, replayed and mixed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwater.core.blocks import BlockId
from headwater.core.errors import EngineFault
from headwater.core.request import ModelInfo, SampledToken, SamplingParams
from headwater.core.step import RowResult, SampleSpec, SequenceId, StepPlan, StepRow
from headwater.engine.kv_cache import allocate_kv, kv_bytes_per_token, kv_layout, window_tokens
from headwater.engine.kv_plan import KVPlan
from headwater.engine.runner import ModelEngine
from headwater.model.config import ModelConfig
from headwater.model.family import CacheGroup, CacheKind
from headwater.model.toy_source import ToyOptions
from headwater.numerics.ops import (
    KVFormat,
    LayerKV,
    Need,
    PackedLinear,
    RaggedBatch,
    WeightFormat,
)
from headwater.numerics.reference import ReferenceOps

BLOCK_TOKENS, NUM_BLOCKS, CONTEXT_TOKENS = 4, 64, 100
WINDOW, HIDDEN, HEADS, HEAD_DIM, VOCAB = 6, 32, 2, 16, 40
GLOBAL_LAYER, WINDOW_LAYER = 0, 1
GREEDY = SamplingParams(temperature=0.0, num_logprobs=1)
CACHE_PLAN = (
    CacheGroup(kind=CacheKind.GLOBAL, layers=(GLOBAL_LAYER,), num_kv_heads=1, head_dim=HEAD_DIM),
    CacheGroup(
        kind=CacheKind.WINDOW,
        layers=(WINDOW_LAYER,),
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        window_tokens=WINDOW,
    ),
)


class TwoLayers:
    """Attention only: each layer is x + out(attend(qkv(norm(x))))."""

    cache_plan = CACHE_PLAN
    weights_bytes = full_weights_bytes = step_weights_bytes = 0
    flops_per_token = late_flops_per_token = 0
    needs: frozenset[Need] = frozenset()

    def __init__(self) -> None:
        self.ops = ReferenceOps()
        generator = torch.Generator().manual_seed(3)

        def packed(rows: int, columns: int) -> PackedLinear:
            weight = torch.randn(rows, columns, generator=generator) * 2 / columns**0.5
            return self.ops.pack_linear(weight, None, WeightFormat.FP32)

        self.table = packed(VOCAB, HIDDEN)
        self.qkv = [packed((HEADS + 2) * HEAD_DIM, HIDDEN) for _ in CACHE_PLAN]
        self.out = [packed(HIDDEN, HEADS * HEAD_DIM) for _ in CACHE_PLAN]
        self.ones = torch.ones(HIDDEN)
        angles = torch.outer(torch.arange(float(CONTEXT_TOKENS)), 0.5 ** torch.arange(8.0))
        self.cos, self.sin = angles.cos(), angles.sin()

    @property
    def config(self) -> ModelConfig:
        return ToyOptions().config()

    def forward(self, ids: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        ops = self.ops
        x = ops.embed(ids, self.table)
        hidden = ops.rms_norm(x, self.ones, 1e-6)
        assert batch.global_slots is not None
        for layer, slots, window in (
            (GLOBAL_LAYER, batch.global_slots, None),
            (WINDOW_LAYER, batch.slots, WINDOW),
        ):
            heads = ops.linear(hidden, self.qkv[layer]).view(len(ids), HEADS + 2, HEAD_DIM)
            q, k, v = heads[:, :HEADS], heads[:, HEADS:-1], heads[:, -1:]
            ops.rotate(q, k, self.cos, self.sin, batch.positions)
            ops.store_kv(k, v, kv[layer], slots)
            attended = ops.attend(q, kv[layer], batch, 1.0, window)
            x = x + ops.linear(attended.flatten(1), self.out[layer])
            hidden = ops.rms_norm(x, self.ones, 1e-6)
        return hidden

    def logits(self, hidden_rows: Tensor) -> Tensor:
        return self.ops.logits(hidden_rows, self.table)


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()


class Machine:
    """An engine over ``TwoLayers``, and its KV to look at."""

    def __init__(self) -> None:
        model = TwoLayers()
        plan = KVPlan(
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            context_tokens=CONTEXT_TOKENS,
            kv_bytes=0,
            reason="test",
        )
        self.ops = model.ops
        self.kv = allocate_kv(self.ops, plan, CACHE_PLAN, KVFormat.FP32)
        info = ModelInfo(
            model_id="two-layers",
            family="test",
            fingerprint="0",
            vocab_size=VOCAB,
            context_tokens=CONTEXT_TOKENS,
            block_tokens=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            kv_bytes_per_token=kv_bytes_per_token(self.ops, CACHE_PLAN, KVFormat.FP32),
            weights_format="fp32",
            weights_bytes=0,
            numerics="test",
            device="cpu",
        )
        self.engine = ModelEngine(
            model=model, kv=self.kv, info=info, device=torch.device("cpu"), clock=SystemClock()
        )

    def run(self, *rows: StepRow) -> tuple[RowResult, ...]:
        return self.engine.run(StepPlan(rows)).rows

    def block(self, layer: int, block: int) -> bytes:
        buffers = self.ops.kv_buffers(self.kv.layers[layer], block)
        assert buffers is not None
        return b"".join(buffers)

    def spoil_window(self, blocks: Sequence[int]) -> None:
        """As after a load of global KV alone: window KV of these blocks means nothing."""
        for block in blocks:
            buffers = self.ops.kv_buffers(self.kv.layers[WINDOW_LAYER], block)
            assert buffers is not None
            for buffer in buffers:
                buffer[:] = b"\xff" * buffer.nbytes  # not a number

    def generate(
        self, row: StepRow, num_tokens: int, chunk_tokens: int = CONTEXT_TOKENS
    ) -> list[SampledToken]:
        """Compute the row in chunks, then decode; the window start stays."""
        chosen: list[SampledToken] = []
        for chunk in chunks(row, chunk_tokens):
            [result] = self.run(chunk)
        end = row.end
        while True:
            assert result.token is not None, result.error
            chosen.append(result.token)
            if len(chosen) == num_tokens:
                return chosen
            [result] = self.run(decode_row(row, end, result.token))
            end += 1


def decode_row(row: StepRow, position: int, token: SampledToken) -> StepRow:
    return replace(
        row,
        start=position,
        tokens=(token.token_id,),
        num_replayed=0,
        sample=SampleSpec(params=GREEDY, position=position + 1),
    )


def chunks(row: StepRow, chunk_tokens: int) -> list[StepRow]:
    """The row cut up; replayed tokens are at its beginning."""
    parts = []
    for first in range(0, len(row.tokens), chunk_tokens):
        tokens = row.tokens[first : first + chunk_tokens]
        is_last = first + chunk_tokens >= len(row.tokens)
        parts.append(
            replace(
                row,
                start=row.start + first,
                tokens=tokens,
                num_replayed=max(0, min(len(tokens), row.num_replayed - first)),
                sample=row.sample if is_last else None,
            )
        )
    return parts


def prompt_row(sequence_id: int, prompt: Sequence[int], start: int = 0) -> StepRow:
    """The prompt from ``start`` on, in every fifth block from ``sequence_id`` on."""
    return StepRow(
        sequence_id=SequenceId(sequence_id),
        start=start,
        tokens=tuple(prompt[start:]),
        block_table=tuple(BlockId(block) for block in range(sequence_id, NUM_BLOCKS, 5)),
        sample=SampleSpec(params=GREEDY, position=len(prompt)),
    )


def prompt_of(sequence_id: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(sequence_id)
    return torch.randint(0, VOCAB, (num_tokens,), generator=generator).tolist()


def assert_same(got: Sequence[SampledToken], want: Sequence[SampledToken]) -> None:
    assert [token.token_id for token in got] == [token.token_id for token in want]
    for token, expected in zip(got, want, strict=True):
        assert token.logprob == pytest.approx(expected.logprob, abs=1e-4)


LENGTHS = [3, WINDOW, WINDOW + 1, 17, 30]


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, WINDOW, 100])
def test_ids_are_the_same_alone_in_a_crowd_and_in_chunks(chunk_tokens: int) -> None:
    prompts = [prompt_of(i, num_tokens) for i, num_tokens in enumerate(LENGTHS)]
    alone = [Machine().generate(prompt_row(i, p), 8) for i, p in enumerate(prompts)]
    crowd = Machine()
    todo = [chunks(prompt_row(i, p), chunk_tokens) for i, p in enumerate(prompts)]
    chosen: list[list[SampledToken]] = [[] for _ in prompts]
    while busy := [i for i in range(len(prompts)) if len(chosen[i]) < 8]:
        rows = [todo[i].pop(0) for i in busy]
        for i, row, result in zip(busy, rows, crowd.run(*rows), strict=True):
            if result.token is not None:
                chosen[i].append(result.token)
                todo[i].append(decode_row(row, row.end, result.token))
    for got, want in zip(chosen, alone, strict=True):
        assert_same(got, want)
    assert len({token.token_id for tokens in chosen for token in tokens}) > 8


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("num_hit_tokens", [8, 10, 16, 29])
def test_a_hit_with_its_last_window_gives_the_ids_of_a_cold_run(
    num_hit_tokens: int, chunk_tokens: int
) -> None:
    prompt = prompt_of(1, 30)
    want = Machine().generate(prompt_row(1, prompt), 8)
    machine = Machine()
    cold = prompt_row(1, prompt)
    machine.run(replace(cold, tokens=cold.tokens[:num_hit_tokens], sample=None))
    # What the last window of the hit does not touch may as well be lost.
    window_start = max(0, num_hit_tokens - WINDOW + 1) // BLOCK_TOKENS * BLOCK_TOKENS
    machine.spoil_window(cold.block_table[: window_start // BLOCK_TOKENS])
    hit = replace(prompt_row(1, prompt, num_hit_tokens), window_start=window_start)
    assert_same(machine.generate(hit, 8, chunk_tokens), want)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_a_replay_from_the_beginning_gives_the_ids_of_a_cold_run(chunk_tokens: int) -> None:
    prompt = prompt_of(2, WINDOW + 9)
    want = Machine().generate(prompt_row(2, prompt), 8)
    machine = Machine()
    cold = prompt_row(2, prompt)
    machine.run(replace(cold, tokens=cold.tokens[:WINDOW], sample=None))
    machine.spoil_window(cold.block_table)
    assert_same(machine.generate(replace(cold, num_replayed=WINDOW), 8, chunk_tokens), want)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_a_replay_leaves_the_global_kv_as_it_is_and_writes_the_windows(chunk_tokens: int) -> None:
    prompt = prompt_of(3, 24)
    machine = Machine()
    cold = prompt_row(3, prompt)
    machine.run(replace(cold, tokens=cold.tokens[:20], sample=None))
    blocks = cold.block_table[:6]
    kept = [machine.block(GLOBAL_LAYER, block) for block in blocks]
    machine.spoil_window(cold.block_table)
    lost = [machine.block(WINDOW_LAYER, block) for block in blocks]
    # The hit is 20 tokens; its last 6 are replayed: rows 3 and 4, and 5 is new.
    first = 20 - WINDOW
    replayed = replace(prompt_row(3, prompt, first), window_start=first, num_replayed=WINDOW)
    chosen = machine.generate(replayed, 3, chunk_tokens)
    assert [machine.block(GLOBAL_LAYER, block) for block in blocks[:5]] == kept[:5]
    assert machine.block(GLOBAL_LAYER, blocks[5]) != kept[5]
    written = [machine.block(WINDOW_LAYER, block) for block in blocks]
    assert [now != before for now, before in zip(written, lost, strict=True)] == [
        False, False, False, True, True, True,
    ]  # fmt: skip
    other = Machine()
    other.run(replace(cold, tokens=cold.tokens[:20], sample=None))
    neighbour = prompt_row(4, prompt_of(4, 9))
    other.spoil_window(cold.block_table)
    # The neighbour's chunk and the replay share a step: neither changes the other.
    _, mixed = other.run(neighbour, replayed)
    assert mixed.token is not None
    assert_same([mixed.token], chosen[:1])


@pytest.mark.parametrize(
    ("window_start", "num_replayed", "message"),
    [
        (-1, 0, "before position 0"),
        (5, 0, "after the row does"),
        (4, -1, "fewer than none"),
        (4, 7, "more than all"),
    ],
)
def test_a_row_whose_window_cannot_be_is_a_fault(
    window_start: int, num_replayed: int, message: str
) -> None:
    good = prompt_row(1, prompt_of(1, 3))
    row = prompt_row(0, prompt_of(0, 10), start=4)
    row = replace(row, window_start=window_start, num_replayed=num_replayed)
    with pytest.raises(EngineFault, match=message):
        Machine().run(good, row)


def test_the_window_of_a_cache_plan_is_its_widest() -> None:
    assert window_tokens(CACHE_PLAN) == WINDOW
    wider = replace(CACHE_PLAN[1], window_tokens=9)
    assert window_tokens((*CACHE_PLAN, wider)) == 9
    assert window_tokens(CACHE_PLAN[:1]) is None


def test_the_layout_names_the_window() -> None:
    layout = kv_layout("k", CACHE_PLAN, KVFormat.FP32, 4)
    assert layout == "kv1/k/fp32/block4/global:1x1x16+window6:1x1x16"
