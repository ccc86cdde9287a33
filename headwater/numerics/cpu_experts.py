"""Routed experts and grouped linear layers on a CPU: how weights are kept, which kernels run.

    few tokens     vector kernels of ``cpu_experts_few``: an expert's weights are read once
    more           kernels of ``cpu_experts_many`` on pairs of bfloat16; groups always

Every call is a sequence of launches whose sizes do not depend on the routing, so that a decode
step can be recorded (``cpu_program``): what each launch does is in the plan that the first
one writes (``cpu_experts_sort``). Used by ``cpu.py`` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.numerics import (
    cpu_experts_few,
    cpu_experts_many,
    cpu_experts_route,
    cpu_experts_sort,
)
from headwater.numerics.cpu_intrinsics import LANES, Kind
from headwater.numerics.cpu_loops import HAS_PAIR_DOT
from headwater.numerics.cpu_memory import Activations, Arena, Scratch
from headwater.numerics.cpu_team import MAX_CHUNKS, Kernel, Team
from headwater.numerics.ops import WeightFormat
from headwater.numerics.reference import quantise_int8

# Most tokens for the vector kernels, and most of them an expert may have on average: from there
# on the pair kernels take less time.
_FEW_TOKENS, _FEW_TOKENS_OF_EXPERT = 64, 8
# Both a multiple of a vector and of the rows of every kernel's tile.
_PADDED = 32
# Rows that are a multiple of this apart share few sets of the first cache: a tile reads 8 or 16
# rows side by side, and from 1,024 columns on ran at a third to two thirds of its rate.
_CLASHING = 1_024
# Rows that an item reads: small enough to stay in the second cache for an expert's next block.
_PART_BYTES = 262_144
_FEW_ITEM_BYTES = 32_768
_ITEMS_PER_THREAD = 4
# Grouped layers go through their input in slabs, so that the memory between the kernels does not
# grow with a prompt: a token of large models has megabytes of it.
_SLAB_BYTES, _FEWEST_SLAB_TOKENS = 8 << 20, 4 * cpu_experts_sort.WIDE_LANES
_CHUNK_ELEMENTS = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """[.., rows, columns], both padded with zeros, of bfloat16, or int8 with float32 scales."""

    weight: Tensor
    scales: Tensor | None  # [.., rows]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def rows(self) -> int:
        return self.weight.shape[-2]

    @property
    def columns(self) -> int:
        return self.weight.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.columns * self.weight.element_size()

    @property
    def arguments(self) -> tuple[int, int, int, int, int]:
        """Addresses of weights and scales, kind, columns, rows: as the kernels take them."""
        scales = 0 if self.scales is None else self.scales.data_ptr()
        kind = Kind.BF16 if self.scales is None else Kind.INT8
        return self.weight.data_ptr(), scales, int(kind), self.columns, self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuExperts:
    gate_up: _Weights  # [E, 2, F, H]
    down: _Weights  # [E, H, F]
    hidden: int

    @property
    def num_experts(self) -> int:
        return self.down.weight.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuGroups:
    weights: _Weights  # [G, out, in]
    in_features: int
    out_features: int

    @property
    def num_groups(self) -> int:
        return self.weights.weight.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.weights.num_bytes


def _rounded(size: int, multiple: int) -> int:
    """Up."""
    return -(-size // multiple) * multiple


def _row_length(size: int) -> int:
    """Elements of a row of ``size``; also how many rows give the elements of one."""
    length = _rounded(size, _PADDED)
    return length + _PADDED if length % _CLASHING == 0 else length


class Experts:
    """Packs experts and groups, routes, and multiplies."""

    def __init__(self, team: Team, scratch: Scratch, activations: Activations) -> None:
        self._team, self._scratch, self._activations = team, scratch, activations
        self._arena = Arena()
        self._route_kernel = Kernel(cpu_experts_route.route_kernel)
        self._sort_kernel = Kernel(cpu_experts_sort.sort_kernel)
        self._gate_up_few_kernel = Kernel(cpu_experts_few.gate_up_few_kernel)
        self._down_few_kernel = Kernel(cpu_experts_few.down_few_kernel)
        self._gather_kernel = Kernel(cpu_experts_many.gather_kernel)
        self._gate_up_kernel = Kernel(cpu_experts_many.gate_up_kernel)
        self._product_kernel = Kernel(cpu_experts_many.product_kernel)
        self._combine_kernel = Kernel(cpu_experts_many.combine_kernel)

    def kernels(self) -> dict[str, str]:
        pairs = "bfloat16 pair" if HAS_PAIR_DOT else f"{LANES}-lane pair"
        return {
            "experts": (
                f"{LANES}-lane kernel up to {_FEW_TOKENS_OF_EXPERT} tokens of an expert, "
                f"then {pairs} kernel"
            ),
            "grouped linear": f"{pairs} kernel",
        }

    # ---- packing --------------------------------------------------------------------

    def _pack(self, parts: Tensor, weight_format: WeightFormat) -> _Weights:
        """[.., rows, columns] to padded weights, one matrix after the other."""
        if weight_format is WeightFormat.FP32:
            raise ConfigError(
                "the fast CPU path keeps weights as bf16 or int8; use reference mode for fp32"
            )
        *outer, rows, columns = parts.shape
        shape = (*outer, _row_length(rows), _row_length(columns))
        is_int8 = weight_format is WeightFormat.INT8
        weight = self._arena.zeros(shape, torch.int8 if is_int8 else torch.bfloat16)
        scales = self._arena.zeros(shape[:-1], torch.float32) if is_int8 else None
        for number, part in enumerate(parts.reshape(-1, rows, columns)):
            target = weight.view(-1, *shape[-2:])[number, :rows, :columns]
            if scales is None:
                target.copy_(part)
            else:
                quantised, of_rows = quantise_int8(part)
                target.copy_(quantised)
                scales.view(-1, shape[-2])[number, :rows] = of_rows
        return _Weights(weight=weight, scales=scales)

    def pack_experts(
        self, gate_up: Tensor, down: Tensor, weight_format: WeightFormat
    ) -> CpuExperts:
        num_experts, hidden, inner = down.shape
        return CpuExperts(
            gate_up=self._pack(gate_up.view(num_experts, 2, inner, hidden), weight_format),
            down=self._pack(down, weight_format),
            hidden=hidden,
        )

    def pack_groups(self, weight: Tensor, weight_format: WeightFormat) -> CpuGroups:
        return CpuGroups(
            weights=self._pack(weight, weight_format),
            in_features=weight.shape[2],
            out_features=weight.shape[1],
        )

    # ---- calls ----------------------------------------------------------------------

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, num_chosen: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        assert gate.is_contiguous()
        assert gate.dtype in (torch.float32, torch.bfloat16)
        assert bias.is_contiguous()
        assert bias.dtype == torch.float32
        x = self._rows(x)
        num_tokens, num_experts = x.shape[0], gate.shape[0]
        ids = self._activations.empty((num_tokens, num_chosen), torch.int32)
        weights = self._activations.empty((num_tokens, num_chosen), torch.float32)
        chunk = max(1, _CHUNK_ELEMENTS // gate.numel(), -(-num_tokens // MAX_CHUNKS))
        self._team.launch(
            self._route_kernel,
            -(-num_tokens // chunk),
            scaling,
            x.data_ptr(),
            x.stride(0),
            gate.data_ptr(),
            int(gate.dtype == torch.float32),
            bias.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            gate.shape[1],
            num_experts,
            num_chosen,
            num_tokens,
            chunk,
            self._scratch.address("scores", self._team.num_threads * 2 * num_experts * 4),
        )
        return ids, weights

    def experts(
        self, x: Tensor, packed: CpuExperts, ids: Tensor, weights: Tensor, limit: float
    ) -> Tensor:
        x = self._rows(x)
        if not (ids.is_contiguous() and weights.is_contiguous()):
            self._team.spoil()
            ids, weights = ids.contiguous(), weights.contiguous()
        out = self._activations.empty((x.shape[0], packed.hidden), torch.bfloat16)
        num_tokens, num_pairs = ids.shape[0], ids.numel()
        if num_tokens == 0:
            return out
        is_few = num_pairs <= _FEW_TOKENS_OF_EXPERT * packed.num_experts
        if is_few and num_tokens <= _FEW_TOKENS:
            self._few(x, packed, ids, weights, limit, out)
            return out
        self._many(x, packed, ids, weights, limit, out)
        return out

    def linear_groups(self, x: Tensor, packed: CpuGroups) -> Tensor:
        if not x.is_contiguous():
            self._team.spoil()
            x = x.contiguous()
        num_tokens, num_groups = x.shape[0], packed.num_groups
        shape = (num_tokens, num_groups * packed.out_features)
        out = self._activations.empty(shape, torch.bfloat16)
        slab_tokens = max(_SLAB_BYTES // (shape[1] * 4), _FEWEST_SLAB_TOKENS)
        for x_slab, out_slab in zip(x.split(slab_tokens), out.split(slab_tokens), strict=True):
            self._groups(x_slab, packed, out_slab)
        return out

    def _groups(self, x: Tensor, packed: CpuGroups, out: Tensor) -> None:
        """Every part of a token's row is a row of its own, and meets the group of its number."""
        num_groups = packed.num_groups
        num_pairs = x.shape[0] * num_groups
        if num_pairs == 0:
            return
        plan = self._sort(0, num_pairs, num_groups)
        lines = self._gather(
            plan, num_pairs, num_groups, x.data_ptr(), packed.in_features, 1, packed.in_features,
            packed.weights.columns,
        )  # fmt: skip
        self._product(plan, num_pairs, lines, packed.weights)
        self._combine(num_pairs, 1, 0, packed.weights.rows, out)

    def _rows(self, x: Tensor) -> Tensor:
        if x.stride(1) == 1:
            return x
        self._team.spoil()
        return x.contiguous()

    # ---- few tokens -----------------------------------------------------------------

    def _few(
        self, x: Tensor, packed: CpuExperts, ids: Tensor, weights: Tensor, limit: float,
        out: Tensor,
    ) -> None:  # fmt: skip
        num_tokens, num_chosen = ids.shape
        num_pairs, num_threads = ids.numel(), self._team.num_threads
        hidden, inner = packed.gate_up.columns, packed.gate_up.rows
        wide = self._scratch.address("x", num_pairs * hidden * 4)
        plan = self._sort(
            ids.data_ptr(), num_pairs, packed.num_experts,
            x.data_ptr(), x.stride(0), num_chosen, packed.hidden, wide, hidden,
        )  # fmt: skip
        rows = max(4, min(inner, _FEW_ITEM_BYTES // packed.gate_up.row_bytes) // 4 * 4)
        most_items = min(num_pairs, packed.num_experts) * -(-inner // rows)
        num_chunks = min(most_items, MAX_CHUNKS)
        inner_rows = self._scratch.address("inner", num_pairs * inner * 4)
        self._team.launch(
            self._gate_up_few_kernel,
            num_chunks,
            limit,
            plan,
            wide,
            *packed.gate_up.arguments,
            inner_rows,
            rows,
            self._scratch.address("sums", num_threads * num_pairs * 2 * rows * 4),
            num_pairs,
            num_chunks,
        )
        columns = packed.down.rows
        wanted = min(MAX_CHUNKS, _ITEMS_PER_THREAD * num_threads)
        width = _rounded(-(-columns // wanted), 4)
        sums_bytes = num_threads * (num_tokens + num_pairs) * width * 4
        self._team.launch(
            self._down_few_kernel,
            -(-columns // width),
            0.0,
            plan,
            inner_rows,
            *packed.down.arguments,
            weights.data_ptr(),
            num_chosen,
            out.data_ptr(),
            packed.hidden,
            num_tokens,
            width,
            self._scratch.address("sums", sums_bytes),
        )

    # ---- many tokens ----------------------------------------------------------------

    def _many(
        self, x: Tensor, packed: CpuExperts, ids: Tensor, weights: Tensor, limit: float,
        out: Tensor,
    ) -> None:  # fmt: skip
        num_tokens, num_chosen = ids.shape
        num_pairs, num_experts = ids.numel(), packed.num_experts
        gate_up = packed.gate_up
        plan = self._sort(ids.data_ptr(), num_pairs, num_experts)
        lines = self._gather(
            plan, num_pairs, num_experts, x.data_ptr(), x.stride(0), num_chosen, packed.hidden,
            gate_up.columns,
        )  # fmt: skip
        inner = self._lines("inner", num_pairs, num_experts, gate_up.rows)
        self._multiply(self._gate_up_kernel, plan, num_pairs, lines, gate_up, inner, limit)
        self._product(plan, num_pairs, inner, packed.down)
        self._combine(num_tokens, num_chosen, weights.data_ptr(), packed.down.rows, out)

    def _sort(self, ids: int, num_pairs: int, num_experts: int, *widened: int) -> int:
        """The plan's address. ``widened``: the kernel's arguments from ``x`` on."""
        num_bytes = cpu_experts_sort.plan_bytes(num_pairs, num_experts)
        plan = self._scratch.address("plan", num_bytes)
        self._team.launch(self._sort_kernel, 1, 0.0, plan, ids, num_pairs, num_experts, *widened)
        return plan

    def _lines(self, purpose: str, num_pairs: int, num_experts: int, length: int) -> int:
        num_lanes = cpu_experts_sort.most_lanes(num_pairs, num_experts)
        return self._scratch.address(purpose, num_lanes * length * 2)

    def _gather(
        self, plan: int, num_pairs: int, num_experts: int, x: int, x_stride: int,
        num_chosen: int, features: int, length: int,
    ) -> int:  # fmt: skip
        """The address of the lines of all blocks."""
        lines = self._lines("lines", num_pairs, num_experts, length)
        num_chunks = min(MAX_CHUNKS, cpu_experts_sort.most_blocks(num_pairs, num_experts))
        scratch = self._scratch.address(
            "sources", self._team.num_threads * 8 * cpu_experts_sort.WIDE_LANES
        )
        self._team.launch(
            self._gather_kernel, num_chunks, 0.0, plan, x, x_stride, num_chosen, features, length,
            lines, scratch, num_chunks,
        )  # fmt: skip
        return lines

    def _multiply(
        self, kernel: Kernel, plan: int, num_pairs: int, lines: int, weights: _Weights, out: int,
        limit: float,
    ) -> None:  # fmt: skip
        """Run ``kernel`` over (block, part of the rows), all parts of about one size."""
        num_threads = self._team.num_threads
        fewest_blocks = -(-num_pairs // cpu_experts_sort.WIDE_LANES)
        num_parts = max(
            -(-weights.rows * weights.row_bytes // _PART_BYTES),
            -(-_ITEMS_PER_THREAD * num_threads // fewest_blocks),
        )
        part_rows = _rounded(-(-weights.rows // num_parts), cpu_experts_many.ROWS)
        most_blocks = cpu_experts_sort.most_blocks(num_pairs, weights.weight.shape[0])
        num_chunks = min(MAX_CHUNKS, most_blocks * -(-weights.rows // part_rows))
        thread_bytes = cpu_experts_many.tile_scratch_bytes(weights.columns)
        self._team.launch(
            kernel, num_chunks, limit, plan, lines, *weights.arguments, out, part_rows,
            self._scratch.address("tiles", num_threads * thread_bytes), num_chunks,
        )  # fmt: skip

    def _product(self, plan: int, num_pairs: int, lines: int, weights: _Weights) -> None:
        """To the scratch "parts", a row for each pair."""
        parts = self._scratch.address("parts", num_pairs * weights.rows * 4)
        self._multiply(self._product_kernel, plan, num_pairs, lines, weights, parts, 0.0)

    def _combine(
        self, num_rows: int, num_chosen: int, shares: int, stride: int, out: Tensor
    ) -> None:
        """The scratch "parts" to ``out``, whose elements are ``num_rows`` rows."""
        chunk = max(1, _CHUNK_ELEMENTS // (num_chosen * stride), -(-num_rows // MAX_CHUNKS))
        self._team.launch(
            self._combine_kernel,
            -(-num_rows // chunk),
            0.0,
            self._scratch.address("parts", num_rows * num_chosen * stride * 4),
            stride,
            shares,
            num_chosen,
            out.data_ptr(),
            out.numel() // num_rows,
            num_rows,
            chunk,
        )
