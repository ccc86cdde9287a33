"""Reads weights by name and packs them for the kernels: what the families' builders share.

Knows no family and no shapes. Also counts what packed layers cost a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from headwater.model.weights import ReadTensor
from headwater.numerics.ops import Ops, PackedExperts, PackedGroups, PackedLinear, WeightFormat


class WeightPacker:
    """Each call reads its tensors once; names come without ``.weight`` and ``.bias``."""

    def __init__(self, read: ReadTensor, ops: Ops, weight_format: WeightFormat) -> None:
        self._read = read
        self._ops = ops
        self._weight_format = weight_format

    def vector(self, name: str) -> Tensor:
        """A norm's weight. Small, and stored in float32 by most files: kept so."""
        return self._read(f"{name}.weight").to(self._ops.device, torch.float32)

    def plain(self, name: str) -> Tensor:
        """The tensor of exactly this name, in float32."""
        return self._read(name).to(self._ops.device, torch.float32)

    def linear(self, *names: str, bias: bool = False) -> PackedLinear:
        """Linears of equal input size as one, their outputs one behind the other."""
        return self._ops.pack_linear(
            self._stacked([f"{name}.weight" for name in names]),
            self._stacked([f"{name}.bias" for name in names]) if bias else None,
            self._weight_format,
        )

    def groups(self, name: str, num_groups: int) -> PackedGroups:
        """A weight [G * out, in] as G weights."""
        weight = self._read(f"{name}.weight")
        return self._ops.pack_groups(
            weight.view(num_groups, -1, weight.shape[1]), self._weight_format
        )

    def experts(self, name: str, num_experts: int) -> PackedExperts:
        """The experts ``name.0``, ``name.1``, ..., each with w1 (gate), w3 (up) and w2 (down)."""
        experts = [f"{name}.{index}" for index in range(num_experts)]
        gate_up = [self._stacked([f"{e}.w1.weight", f"{e}.w3.weight"]) for e in experts]
        down = [self._read(f"{e}.w2.weight") for e in experts]
        return self._ops.pack_experts(torch.stack(gate_up), torch.stack(down), self._weight_format)

    def table(self, name: str, *, is_head: bool) -> PackedLinear:
        """The embedding table, which may be the output head too."""
        # A table of its own is only looked up in: 8 bits would cost accuracy for no speed.
        spared = self._weight_format == WeightFormat.INT8 and not is_head
        weight_format = WeightFormat.BF16 if spared else self._weight_format
        return self._ops.pack_linear(self._read(f"{name}.weight"), None, weight_format)

    def _stacked(self, names: list[str]) -> Tensor:
        if len(names) == 1:
            return self._read(names[0])
        return torch.cat([self._read(name) for name in names])


class Packed(Protocol):
    """A packed weight of any kind."""

    @property
    def weight_bytes(self) -> int: ...


def bytes_of(linears: Iterable[Packed], norms: Iterable[Tensor]) -> int:
    """Bytes read to apply each once."""
    return sum(linear.weight_bytes for linear in linears) + sum(norm.nbytes for norm in norms)


def flops_of(linears: Iterable[PackedLinear]) -> int:
    """Operations of one token: two per multiply-add."""
    return sum(2 * linear.in_features * linear.out_features for linear in linears)
