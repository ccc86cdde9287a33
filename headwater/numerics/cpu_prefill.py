"""Attention of one row with many queries (a prefill chunk), by torch's flash attention.

The row's keys and values are gathered from their blocks once; then

    queries [past, context) x keys [0, past)        no mask
    queries [past, context) x keys [past, context)  causal

are computed apart and joined by their log-sum-exp, so that no mask of
queries x keys is ever made. Knows one row; ``cpu.py`` calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _gather(blocks_of: Tensor, block_ids: Tensor, context: int, head_dim: int) -> Tensor:
    """[num_blocks, K, block_tokens, D] at ``block_ids`` to [1, K, context, D]."""
    chosen = blocks_of.index_select(0, block_ids).transpose(0, 1)
    return chosen.reshape(1, chosen.shape[0], -1, chosen.shape[3])[:, :, :context, :head_dim]


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(output [1, N, Q, D], natural log-sum-exp [1, N, Q] in float32)."""
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, scale=scale
    )
    return out, log_sum


def attend_chunk(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_ids: Tensor, context: int, scale: float
) -> Tensor:
    """q [n, N, D], the last n of ``context`` positions, to [n, N, D]; causal."""
    num_queries, num_heads, head_dim = q.shape
    past = context - num_queries
    keys = _gather(k_blocks, block_ids, context, head_dim).to(q.dtype)
    values = _gather(v_blocks, block_ids, context, head_dim).to(q.dtype)
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    queries = q.transpose(0, 1)[None]
    own_keys, own_values = keys[:, :, past:], values[:, :, past:]
    if group > 1:
        own_keys = own_keys.repeat_interleave(group, dim=1)
        own_values = own_values.repeat_interleave(group, dim=1)
    out, log_sum = _flash(queries, own_keys, own_values, scale, causal=True)
    if past > 0:
        # Without a mask a group's query heads are just more queries of its key head.
        stacked = queries.reshape(1, num_kv_heads, group * num_queries, head_dim)
        far, far_sum = _flash(stacked, keys[:, :, :past], values[:, :, :past], scale, causal=False)
        far = far.reshape(1, num_heads, num_queries, head_dim)
        far_share = torch.sigmoid(far_sum.reshape(log_sum.shape) - log_sum)[..., None]
        out = torch.lerp(out.float(), far.float(), far_share)
    return out[0].transpose(0, 1).to(q.dtype)
