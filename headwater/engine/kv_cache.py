"""The KV tensors of one device: one LayerKV per layer, all with the same blocks.

Knows how many blocks of how many tokens; what a block holds is between the
kernels that allocate, store and attend, and which sequence holds it is ``kv``'s
business. Built once per engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwater.core.errors import ConfigError
from headwater.engine.kv_plan import KVPlan
from headwater.model.family import CacheGroup
from headwater.numerics.ops import KVFormat, LayerKV, Ops

# Raise when the meaning of a block's bytes changes: stored KV of another
# version must be a miss.
KV_LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    layers: tuple[LayerKV, ...]  # as Model.forward takes them
    groups: tuple[CacheGroup, ...]  # which they are, and which of them leave the device
    plan: KVPlan
    bytes_per_token: int  # over all layers
    layout: str  # for core.blocks.CacheIdentity: KV of another layout is never read


def served_groups(
    cache_plan: Sequence[CacheGroup], *, decoder_replay: bool
) -> tuple[CacheGroup, ...]:
    """The groups as they are kept: with decoder replay late layers begin anew at each use of a
    prefix, so their KV is worth nothing to a later one."""
    return tuple(
        replace(group, persisted=group.persisted and not (group.is_late and decoder_replay))
        for group in cache_plan
    )


def kept_groups(cache_plan: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Those whose KV leaves the device."""
    return tuple(group for group in cache_plan if group.persisted)


def kv_bytes_per_token(ops: Ops, cache_plan: Sequence[CacheGroup], kv_format: KVFormat) -> int:
    """Bytes of one token's KV over all layers."""
    return sum(len(group.layers) * _bytes_in_layer(ops, group, kv_format) for group in cache_plan)


def _bytes_in_layer(ops: Ops, group: CacheGroup, kv_format: KVFormat) -> int:
    if group.is_rows:
        return ops.row_bytes_per_token(group.head_dim, kv_format, group.ratio)
    return ops.kv_bytes_per_token(group.num_kv_heads, group.head_dim, kv_format)


def alignment(cache_plan: Sequence[CacheGroup]) -> int:
    """A prefix that ends at a multiple of it ends where a row of every layer does."""
    return math.lcm(*(group.ratio for group in cache_plan))


def window_tokens(cache_plan: Sequence[CacheGroup]) -> int | None:
    """How far back the layers with a window see, the furthest; None without such layers."""
    windows = [group.window_tokens for group in cache_plan if group.window_tokens is not None]
    return max(windows, default=None)


def allocate_kv(
    ops: Ops, plan: KVPlan, cache_plan: Sequence[CacheGroup], kv_format: KVFormat
) -> KVCache:
    """Zeroed KV for every layer; groups of every kind get as many blocks.

    Raises ConfigError where a block cannot hold whole rows, RuntimeError or MemoryError as
    the allocator does.
    """
    if plan.block_tokens % alignment(cache_plan):
        raise ConfigError(
            f"engine.block_tokens is {plan.block_tokens}; this model stores one row of KV for "
            f"{alignment(cache_plan)} tokens, so it must be a multiple of that"
        )
    layers = {
        layer: _allocate_layer(ops, plan, group, kv_format)
        for group in cache_plan
        for layer in group.layers
    }
    return KVCache(
        layers=tuple(layers[layer] for layer in sorted(layers)),
        groups=tuple(cache_plan),
        plan=plan,
        bytes_per_token=kv_bytes_per_token(ops, cache_plan, kv_format),
        layout=kv_layout(ops.name, cache_plan, kv_format, plan.block_tokens),
    )


def _allocate_layer(ops: Ops, plan: KVPlan, group: CacheGroup, kv_format: KVFormat) -> LayerKV:
    if group.is_rows:
        return ops.allocate_rows(
            plan.num_blocks, plan.block_tokens, group.head_dim, kv_format, group.ratio
        )
    return ops.allocate_kv(
        plan.num_blocks, plan.block_tokens, group.num_kv_heads, group.head_dim, kv_format
    )


def kv_layout(
    ops_name: str, cache_plan: Sequence[CacheGroup], kv_format: KVFormat, block_tokens: int
) -> str:
    """Names what a block's kept bytes depend on besides the model and the tokens.

    ``ops_name`` is part of it: a block's inner order belongs to the kernels.
    Three global layers with two heads of 16: ``kv1/reference/fp32/block32/global:3x2x16``.
    Layers that see 512 tokens are ``window512:3x2x16``, rows of 64 ``window512:3xrow64``, and
    one such row for two tokens ``global:1xrow64/2``. Groups that never leave the device are
    not named: a worker that has no late layers and one that has them give each other KV.
    """
    groups = "+".join(_group_layout(group) for group in kept_groups(cache_plan))
    return f"kv{KV_LAYOUT_VERSION}/{ops_name}/{kv_format}/block{block_tokens}/{groups}"


def _group_layout(group: CacheGroup) -> str:
    kind = f"{group.kind}{group.window_tokens or ''}:{len(group.layers)}x"
    if not group.is_rows:
        return f"{kind}{group.num_kv_heads}x{group.head_dim}"
    return f"{kind}row{group.head_dim}" + ("" if group.ratio == 1 else f"/{group.ratio}")
