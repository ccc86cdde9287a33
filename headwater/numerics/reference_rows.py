"""The definition of the kernels for layers whose rows are keys and values, in plain torch.

A layer's rows lie one after the other, one for each ``ratio`` tokens: the row of position p
in block b is b * block_rows + p % block_tokens // ratio. Called by ``reference.py``; and by
``cpu.py`` where it has no kernel of its own. Knows any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.numerics.ops import RaggedBatch

# Queries that are computed together. A longer piece makes more scores that its mask takes away.
PIECE_TOKENS = 128
# What an open token costs is shared by the tokens of its block, at least this many.
_LEAST_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRows:
    """Rows [num_blocks * block_rows + 1, D] and, with ratio 2, one open token's values and gates
    [num_blocks + 1, 2, D] for each block, as they came. What is last of both takes what nobody
    keeps."""

    rows: Tensor
    open: Tensor | None
    num_blocks: int
    block_tokens: int
    ratio: int

    @property
    def block_rows(self) -> int:
        return self.block_tokens // self.ratio

    def block(self, block: int) -> tuple[Tensor]:
        """A view of one block's rows."""
        return (self.rows[block * self.block_rows : (block + 1) * self.block_rows],)

    def copy_block(self, source: int, target: int) -> None:
        self.block(target)[0].copy_(self.block(source)[0])
        if self.open is not None:
            self.open[target] = self.open[source]

    def seen(self, table: Tensor, first: int, end: int) -> Tensor:
        """Rows [first, end) of the sequence whose blocks are ``table``, as float32."""
        skipped = first // self.block_rows
        blocks = table[skipped : -(-end // self.block_rows)].long()
        offsets = torch.arange(self.block_rows, device=table.device)
        places = (blocks[:, None] * self.block_rows + offsets).flatten()
        return self.rows[places[first - skipped * self.block_rows :][: end - first]].float()


def allocate_rows(
    num_blocks: int, block_tokens: int, dim: int, ratio: int, dtype: torch.dtype,
    act_dtype: torch.dtype, device: torch.device,
) -> PlainRows:  # fmt: skip
    assert ratio in (1, 2)
    assert block_tokens % ratio == 0
    rows = torch.zeros((num_blocks * (block_tokens // ratio) + 1, dim), dtype=dtype, device=device)
    opened = None
    if ratio == 2:
        opened = torch.zeros((num_blocks + 1, 2, dim), dtype=act_dtype, device=device)
    return PlainRows(
        rows=rows, open=opened, num_blocks=num_blocks, block_tokens=block_tokens, ratio=ratio
    )


def row_bytes_per_token(row_bytes: int, open_bytes: int, ratio: int) -> int:
    """``row_bytes`` of one row, ``open_bytes`` of an open token."""
    if ratio == 1:
        return row_bytes
    return -(-row_bytes // ratio) + -(-open_bytes // _LEAST_BLOCK_TOKENS)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, inverse: bool) -> None:
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]  # [T, 1, D_rot/2]
    if inverse:
        s = -s
    turned = x[..., x.shape[-1] - 2 * cos.shape[1] :]
    first, second = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([first * c - second * s, second * c + first * s], dim=-1)
    turned.copy_(rotated.flatten(-2))


def silu_mul_clamped(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(gate_up.dtype)


def store_rows(rows: Tensor, kv: PlainRows, slots: Tensor) -> None:
    assert kv.ratio == 1
    kv.rows[slots] = rows.to(kv.rows.dtype)


def compress(
    values: Tensor, gates: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, kv: PlainRows,
    batch: RaggedBatch, eps: float,
) -> None:  # fmt: skip
    assert kv.open is not None
    slots = batch.slots if batch.global_slots is None else batch.global_slots
    is_second = batch.positions % 2 == 1
    is_first_of_row = torch.zeros_like(is_second)
    is_first_of_row[batch.row_starts[:-1].long()] = True
    is_last_of_row = is_first_of_row.roll(-1)
    blocks = batch.slots // kv.block_tokens
    # [T, 2, D] of every token, and of the token before it: its row's, or the open one.
    own = torch.stack([values, gates], dim=1).to(kv.open.dtype)
    before = torch.where(is_first_of_row[:, None, None], kv.open[blocks], own.roll(1, 0))
    is_open = is_last_of_row & ~is_second
    kv.open[torch.where(is_open, blocks, -1)] = own
    pair = torch.stack([before, own], dim=-1).float()  # [T, 2, D, token of the pair]
    # Over the last axis, where the bits of an entry do not depend on how many there are.
    mixed = pair[:, 1].softmax(dim=-1) * pair[:, 0]
    pooled = mixed[..., 0] + mixed[..., 1]
    normed = pooled * torch.rsqrt(pooled.square().mean(dim=-1, keepdim=True) + eps) * norm.float()
    rotate_pairs(normed[:, None], cos, sin, (batch.positions - 1).clamp(min=0), inverse=False)
    # A slot of -1 stays -1, the place of what nobody keeps.
    places = torch.where(is_second, slots.div(2, rounding_mode="floor"), -1)
    kv.rows[places] = normed.to(kv.rows.dtype)


def attend_rows(
    q: Tensor, window: PlainRows, source: PlainRows | None, sinks: Tensor, batch: RaggedBatch,
    scale: float, window_tokens: int,
) -> Tensor:  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, contexts = batch.row_starts.tolist(), batch.context_lens.tolist()
    window_starts = [0] * len(contexts)
    if batch.window_starts is not None:
        window_starts = batch.window_starts.tolist()
    for row, context in enumerate(contexts):
        table = batch.block_tables[row]
        token = starts[row]
        first = context - (starts[row + 1] - token)  # position of the next query
        while first < context:
            # Pieces end at fixed positions.
            end = min(context, (first // PIECE_TOKENS + 1) * PIECE_TOKENS)
            queries = slice(token, token + end - first)
            oldest = max(window_starts[row], first - window_tokens + 1)
            position = torch.arange(first, end, device=q.device)[:, None]
            key = torch.arange(oldest, end, device=q.device)
            rows = window.seen(table, oldest, end)
            seen = (key <= position) & (key > position - window_tokens)
            if source is not None:
                closed = torch.arange(end // source.ratio, device=q.device)
                rows = torch.cat([rows, source.seen(table, 0, len(closed))])
                is_closed = (closed + 1) * source.ratio - 1 <= position
                seen = torch.cat([seen, is_closed], dim=1)
            scores = q[queries].float() @ rows.T * scale  # [queries, N, rows]
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            sink = sinks.float()[None, :, None].expand(end - first, -1, 1)
            shares = torch.cat([scores, sink], dim=-1).softmax(dim=-1)
            out[queries] = (shares[..., :-1] @ rows).to(q.dtype)
            token, first = queries.stop, end
    return out
