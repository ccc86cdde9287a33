"""A StepPlan as the tensors that a model's forward pass reads.

Knows block tables, slots and devices; not the model, the KV tensors or the
sampler. Called by ``runner``, once per step.

Two rows with blocks of 4 tokens: a chunk at [2, 5) of sequence a, whose block
table is (9, 3), and a decode step at [6, 7) of sequence b with (5, 7):

    ids            a2 a3 a4 | b6
    row_starts     0          3    4
    context_lens   5, 7
    block_tables   [9, 3], [5, 7]
    positions      2 3 4 | 6
    slots          9*4+2 9*4+3 3*4+0 | 7*4+2

For a model with window layers, if a's first token is a replay and its window KV
begins at 2:

    window_starts  2, 0
    global_slots   -1 9*4+3 3*4+0 | 7*4+2

For a model with late layers, if a's late tokens begin at 4 and b's at 1, and a window is 3:

    late.indices   2 | 3            of the tokens; rows without any are left out
    late.batch     the same of them: row_starts 0 1 2, positions 4 | 6, window_starts 4, 1

It is left out (None) where late layers compute every token of the step and see through their
windows what the others see, as in every step that only decodes.

Arrays are built with numpy and handed to torch one by one: at 64 rows a step
has room for about 0.3 ms of this, and small torch ops cost several times numpy's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.core.blocks import BlockId
from headwater.core.errors import EngineFault
from headwater.core.step import SequenceId, StepPlan, StepRow
from headwater.numerics.ops import LateTokens, RaggedBatch


@dataclass(frozen=True, slots=True)
class StepTensors:
    """``ids`` int64 [T] and where they go."""

    ids: Tensor
    batch: RaggedBatch


class BatchBuilder:
    """Builds StepTensors. Keeps each sequence's block table as an array between steps,
    because a decoding sequence's table stays the same for ``block_tokens`` steps."""

    def __init__(
        self,
        *,
        block_tokens: int,
        num_blocks: int,
        context_tokens: int,
        vocab_size: int,
        device: torch.device,
        window_tokens: int | None = None,
        has_late: bool = False,
    ) -> None:
        """``window_tokens`` of the model's layers with a window, the widest. ``has_late``: some
        of those are late layers."""
        self._block_tokens = block_tokens
        self._context_tokens = context_tokens
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._device = device
        self._window_tokens = window_tokens
        self._has_late = has_late
        self._tables: dict[SequenceId, _Table] = {}
        self.highest_block = -1  # ever seen in a block table

    def build(self, plan: StepPlan) -> StepTensors:
        """Raises EngineFault where the plan does not fit the model or the KV: a kernel
        would read or write memory that is not its own."""
        rows = plan.rows
        lens = np.array([len(row.tokens) for row in rows], np.int32)
        starts = np.array([row.start for row in rows], np.int32)
        if not len(rows) or not lens.all():
            raise EngineFault("a step plan needs at least one row, and a row at least one token")
        num_tokens = int(lens.sum())
        ids = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64, num_tokens)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise EngineFault(
                f"token ids [{ids.min()}, {ids.max()}] are outside the vocabulary of "
                f"{self._vocab_size}"
            )
        row_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lens, out=row_starts[1:])
        context_lens = starts + lens
        max_context = int(context_lens.max())
        if starts.min() < 0 or max_context > self._context_tokens:
            raise EngineFault(
                f"positions [{starts.min()}, {max_context}) are outside the context of "
                f"{self._context_tokens} tokens"
            )
        tables = self._block_tables(rows, context_lens)
        row_of_token = np.repeat(np.arange(len(rows)), lens)
        positions = np.arange(num_tokens, dtype=np.int32)
        positions += np.repeat(starts - row_starts[:-1], lens)
        blocks = tables[row_of_token, positions // self._block_tokens].astype(np.int64)
        slots = blocks * self._block_tokens + positions % self._block_tokens
        if self._window_tokens is None:
            if any(row.window_start or row.num_replayed or row.late_start for row in rows):
                raise EngineFault(
                    "a row has a window, a replay or late tokens, but no layer has a window"
                )
            window_starts = global_slots = None
        else:
            window_starts, replay_ends = _windows(rows, starts, lens)
            global_slots = np.where(positions < np.repeat(replay_ends, lens), -1, slots)
        arrays = _Arrays(
            row_starts, context_lens, tables, positions, slots, window_starts, global_slots
        )
        batch = self._batch(arrays, int(lens.max()), max_context)
        if window_starts is not None:
            late = self._late(rows, starts, lens, window_starts, arrays, batch)
            if late is not None:
                batch = replace(batch, late=late)
        return StepTensors(ids=self._tensor(ids), batch=batch)

    def _late(
        self,
        rows: tuple[StepRow, ...],
        starts: NDArray[np.int32],
        lens: NDArray[np.int32],
        window_starts: NDArray[np.int32],
        arrays: _Arrays,
        batch: RaggedBatch,
    ) -> LateTokens | None:
        """What late layers compute of ``batch``, whose ``arrays`` those are; None: all of it, as
        all layers do."""
        late_starts = np.array([row.late_start for row in rows], np.int32)
        if not self._has_late:
            if late_starts.any():
                raise EngineFault("a row has late tokens, but the model has no late layers")
            return None
        if late_starts.min() < 0:
            raise EngineFault("a row's late tokens begin before position 0")
        assert self._window_tokens is not None
        late_windows = np.maximum(window_starts, late_starts)
        left_out = late_starts > starts
        if not left_out.any():
            # A row's first token sees furthest back.
            if (late_starts <= np.maximum(starts - self._window_tokens + 1, window_starts)).all():
                return None
            every = np.arange(len(arrays.positions))
            return LateTokens(
                self._tensor(every), replace(batch, window_starts=self._tensor(late_windows))
            )
        for row in rows:
            is_sampled_early = row.sample is not None and row.late_start >= row.end
            if is_sampled_early or (row.next_tokens and row.late_start > row.start):
                raise EngineFault(
                    f"sequence {row.sequence_id}: tokens are sampled or scored before position "
                    f"{row.late_start}, where late layers begin"
                )
        num_late = np.clip(starts + lens - late_starts, 0, lens)
        chosen = np.flatnonzero(num_late)
        indices = np.flatnonzero(arrays.positions >= np.repeat(late_starts, lens))
        if not len(chosen):
            return LateTokens(self._tensor(indices), None)
        row_starts = np.zeros(len(chosen) + 1, np.int32)
        np.cumsum(num_late[chosen], out=row_starts[1:])
        context_lens = arrays.context_lens[chosen]
        assert arrays.global_slots is not None
        late = _Arrays(
            row_starts,
            context_lens,
            arrays.tables[chosen],
            arrays.positions[indices],
            arrays.slots[indices],
            late_windows[chosen],
            arrays.global_slots[indices],
        )
        return LateTokens(
            self._tensor(indices),
            self._batch(late, int(num_late.max()), int(context_lens.max())),
        )

    def _batch(self, arrays: _Arrays, max_row_tokens: int, max_context: int) -> RaggedBatch:
        windows, global_slots = arrays.window_starts, arrays.global_slots
        return RaggedBatch(
            row_starts=self._tensor(arrays.row_starts),
            context_lens=self._tensor(arrays.context_lens),
            block_tables=self._tensor(arrays.tables),
            positions=self._tensor(arrays.positions),
            slots=self._tensor(arrays.slots),
            max_row_tokens=max_row_tokens,
            max_context=max_context,
            window_starts=None if windows is None else self._tensor(windows),
            global_slots=None if global_slots is None else self._tensor(global_slots),
        )

    def _block_tables(
        self, rows: tuple[StepRow, ...], context_lens: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        used = -(-context_lens // self._block_tokens)
        tables = np.zeros((len(rows), int(used.max())), np.int32)
        kept: dict[SequenceId, _Table] = {}
        for row, out, num_used in zip(rows, tables, used.tolist(), strict=True):
            table = self._tables.get(row.sequence_id)
            if table is None or table.blocks is not row.block_table:
                table = _Table(row.block_table, self._checked(row))
            if num_used > len(table.array):
                raise EngineFault(
                    f"sequence {row.sequence_id}: {len(table.array)} blocks of "
                    f"{self._block_tokens} tokens do not cover [0, {row.end})"
                )
            out[:num_used] = table.array[:num_used]
            kept[row.sequence_id] = table
        # Only this step's rows are kept: a sequence that sat out is rebuilt, and
        # finished ones need no notice.
        self._tables = kept
        return tables

    def _checked(self, row: StepRow) -> NDArray[np.int32]:
        array = np.array(row.block_table, np.int32)
        if len(array) and (array.min() < 0 or array.max() >= self._num_blocks):
            raise EngineFault(
                f"sequence {row.sequence_id}: block ids [{array.min()}, {array.max()}] are "
                f"outside the {self._num_blocks} blocks of the KV"
            )
        self.highest_block = max(self.highest_block, int(array.max(initial=-1)))
        return array

    def _tensor(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _windows(
    rows: tuple[StepRow, ...], starts: NDArray[np.int32], lens: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Each row's ``window_start``, and the position at which its replay ends."""
    window_starts = np.array([row.window_start for row in rows], np.int32)
    num_replayed = np.array([row.num_replayed for row in rows], np.int32)
    if window_starts.min() < 0 or (window_starts > starts).any():
        raise EngineFault("a row's window KV begins before position 0 or after the row does")
    if num_replayed.min() < 0 or (num_replayed > lens).any():
        raise EngineFault("a row replays fewer than none or more than all of its tokens")
    return window_starts, starts + num_replayed


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A RaggedBatch on the host."""

    row_starts: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    tables: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    window_starts: NDArray[np.int32] | None
    global_slots: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class _Table:
    blocks: tuple[BlockId, ...]
    array: NDArray[np.int32]
