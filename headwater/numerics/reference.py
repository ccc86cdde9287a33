"""The definition of every kernel, in plain torch on any device.

Written to be read: no fusion, no layout tricks, one obvious line per formula.
Every other implementation is compared with this one by tests. On CUDA the same
class, with bfloat16 activations, is what serves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.numerics import reference_experts, reference_rows
from headwater.numerics.ops import (
    KVFormat,
    LayerKV,
    Need,
    PackedExperts,
    PackedGroups,
    PackedLinear,
    RaggedBatch,
    WeightFormat,
)
from headwater.numerics.reference_experts import PlainExperts, PlainGroups
from headwater.numerics.reference_rows import PlainRows

KV_DTYPES = {KVFormat.FP32: torch.float32, KVFormat.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLinear:
    """A weight [out, in] and bias [out]; with int8 weights a float32 scale [out] too."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.bias, self.scale) if t is not None)


@dataclass(frozen=True, slots=True)
class PlainKV:
    """Keys and values [num_blocks * block_tokens + 1, K, D]: row ``slot`` is one token's,
    and the last row, slot -1, takes what nobody keeps."""

    k: Tensor
    v: Tensor
    num_blocks: int
    block_tokens: int

    def block(self, block: int) -> tuple[Tensor, Tensor]:
        """Views of one block's keys and values."""
        rows = slice(block * self.block_tokens, (block + 1) * self.block_tokens)
        return self.k[rows], self.v[rows]

    def copy_block(self, source: int, target: int) -> None:
        for ours, theirs in zip(self.block(target), self.block(source), strict=True):
            ours.copy_(theirs)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor that the host can address."""
    return tensor.view(torch.uint8).flatten().numpy().data


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] to (int8 [out, in], float32 scale [out]), symmetric per output channel.

    |weight - int8 * scale| <= scale / 2, with scale = max |row| / 127.
    """
    rows = weight.float()
    scale = rows.abs().amax(dim=1) / 127.0
    divisor = torch.where(scale == 0, 1.0, scale)
    return torch.round(rows / divisor[:, None]).to(torch.int8), scale


