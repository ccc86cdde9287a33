"""headwater-mini as it is trained: the forward pass of family ``ced`` over whole rows, in torch.

No cache and no chunks: B rows of T tokens are computed at once, matrices in bfloat16, the
residual in float32. What the served model computes, this does too (``tests/tools/mini``
compares them), but for the order of a head's entries: here the rotated ones stand in two
halves, which is faster; ``export`` puts them into the pairs of the checkpoint.

*Borders* are where a window is cut off, as it is where a replay begins: queries behind one do
not see window rows before it. A model that was trained with some is used to replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.mini.kernels import (
    add_moe,
    attention,
    compressed,
    grouped_linear,
    kv_row,
    norm_bf16,
    queries,
    reorder,
    routing,
    swiglu,
    unrotated,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What ``config.json`` says, under the names that it has there."""

    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_encoder_layers: int = 3
    num_attention_heads: int = 6
    head_dim: int = 96
    qk_rope_head_dim: int = 32
    q_lora_rank: int = 128
    o_groups: int = 3
    o_lora_rank: int = 64
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 2, 2, 1, 1, 1)
    kv_source_layer_ids: tuple[int, ...] = (1, 3)
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    routed_scaling_factor: float = 1.0
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-6
    vocab_size: int = 4096
    max_position_embeddings: int = 131_072

    def source_of(self, layer: int) -> int | None:
        """The layer whose rows ``layer`` reads."""
        below = [source for source in self.kv_source_layer_ids if source <= layer]
        return below[-1] if below and self.compress_ratios[layer] else None

    def config(self, *, bos_token_id: int, eos_token_id: int) -> dict[str, object]:
        """The whole of ``config.json``."""
        return {
            "architectures": ["HeadwaterCedForCausalLM"],
            "model_type": "headwater_ced",
            **asdict(self),
            "rope_scaling": None,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
        }


