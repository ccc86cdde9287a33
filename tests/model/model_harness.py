"""Runs a loaded model without an engine: sequences side by side, blocks in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.model.family import Model
from headwater.numerics.ops import KVFormat, LayerKV, Ops, RaggedBatch
from headwater.numerics.reference import ReferenceOps

BLOCK_TOKENS = 8


def reference_ops() -> Ops:
    """Plain float32 numerics on the CPU."""
    return ReferenceOps()


class SideBySide:
    """KV for ``num_sequences`` sequences of up to ``max_tokens``, and where each stands.

    Sequence s owns blocks [s * num_blocks, (s + 1) * num_blocks).
    """

    def __init__(self, model: Model, ops: Ops, num_sequences: int, max_tokens: int) -> None:
        self._model = model
        num_blocks = -(-max_tokens // BLOCK_TOKENS)
        self._tables = torch.arange(num_sequences * num_blocks).view(num_sequences, num_blocks)
        self.kv: list[LayerKV] = [
            ops.allocate_kv(
                num_sequences * num_blocks,
                BLOCK_TOKENS,
                group.num_kv_heads,
                group.head_dim,
                KVFormat.FP32,
            )
            for group in model.cache_plan
            for _ in group.layers
        ]
        self._num_tokens = [0] * num_sequences

    def feed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits after each token of each row, float32 [tokens of all rows, V]."""
        return self._model.logits(self.run(rows))

    def run(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states after each token of each row, [tokens of all rows, H]."""
        lengths = torch.tensor([len(row) for row in rows])
        starts = torch.tensor(self._num_tokens)
        positions = torch.cat(
            [torch.arange(start, start + len(row)) for start, row in zip(starts, rows, strict=True)]
        )
        tables = self._tables.repeat_interleave(lengths, 0)
        blocks = tables.gather(1, (positions // BLOCK_TOKENS)[:, None])[:, 0]
        context_lens = starts + lengths
        self._num_tokens = context_lens.tolist()
        batch = RaggedBatch(
            row_starts=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
            context_lens=context_lens.int(),
            block_tables=self._tables.int(),
            positions=positions.int(),
            slots=blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS,
            max_row_tokens=int(lengths.max()),
            max_context=int(context_lens.max()),
        )
        ids = torch.tensor([token for row in rows for token in row])
        return self._model.forward(ids, batch, self.kv)


def all_logits(model: Model, ops: Ops, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
    """Logits after every token, computed in chunks of ``chunk`` tokens (None: at once)."""
    side = SideBySide(model, ops, 1, len(tokens))
    step = chunk or len(tokens)
    return torch.cat([side.feed([tokens[i : i + step]]) for i in range(0, len(tokens), step)])


def greedy(
    model: Model, ops: Ops, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """``num_tokens`` highest-logit tokens after each prompt, all in one ragged batch."""
    side = SideBySide(model, ops, len(prompts), max(map(len, prompts)) + num_tokens)
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    chosen = [model.logits(side.run(prompts)[ends]).argmax(-1)]
    while len(chosen) < num_tokens:
        chosen.append(side.feed(chosen[-1][:, None].tolist()).argmax(-1))
    return torch.stack(chosen, dim=1).tolist()
