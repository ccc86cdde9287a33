"""The pieces of the training pass: fused elementwise functions, and gradients written by hand.

Elementwise ones are compiled once for their shapes: a step has always as many tokens, however
they are cut into rows. Heads carry ``PAD`` more entries: one is the sink's (see ``queries``),
and a multiple of 8 is what bfloat16 products want.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PAD = 8
QUERY_BLOCK = 128

fused = torch.compile(dynamic=False)


@fused
def norm_bf16(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, in float32; the result in bfloat16."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight).to(torch.bfloat16)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    kept, low, high = x[..., : -2 * half], x[..., -2 * half : -half], x[..., -half:]
    return torch.cat((kept, low * cos - high * sin, high * cos + low * sin), dim=-1)


@fused
def queries(q: Tensor, sink: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[M, N, D] -> bfloat16 [M, N, D + PAD], rotated and scaled. The entry behind the head's is
    the sink's logit: only the sink's key is not zero there."""
    rotated = _rotate(q.float(), cos[:, None], sin[:, None]) * q.shape[-1] ** -0.5
    logit = sink[None, :, None].expand(q.shape[0], -1, 1)
    zeros = torch.zeros(*q.shape[:2], PAD - 1)
    return torch.cat((rotated, logit, zeros), dim=-1).to(torch.bfloat16)


