"""Routing, routed experts and grouped linear layers of every implementation, against plain loops
in float64.

Tolerances. ``few ulps`` of bfloat16 where a result is bfloat16: an implementation rounds it, and
may round what is between the layers too, which adds errors of 2**-9 of each term at random.
"""

from __future__ import annotations

import pytest
import torch
from emulated_tiles import fast_ops
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_cases import HALF_ULP, assert_close, bf16
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.numerics.ops import Ops, WeightFormat
from headwater.numerics.reference import ReferenceOps, quantise_int8

SOME = settings(max_examples=20, deadline=None, derandomize=True)
REFERENCES = {
    "reference-fp32": ReferenceOps(),
    "reference-bf16": ReferenceOps(act_dtype=torch.bfloat16),
}
LIMIT = 1.5


@pytest.fixture(scope="module", params=[*REFERENCES, "vectors", "tiles"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return REFERENCES.get(request.param) or fast_ops(request.param)


def given_to(weight: Tensor, weight_format: WeightFormat) -> Tensor:
    """The numbers that [out, in] weights are kept as, in float64."""
    match weight_format:
        case WeightFormat.FP32:
            return weight.double()
        case WeightFormat.BF16:
            return weight.bfloat16().double()
        case WeightFormat.INT8:
            rows, scale = quantise_int8(weight)
            return rows.double() * scale.double()[:, None]


def silu_mul_clamped(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate / (1 + torch.exp(-gate)) * up


def experts_by_loop(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, limit: float,
    weight_format: WeightFormat,
) -> Tensor:  # fmt: skip
    kept = {
        expert: (given_to(gate_up[expert], weight_format), given_to(down[expert], weight_format))
        for expert in ids.unique().tolist()
    }
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            into, back = kept[expert]
            out[token] += weight * (back @ silu_mul_clamped(into @ x[token].double(), limit))
    return out


def formats_of(ops: Ops) -> list[WeightFormat]:
    fast = [WeightFormat.BF16, WeightFormat.INT8]
    return [*fast, WeightFormat.FP32] if isinstance(ops, ReferenceOps) else fast


def check_experts(
    ops: Ops, ids: Tensor, *, num_experts: int, hidden: int, inner: int, seed: int,
    weight_format: WeightFormat,
) -> Tensor:  # fmt: skip
    """Random experts and tokens; returns what ``ops`` computed, equal to the loop's."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(num_experts, 2 * inner, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(num_experts, hidden, inner, generator=generator) * inner**-0.5
    x = bf16(generator, ids.shape[0], hidden, scale=2).to(ops.act_dtype)
    weights = torch.rand(ids.shape, generator=generator)
    packed = ops.pack_experts(gate_up, down, weight_format)
    assert packed.num_experts == num_experts
    assert packed.weight_bytes >= (gate_up.numel() + down.numel())
    got = ops.experts(x, packed, ids, weights, LIMIT)
    assert got.dtype == ops.act_dtype
    want = experts_by_loop(x, gate_up, down, ids, weights, LIMIT, weight_format)
    exact = ops.act_dtype == torch.float32
    relative, absolute = (1e-5, 1e-5) if exact else (HALF_ULP, 8 * HALF_ULP)
    assert_close(got, want, relative=relative, absolute=absolute)
    return got


def random_ids(num_tokens: int, num_experts: int, num_chosen: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return scores.topk(num_chosen).indices.sort(dim=1).values.int()


# ---- experts ------------------------------------------------------------------------


@SOME
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.one_of(st.integers(0, 20), st.sampled_from([64, 65, 100])),
    num_experts=st.integers(1, 12),
    hidden=st.one_of(st.integers(1, 70), st.sampled_from([64, 128])),
    inner=st.integers(1, 70),
    chosen=st.floats(0, 1),
    form=st.integers(0, 2),
)
def test_experts_equal_a_loop_over_tokens_on_any_shape(
    ops: Ops, seed: int, num_tokens: int, num_experts: int, hidden: int, inner: int,
    chosen: float, form: int,
) -> None:  # fmt: skip
    num_chosen = 1 + round(chosen * (num_experts - 1))
    formats = formats_of(ops)
    check_experts(
        ops,
        random_ids(num_tokens, num_experts, num_chosen, seed),
        num_experts=num_experts,
        hidden=hidden,
        inner=inner,
        seed=seed,
        weight_format=formats[form % len(formats)],
    )


@pytest.mark.parametrize("num_tokens", [1, 16, 150])
def test_all_tokens_may_have_the_same_experts(ops: Ops, num_tokens: int) -> None:
    for weight_format in formats_of(ops):
        check_experts(
            ops,
            torch.tensor([[2, 5]], dtype=torch.int32).expand(num_tokens, 2).contiguous(),
            num_experts=8,
            hidden=64,
            inner=32,
            seed=num_tokens,
            weight_format=weight_format,
        )


@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_every_token_may_have_all_experts(ops: Ops, num_tokens: int) -> None:
    check_experts(
        ops,
        torch.arange(5, dtype=torch.int32).expand(num_tokens, 5).contiguous(),
        num_experts=5,
        hidden=32,
        inner=96,
        seed=num_tokens,
        weight_format=WeightFormat.BF16,
    )


@pytest.mark.parametrize("num_tokens", [7, 500])
def test_many_experts_of_which_few_have_tokens(ops: Ops, num_tokens: int) -> None:
    ids = random_ids(num_tokens, 384, 6, seed=1)
    for weight_format in formats_of(ops):
        check_experts(
            ops,
            torch.where(ids > 300, ids, ids // 7 * 7).sort(dim=1).values[:, :1].contiguous(),
            num_experts=384,
            hidden=48,
            inner=40,
            seed=num_tokens,
            weight_format=weight_format,
        )


def test_gate_and_up_are_clamped(ops: Ops) -> None:
    # One number in, one inner number: gate 10 x, up 100 x, down 1.
    gate_up, down = torch.tensor([[[10.0], [100.0]]]), torch.ones(1, 1, 1)
    packed = ops.pack_experts(gate_up, down, WeightFormat.BF16)
    x = torch.tensor([[1.0], [-1.0], [0.125]]).to(ops.act_dtype)
    ids, weights = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    got = ops.experts(x, packed, ids, weights, 3.0)
    silu = [gate / (1 + torch.exp(torch.tensor(-gate))) for gate in (3.0, -10.0, 1.25)]
    want = torch.tensor([[silu[0] * 3], [silu[1] * -3], [silu[2] * 3]])
    assert_close(got, want, relative=2 * HALF_ULP, absolute=1e-7)


# ---- routing ------------------------------------------------------------------------


def scores_by_loop(x: Tensor, gate: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x.double() @ gate.double().T)).sqrt()


@SOME
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.one_of(st.integers(0, 20), st.sampled_from([64, 300])),
    num_experts=st.one_of(st.integers(1, 20), st.sampled_from([8, 384])),
    hidden=st.integers(1, 150),
    chosen=st.floats(0, 1),
    scaling=st.sampled_from([1.0, 2.5]),
    has_bf16_gate=st.booleans(),
)
def test_a_token_is_routed_to_its_best_experts(
    ops: Ops, seed: int, num_tokens: int, num_experts: int, hidden: int, chosen: float,
    scaling: float, has_bf16_gate: bool,
) -> None:  # fmt: skip
    num_chosen = 1 + round(chosen * (min(num_experts, 16) - 1))
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(num_experts, hidden, generator=generator) * 2 * hidden**-0.5
    gate = gate.bfloat16() if has_bf16_gate else gate
    bias = torch.randn(num_experts, generator=generator) * 0.3
    x = bf16(generator, num_tokens, hidden).to(ops.act_dtype)
    ids, weights = ops.route(x, gate, bias, num_chosen, scaling)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert ids.shape == weights.shape == (num_tokens, num_chosen)
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
    assert bool(((ids >= 0) & (ids < num_experts)).all())
    scores = scores_by_loop(x, gate)
    of_chosen = scores.gather(1, ids.long())
    assert_close(
        weights, of_chosen / of_chosen.sum(1, keepdim=True) * scaling, relative=1e-4, absolute=1e-6
    )
    # No expert that was left out is better than one that was chosen.
    keys = scores + bias.double()
    worst = keys.gather(1, ids.long()).amin(dim=1)
    left_out = keys.scatter(1, ids.long(), -torch.inf).amax(dim=1)
    assert bool((worst >= left_out - 1e-4).all())


def test_equal_scores_go_to_the_lower_id(ops: Ops) -> None:
    gate = torch.tensor([[1.0], [2.0], [1.0], [2.0], [1.0], [1.0]])
    x = torch.ones(2, 1, dtype=ops.act_dtype)
    none = torch.zeros(6)
    for num_chosen, want in ((1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])):
        assert ops.route(x, gate, none, num_chosen, 1.0)[0].tolist() == [want, want]
    assert ops.route(x, torch.zeros(6, 1), none, 3, 1.0)[0].tolist() == [[0, 1, 2]] * 2


def test_the_bias_decides_the_choice_and_not_the_weight(ops: Ops) -> None:
    gate = torch.tensor([[1.0], [2.0], [3.0]])
    ids, weights = ops.route(
        torch.ones(1, 1, dtype=ops.act_dtype), gate, torch.tensor([9.0, 5.0, 0.0]), 2, 1.0
    )
    assert ids.tolist() == [[0, 1]]
    scores = scores_by_loop(torch.ones(1, 1), gate)[0]
    assert_close(weights[0], scores[:2] / scores[:2].sum(), relative=1e-5, absolute=0)


def test_all_experts_chosen_are_all_experts(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(1)
    x = bf16(generator, 4, 16).to(ops.act_dtype)
    ids, weights = ops.route(x, torch.randn(5, 16, generator=generator), torch.zeros(5), 5, 2.0)
    assert ids.tolist() == [list(range(5))] * 4
    assert_close(weights.sum(dim=1), torch.full((4,), 2.0), relative=1e-5, absolute=0)


def test_large_and_small_gate_results_keep_their_scores(ops: Ops) -> None:
    # softplus(x) is x for large x and exp(x) for very negative x.
    gate = torch.tensor([[100.0], [25.0], [-25.0], [-40.0]])
    ids, weights = ops.route(torch.ones(1, 1, dtype=ops.act_dtype), gate, torch.zeros(4), 4, 1.0)
    scores = scores_by_loop(torch.ones(1, 1), gate)[0]
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert_close(weights[0], scores / scores.sum(), relative=1e-3, absolute=0)


# ---- groups -------------------------------------------------------------------------


@SOME
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.one_of(st.integers(0, 20), st.sampled_from([64, 65, 300])),
    num_groups=st.integers(1, 6),
    in_features=st.integers(1, 80),
    out_features=st.integers(1, 80),
    form=st.integers(0, 2),
)
def test_each_group_of_the_input_meets_its_own_weight(
    ops: Ops, seed: int, num_tokens: int, num_groups: int, in_features: int, out_features: int,
    form: int,
) -> None:  # fmt: skip
    weight_format = formats_of(ops)[form % len(formats_of(ops))]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_groups, out_features, in_features, generator=generator)
    weight *= in_features**-0.5
    x = bf16(generator, num_tokens, num_groups * in_features).to(ops.act_dtype)
    packed = ops.pack_groups(weight, weight_format)
    assert packed.num_groups == num_groups
    assert packed.weight_bytes >= weight.numel()
    got = ops.linear_groups(x, packed)
    assert got.dtype == ops.act_dtype
    want = torch.zeros(num_tokens, num_groups * out_features, dtype=torch.float64)
    for g in range(num_groups):
        part = x[:, g * in_features : (g + 1) * in_features].double()
        columns = slice(g * out_features, (g + 1) * out_features)
        want[:, columns] = part @ given_to(weight[g], weight_format).T
    exact = ops.act_dtype == torch.float32
    relative, absolute = (1e-5, 1e-5) if exact else (HALF_ULP, 4 * HALF_ULP)
    assert_close(got, want, relative=relative, absolute=absolute)


@pytest.mark.parametrize("name", ["vectors"])
def test_the_fast_path_refuses_fp32_experts_and_groups(name: str) -> None:
    fast = fast_ops(name)
    with pytest.raises(ConfigError, match="reference"):
        fast.pack_experts(torch.zeros(1, 4, 2), torch.zeros(1, 2, 2), WeightFormat.FP32)
    with pytest.raises(ConfigError, match="reference"):
        fast.pack_groups(torch.zeros(1, 4, 4), WeightFormat.FP32)
