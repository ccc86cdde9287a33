"""The kernel port: what a model's forward pass is written in.

Shapes. T: tokens of the step, all rows flattened. R: rows. H: hidden size.
N: query heads, K: key/value heads, D: head size, F: MLP inner size, V: vocabulary.

    row r owns tokens [row_starts[r], row_starts[r+1]) of the T flattened tokens;
    its token i sits at sequence position context_lens[r] - n_r + i, so attention
    of the row's last token sees [0, context_lens[r]).

KV of one layer is opaque to everyone but the implementation that allocated it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor


class WeightFormat(StrEnum):
    """How linear weights are kept in memory."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"  # symmetric, one scale per output channel


class KVFormat(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Where each row's tokens are and which blocks hold its KV. Integers on the device."""

    row_starts: Tensor  # int32 [R + 1]
    context_lens: Tensor  # int32 [R], tokens attended to by the row's last token
    block_tables: Tensor  # int32 [R, max_blocks], unused entries 0
    positions: Tensor  # int32 [T], position of each token in its sequence
    slots: Tensor  # int64 [T], block_id * block_tokens + offset where the token's KV goes
    max_row_tokens: int
    max_context: int
    # Only for models with window layers; None: no row has any of it.
    window_starts: Tensor | None = None  # int32 [R], see ``core.step.StepRow.window_start``
    global_slots: Tensor | None = None  # int64 [T], ``slots`` with -1 at replayed tokens


class PackedLinear(Protocol):
    """A weight [out, in] (and bias [out]) in whatever form the kernels like."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def weight_bytes(self) -> int:
        """Bytes read to apply it once."""
        ...


class LayerKV(Protocol):
    """One layer's keys and values over all blocks."""

    @property
    def num_blocks(self) -> int: ...


class Ops(Protocol):
    """One implementation of every kernel. Activations have dtype ``act_dtype``."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def act_dtype(self) -> torch.dtype: ...

    def kernels(self) -> dict[str, str]:
        """Which kernel serves which job, for ``doctor`` and the start-up log."""
        ...

    def warm_up(self) -> None:
        """Compile or load every kernel now, so that the first request does not wait for it."""
        ...

    def replay(
        self,
        body: Callable[[Tensor, RaggedBatch], Tensor],
        x: Tensor,
        kv: Sequence[LayerKV],
        batch: RaggedBatch,
    ) -> Tensor:
        """``body(x, batch)``: [T, H] -> [T, H], reading and writing ``kv``.

        ``body`` may only call these ops and make views, may overwrite ``x``, and must
        always be the same for one ``kv``: the implementation may record its kernel
        calls and repeat them for later batches of the same shape.
        """
        ...

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat
    ) -> PackedLinear:
        """Take [out, in] float weights; the caller may drop its copy afterwards."""
        ...

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """[T, in] -> [T, out] = x @ weight.T + bias."""
        ...

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """[R, H] -> float32 [R, V]."""
        ...

    def embed(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        """int64 [T] -> [T, H]: rows of the packed weight (the table may be a tied head)."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[..., H] * rsqrt(mean(x^2) + eps) * weight over the last axis."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual) in one pass; may overwrite its inputs."""
        ...

    def norm_add_norm(
        self, x: Tensor, post_weight: Tensor, residual: Tensor, next_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """For layers that norm their result before it is added: with
        ``total = residual + rms_norm(x, post_weight)``, (rms_norm(total, next_weight), total).
        May overwrite ``x`` and ``residual``, [T, H]."""
        ...

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """[T, H] * factor, rounded once; may overwrite ``x``."""
        ...

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotary embedding in place, half-split pairs (i, i + D_rot/2).

        q [T, N, D], k [T, K, D]; cos, sin float32 [max_positions, D_rot/2];
        only the first D_rot entries of a head are rotated.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F] (gate then up) -> [T, F] = silu(gate) * up."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F] (gate then up) -> [T, F] = gelu(gate) * up, gelu in its tanh form."""
        ...

    def allocate_kv(
        self,
        num_blocks: int,
        block_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        kv_format: KVFormat,
    ) -> LayerKV:
        """Zeroed KV for one layer."""
        ...

    def kv_bytes_per_token(self, num_kv_heads: int, head_dim: int, kv_format: KVFormat) -> int:
        """Bytes of one token's K and V in one layer."""
        ...

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        """Write k, v [T, K, D] at ``slots``; a slot of -1 writes nothing."""
        ...

    def attend(
        self,
        q: Tensor,
        kv: LayerKV,
        batch: RaggedBatch,
        scale: float,
        window_tokens: int | None = None,
    ) -> Tensor:
        """Causal grouped-query attention over each row's blocks: [T, N, D] -> [T, N, D].

        The row's own K and V are already stored. Softmax in float32. With
        ``window_tokens``, the query at position p of row r sees positions
        [max(p - window_tokens + 1, batch.window_starts[r]), p].
        """
        ...

    def kv_buffers(self, kv: LayerKV, block: int) -> tuple[memoryview, ...] | None:
        """One block's bytes of this layer in place: contiguous, writable, format ``B``, always
        in the same order. None where the host cannot address the device's memory."""
        ...

    def copy_kv_block(self, kv: LayerKV, source: int, target: int) -> None:
        """All bytes of block ``source`` into block ``target``."""
        ...
