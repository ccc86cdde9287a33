"""The kernel port: what a model's forward pass is written in.

Shapes. T: tokens of the step, all rows flattened. R: rows. H: hidden size.
N: query heads, K: key/value heads, D: head size, F: MLP inner size, V: vocabulary,
G: groups, E: experts, k: experts of a token.

    row r owns tokens [row_starts[r], row_starts[r+1]) of the T flattened tokens;
    its token i sits at sequence position context_lens[r] - n_r + i, so attention
    of the row's last token sees [0, context_lens[r]).

KV of one layer is opaque to everyone but the implementation that allocated it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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


class Need(StrEnum):
    """Ops that not every model calls. A model says which it does, for ``Ops.warm_up``."""

    PAGED_KV = "paged kv"  # rotate, store_kv, attend
    ROWS = "rows"  # rotate_pairs, store_rows, attend_rows
    PAIRED_ROWS = "paired rows"  # compress
    EXPERTS = "experts"  # route, experts, silu_mul_clamped, linear_groups
    SILU = "silu"  # silu_mul
    GELU = "gelu"  # gelu_mul
    POST_NORMS = "post norms"  # norm_add_norm, scale


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
    # Only for models with late layers; None: those compute every token.
    late: LateTokens | None = None


@dataclass(frozen=True, slots=True)
class LateTokens:
    """The tokens of a step that the late layers compute too: the last ones of each row.

    ``batch`` is a batch of its own with the same block tables: rows without such a token are
    left out, and ``window_starts`` say where the late layers' window KV begins.
    """

    indices: Tensor  # int64 [T'], ascending, into the T tokens
    batch: RaggedBatch | None  # None: there is none in this step


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


class PackedGroups(Protocol):
    """G weights [out, in], each for its own part of the input."""

    @property
    def num_groups(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...


class PackedExperts(Protocol):
    """The routed experts of one layer: E times gate and up [2F, H] and down [H, F]."""

    @property
    def num_experts(self) -> int: ...
    @property
    def weight_bytes(self) -> int:
        """Bytes of all experts."""
        ...


class LayerKV(Protocol):
    """One layer's keys and values over all blocks, or its rows that are both."""

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

    def warm_up(self, needs: Collection[Need]) -> None:
        """Compile or load now what all models call and what ``needs`` names, so that no
        request waits for it. Anything else may be called too: it is compiled at its first
        call."""
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

    # What follows is for layers of the V4.1 shape: one row of D numbers per token is key and
    # value of every head, and layers share the rows of a source layer.

    def rotate_pairs(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        *,
        inverse: bool = False,
    ) -> None:
        """Rotary embedding in place on the *last* D_rot entries of each head, neighbouring
        pairs (2i, 2i + 1); ``inverse`` turns back.

        x [T, N, D]; cos, sin float32 [max_positions, D_rot/2].
        """
        ...

    def silu_mul_clamped(self, gate_up: Tensor, limit: float) -> Tensor:
        """[T, 2F] (gate then up) -> [T, F] = silu(min(gate, limit)) * clamp(up, -limit, limit)."""
        ...

    def pack_groups(self, weight: Tensor, weight_format: WeightFormat) -> PackedGroups:
        """Take [G, out, in] float weights."""
        ...

    def linear_groups(self, x: Tensor, packed: PackedGroups) -> Tensor:
        """[T, G * in] -> [T, G * out]: group g of the input times weight g."""
        ...

    def pack_experts(
        self, gate_up: Tensor, down: Tensor, weight_format: WeightFormat
    ) -> PackedExperts:
        """Take [E, 2F, H] and [E, H, F] float weights."""
        ...

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor, num_chosen: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights: [T, H] -> int32 [T, k], float32 [T, k].

        In float32: score = sqrt(softplus(gate @ x)), gate [E, H]; the k experts with the largest
        score + bias (float32 [E], for the choice only; ties: the lower id), in ascending order
        of id; weight = score / (sum of the chosen scores) * scaling.
        """
        ...

    def experts(
        self, x: Tensor, packed: PackedExperts, ids: Tensor, weights: Tensor, limit: float
    ) -> Tensor:
        """[T, H] -> [T, H] = sum over a token's experts, by ascending id, of
        weight * down(silu_mul_clamped(gate_up(x), limit)). ids, weights as ``route`` gives."""
        ...

    def allocate_rows(
        self, num_blocks: int, block_tokens: int, dim: int, kv_format: KVFormat, ratio: int = 1
    ) -> LayerKV:
        """Zeroed rows for one layer, one for each ``ratio`` tokens (1 or 2): a block has
        block_tokens / ratio of them, and with ratio 2 room for one open token (``compress``)."""
        ...

    def row_bytes_per_token(self, dim: int, kv_format: KVFormat, ratio: int = 1) -> int:
        """Bytes of one token's share of rows in one layer, rounded up; the open token's too, in
        blocks of 16 tokens or more."""
        ...

    def store_rows(self, rows: Tensor, kv: LayerKV, slots: Tensor) -> None:
        """Write rows [T, D] of a layer with ratio 1 at ``slots``; a slot of -1 writes nothing."""
        ...

    def compress(
        self,
        values: Tensor,
        gates: Tensor,
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        batch: RaggedBatch,
        eps: float,
    ) -> None:
        """Pool each pair of tokens (2g, 2g + 1) into one row and store it: ratio 2.

        values, gates [T, D]. row = rms_norm(sum over the two tokens of
        softmax(gates over the two, entry by entry) * values, norm), rotated by position 2g
        (``rotate_pairs``), all in float32, rounded once when it is stored. The first token of a
        pair whose second is not in this step is kept with its block (the *open* token) and
        read by the step that brings the second. Nothing is written where the second token's
        ``batch.global_slots`` (``slots`` if None) is -1.
        """
        ...

    def attend_rows(
        self,
        q: Tensor,
        window: LayerKV,
        source: LayerKV | None,
        sinks: Tensor,
        batch: RaggedBatch,
        scale: float,
        window_tokens: int,
    ) -> Tensor:
        """One softmax over a window of the layer's own rows, all closed rows of ``source``, and
        a sink: [T, N, D] -> [T, N, D]. Rows are keys and values of every head.

        The query at position p of row r sees ``window`` rows of positions
        [max(p - window_tokens + 1, batch.window_starts[r]), p] and ``source`` rows g with
        (g + 1) * ratio - 1 <= p, each logit q . row * scale; sinks float32 [N] are one more
        logit of each head, whose value is zero. Softmax in float32.
        """
        ...

    def kv_buffers(self, kv: LayerKV, block: int) -> tuple[memoryview, ...] | None:
        """One block's bytes of this layer in place: contiguous, writable, format ``B``, always
        in the same order. None where the host cannot address the device's memory.
        Without what is open (``compress``): only whole pairs are carried elsewhere."""
        ...

    def copy_kv_block(self, kv: LayerKV, source: int, target: int) -> None:
        """All of block ``source`` into block ``target``, what is open too."""
        ...