def _normed_row(wide: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    row = _rotate(wide * scale * weight, cos, sin)
    return torch.cat((row, torch.zeros(row.shape[0], PAD)), dim=-1).to(torch.bfloat16)


@fused
def kv_row(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """[M, D] -> bfloat16 [M, D + PAD]: normed, rotated."""
    return _normed_row(x.float(), weight, cos, sin, eps)


@fused
def compressed(
    values: Tensor, gates: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """[M, D] twice -> bfloat16 [M / 2, D + PAD]: pooled over pairs, normed, rotated."""
    weights = gates.float().unflatten(0, (-1, 2)).softmax(dim=1)
    pooled = (weights * values.float().unflatten(0, (-1, 2))).sum(dim=1)
    return _normed_row(pooled, weight, cos, sin, eps)


@fused
def unrotated(out: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[M, N, D + PAD] -> bfloat16 [M, N D], turned back."""
    wide = out[..., :-PAD].float()
    return _rotate(wide, cos[:, None], -sin[:, None]).flatten(1).to(torch.bfloat16)


@fused
def routing(logits: Tensor) -> Tensor:
    """sqrt(softplus(logits)), float32."""
    return torch.nn.functional.softplus(logits).sqrt()


@fused
def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """[M, 2F] -> bfloat16 [M, F], clamped."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)


@fused
def add_moe(residual: Tensor, routed: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """residual [M, H] + sum over k of weights [M, k] x routed [M, k, H] + shared [M, H]."""
    return residual + (routed.float() * weights[..., None]).sum(dim=1) + shared.float()


class Reorder(torch.autograd.Function):
    """Rows, each ``copies`` times, in another order. Both ways a gather: the gradient that
    indexing has of its own is a slow scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        back = grad.index_select(0, inverse)
        if ctx.copies > 1:
            back = back.unflatten(0, (-1, ctx.copies)).sum(dim=1)
        return back, None, None, None


class GroupedLinear(torch.autograd.Function):
    """x [M, in] in groups of ``sizes`` rows, group e times weight[e] [out, in]: [M, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        out = x.new_empty(x.shape[0], weight.shape[1])
        begin = 0
        for expert, size in enumerate(sizes):
            torch.mm(x[begin : begin + size], weight[expert].T, out=out[begin : begin + size])
            begin += size
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        begin = 0
        for expert, size in enumerate(ctx.sizes):
            part = slice(begin, begin + size)
            torch.mm(grad[part], weight[expert], out=grad_x[part])
            torch.mm(grad[part].T, x[part], out=grad_weight[expert])
            begin += size
        return grad_x, grad_weight, None


class Attention(torch.autograd.Function):
    """Softmax attention, a block of queries at a time. q [B, T, N, D'], kv [B, T, D'],
    rows [B, T / ratio, D'] or None -> [B, T, N, D']; rows are keys and values.

    A block's keys are the sink, the rows that are closed before its end and the window, so that
    memory grows with T for windows. Probabilities are kept for the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        rows: Tensor | None,
        ratio: int,
        window: int,
        borders: tuple[int, ...],
    ) -> Tensor:
        batch, num_tokens, heads, dim = q.shape
        rows = kv[:, :0] if rows is None else rows
        sink_key = kv.new_zeros(batch, 1, dim)
        sink_key[..., dim - PAD] = 1.0
        out = torch.empty_like(q)
        kept: list[Tensor] = []
        for begin in range(0, num_tokens, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, num_tokens)
            keys = _keys(sink_key, rows, kv, begin, end, ratio, window)
            scores = torch.bmm(q[:, begin:end].flatten(1, 2), keys.transpose(1, 2))
            hidden = ~visible(begin, end, ratio, window, borders)
            bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
            scores.view(batch, end - begin, heads, -1).add_(bias[:, None])
            weights = torch.softmax(scores, dim=-1)
            # The sink's key meets an entry that is cut off afterwards: its value is zero.
            out[:, begin:end] = torch.bmm(weights, keys).view(batch, end - begin, heads, dim)
            kept.append(weights)
        ctx.save_for_backward(q, kv, rows, sink_key, *kept)
        ctx.shape = (ratio, window)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        q, kv, rows, sink_key, *kept = ctx.saved_tensors
        ratio, window = ctx.shape
        grad_q = torch.empty_like(q)
        grad_kv = torch.zeros_like(kv, dtype=torch.float32)
        grad_rows = torch.zeros_like(rows, dtype=torch.float32)
        for number, weights in enumerate(kept):
            begin = number * QUERY_BLOCK
            end = min(begin + QUERY_BLOCK, q.shape[1])
            first, num_rows = max(0, begin - window + 1), end // ratio if ratio else 0
            keys = _keys(sink_key, rows, kv, begin, end, ratio, window)
            block = q[:, begin:end].flatten(1, 2)
            grad_out = grad[:, begin:end].flatten(1, 2)
            grad_weights = torch.bmm(grad_out, keys.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, q.dtype)
            grad_q[:, begin:end] = torch.bmm(grad_scores, keys).view_as(q[:, begin:end])
            grad_keys = torch.bmm(grad_scores.transpose(1, 2), block)
            grad_keys += torch.bmm(weights.transpose(1, 2), grad_out)
            grad_rows[:, :num_rows] += grad_keys[:, 1 : 1 + num_rows]
            grad_kv[:, first:end] += grad_keys[:, 1 + num_rows :]
        grad_rows_out = grad_rows.to(rows.dtype) if ratio else None
        return grad_q, grad_kv.to(kv.dtype), grad_rows_out, None, None, None


def _keys(
    sink_key: Tensor, rows: Tensor, kv: Tensor, begin: int, end: int, ratio: int, window: int
) -> Tensor:
    """[B, 1 + rows + window rows, D']: what the block may see, in the order of ``visible``."""
    seen = rows[:, : end // ratio] if ratio else rows[:, :0]
    return torch.cat((sink_key, seen, kv[:, max(0, begin - window + 1) : end]), dim=1)


def visible(begin: int, end: int, ratio: int, window: int, borders: Sequence[int]) -> Tensor:
    """Which keys queries [begin, end) see: bool [end - begin, 1 + rows + window rows]. Window
    rows are those from begin - window + 1 on; ``ratio`` 0: there are no other rows."""
    query = torch.arange(begin, end)[:, None]
    key = torch.arange(max(0, begin - window + 1), end)[None]
    start = torch.zeros_like(query)
    for border in borders:
        start = torch.where(query >= border, border, start)
    near = (key <= query) & (key > query - window) & (key >= start)
    parts = [torch.ones(end - begin, 1, dtype=torch.bool)]
    if ratio:
        parts.append((torch.arange(end // ratio)[None] + 1) * ratio - 1 <= query)
    return torch.cat((*parts, near), dim=1)


def reorder(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Rows of x, each ``copies`` times, in ``order``."""
    return _apply(Reorder, x, order, inverse, copies)


def grouped_linear(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """See ``GroupedLinear``."""
    return _apply(GroupedLinear, x, weight, sizes)


def attention(
    q: Tensor,
    kv: Tensor,
    rows: Tensor | None,
    ratio: int,
    window: int,
    borders: tuple[int, ...],
) -> Tensor:
    """See ``Attention``."""
    return _apply(Attention, q, kv, rows, ratio, window, borders)


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def loss_and_gradient(
    hidden: Tensor, embed: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted cross entropy of hidden [M, H] @ embed.T [V, H] against targets [M].

    Returns each token's loss, whether its target was the likeliest, and the gradients of the
    weighted sum by hidden and embed. Done in slices, so that [M, V] is never whole.
    """
    grad_hidden = torch.empty_like(hidden)
    grad_embed = torch.zeros(embed.shape, dtype=torch.float32)
    losses, rights = [], []
    for begin in range(0, hidden.shape[0], 1024):
        part = slice(begin, begin + 1024)
        loss, right, grad_logits = _slice_loss(hidden[part] @ embed.T, targets[part], weights[part])
        grad_hidden[part] = grad_logits @ embed
        grad_embed += (grad_logits.T @ hidden[part]).float()
        losses.append(loss)
        rights.append(right)
    return torch.cat(losses), torch.cat(rights), grad_hidden, grad_embed


@fused
def _slice_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's loss, whether it was right, and the weighted sum's gradient by the logits."""
    log_probs = logits.float().log_softmax(dim=-1)
    own = log_probs.gather(1, targets[:, None])
    right = own.squeeze(1) >= log_probs.amax(dim=-1)
    one_hot = torch.arange(logits.shape[-1])[None] == targets[:, None]
    gradient = (log_probs.exp() - one_hot.float()) * weights[:, None]
    return -own.squeeze(1), right, gradient.to(torch.bfloat16)
