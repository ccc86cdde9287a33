"""Parts for the tests of the tiers' threads: device memory in bytearrays, a store with a door
that tests can shut or break, prompts as chains of records. The stores behind it are real."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from disk_parts import WEEK

from headwater.core.blocks import BlockId, PrefixKey
from headwater.core.cache import (
    KVPart,
    MissReason,
    RecordMeta,
    Retention,
    StoredRecord,
    StoreStats,
    Tier,
)
from headwater.core.errors import RecordLost
from headwater.core.ports import RecordMove, RecordStore, StoredRow
from headwater.disk.host import HostStore
from headwater.disk.tiers_look import window_meta

SIZES = {KVPart.GLOBAL: 300, KVPart.WINDOW: 120}
LIMIT_S = 10.0


class RealClock:
    def now_s(self) -> float:
        return time.monotonic()


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s, "it did not happen"
        time.sleep(0.0005)


def num_threads() -> int:
    return sum(thread.name.startswith("headwater-kv-") for thread in threading.enumerate())


class ArrayMemory:
    """``BlockMemory`` of which a test can see every byte and every call."""

    def __init__(self, num_blocks: int = 64, *, has_window: bool = False) -> None:
        self._sizes = SIZES if has_window else {**SIZES, KVPart.WINDOW: 0}
        self._blocks = {
            part: [bytearray(size) for _ in range(num_blocks)] for part, size in self._sizes.items()
        }
        self.complete: list[tuple[BlockId, KVPart]] = []

    def part_bytes(self, part: KVPart) -> int:
        return self._sizes[part]

    def write_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        whole = memoryview(self._blocks[part][block])
        return [whole[:100], whole[100:]]

    def written(self, block: BlockId, part: KVPart) -> None:
        self.complete.append((block, part))

    def read_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        return self.write_buffers(block, part)

    def copy(self, source: BlockId, target: BlockId) -> None:
        raise AssertionError("tiers never copy within the device")

    def bytes_of(self, block: int, part: KVPart = KVPart.GLOBAL) -> bytes:
        return bytes(self._blocks[part][block])

    def fill(self, move: RecordMove) -> None:
        self._blocks[move.meta.part][move.block][:] = payload(move.meta)


@dataclass
class Door:
    """What happens to calls of one kind: ``shut`` holds them up, ``error`` is raised."""

    error: Exception | None = None
    opened: threading.Event = field(default_factory=threading.Event)
    num_waiting: int = 0
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.opened.set()

    def shut(self) -> None:
        self.opened.clear()

    def open(self) -> None:
        self.opened.set()

    def pass_through(self) -> None:
        self.num_calls += 1
        self.num_waiting += 1
        assert self.opened.wait(LIMIT_S)
        self.num_waiting -= 1
        if self.error is not None:
            raise self.error


class DoorStore:
    """A real store behind doors, one per kind of call; says it is ``tier``'s."""

    def __init__(self, tier: Tier, inner: RecordStore | None = None) -> None:
        self.tier = tier
        self.inner = inner or HostStore(max_bytes=2**24, clock=RealClock())
        self.doors = {
            name: Door()
            for name in ("find", "children", "put", "read", "touch", "remove", "absence", "stats")
        }
        self.calls: list[tuple[str, object]] = []
        self.is_closed = False

    def _at(self, name: str, what: object) -> None:
        self.calls.append((name, what))
        self.doors[name].pass_through()

    def _ours(self, record: StoredRecord) -> StoredRecord:
        return replace(record, tier=self.tier)

    def find(self, keys: Sequence[PrefixKey]) -> list[StoredRecord | None]:
        self._at("find", len(keys))
        return [record and self._ours(record) for record in self.inner.find(keys)]

    def children(self, parent: PrefixKey, limit: int) -> list[StoredRecord]:
        self._at("children", limit)
        return [self._ours(record) for record in self.inner.children(parent, limit)]

    def put(self, meta: RecordMeta, data: Sequence[memoryview], retention: Retention) -> bool:
        self._at("put", meta)
        return self.inner.put(meta, data, retention)

    def read(self, meta: RecordMeta, into: Sequence[memoryview]) -> None:
        self._at("read", meta)
        self.inner.read(meta, into)

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None:
        self._at("touch", tuple(keys))
        self.inner.touch(keys, retention)

    def remove(self, keys: Sequence[PrefixKey]) -> None:
        self._at("remove", tuple(keys))
        self.inner.remove(keys)

    def absence(self, key: PrefixKey) -> MissReason:
        self._at("absence", key)
        return self.inner.absence(key)

    def stats(self) -> StoreStats:
        self._at("stats", None)
        return replace(self.inner.stats(), tier=self.tier)

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()

    def names(self, *wanted: str) -> list[str]:
        return [name for name, _ in self.calls if name in wanted]


class Damaged(HostStore):
    """A store in which one record does not pass its checks, once."""

    def __init__(self, key: PrefixKey) -> None:
        super().__init__(max_bytes=2**24, clock=RealClock())
        self._damaged_key = key

    def read(self, meta: RecordMeta, into: Sequence[memoryview]) -> None:
        if meta.key == self._damaged_key and self.find([meta.key]) != [None]:
            into[0][:] = bytes(len(into[0]))
            self.remove([meta.key])
            raise RecordLost("checksum", is_damaged=True)
        super().read(meta, into)


def windows(metas: Sequence[RecordMeta]) -> list[RecordMeta]:
    return [window_meta(meta) for meta in metas]


def payload(meta: RecordMeta) -> bytes:
    """Bytes that no other record has."""
    return random.Random(meta.key).randbytes(SIZES[meta.part])


def keep(store: RecordStore, metas: Sequence[RecordMeta], retention: Retention = WEEK) -> None:
    """Put them there from outside, as another process would."""
    inner = store.inner if isinstance(store, DoorStore) else store
    for meta in metas:
        assert inner.put(meta, [memoryview(payload(meta))], retention)


def moves(metas: Sequence[RecordMeta], first_block: int = 0) -> list[RecordMove]:
    return [RecordMove(meta, BlockId(first_block + i)) for i, meta in enumerate(metas)]


def metas_of(rows: Sequence[StoredRow]) -> list[RecordMeta]:
    return [row.record.meta for row in rows]
