"""What the fast path promises of experts beyond their results: recorded steps, bits that do not
depend on the neighbours or the threads, and numbers that are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from numerics_cases import bf16
from test_numerics_experts import check_experts, random_ids
from test_numerics_program import decode_batch
from torch import Tensor

from headwater.numerics import cpu_experts
from headwater.numerics.cpu import CpuOps
from headwater.numerics.ops import KVFormat, RaggedBatch, WeightFormat

HIDDEN, INNER, EXPERTS, CHOSEN, GROUPS = 64, 48, 8, 2, 4
FORMATS = [WeightFormat.BF16, WeightFormat.INT8]


@pytest.fixture(scope="module")
def ops() -> Iterator[CpuOps]:
    made = CpuOps(2)
    yield made
    made.close()


class Layer:
    """A layer of experts, and grouped linear layers, over a gate of its own."""

    def __init__(
        self, ops: CpuOps, weight_format: WeightFormat, num_experts: int = EXPERTS
    ) -> None:
        self.ops = ops
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> Tensor:
            made: Tensor = torch.randn(*shape, generator=generator) / float(shape[-1]) ** 0.5
            return made

        self.gate, self.bias = weight(num_experts, HIDDEN) * 3, torch.zeros(num_experts)
        self.packed = ops.pack_experts(
            weight(num_experts, 2 * INNER, HIDDEN),
            weight(num_experts, HIDDEN, INNER),
            weight_format,
        )
        self.groups = ops.pack_groups(
            weight(GROUPS, HIDDEN // GROUPS, HIDDEN // GROUPS), weight_format
        )
        self.kv = (ops.allocate_kv(8, 16, 1, 16, KVFormat.BF16),)

    def body(self, x: Tensor, _batch: RaggedBatch | None = None) -> Tensor:
        ids, weights = self.ops.route(x, self.gate, self.bias, CHOSEN, 1.0)
        mixed = self.ops.experts(x, self.packed, ids, weights, 5.0)
        return self.ops.linear_groups(mixed, self.groups)


def tokens_of(num_tokens: int, seed: int) -> Tensor:
    return bf16(torch.Generator().manual_seed(seed), num_tokens, HIDDEN)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_recorded_step_follows_the_routing_of_its_own_tokens(
    ops: CpuOps, weight_format: WeightFormat
) -> None:
    layer = Layer(ops, weight_format)
    programs = ops._programs
    before = len(programs)
    sizes = (1, 2, 16, 31, 33, 64)
    for step in range(4):
        for num_rows in sizes:
            x = tokens_of(num_rows, seed=100 * num_rows + step)
            batch = decode_batch([1 + row % 2 for row in range(num_rows)])
            replayed = ops.replay(layer.body, x.clone(), layer.kv, batch)
            assert torch.equal(replayed, layer.body(x))
    assert len(programs) == before + len(sizes)
    # None of them went round the recording.
    assert all(program is not None for program in list(programs._programs.values())[before:])


@pytest.mark.parametrize("num_tokens", [32, 33, 200])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_token_has_the_same_bits_among_others(
    ops: CpuOps, num_tokens: int, weight_format: WeightFormat
) -> None:
    layer = Layer(ops, weight_format)
    x = tokens_of(num_tokens, seed=1)
    ids, weights = ops.route(x, layer.gate, layer.bias, CHOSEN, 1.0)
    mixed = ops.experts(x, layer.packed, ids, weights, 5.0)
    grouped = ops.linear_groups(mixed, layer.groups)
    # As many again in another order: the kernel stays, the neighbours change.
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(2))
    other_ids, other_weights = ops.route(x[order], layer.gate, layer.bias, CHOSEN, 1.0)
    assert torch.equal(other_ids, ids[order])
    assert torch.equal(other_weights, weights[order])
    other = ops.experts(x[order], layer.packed, other_ids, other_weights, 5.0)
    assert torch.equal(other, mixed[order])
    for token in (0, num_tokens - 1):
        alone = slice(token, token + 1)
        alone_ids, alone_weights = ops.route(x[alone], layer.gate, layer.bias, CHOSEN, 1.0)
        assert torch.equal(alone_ids, ids[alone])
        assert torch.equal(alone_weights, weights[alone])
        assert torch.equal(ops.linear_groups(mixed[alone], layer.groups), grouped[alone])
        if num_tokens <= 32:  # the same kernel
            got = ops.experts(x[alone], layer.packed, alone_ids, alone_weights, 5.0)
            assert torch.equal(got, mixed[alone])


def test_the_number_of_threads_changes_no_bits(ops: CpuOps) -> None:
    alone = CpuOps(1)
    for num_tokens in (1, 7, 40, 300):
        x = tokens_of(num_tokens, seed=num_tokens)
        want = Layer(alone, WeightFormat.BF16).body(x)
        assert torch.equal(Layer(ops, WeightFormat.BF16).body(x), want)
    alone.close()


@pytest.mark.parametrize("num_tokens", [5, 100])
def test_what_is_not_a_number_stays_with_its_token(ops: CpuOps, num_tokens: int) -> None:
    layer = Layer(ops, WeightFormat.BF16)
    x = tokens_of(num_tokens, seed=1)
    x[1], x[3, 7] = torch.nan, torch.inf
    ids, weights = ops.route(x, layer.gate, layer.bias, CHOSEN, 1.0)
    assert bool(((ids >= 0) & (ids < EXPERTS)).all())
    assert bool((ids[:, 0] < ids[:, 1]).all())
    got = ops.experts(x, layer.packed, ids, weights, 5.0)
    assert bool(got[1].isnan().all())
    clean = x.clone()
    clean[1], clean[3] = 0, 0
    same = ops.experts(clean, layer.packed, ids, torch.nan_to_num(weights), 5.0)
    others = [token for token in range(num_tokens) if token not in (1, 3)]
    assert torch.equal(got[others], same[others])


def test_views_of_wider_rows_are_taken_as_they_are(ops: CpuOps) -> None:
    layer = Layer(ops, WeightFormat.BF16)
    for num_tokens in (3, 100):
        wide = bf16(torch.Generator().manual_seed(3), num_tokens, 2 * HIDDEN)
        for view in (wide[:, 32 : 32 + HIDDEN], wide[:, ::2]):
            assert torch.equal(layer.body(view), layer.body(view.contiguous()))


def test_grouped_layers_go_through_long_inputs_in_slabs(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(ops, WeightFormat.BF16)
    x = tokens_of(500, seed=4)
    want = ops.linear_groups(x, layer.groups)
    monkeypatch.setattr(cpu_experts, "_SLAB_BYTES", 0)
    monkeypatch.setattr(cpu_experts, "_FEWEST_SLAB_TOKENS", 96)
    assert torch.equal(ops.linear_groups(x, layer.groups), want)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_tokens", [2, 70])
def test_rows_that_would_clash_in_the_cache_are_kept_apart(
    ops: CpuOps, num_tokens: int, weight_format: WeightFormat
) -> None:
    check_experts(
        ops,
        random_ids(num_tokens, 3, 2, seed=1),
        num_experts=3,
        hidden=1_024,
        inner=1_024,
        seed=num_tokens,
        weight_format=weight_format,
    )
    packed = ops.pack_experts(torch.ones(1, 2, 1_024), torch.ones(1, 1_024, 1), weight_format)
    assert packed.gate_up.row_bytes % 1_024 != 0


@pytest.mark.parametrize("num_tokens", [1, 64, 130])
def test_many_experts_and_many_of_them_for_each_token(ops: CpuOps, num_tokens: int) -> None:
    for weight_format in FORMATS:
        check_experts(
            ops,
            random_ids(num_tokens, 384, 6, seed=num_tokens),
            num_experts=384,
            hidden=64,
            inner=32,
            seed=1,
            weight_format=weight_format,
        )
