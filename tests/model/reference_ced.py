"""A second forward pass of the family ced, to be read: whole sequences, float64, no KV, no ops.

    logits_of(config, tensors, ids)                     every token through every layer
    ... late_start=s                                    decoder replay: late layers see [s, n)
    ... hit=e, begin=c                                  encoder replay: rows of [0, e) are those
                                                        of a cold run, [c, e) is computed again

It shares nothing with the product but the config's values and the tensors' names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.model.config import EncoderDecoder, ModelConfig, YarnScaling

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Whole:
    """``logits`` [n - first, V] of the tokens [first, n); ``early`` [n - begin, H] is what the
    layers before the cut gave, and ``rows`` are each source's."""

    logits: Tensor
    first: int
    early: Tensor
    rows: dict[int, Tensor]


def logits_of(
    config: ModelConfig,
    tensors: Tensors,
    ids: Sequence[int],
    *,
    late_start: int = 0,
    begin: int = 0,
    hit: int = 0,
) -> Whole:
    known: dict[int, Tensor] = {}
    if hit:
        known = logits_of(config, tensors, ids[:hit]).rows
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    return _Pass(config, wide, known, begin, hit).run(ids, late_start)


class _Pass:
    def __init__(
        self, config: ModelConfig, tensors: Tensors, known: dict[int, Tensor], begin: int, hit: int
    ) -> None:
        assert config.encoder_decoder is not None
        self.config: ModelConfig = config
        self.shape: EncoderDecoder = config.encoder_decoder
        self.tensors = tensors
        self.known, self.begin, self.hit = known, begin, hit
        self.rows: dict[int, Tensor] = {}

    def run(self, ids: Sequence[int], late_start: int) -> Whole:
        shape = self.shape
        cut = shape.kv_source_layers[-1]
        positions = torch.arange(self.begin, len(ids))
        x = self.tensors["embed.weight"][torch.tensor(ids[self.begin :])]
        early = x
        for layer in range(self.config.num_layers):
            name = f"layers.{layer}"
            normed = self.norm(x, f"{name}.attn_norm.weight")
            if layer in shape.kv_source_layers:
                self.rows[layer] = self.source_rows(layer, normed, positions)
            if layer == cut:
                early = x
                is_late = positions >= late_start
                x, normed, positions = x[is_late], normed[is_late], positions[is_late]
            x = x + self.attention(layer, normed, positions)
            x = x + self.experts(f"{name}.ffn", self.norm(x, f"{name}.ffn_norm.weight"))
        head = "embed.weight" if self.config.tied_head else "head.weight"
        logits = self.norm(x, "norm.weight") @ self.tensors[head].T
        return Whole(logits, int(positions[0]), early, self.rows)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.normed(x) * self.tensors[name]

    def normed(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_eps).sqrt()

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def turned(self, x: Tensor, layer: int, positions: Tensor, sign: float = 1.0) -> Tensor:
        """[..., T, D], the last entries of each head turned as complex numbers."""
        angles = sign * torch.outer(positions.double(), self.frequencies(layer))
        size = self.shape.rope_head_dim
        pairs = torch.view_as_complex(x[..., -size:].reshape(*x.shape[:-1], size // 2, 2))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
        return torch.cat([x[..., :-size], turned.flatten(-2)], dim=-1)

    def frequencies(self, layer: int) -> Tensor:
        """Radians per position of each pair."""
        size = self.shape.rope_head_dim
        has_source = self.shape.compress_ratios[layer] > 0
        theta = self.shape.compress_rope_theta if has_source else self.config.rope_theta
        plain = theta ** -(torch.arange(0, size, 2).double() / size)
        yarn = self.config.rope_scaling
        if not has_source or not isinstance(yarn, YarnScaling):
            return plain
        low, high = (
            size * math.log(yarn.original_context_tokens / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (yarn.beta_fast, yarn.beta_slow)
        )  # fmt: skip
        first, last = max(math.floor(low), 0), min(math.ceil(high), size - 1)
        ramp = (torch.arange(size // 2).double() - first) / ((last - first) or 0.001)
        slow = ramp.clamp(0, 1)
        return plain / yarn.factor * slow + plain * (1 - slow)

    def source_rows(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """All rows of a source layer: [closed rows, D]."""
        name, ratio = f"layers.{layer}.attn.compressor", self.shape.compress_ratios[layer]
        fresh = positions >= self.hit
        values = self.linear(x[fresh], f"{name}.wkv")
        begins = positions[fresh]
        if ratio == 2:
            num_rows = len(values) // 2
            gates = self.linear(x[fresh], f"{name}.wgate")[: 2 * num_rows].unflatten(0, (-1, 2))
            values = values[: 2 * num_rows].unflatten(0, (-1, 2))
            values = (gates.softmax(dim=1) * values).sum(dim=1)
            begins = begins[: 2 * num_rows : 2]
        rows = self.turned(self.norm(values, f"{name}.norm.weight"), layer, begins)
        known = self.known.get(layer)
        return rows if known is None else torch.cat([known, rows])

    def attention(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        name, shape, config = f"layers.{layer}.attn", self.shape, self.config
        latent = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm.weight")
        q = self.linear(latent, f"{name}.wq_b").unflatten(-1, (config.num_heads, -1))
        q = self.turned(q.transpose(0, 1), layer, positions)  # [N, T, D]
        window = self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm.weight")
        keys = self.turned(window, layer, positions)
        back = positions[:, None] - positions[None, :]
        seen = (back >= 0) & (back < shape.window_tokens)
        ratio = shape.compress_ratios[layer]
        if ratio:
            rows = self.rows[max(s for s in shape.kv_source_layers if s <= layer)]
            ends = torch.arange(1, len(rows) + 1) * ratio - 1  # the last token that a row has
            keys = torch.cat([keys, rows])
            seen = torch.cat([seen, ends[None, :] <= positions[:, None]], dim=1)
        scores = q @ keys.T / config.head_dim**0.5
        weights = scores.masked_fill(~seen, -torch.inf).exp()
        total = (
            weights.sum(-1, keepdim=True) + self.tensors[f"{name}.attn_sink"].exp()[:, None, None]
        )
        o = self.turned(weights / total @ keys, layer, positions, sign=-1.0)
        o = o.transpose(0, 1).reshape(len(x), shape.o_groups, -1)
        wo_a = self.tensors[f"{name}.wo_a.weight"].unflatten(0, (shape.o_groups, -1))
        return self.linear(torch.einsum("tgi,goi->tgo", o, wo_a).flatten(1), f"{name}.wo_b")

    def experts(self, name: str, x: Tensor) -> Tensor:
        shape = self.shape
        scores = torch.nn.functional.softplus(self.linear(x, f"{name}.gate")).sqrt()
        chosen = (scores + self.tensors[f"{name}.gate.bias"]).topk(shape.num_experts_per_token)
        shares = scores * torch.zeros_like(scores).scatter(1, chosen.indices, 1.0)
        shares = shares / shares.sum(dim=1, keepdim=True) * shape.routed_scaling
        out = torch.zeros_like(x)
        for expert in range(shape.num_experts):
            out += shares[:, expert, None] * self.mlp(f"{name}.experts.{expert}", x)
        return out + self.mlp(f"{name}.shared_experts", x) if shape.num_shared_experts else out

    def mlp(self, name: str, x: Tensor) -> Tensor:
        limit = self.shape.swiglu_limit
        gate = self.linear(x, f"{name}.w1").clamp(max=limit)
        up = self.linear(x, f"{name}.w3").clamp(-limit, limit)
        return self.linear(gate * torch.sigmoid(gate) * up, f"{name}.w2")
