"""Random inputs for kernels, and rows of paged sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.numerics.ops import RaggedBatch

HALF_ULP = 2.0**-8


def bf16(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)


def assert_close(got: Tensor, want: Tensor, *, relative: float, absolute: float) -> None:
    got, want = got.float(), want.float()
    assert got.shape == want.shape
    error = (got - want).abs()
    assert bool((error <= relative * want.abs() + absolute).all()), f"off by {error.max():.3g}"


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of (new tokens, context[, window start]) over shuffled blocks."""

    batch: RaggedBatch
    num_blocks: int
    all_slots: Tensor  # of positions [0, context) of every row, one row after the other

    def alone(self, row: int) -> RaggedBatch:
        """A batch of one row; its tokens are ``tokens(row)`` of this one's."""
        batch, tokens = self.batch, self.tokens(row)
        return RaggedBatch(
            row_starts=torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32),
            context_lens=batch.context_lens[row : row + 1],
            block_tables=batch.block_tables[row : row + 1],
            positions=batch.positions[tokens],
            slots=batch.slots[tokens],
            max_row_tokens=tokens.stop - tokens.start,
            max_context=int(batch.context_lens[row]),
            window_starts=(
                None if batch.window_starts is None else batch.window_starts[row : row + 1]
            ),
        )

    def tokens(self, row: int) -> slice:
        start, end = self.batch.row_starts[row : row + 2].tolist()
        return slice(start, end)


def case_of(
    rows: Sequence[tuple[int, int] | tuple[int, int, int]],
    block_tokens: int,
    generator: torch.Generator,
) -> Case:
    """The batch has ``window_starts`` if the rows do. A row's window start is at most the
    position of its first new token."""
    lens, contexts = [row[0] for row in rows], [row[1] for row in rows]
    blocks_per_row = [-(-context // block_tokens) for context in contexts]
    num_blocks = sum(blocks_per_row) + 2
    shuffled = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    # Two unused columns: entries past a row's context are 0, a block of somebody else.
    tables = torch.zeros(len(rows), max(blocks_per_row) + 2, dtype=torch.int32)
    starts, taken = [0], 0
    positions: list[int] = []
    slots: list[int] = []
    all_slots: list[int] = []
    for row, (num_new, context) in enumerate(zip(lens, contexts, strict=True)):
        tables[row, : blocks_per_row[row]] = shuffled[taken : taken + blocks_per_row[row]]
        taken += blocks_per_row[row]
        row_slots = [
            int(tables[row, p // block_tokens]) * block_tokens + p % block_tokens
            for p in range(context)
        ]
        all_slots += row_slots
        slots += row_slots[context - num_new :]
        positions += range(context - num_new, context)
        starts.append(starts[-1] + num_new)
    window_starts = [row[2] for row in rows if len(row) == 3]
    batch = RaggedBatch(
        row_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots),
        max_row_tokens=max(lens),
        max_context=max(contexts),
        window_starts=torch.tensor(window_starts, dtype=torch.int32) if window_starts else None,
    )
    return Case(batch, num_blocks, torch.tensor(all_slots))
