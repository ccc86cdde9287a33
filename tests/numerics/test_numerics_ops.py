"""CpuOps against ReferenceOps on random shapes, op by op; attention has a file of its own.

Tolerances. Both take the same bfloat16 inputs; the reference computes in float32
from them and the fast path rounds its result once to bfloat16: half a unit in the
last place, at most 2**-8 of the value, plus a little for sums taken in another
order. Where the fast path rounds intermediates too, the bound is argued in place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_tiles import fast_ops
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_cases import HALF_ULP, assert_close, bf16, case_of

from headwater.core.errors import ConfigError
from headwater.numerics.cpu import CpuOps
from headwater.numerics.cpu_amx import tiles_available
from headwater.numerics.ops import KVFormat, LayerKV, Need, Ops, WeightFormat
from headwater.numerics.reference import ReferenceOps

REFERENCE = ReferenceOps()
FEW = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(scope="module", params=["vectors", "tiles"])
def fast(request: pytest.FixtureRequest) -> CpuOps:
    return fast_ops(request.param)


# ---- linear -------------------------------------------------------------------------


@FEW
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.one_of(st.integers(1, 40), st.integers(60, 300)),
    in_features=st.one_of(st.integers(1, 200), st.sampled_from([32, 64, 576, 1536])),
    out_features=st.integers(1, 200),
    bias=st.booleans(),
    weight_format=st.sampled_from([WeightFormat.BF16, WeightFormat.INT8]),
)
def test_linear_and_logits_equal_the_reference_on_any_shape(
    fast: CpuOps, seed: int, num_tokens: int, in_features: int, out_features: int, bias: bool,
    weight_format: WeightFormat,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    offset = torch.randn(out_features, generator=generator) if bias else None
    x = bf16(generator, num_tokens, in_features)
    want = REFERENCE.linear(x.float(), REFERENCE.pack_linear(weight, offset, weight_format))
    packed = fast.pack_linear(weight, offset, weight_format)
    assert (packed.out_features, packed.in_features) == (out_features, in_features)
    # The hand-written kernels are float32 up to the result. The GEMM's operands are bfloat16:
    # the bias and each dequantised weight are rounded, so the error grows with sqrt(in).
    exact = num_tokens <= max(packed.vector_rows, packed.tile_rows)
    absolute = (1e-5 if exact else 1e-2) * (1 + in_features**0.5)
    assert_close(fast.linear(x, packed), want, relative=HALF_ULP, absolute=absolute)
    logits = fast.logits(x, packed)
    assert logits.dtype == torch.float32
    assert_close(logits, want, relative=1e-5 if exact else HALF_ULP, absolute=absolute)


def test_linear_takes_a_view_of_wider_rows(fast: CpuOps) -> None:
    generator = torch.Generator().manual_seed(1)
    packed = fast.pack_linear(bf16(generator, 48, 64), None, WeightFormat.BF16)
    wide = bf16(generator, 3, 200)
    assert torch.equal(
        fast.linear(wide[:, 100:164], packed), fast.linear(wide[:, 100:164].contiguous(), packed)
    )
    assert torch.equal(
        fast.linear(wide[:, :128:2], packed), fast.linear(wide[:, :128:2].contiguous(), packed)
    )


@pytest.mark.parametrize("weight_format", [WeightFormat.BF16, WeightFormat.INT8])
def test_a_row_has_the_same_bits_alone_and_among_few(
    fast: CpuOps, weight_format: WeightFormat
) -> None:
    generator = torch.Generator().manual_seed(2)
    packed = fast.pack_linear(torch.randn(520, 576, generator=generator), None, weight_format)
    x = bf16(generator, packed.vector_rows, 576)
    together = fast.logits(x, packed)
    for row in range(x.shape[0]):
        assert torch.equal(fast.logits(x[row : row + 1], packed)[0], together[row])


@pytest.mark.parametrize("num_tokens", [1, 20, 300])
def test_int8_logits_stay_near_those_of_bf16(fast: CpuOps, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2_000, 576, generator=generator)
    x = bf16(generator, num_tokens, 576)
    exact = x.float() @ weight.T
    got = fast.logits(x, fast.pack_linear(weight, None, WeightFormat.INT8))
    # A weight is off by at most half a step of max/127, evenly spread: standard error
    # step / sqrt(12), which for normal rows (max about 3.3 sigma) is 0.75% of sigma.
    assert (got - exact).std() / exact.std() < 0.012


def test_the_fast_path_refuses_fp32_weights(fast: CpuOps) -> None:
    with pytest.raises(ConfigError, match="reference"):
        fast.pack_linear(torch.zeros(4, 4), None, WeightFormat.FP32)


@pytest.mark.parametrize("weight_format", [WeightFormat.BF16, WeightFormat.INT8])
def test_embed_returns_the_rows_of_the_packed_weight(
    fast: CpuOps, weight_format: WeightFormat
) -> None:
    table = torch.randn(11, 40, generator=torch.Generator().manual_seed(4))
    ids = torch.tensor([10, 0, 3, 3])
    want = REFERENCE.embed(ids, REFERENCE.pack_linear(table, None, weight_format))
    got = fast.embed(ids, fast.pack_linear(table, None, weight_format))
    assert got.dtype == torch.bfloat16
    assert_close(got, want, relative=HALF_ULP, absolute=0)


def test_quantising_a_row_of_zeros_gives_zeros(fast: CpuOps) -> None:
    packed = fast.pack_linear(torch.zeros(4, 32), None, WeightFormat.INT8)
    assert fast.linear(torch.ones(2, 32, dtype=torch.bfloat16), packed).count_nonzero() == 0


# ---- row-wise -----------------------------------------------------------------------


@FEW
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 70),
    size=st.integers(1, 700),
    weight_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_norms_equal_the_reference(
    fast: CpuOps, seed: int, num_tokens: int, size: int, weight_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = bf16(generator, num_tokens, size), bf16(generator, num_tokens, size)
    weight = torch.randn(size, generator=generator).to(weight_dtype)
    got = fast.rms_norm(x, weight, 1e-5)
    want = REFERENCE.rms_norm(x.float(), weight, 1e-5)
    assert_close(got, want, relative=HALF_ULP, absolute=1e-6)
    total = (x.float() + residual.float()).to(torch.bfloat16)
    norm, kept = fast.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(kept, total)
    # The norm is that of the rounded sum, which is what the next layers see.
    want = REFERENCE.rms_norm(total.float(), weight, 1e-5)
    assert_close(norm, want, relative=HALF_ULP, absolute=1e-6)


def test_rms_norm_of_heads_inside_wider_rows(fast: CpuOps) -> None:
    generator = torch.Generator().manual_seed(5)
    heads = bf16(generator, 7, 300)[:, 20:116].view(7, 6, 16)
    weight = torch.randn(16, generator=generator)
    got = fast.rms_norm(heads, weight, 1e-6)
    want = REFERENCE.rms_norm(heads.float(), weight, 1e-6)
    assert_close(got, want, relative=HALF_ULP, absolute=1e-6)
    got = fast.rms_norm(heads.transpose(0, 1), weight, 1e-6)
    assert_close(got, want.transpose(0, 1), relative=HALF_ULP, absolute=1e-6)


@FEW
@given(seed=st.integers(0, 2**31), num_tokens=st.integers(1, 40), inner=st.integers(1, 300))
def test_silu_mul_equals_the_reference(
    fast: CpuOps, seed: int, num_tokens: int, inner: int
) -> None:
    gate_up = bf16(torch.Generator().manual_seed(seed), num_tokens, 2 * inner, scale=4)
    want = REFERENCE.silu_mul(gate_up.float())
    assert_close(fast.silu_mul(gate_up), want, relative=HALF_ULP, absolute=1e-30)


def test_silu_mul_of_extreme_gates_is_finite(fast: CpuOps) -> None:
    gate = torch.tensor([[-3e38, -200.0, -88.0, 0.0, 88.0, 200.0, 3e38]])
    got = fast.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1).to(torch.bfloat16))
    assert bool(got.isfinite().all())
    assert got[0, 3] == 0
    assert got[0, 5] == 200


@FEW
@given(seed=st.integers(0, 2**31), num_tokens=st.integers(1, 40), inner=st.integers(1, 300))
def test_gelu_mul_equals_the_reference(
    fast: CpuOps, seed: int, num_tokens: int, inner: int
) -> None:
    gate_up = bf16(torch.Generator().manual_seed(seed), num_tokens, 2 * inner, scale=4)
    want = REFERENCE.gelu_mul(gate_up.float())
    # The reference's 1 + tanh keeps few digits of gates far below 0.
    assert_close(fast.gelu_mul(gate_up), want, relative=HALF_ULP, absolute=1e-5)


def test_gelu_mul_of_known_and_extreme_gates(fast: CpuOps) -> None:
    gate = torch.tensor([[-200.0, -20.0, -1.0, 0.0, 1.0, 20.0, 3e38]])
    got = fast.gelu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1).to(torch.bfloat16))
    assert bool(got.isfinite().all())
    want = torch.tensor([[0.0, 0.0, -0.158808, 0.0, 0.841192, 20.0, 3e38]])
    assert_close(got, want, relative=HALF_ULP, absolute=1e-12)


@FEW
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 70),
    size=st.integers(1, 700),
    weight_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_norm_add_norm_equals_the_reference(
    fast: CpuOps, seed: int, num_tokens: int, size: int, weight_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = bf16(generator, num_tokens, size), bf16(generator, num_tokens, size)
    post, following = (torch.randn(size, generator=generator).to(weight_dtype) for _ in range(2))
    _, want_kept = REFERENCE.norm_add_norm(x.float(), post, residual.float(), following, 1e-5)
    norm, kept = fast.norm_add_norm(x.clone(), post, residual.clone(), following, 1e-5)
    assert_close(kept, want_kept, relative=HALF_ULP, absolute=1e-5)
    # The second norm is that of the rounded sum, which is what the next layers see.
    want = REFERENCE.rms_norm(kept.float(), following, 1e-5)
    assert_close(norm, want, relative=HALF_ULP, absolute=1e-6)


def test_the_reference_norms_before_it_adds() -> None:
    x, residual = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 1.0]])
    # rms of (3, 4) is 5 / sqrt(2): the normed row is (0.6, 0.8) sqrt(2).
    norm, total = REFERENCE.norm_add_norm(
        x, torch.tensor([1.0, 2.0]), residual, torch.tensor([1.0, 1.0]), 0.0
    )
    want = torch.tensor([[1 + 0.6 * 2**0.5, 1 + 1.6 * 2**0.5]])
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(norm, want / want.square().mean().sqrt())


@pytest.mark.parametrize("num_tokens", [1, 3, 50_000])
def test_scale_rounds_once(fast: CpuOps, num_tokens: int) -> None:
    x = bf16(torch.Generator().manual_seed(6), num_tokens, 20)
    want = (x.double() * 25.298).to(torch.bfloat16)
    assert torch.equal(fast.scale(x.clone(), 25.298), want)
    assert torch.equal(REFERENCE.scale(x, 25.298), want)


@FEW
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 40),
    num_heads=st.integers(1, 9),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 20, 64, 128]),
    whole=st.booleans(),
)
def test_rotate_changes_views_in_place_as_the_reference_does(
    fast: CpuOps, seed: int, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int,
    whole: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    size = (num_heads + num_kv_heads) * head_dim
    qkv = bf16(generator, num_tokens, size + 8)
    untouched = qkv[:, size:].clone()
    q = qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
    k = qkv[:, num_heads * head_dim : size].view(num_tokens, num_kv_heads, head_dim)
    half = head_dim // 2 if whole else head_dim // 4
    angles = torch.randn(90, half, generator=generator)
    positions = torch.randint(0, 90, (num_tokens,), generator=generator, dtype=torch.int32)
    want_q, want_k = q.float(), k.float()
    REFERENCE.rotate(want_q, want_k, angles.cos(), angles.sin(), positions)
    fast.rotate(q, k, angles.cos(), angles.sin(), positions)
    assert_close(q, want_q, relative=HALF_ULP, absolute=1e-6)
    assert_close(k, want_k, relative=HALF_ULP, absolute=1e-6)
    assert torch.equal(qkv[:, size:], untouched)


# ---- KV and attention ---------------------------------------------------------------


def test_store_kv_leaves_other_slots_alone(fast: CpuOps) -> None:
    kv = fast.allocate_kv(4, 16, 2, 20, KVFormat.BF16)
    ones = torch.ones(2, 2, 20, dtype=torch.bfloat16)
    fast.store_kv(ones, ones, kv, torch.tensor([17, 63]))
    assert float(kv.k.float().sum()) == float(kv.v.float().sum()) == 2 * 2 * 20
    assert kv.num_blocks == 4


@pytest.mark.parametrize("kv_format", KVFormat)
def test_store_kv_writes_nothing_at_slot_minus_one(fast: CpuOps, kv_format: KVFormat) -> None:
    generator = torch.Generator().manual_seed(10)
    k, v = (bf16(generator, 5, 2, 20) for _ in range(2))
    slots = torch.tensor([-1, 17, -1, 63, -1])
    for ops in (fast, REFERENCE):
        kv, same = (ops.allocate_kv(4, 16, 2, 20, kv_format) for _ in range(2))
        ops.store_kv(k.to(ops.act_dtype), v.to(ops.act_dtype), kv, slots)
        kept = slots >= 0
        ops.store_kv(k[kept].to(ops.act_dtype), v[kept].to(ops.act_dtype), same, slots[kept])
        assert block_bytes(ops, kv) == block_bytes(ops, same)


def block_bytes(ops: Ops, kv: LayerKV) -> list[list[bytes]]:
    buffers = [ops.kv_buffers(kv, block) for block in range(kv.num_blocks)]
    return [[bytes(part) for part in parts] for parts in buffers if parts is not None]


@pytest.mark.parametrize("kv_format", KVFormat)
def test_buffers_are_the_blocks_themselves(fast: CpuOps, kv_format: KVFormat) -> None:
    generator = torch.Generator().manual_seed(11)
    for ops in (fast, REFERENCE):
        kv, other = (ops.allocate_kv(3, 16, 2, 20, kv_format) for _ in range(2))
        k = bf16(generator, 48, 2, 20).to(ops.act_dtype)
        ops.store_kv(k, -k, kv, torch.arange(48))
        kept = block_bytes(ops, kv)
        assert len(kept) == 3
        assert len({bytes(part) for parts in kept for part in parts}) == 6
        block_size = 16 * ops.kv_bytes_per_token(2, 20, kv_format)
        for block, parts in enumerate(kept):
            buffers = ops.kv_buffers(other, block)
            assert buffers is not None
            assert sum(buffer.nbytes for buffer in buffers) == block_size
            for buffer, part in zip(buffers, parts, strict=True):
                assert (buffer.format, buffer.ndim, buffer.readonly) == ("B", 1, False)
                assert buffer.c_contiguous
                buffer[:] = part
        case = case_of([(1, 48)], 16, generator)
        tables = torch.arange(3, dtype=torch.int32)[None]
        batch = replace(case.batch, block_tables=tables)
        q = bf16(generator, 1, 4, 20).to(ops.act_dtype)
        assert torch.equal(ops.attend(q, kv, batch, 0.2), ops.attend(q, other, batch, 0.2))


@pytest.mark.parametrize("kv_format", KVFormat)
def test_copying_a_block_changes_that_block_only(fast: CpuOps, kv_format: KVFormat) -> None:
    generator = torch.Generator().manual_seed(12)
    for ops in (fast, REFERENCE):
        kv = ops.allocate_kv(4, 16, 2, 20, kv_format)
        k = bf16(generator, 64, 2, 20).to(ops.act_dtype)
        ops.store_kv(k, -k, kv, torch.arange(64))
        before = block_bytes(ops, kv)
        ops.copy_kv_block(kv, 2, 0)
        assert block_bytes(ops, kv) == [before[2], *before[1:]]


def test_kv_bytes_per_token_are_those_of_a_block(fast: CpuOps) -> None:
    for head_dim in (20, 64):
        for kv_format in KVFormat:
            for ops in (fast, REFERENCE):
                kv = ops.allocate_kv(3, 16, 2, head_dim, kv_format)
                assert kv.num_blocks == 3
                [*_, last] = block_bytes(ops, kv)
                per_token = ops.kv_bytes_per_token(2, head_dim, kv_format)
                assert sum(map(len, last)) == 16 * per_token


def test_warm_up_runs_and_kernels_says_what_serves(fast: CpuOps) -> None:
    fast.warm_up(list(Need))
    assert fast.kernels().keys() >= {"linear bf16", "linear int8", "elementwise"}
    uses_tiles = "AMX" in fast.kernels()["linear bf16"]
    assert uses_tiles == (
        fast.pack_linear(torch.zeros(4, 32), None, WeightFormat.BF16).tile_rows > 0
    )


@pytest.mark.skipif(tiles_available(), reason="this CPU has AMX tiles")
def test_asking_for_tiles_without_them_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no AMX tiles"):
        CpuOps(num_threads=1, tiles=True)


@pytest.mark.parametrize("act_dtype", [torch.float32, torch.bfloat16])
def test_the_reference_runs_in_the_dtype_it_was_asked_for(act_dtype: torch.dtype) -> None:
    ops = ReferenceOps("cpu", act_dtype)
    ops.warm_up(list(Need))
    generator = torch.Generator().manual_seed(9)
    case = case_of([(1, 40), (20, 33)], 16, generator)
    kv = ops.allocate_kv(case.num_blocks, 16, 2, 32, KVFormat.BF16)
    keys = bf16(generator, case.all_slots.shape[0], 2, 32).to(act_dtype)
    ops.store_kv(keys, keys, kv, case.all_slots)
    q = bf16(generator, 21, 4, 32).to(act_dtype)
    assert ops.attend(q, kv, case.batch, 0.2).dtype == act_dtype
    for weight_format in WeightFormat:
        packed = ops.pack_linear(torch.randn(8, 32, generator=generator), None, weight_format)
        assert ops.linear(q[:, 0], packed).dtype == act_dtype
        assert ops.logits(q[:, 0], packed).dtype == torch.float32
        assert ops.embed(torch.tensor([7]), packed).dtype == act_dtype
