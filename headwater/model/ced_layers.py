"""One layer of the family ``ced``: its weights, and what it does with T tokens.

    hidden = attn_norm(residual)                               [T, H]
    q_latent, kv = wq_a(hidden), wkv(hidden); norm both        [T, q_rank], [T, D]
    q = wq_b(q_latent); rotate q and kv; store kv              [T, N, D]
    o = attend its own window, its source's rows and a sink    [T, N, D]
    residual += wo_b(wo_a(rotate o back)), wo_a by groups of heads
    hidden = ffn_norm(residual)
    residual += experts(hidden) + shared(hidden)

A *source* layer also writes the rows that it and the layers behind it attend to, from the same
hidden states: one for each token, or pooled from two. Knows neither which layers there are
nor which tokens they get; ``ced.py`` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.model.config import EncoderDecoder, ModelConfig
from headwater.model.packing import WeightPacker, bytes_of
from headwater.numerics.ops import (
    LayerKV,
    Ops,
    PackedExperts,
    PackedGroups,
    PackedLinear,
    RaggedBatch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """What writes a source's rows. ``project`` gives values, with ratio 2 also gates."""

    ratio: int
    table: RotaryTable
    project: PackedLinear
    norm: Tensor

    @property
    def weight_bytes(self) -> int:
        return bytes_of([self.project], [self.norm])


@dataclass(frozen=True, slots=True, kw_only=True)
class CedLayer:
    """One layer's weights but its compressor. ``q_kv`` is wq_a and wkv in one."""

    table: RotaryTable
    attn_norm: Tensor
    q_kv: PackedLinear
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: PackedLinear
    sinks: Tensor
    wo_a: PackedGroups
    wo_b: PackedLinear
    ffn_norm: Tensor
    gate: Tensor
    gate_bias: Tensor
    experts: PackedExperts
    shared_gate_up: PackedLinear | None
    shared_down: PackedLinear | None

    @property
    def dense_bytes(self) -> int:
        """Of all but the routed experts."""
        shared = [one for one in (self.shared_gate_up, self.shared_down) if one is not None]
        norms = [self.attn_norm, self.q_norm, self.kv_norm, self.ffn_norm]
        return bytes_of(
            [self.q_kv, self.wq_b, self.wo_a, self.wo_b, *shared],
            [*norms, self.sinks, self.gate, self.gate_bias],
        )

    @property
    def weight_bytes(self) -> int:
        return self.dense_bytes + self.experts.weight_bytes


def encoder_decoder(config: ModelConfig) -> EncoderDecoder:
    if config.encoder_decoder is None:
        raise ModelError(f"{config.architecture}: the family ced needs an encoder and a decoder")
    return config.encoder_decoder


def write_source(
    ops: Ops, compressor: Compressor, hidden: Tensor, batch: RaggedBatch, rows: LayerKV, eps: float
) -> None:
    """The source's rows of all tokens, but of those that are replayed. [T, H]."""
    projected = ops.linear(hidden, compressor.project)
    cos, sin = compressor.table.cos, compressor.table.sin
    if compressor.ratio == 1:
        row = ops.rms_norm(projected, compressor.norm, eps)
        ops.rotate_pairs(row[:, None], cos, sin, batch.positions)
        slots = batch.slots if batch.global_slots is None else batch.global_slots
        ops.store_rows(row, rows, slots)
    else:
        values, gates = projected.chunk(2, dim=-1)
        ops.compress(values, gates, compressor.norm, cos, sin, rows, batch, eps)


def attention(
    ops: Ops,
    config: ModelConfig,
    layer: CedLayer,
    hidden: Tensor,
    batch: RaggedBatch,
    window: LayerKV,
    source: LayerKV | None,
) -> Tensor:
    """[T, H] -> [T, H]. Stores the layer's own rows; those of ``source`` are there."""
    shape, num_tokens = encoder_decoder(config), hidden.shape[0]
    cos, sin = layer.table.cos, layer.table.sin
    latent, kv = torch.split(
        ops.linear(hidden, layer.q_kv), [shape.q_rank, config.head_dim], dim=-1
    )
    q = ops.linear(ops.rms_norm(latent, layer.q_norm, config.rms_eps), layer.wq_b)
    q = q.view(num_tokens, config.num_heads, config.head_dim)
    kv = ops.rms_norm(kv, layer.kv_norm, config.rms_eps)
    ops.rotate_pairs(q, cos, sin, batch.positions)
    ops.rotate_pairs(kv[:, None], cos, sin, batch.positions)
    ops.store_rows(kv, window, batch.slots)
    out = ops.attend_rows(
        q, window, source, layer.sinks, batch, config.query_scale, shape.window_tokens
    )
    ops.rotate_pairs(out, cos, sin, batch.positions, inverse=True)
    return ops.linear(ops.linear_groups(out.flatten(1), layer.wo_a), layer.wo_b)


