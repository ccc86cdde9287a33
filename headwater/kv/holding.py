"""What the manager keeps about one sequence: its blocks, and which of them are published.

Knows the plan that the blocks came from only while its loads are not there. Publishes rows
in order, through ``BlockCache``; takes and gives back nothing. Only ``manager`` uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.blocks import BlockId
from headwater.core.ports import RecordMove
from headwater.kv.block_cache import BlockCache
from headwater.kv.hit_plan import HitPlan, LoadedRow, SharedRow
from headwater.kv.prefix_index import PrefixEntry, PrefixParent, PrefixRoot
from headwater.kv.probe import drop_stale


@dataclass(frozen=True, slots=True)
class Loading:
    """A plan whose loads are not all there. No row of it is published yet but shared ones."""

    plan: HitPlan
    moves: tuple[RecordMove, ...]


@dataclass(slots=True)
class Holding:
    """One sequence's blocks. ``chain[i]`` is the entry of row i's prefix; its block is
    ``table[i]``, or another sequence's where that one published the same prefix first."""

    root: PrefixRoot
    table: tuple[BlockId, ...]  # a tuple, so that a step's rows can share it as it is
    chain: list[PrefixEntry]
    block_tokens: int
    window_start: int  # window KV is there from here on, once it is computed
    windows: tuple[bool, ...]  # of the hit's rows: did their block come with window KV?
    loading: Loading | None = None

    @property
    def parent(self) -> PrefixParent:
        """What the next row of the chain follows."""
        return self.chain[-1] if self.chain else self.root

    def has_window(self, row: int) -> bool:
        """Whether the block of ``row`` has window KV, once all of it is computed."""
        if row * self.block_tokens >= self.window_start:
            return True
        return row < len(self.windows) and self.windows[row]

    def publish_row(
        self, cache: BlockCache, content: tuple[int, ...], *, has_window: bool
    ) -> tuple[PrefixEntry | None, bool]:
        """Publish the row after the chain, as ``BlockCache.publish``; the chain goes on."""
        block = self.table[len(self.chain)]
        entry, is_new = cache.publish(self.parent, content, block, has_window=has_window)
        if entry is not None:
            self.chain.append(entry)
        return entry, is_new

    def publish_hit(self, cache: BlockCache, plan: HitPlan, windows: tuple[bool, ...]) -> None:
        """Publish the plan's first ``len(windows)`` rows, which are full and whole."""
        drop_stale(cache.index, self.chain)
        while (row := len(self.chain)) < len(windows):
            match plan.sources[row]:
                case LoadedRow(row=stored):
                    content = stored.record.meta.tokens
                case source:
                    content = source.entry.tokens
            if self.publish_row(cache, content, has_window=windows[row])[0] is None:
                return

    def whole_rows(self, plan: HitPlan, num_loaded_moves: int) -> tuple[bool, ...]:
        """The plan's first full rows whose KV is there after so many moves, as ``windows``."""
        windows: list[bool] = []
        num_left = num_loaded_moves
        for source, came_with_window in zip(plan.sources, self.windows, strict=True):
            has_window = came_with_window
            if not isinstance(source, SharedRow) and source.num_tokens < self.block_tokens:
                break
            if isinstance(source, LoadedRow):
                if num_left < 1:
                    break
                has_window = has_window and num_left > source.loads_window
                num_left -= 1 + source.loads_window
            windows.append(has_window)
        return tuple(windows)
