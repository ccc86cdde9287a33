"""The definition of routing, routed experts and grouped linear layers, in plain torch.

Built from an implementation's own linear layers, one expert or group after the other. Used by
``reference.py``; knows neither devices nor how a weight is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.numerics.ops import Ops, PackedLinear, WeightFormat


@dataclass(frozen=True, slots=True)
class PlainGroups:
    """One linear layer for each group."""

    linears: tuple[PackedLinear, ...]

    @property
    def num_groups(self) -> int:
        return len(self.linears)

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in self.linears)


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """Two linear layers for each expert: gate and up [2F, H], down [H, F]."""

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in (*self.gate_up, *self.down))


def pack_groups(ops: Ops, weight: Tensor, weight_format: WeightFormat) -> PlainGroups:
    return PlainGroups(tuple(ops.pack_linear(group, None, weight_format) for group in weight))


def linear_groups(ops: Ops, x: Tensor, packed: PlainGroups) -> Tensor:
    parts = x.chunk(packed.num_groups, dim=1)
    done = [ops.linear(part, group) for part, group in zip(parts, packed.linears, strict=True)]
    return torch.cat(done, dim=1)


def pack_experts(
    ops: Ops, gate_up: Tensor, down: Tensor, weight_format: WeightFormat
) -> PlainExperts:
    return PlainExperts(
        tuple(ops.pack_linear(expert, None, weight_format) for expert in gate_up),
        tuple(ops.pack_linear(expert, None, weight_format) for expert in down),
    )


def route(
    x: Tensor, gate: Tensor, bias: Tensor, num_chosen: int, scaling: float
) -> tuple[Tensor, Tensor]:
    scores = F.softplus(F.linear(x.float(), gate.float())).sqrt()
    # A stable sort keeps equal sums in ascending order of id.
    ranked = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices
    ids = ranked[:, :num_chosen].sort(dim=1).values
    chosen = scores.gather(1, ids)
    return ids.int(), chosen / chosen.sum(dim=1, keepdim=True) * scaling


def experts(
    ops: Ops, x: Tensor, packed: PlainExperts, ids: Tensor, weights: Tensor, limit: float
) -> Tensor:
    """Each expert computes its tokens, in ascending order of id; a token has an expert once."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    by_expert = ids.flatten().sort(stable=True).indices
    counts = ids.flatten().bincount(minlength=packed.num_experts).tolist()
    for expert, pairs in enumerate(by_expert.split(counts)):
        if len(pairs) == 0:
            continue
        tokens = pairs // ids.shape[1]
        inner = ops.silu_mul_clamped(ops.linear(x[tokens], packed.gate_up[expert]), limit)
        down = ops.linear(inner, packed.down[expert])
        total[tokens] += weights.flatten()[pairs, None] * down.float()
    return total.to(x.dtype)