def rotary(theta: float, num_tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin of positions [0, T): [T, size / 2], float32."""
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(num_tokens).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


class Layer(nn.Module):
    """One layer's weights. Matrices are bfloat16: the optimiser keeps float32 copies."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        h, d, heads = shape.hidden_size, shape.head_dim, shape.num_attention_heads
        self.index = index
        self.ratio = shape.compress_ratios[index]
        self.is_source = index in shape.kv_source_layer_ids
        self.attn_norm = nn.Parameter(torch.ones(h))
        self.ffn_norm = nn.Parameter(torch.ones(h))
        self.q_norm = nn.Parameter(torch.ones(shape.q_lora_rank))
        self.kv_norm = nn.Parameter(torch.ones(d))
        self.sink = nn.Parameter(torch.zeros(heads))
        self.wq_a = _matrix(shape.q_lora_rank, h)
        self.wq_b = _matrix(heads * d, shape.q_lora_rank)
        self.wkv = _matrix(d, h)
        self.wo_a = _matrix(shape.o_groups, shape.o_lora_rank, heads * d // shape.o_groups)
        self.wo_b = _matrix(h, shape.o_groups * shape.o_lora_rank, scale=0.3)
        if self.is_source:
            self.compress_wkv = _matrix(d, h)
            self.compress_norm = nn.Parameter(torch.ones(d))
            if self.ratio == 2:
                self.compress_wgate = _matrix(d, h)
        size, experts = shape.moe_intermediate_size, shape.n_routed_experts
        self.gate = nn.Parameter(torch.randn(experts, h) * h**-0.5)
        self.gate_bias: Tensor
        self.register_buffer("gate_bias", torch.zeros(experts))
        self.w13 = _matrix(experts, 2 * size, h)
        self.w2 = _matrix(experts, h, size, scale=0.3)
        self.shared_w13 = _matrix(2 * size * shape.n_shared_experts, h)
        self.shared_w2 = _matrix(h, size * shape.n_shared_experts, scale=0.3)
        self.load = torch.zeros(experts)  # tokens per expert in the last forward


def _matrix(*sizes: int, scale: float = 1.0) -> nn.Parameter:
    weight = torch.randn(*sizes) * scale * sizes[-1] ** -0.5
    return nn.Parameter(weight.to(torch.bfloat16))


class Mini(nn.Module):
    """The whole model. ``forward`` gives hidden states after the final norm, bfloat16 [B T, H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(
            (torch.randn(shape.vocab_size, shape.hidden_size) * 0.05).to(torch.bfloat16)
        )
        self.norm = nn.Parameter(torch.ones(shape.hidden_size))
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_hidden_layers))
        self._tables: dict[tuple[int, int], dict[float, tuple[Tensor, Tensor]]] = {}

    @property
    def all_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def forward(
        self, ids: Tensor, early_borders: Sequence[int] = (), late_borders: Sequence[int] = ()
    ) -> Tensor:
        """``ids`` int64 [B, T]; borders ascending, the same in all rows."""
        shape = self.shape
        batch, num_tokens = ids.shape
        tables = self._rotary(batch, num_tokens)
        residual = F.embedding(ids.flatten(), self.embed).float()
        rows: dict[int, Tensor] = {}
        for layer in self.all_layers:
            is_late = layer.index >= shape.kv_source_layer_ids[-1]
            table = tables[shape.compress_rope_theta if layer.ratio else shape.rope_theta]
            attended = self._attention(
                layer, residual, batch, rows, table, late_borders if is_late else early_borders
            )
            residual = residual + attended
            residual = self._experts(layer, residual)
        return norm_bf16(residual, self.norm, shape.rms_norm_eps)

    def _rotary(self, batch: int, num_tokens: int) -> dict[float, tuple[Tensor, Tensor]]:
        """By theta: cos and sin of every token, [B T, size / 2]."""
        key = batch, num_tokens
        if key not in self._tables:
            shape = self.shape
            self._tables[key] = {}
            for theta in (shape.rope_theta, shape.compress_rope_theta):
                cos, sin = rotary(theta, num_tokens, shape.qk_rope_head_dim)
                self._tables[key][theta] = cos.repeat(batch, 1), sin.repeat(batch, 1)
        return self._tables[key]

    def _attention(
        self,
        layer: Layer,
        residual: Tensor,
        batch: int,
        rows: dict[int, Tensor],
        table: tuple[Tensor, Tensor],
        borders: Sequence[int],
    ) -> Tensor:
        """[B T, H] -> [B T, H]."""
        shape, eps = self.shape, self.shape.rms_norm_eps
        heads, dim = shape.num_attention_heads, shape.head_dim
        cos, sin = table
        x = norm_bf16(residual, layer.attn_norm, eps)
        latent = norm_bf16(F.linear(x, layer.wq_a), layer.q_norm, eps)
        q = queries(F.linear(latent, layer.wq_b).view(-1, heads, dim), layer.sink, cos, sin)
        kv = kv_row(F.linear(x, layer.wkv), layer.kv_norm, cos, sin, eps)
        if layer.is_source:
            values = F.linear(x, layer.compress_wkv)
            if layer.ratio == 2:
                gates = F.linear(x, layer.compress_wgate)
                rows[layer.index] = compressed(
                    values, gates, layer.compress_norm, cos[::2], sin[::2], eps
                )
            else:
                rows[layer.index] = kv_row(values, layer.compress_norm, cos, sin, eps)
        source = shape.source_of(layer.index)
        out = attention(
            q.unflatten(0, (batch, -1)),
            kv.unflatten(0, (batch, -1)),
            None if source is None else rows[source].unflatten(0, (batch, -1)),
            layer.ratio,
            shape.sliding_window,
            tuple(borders),
        )
        grouped = unrotated(out.flatten(0, 1), cos, sin).unflatten(1, (shape.o_groups, -1))
        low = torch.bmm(grouped.transpose(0, 1), layer.wo_a.transpose(1, 2))
        return F.linear(low.transpose(0, 1).flatten(1), layer.wo_b)

    def _experts(self, layer: Layer, residual: Tensor) -> Tensor:
        """The residual with the experts' output added, float32 [B T, H]."""
        shape = self.shape
        y = norm_bf16(residual, layer.ffn_norm, shape.rms_norm_eps)
        scores = routing(F.linear(y.float(), layer.gate))
        num_chosen = shape.num_experts_per_tok
        ids = (scores.detach() + layer.gate_bias).topk(num_chosen, dim=-1).indices
        chosen = scores.gather(1, ids)
        weights = chosen / chosen.sum(dim=-1, keepdim=True) * shape.routed_scaling_factor
        order = ids.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        counts = torch.bincount(ids.flatten(), minlength=shape.n_routed_experts)
        layer.load = counts.float()
        sizes = tuple(counts.tolist())
        spread = reorder(y, order, inverse, num_chosen)
        inner = swiglu(grouped_linear(spread, layer.w13, sizes), shape.swiglu_limit)
        routed = grouped_linear(inner, layer.w2, sizes)
        shared = swiglu(F.linear(y, layer.shared_w13), shape.swiglu_limit)
        return add_moe(
            residual,
            reorder(routed, inverse, order, 1).unflatten(0, (-1, num_chosen)),
            weights,
            F.linear(shared, layer.shared_w2),
        )
