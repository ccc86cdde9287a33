"""Segment files: the ones that this process appends to, and those it reads from.

A process writes segments of its own, one per day of expiry, and holds the lock of each for as
long as it may still grow: a segment without a row that says "sealed" and without a lock is a
dead process's. Knows files and their rows in the index, not the records in them.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.disk import rows
from headwater.disk.files import Files

SEGMENT_SUFFIX = ".seg"
SYNC_BYTES = 2 * 2**20  # so much is written between two syncs
MAX_OPEN_DAYS = 8


@dataclass(slots=True)
class OpenSegment:
    """A segment that grows: [0, published) is in the index, [published, end) is being written."""

    segment_id: int
    name: str
    day: int
    descriptor: int
    published_bytes: int = 0
    end_bytes: int = 0
    unsynced_bytes: int = 0
    is_broken: bool = False  # a write failed: nothing after ``published_bytes`` counts


@dataclass(frozen=True, slots=True)
class Slot:
    segment: OpenSegment
    offset: int


class SegmentWriters:
    """One batch at a time: ``reserve`` in a transaction, ``write``, ``sync``, then
    ``seal_retired`` in the transaction that publishes, and ``committed`` after it.

    ``undo`` when the reserving transaction failed; ``fail`` when anything after it did.
    """

    def __init__(self, files: Files, folder: Path, segment_bytes: int) -> None:
        self._files = files
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._open: OrderedDict[int, OpenSegment] = OrderedDict()  # by day, oldest first
        self._retired: list[OpenSegment] = []  # to be sealed by the next transaction
        self._created: list[OpenSegment] = []  # in a transaction that has not ended
        self._in_batch: dict[int, OpenSegment] = {}

    def reserve(self, db: sqlite3.Connection, day: int, span_bytes: int) -> Slot:
        """Room for a record that expires on ``day``, counted in the index before it is written."""
        segment = self._open.get(day)
        if segment and segment.end_bytes and (segment.end_bytes + span_bytes > self._segment_bytes):
            self._retire(segment)
            segment = None
        if segment is None:
            while len(self._open) >= MAX_OPEN_DAYS:
                self._retire(next(iter(self._open.values())))
            segment = self._create(db, day)
        slot = Slot(segment, segment.end_bytes)
        segment.end_bytes += span_bytes
        self._in_batch[segment.segment_id] = segment
        rows.set_segment_bytes(db, segment.segment_id, segment.end_bytes)
        return slot

    def reserved(self) -> None:
        """The transaction that reserved was committed."""
        self._created.clear()

    def undo(self) -> None:
        """It was not, and nothing was written."""
        self._discard_created()
        for segment in self._in_batch.values():
            segment.end_bytes = segment.published_bytes
        self._in_batch.clear()

    def write(self, slot: Slot, data: Sequence[memoryview]) -> None:
        """Raises OSError; the segment is then broken and the rest of its batch with it."""
        segment = slot.segment
        try:
            self._files.write(segment.descriptor, data, slot.offset)
            segment.unsynced_bytes += sum(piece.nbytes for piece in data)
            if segment.unsynced_bytes >= SYNC_BYTES:
                self._sync(segment)
        except OSError:
            segment.is_broken = True
            raise

    def sync(self) -> list[OSError]:
        """All of the batch is on the disk; segments that would not sync are broken."""
        errors = []
        for segment in self._in_batch.values():
            if segment.unsynced_bytes and not segment.is_broken:
                try:
                    self._sync(segment)
                except OSError as error:
                    # What the disk has of it is unknown, and a second sync would not tell.
                    segment.is_broken = True
                    errors.append(error)
        return errors

    def seal_retired(self, db: sqlite3.Connection) -> list[str]:
        """Those that grow no more, in the index; gives the files that turned out empty."""
        for segment in list(self._open.values()):
            if segment.is_broken:
                self._retire(segment)
        for segment in self._retired:
            size = segment.published_bytes if segment.is_broken else segment.end_bytes
            if segment.is_broken:
                with contextlib.suppress(OSError):  # the file is longer then, and counted so
                    self._files.truncate(segment.descriptor, size)
            rows.seal(db, segment.segment_id, size)
        return rows.delete_empty(db, (segment.segment_id for segment in self._retired))

    def committed(self) -> None:
        """What ``seal_retired`` wrote and all of the batch is published."""
        for segment in self._in_batch.values():
            if not segment.is_broken:
                segment.published_bytes = segment.end_bytes
        for segment in self._retired:
            self._close(segment)
        self._retired.clear()
        self._in_batch.clear()
        self._created.clear()

    def fail(self) -> None:
        """The publishing transaction failed: nothing of the batch is there."""
        self._discard_created()
        for segment in self._in_batch.values():
            segment.is_broken = True
            if segment.day in self._open and self._open[segment.day] is segment:
                self._retire(segment)
        self._in_batch.clear()

    def retire_before(self, day: int | None) -> None:
        """No more records for days before ``day`` (None: for any): to be sealed."""
        for segment in list(self._open.values()):
            if day is None or segment.day < day:
                self._retire(segment)

    def close(self) -> None:
        """Let go of everything. What was not sealed is sealed by whoever opens next."""
        for segment in [*self._open.values(), *self._retired]:
            self._close(segment)
        self._open.clear()
        self._retired.clear()

    def _create(self, db: sqlite3.Connection, day: int) -> OpenSegment:
        """Row, file and lock within one transaction: nobody sees one without the others."""
        name = f"{day}-{secrets.token_hex(8)}{SEGMENT_SUFFIX}"
        segment_id = rows.add_segment(db, name, day)
        descriptor = self._files.create(self._folder / name)
        segment = OpenSegment(segment_id, name, day, descriptor)
        self._created.append(segment)
        self._open[day] = segment
        self._files.try_lock(descriptor, shared=False)
        return segment

    def _retire(self, segment: OpenSegment) -> None:
        del self._open[segment.day]
        self._retired.append(segment)

    def _discard_created(self) -> None:
        for segment in self._created:
            self._in_batch.pop(segment.segment_id, None)
            if self._open.get(segment.day) is segment:
                del self._open[segment.day]
            if segment in self._retired:
                self._retired.remove(segment)
            self._close(segment)
            with contextlib.suppress(OSError):
                self._files.unlink(self._folder / segment.name)
        self._created.clear()

    def _sync(self, segment: OpenSegment) -> None:
        self._files.sync(segment.descriptor)
        segment.unsynced_bytes = 0

    def _close(self, segment: OpenSegment) -> None:
        with contextlib.suppress(OSError):
            self._files.close(segment.descriptor)


class SegmentReaders:
    """Descriptors to read with, a bounded number of them, shared by threads."""

    def __init__(self, files: Files, folder: Path, max_open: int) -> None:
        self._files = files
        self._folder = folder
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Shared] = OrderedDict()  # the last used last

    def read(self, name: str, into: Sequence[memoryview], offset: int) -> int:
        """Fill ``into``; gives fewer bytes only at the file's end. Raises OSError."""
        with self._opened(name) as descriptor:
            return self._files.read(descriptor, into, offset)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        with self._lock:
            shared = self._open.get(name)
            if shared is None:
                shared = _Shared(self._files.open(self._folder / name, writable=False))
                self._open[name] = shared
                # A prompt's records lie one after another, and are read in this order.
                self._files.expect_order(shared.descriptor)
            self._open.move_to_end(name)
            shared.num_users += 1
            surplus = []
            while len(self._open) > self._max_open:
                surplus.append(self._open.popitem(last=False)[1])
            self._drop(surplus)
        try:
            yield shared.descriptor
        finally:
            with self._lock:
                shared.num_users -= 1
                if shared.is_dropped and not shared.num_users:
                    self._files.close(shared.descriptor)

    def forget(self, names: Iterable[str]) -> None:
        """Files that are gone."""
        with self._lock:
            self._drop([self._open.pop(name) for name in names if name in self._open])

    def close(self) -> None:
        with self._lock:
            self._drop(list(self._open.values()))
            self._open.clear()

    def _drop(self, some: Iterable[_Shared]) -> None:
        for shared in some:
            shared.is_dropped = True
            if not shared.num_users:
                self._files.close(shared.descriptor)


@dataclass(slots=True, eq=False)
class _Shared:
    descriptor: int
    num_users: int = 0
    is_dropped: bool = False


def drop_files(files: Files, folder: Path, names: Iterable[str]) -> list[OSError]:
    """Segments that no row names any more. Cut to nothing first: another process may have the
    file open, and its space must be free now."""
    errors = []
    for name in names:
        path = folder / name
        try:
            descriptor = files.open(path, writable=True)
            try:
                files.truncate(descriptor, 0)
            finally:
                files.close(descriptor)
            files.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            errors.append(error)  # the next sweep finds the file and tries again
    return errors


def wipe(files: Files, folder: Path, name: str, offset: int, num_bytes: int) -> None:
    """Overwrite a removed record, so that it cannot come back with a rebuilt index."""
    zeros = memoryview(bytes(min(num_bytes, 2**20)))
    with contextlib.suppress(OSError):  # the file went meanwhile, or the record stays dead weight
        descriptor = files.open(folder / name, writable=True)
        try:
            for at in range(0, num_bytes, len(zeros)):
                files.write(descriptor, [zeros[: num_bytes - at]], offset + at)
        finally:
            files.close(descriptor)
