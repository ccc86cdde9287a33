"""What of a run of tokens is handed over, record by record. Pure.

    tokens    [ row 0 | row 1 | row 2 . . ) last      b = block_tokens, n = len(tokens)
    KV of     [0 .................... n-1 )           the last one's is the taker's to compute
    window                 [n-W ..... n-1 )           rows that the last token sees

Both sides make the plan from the same tokens, so a record's key is all that has to be said
of it. Less than a block is not worth handing over: then there are no records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.core.blocks import CacheIdentity, PrefixKey, block_keys, blocks_for, chain_key
from headwater.core.cache import KVPart, RecordMeta, StoredRecord, Tier, part_key
from headwater.core.ports import StoredPrefix, StoredRow


@dataclass(frozen=True, slots=True)
class HandoffRow:
    """One block's records: the window's where the model has one and the last token sees it."""

    record: RecordMeta
    window: RecordMeta | None

    def part(self, part: KVPart) -> RecordMeta | None:
        return self.record if part is KVPart.GLOBAL else self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPlan:
    """``rows`` cover tokens [0, num_tokens); only the last one may be a part of a block."""

    num_tokens: int
    block_tokens: int
    rows: tuple[HandoffRow, ...]

    def num_whole_rows(self, num_computed: int) -> int:
        """How many of the first rows are complete once ``num_computed`` tokens have KV."""
        if num_computed >= self.num_tokens:
            return len(self.rows)
        return num_computed // self.block_tokens

    def as_stored(self, part_bytes: Callable[[KVPart], int]) -> StoredPrefix:
        """The same as the rows of a tier: what the taker's hit is planned with."""
        rows = [
            StoredRow(
                record=StoredRecord(row.record, Tier.PEER, part_bytes(KVPart.GLOBAL)),
                window=None
                if row.window is None
                else StoredRecord(row.window, Tier.PEER, part_bytes(KVPart.WINDOW)),
            )
            for row in self.rows
        ]
        num_tail_tokens = self.num_tokens % self.block_tokens if rows else 0
        return StoredPrefix(
            first_row=0,
            rows=tuple(rows[:-1] if num_tail_tokens else rows),
            tail=rows[-1] if num_tail_tokens else None,
            num_tail_tokens=num_tail_tokens,
        )


def plan_handoff(
    tokens: Sequence[int],
    identity: CacheIdentity,
    *,
    block_tokens: int,
    window_tokens: int | None,
) -> HandoffPlan:
    """The records of ``tokens`` but the last one. O(tokens).

    >>> plan = plan_handoff(range(10), CacheIdentity("m", "l"), block_tokens=4, window_tokens=3)
    >>> [len(row.record.tokens) for row in plan.rows], [row.window is None for row in plan.rows]
    ([4, 4, 1], [True, False, False])
    """
    num_tokens = max(len(tokens) - 1, 0)
    if num_tokens < block_tokens:
        return HandoffPlan(num_tokens=num_tokens, block_tokens=block_tokens, rows=())
    first_window = blocks_for(num_tokens, block_tokens)
    if window_tokens is not None:
        first_window = max(num_tokens - window_tokens + 1, 0) // block_tokens
    rows: list[HandoffRow] = []
    parent = identity.root_key()

    def add(key: PrefixKey, content: tuple[int, ...]) -> None:
        def meta(part: KVPart) -> RecordMeta:
            return RecordMeta(
                key=part_key(key, part),
                parent=part_key(parent, part),
                identity=identity,
                part=part,
                start=len(rows) * block_tokens,
                tokens=content,
            )

        window = meta(KVPart.WINDOW) if len(rows) >= first_window else None
        rows.append(HandoffRow(meta(KVPart.GLOBAL), window))

    computed = tuple(tokens[:num_tokens])
    for key, content in block_keys(parent, computed, block_tokens):
        add(key, content)
        parent = key
    tail = computed[len(rows) * block_tokens :]
    if tail:
        add(chain_key(parent, tail), tail)
    return HandoffPlan(num_tokens=num_tokens, block_tokens=block_tokens, rows=tuple(rows))
