"""The family ``ced``: a causal encoder and a decoder that share rows of a few source layers.

This is DeepSeek-V4.1's shape without hyper-connections, n-gram memory and the top-k index.
Every layer has a window of its own; *source* layers also write rows for every token, which
they and the layers behind them attend to. The last source is the decoder's first layer, the
*cut*: behind it nothing but windows is written, so of a prompt the decoder needs to see only
the last tokens.

    early   embed, layers [0, cut), the cut's rows        every token of the step
    late    the rest of the cut, the layers behind it     ``RaggedBatch.late``; None: every token

Each is one body for ``Ops.replay``. KV as ``cache_plan`` numbers it: one window per layer, then
the rows of each source in ascending order. ``ModelPart.EARLY`` has neither late weights nor
late windows. ``ced_layers`` knows what one layer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.model.ced_layers import (
    CedLayer,
    Compressor,
    RotaryTable,
    add_experts,
    attention,
    compressor_flops,
    compressor_shapes,
    encoder_decoder,
    layer_flops,
    layer_shapes,
    read_compressor,
    read_layer,
    write_source,
)
from headwater.model.config import ModelConfig, NoScaling
from headwater.model.family import CacheGroup, CacheKind, ModelPart
from headwater.model.packing import WeightPacker, bytes_of
from headwater.model.rope import rotary_table
from headwater.model.weights import ReadTensor
from headwater.numerics.ops import LayerKV, Need, Ops, PackedLinear, RaggedBatch, WeightFormat

EMBEDDING = "embed"
HEAD = "head"
FINAL_NORM = "norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateLayers:
    """The cut and the layers behind it, the cut without its compressor, and the end."""

    layers: tuple[CedLayer, ...]
    final_norm: Tensor
    head: PackedLinear


@dataclass(frozen=True, slots=True)
class _SplitKV:
    """One caller's KV as the two bodies take it. Kept, as ``Ops.replay`` tells one KV from
    another by identity."""

    whole: Sequence[LayerKV]
    early: tuple[LayerKV, ...]  # windows, then the rows of every source
    late: tuple[LayerKV, ...]  # windows, then the rows of the cut


class CedModel:
    """A loaded model of the family; see ``family.Model`` for the contract."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        ops: Ops,
        embedding: PackedLinear,
        early_layers: Sequence[CedLayer],
        compressors: Mapping[int, Compressor],
        cut_norm: Tensor,
        late: LateLayers | None,
        spared_bytes: int = 0,
    ) -> None:
        """``compressors`` of every source layer; ``cut_norm`` is the cut's ``attn_norm``.
        ``late.head is embedding`` when the model ties them. Without ``late``, its weights
        would be ``spared_bytes``."""
        self.config = config
        self._spared_bytes = spared_bytes
        self._ops = ops
        self._embedding = embedding
        self._early = tuple(early_layers)
        self._compressors = compressors
        self._cut_norm = cut_norm
        self._late = late
        self._shape = encoder_decoder(config)
        self._split: _SplitKV | None = None

    @property
    def layers(self) -> tuple[CedLayer, ...]:
        """Those that are here."""
        return self._early if self._late is None else (*self._early, *self._late.layers)

    @property
    def cache_plan(self) -> tuple[CacheGroup, ...]:
        return _cache_plan(self.config, ModelPart.EARLY if self._late is None else ModelPart.ALL)

    @property
    def needs(self) -> frozenset[Need]:
        has_pairs = any(one.ratio == 2 for one in self._compressors.values())
        paired = {Need.PAIRED_ROWS} if has_pairs else set[Need]()
        return frozenset({Need.ROWS, Need.EXPERTS} | paired)

    @property
    def weights_bytes(self) -> int:
        is_head = self._late is not None and self._late.head is self._embedding
        own_table = 0 if is_head else self._embedding.weight_bytes
        return own_table + self._bytes_but_table(self._shape.num_experts)

    @property
    def full_weights_bytes(self) -> int:
        return self.weights_bytes + self._spared_bytes

    @property
    def step_weights_bytes(self) -> int:
        return self._bytes_but_table(self._shape.num_experts_per_token)

    def _bytes_but_table(self, num_experts: int) -> int:
        """Of all weights but a table of its own, with so many experts of each layer."""
        num_bytes = sum(one.weight_bytes for one in self._compressors.values())
        for layer in self.layers:
            num_bytes += layer.dense_bytes
            num_bytes += layer.experts.weight_bytes * num_experts // self._shape.num_experts
        if self._late is None:
            return num_bytes + self._cut_norm.nbytes
        return num_bytes + bytes_of([self._late.head], [self._late.final_norm])

    @property
    def flops_per_token(self) -> int:
        compressors = self._compressors.values()
        return (
            len(self._early) * layer_flops(self.config)
            + sum(compressor_flops(self.config, one.ratio) for one in compressors)
            + self.late_flops_per_token
        )

    @property
    def late_flops_per_token(self) -> int:
        return 0 if self._late is None else len(self._late.layers) * layer_flops(self.config)

    def forward(self, ids: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        ops, split = self._ops, self._split_kv(kv)

        def early(residual: Tensor, batch: RaggedBatch) -> Tensor:
            return self._early_pass(residual, batch, split.early)

        residual = ops.replay(early, ops.embed(ids, self._embedding), split.early, batch)
        late = self._late
        if late is None:
            return residual

        def late_pass(residual: Tensor, batch: RaggedBatch) -> Tensor:
            return self._late_pass(late, residual, batch, split.late)

        if batch.late is None:
            return ops.replay(late_pass, residual, split.late, batch)
        if batch.late.batch is None:
            return residual
        if len(batch.late.indices) == len(residual):
            return ops.replay(late_pass, residual, split.late, batch.late.batch)
        chosen = residual[batch.late.indices]
        residual[batch.late.indices] = ops.replay(late_pass, chosen, split.late, batch.late.batch)
        return residual

    def logits(self, hidden_rows: Tensor) -> Tensor:
        if self._late is None:
            raise ModelError(
                "only the early layers of this model are loaded, which give no logits; "
                "another worker must compute the last tokens of a prompt"
            )
        return self._ops.logits(hidden_rows, self._late.head)

    def _early_pass(self, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """[T, H] -> [T, H]: what the cut is given."""
        ops, eps, sources = self._ops, self.config.rms_eps, self._shape.kv_source_layers
        rows = dict(zip(sources, kv[len(self._early) :], strict=True))
        norms = [*(layer.attn_norm for layer in self._early), self._cut_norm]
        hidden = ops.rms_norm(residual, norms[0], eps)
        for index, layer in enumerate(self._early):
            if index in rows:
                write_source(ops, self._compressors[index], hidden, batch, rows[index], eps)
            source = self._shape.source_of(index)
            hidden, residual = self._layer_pass(
                layer, hidden, residual, norms[index + 1], batch, kv[index],
                None if source is None else rows[source],
            )  # fmt: skip
        cut = self._shape.cut
        write_source(ops, self._compressors[cut], hidden, batch, rows[cut], eps)
        return residual

    def _late_pass(
        self, late: LateLayers, residual: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]
    ) -> Tensor:
        """[T, H] -> [T, H], the final norm included."""
        *windows, rows = kv
        norms = [*(layer.attn_norm for layer in late.layers), late.final_norm]
        hidden = self._ops.rms_norm(residual, norms[0], self.config.rms_eps)
        for index, layer in enumerate(late.layers):
            source = self._shape.source_of(self._shape.cut + index)
            hidden, residual = self._layer_pass(
                layer, hidden, residual, norms[index + 1], batch, windows[index],
                None if source is None else rows,
            )  # fmt: skip
        return hidden

    def _layer_pass(
        self, layer: CedLayer, hidden: Tensor, residual: Tensor, next_norm: Tensor,
        batch: RaggedBatch, window: LayerKV, source: LayerKV | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(the next layer's hidden states, the residual)."""
        ops, config = self._ops, self.config
        attended = attention(ops, config, layer, hidden, batch, window, source)
        hidden, residual = ops.add_rms_norm(attended, residual, layer.ffn_norm, config.rms_eps)
        return add_experts(ops, config, layer, hidden, residual, next_norm)

    def _split_kv(self, kv: Sequence[LayerKV]) -> _SplitKV:
        if self._split is None or self._split.whole is not kv:
            cut = len(self._early)
            num_windows = len(kv) - len(self._compressors)
            self._split = _SplitKV(
                kv,
                early=(*kv[:cut], *kv[num_windows:]),
                late=(*kv[cut:num_windows], kv[-1]),
            )
        return self._split


class CedFamily:
    """Names and shapes of the checkpoint, and how they become a CedModel."""

    name = "ced"

    def expected_tensors(
        self, config: ModelConfig, part: ModelPart = ModelPart.ALL
    ) -> Mapping[str, tuple[int, ...]]:
        shape, is_whole = encoder_decoder(config), part is ModelPart.ALL
        shapes: dict[str, tuple[int, ...]] = {
            f"{EMBEDDING}.weight": (config.vocab_size, config.hidden_size)
        }
        for index in range(config.num_layers if is_whole else shape.cut + 1):
            found: dict[str, tuple[int, ...]] = {}
            if index in shape.kv_source_layers:
                found = compressor_shapes(config, shape.compress_ratios[index])
            if is_whole or index < shape.cut:
                found = {**layer_shapes(config), **found}
            else:
                found["attn_norm.weight"] = (config.hidden_size,)
            shapes |= {f"layers.{index}.{name}": size for name, size in found.items()}
        if is_whole:
            shapes[f"{FINAL_NORM}.weight"] = (config.hidden_size,)
            if not config.tied_head:
                shapes[f"{HEAD}.weight"] = (config.vocab_size, config.hidden_size)
        return shapes

    def unused_tensors(self, config: ModelConfig) -> frozenset[str]:
        return frozenset({f"{HEAD}.weight"}) if config.tied_head else frozenset()

    def cache_plan(
        self, config: ModelConfig, part: ModelPart = ModelPart.ALL
    ) -> tuple[CacheGroup, ...]:
        return _cache_plan(config, part)

    def build(
        self,
        config: ModelConfig,
        read: ReadTensor,
        ops: Ops,
        weight_format: WeightFormat,
        part: ModelPart = ModelPart.ALL,
    ) -> CedModel:
        shape = encoder_decoder(config)
        weights = WeightPacker(read, ops, weight_format)
        tables = _tables(config, ops.device)
        embedding = weights.table(EMBEDDING, is_head=config.tied_head)
        layers: list[CedLayer] = []
        compressors: dict[int, Compressor] = {}
        for index in range(shape.cut + 1 if part is ModelPart.EARLY else config.num_layers):
            name, ratio = f"layers.{index}", shape.compress_ratios[index]
            table = tables[ratio > 0]
            if part is ModelPart.ALL or index < shape.cut:
                layers.append(read_layer(name, config, table, weights))
            if index in shape.kv_source_layers:
                compressors[index] = read_compressor(name, ratio, table, weights)
        early, late_layers = tuple(layers[: shape.cut]), tuple(layers[shape.cut :])
        final_norm = weights.vector(FINAL_NORM)
        head = embedding if config.tied_head else weights.linear(HEAD)
        if part is ModelPart.ALL:
            return CedModel(
                config=config,
                ops=ops,
                embedding=embedding,
                early_layers=early,
                compressors=compressors,
                cut_norm=late_layers[0].attn_norm,
                late=LateLayers(layers=late_layers, final_norm=final_norm, head=head),
            )
        cut_norm = weights.vector(f"layers.{shape.cut}.attn_norm")
        # Layers differ in nothing but their compressors, which are all here.
        spared_bytes = (config.num_layers - shape.cut) * early[0].weight_bytes
        spared_bytes += final_norm.nbytes - cut_norm.nbytes
        return CedModel(
            config=config,
            ops=ops,
            embedding=embedding,
            early_layers=early,
            compressors=compressors,
            cut_norm=cut_norm,
            late=None,
            spared_bytes=spared_bytes + (0 if config.tied_head else head.weight_bytes),
        )


def _cache_plan(config: ModelConfig, part: ModelPart) -> tuple[CacheGroup, ...]:
    shape = encoder_decoder(config)
    num_windows = config.num_layers if part is ModelPart.ALL else shape.cut
    windows = CacheGroup(
        kind=CacheKind.WINDOW,
        layers=tuple(range(shape.cut)),
        num_kv_heads=1,
        head_dim=config.head_dim,
        window_tokens=shape.window_tokens,
        is_rows=True,
    )
    late = replace(windows, layers=tuple(range(shape.cut, num_windows)), is_late=True)
    ratios = [shape.compress_ratios[source] for source in shape.kv_source_layers]
    sources = [
        CacheGroup(
            kind=CacheKind.GLOBAL,
            layers=tuple(num_windows + i for i, found in enumerate(ratios) if found == ratio),
            num_kv_heads=1,
            head_dim=config.head_dim,
            is_rows=True,
            ratio=ratio,
        )
        for ratio in sorted(set(ratios))
    ]
    return (windows, *([late] if late.layers else ()), *sources)


def _tables(config: ModelConfig, device: torch.device) -> tuple[RotaryTable, RotaryTable]:
    """Of layers without a source, and of those with one."""
    shape = encoder_decoder(config)
    without = replace(config, head_dim=shape.rope_head_dim, rope_scaling=NoScaling())
    with_source = replace(
        config, head_dim=shape.rope_head_dim, rope_theta=shape.compress_rope_theta
    )
    first, second = (
        RotaryTable(cos=cos.to(device), sin=sin.to(device))
        for cos, sin in (rotary_table(without), rotary_table(with_source))
    )
    return first, second
