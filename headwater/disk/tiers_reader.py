"""The reading side of the tiers: lookups and loads in a thread of their own.

    looks ---first--> [reader thread] --> StoredPrefix
    loads --by turns, one record each--> host.read, else disk.read --> the block

Callers are a step's thread: they put work into a queue and read flags, and never wait.
The thread holds the queue's lock only to take the next piece of work. Knows the stores,
the device's bytes and a clock; who wants what is the worker's business.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from headwater.core.blocks import CacheIdentity
from headwater.core.cache import KVPart, MissReason, RecordMeta, StoredRecord, Tier
from headwater.core.errors import InvalidChange, RecordLost
from headwater.core.ports import BlockMemory, Clock, RecordMove, RecordStore, StoredPrefix
from headwater.disk.tiers_cost import CostGuess, LoadCost
from headwater.disk.tiers_faults import Faults
from headwater.disk.tiers_look import Distrusted, PrefixLook
from headwater.disk.tiers_pause import let_others_run

MAX_QUEUED_LOOKS = 1024
# Cautious: a disk that is slower than this is rare.
GUESSES = {
    Tier.HOST: CostGuess(fixed_s=0.0003, bytes_per_s=1e9),
    Tier.DISK: CostGuess(fixed_s=0.001, bytes_per_s=300e6),
}


class PendingLook:
    """``core.ports.Lookup``."""

    def __init__(self, tokens: tuple[int, ...], identity: CacheIdentity, first_row: int) -> None:
        self.tokens, self.identity, self.first_row = tokens, identity, first_row
        self._result: StoredPrefix | None = None

    @property
    def is_done(self) -> bool:
        return self._result is not None

    def result(self) -> StoredPrefix:
        """Raises InvalidChange before ``is_done``."""
        if self._result is None:
            raise InvalidChange("lookup: not done, so it has no result")
        return self._result

    def finish(self, result: StoredPrefix) -> None:
        self._result = result

    def fail(self) -> None:
        self.finish(StoredPrefix(first_row=self.first_row, reason=MissReason.UNAVAILABLE))


class PendingLoad:
    """``core.ports.Load``. Changed under the reader's lock, read without."""

    def __init__(self, moves: Sequence[RecordMove], lock: threading.Condition) -> None:
        self._moves = tuple(moves)
        self._lock = lock
        self._num_begun = 0  # moves [num_loaded, num_begun) are being read: at most one
        self._num_loaded = 0
        self._end: MissReason | None = None  # no further record, for this reason
        self._is_reading = False

    @property
    def num_loaded(self) -> int:
        return self._num_loaded

    @property
    def is_done(self) -> bool:
        # In this order: a move is being read before it no longer counts as left.
        return not self.num_left and not self._is_reading

    @property
    def failure(self) -> MissReason | None:
        """Why it ended before the last move; SLOW after ``cancel``."""
        return self._end if self._num_loaded < len(self._moves) else None

    @property
    def num_left(self) -> int:
        """Records that would still be begun."""
        return 0 if self._end is not None else len(self._moves) - self._num_begun

    def cancel(self) -> None:
        with self._lock:
            self.end(MissReason.SLOW)

    # For the reader, with the lock held

    def end(self, reason: MissReason) -> None:
        if self._end is None:
            self._end = reason

    def begin(self) -> RecordMove | None:
        """The next move, for the reader to read now; None: there is none, or it was ended."""
        if not self.num_left:
            return None
        move = self._moves[self._num_begun]
        self._is_reading = True
        self._num_begun += 1
        return move

    def ended(self, failure: MissReason | None) -> None:
        """The move that was begun is complete, or failed."""
        if failure is None:
            self._num_loaded += 1
        else:
            # A cancelled load whose last record failed says what failed.
            self._end = failure
        self._is_reading = False


