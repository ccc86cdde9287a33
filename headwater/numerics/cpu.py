"""The fast path on a CPU: bfloat16 activations, bf16 or int8 weights, paged KV.

Joins the parts: ``cpu_matmul`` and ``cpu_kv`` know which kernel wins where, the
row-wise operations are here, the kernels themselves are in the other ``cpu_*``
files. Built by ``select.py``, called by ``model`` from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.numerics import cpu_amx, cpu_elementwise, cpu_rows_kernels
from headwater.numerics.cpu_experts import CpuExperts, CpuGroups, Experts
from headwater.numerics.cpu_kv import CpuKV, PagedAttention, kv_bytes_per_token
from headwater.numerics.cpu_matmul import CpuLinear, MatMul
from headwater.numerics.cpu_memory import Activations, Scratch
from headwater.numerics.cpu_program import MAX_ROWS, Programs
from headwater.numerics.cpu_rows import CpuRows, RowsAttention, row_bytes_per_token
from headwater.numerics.cpu_team import MAX_CHUNKS, Kernel, Team
from headwater.numerics.cpu_warm_up import warm_up
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
from headwater.numerics.reference import bytes_of
from headwater.numerics.reference_rows import PlainRows

# Elements per chunk of a row-wise kernel: about 10 us.
_CHUNK_ELEMENTS = 8_192


def _rows_per_chunk(num_rows: int, elements_per_row: int) -> int:
    """Rows of one chunk of a row-wise kernel."""
    return max(1, _CHUNK_ELEMENTS // elements_per_row, -(-num_rows // MAX_CHUNKS))


class CpuOps:
    """``Ops`` on a CPU. One instance per process: it sets torch's thread count."""

    def __init__(self, num_threads: int, *, tiles: bool | None = None) -> None:
        """``tiles``: use AMX tiles; None asks the machine."""
        if num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        torch.set_num_threads(num_threads)
        available = cpu_amx.tiles_available()
        if tiles and not available:
            raise ConfigError("this machine has no AMX tiles for bfloat16")
        use_tiles = available if tiles is None else tiles
        self._team = Team(num_threads)
        scratch = Scratch()
        self._activations = Activations()
        self._matmul = MatMul(self._team, scratch, self._activations, tiles=use_tiles)
        self._attention = PagedAttention(self._team, scratch, self._activations, tiles=use_tiles)
        self._rows = RowsAttention(self._team, scratch, self._activations)
        self._programs = Programs(self._team, self._activations)
        self._experts = Experts(self._team, scratch, self._activations)
        self._rms_norm = Kernel(cpu_elementwise.rms_norm_kernel)
        self._add_rms_norm = Kernel(cpu_elementwise.add_rms_norm_kernel)
        self._norm_add_norm = Kernel(cpu_elementwise.norm_add_norm_kernel)
        self._scale = Kernel(cpu_elementwise.scale_kernel)
        self._silu_mul = Kernel(cpu_elementwise.silu_mul_kernel)
        self._gelu_mul = Kernel(cpu_elementwise.gelu_mul_kernel)
        self._silu_mul_clamped = Kernel(cpu_rows_kernels.silu_mul_clamped_kernel)
        self._rotate = Kernel(cpu_elementwise.rotate_kernel)

    @property
    def name(self) -> str:
        return "cpu-bfloat16"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def act_dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def num_threads(self) -> int:
        return self._team.num_threads

    def kernels(self) -> dict[str, str]:
        return {
            **self._matmul.kernels(),
            **self._attention.kernels(),
            **self._rows.kernels(),
            **self._experts.kernels(),
            "elementwise": f"numba, {self.num_threads} threads",
        }

    def warm_up(self, needs: Collection[Need]) -> None:
        self._programs.warm_up()
        warm_up(self, needs)

    def close(self) -> None:
        """End the helper threads; the instance cannot be used afterwards."""
        self._team.close()

    def replay(
        self,
        body: Callable[[Tensor, RaggedBatch], Tensor],
        x: Tensor,
        kv: Sequence[LayerKV],
        batch: RaggedBatch,
    ) -> Tensor:
        if batch.max_row_tokens > 1 or x.shape[0] > MAX_ROWS:
            return body(x, batch)
        return self._programs.run(body, x, kv, batch)

    # ---- linear ---------------------------------------------------------------------

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat
    ) -> CpuLinear:
        return self._matmul.pack(weight, bias, weight_format)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, CpuLinear)
        return self._matmul.multiply(x, packed, torch.bfloat16)

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, CpuLinear)
        return self._matmul.multiply(x, packed, torch.float32)

    def embed(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, CpuLinear)
        return self._matmul.rows_of(ids, packed)

    # ---- groups and experts ---------------------------------------------------------

    def pack_groups(self, weight: Tensor, weight_format: WeightFormat) -> CpuGroups:
        return self._experts.pack_groups(weight, weight_format)

    def linear_groups(self, x: Tensor, packed: PackedGroups) -> Tensor:
        assert isinstance(packed, CpuGroups)
        return self._experts.linear_groups(x, packed)

    def pack_experts(
        self, gate_up: Tensor, down: Tensor, weight_format: WeightFormat
    ) -> CpuExperts:
        return self._experts.pack_experts(gate_up, down, weight_format)

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, num_chosen: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        return self._experts.route(x, gate, bias, num_chosen, scaling)

    def experts(
        self, x: Tensor, packed: PackedExperts, ids: Tensor, weights: Tensor, limit: float
    ) -> Tensor:
        assert isinstance(packed, CpuExperts)
        return self._experts.experts(x, packed, ids, weights, limit)

    # ---- row-wise -------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = x.shape[-1]
        out = self._activations.empty(x.shape, torch.bfloat16)
        rows = 1 if x.dim() == 2 else x.shape[1]
        if x.dim() not in (2, 3) or x.stride(-1) != 1 or (rows > 1 and x.stride(1) != length):
            self._team.spoil()
            x = x.reshape(-1, length).contiguous()
            rows = 1
        chunk = _rows_per_chunk(x.shape[0], rows * length)
        self._team.launch(
            self._rms_norm,
            -(-x.shape[0] // chunk),
            eps,
            x.data_ptr(),
            x.stride(0),
            rows,
            weight.data_ptr(),
            int(weight.dtype == torch.float32),
            out.data_ptr(),
            length,
            x.shape[0],
            chunk,
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not (x.is_contiguous() and residual.is_contiguous()):
            self._team.spoil()
            x, residual = x.contiguous(), residual.contiguous()
        length = x.shape[-1]
        num_rows = x.numel() // length
        chunk = _rows_per_chunk(num_rows, length)
        self._team.launch(
            self._add_rms_norm,
            -(-num_rows // chunk),
            eps,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            int(weight.dtype == torch.float32),
            length,
            num_rows,
            chunk,
        )
        return x, residual

    def norm_add_norm(
        self, x: Tensor, post_weight: Tensor, residual: Tensor, next_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not (x.is_contiguous() and residual.is_contiguous()):
            self._team.spoil()
            x, residual = x.contiguous(), residual.contiguous()
        assert post_weight.dtype == next_weight.dtype
        num_rows, length = x.shape
        chunk = _rows_per_chunk(num_rows, length)
        self._team.launch(
            self._norm_add_norm,
            -(-num_rows // chunk),
            eps,
            x.data_ptr(),
            residual.data_ptr(),
            post_weight.data_ptr(),
            next_weight.data_ptr(),
            int(post_weight.dtype == torch.float32),
            length,
            num_rows,
            chunk,
        )
        return x, residual

    def scale(self, x: Tensor, factor: float) -> Tensor:
        if not x.is_contiguous():
            self._team.spoil()
            x = x.contiguous()
        chunk = max(_CHUNK_ELEMENTS, -(-x.numel() // MAX_CHUNKS))
        self._team.launch(
            self._scale, -(-x.numel() // chunk), factor, x.data_ptr(), x.numel(), chunk
        )
        return x

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        num_tokens, num_heads, head_dim = q.shape
        chunk = _rows_per_chunk(num_tokens, (num_heads + k.shape[1]) * head_dim)
        self._team.launch(
            self._rotate,
            -(-num_tokens // chunk),
            0.0,
            q.data_ptr(),
            q.stride(0),
            num_heads,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            head_dim,
            cos.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            num_tokens,
            chunk,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(self._silu_mul, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(self._gelu_mul, gate_up)

    def silu_mul_clamped(self, gate_up: Tensor, limit: float) -> Tensor:
        return self._gate_mul(self._silu_mul_clamped, gate_up, limit)

    def _gate_mul(self, kernel: Kernel, gate_up: Tensor, limit: float = 0.0) -> Tensor:
        num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._activations.empty((num_tokens, inner), torch.bfloat16)
        chunk = _rows_per_chunk(num_tokens, inner)
        self._team.launch(
            kernel,
            -(-num_tokens // chunk),
            limit,
            gate_up.data_ptr(),
            out.data_ptr(),
            inner,
            num_tokens,
            chunk,
        )
        return out

    # ---- KV and attention -----------------------------------------------------------

    def allocate_kv(
        self, num_blocks: int, block_tokens: int, num_kv_heads: int, head_dim: int,
        kv_format: KVFormat,
    ) -> CpuKV:  # fmt: skip
        return self._attention.allocate(num_blocks, block_tokens, num_kv_heads, head_dim, kv_format)

    def kv_bytes_per_token(self, num_kv_heads: int, head_dim: int, kv_format: KVFormat) -> int:
        return kv_bytes_per_token(num_kv_heads, head_dim, kv_format)

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        assert isinstance(kv, CpuKV)
        self._attention.store(k, v, kv, slots)

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        batch: RaggedBatch,
        scale: float,
        window_tokens: int | None = None,
    ) -> Tensor:
        assert isinstance(kv, CpuKV)
        return self._attention.attend(q, kv, batch, scale, window_tokens)

    # ---- rows that are keys and values ----------------------------------------------

    def rotate_pairs(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, inverse: bool = False
    ) -> None:
        self._rows.rotate(x, cos, sin, positions, inverse=inverse)

    def allocate_rows(
        self, num_blocks: int, block_tokens: int, dim: int, kv_format: KVFormat, ratio: int = 1
    ) -> CpuRows | PlainRows:
        return self._rows.allocate(num_blocks, block_tokens, dim, kv_format, ratio)

    def row_bytes_per_token(self, dim: int, kv_format: KVFormat, ratio: int = 1) -> int:
        return row_bytes_per_token(dim, kv_format, ratio)

    def store_rows(self, rows: Tensor, kv: LayerKV, slots: Tensor) -> None:
        self._rows.store(rows, kv, slots)

    def compress(
        self, values: Tensor, gates: Tensor, norm: Tensor, cos: Tensor, sin: Tensor,
        kv: LayerKV, batch: RaggedBatch, eps: float,
    ) -> None:  # fmt: skip
        self._rows.compress(values, gates, norm, cos, sin, kv, batch, eps)

    def attend_rows(
        self, q: Tensor, window: LayerKV, source: LayerKV | None, sinks: Tensor,
        batch: RaggedBatch, scale: float, window_tokens: int,
    ) -> Tensor:  # fmt: skip
        return self._rows.attend(q, window, source, sinks, batch, scale, window_tokens)

    # ---- blocks ---------------------------------------------------------------------

    def kv_buffers(self, kv: LayerKV, block: int) -> tuple[memoryview, ...] | None:
        if isinstance(kv, PlainRows):
            return tuple(bytes_of(part) for part in kv.block(block))
        if isinstance(kv, CpuRows):
            return (kv.block_bytes(block),)
        assert isinstance(kv, CpuKV)
        return kv.block_bytes(block)

    def copy_kv_block(self, kv: LayerKV, source: int, target: int) -> None:
        if isinstance(kv, CpuRows | PlainRows):
            kv.copy_block(source, target)
            return
        assert isinstance(kv, CpuKV)
        for ours, theirs in zip(kv.block_bytes(target), kv.block_bytes(source), strict=True):
            ours[:] = theirs
