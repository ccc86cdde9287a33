"""The KV tensors of one device: one LayerKV per layer, all with the same blocks.

Knows how many blocks of how many tokens; what a block holds is between the
kernels that allocate, store and attend, and which sequence holds it is ``kv``'s
business. Built once per engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.engine.kv_plan import KVPlan
from headwater.model.family import CacheGroup
from headwater.numerics.ops import KVFormat, LayerKV, Ops

# Raise when the meaning of a block's bytes changes: stored KV of another
# version must be a miss.
KV_LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    layers: tuple[LayerKV, ...]  # as Model.forward takes them
    plan: KVPlan
    bytes_per_token: int  # over all layers
    layout: str  # for core.blocks.CacheIdentity: KV of another layout is never read


def kv_bytes_per_token(ops: Ops, cache_plan: Sequence[CacheGroup], kv_format: KVFormat) -> int:
    """Bytes of one token's KV over all layers."""
    return sum(
        len(group.layers) * ops.kv_bytes_per_token(group.num_kv_heads, group.head_dim, kv_format)
        for group in cache_plan
    )


def window_tokens(cache_plan: Sequence[CacheGroup]) -> int | None:
    """How far back the layers with a window see, the furthest; None without such layers."""
    windows = [group.window_tokens for group in cache_plan if group.window_tokens is not None]
    return max(windows, default=None)


def allocate_kv(
    ops: Ops, plan: KVPlan, cache_plan: Sequence[CacheGroup], kv_format: KVFormat
) -> KVCache:
    """Zeroed KV for every layer; groups of every kind get as many blocks.

    Raises RuntimeError or MemoryError as the allocator does.
    """
    layers = {
        layer: ops.allocate_kv(
            plan.num_blocks, plan.block_tokens, group.num_kv_heads, group.head_dim, kv_format
        )
        for group in cache_plan
        for layer in group.layers
    }
    return KVCache(
        layers=tuple(layers[layer] for layer in sorted(layers)),
        plan=plan,
        bytes_per_token=kv_bytes_per_token(ops, cache_plan, kv_format),
        layout=kv_layout(ops.name, cache_plan, kv_format, plan.block_tokens),
    )


def kv_layout(
    ops_name: str, cache_plan: Sequence[CacheGroup], kv_format: KVFormat, block_tokens: int
) -> str:
    """Names what a block's bytes depend on besides the model and the tokens.

    ``ops_name`` is part of it: a block's inner order belongs to the kernels.
    Three global layers with two heads of 16: ``kv1/reference/fp32/block32/global:3x2x16``.
    Layers that see 512 tokens are ``window512:3x2x16``.
    """
    groups = "+".join(
        f"{group.kind}{group.window_tokens or ''}:"
        f"{len(group.layers)}x{group.num_kv_heads}x{group.head_dim}"
        for group in cache_plan
    )
    return f"kv{KV_LAYOUT_VERSION}/{ops_name}/{kv_format}/block{block_tokens}/{groups}"
