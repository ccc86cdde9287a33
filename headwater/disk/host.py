"""``core.ports.RecordStore`` in the process's own memory: the tier between device and disk.

    put --copy--> one buffer per record --copy--> read
                  evicted: the least recently used record that no kept record continues

Tails go before heads because only a chain's last record is a candidate: a head without
its tail is still a hit, a tail without its head is none. Knows no tensors, files or threads;
anything here is gone with the process, so there are no checksums. One lock guards all,
held for one record's copy at the longest.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.cache import (
    KVPart,
    MissReason,
    RecordMeta,
    Retention,
    StoredRecord,
    StoreStats,
    Tier,
)
from headwater.core.errors import ConfigError, RecordLost
from headwater.core.ports import Clock

# What a record costs besides its KV: meta, tokens, places in the tables. It counts
# against the cap, so that many small records cannot pass it unseen.
RECORD_OVERHEAD_BYTES = 4096
MAX_TOMBSTONES = 65_536


@dataclass(slots=True)
class _Record:
    stored: StoredRecord
    data: bytearray
    expires_s: float
    used: int  # the store's count of uses at its last one

    @property
    def num_bytes(self) -> int:
        """What it counts against the cap."""
        return len(self.data) + RECORD_OVERHEAD_BYTES


class HostStore:
    """Records in host memory under a hard cap. Costs: O(1) per key; room is made in
    O(log records) per evicted record; expired records are looked for when one may be there."""

    def __init__(self, *, max_bytes: int, clock: Clock) -> None:
        """``clock`` is what retention is counted on."""
        if max_bytes < 1:
            raise ConfigError(f"host_cache_bytes must be >= 1 for a host tier, got {max_bytes}")
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._is_closed = False
        self._records: dict[PrefixKey, _Record] = {}
        # Under a parent, the last used child is last.
        self._children: dict[PrefixKey, dict[PrefixKey, None]] = {}
        # A heap of (used, key). Valid are those whose record was not used since and is
        # continued by no other; the rest are dropped when they come up.
        self._leaves: list[tuple[int, PrefixKey]] = []
        self._tombstones: OrderedDict[PrefixKey, MissReason] = OrderedDict()
        self._first_expiry_s = math.inf  # no record expires before
        self._num_bytes = 0
        self._num_uses = 0
        self._num_found = self._num_loaded = self._num_loaded_bytes = 0
        self._num_put = self._num_put_bytes = self._num_refused = 0
        self._num_evicted = self._num_expired = self._num_damaged = self._num_errors = 0
        self._last_error = ""

    # Look

    def find(self, keys: Sequence[PrefixKey]) -> list[StoredRecord | None]:
        with self._lock:
            now_s = self._clock.now_s()
            found = [self._live(key, now_s) for key in keys]
            self._num_found += sum(record is not None for record in found)
            return [None if record is None else record.stored for record in found]

    def children(self, parent: PrefixKey, limit: int) -> list[StoredRecord]:
        with self._lock:
            now_s = self._clock.now_s()
            found: list[StoredRecord] = []
            for key in reversed(self._children.get(parent, {})):
                if len(found) >= limit:
                    break
                record = self._live(key, now_s)
                if record is not None:
                    found.append(record.stored)
            return found

    def absence(self, key: PrefixKey) -> MissReason:
        with self._lock:
            record = self._records.get(key)
            if record is not None and record.expires_s <= self._clock.now_s():
                return MissReason.EXPIRED
            return self._tombstones.get(key, MissReason.NEW)

    def identities_of_first_block(self, tokens: Sequence[int]) -> list[CacheIdentity]:
        """Under which identities a record begins as ``tokens`` do. O(records)."""
        wanted = tuple(tokens)
        with self._lock:
            now_s = self._clock.now_s()
            metas = [r.stored.meta for r in self._records.values() if r.expires_s > now_s]
        return list(
            dict.fromkeys(
                meta.identity
                for meta in metas
                if meta.start == 0 and meta.part is KVPart.GLOBAL and meta.tokens == wanted
            )
        )

    def stats(self) -> StoreStats:
        with self._lock:
            self._drop_expired()
            return StoreStats(
                tier=Tier.HOST,
                num_records=len(self._records),
                num_bytes=self._num_bytes,
                max_bytes=self._max_bytes,
                num_found=self._num_found,
                num_loaded=self._num_loaded,
                num_loaded_bytes=self._num_loaded_bytes,
                num_put=self._num_put,
                num_put_bytes=self._num_put_bytes,
                num_refused=self._num_refused,
                num_evicted=self._num_evicted,
                num_expired=self._num_expired,
                num_damaged=self._num_damaged,
                num_errors=self._num_errors,
                is_writable=not self._is_closed,
                last_error=self._last_error,
            )

    # Bytes in and out

    def put(self, meta: RecordMeta, data: Sequence[memoryview], retention: Retention) -> bool:
        if retention.keep_s <= 0:
            return False
        with self._lock:
            if self._is_closed:
                return False
            now_s = self._clock.now_s()
            present = self._live(meta.key, now_s)
            if present is not None:
                self._num_refused += 1
                self._use(meta.key, present, now_s + retention.keep_s)
                return present.stored.meta == meta
            if meta.key in self._records:
                self._drop_expired()
            size = sum(len(piece) for piece in data)
            buffer = self._make_room(size, meta.parent)
            if buffer is None:
                return False
            start = 0
            for piece in data:
                buffer[start : start + len(piece)] = piece
                start += len(piece)
            self._drop_shorter(meta)
            self._add(meta, buffer, now_s + retention.keep_s)
            self._num_put += 1
            self._num_put_bytes += size
            return True

    def read(self, meta: RecordMeta, into: Sequence[memoryview]) -> None:
        with self._lock:
            record = self._live(meta.key, self._clock.now_s())
            if record is None:
                raise RecordLost("the record is no longer in host memory", is_damaged=False)
            size = sum(len(piece) for piece in into)
            if record.stored.meta != meta or len(record.data) != size:
                self._drop(meta.key, MissReason.DAMAGED)
                self._num_damaged += 1
                raise RecordLost(
                    "the record in host memory is not the one that was asked for", is_damaged=True
                )
            source = memoryview(record.data)
            start = 0
            for piece in into:
                piece[:] = source[start : start + len(piece)]
                start += len(piece)
            self._num_loaded += 1
            self._num_loaded_bytes += size

    # Keep and let go

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None:
        with self._lock:
            now_s = self._clock.now_s()
            for key in keys:
                record = self._live(key, now_s)
                if record is not None:
                    self._use(key, record, now_s + retention.keep_s)

    def remove(self, keys: Sequence[PrefixKey]) -> None:
        with self._lock:
            for key in keys:
                self._tombstones.pop(key, None)
                if key in self._records:
                    self._drop(key, None)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._records.clear()
            self._children.clear()
            self._leaves.clear()
            self._tombstones.clear()
            self._num_bytes = 0

    # Inside: all with the lock held

    def _live(self, key: PrefixKey, now_s: float) -> _Record | None:
        record = self._records.get(key)
        return record if record is not None and record.expires_s > now_s else None

    def _add(self, meta: RecordMeta, buffer: bytearray, expires_s: float) -> None:
        self._num_uses += 1
        stored = StoredRecord(meta, Tier.HOST, len(buffer))
        record = _Record(stored, buffer, expires_s, self._num_uses)
        self._records[meta.key] = record
        self._children.setdefault(meta.parent, {})[meta.key] = None
        self._tombstones.pop(meta.key, None)
        self._first_expiry_s = min(self._first_expiry_s, expires_s)
        self._num_bytes += record.num_bytes
        self._offer(meta.key, record)

    def _use(self, key: PrefixKey, record: _Record, expires_s: float) -> None:
        self._num_uses += 1
        record.used = self._num_uses
        record.expires_s = max(record.expires_s, expires_s)
        siblings = self._children[record.stored.meta.parent]
        del siblings[key]
        siblings[key] = None
        self._offer(key, record)

    def _offer(self, key: PrefixKey, record: _Record) -> None:
        """It may be evicted, unless another record continues it."""
        if key in self._children:
            return
        heapq.heappush(self._leaves, (record.used, key))
        if len(self._leaves) > 64 + 2 * len(self._records):
            self._leaves = [leaf for leaf in self._leaves if self._is_valid(leaf)]
            heapq.heapify(self._leaves)

    def _is_valid(self, leaf: tuple[int, PrefixKey]) -> bool:
        used, key = leaf
        record = self._records.get(key)
        return record is not None and record.used == used and key not in self._children

    def _drop(self, key: PrefixKey, why: MissReason | None) -> _Record:
        record = self._records.pop(key)
        self._num_bytes -= record.num_bytes
        parent = record.stored.meta.parent
        siblings = self._children[parent]
        del siblings[key]
        if not siblings:
            del self._children[parent]
            if parent in self._records:
                self._offer(parent, self._records[parent])
        if why is not None:
            self._tombstones[key] = why
            self._tombstones.move_to_end(key)
            if len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
        return record

    def _drop_shorter(self, meta: RecordMeta) -> None:
        """Tails of the same place that ``meta`` goes on from: it says all that they say."""
        for key in list(self._children.get(meta.parent, ())):
            tail = self._records[key].stored.meta
            num_tokens = len(tail.tokens)
            if num_tokens < len(meta.tokens) and tail.tokens == meta.tokens[:num_tokens]:
                self._drop(key, None)

    def _drop_expired(self) -> None:
        now_s = self._clock.now_s()
        if now_s < self._first_expiry_s:
            return
        for key in [key for key, record in self._records.items() if record.expires_s <= now_s]:
            self._drop(key, MissReason.EXPIRED)
            self._num_expired += 1
        self._first_expiry_s = min((r.expires_s for r in self._records.values()), default=math.inf)

    def _make_room(self, size: int, parent: PrefixKey) -> bytearray | None:
        """A buffer of ``size`` bytes within the cap. None where only the record's own
        parent could make room: a head is worth more than its tail."""
        wanted = size + RECORD_OVERHEAD_BYTES
        if wanted > self._max_bytes:
            self._count_error(f"a record of {size} bytes does not fit in {self._max_bytes}")
            return None
        if self._num_bytes + wanted > self._max_bytes:
            self._drop_expired()
        buffer: bytearray | None = None
        passed_over: list[tuple[int, PrefixKey]] = []
        while self._num_bytes + wanted > self._max_bytes and self._leaves:
            leaf = heapq.heappop(self._leaves)
            if not self._is_valid(leaf):
                continue
            if leaf[1] == parent:
                passed_over.append(leaf)
                continue
            record = self._drop(leaf[1], MissReason.EVICTED)
            self._num_evicted += 1
            # Memory that was in use is quicker than what the system must find first.
            if len(record.data) == size:
                buffer = record.data
        for leaf in passed_over:
            heapq.heappush(self._leaves, leaf)
        if self._num_bytes + wanted > self._max_bytes:
            return None
        try:
            return buffer if buffer is not None else bytearray(size)
        except MemoryError:
            self._count_error("the system has no memory for a record")
            return None

    def _count_error(self, error: str) -> None:
        self._num_errors += 1
        self._last_error = error