class ReferenceOps:
    """``Ops`` in plain torch: float32 on a CPU unless told otherwise."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        act_dtype: torch.dtype = torch.float32,
        num_threads: int | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._act_dtype = act_dtype
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    @property
    def name(self) -> str:
        return f"reference-{str(self._act_dtype).removeprefix('torch.')}"

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def act_dtype(self) -> torch.dtype:
        return self._act_dtype

    def kernels(self) -> dict[str, str]:
        dtype = str(self._act_dtype).removeprefix("torch.")
        return {
            "linear": f"torch F.linear {dtype} (int8 weights dequantised at each call)",
            "attention": "gather by block table, then torch scaled_dot_product_attention",
            "attention over rows": "gather by block table, then float32 matmul and softmax",
            "elementwise": "torch, computed in float32",
        }

    def warm_up(self, needs: Collection[Need]) -> None:
        """Make the libraries load now and not in the first request."""
        packed = self.pack_linear(torch.ones(16, 16), None, WeightFormat.FP32)
        self.linear(torch.ones(2, 16, device=self._device, dtype=self._act_dtype), packed)

    # ---- linear ---------------------------------------------------------------------

    def replay(
        self,
        body: Callable[[Tensor, RaggedBatch], Tensor],
        x: Tensor,
        kv: Sequence[LayerKV],
        batch: RaggedBatch,
    ) -> Tensor:
        return body(x, batch)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat
    ) -> PlainLinear:
        weight = weight.to(self._device)
        bias = None if bias is None else bias.to(self._device, self._act_dtype)
        if weight_format is WeightFormat.INT8:
            quantised, scale = quantise_int8(weight)
            return PlainLinear(weight=quantised, bias=bias, scale=scale)
        stored = torch.bfloat16 if weight_format is WeightFormat.BF16 else torch.float32
        return PlainLinear(weight=weight.to(stored).contiguous(), bias=bias, scale=None)

    def _rows(self, packed: PlainLinear, ids: Tensor | None = None) -> Tensor:
        """The weight (or its rows ``ids``) in the activations' dtype."""
        rows = packed.weight if ids is None else packed.weight[ids]
        if packed.scale is None:
            return rows.to(self._act_dtype)
        scale = packed.scale if ids is None else packed.scale[ids]
        return (rows.float() * scale[:, None]).to(self._act_dtype)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, PlainLinear)
        return F.linear(x, self._rows(packed), packed.bias)

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return self.linear(x, packed).float()

    def embed(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, PlainLinear)
        return self._rows(packed, ids)

    # ---- groups and experts ---------------------------------------------------------

    def pack_groups(self, weight: Tensor, weight_format: WeightFormat) -> PlainGroups:
        return reference_experts.pack_groups(self, weight, weight_format)

    def linear_groups(self, x: Tensor, packed: PackedGroups) -> Tensor:
        assert isinstance(packed, PlainGroups)
        return reference_experts.linear_groups(self, x, packed)

    def pack_experts(
        self, gate_up: Tensor, down: Tensor, weight_format: WeightFormat
    ) -> PlainExperts:
        return reference_experts.pack_experts(self, gate_up, down, weight_format)

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, num_chosen: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        return reference_experts.route(x, gate, bias, num_chosen, scaling)

    def experts(
        self, x: Tensor, packed: PackedExperts, ids: Tensor, weights: Tensor, limit: float
    ) -> Tensor:
        assert isinstance(packed, PlainExperts)
        return reference_experts.experts(self, x, packed, ids, weights, limit)

    # ---- row-wise -------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        norm = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (norm * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def norm_add_norm(
        self, x: Tensor, post_weight: Tensor, residual: Tensor, next_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + self.rms_norm(x, post_weight, eps)
        return self.rms_norm(total, next_weight, eps), total

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return (x.float() * factor).to(x.dtype)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        half = cos.shape[1]
        c, s = cos[positions][:, None, :], sin[positions][:, None, :]  # [T, 1, D_rot/2]
        for heads in (q, k):
            first, second = heads[..., : 2 * half].float().chunk(2, dim=-1)
            rotated = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
            heads[..., : 2 * half] = rotated.to(heads.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)

    def rotate_pairs(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, inverse: bool = False
    ) -> None:
        reference_rows.rotate_pairs(x, cos, sin, positions, inverse=inverse)

    def silu_mul_clamped(self, gate_up: Tensor, limit: float) -> Tensor:
        return reference_rows.silu_mul_clamped(gate_up, limit)

    # ---- KV and attention -----------------------------------------------------------

    def allocate_kv(
        self, num_blocks: int, block_tokens: int, num_kv_heads: int, head_dim: int,
        kv_format: KVFormat,
    ) -> PlainKV:  # fmt: skip
        shape = (num_blocks * block_tokens + 1, num_kv_heads, head_dim)
        k, v = (torch.zeros(shape, dtype=KV_DTYPES[kv_format], device=self._device) for _ in "kv")
        return PlainKV(k, v, num_blocks, block_tokens)

    def kv_bytes_per_token(self, num_kv_heads: int, head_dim: int, kv_format: KVFormat) -> int:
        return 2 * num_kv_heads * head_dim * KV_DTYPES[kv_format].itemsize

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        assert isinstance(kv, PlainKV)
        kv.k[slots] = k.to(kv.k.dtype)
        kv.v[slots] = v.to(kv.v.dtype)

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        batch: RaggedBatch,
        scale: float,
        window_tokens: int | None = None,
    ) -> Tensor:
        assert isinstance(kv, PlainKV)
        out = torch.empty_like(q)
        starts, contexts = batch.row_starts.tolist(), batch.context_lens.tolist()
        window_starts = [0] * len(contexts)
        if window_tokens is not None and batch.window_starts is not None:
            window_starts = batch.window_starts.tolist()
        offsets = torch.arange(kv.block_tokens, device=q.device)
        for row, context in enumerate(contexts):
            tokens = slice(starts[row], starts[row + 1])
            # No query of the row sees further back than the row's first one.
            first = window_starts[row]
            if window_tokens is not None:
                first = max(first, context - (starts[row + 1] - starts[row]) - window_tokens + 1)
            first_block = first // kv.block_tokens
            num_blocks = -(-context // kv.block_tokens)
            blocks = batch.block_tables[row, first_block:num_blocks].long()
            slots = (blocks[:, None] * kv.block_tokens + offsets).flatten()
            slots = slots[first - first_block * kv.block_tokens :][: context - first]
            keys, values = kv.k[slots].to(q.dtype), kv.v[slots].to(q.dtype)  # [seen, K, D]
            # Query i of the row sees key positions up to its own.
            key_positions = torch.arange(first, context, device=q.device)
            positions = batch.positions[tokens, None]
            seen = key_positions <= positions
            if window_tokens is not None:
                seen &= key_positions > positions - window_tokens
            attended = F.scaled_dot_product_attention(
                q[tokens].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=seen,
                scale=scale,
                enable_gqa=True,
            )
            out[tokens] = attended[0].transpose(0, 1)
        return out

    # ---- rows that are keys and values ----------------------------------------------

    def allocate_rows(
        self, num_blocks: int, block_tokens: int, dim: int, kv_format: KVFormat, ratio: int = 1
    ) -> PlainRows:
        return reference_rows.allocate_rows(
            num_blocks, block_tokens, dim, ratio, KV_DTYPES[kv_format], self._act_dtype,
            self._device,
        )  # fmt: skip

    def row_bytes_per_token(self, dim: int, kv_format: KVFormat, ratio: int = 1) -> int:
        return reference_rows.row_bytes_per_token(
            dim * KV_DTYPES[kv_format].itemsize, 2 * dim * self._act_dtype.itemsize, ratio
        )

    def store_rows(self, rows: Tensor, kv: LayerKV, slots: Tensor) -> None:
        assert isinstance(kv, PlainRows)
        reference_rows.store_rows(rows, kv, slots)

    def compress(
        self, values: Tensor, gates: Tensor, norm: Tensor, cos: Tensor, sin: Tensor,
        kv: LayerKV, batch: RaggedBatch, eps: float,
    ) -> None:  # fmt: skip
        assert isinstance(kv, PlainRows)
        reference_rows.compress(values, gates, norm, cos, sin, kv, batch, eps)

    def attend_rows(
        self, q: Tensor, window: LayerKV, source: LayerKV | None, sinks: Tensor,
        batch: RaggedBatch, scale: float, window_tokens: int,
    ) -> Tensor:  # fmt: skip
        assert isinstance(window, PlainRows)
        assert source is None or isinstance(source, PlainRows)
        return reference_rows.attend_rows(q, window, source, sinks, batch, scale, window_tokens)

    # ---- blocks ---------------------------------------------------------------------

    def kv_buffers(self, kv: LayerKV, block: int) -> tuple[memoryview, ...] | None:
        assert isinstance(kv, PlainKV | PlainRows)
        if self._device.type != "cpu":
            return None
        return tuple(bytes_of(part) for part in kv.block(block))

    def copy_kv_block(self, kv: LayerKV, source: int, target: int) -> None:
        assert isinstance(kv, PlainKV | PlainRows)
        kv.copy_block(source, target)
