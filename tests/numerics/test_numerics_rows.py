"""Layers whose rows are keys and values: how rows are kept, and attention beside its definition,
query by query in float64.

Whatever a row does not see is not a number here.
"""

from __future__ import annotations

import pytest
import torch
from emulated_tiles import fast_ops
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_cases import HALF_ULP, Case, assert_close, bf16, case_of
from torch import Tensor

from headwater.numerics import cpu_chunk_attention
from headwater.numerics.cpu import CpuOps
from headwater.numerics.cpu_rows import CpuRows
from headwater.numerics.cpu_rows_attention import TILE_ROWS
from headwater.numerics.ops import KVFormat, LayerKV, Ops
from headwater.numerics.reference import ReferenceOps
from headwater.numerics.reference_rows import PIECE_TOKENS

REFERENCE = ReferenceOps()


@pytest.fixture(scope="module", params=["reference", "fast"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return REFERENCE if request.param == "reference" else fast_ops("vectors")


@pytest.fixture(scope="module")
def fast() -> CpuOps:
    return fast_ops("vectors")


# ---- rows ---------------------------------------------------------------------------


def nothing_stored(
    ops: Ops, num_blocks: int, block_tokens: int, dim: int, kv_format: KVFormat, ratio: int = 1
) -> LayerKV:
    """Rows that hold no numbers."""
    kv = ops.allocate_rows(num_blocks, block_tokens, dim, kv_format, ratio)
    for block in range(num_blocks):
        for buffer in ops.kv_buffers(kv, block) or ():
            buffer[:] = b"\xff" * len(buffer)
    return kv


def block_bytes(ops: Ops, kv: LayerKV, block: int) -> bytes:
    buffers = ops.kv_buffers(kv, block)
    assert buffers is not None
    return b"".join(buffers)


@pytest.mark.parametrize("kv_format", list(KVFormat))
@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_are_zero_until_they_are_written_and_copied_whole(
    ops: Ops, kv_format: KVFormat, ratio: int
) -> None:
    kv = ops.allocate_rows(6, 16, 24, kv_format, ratio)
    assert kv.num_blocks == 6
    sizes = [len(block_bytes(ops, kv, block)) for block in range(6)]
    assert len(set(sizes)) == 1
    assert not any(any(block_bytes(ops, kv, block)) for block in range(6))
    assert sizes[0] <= 16 * ops.row_bytes_per_token(24, kv_format, ratio)
    for buffer in ops.kv_buffers(kv, 2) or ():
        assert buffer.format == "B"
        assert buffer.contiguous
        buffer[:] = bytes(i % 251 for i in range(len(buffer)))
    ops.copy_kv_block(kv, 2, 4)
    assert block_bytes(ops, kv, 4) == block_bytes(ops, kv, 2)
    assert not any(any(block_bytes(ops, kv, block)) for block in (0, 1, 3, 5))


def test_a_row_without_a_slot_is_not_stored(ops: Ops) -> None:
    kv = ops.allocate_rows(3, 16, 24, KVFormat.BF16)
    before = [block_bytes(ops, kv, block) for block in range(3)]
    rows = torch.ones(4, 24, dtype=ops.act_dtype)
    ops.store_rows(rows, kv, torch.tensor([-1, 20, -1, -1]))
    assert [block_bytes(ops, kv, block) == before[block] for block in range(3)] == [
        True, False, True,
    ]  # fmt: skip


# ---- attention ----------------------------------------------------------------------


class Sequences:
    """Window rows and source rows of a case, and what the definition makes of them."""

    def __init__(
        self, case: Case, generator: torch.Generator, *, dim: int, block_tokens: int,
        window_tokens: int, ratio: int, scale: float = 1.0,
    ) -> None:  # fmt: skip
        """``ratio`` 0: without a source."""
        self.case, self.dim, self.block_tokens = case, dim, block_tokens
        self.window_tokens, self.ratio = window_tokens, ratio
        contexts = case.batch.context_lens.tolist()
        self.window_starts = [0] * len(contexts)
        if case.batch.window_starts is not None:
            self.window_starts = case.batch.window_starts.tolist()
        self.windows = [bf16(generator, n, dim, scale=scale) for n in contexts]
        self.sources = [bf16(generator, n // max(ratio, 1), dim, scale=scale) for n in contexts]
        ends = case.batch.context_lens.cumsum(0).tolist()
        self.slots = [case.all_slots[end - n : end] for end, n in zip(ends, contexts, strict=True)]

    def window(self, ops: Ops, kv_format: KVFormat) -> LayerKV:
        """Only what some query of the step sees holds numbers."""
        kv = nothing_stored(ops, self.case.num_blocks, self.block_tokens, self.dim, kv_format)
        for row, rows in enumerate(self.windows):
            first_query = int(self.case.batch.positions[self.case.tokens(row)][0])
            first = max(self.window_starts[row], first_query - self.window_tokens + 1, 0)
            ops.store_rows(rows[first:].to(ops.act_dtype), kv, self.slots[row][first:])
        return kv

    def source(self, ops: Ops, kv_format: KVFormat) -> LayerKV | None:
        if self.ratio == 0:
            return None
        kv = nothing_stored(
            ops, self.case.num_blocks, self.block_tokens, self.dim, kv_format, self.ratio
        )
        buffers = [ops.kv_buffers(kv, block) for block in range(self.case.num_blocks)]
        dtype = {KVFormat.FP32: torch.float32, KVFormat.BF16: torch.bfloat16}[kv_format]
        block_rows = self.block_tokens // self.ratio
        for slots, rows in zip(self.slots, self.sources, strict=True):
            for g, row in enumerate(rows):
                block, offset = divmod(int(slots[g * self.ratio]), self.block_tokens)
                (buffer,) = buffers[block] or ()
                stored = torch.frombuffer(buffer, dtype=dtype).view(block_rows, -1)
                stored[offset // self.ratio] = 0  # past the row's end too
                stored[offset // self.ratio, : self.dim] = row.to(dtype)
        return kv

    def defined(self, q: Tensor, sinks: Tensor, scale: float) -> Tensor:
        """[T, N, D] in float64, one query after the other."""
        out = torch.empty(q.shape, dtype=torch.float64)
        for row in range(len(self.windows)):
            tokens = self.case.tokens(row)
            for token, p in zip(
                range(tokens.start, tokens.stop),
                self.case.batch.positions[tokens].tolist(),
                strict=True,
            ):
                first = max(p - self.window_tokens + 1, self.window_starts[row])
                rows = self.windows[row][first : p + 1].double()
                if self.ratio:
                    closed = self.sources[row][: (p + 1) // self.ratio].double()
                    rows = torch.cat([rows, closed])
                scores = q[token].double() @ rows.T * scale
                shares = torch.cat([scores, sinks.double()[:, None]], dim=1).softmax(-1)
                out[token] = shares[:, :-1] @ rows
        return out


def check(
    fast: Ops, sequences: Sequences, generator: torch.Generator, num_heads: int,
    kv_format: KVFormat,
) -> None:  # fmt: skip
    batch, window_tokens = sequences.case.batch, sequences.window_tokens
    q = bf16(generator, batch.positions.shape[0], num_heads, sequences.dim)
    sinks = torch.randn(num_heads, generator=generator) * 2
    scale = sequences.dim**-0.5
    want = sequences.defined(q, sinks, scale)
    window, source = (
        kind(REFERENCE, KVFormat.FP32) for kind in (sequences.window, sequences.source)
    )
    assert window is not None
    exact = REFERENCE.attend_rows(q.float(), window, source, sinks, batch, scale, window_tokens)
    assert_close(exact, want, relative=1e-5, absolute=1e-5)
    window, source = (kind(fast, kv_format) for kind in (sequences.window, sequences.source))
    assert window is not None
    got = fast.attend_rows(q, window, source, sinks, batch, scale, window_tokens)
    assert got.dtype == torch.bfloat16
    largest = max(
        float(rows.float().abs().max())
        for rows in (*sequences.windows, *sequences.sources)
        if rows.numel()
    )
    assert_close(got, want, relative=HALF_ULP, absolute=2.0**-8 * largest)


NUM_NEW = st.one_of(st.just(1), st.integers(1, 16), st.integers(1, 80))


@st.composite
def random_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        num_new, past = draw(NUM_NEW), draw(st.integers(0, 300))
        rows.append((num_new, num_new + past, draw(st.one_of(st.just(0), st.integers(0, past)))))
    return rows


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    rows=random_rows(),
    dim=st.sampled_from([8, 16, 24, 64, 72, 128, 256]),
    num_heads=st.integers(1, 17),
    window_tokens=st.one_of(st.integers(1, 40), st.integers(1, 400)),
    ratio=st.sampled_from([0, 1, 2]),
    block_tokens=st.sampled_from([16, 32]),
    kv_format=st.sampled_from([KVFormat.BF16, KVFormat.BF16, KVFormat.FP32]),
)
def test_one_softmax_over_window_closed_rows_and_sink(
    fast: CpuOps, seed: int, rows: list[tuple[int, int, int]], dim: int, num_heads: int,
    window_tokens: int, ratio: int, block_tokens: int, kv_format: KVFormat,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    sequences = Sequences(
        case_of(rows, block_tokens, generator), generator, dim=dim, block_tokens=block_tokens,
        window_tokens=window_tokens, ratio=ratio,
    )  # fmt: skip
    check(fast, sequences, generator, num_heads, kv_format)


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_long_chunks_in_the_shape_of_the_miniature(fast: CpuOps, ratio: int) -> None:
    generator = torch.Generator().manual_seed(ratio)
    rows = [(PIECE_TOKENS + 1, 600, 333), (1, 700, 100), (520, 520, 0), (9, 1_201, 1_100)]
    sequences = Sequences(
        case_of(rows, 32, generator), generator, dim=64, block_tokens=32, window_tokens=128,
        ratio=ratio,
    )  # fmt: skip
    check(fast, sequences, generator, 8, KVFormat.BF16)


@pytest.mark.parametrize("parts_per_thread", [3, 1_000])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_chunk_is_the_same_softmax_in_however_many_parts(
    fast: CpuOps, monkeypatch: pytest.MonkeyPatch, ratio: int, parts_per_thread: int
) -> None:
    """Parts of an item may be of the window only, of closed rows only, or of both; the first
    queries of a chunk see fewer spans than its last ones have parts."""
    monkeypatch.setattr(cpu_chunk_attention, "_PARTS_PER_THREAD", parts_per_thread)
    generator = torch.Generator().manual_seed(parts_per_thread)
    for rows in (
        [(9, 1_500, 0)],
        [(12, 1_290, 1_000), (1, 50, 0), (17, 900, 20)],
        [(300, 300, 0), (8, 900, 0), (10, 20, 0)],
    ):
        sequences = Sequences(
            case_of(rows, 16, generator), generator, dim=32, block_tokens=16,
            window_tokens=300, ratio=ratio,
        )  # fmt: skip
        check(fast, sequences, generator, 3, KVFormat.BF16)


def test_rows_whose_blocks_no_tile_divides_are_attended_to_all_the_same(fast: CpuOps) -> None:
    generator = torch.Generator().manual_seed(5)
    case = case_of([(20, 61, 3), (1, 30, 0), (3, 3, 0)], TILE_ROWS, generator)
    sequences = Sequences(
        case, generator, dim=24, block_tokens=TILE_ROWS, window_tokens=20, ratio=2
    )
    assert isinstance(sequences.window(fast, KVFormat.BF16), CpuRows)
    assert not isinstance(sequences.source(fast, KVFormat.BF16), CpuRows)
    check(fast, sequences, generator, 3, KVFormat.BF16)


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_sink_takes_its_share_and_gives_nothing(ops: Ops, ratio: int) -> None:
    generator = torch.Generator().manual_seed(3)
    case = case_of([(1, 1), (3, 40), (12, 30)], 16, generator)
    sequences = Sequences(case, generator, dim=16, block_tokens=16, window_tokens=8, ratio=ratio)
    window, source = (kind(ops, KVFormat.BF16) for kind in (sequences.window, sequences.source))
    assert window is not None
    q = bf16(generator, 16, 2, 16).to(ops.act_dtype)
    for sink in (-80.0, 80.0):
        sinks = torch.tensor([sink, 0.5])
        got = ops.attend_rows(q, window, source, sinks, case.batch, 0.25, 8)
        want = sequences.defined(q, sinks, 0.25)
        assert_close(got, want, relative=HALF_ULP, absolute=0.02)
        assert sink < 0 or float(got[:, 0].float().abs().max()) < 1e-20


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_a_decode_row_has_the_same_bits_alone_and_among_others(ops: Ops, ratio: int) -> None:
    generator = torch.Generator().manual_seed(7)
    case = case_of([(1, 300, 0), (1, 40, 12), (1, 513, 430)], 16, generator)
    sequences = Sequences(case, generator, dim=64, block_tokens=16, window_tokens=100, ratio=ratio)
    window, source = (kind(ops, KVFormat.BF16) for kind in (sequences.window, sequences.source))
    assert window is not None
    q = bf16(generator, 3, 8, 64).to(ops.act_dtype)
    sinks = torch.randn(8, generator=generator)
    together = ops.attend_rows(q, window, source, sinks, case.batch, 0.125, 100)
    for row in range(3):
        alone = ops.attend_rows(
            q[row : row + 1], window, source, sinks, case.alone(row), 0.125, 100
        )
        assert torch.equal(alone[0], together[row])


def test_a_row_has_the_same_reference_bits_alone_and_in_a_crowd() -> None:
    generator = torch.Generator().manual_seed(8)
    rows = [(1, 300, 0), (40, 340, 250), (1, 900, 600), (7, 7, 0), (200, 200, 0)]
    case = case_of(rows, 16, generator)
    sequences = Sequences(case, generator, dim=64, block_tokens=16, window_tokens=50, ratio=2)
    window, source = (
        kind(REFERENCE, KVFormat.FP32) for kind in (sequences.window, sequences.source)
    )
    assert window is not None
    q = torch.randn(case.batch.positions.shape[0], 4, 64, generator=generator)
    sinks = torch.randn(4, generator=generator)
    together = REFERENCE.attend_rows(q, window, source, sinks, case.batch, 0.125, 50)
    for row in range(len(rows)):
        tokens = case.tokens(row)
        alone = REFERENCE.attend_rows(q[tokens], window, source, sinks, case.alone(row), 0.125, 50)
        assert torch.equal(alone, together[tokens])