def add_experts(
    ops: Ops,
    config: ModelConfig,
    layer: CedLayer,
    hidden: Tensor,
    residual: Tensor,
    next_norm: Tensor,
) -> tuple[Tensor, Tensor]:
    """(``next_norm`` of the sum, the sum): residual + experts(hidden) + shared(hidden)."""
    shape, eps = encoder_decoder(config), config.rms_eps
    ids, weights = ops.route(
        hidden, layer.gate, layer.gate_bias, shape.num_experts_per_token, shape.routed_scaling
    )
    routed = ops.experts(hidden, layer.experts, ids, weights, shape.swiglu_limit)
    if layer.shared_gate_up is None or layer.shared_down is None:
        return ops.add_rms_norm(routed, residual, next_norm, eps)
    gated = ops.silu_mul_clamped(ops.linear(hidden, layer.shared_gate_up), shape.swiglu_limit)
    shared = ops.linear(gated, layer.shared_down)
    # For the sum alone: no op only adds.
    _, residual = ops.add_rms_norm(routed, residual, next_norm, eps)
    return ops.add_rms_norm(shared, residual, next_norm, eps)


def read_compressor(name: str, ratio: int, table: RotaryTable, weights: WeightPacker) -> Compressor:
    """``name`` is the layer's, as ``layers.3``."""
    compressor = f"{name}.attn.compressor"
    parts = ["wkv", "wgate"][:ratio]
    return Compressor(
        ratio=ratio,
        table=table,
        project=weights.linear(*(f"{compressor}.{part}" for part in parts)),
        norm=weights.vector(f"{compressor}.norm"),
    )


def read_layer(
    name: str, config: ModelConfig, table: RotaryTable, weights: WeightPacker
) -> CedLayer:
    """``name`` is the layer's, as ``layers.3``."""
    shape, attn, ffn = encoder_decoder(config), f"{name}.attn", f"{name}.ffn"
    shared = f"{ffn}.shared_experts"
    has_shared = shape.num_shared_experts > 0
    return CedLayer(
        table=table,
        attn_norm=weights.vector(f"{name}.attn_norm"),
        q_kv=weights.linear(f"{attn}.wq_a", f"{attn}.wkv"),
        q_norm=weights.vector(f"{attn}.q_norm"),
        kv_norm=weights.vector(f"{attn}.kv_norm"),
        wq_b=weights.linear(f"{attn}.wq_b"),
        sinks=weights.plain(f"{attn}.attn_sink"),
        wo_a=weights.groups(f"{attn}.wo_a", shape.o_groups),
        wo_b=weights.linear(f"{attn}.wo_b"),
        ffn_norm=weights.vector(f"{name}.ffn_norm"),
        gate=weights.vector(f"{ffn}.gate"),
        gate_bias=weights.plain(f"{ffn}.gate.bias"),
        experts=weights.experts(f"{ffn}.experts", shape.num_experts),
        shared_gate_up=weights.linear(f"{shared}.w1", f"{shared}.w3") if has_shared else None,
        shared_down=weights.linear(f"{shared}.w2") if has_shared else None,
    )


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer without a compressor, by their names within the layer."""
    shape, hidden, head_dim = encoder_decoder(config), config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn.wq_a.weight": (shape.q_rank, hidden),
        "attn.wkv.weight": (head_dim, hidden),
        "attn.q_norm.weight": (shape.q_rank,),
        "attn.kv_norm.weight": (head_dim,),
        "attn.wq_b.weight": (config.query_size, shape.q_rank),
        "attn.attn_sink": (config.num_heads,),
        "attn.wo_a.weight": (shape.o_groups * shape.o_rank, config.query_size // shape.o_groups),
        "attn.wo_b.weight": (hidden, shape.o_groups * shape.o_rank),
        "ffn_norm.weight": (hidden,),
        "ffn.gate.weight": (shape.num_experts, hidden),
        "ffn.gate.bias": (shape.num_experts,),
    }
    for index in range(shape.num_experts):
        shapes |= _mlp_shapes(f"ffn.experts.{index}", shape.expert_size, hidden)
    if shape.num_shared_experts:
        inner = shape.num_shared_experts * shape.expert_size
        shapes |= _mlp_shapes("ffn.shared_experts", inner, hidden)
    return shapes


def compressor_shapes(config: ModelConfig, ratio: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a source's compressor, by their names within the layer."""
    projection = (config.head_dim, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"attn.compressor.wkv.weight": projection}
    if ratio == 2:
        shapes["attn.compressor.wgate.weight"] = projection
    return {**shapes, "attn.compressor.norm.weight": (config.head_dim,)}


def _mlp_shapes(name: str, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.w1.weight": (inner, hidden),
        f"{name}.w3.weight": (inner, hidden),
        f"{name}.w2.weight": (hidden, inner),
    }


def layer_flops(config: ModelConfig) -> int:
    """Of one token in one layer without its compressor, the chosen experts counted."""
    shape, hidden = encoder_decoder(config), config.hidden_size
    num_experts = shape.num_experts_per_token + shape.num_shared_experts
    return 2 * (
        hidden * (shape.q_rank + config.head_dim)
        + shape.q_rank * config.query_size
        + config.query_size * shape.o_rank
        + shape.o_groups * shape.o_rank * hidden
        + shape.num_experts * hidden
        + num_experts * 3 * hidden * shape.expert_size
    )


def compressor_flops(config: ModelConfig, ratio: int) -> int:
    """Of one token in a source's compressor."""
    return 2 * config.hidden_size * config.head_dim * ratio
