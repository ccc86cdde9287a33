"""Recorded steps give, bit for bit, what the same calls give when Python makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwater.numerics import cpu_program
from headwater.numerics.cpu import CpuOps
from headwater.numerics.ops import KVFormat, LayerKV, PackedLinear, RaggedBatch, WeightFormat

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, NUM_BLOCKS = 64, 4, 2, 16, 16, 256


@pytest.fixture
def ops() -> Iterator[CpuOps]:
    made = CpuOps(2)
    yield made
    made.close()


class Layer:
    """One layer in the shape of a model's, over KV of its own."""

    def __init__(
        self,
        ops: CpuOps,
        weight_format: WeightFormat = WeightFormat.BF16,
        window_tokens: int | None = None,
    ) -> None:
        self.ops = ops
        self.window_tokens = window_tokens
        generator = torch.Generator().manual_seed(1)

        def packed(rows: int, columns: int) -> PackedLinear:
            weight = torch.randn(rows, columns, generator=generator) / columns**0.5
            return ops.pack_linear(weight, torch.ones(rows) * 0.1, weight_format)

        self.qkv = packed((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.out = packed(HIDDEN, HEADS * HEAD_DIM)
        self.norm = torch.ones(HIDDEN)
        angles = torch.outer(torch.arange(4096.0), torch.tensor([1.0, 0.3, 0.1, 0.03] * 2))
        self.cos, self.sin = angles.cos(), angles.sin()
        layer = ops.allocate_kv(NUM_BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, KVFormat.BF16)
        self.kv: tuple[LayerKV, ...] = (layer,)

    def body(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        ops = self.ops
        sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        parts = torch.split(ops.linear(ops.rms_norm(x, self.norm, 1e-5), self.qkv), sizes, dim=-1)
        q, k, v = (part.view(x.shape[0], -1, HEAD_DIM) for part in parts)
        ops.rotate(q, k, self.cos, self.sin, batch.positions)
        slots = batch.slots if batch.global_slots is None else batch.global_slots
        ops.store_kv(k, v, self.kv[0], slots)
        attended = ops.attend(q, self.kv[0], batch, HEAD_DIM**-0.5, self.window_tokens)
        mixed = ops.linear(attended.view(x.shape[0], -1), self.out)
        return ops.add_rms_norm(mixed, x, self.norm, 1e-5)[0]


def decode_batch(contexts: list[int]) -> RaggedBatch:
    """One new token per row; row r's blocks are its own."""
    per_row = NUM_BLOCKS // len(contexts)
    width = max(-(-context // BLOCK_TOKENS) for context in contexts)
    assert width <= per_row
    tables = torch.stack(
        [torch.arange(width, dtype=torch.int32) + row * per_row for row in range(len(contexts))]
    )
    positions = torch.tensor([context - 1 for context in contexts], dtype=torch.int32)
    rows = torch.arange(len(contexts))
    blocks = tables[rows, positions // BLOCK_TOKENS].long()
    return RaggedBatch(
        row_starts=torch.arange(len(contexts) + 1, dtype=torch.int32),
        context_lens=positions + 1,
        block_tables=tables,
        positions=positions,
        slots=blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS,
        max_row_tokens=1,
        max_context=max(contexts),
    )


def check(layer: Layer, contexts: list[int], seed: int) -> None:
    check_batch(layer, decode_batch(contexts), seed)


def check_batch(layer: Layer | RowsLayer, batch: RaggedBatch, seed: int) -> None:
    contexts = batch.context_lens.tolist()
    x = torch.randn(len(contexts), HIDDEN, generator=torch.Generator().manual_seed(seed))
    x = x.to(torch.bfloat16)
    replayed = layer.ops.replay(layer.body, x.clone(), layer.kv, batch)
    called = layer.body(x.clone(), batch)
    assert torch.equal(replayed, called), contexts


@pytest.mark.parametrize("weight_format", [WeightFormat.BF16, WeightFormat.INT8])
def test_a_replayed_step_equals_the_called_one(ops: CpuOps, weight_format: WeightFormat) -> None:
    layer = Layer(ops, weight_format)
    for step in range(4):
        for num_rows in (1, 2, 7, 16, 31):
            check(layer, [20 + 3 * row + step for row in range(num_rows)], seed=step)


def test_contexts_that_grow_past_what_was_recorded_are_recorded_anew(ops: CpuOps) -> None:
    layer = Layer(ops)
    for context in (1, 127, 128, 129, 255, 256, 257, 700, 2000, 130):
        check(layer, [context, max(1, context // 2)], seed=context)


@pytest.mark.parametrize("window_tokens", [None, 16, 100, 512])
def test_window_starts_and_replays_are_those_of_each_step(
    ops: CpuOps, window_tokens: int | None
) -> None:
    layer = Layer(ops, window_tokens=window_tokens)
    # What the slots of replayed tokens hold must come from earlier steps.
    filled = torch.randn(NUM_BLOCKS * BLOCK_TOKENS, KV_HEADS, HEAD_DIM).to(torch.bfloat16)
    ops.store_kv(filled, filled, layer.kv[0], torch.arange(NUM_BLOCKS * BLOCK_TOKENS))
    for step in range(8):
        contexts = [20 + step, 150 - step, 300 + 90 * step]
        batch = decode_batch(contexts)
        if step % 3:
            batch = replace(
                batch,
                window_starts=torch.tensor([step, 100 + step, 200 + 85 * step], dtype=torch.int32),
                global_slots=torch.where(torch.arange(3) == step % 4, -1, batch.slots),
            )
        check_batch(layer, batch, seed=step)


def test_a_replayed_token_of_a_recorded_step_leaves_its_global_kv(ops: CpuOps) -> None:
    layer = Layer(ops)
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    for step in range(3):
        batch = decode_batch([30 + step, 40 + step])
        batch = replace(batch, global_slots=torch.tensor([-1, int(batch.slots[1])]))
        first, second = (int(slot) // BLOCK_TOKENS for slot in batch.slots)
        before = [ops.kv_buffers(layer.kv[0], block) for block in (first, second)]
        kept = [b"".join(parts) for parts in before if parts is not None]
        ops.replay(layer.body, x.clone(), layer.kv, batch)
        after = [b"".join(parts) for parts in before if parts is not None]
        assert after[0] == kept[0]
        assert after[1] != kept[1]


class RowsLayer:
    """One layer whose rows are keys and values, with closed rows of its own; ``ratio`` 0:
    without."""

    def __init__(self, ops: CpuOps, ratio: int) -> None:
        self.ops, self.ratio = ops, ratio
        generator = torch.Generator().manual_seed(ratio)

        def packed(rows: int, columns: int) -> PackedLinear:
            weight = torch.randn(rows, columns, generator=generator) / columns**0.5
            return ops.pack_linear(weight, None, WeightFormat.BF16)

        self.queries = packed(HEADS * HEAD_DIM, HIDDEN)
        self.rows = packed(3 * HEAD_DIM, HIDDEN)  # the window's, a source's values, its gates
        self.out = packed(2 * HIDDEN, HEADS * HEAD_DIM)
        self.norm, self.row_norm = torch.ones(HIDDEN), torch.full((HEAD_DIM,), 0.7)
        self.sinks = torch.randn(HEADS, generator=generator)
        angles = torch.outer(torch.arange(4096.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
        self.cos, self.sin = angles.cos(), angles.sin()
        window = ops.allocate_rows(NUM_BLOCKS, BLOCK_TOKENS, HEAD_DIM, KVFormat.BF16)
        self.kv: tuple[LayerKV, ...] = (window,)
        if ratio:
            source = ops.allocate_rows(NUM_BLOCKS, BLOCK_TOKENS, HEAD_DIM, KVFormat.BF16, ratio)
            self.kv = (window, source)

    def body(self, x: Tensor, batch: RaggedBatch) -> Tensor:
        ops, (window, *sources) = self.ops, self.kv
        normed = ops.rms_norm(x, self.norm, 1e-5)
        q = ops.linear(normed, self.queries).view(x.shape[0], HEADS, HEAD_DIM)
        rows, values, gates = ops.linear(normed, self.rows).split(HEAD_DIM, dim=-1)
        for part in (q, rows[:, None]):
            ops.rotate_pairs(part, self.cos, self.sin, batch.positions)
        ops.store_rows(rows, window, batch.slots)
        if self.ratio == 1:
            slots = batch.slots if batch.global_slots is None else batch.global_slots
            ops.store_rows(values, sources[0], slots)
        elif self.ratio == 2:
            ops.compress(values, gates, self.row_norm, self.cos, self.sin, sources[0], batch, 1e-5)
        attended = ops.attend_rows(
            q, window, sources[0] if sources else None, self.sinks, batch, HEAD_DIM**-0.5, 100
        )
        ops.rotate_pairs(attended, self.cos, self.sin, batch.positions, inverse=True)
        mixed = ops.linear(attended.view(x.shape[0], -1), self.out)
        return ops.add_rms_norm(ops.silu_mul_clamped(mixed, 10.0), x, self.norm, 1e-5)[0]


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_steps_over_rows_are_recorded_and_equal_the_called_ones(ops: CpuOps, ratio: int) -> None:
    layer = RowsLayer(ops, ratio)
    for step in range(9):
        for num_rows in (1, 3, 16):
            contexts = [max(1, 140 - 9 * row) + step for row in range(num_rows)]
            batch = decode_batch(contexts)
            if step % 3 == 2:
                batch = replace(
                    batch,
                    window_starts=torch.tensor(contexts, dtype=torch.int32) // 2,
                    global_slots=torch.where(torch.arange(num_rows) == 0, -1, batch.slots),
                )
            check_batch(layer, batch, seed=step)
    for context in (1, 255, 256, 700, 2000, 3001):
        check_batch(layer, decode_batch([context]), seed=context)
    assert all(program is not None for program in ops._programs._programs.values())


def test_results_outlive_the_next_replay(ops: CpuOps) -> None:
    layer = Layer(ops)
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    first = layer.ops.replay(layer.body, x.clone(), layer.kv, decode_batch([30, 31]))
    kept = first.clone()
    layer.ops.replay(layer.body, -x, layer.kv, decode_batch([32, 33]))
    assert torch.equal(first, kept)


def test_scratch_that_grows_later_does_not_pull_memory_from_under_a_program(ops: CpuOps) -> None:
    layer = Layer(ops)
    check(layer, [40], seed=0)
    wide = ops.pack_linear(torch.randn(64, 8192), None, WeightFormat.BF16)
    for _ in range(3):
        ops.linear(torch.randn(31, 8192).to(torch.bfloat16), wide)
        torch.zeros(1 << 20)  # so that freed memory would be used by somebody else
        check(layer, [41], seed=1)


def test_two_models_on_one_implementation_do_not_share_programs(ops: CpuOps) -> None:
    first, second = Layer(ops), Layer(ops, WeightFormat.INT8)
    for step in range(2):
        check(first, [10 + step], seed=step)
        check(second, [10 + step], seed=step)


def test_a_body_that_leaves_the_kernels_is_never_replayed(ops: CpuOps) -> None:
    layer = Layer(ops)
    # A strided input makes torch copy: a replay would read the copy of the first step.
    wide = ops.pack_linear(torch.eye(HIDDEN), None, WeightFormat.BF16)

    def body(x: Tensor, batch: RaggedBatch) -> Tensor:
        return ops.linear(x.t().contiguous().t(), wide)

    for step in range(3):
        x = torch.full((2, HIDDEN), float(step), dtype=torch.bfloat16)
        result = ops.replay(body, x.clone(), layer.kv, decode_batch([5, 6]))
        assert torch.equal(result, x)


def test_programs_are_bounded(ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_program, "MAX_PROGRAMS", 3)
    layer = Layer(ops)
    for step in range(2):
        for num_rows in range(1, 7):
            check(layer, [8 + row for row in range(num_rows)], seed=step)
    assert len(ops._programs) == 3
