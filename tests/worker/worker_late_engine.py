"""The scripted engine with late layers: those that compute a prompt's last tokens only.

Their "KV" is the same digests in slots of their own, which nobody copies, loads or hands over:
each sequence's are of no use to another.
The next token is a function of the newest digest *and* of where the late layers began, so a
sequence that goes on with another beginning than it had gives other ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from worker_scripted_engine import (
    START,
    VOCAB,
    Digests,
    ScriptedEngine,
    Slot,
    choose,
    digest,
    score,
)

from headwater.core.blocks import BlockId
from headwater.core.fleet import Holding
from headwater.core.request import SampledToken
from headwater.core.step import RowResult, SequenceId, StepRow


class LateEngine(ScriptedEngine):
    """With ``Holding.EARLY`` it has no late layers, and so no output."""

    def __init__(self, block_tokens: int, window_tokens: int | None, holds: Holding) -> None:
        super().__init__(block_tokens, window_tokens)
        self.holds = holds
        self.late_slots: dict[Slot, tuple[SequenceId, Digests]] = {}
        self.num_late_tokens = 0

    def _run_row(self, row: StepRow) -> RowResult:
        result = super()._run_row(row)
        if self.holds is Holding.EARLY:
            assert row.late_start >= row.end, "it was given what it has no layers for"
            assert row.sample is None
            return result
        assert self.window_tokens is not None
        for position in range(max(row.start, row.late_start), row.end):
            self.num_late_tokens += 1
            slot = self._slot(row, position)
            self.late_slots[slot] = row.sequence_id, self.slots[slot]
            first = max(position - self.window_tokens + 1, row.window_start, row.late_start)
            for seen in range(first, position + 1):
                slot = self._slot(row, seen)
                assert self.late_slots.get(slot) == (row.sequence_id, self.slots[slot]), (
                    f"position {position} sees late KV of {seen} that is not there"
                )
        if row.sample is None:
            assert not row.next_tokens or row.late_start == 0, "a hidden state is not there"
            return result
        assert row.late_start < row.end
        state = digest(self.slots[self._slot(row, row.end - 1)][1], row.late_start)
        token = choose(state, row.sample)
        return replace(result, token=SampledToken(token, score(state, token)))

    def copy(self, source: BlockId, target: BlockId) -> None:
        super().copy(source, target)
        for offset in range(self.block_tokens):
            self.late_slots.pop((target, offset), None)


def late_ids(prompt: Sequence[int], num_tokens: int, late_start: int) -> list[int]:
    """What greedy decoding gives when nothing goes wrong."""
    state = START
    for token in prompt:
        state = digest(state, token)
    ids = []
    for _ in range(num_tokens):
        ids.append(digest(state, late_start) % VOCAB)
        state = digest(state, ids[-1])
    return ids
