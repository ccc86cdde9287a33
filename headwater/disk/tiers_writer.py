"""The writing side of one tier: a thread that owns everything that changes its store.

    removals, touches --first--> [writer thread] --> store
    moves --in batches, when nothing is read--> put, put_many
    numbers: asked for once a second, kept for whoever wants them

Callers are a step's thread and never wait. Blocks stay the device's until their move is
done; the caller pins them and bounds how many. Knows one store, the device's bytes and a
gate that says when reading is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, runtime_checkable

from headwater.core.blocks import PrefixKey
from headwater.core.cache import Retention, StoreStats, Tier
from headwater.core.ports import BlockMemory, Clock, RecordMove, RecordStore
from headwater.disk.publishing import NewRecord
from headwater.disk.tiers_faults import Faults
from headwater.disk.tiers_pause import let_others_run

MAX_QUEUED_MOVES = 4096
MAX_QUEUED_KEYS = 65_536
# One commit covers a batch. Blocks are pinned for its length, and a crash loses it.
BATCH_BYTES = 8 * 2**20
# Writes give way to reads, but not for ever.
MAX_WAIT_S = 1.0
UPKEEP_S = 1.0  # touches and numbers

_P = ParamSpec("_P")


@runtime_checkable
class BatchStore(Protocol):
    """A store that keeps several records with one commit."""

    def put_many(self, records: Sequence[NewRecord]) -> list[bool]:
        """As ``RecordStore.put`` for each of them."""
        ...


class PendingStore:
    """``core.ports.Store``."""

    def __init__(self, num_moves: int, failed: Sequence[RecordMove] = ()) -> None:
        self._num_left = num_moves
        self._failed = list(failed)

    @property
    def is_done(self) -> bool:
        return self._num_left == 0

    @property
    def failed(self) -> Sequence[RecordMove]:
        return self._failed

    def one_done(self, move: RecordMove, *, is_kept: bool) -> None:
        if not is_kept:
            self._failed.append(move)
        self._num_left -= 1


@dataclass(frozen=True, slots=True)
class _Write:
    move: RecordMove
    retention: Retention
    store: PendingStore


class TierWriter:
    """One thread for one store. Closes the store at its end."""

    def __init__(
        self,
        tier: Tier,
        store: RecordStore,
        memory: BlockMemory,
        *,
        clock: Clock,
        faults: Faults,
        wait_to_write: Callable[[float], None] | None,
    ) -> None:
        """``wait_to_write`` returns when reading is over or its seconds are; None: never waits."""
        self._tier = tier
        self._store = store
        self._batches = store if isinstance(store, BatchStore) else None
        self._memory = memory
        self._clock = clock
        self._faults = faults
        self._wait_to_write = wait_to_write
        self._changed = threading.Condition()
        self._writes: deque[_Write] = deque()
        self._num_queued = 0  # with those that are being written
        self._removals: deque[PrefixKey] = deque()
        self._touches: dict[Retention, dict[PrefixKey, None]] = {}
        self._num_touches = 0
        self._upkeep_s = clock.now_s() + UPKEEP_S
        self._closing_until_s: float | None = None
        self._closes_store = True
        self._stats = StoreStats(tier=tier, num_records=0, num_bytes=0, max_bytes=0)
        self._take_stats()
        self._thread = threading.Thread(
            target=self._run, name=f"headwater-kv-{tier.value}", daemon=True
        )
        self._thread.start()

    # From a step's thread

    def write(self, moves: Sequence[RecordMove], retention: Retention) -> PendingStore:
        """A queue that is full, or closed, takes nothing: then it is done at once."""
        with self._changed:
            if self._closing_until_s is not None:
                return PendingStore(0, moves)
            if self._num_queued + len(moves) > MAX_QUEUED_MOVES:
                self._faults.count(self._tier, "queue a write", "the queue is full", len(moves))
                return PendingStore(0, moves)
            store = PendingStore(len(moves))
            self._writes.extend(_Write(move, retention, store) for move in moves)
            self._num_queued += len(moves)
            self._changed.notify()
            return store

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None:
        """Within a second. More than can be kept until then are dropped."""
        with self._changed:
            if self._num_touches + len(keys) > MAX_QUEUED_KEYS:
                self._faults.count(self._tier, "queue a touch", "the queue is full", len(keys))
                return
            self._touches.setdefault(retention, {}).update(dict.fromkeys(keys))
            self._num_touches += len(keys)

    @property
    def num_queued(self) -> int:
        """Moves that are not done."""
        return self._num_queued

    @property
    def stats(self) -> StoreStats:
        num_errors = self._faults.num_errors(self._tier)
        last_error = self._faults.last_error(self._tier)
        stats = self._stats
        return replace(
            stats,
            num_errors=stats.num_errors + num_errors,
            last_error=stats.last_error or last_error,
        )

    # From the reader's thread

    def remove(self, keys: Sequence[PrefixKey]) -> None:
        with self._changed:
            self._removals.extend(keys)
            self._changed.notify()

    # The end

    def begin_close(self, within_s: float, *, closes_store: bool) -> None:
        """Write what is queued for ``within_s`` at the longest and drop the rest.
        ``closes_store`` is False while another thread hangs in the store."""
        with self._changed:
            if self._closing_until_s is None:
                self._closing_until_s = self._clock.now_s() + within_s
                self._closes_store = closes_store
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """False when the thread hangs in the store: it is left behind."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        while self._wait_for_work():
            self._remove()
            if self._clock.now_s() >= self._upkeep_s:
                self._upkeep()
            self._write_batch()
        self._upkeep()
        if self._closes_store:
            self._attempt("close", self._store.close)

    def _wait_for_work(self) -> bool:
        """False at the end, with nothing queued any more."""
        with self._changed:
            while not (self._writes or self._removals) and self._closing_until_s is None:
                left_s = self._upkeep_s - self._clock.now_s()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
            if self._closing_until_s is None:
                return True
            if not self._writes:
                return False
            if self._clock.now_s() < self._closing_until_s:
                return True
            self._faults.count(
                self._tier, "write at the end", "there was no time left", len(self._writes)
            )
            self._finish(self._writes, [False] * len(self._writes))
            self._writes.clear()
            return False

    def _remove(self) -> None:
        with self._changed:
            keys = list(self._removals)
            self._removals.clear()
        if keys:
            self._attempt("remove records", self._store.remove, keys)

    def _upkeep(self) -> None:
        with self._changed:
            touches, self._touches, self._num_touches = self._touches, {}, 0
        for retention, keys in touches.items():
            self._attempt("touch records", self._store.touch, list(keys), retention)
        self._take_stats()
        self._upkeep_s = self._clock.now_s() + UPKEEP_S

    def _write_batch(self) -> None:
        if not self._writes:
            return
        if self._wait_to_write is not None and self._closing_until_s is None:
            self._wait_to_write(MAX_WAIT_S)
        batch = self._take_batch()
        kept = [False] * len(batch)
        if self._batches is None:
            self._attempt("write", self._put, batch[0], kept)
            let_others_run()
        else:
            self._attempt("write", self._put_many, self._batches, batch, kept)
        self._finish(batch, kept)

    def _take_batch(self) -> list[_Write]:
        """What is written with one call: the first write, and where the store takes several
        at once the next ones, up to a batch's bytes."""
        limit_bytes = 1 if self._batches is None else BATCH_BYTES
        batch: list[_Write] = []
        num_bytes = 0
        with self._changed:
            while self._writes and num_bytes < limit_bytes:
                write = self._writes.popleft()
                batch.append(write)
                num_bytes += self._memory.part_bytes(write.move.meta.part)
        return batch

    def _put(self, write: _Write, kept: list[bool]) -> None:
        record = self._record(write)
        kept[:] = [self._store.put(record.meta, record.data, record.retention)]

    def _put_many(self, store: BatchStore, batch: Sequence[_Write], kept: list[bool]) -> None:
        kept[:] = store.put_many([self._record(write) for write in batch])

    def _record(self, write: _Write) -> NewRecord:
        meta = write.move.meta
        data = self._memory.read_buffers(write.move.block, meta.part)
        return NewRecord(meta, data, write.retention)

    def _finish(self, writes: Sequence[_Write] | deque[_Write], kept: Sequence[bool]) -> None:
        for write, is_kept in zip(writes, kept, strict=True):
            write.store.one_done(write.move, is_kept=is_kept)
        with self._changed:
            self._num_queued -= len(writes)

    def _take_stats(self) -> None:
        try:
            self._stats = self._store.stats()
        except Exception as error:
            self._faults.count(self._tier, "count", error)

    def _attempt(
        self, doing: str, act: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs
    ) -> None:
        try:
            act(*args, **kwargs)
        except Exception as error:
            self._faults.count(self._tier, doing, error)
