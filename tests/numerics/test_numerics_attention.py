"""Attention over paged KV: every path beside a dense masked softmax, windows included.

Whatever a row does not see is not a number here: KV past its context, KV before its
window KV begins, and every block out of its reach.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_tiles import fast_ops
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_cases import HALF_ULP, Case, assert_close, bf16, case_of
from torch import Tensor

from headwater.numerics import cpu_chunk_attention
from headwater.numerics.cpu import CpuOps
from headwater.numerics.cpu_attention import NO_WINDOW, SPLIT_TOKENS, most_splits
from headwater.numerics.cpu_chunk_attention import (
    ITEM_LANES,
    SPAN_KEYS,
    ChunkRow,
    plan_chunks,
)
from headwater.numerics.cpu_kv import FEW_QUERIES
from headwater.numerics.cpu_prefill import PIECE_TOKENS
from headwater.numerics.cpu_team import MAX_CHUNKS
from headwater.numerics.ops import KVFormat, LayerKV, Ops
from headwater.numerics.reference import ReferenceOps

REFERENCE = ReferenceOps()


@pytest.fixture(scope="module", params=["vectors", "tiles", "gather"])
def fast(request: pytest.FixtureRequest) -> CpuOps:
    return fast_ops(request.param)


class Sequences:
    """KV of a case's rows, stored, and what a dense softmax makes of it."""

    def __init__(
        self, case: Case, generator: torch.Generator, *, num_kv_heads: int, head_dim: int,
        block_tokens: int, window_tokens: int | None = None, scale: float = 1.0,
    ) -> None:  # fmt: skip
        num_stored = case.all_slots.shape[0]
        self.block_tokens, self.window_tokens = block_tokens, window_tokens
        self.k, self.v = (
            bf16(generator, num_stored, num_kv_heads, head_dim, scale=scale) for _ in range(2)
        )
        ends = case.batch.context_lens.cumsum(0).tolist()
        self.rows = [
            slice(end - n, end)
            for end, n in zip(ends, case.batch.context_lens.tolist(), strict=True)
        ]
        self.window_starts = [0] * len(self.rows)
        kept = torch.ones(num_stored, dtype=torch.bool)
        if window_tokens is not None and case.batch.window_starts is not None:
            self.window_starts = case.batch.window_starts.tolist()
            for row, first in zip(self.rows, self.window_starts, strict=True):
                kept[row][:first] = False
        self.kept = kept
        self.case = self._out_of_reach(case)

    def _out_of_reach(self, case: Case) -> Case:
        """Blocks that no token of the row sees become one that holds no numbers."""
        if self.window_tokens is None:
            return case
        tables = case.batch.block_tables.clone()
        unused = set(range(case.num_blocks)) - set((case.all_slots // self.block_tokens).tolist())
        for row, table in enumerate(tables):
            first_query = int(case.batch.positions[case.tokens(row)][0])
            first = max(self.window_starts[row], first_query - self.window_tokens + 1)
            table[: first // self.block_tokens] = min(unused)
        return replace(case, batch=replace(case.batch, block_tables=tables))

    def stored(self, ops: Ops, kv_format: KVFormat) -> LayerKV:
        num_kv_heads, head_dim = self.k.shape[1:]
        kv = ops.allocate_kv(
            self.case.num_blocks, self.block_tokens, num_kv_heads, head_dim, kv_format
        )
        everywhere = torch.arange(self.case.num_blocks * self.block_tokens)
        nothing = torch.full(
            (len(everywhere), num_kv_heads, head_dim), torch.nan, dtype=ops.act_dtype
        )
        ops.store_kv(nothing, nothing, kv, everywhere)
        k, v = (part[self.kept].to(ops.act_dtype) for part in (self.k, self.v))
        ops.store_kv(k, v, kv, self.case.all_slots[self.kept])
        return kv

    def dense(self, q: Tensor, scale: float) -> Tensor:
        """[T, N, D] in float64, from the definition."""
        out = torch.empty(q.shape, dtype=torch.float64)
        group = q.shape[1] // self.k.shape[1]
        for row, slots in enumerate(self.rows):
            tokens = self.case.tokens(row)
            k, v = (part[slots].double().repeat_interleave(group, 1) for part in (self.k, self.v))
            p = self.case.batch.positions[tokens, None]
            key = torch.arange(k.shape[0])
            seen = key <= p
            if self.window_tokens is not None:
                seen &= (key >= p - self.window_tokens + 1) & (key >= self.window_starts[row])
            scores = torch.einsum("qnd,knd->nqk", q[tokens].double(), k) * scale
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("nqk,knd->qnd", shares, v)
        return out


def check(
    fast: CpuOps, sequences: Sequences, generator: torch.Generator, group: int,
    kv_format: KVFormat,
) -> None:  # fmt: skip
    """The fast path and the reference against the dense softmax."""
    num_tokens = sequences.case.batch.positions.shape[0]
    num_kv_heads, head_dim = sequences.k.shape[1:]
    q = bf16(generator, num_tokens, num_kv_heads * group, head_dim)
    scale = head_dim**-0.5
    want = sequences.dense(q, scale)
    largest = float(sequences.v.float().abs().max())
    batch, window_tokens = sequences.case.batch, sequences.window_tokens
    exact = REFERENCE.attend(
        q.float(), sequences.stored(REFERENCE, KVFormat.FP32), batch, scale, window_tokens
    )
    assert_close(exact, want, relative=1e-5, absolute=1e-5 * largest)
    got = fast.attend(q, sequences.stored(fast, kv_format), batch, scale, window_tokens)
    # An output is a mean of values with weights that add up to 1; flash attention rounds
    # each weight to bfloat16, so the mean moves by at most 2**-8 of the largest value.
    assert_close(got, want, relative=HALF_ULP, absolute=2.0**-8 * largest)


NUM_NEW = st.one_of(st.just(1), st.integers(1, 2 * FEW_QUERIES), st.integers(1, 80))
ROWS = st.lists(
    st.tuples(NUM_NEW, st.integers(0, 300)).map(lambda row: (row[0], row[0] + row[1])),
    min_size=1,
    max_size=5,
)


@st.composite
def window_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        num_new, past = draw(NUM_NEW), draw(st.integers(0, 300))
        rows.append((num_new, num_new + past, draw(st.one_of(st.just(0), st.integers(0, past)))))
    return rows


SHAPES = {
    "seed": st.integers(0, 2**31),
    "num_kv_heads": st.integers(1, 3),
    "group": st.integers(1, 8),
    "head_dim": st.sampled_from([16, 20, 32, 64, 72, 96, 128, 256]),
    "block_tokens": st.sampled_from([16, 32]),
    "kv_format": st.sampled_from([KVFormat.BF16, KVFormat.FP32]),
}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=ROWS, **SHAPES)
def test_attention_over_stored_kv_is_the_dense_softmax_on_any_mix_of_rows(
    fast: CpuOps, seed: int, rows: list[tuple[int, int]], num_kv_heads: int, group: int,
    head_dim: int, block_tokens: int, kv_format: KVFormat,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    sequences = Sequences(
        case_of(rows, block_tokens, generator), generator, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_tokens=block_tokens,
    )  # fmt: skip
    check(fast, sequences, generator, group, kv_format)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    rows=window_rows(), window_tokens=st.one_of(st.integers(1, 40), st.integers(1, 400)), **SHAPES
)
def test_windows_are_the_dense_softmax_on_any_mix_of_rows(
    fast: CpuOps, seed: int, rows: list[tuple[int, int, int]], window_tokens: int,
    num_kv_heads: int, group: int, head_dim: int, block_tokens: int, kv_format: KVFormat,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    sequences = Sequences(
        case_of(rows, block_tokens, generator), generator, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_tokens=block_tokens, window_tokens=window_tokens,
    )  # fmt: skip
    check(fast, sequences, generator, group, kv_format)


@pytest.mark.parametrize("window_tokens", [1, 2, 15, 16, 17, 32, 33, 127, 128, 129, 200])
def test_rows_at_the_edges_of_windows_blocks_and_tiles(fast: CpuOps, window_tokens: int) -> None:
    generator = torch.Generator().manual_seed(window_tokens)
    edges = {1, 8, 9, 15, 16, 17, window_tokens - 1, window_tokens, window_tokens + 1}
    rows = []
    for num_new in sorted(n for n in edges if n > 0):
        for past in (0, 1, 16, 31, window_tokens - 1, window_tokens, window_tokens + 1, 128):
            rows += [(num_new, num_new + past, first) for first in {0, past // 2, past}]
    sequences = Sequences(
        case_of(rows, 32, generator), generator, num_kv_heads=1, head_dim=32, block_tokens=32,
        window_tokens=window_tokens,
    )  # fmt: skip
    check(fast, sequences, generator, 2, KVFormat.BF16)


@pytest.mark.parametrize("window_tokens", [16, PIECE_TOKENS - 1, PIECE_TOKENS, 512])
def test_long_chunks_with_windows_in_the_shape_of_gemma(fast: CpuOps, window_tokens: int) -> None:
    generator = torch.Generator().manual_seed(window_tokens)
    rows = [(PIECE_TOKENS - 1, 300, 0), (PIECE_TOKENS + 1, 600, 333), (1, 700, 100)]
    rows += [(2 * PIECE_TOKENS, 2 * PIECE_TOKENS + 700, 690), (520, 520, 0)]
    sequences = Sequences(
        case_of(rows, 32, generator), generator, num_kv_heads=1, head_dim=256, block_tokens=32,
        window_tokens=window_tokens,
    )  # fmt: skip
    check(fast, sequences, generator, 4, KVFormat.BF16)


@pytest.mark.parametrize("parts_per_thread", [1, 3, 1_000])
@pytest.mark.parametrize("window_tokens", [None, 300, 700])
def test_a_chunk_is_the_dense_softmax_in_however_many_parts(
    monkeypatch: pytest.MonkeyPatch, window_tokens: int | None, parts_per_thread: int
) -> None:
    """The first queries of a long chunk see fewer spans than its last ones have parts. The
    results of the parts go to memory that held no numbers."""
    monkeypatch.setattr(cpu_chunk_attention, "_PARTS_PER_THREAD", parts_per_thread)
    fast = fast_ops("vectors")
    fast._attention._scratch.bytes("partials", 1 << 21).fill_(255)
    generator = torch.Generator().manual_seed(parts_per_thread)
    for rows in (
        [(9, 1_500, 0)],
        [(12, 1_290, 1_000), (1, 50, 0), (17, 900, 20)],
        [(700, 700, 0), (8, 900, 0), (10, 20, 0)],
    ):
        sequences = Sequences(
            case_of(rows, 16, generator), generator, num_kv_heads=2, head_dim=32,
            block_tokens=16, window_tokens=window_tokens,
        )  # fmt: skip
        check(fast, sequences, generator, 3, KVFormat.BF16)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(st.integers(9, 3_000), st.integers(0, 9_000)), min_size=1),
    group=st.integers(1, 16),
    num_kv_heads=st.integers(1, 32),
    window=st.one_of(st.just(NO_WINDOW), st.integers(1, 5_000)),
    num_threads=st.integers(1, 128),
)
def test_a_plan_has_all_items_and_no_more_chunks_than_a_call_may(
    shapes: list[tuple[int, int]], group: int, num_kv_heads: int, window: int, num_threads: int
) -> None:
    plan = plan_chunks(chunk_rows(shapes, window), group, num_kv_heads, window, num_threads)
    num_parts, per_chunk = plan.words[1:3].tolist()
    num_items = num_kv_heads * sum(-(-num_new * group // ITEM_LANES) for num_new, _ in shapes)
    assert num_parts >= num_items
    assert 0 < plan.num_chunks <= MAX_CHUNKS
    assert (plan.num_chunks - 1) * per_chunk < num_parts <= plan.num_chunks * per_chunk
    assert (plan.num_partials > 0) == (num_parts > num_items)


@pytest.mark.parametrize("limit", [4, 8])
def test_tiles_leave_what_one_launch_cannot_hold_to_the_vectors(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of 131,040 tokens in small: keys in the first case, queries in the second."""

    def forbidden(*_: object) -> None:
        raise AssertionError("more pieces than a launch counts")

    rows = [(20, 300)] if limit == 4 else [(100, 128)]
    monkeypatch.setattr("headwater.numerics.cpu_kv.MAX_TILE_CHUNKS", limit)
    monkeypatch.setattr("headwater.numerics.cpu_kv.PagedAttention._attend_tiles", forbidden)
    generator = torch.Generator().manual_seed(limit)
    sequences = Sequences(
        case_of(rows, 32, generator), generator, num_kv_heads=2, head_dim=64, block_tokens=32
    )
    check(fast_ops("tiles"), sequences, generator, 3, KVFormat.BF16)


def test_few_queries_of_a_long_context_are_work_for_every_thread() -> None:
    one = chunk_rows([(9, 100_000)], NO_WINDOW)
    assert plan_chunks(one, 1, 1, NO_WINDOW, 64).num_chunks >= 64
    assert plan_chunks(one * 64, 1, 1, NO_WINDOW, 64).num_partials > 0
    assert plan_chunks(one * 200, 1, 1, NO_WINDOW, 64).num_partials == 0
    # Parts of less than two spans are not worth it.
    assert plan_chunks(one, 1, 1, 2 * SPAN_KEYS, 64).num_chunks == 1


def chunk_rows(shapes: list[tuple[int, int]], window: int) -> list[ChunkRow]:
    """Rows of (new tokens, positions before them)."""
    return [
        ChunkRow(
            number=i, first_token=0, end_token=num_new, context=num_new + past,
            first_seen=max(0, past - window + 1), table_address=0,
        )
        for i, (num_new, past) in enumerate(shapes)
    ]  # fmt: skip


def test_a_layer_without_a_window_sees_what_is_before_the_window_start(fast: CpuOps) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [(1, 200, 150), (20, 200, 100), (3, 40, 30)]
    sequences = Sequences(
        case_of(rows, 16, generator), generator, num_kv_heads=2, head_dim=64, block_tokens=16
    )
    check(fast, sequences, generator, 2, KVFormat.BF16)


@pytest.mark.parametrize("window_tokens", [None, 100])
@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.FP32])
def test_decode_attention_is_as_exact_as_its_rounding(
    fast: CpuOps, kv_format: KVFormat, window_tokens: int | None
) -> None:
    generator = torch.Generator().manual_seed(6)
    case = case_of([(1, 700, 0), (3, 129, 60), (1, 1, 0), (1, 128, 0)], 16, generator)
    sequences = Sequences(
        case, generator, num_kv_heads=3, head_dim=64, block_tokens=16, window_tokens=window_tokens
    )
    q = bf16(generator, 6, 9, 64, scale=3)
    got = fast.attend(
        q, sequences.stored(fast, kv_format), sequences.case.batch, 0.125, window_tokens
    )
    assert_close(got, sequences.dense(q, 0.125), relative=HALF_ULP, absolute=1e-5)


@pytest.mark.parametrize("window_tokens", [None, 100])
def test_a_decode_row_has_the_same_bits_alone_and_among_others(
    fast: CpuOps, window_tokens: int | None
) -> None:
    generator = torch.Generator().manual_seed(7)
    case = case_of([(1, 300, 0), (1, 40, 12), (1, 513, 430)], 16, generator)
    sequences = Sequences(
        case, generator, num_kv_heads=2, head_dim=64, block_tokens=16, window_tokens=window_tokens
    )
    kv = sequences.stored(fast, KVFormat.BF16)
    q = bf16(generator, 3, 8, 64)
    together = fast.attend(q, kv, sequences.case.batch, 0.125, window_tokens)
    for row in range(3):
        alone = fast.attend(q[row : row + 1], kv, sequences.case.alone(row), 0.125, window_tokens)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("window_tokens", [1, 50, 512])
def test_a_row_has_the_same_reference_bits_alone_and_in_a_crowd(window_tokens: int) -> None:
    generator = torch.Generator().manual_seed(8)
    rows = [(1, 300, 0), (40, 340, 250), (1, 900, 600), (7, 7, 0), (200, 200, 0)]
    sequences = Sequences(
        case_of(rows, 16, generator), generator, num_kv_heads=1, head_dim=64, block_tokens=16,
        window_tokens=window_tokens,
    )  # fmt: skip
    kv = sequences.stored(REFERENCE, KVFormat.FP32)
    case = sequences.case
    q = torch.randn(case.batch.positions.shape[0], 4, 64, generator=generator)
    together = REFERENCE.attend(q, kv, case.batch, 0.125, window_tokens)
    for row in range(len(rows)):
        tokens = case.tokens(row)
        alone = REFERENCE.attend(q[tokens], kv, case.alone(row), 0.125, window_tokens)
        assert torch.equal(alone, together[tokens])


def test_attention_with_large_scores_is_finite(fast: CpuOps) -> None:
    generator = torch.Generator().manual_seed(8)
    case = case_of([(1, 200), (20, 60)], 16, generator)
    for window_tokens in (None, 5):
        sequences = Sequences(
            case, generator, num_kv_heads=1, head_dim=32, block_tokens=16,
            window_tokens=window_tokens, scale=60,
        )  # fmt: skip
        q = bf16(generator, 21, 4, 32, scale=60)
        kv = sequences.stored(fast, KVFormat.BF16)
        got = fast.attend(q, kv, sequences.case.batch, 1.0, window_tokens)
        assert bool(got.isfinite().all())


def test_the_spans_of_a_window_do_not_grow_with_the_context() -> None:
    assert most_splits(1_000_000, 512) == most_splits(4_096, 512) == 5
    for window_tokens in (1, 2, 127, 128, 129, 130, 512):
        touched = max(
            p // SPLIT_TOKENS - max(0, p - window_tokens + 1) // SPLIT_TOKENS + 1
            for p in range(2_000)
        )
        assert most_splits(2_000, window_tokens) == touched
    assert [most_splits(n, NO_WINDOW) for n in (1, 128, 129, 2_000)] == [1, 1, 2, 16]
