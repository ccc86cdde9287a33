"""The llama family: Llama, SmolLM2, Mistral without a window, Qwen2 and Qwen3 dense.

One decoder layer, with the residual stream added inside the norms:

    hidden = norm(residual)                          [T, H]
    q, k, v = qkv(hidden)                            [T, N D], [T, K D], [T, K D]
    q, k = q_norm(q), k_norm(k)                      Qwen3 only
    rotate q and k; store k and v; attend            [T, N, D]
    residual += output(attended)
    residual += down(silu(gate) * up), gate_up(norm(residual))

Knows shapes and order; every number is computed by ``Ops``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.model.config import ModelConfig
from headwater.model.family import CacheGroup, CacheKind, ModelPart
from headwater.model.packing import WeightPacker, bytes_of, flops_of
from headwater.model.rope import rotary_table
from headwater.model.weights import ReadTensor
from headwater.numerics.ops import LayerKV, Need, Ops, PackedLinear, RaggedBatch, WeightFormat

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """One layer's weights. Norms are vectors; q_norm and k_norm have head_dim entries."""

    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Tensor, ...]:
        norms = (self.input_norm, self.q_norm, self.k_norm, self.mlp_norm)
        return tuple(norm for norm in norms if norm is not None)


class LlamaModel:
    """A loaded model of the family; see ``family.Model`` for the contract."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        ops: Ops,
        embedding: PackedLinear,
        layers: Sequence[LlamaLayer],
        final_norm: Tensor,
        head: PackedLinear,
    ) -> None:
        """``head is embedding`` when the model ties them."""
        self.config = config
        self._ops = ops
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._scale = config.head_dim**-0.5
        cos, sin = rotary_table(config)
        self._cos, self._sin = cos.to(ops.device), sin.to(ops.device)

    @property
    def cache_plan(self) -> tuple[CacheGroup, ...]:
        return _cache_plan(self.config)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.PAGED_KV, Need.SILU})

    @property
    def step_weights_bytes(self) -> int:
        linears = [linear for layer in self._layers for linear in layer.linears]
        norms = [norm for layer in self._layers for norm in layer.norms]
        return bytes_of([*linears, self._head], [*norms, self._final_norm])

    @property
    def weights_bytes(self) -> int:
        own_table = 0 if self._head is self._embedding else self._embedding.weight_bytes
        return self.step_weights_bytes + own_table

    @property
    def full_weights_bytes(self) -> int:
        return self.weights_bytes

    @property
    def flops_per_token(self) -> int:
        return flops_of(linear for layer in self._layers for linear in layer.linears)

    @property
    def late_flops_per_token(self) -> int:
        return 0

    def forward(self, ids: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        def layers(residual: Tensor, batch: RaggedBatch) -> Tensor:
            return self._layers_pass(residual, batch, kv)

        return self._ops.replay(layers, self._ops.embed(ids, self._embedding), kv, batch)

    def _layers_pass(self, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """All layers and the final norm: [T, H] -> [T, H]."""
        ops, eps = self._ops, self.config.rms_eps
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        # Each layer ends with the norm that opens the next one, so that every
        # addition to the residual shares one pass with the norm behind it.
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        for layer, layer_kv, next_norm in zip(self._layers, kv, next_norms, strict=True):
            attended = self._attention(layer, hidden, batch, layer_kv)
            hidden, residual = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            gated = ops.silu_mul(ops.linear(hidden, layer.gate_up))
            hidden, residual = ops.add_rms_norm(
                ops.linear(gated, layer.down), residual, next_norm, eps
            )
        return hidden

    def logits(self, hidden_rows: Tensor) -> Tensor:
        return self._ops.logits(hidden_rows, self._head)

    def _attention(
        self, layer: LlamaLayer, hidden: Tensor, batch: RaggedBatch, kv: LayerKV
    ) -> Tensor:
        """[T, H] -> [T, H]. q, k and v are views into one [T, (N + 2K) D] result."""
        ops, config = self._ops, self.config
        num_tokens = hidden.shape[0]
        parts = torch.split(
            ops.linear(hidden, layer.qkv),
            [config.query_size, config.kv_size, config.kv_size],
            dim=-1,
        )
        q, k, v = (part.view(num_tokens, -1, config.head_dim) for part in parts)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_eps)
        ops.rotate(q, k, self._cos, self._sin, batch.positions)
        ops.store_kv(k, v, kv, batch.slots)
        attended = ops.attend(q, kv, batch, self._scale)
        return ops.linear(attended.flatten(1), layer.output)


class LlamaFamily:
    """Names and shapes of the checkpoint, and how they become a LlamaModel."""

    name = "llama"

    def expected_tensors(
        self, config: ModelConfig, part: ModelPart = ModelPart.ALL
    ) -> Mapping[str, tuple[int, ...]]:
        hidden, mlp = config.hidden_size, config.mlp_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
            shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            if config.qk_norm:
                shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
                shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
            for name, out_size, in_size, has_bias in (
                ("self_attn.q_proj", config.query_size, hidden, config.qkv_bias),
                ("self_attn.k_proj", config.kv_size, hidden, config.qkv_bias),
                ("self_attn.v_proj", config.kv_size, hidden, config.qkv_bias),
                ("self_attn.o_proj", hidden, config.query_size, config.output_bias),
                ("mlp.gate_proj", mlp, hidden, config.mlp_bias),
                ("mlp.up_proj", mlp, hidden, config.mlp_bias),
                ("mlp.down_proj", hidden, mlp, config.mlp_bias),
            ):
                shapes[f"{layer}.{name}.weight"] = (out_size, in_size)
                if has_bias:
                    shapes[f"{layer}.{name}.bias"] = (out_size,)
        shapes[FINAL_NORM] = (hidden,)
        if not config.tied_head:
            shapes[HEAD] = (config.vocab_size, hidden)
        return shapes

    def unused_tensors(self, config: ModelConfig) -> frozenset[str]:
        return frozenset({HEAD}) if config.tied_head else frozenset()

    def cache_plan(
        self, config: ModelConfig, part: ModelPart = ModelPart.ALL
    ) -> tuple[CacheGroup, ...]:
        return _cache_plan(config)

    def build(
        self,
        config: ModelConfig,
        read: ReadTensor,
        ops: Ops,
        weight_format: WeightFormat,
        part: ModelPart = ModelPart.ALL,
    ) -> LlamaModel:
        weights = WeightPacker(read, ops, weight_format)
        embedding = weights.table("model.embed_tokens", is_head=config.tied_head)
        layers = [
            _layer(f"model.layers.{index}", config, weights) for index in range(config.num_layers)
        ]
        return LlamaModel(
            config=config,
            ops=ops,
            embedding=embedding,
            layers=layers,
            final_norm=weights.vector("model.norm"),
            head=embedding if config.tied_head else weights.linear("lm_head"),
        )


def _cache_plan(config: ModelConfig) -> tuple[CacheGroup, ...]:
    return (
        CacheGroup(
            kind=CacheKind.GLOBAL,
            layers=tuple(range(config.num_layers)),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
    )


def _layer(name: str, config: ModelConfig, weights: WeightPacker) -> LlamaLayer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return LlamaLayer(
        input_norm=weights.vector(f"{name}.input_layernorm"),
        qkv=weights.linear(
            *(f"{attention}.{part}_proj" for part in ("q", "k", "v")), bias=config.qkv_bias
        ),
        q_norm=weights.vector(f"{attention}.q_norm") if config.qk_norm else None,
        k_norm=weights.vector(f"{attention}.k_norm") if config.qk_norm else None,
        output=weights.linear(f"{attention}.o_proj", bias=config.output_bias),
        mlp_norm=weights.vector(f"{name}.post_attention_layernorm"),
        gate_up=weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias),
        down=weights.linear(f"{mlp}.down_proj", bias=config.mlp_bias),
    )
