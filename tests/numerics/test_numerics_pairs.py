"""Pairs of neighbouring entries that are turned, and pairs of tokens that become one row: beside
their definitions in float64, and where steps cut pairs anywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from emulated_tiles import fast_ops
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_cases import HALF_ULP, assert_close, bf16, case_of
from torch import Tensor

from headwater.numerics.ops import KVFormat, LayerKV, Ops, RaggedBatch
from headwater.numerics.reference import ReferenceOps

REFERENCE = ReferenceOps()
EPS = 1e-6


@pytest.fixture(scope="module", params=["reference", "fast"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return REFERENCE if request.param == "reference" else fast_ops("vectors")


def tables(max_positions: int, rotated: int) -> tuple[Tensor, Tensor]:
    """cos and sin [max_positions, rotated / 2]."""
    rates = 0.5 ** torch.arange(rotated // 2)
    angles = torch.outer(torch.arange(float(max_positions)), rates)
    return angles.cos(), angles.sin()


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor, position: int) -> Tensor:
    """float64 [D] at ``position``, one pair after the other."""
    out = x.clone()
    start = len(x) - 2 * cos.shape[1]
    for i in range(cos.shape[1]):
        c, s = float(cos[position, i]), float(sin[position, i])
        first, second = x[start + 2 * i], x[start + 2 * i + 1]
        out[start + 2 * i] = first * c - second * s
        out[start + 2 * i + 1] = second * c + first * s
    return out


# ---- row-wise -----------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 32), (16, 16), (40, 8), (512, 64)])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_neighbouring_pairs_of_a_heads_end_are_turned(
    ops: Ops, head_dim: int, rotated: int, num_heads: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    cos, sin = tables(50, rotated)
    # A part of a wider result, as projections give it.
    wide = bf16(generator, 9, num_heads * head_dim + 24).to(ops.act_dtype)
    x = wide[:, 8 : 8 + num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    positions = torch.tensor([0, 49, 3, 3, 17, 20, 1, 2, 48], dtype=torch.int32)
    before, outside = x.double(), wide[:, :8].clone()
    ops.rotate_pairs(x, cos, sin, positions)
    want = torch.stack(
        [
            torch.stack([rotated_pairs(head, cos, sin, int(p)) for head in token])
            for token, p in zip(before, positions, strict=True)
        ]
    )
    assert_close(x, want, relative=HALF_ULP, absolute=1e-6)
    assert torch.equal(x[..., : head_dim - rotated].double(), before[..., : head_dim - rotated])
    assert torch.equal(wide[:, :8], outside)
    ops.rotate_pairs(x, cos, sin, positions, inverse=True)
    assert_close(x, before, relative=2 * HALF_ULP, absolute=2 * HALF_ULP)


@pytest.mark.parametrize("inner", [1, 16, 130, 3000])
def test_gated_silu_is_clamped_before_it_multiplies(ops: Ops, inner: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    gate_up = bf16(generator, 5, 2 * inner, scale=20).to(ops.act_dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate = gate.clamp(max=10)
    want = gate / (1 + torch.exp(-gate)) * up.clamp(-10, 10)
    got = ops.silu_mul_clamped(gate_up, 10.0)
    assert got.dtype == ops.act_dtype
    assert_close(got, want, relative=2 * HALF_ULP, absolute=1e-6)


# ---- pairs --------------------------------------------------------------------------


class Pairs:
    """Sequences whose tokens are pooled, and steps that bring some of them."""

    def __init__(self, ops: Ops, lengths: Sequence[int], dim: int, rotated: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ops, self.lengths, self.dim = ops, lengths, dim
        self.whole = case_of([(n, n) for n in lengths], 16, generator)
        wide = bf16(generator, sum(lengths), 2 * dim).to(ops.act_dtype)
        # Halves of one result, as a joined projection gives them.
        self.values, self.gates = wide[:, :dim], wide[:, dim:]
        self.norm = torch.rand(dim, generator=generator) + 0.5
        self.cos, self.sin = tables(max(lengths), rotated)
        self.row_ends = torch.tensor(lengths).cumsum(0).tolist()

    def kv(self, kv_format: KVFormat) -> LayerKV:
        return self.ops.allocate_rows(self.whole.num_blocks, 16, self.dim, kv_format, 2)

    def step(
        self, kv: LayerKV, rows: Sequence[tuple[int, int, int]], replayed: Sequence[int] = ()
    ) -> None:
        """Tokens [first, end) of each (sequence, first, end), the first ``replayed`` of which
        keep their rows."""
        lens = [end - first for _, first, end in rows]
        positions = torch.cat([torch.arange(first, end) for _, first, end in rows])
        tokens = torch.cat(
            [
                torch.arange(first, end) + self.row_ends[sequence] - self.lengths[sequence]
                for sequence, first, end in rows
            ]
        )
        slots = self.whole.all_slots[tokens]
        global_slots = None
        if replayed:
            kept = [torch.arange(n) < r for n, r in zip(lens, replayed, strict=True)]
            global_slots = torch.where(torch.cat(kept), -1, slots)
        sequences = [sequence for sequence, _, _ in rows]
        batch = RaggedBatch(
            row_starts=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()]).int(),
            context_lens=torch.tensor([end for _, _, end in rows]).int(),
            block_tables=self.whole.batch.block_tables[sequences],
            positions=positions.int(),
            slots=slots,
            max_row_tokens=max(lens),
            max_context=max(end for _, _, end in rows),
            global_slots=global_slots,
        )
        wide = torch.cat([self.values[tokens], self.gates[tokens]], dim=1)
        self.ops.compress(
            wide[:, : self.dim], wide[:, self.dim :], self.norm, self.cos, self.sin, kv, batch, EPS
        )

    def stored(self, kv: LayerKV, sequence: int, kv_format: KVFormat) -> Tensor:
        """[rows, D] of a sequence."""
        dtype = {KVFormat.FP32: torch.float32, KVFormat.BF16: torch.bfloat16}[kv_format]
        end = self.row_ends[sequence]
        rows = []
        for slot in self.whole.all_slots[end - self.lengths[sequence] : end][::2].tolist():
            (buffer,) = self.ops.kv_buffers(kv, slot // 16) or ()
            rows.append(torch.frombuffer(buffer, dtype=dtype).view(8, -1)[slot % 16 // 2])
        return torch.stack(rows)[:, : self.dim].clone()

    def defined(self, sequence: int) -> Tensor:
        """float64 [pairs, D]."""
        first = self.row_ends[sequence] - self.lengths[sequence]
        rows = []
        for g in range(self.lengths[sequence] // 2):
            pair = slice(first + 2 * g, first + 2 * g + 2)
            shares = self.gates[pair].double().softmax(dim=0)
            pooled = (shares * self.values[pair].double()).sum(dim=0)
            normed = pooled / math.sqrt(float(pooled.square().mean()) + EPS) * self.norm.double()
            rows.append(rotated_pairs(normed, self.cos, self.sin, 2 * g))
        return torch.stack(rows)


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize(("dim", "rotated"), [(64, 32), (24, 8), (512, 64)])
def test_a_pair_becomes_its_pooled_normed_and_turned_row(
    ops: Ops, kv_format: KVFormat, dim: int, rotated: int
) -> None:
    pairs = Pairs(ops, [70, 2, 33], dim, rotated, seed=dim)
    kv = pairs.kv(kv_format)
    pairs.step(kv, [(i, 0, n) for i, n in enumerate(pairs.lengths)])
    relative = HALF_ULP if kv_format is KVFormat.BF16 else 1e-5
    for sequence, length in enumerate(pairs.lengths):
        got = pairs.stored(kv, sequence, kv_format)[: length // 2]
        assert_close(got, pairs.defined(sequence), relative=relative, absolute=2e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_steps_that_cut_pairs_anywhere_store_the_rows_of_one_step(
    ops: Ops, data: st.DataObject, seed: int
) -> None:
    kv_format = data.draw(st.sampled_from(list(KVFormat)))
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    pairs = Pairs(ops, lengths, 24, 8, seed)
    whole, cut = pairs.kv(kv_format), pairs.kv(kv_format)
    pairs.step(whole, [(i, 0, n) for i, n in enumerate(lengths)])
    done = [0] * len(lengths)
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        # Some of the unfinished sequences, in any order.
        open_ones = [i for i, n in enumerate(lengths) if done[i] < n]
        chosen = data.draw(st.permutations(open_ones))[: data.draw(st.integers(1, len(open_ones)))]
        rows = [
            (i, done[i], data.draw(st.integers(done[i] + 1, min(lengths[i], done[i] + 25))))
            for i in chosen
        ]
        pairs.step(cut, rows)
        for sequence, _, end in rows:
            done[sequence] = end
    for sequence, length in enumerate(lengths):
        ours, theirs = (pairs.stored(kv, sequence, kv_format)[: length // 2] for kv in (cut, whole))
        assert torch.equal(ours, theirs)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(length=st.integers(2, 60), data=st.data(), seed=st.integers(0, 2**31))
def test_replayed_tokens_leave_rows_alone_wherever_their_steps_end(
    ops: Ops, length: int, data: st.DataObject, seed: int
) -> None:
    """Rows up to the hit's end are as they were, those behind it as without a replay."""
    hit = data.draw(st.integers(0, length // 2)) * 2
    start = data.draw(st.integers(0, hit))
    pairs = Pairs(ops, [length], 24, 8, seed)
    whole, replay = pairs.kv(KVFormat.BF16), pairs.kv(KVFormat.BF16)
    pairs.step(whole, [(0, 0, length)])
    for block in range(whole.num_blocks):
        for buffer in ops.kv_buffers(replay, block) or ():
            buffer[:] = b"\x11" * len(buffer)
    before = pairs.stored(replay, 0, KVFormat.BF16)
    while start < length:
        end = data.draw(st.integers(start + 1, length))
        pairs.step(replay, [(0, start, end)], [max(0, hit - start)])
        start = end
    after = pairs.stored(replay, 0, KVFormat.BF16)
    assert torch.equal(after[: hit // 2], before[: hit // 2])
    want = pairs.stored(whole, 0, KVFormat.BF16)
    assert torch.equal(after[hit // 2 : length // 2], want[hit // 2 : length // 2])
    assert torch.equal(after[length // 2 :], before[length // 2 :])


def test_a_copied_block_takes_its_open_token_along(ops: Ops) -> None:
    pairs = Pairs(ops, [20], 24, 8, seed=1)
    kv = pairs.kv(KVFormat.BF16)
    pairs.step(kv, [(0, 0, 19)])
    source = int(pairs.whole.all_slots[18]) // 16
    used = {int(slot) // 16 for slot in pairs.whole.all_slots}
    target = next(block for block in range(kv.num_blocks) if block not in used)
    ops.copy_kv_block(kv, source, target)
    pairs.step(kv, [(0, 19, 20)])
    want = pairs.stored(kv, 0, KVFormat.BF16)[9]
    pairs.whole = replace(
        pairs.whole, all_slots=torch.where(
            pairs.whole.all_slots // 16 == source,
            target * 16 + pairs.whole.all_slots % 16,
            pairs.whole.all_slots,
        )
    )  # fmt: skip
    pairs.step(kv, [(0, 19, 20)])
    assert torch.equal(pairs.stored(kv, 0, KVFormat.BF16)[9], want)
