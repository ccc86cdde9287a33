"""Room and age: drops what expired, evicts under the cap, moves what is spared.

Every victim is one transaction: its rows go (or point to their new place), then its file. Until
the commit readers find the old place, after it the new one. Knows the files and the index;
which go is decided by ``retention`` and ``eviction``.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.core.cache import MissReason
from headwater.disk import rows
from headwater.disk.capacity_plan import Limits
from headwater.disk.eviction import Victim, choose_spared, plan_eviction
from headwater.disk.files import Files
from headwater.disk.index import Index
from headwater.disk.record_format import BadRecord, checksum, decode_header, header_block
from headwater.disk.recovery import recover
from headwater.disk.retention import StoredPiece, expiry_day, is_clock_back, plan_segment_end
from headwater.disk.segments import SegmentWriters, drop_files

log = logging.getLogger("headwater.disk")

# In a transaction, moving records or not; gives the files that go after it.
_Act = Callable[[sqlite3.Connection, bool], list[str]]


@dataclass(slots=True)
class Gone:
    """What upkeep took out of the index since the store opened."""

    num_expired: int = 0
    num_evicted: int = 0
    num_damaged: int = 0
    num_errors: int = 0


class Upkeep:
    """The store's own; called by one thread at a time. Raises OSError and IndexFault."""

    def __init__(
        self, *, index: Index, files: Files, folder: Path, writers: SegmentWriters, limits: Limits
    ) -> None:
        self._index = index
        self._files = files
        self._folder = folder
        self._writers = writers
        self._limits = limits
        self.other_bytes = 0  # of files that are neither segments nor the index
        self.gone = Gone()

    def used_bytes(self, db: sqlite3.Connection) -> int:
        """All files of the folder, what is about to be written included."""
        return rows.segment_bytes(db) + self._index.file_bytes() + self.other_bytes

    def has_room(self, db: sqlite3.Connection, num_bytes: int) -> bool:
        """Whether ``num_bytes`` fit under the cap, of all processes together."""
        limits = self._limits
        kept_free = limits.headroom_bytes + limits.working_bytes
        return self.used_bytes(db) + num_bytes + kept_free <= limits.max_bytes

    def has_free_space(self, num_bytes: int) -> bool:
        """Whether the disk keeps its reserve when ``num_bytes`` are written."""
        free_bytes = self._files.free_bytes(self._folder)
        return free_bytes - num_bytes >= self._limits.reserve_bytes

    def sweep(self, now_s: float) -> None:
        """What must be done now and then: dead processes' files, the clock, expiry."""
        self.other_bytes = recover(self._index, self._files, self._folder).other_bytes
        with self._index.write() as db:
            latest_s = rows.get_fact(db, rows.LATEST_FACT)
            if latest_s is not None and is_clock_back(latest_s, now_s):
                rows.redate(db, now_s)
            rows.set_fact(db, rows.LATEST_FACT, now_s)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """End the segments whose day is over."""
        today = expiry_day(now_s)
        self._writers.retire_before(today)
        self._seal_retired()
        with self._index.read() as db:
            over = rows.segments_over(db, today)
        for row in over:
            self._end_segment(row.segment_id, now_s)

    def evict(self, num_bytes: int, now_s: float) -> None:
        """Make room for ``num_bytes``, as far as that goes."""
        self.expire(now_s)
        before = self.gone.num_evicted
        for may_retire in (True, False):
            missing_bytes = self._missing_bytes(num_bytes)
            if missing_bytes <= 0:
                break
            with self._index.read() as db:
                candidates = rows.evictable(db, now_s)
            victims = plan_eviction(
                candidates,
                need_bytes=missing_bytes + self._limits.spare_bytes,
                max_moved_share=self._limits.max_moved_share,
            )
            for victim in victims:
                self._evict_segment(victim, now_s)
            if may_retire and sum(victim.file_bytes for victim in victims) < missing_bytes:
                self.retire_all()
        if self.gone.num_evicted > before:
            log.info("disk tier: evicted %d records for room", self.gone.num_evicted - before)

    def _missing_bytes(self, num_bytes: int) -> int:
        """How far ``num_bytes`` more would be over what the cap allows."""
        limits = self._limits
        with self._index.read() as db:
            used_bytes = self.used_bytes(db)
        kept_free = limits.headroom_bytes + limits.working_bytes
        return used_bytes + num_bytes + kept_free - limits.max_bytes

    def retire_all(self) -> None:
        """This process writes no more to its segments."""
        self._writers.retire_before(None)
        self._seal_retired()

    def _seal_retired(self) -> None:
        with self._index.write() as db:
            empty = self._writers.seal_retired(db)
        self._writers.committed()
        self._drop_files(empty)

    def _end_segment(self, segment_id: int, now_s: float) -> None:
        def end(db: sqlite3.Connection, may_move: bool) -> list[str]:
            row = rows.segment(db, segment_id)
            if row is None or not row.is_sealed or row.day >= expiry_day(now_s):
                return []  # another process was here first
            plan = plan_segment_end(
                rows.pieces(db, segment_id),
                segment_bytes=row.file_bytes,
                now_s=now_s,
                max_moved_share=self._limits.max_moved_share if may_move else 0.0,
            )
            move = plan.move
            if move is not None and not self._may_move(db, move):
                move = None
            expired = [piece.key for piece in plan.expired]
            rows.delete(db, expired)
            rows.bury(db, expired, MissReason.EXPIRED, self._limits.max_tombstones)
            self.gone.num_expired += len(expired)
            if move is None:
                rows.set_segment_day(db, segment_id, plan.day)
                return []
            self._move(db, row, move)
            rows.delete_segment(db, segment_id)
            return [row.name]

        self._one_victim(end)

    def _evict_segment(self, victim: Victim, now_s: float) -> None:
        def evict(db: sqlite3.Connection, may_move: bool) -> list[str]:
            row = rows.segment(db, victim.segment_id)
            if row is None or not row.is_sealed:
                return []
            pieces = rows.pieces(db, victim.segment_id)
            spared = choose_spared(
                pieces, victim, max_moved_share=self._limits.max_moved_share, now_s=now_s
            )
            moved: set[bytes] = set()
            if may_move and self._may_move(db, spared):
                moved = self._move(db, row, spared)
            going = [piece for piece in pieces if piece.key not in moved]
            expired = [piece.key for piece in going if piece.expires_s <= now_s]
            evicted = [piece.key for piece in going if piece.expires_s > now_s]
            rows.bury(db, expired, MissReason.EXPIRED, self._limits.max_tombstones)
            rows.bury(db, evicted, MissReason.EVICTED, self._limits.max_tombstones)
            self.gone.num_expired += len(expired)
            self.gone.num_evicted += len(evicted)
            rows.delete_segment(db, victim.segment_id)
            return [row.name]

        self._one_victim(evict)

    def _one_victim(self, act: _Act) -> None:
        """One transaction, without moving anything if moving fails."""
        before = replace(self.gone)
        try:
            self._try_victim(act, may_move=True)
        except OSError:
            self.gone = replace(before, num_errors=before.num_errors + 1)
            self._try_victim(act, may_move=False)

    def _try_victim(self, act: _Act, *, may_move: bool) -> None:
        try:
            with self._index.write() as db:
                names = act(db, may_move)
                names += self._writers.seal_retired(db)
        except BaseException:
            self._writers.fail()
            raise
        self._writers.committed()
        self._drop_files(names)

    def _may_move(self, db: sqlite3.Connection, pieces: Sequence[StoredPiece]) -> bool:
        num_bytes = sum(piece.num_bytes for piece in pieces)
        used_bytes = self.used_bytes(db) + self._limits.headroom_bytes
        return used_bytes + num_bytes <= self._limits.max_bytes and self.has_free_space(num_bytes)

    def _move(
        self, db: sqlite3.Connection, row: rows.SegmentRow, pieces: Sequence[StoredPiece]
    ) -> set[bytes]:
        """Copy records to segments of their days; a damaged one is left behind. Its header is
        written anew with its last use, so that a rebuilt index knows it."""
        moved: set[bytes] = set()
        if not pieces:
            return moved
        source = self._files.open(self._folder / row.name, writable=False)
        try:
            for piece in pieces:
                data = memoryview(bytearray(piece.num_bytes))
                self._files.read(source, [data], piece.offset)
                try:
                    header = decode_header(data)
                    payload = data[header.payload_at :][: header.payload_bytes]
                    if header.meta.key != piece.key or checksum([payload]) != header.payload_sum:
                        raise BadRecord("not the record that the index names")
                except BadRecord:
                    self.gone.num_damaged += 1
                    continue
                retention, last_used_s = rows.use_of(db, piece.key)
                header = replace(header, retention=retention, written_s=last_used_s)
                data[: header.payload_at] = header_block(header)
                slot = self._writers.reserve(db, expiry_day(piece.expires_s), piece.num_bytes)
                self._writers.write(slot, [data])
                rows.move(db, piece.key, slot.segment.segment_id, slot.offset, piece.num_bytes)
                moved.add(piece.key)
        finally:
            self._files.close(source)
        for error in self._writers.sync():
            raise error
        return moved

    def _drop_files(self, names: Sequence[str]) -> None:
        self.gone.num_errors += len(drop_files(self._files, self._folder, names))
