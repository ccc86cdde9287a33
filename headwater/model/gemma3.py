"""The gemma3 family: dense, most layers with a window, each sixth without.

One decoder layer. Norms stand before *and* behind both halves, so that what is
added to the residual stream has been normed:

    hidden = input_norm(residual)                    [T, H]
    q, k, v = qkv(hidden)                            [T, N D], [T, K D], [T, K D]
    q, k = q_norm(q), k_norm(k); rotate; store k and v; attend
    residual += attention_norm(output(attended))
    hidden = mlp_input_norm(residual)
    residual += mlp_norm(down(gelu(gate) * up)), gate_up(hidden)

A window layer rotates with its own base and sees the last ``window_tokens``. Tokens
of a replay write the window layers' KV only: the global layers' is there already
(``RaggedBatch.global_slots``). Knows shapes and order; ``Ops`` computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.model.config import ModelConfig, NoScaling, WindowLayers
from headwater.model.family import CacheGroup, CacheKind, ModelPart
from headwater.model.packing import WeightPacker, bytes_of, flops_of
from headwater.model.rope import rotary_table
from headwater.model.weights import ReadTensor
from headwater.numerics.ops import LayerKV, Need, Ops, PackedLinear, RaggedBatch, WeightFormat

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
FINAL_NORM = "model.norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Layer:
    """One layer's weights. Norms are vectors; q_norm and k_norm have head_dim entries.

    ``cos`` and ``sin`` are those of the layer's kind. ``window_tokens`` is None in a
    global layer.
    """

    window_tokens: int | None
    cos: Tensor
    sin: Tensor
    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor
    k_norm: Tensor
    output: PackedLinear
    attention_norm: Tensor
    mlp_input_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    mlp_norm: Tensor

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Tensor, ...]:
        return (
            self.input_norm,
            self.q_norm,
            self.k_norm,
            self.attention_norm,
            self.mlp_input_norm,
            self.mlp_norm,
        )


class Gemma3Model:
    """A loaded model of the family; see ``family.Model`` for the contract."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        ops: Ops,
        embedding: PackedLinear,
        layers: Sequence[Gemma3Layer],
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
        # As published, the factor is rounded to the activations' numbers.
        self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=ops.act_dtype))

    @property
    def cache_plan(self) -> tuple[CacheGroup, ...]:
        return _cache_plan(self.config)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.PAGED_KV, Need.GELU, Need.POST_NORMS})

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

        embedded = self._ops.scale(self._ops.embed(ids, self._embedding), self._embedding_scale)
        return self._ops.replay(layers, embedded, kv, batch)

    def _layers_pass(self, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """All layers and the final norm: [T, H] -> [T, H]."""
        ops, eps = self._ops, self.config.rms_eps
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        # Each layer ends with the norm that opens the next one, so that every
        # addition to the residual shares one pass with the norm behind it.
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        for layer, layer_kv, next_norm in zip(self._layers, kv, next_norms, strict=True):
            attended = self._attention(layer, hidden, batch, layer_kv)
            hidden, residual = ops.norm_add_norm(
                attended, layer.attention_norm, residual, layer.mlp_input_norm, eps
            )
            gated = ops.gelu_mul(ops.linear(hidden, layer.gate_up))
            hidden, residual = ops.norm_add_norm(
                ops.linear(gated, layer.down), layer.mlp_norm, residual, next_norm, eps
            )
        return hidden

    def logits(self, hidden_rows: Tensor) -> Tensor:
        return self._ops.logits(hidden_rows, self._head)

    def _attention(
        self, layer: Gemma3Layer, hidden: Tensor, batch: RaggedBatch, kv: LayerKV
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
        q = ops.rms_norm(q, layer.q_norm, config.rms_eps)
        k = ops.rms_norm(k, layer.k_norm, config.rms_eps)
        ops.rotate(q, k, layer.cos, layer.sin, batch.positions)
        slots = batch.slots
        if layer.window_tokens is None and batch.global_slots is not None:
            slots = batch.global_slots
        ops.store_kv(k, v, kv, slots)
        attended = ops.attend(q, kv, batch, config.query_scale, layer.window_tokens)
        return ops.linear(attended.flatten(1), layer.output)


class Gemma3Family:
    """Names and shapes of the checkpoint, and how they become a Gemma3Model."""

    name = "gemma3"

    def expected_tensors(
        self, config: ModelConfig, part: ModelPart = ModelPart.ALL
    ) -> Mapping[str, tuple[int, ...]]:
        hidden, mlp = config.hidden_size, config.mlp_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            shapes |= {
                f"{layer}.input_layernorm": (hidden,),
                f"{layer}.self_attn.q_proj": (config.query_size, hidden),
                f"{layer}.self_attn.k_proj": (config.kv_size, hidden),
                f"{layer}.self_attn.v_proj": (config.kv_size, hidden),
                f"{layer}.self_attn.q_norm": (config.head_dim,),
                f"{layer}.self_attn.k_norm": (config.head_dim,),
                f"{layer}.self_attn.o_proj": (hidden, config.query_size),
                f"{layer}.post_attention_layernorm": (hidden,),
                f"{layer}.pre_feedforward_layernorm": (hidden,),
                f"{layer}.mlp.gate_proj": (mlp, hidden),
                f"{layer}.mlp.up_proj": (mlp, hidden),
                f"{layer}.mlp.down_proj": (hidden, mlp),
                f"{layer}.post_feedforward_layernorm": (hidden,),
            }
        shapes[FINAL_NORM] = (hidden,)
        if not config.tied_head:
            shapes[HEAD] = (config.vocab_size, hidden)
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def unused_tensors(self, config: ModelConfig) -> frozenset[str]:
        return frozenset({f"{HEAD}.weight"}) if config.tied_head else frozenset()

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
    ) -> Gemma3Model:
        window = _window(config)
        weights = WeightPacker(read, ops, weight_format)
        window_rope = replace(config, rope_theta=window.rope_theta, rope_scaling=NoScaling())
        global_table, window_table = (
            tuple(part.to(ops.device) for part in rotary_table(rope))
            for rope in (config, window_rope)
        )
        embedding = weights.table(EMBEDDING, is_head=config.tied_head)
        layers = [
            _layer(f"model.layers.{index}", weights, window.window_tokens, window_table)
            if index in window.layers
            else _layer(f"model.layers.{index}", weights, None, global_table)
            for index in range(config.num_layers)
        ]
        return Gemma3Model(
            config=config,
            ops=ops,
            embedding=embedding,
            layers=layers,
            final_norm=_norm(weights, FINAL_NORM),
            head=embedding if config.tied_head else weights.linear(HEAD),
        )


def _window(config: ModelConfig) -> WindowLayers:
    if config.window is None:
        raise ModelError(f"{config.architecture}: the family gemma3 needs layers with a window")
    return config.window


def _cache_plan(config: ModelConfig) -> tuple[CacheGroup, ...]:
    window = _window(config)
    return (
        CacheGroup(
            kind=CacheKind.GLOBAL,
            layers=tuple(sorted(set(range(config.num_layers)) - set(window.layers))),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
        CacheGroup(
            kind=CacheKind.WINDOW,
            layers=window.layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window_tokens=window.window_tokens,
        ),
    )


def _norm(weights: WeightPacker, name: str) -> Tensor:
    """Checkpoints of this family store how far a norm's weight is from one."""
    return weights.vector(name) + 1.0


def _layer(
    name: str, weights: WeightPacker, window_tokens: int | None, table: tuple[Tensor, ...]
) -> Gemma3Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    cos, sin = table
    return Gemma3Layer(
        window_tokens=window_tokens,
        cos=cos,
        sin=sin,
        input_norm=_norm(weights, f"{name}.input_layernorm"),
        qkv=weights.linear(*(f"{attention}.{part}_proj" for part in ("q", "k", "v"))),
        q_norm=_norm(weights, f"{attention}.q_norm"),
        k_norm=_norm(weights, f"{attention}.k_norm"),
        output=weights.linear(f"{attention}.o_proj"),
        attention_norm=_norm(weights, f"{name}.post_attention_layernorm"),
        mlp_input_norm=_norm(weights, f"{name}.pre_feedforward_layernorm"),
        gate_up=weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=weights.linear(f"{mlp}.down_proj"),
        mlp_norm=_norm(weights, f"{name}.post_feedforward_layernorm"),
    )
