"""Puts KV beyond the device: what was published goes to disk, what must soon go, to the host.

    published --> backlog --pin--> tiers.store --done--> unpin
    next victims, while few blocks are free --pin--> tiers.demote --done--> unpin

A block is pinned only while a copy of it runs, and only so many at once. One that was
evicted before its turn is counted and forgotten: it was never on disk, so nobody will
look for it there. Knows kv's door and the tiers' port; no requests, no tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwater.core.blocks import BlockId, PrefixKey
from headwater.core.cache import KVPart, Retention
from headwater.core.ports import Clock, KVTiers, RecordMove, Store
from headwater.kv.manager import KVManager
from headwater.kv.prefix_index import PrefixEntry

DRAIN_WAIT_S = 0.001
BATCH_MOVES = 16  # one store's; small, so that pins are short
MAX_RUNNING = 4
# Of the pool, at most: pinned blocks cannot be evicted for who needs them.
PINNED_SHARE = 1 / 8
# Fewer free blocks than this share, and so many of the next victims are copied to the host:
# a long prompt evicts many at once.
LOW_WATER_SHARE = 1 / 4


@dataclass(slots=True)
class _Known:
    """What is known of a published block. ``key`` tells when the block was used anew."""

    key: PrefixKey
    retention: Retention
    is_stored: bool = False  # on disk, or on the way there
    is_demoted: bool = False


@dataclass(frozen=True, slots=True)
class _Item:
    entry: PrefixEntry
    part: KVPart
    retention: Retention


@dataclass(frozen=True, slots=True)
class _Running:
    store: Store
    pinned: tuple[BlockId, ...]
    start_s: float
    is_demotion: bool


class Keeper:
    """Bounded by construction: at most one full block's item per block in the backlog."""

    def __init__(self, kv: KVManager, tiers: KVTiers, clock: Clock, *, keeps_windows: bool) -> None:
        """``keeps_windows``: window layers' KV goes beyond the device, too."""
        self._kv = kv
        self._tiers = tiers
        self._clock = clock
        self.keeps_windows = keeps_windows
        num_blocks = kv.group.num_blocks
        self._max_pinned = max(1, int(num_blocks * PINNED_SHARE))
        self._low_water = max(1, int(num_blocks * LOW_WATER_SHARE)) if tiers.has_host else 0
        self._backlog: deque[_Item] = deque()
        self._max_backlog = 4 * num_blocks
        self._running: list[_Running] = []
        self._all_demoted_at: tuple[int, int, int] | None = None  # when victims were last looked at
        self._known: dict[BlockId, _Known] = {}
        self.num_dropped = 0

    @property
    def is_busy(self) -> bool:
        """Whether ``pump`` has more to do, now or when a copy ends."""
        return bool(self._backlog or self._running)

    @property
    def num_pinned(self) -> int:
        return sum(len(running.pinned) for running in self._running)

    def num_pinned_since(self, start_s: float) -> int:
        """Those of copies that began at ``start_s`` or later."""
        return sum(len(running.pinned) for running in self._running if running.start_s >= start_s)

    @property
    def num_queued(self) -> int:
        return len(self._backlog) + self.num_pinned

    # What to keep

    def keep(self, entries: Iterable[PrefixEntry], retention: Retention) -> None:
        """Published blocks, of which all KV is written and nothing more will be."""
        if retention.keep_s <= 0:
            return
        for entry in entries:
            known = self._learn(entry, retention)
            if self._tiers.has_disk and not known.is_stored:
                known.is_stored = self._queue(_Item(entry, KVPart.GLOBAL, retention))

    def keep_windows(self, entries: Iterable[PrefixEntry], retention: Retention) -> None:
        """The last window of a prefix unit: these rows' window KV goes to disk."""
        if retention.keep_s <= 0 or not self.keeps_windows or not self._tiers.has_disk:
            return
        for entry in entries:
            if entry.has_window:
                self._queue(_Item(entry, KVPart.WINDOW, retention))

    def note_loaded(self, key: PrefixKey, block: BlockId, retention: Retention) -> None:
        """``block`` is a copy of what the disk holds: it need not go there again."""
        if retention.keep_s > 0:
            self._known[block] = _Known(key, retention, is_stored=True)

    def _learn(self, entry: PrefixEntry, retention: Retention) -> _Known:
        known = self._known.get(entry.block)
        if known is None or known.key != entry.key:
            known = self._known[entry.block] = _Known(entry.key, retention)
        elif retention.keep_s > known.retention.keep_s:
            known.retention = retention
        return known

    def _queue(self, item: _Item) -> bool:
        if len(self._backlog) >= self._max_backlog:
            self.num_dropped += 1
            return False
        self._backlog.append(item)
        return True

    # Doing it

    def pump(self) -> None:
        """Unpin what is done, begin what fits. Never waits."""
        self._reap()
        while self._backlog and self._may_begin:
            self._store_batch()
        if self._low_water:
            self._demote()

    def drain(self, limit_s: float) -> None:
        """Wait, at most ``limit_s``, until all is stored: for the end of a worker."""
        end_s = self._clock.now_s() + limit_s
        self.pump()
        while self.is_busy and self._clock.now_s() < end_s:
            time.sleep(DRAIN_WAIT_S)
            self.pump()

    def _reap(self) -> None:
        for running in [running for running in self._running if running.store.is_done]:
            self._running.remove(running)
            if not running.is_demotion:
                self._forget_failed(running.store)
            for block in running.pinned:
                self._kv.unpin(block)

    def _forget_failed(self, store: Store) -> None:
        """What the disk did not take goes there when it is used the next time (C02)."""
        for move in store.failed:
            known = self._known.get(move.block)
            if known is not None and known.key == move.meta.key:
                known.is_stored = False

    @property
    def _may_begin(self) -> bool:
        return len(self._running) < MAX_RUNNING and self.num_pinned < self._max_pinned

    def _store_batch(self) -> None:
        """The next items of the backlog that share a retention."""
        retention = self._backlog[0].retention
        room = min(BATCH_MOVES, self._max_pinned - self.num_pinned)
        moves: list[RecordMove] = []
        while self._backlog and len(moves) < room and self._backlog[0].retention == retention:
            item = self._backlog.popleft()
            if self._kv.pin(item.entry):
                moves.append(RecordMove(self._kv.meta_of(item.entry, item.part), item.entry.block))
            elif len(item.entry.tokens) == self._kv.group.block_tokens:
                self.num_dropped += 1  # a tail, though, lives on in what replaced it
        if moves:
            self._begin(self._tiers.store(moves, retention), moves)

    def _demote(self) -> None:
        """Copy the next victims to the host, those of one retention at a time."""
        counters = self._kv.counters()
        blocks = (counters.num_free_blocks, counters.num_cached_blocks, counters.num_evicted_blocks)
        if counters.num_free_blocks >= self._low_water or blocks == self._all_demoted_at:
            return
        batch: list[PrefixEntry] = []
        retention: Retention | None = None
        room = min(BATCH_MOVES, self._max_pinned - self.num_pinned)
        if room <= 0 or len(self._running) >= MAX_RUNNING:
            return
        for entry in self._kv.victims(self._low_water):
            known = self._known.get(entry.block)
            if known is None or known.key != entry.key or known.is_demoted:
                continue  # of a request that keeps nothing, or done already
            if len(batch) < room and retention in (None, known.retention) and self._kv.pin(entry):
                retention = known.retention
                known.is_demoted = True
                batch.append(entry)
        if retention is None:
            self._all_demoted_at = blocks
        else:
            moves = [
                RecordMove(self._kv.meta_of(entry, part), entry.block)
                for entry in batch
                for part in self._parts(entry)
            ]
            self._begin(
                self._tiers.demote(moves, retention), moves, tuple(entry.block for entry in batch)
            )

    def _parts(self, entry: PrefixEntry) -> tuple[KVPart, ...]:
        if self.keeps_windows and entry.has_window:
            return (KVPart.GLOBAL, KVPart.WINDOW)
        return (KVPart.GLOBAL,)

    def _begin(
        self, store: Store, moves: Sequence[RecordMove], pinned: tuple[BlockId, ...] | None = None
    ) -> None:
        """``pinned``: once per ``pin``; the moves' blocks if each was pinned for itself."""
        blocks = tuple(move.block for move in moves) if pinned is None else pinned
        is_demotion = pinned is not None
        self._running.append(_Running(store, blocks, self._clock.now_s(), is_demotion))
