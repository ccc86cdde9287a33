"""A slow, obvious model of a device's KV: what is truly in each slot of each block.

It knows no hashes, refcounts or free lists. A slot holds the global and the window KV of
one token; KV is named by the whole prefix that it was computed from, as if it could be
read back. The window KV of late layers is named by where those began, too. Computing a
token checks that all KV that it attends to is the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.core.blocks import BlockId
from headwater.core.cache import KVPart, RecordMeta, StoredRecord, Tier
from headwater.core.ports import RecordMove, StoredPrefix, StoredRow
from headwater.kv.manager import Lease
from headwater.kv.prefix_index import PrefixEntry

Prefix = tuple[str, tuple[int, ...]]  # tenant, all tokens up to and with the slot's own


@dataclass
class Slots:
    """One block. None: garbage."""

    of_global: list[Prefix | None]
    of_window: list[Prefix | None]
    of_late: list[tuple[Prefix, int] | None]

    def copy(self) -> Slots:
        return Slots(list(self.of_global), list(self.of_window), list(self.of_late))


@dataclass
class Live:
    """One sequence, as the worker would keep it."""

    tenant: str
    tokens: list[int]
    lease: Lease
    num_computed: int
    table: list[BlockId]
    late_start: int | None = None  # None: late layers, if there are any, are like all others
    num_loaded: int = 0
    is_loading: bool = False

    def prefix(self, position: int) -> Prefix:
        return self.tenant, tuple(self.tokens[: position + 1])


def prefix_of(entry: PrefixEntry) -> tuple[int, ...]:
    """All tokens that ``entry`` stands for."""
    tokens: tuple[int, ...] = entry.tokens
    parent = entry.parent
    while isinstance(parent, PrefixEntry):
        tokens = parent.tokens + tokens
        parent = parent.parent
    return tokens


class Memory:
    """All blocks of the device."""

    def __init__(
        self, num_blocks: int, block_tokens: int, window_tokens: int | None, alignment: int = 1
    ) -> None:
        self.block_tokens = block_tokens
        self.alignment = alignment
        self.window_tokens = window_tokens
        self.blocks = [self._garbage() for _ in range(num_blocks)]

    def _garbage(self) -> Slots:
        size = self.block_tokens
        return Slots([None] * size, [None] * size, [None] * size)

    def spoil(self, block: BlockId) -> None:
        self.blocks[block] = self._garbage()

    def copy(self, copies: tuple[tuple[BlockId, BlockId], ...]) -> None:
        """As the worker does: one after the other, in order."""
        for source, target in copies:
            self.blocks[target] = self.blocks[source].copy()

    def slot(self, table: list[BlockId], position: int) -> tuple[Slots, int]:
        row, offset = divmod(position, self.block_tokens)
        return self.blocks[table[row]], offset

    def check_global(self, live: Live, end: int) -> None:
        for position in range(end):
            slots, offset = self.slot(live.table, position)
            assert slots.of_global[offset] == live.prefix(position), "wrong global KV"

    def check_window(self, live: Live, start: int, end: int) -> None:
        for position in range(start, end):
            slots, offset = self.slot(live.table, position)
            assert slots.of_window[offset] == live.prefix(position), "wrong window KV"

    def check_hit(self, live: Live) -> None:
        """What the lease says is there once copies and loads are done."""
        lease = live.lease
        self.check_global(live, lease.num_hit_tokens)
        if self.window_tokens is None:
            assert (lease.window_start, lease.num_replayed_tokens) == (0, 0)
        elif not self.is_approximate(live):
            assert lease.window_start <= max(0, live.num_computed - self.window_tokens + 1)
            self.check_window(live, lease.window_start, live.num_computed)

    def is_approximate(self, live: Live) -> bool:
        """Whether it is a replay without the window before it."""
        start = live.lease.num_hit_tokens - live.lease.num_replayed_tokens
        return live.lease.num_replayed_tokens > 0 and live.lease.window_start == start

    def compute(self, live: Live, position: int, *, may_write: bool) -> None:
        """One token: its row attends to what is before it, and its KV is written."""
        assert may_write, "wrote to a block that another one reads"
        self.check_global(live, position)
        slots, offset = self.slot(live.table, position)
        if position < live.lease.num_hit_tokens:  # replayed
            assert slots.of_global[offset] == live.prefix(position)
        else:
            # Tokens that share a row of KV are written together.
            first = position - position % self.alignment
            assert first >= live.lease.num_hit_tokens, "a row of KV is written in part"
            slots.of_global[offset] = live.prefix(position)
        if self.window_tokens is not None:
            seen = max(live.lease.window_start, position - self.window_tokens + 1)
            if not self.is_approximate(live):
                assert seen == max(0, position - self.window_tokens + 1), "a window cut short"
            self.check_window(live, seen, position)
            slots.of_window[offset] = live.prefix(position)
        if self.window_tokens is None or live.late_start is None or position < live.late_start:
            return
        slots.of_late[offset] = live.prefix(position), live.late_start
        for before in range(max(live.late_start, position - self.window_tokens + 1), position):
            slots, offset = self.slot(live.table, before)
            late = live.prefix(before), live.late_start
            assert slots.of_late[offset] == late, "KV of late layers is not there"

    def check_entry(self, entry: PrefixEntry) -> None:
        """A published block is what it says."""
        tenant, tokens = entry.root.identity.tenant, prefix_of(entry)
        slots = self.blocks[entry.block]
        start = len(tokens) - len(entry.tokens)
        assert start == entry.row * self.block_tokens
        for offset in range(len(entry.tokens)):
            prefix = tenant, tokens[: start + offset + 1]
            assert slots.of_global[offset] == prefix, "published global KV is not there"
            if entry.has_window and self.window_tokens is not None:
                assert slots.of_window[offset] == prefix, "published window KV is not there"


@dataclass
class Tiers:
    """Records beyond the device, found by their tokens alone."""

    block_tokens: int
    kept: dict[tuple[Prefix, KVPart], StoredRecord] = field(default_factory=dict)

    def keep(self, meta: RecordMeta, prefix: Prefix, tier: Tier) -> None:
        assert meta.identity.tenant == prefix[0]
        assert (meta.end, meta.tokens) == (len(prefix[1]), prefix[1][meta.start :])
        self.kept.setdefault((prefix, meta.part), StoredRecord(meta, tier, 100))

    def look(self, tenant: str, tokens: list[int], first_row: int) -> StoredPrefix:
        rows: list[StoredRow] = []
        b = self.block_tokens
        while (start := (first_row + len(rows)) * b) < len(tokens):
            row = self._row((tenant, tuple(tokens[: start + b])))
            if row is None or start + b > len(tokens):
                break
            rows.append(row)
        tail, num_tail = None, 0
        for (tenant_of, prefix), part in self.kept:
            same = tenant_of == tenant and prefix[:start] == tuple(tokens[:start])
            if part is KVPart.GLOBAL and same and start < len(prefix) <= start + b:
                rest = zip(prefix[start:], tokens[start:], strict=False)
                num = next((i for i, (x, y) in enumerate(rest) if x != y), None)
                num = min(len(prefix), len(tokens)) - start if num is None else num
                if num > num_tail:
                    tail, num_tail = self._row((tenant, prefix)), num
        return StoredPrefix(
            first_row=first_row, rows=tuple(rows), tail=tail, num_tail_tokens=num_tail
        )

    def _row(self, prefix: Prefix) -> StoredRow | None:
        record = self.kept.get((prefix, KVPart.GLOBAL))
        if record is None:
            return None
        return StoredRow(record=record, window=self.kept.get((prefix, KVPart.WINDOW)))

    def load(self, move: RecordMove, memory: Memory) -> None:
        """Write the record's KV into its block; what is behind its tokens is garbage then."""
        prefix = next(
            p for (p, part), r in self.kept.items() if r.meta is move.meta and part is r.meta.part
        )
        slots = memory.blocks[move.block]
        lane = slots.of_global if move.meta.part is KVPart.GLOBAL else slots.of_window
        for offset in range(len(lane)):
            end = move.meta.start + offset + 1
            lane[offset] = (prefix[0], prefix[1][:end]) if end <= move.meta.end else None