class TierReader:
    """One thread. ``stores`` are asked in their order, fastest first."""

    def __init__(
        self,
        stores: Sequence[tuple[Tier, RecordStore]],
        memory: BlockMemory,
        *,
        look: PrefixLook,
        clock: Clock,
        faults: Faults,
        distrust: Callable[[Sequence[Distrusted]], None],
    ) -> None:
        """``distrust`` is told of records that are not what their keys say."""
        self._stores = tuple(stores)
        self._memory = memory
        self._look = look
        self._clock = clock
        self._faults = faults
        self._distrust = distrust
        self._part_bytes = {part: memory.part_bytes(part) for part in KVPart}
        self._costs = {tier: LoadCost(GUESSES[tier]) for tier, _ in stores}
        self._slowest = stores[-1][0]
        self._changed = threading.Condition()
        self._looks: deque[PendingLook] = deque()
        self._loads: deque[PendingLoad] = deque()
        self._is_busy = False  # with a piece of work that is in no queue
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="headwater-kv-read", daemon=True)
        self._thread.start()

    # From a step's thread

    def look(self, tokens: Sequence[int], identity: CacheIdentity, first_row: int) -> PendingLook:
        look = PendingLook(tuple(tokens), identity, first_row)
        with self._changed:
            if self._is_closing or len(self._looks) >= MAX_QUEUED_LOOKS:
                look.fail()
            else:
                self._looks.append(look)
                self._changed.notify_all()
        return look

    def load(self, moves: Sequence[RecordMove]) -> PendingLoad:
        load = PendingLoad(moves, self._changed)
        with self._changed:
            if self._is_closing:
                load.end(MissReason.UNAVAILABLE)
            elif moves:
                self._loads.append(load)
                self._changed.notify_all()
        return load

    def predicted_load_s(self, records: Sequence[StoredRecord]) -> float:
        """Loads take turns, so of each other one at most as much comes before the end as
        the new one has itself."""
        now_s = self._clock.now_s()
        own_s = sum(
            self._costs[record.tier].predict_s(record.num_bytes, now_s)
            for record in records
            if record.tier in self._costs
        )
        slowest = self._costs[self._slowest]
        block_s = slowest.predict_s(self._part_bytes[KVPart.GLOBAL], now_s)
        with self._changed:
            others_s = [load.num_left * block_s for load in self._loads]
        return own_s + sum(min(own_s, other_s) for other_s in others_s)

    # From the writers' threads

    def wait_idle(self, timeout_s: float) -> None:
        """Until there is nothing to read, ``timeout_s`` at the longest."""
        with self._changed:
            self._changed.wait_for(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        return self._is_closing or not (self._is_busy or self._looks or self._loads)

    # The end

    def close(self, timeout_s: float) -> bool:
        """Ends everything that is queued. False when the thread hangs in a store: it is
        left behind, and its last record's block must not be used again."""
        with self._changed:
            self._is_closing = True
            for look in self._looks:
                look.fail()
            for load in self._loads:
                load.end(MissReason.UNAVAILABLE)
            self._looks.clear()
            self._loads.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        while (work := self._take()) is not None:
            if isinstance(work, PendingLook):
                self._run_look(work)
            else:
                self._run_move(*work)
            with self._changed:
                self._is_busy = False
                if self._is_idle():
                    self._changed.notify_all()

    def _take(self) -> PendingLook | tuple[PendingLoad, RecordMove] | None:
        """The next piece of work; None at the end."""
        with self._changed:
            while not self._is_closing:
                self._is_busy = True
                if self._looks:
                    return self._looks.popleft()
                while self._loads:
                    load = self._loads.popleft()
                    move = load.begin()
                    if load.num_left:
                        self._loads.append(load)
                    if move is not None:
                        return load, move
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait()
        return None

    def _run_look(self, look: PendingLook) -> None:
        try:
            result, distrusted = self._look.look(look.tokens, look.identity, look.first_row)
        except Exception as error:
            self._faults.count(self._slowest, "look", error)
            look.fail()
            return
        look.finish(result)
        if distrusted:
            self._distrust(distrusted)

    def _run_move(self, load: PendingLoad, move: RecordMove) -> None:
        try:
            failure = self._read(move)
        except Exception as error:
            self._faults.count(self._slowest, "load", error)
            failure = MissReason.UNAVAILABLE
        with self._changed:
            load.ended(failure)

    def _read(self, move: RecordMove) -> MissReason | None:
        """From the first tier that gives it whole; None is success."""
        meta: RecordMeta = move.meta
        failure = MissReason.EVICTED
        for tier, store in self._stores:
            start_s = self._clock.now_s()
            into = self._memory.write_buffers(move.block, meta.part)
            try:
                store.read(meta, into)
            except RecordLost as error:
                if error.is_damaged:
                    failure = MissReason.DAMAGED
                continue
            except Exception as error:
                self._faults.count(tier, "load", error)
                if failure is MissReason.EVICTED:
                    failure = MissReason.UNAVAILABLE
                continue
            self._memory.written(move.block, meta.part)
            end_s = self._clock.now_s()
            self._costs[tier].observe(self._part_bytes[meta.part], end_s - start_s, end_s)
            if tier is Tier.HOST:  # a file lets others run by itself
                let_others_run()
            return None
        return failure
