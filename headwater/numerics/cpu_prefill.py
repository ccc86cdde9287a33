"""Attention of one row with many queries (a prefill chunk), by torch's flash attention.

For KV of a format or shape that no kernel of this room takes. The keys and values that
the row sees are gathered from their blocks once; then

    queries [past, context) x keys [first, past)    no mask
    queries [past, context) x keys [past, context)  causal

are computed apart and joined by their log-sum-exp, so that no mask of
queries x keys is ever made. Where a window ends inside the chunk, its queries are
taken in pieces, each with a mask over the piece's own stretch of keys:

    queries [a, b) x keys [a - window + 1, b)       a band

Knows one row; ``cpu_kv.py`` calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Queries of a piece. A longer piece computes more scores that its mask takes away, a
# shorter one makes more calls.
PIECE_TOKENS = 128


def _gather(
    blocks_of: Tensor, block_ids: Tensor, first: int, context: int, head_dim: int
) -> Tensor:
    """[num_blocks, K, block_tokens, D] at ``block_ids`` to [1, K, context - first, D]."""
    block_tokens = blocks_of.shape[2]
    skipped = first // block_tokens
    used = block_ids[skipped : -(-context // block_tokens)]
    chosen = blocks_of.index_select(0, used).transpose(0, 1)
    whole = chosen.reshape(1, chosen.shape[0], -1, chosen.shape[3])
    start = skipped * block_tokens
    return whole[:, :, first - start : context - start, :head_dim]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(output [1, N, Q, D], natural log-sum-exp [1, N, Q] in float32)."""
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, attn_mask=mask, scale=scale
    )
    return out, log_sum


def attend_chunk(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_ids: Tensor, first: int, context: int,
    window_tokens: int, scale: float,
) -> Tensor:  # fmt: skip
    """q [n, N, D], the last n of ``context`` positions, to [n, N, D]; causal.

    The query at position p sees [max(first, p - window_tokens + 1), p]; ``block_ids`` are
    the row's from position 0 on.
    """
    num_queries, head_dim = q.shape[0], q.shape[2]
    keys = _gather(k_blocks, block_ids, first, context, head_dim).to(q.dtype)
    values = _gather(v_blocks, block_ids, first, context, head_dim).to(q.dtype)
    if context - first <= window_tokens:
        return _attend_all(q, keys, values, scale)
    past = context - num_queries - first  # keys before the chunk
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin in range(0, num_queries, PIECE_TOKENS):
        end = min(begin + PIECE_TOKENS, num_queries)
        seen = slice(max(0, past + begin - window_tokens + 1), past + end)
        mask = _band(past + begin - seen.start, end - begin, window_tokens, q.dtype)
        piece, piece_keys, piece_values = q[begin:end], keys[:, :, seen], values[:, :, seen]
        out[begin:end] = _attend_masked(piece, piece_keys, piece_values, mask, scale)
    return out


def _attend_all(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Every query sees all keys up to its own; q [n, N, D] are the last n of them."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    past = keys.shape[2] - num_queries
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


def _attend_masked(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [n, N, D] over keys [1, K, m, D] with ``mask`` [n, m] added to the scores."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    stacked = q.transpose(0, 1).reshape(1, num_kv_heads, group * num_queries, head_dim)
    out, _ = _flash(stacked, keys, values, scale, causal=False, mask=mask.repeat(group, 1))
    return out.reshape(num_heads, num_queries, head_dim).transpose(0, 1)


def _band(past: int, num_queries: int, window_tokens: int, dtype: torch.dtype) -> Tensor:
    """[n, past + n]: 0 where query i, which is key past + i, sees key j, else -inf."""
    distance = past + torch.arange(num_queries)[:, None] - torch.arange(past + num_queries)
    seen = (distance >= 0) & (distance < window_tokens)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
