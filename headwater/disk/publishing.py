"""Putting records: room first, then the data, then the index (published = fully written).

    reserve    one transaction: the cap is kept by counting bytes before they are written
    write      header and payload, synced every 2 MiB and at the end
    publish    one transaction: the rows of all records that were written

A batch costs two short transactions and one sync, however many records it has. Whatever
fails, nothing of a failed record can be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.core.cache import RecordMeta, Retention
from headwater.disk import rows
from headwater.disk.capacity_plan import Limits
from headwater.disk.counters import Counters
from headwater.disk.files import Files
from headwater.disk.index import Index
from headwater.disk.record_format import RecordHeader, encode_header, header_block
from headwater.disk.retention import expiry_day
from headwater.disk.segments import SegmentWriters, Slot, drop_files
from headwater.disk.upkeep import Upkeep

_MAX_EVICTIONS = 3  # others may take the room that was made


class NoRoom(Exception):
    """Writing stops here: nothing is wrong, there is only no space that may be used."""


@dataclass(frozen=True, slots=True)
class NewRecord:
    """One record to put; ``data`` is only read during the call."""

    meta: RecordMeta
    data: Sequence[memoryview]
    retention: Retention


@dataclass(slots=True)
class _Draft:
    """A record on its way into a segment."""

    record: NewRecord
    header: RecordHeader
    slot: Slot | None = None


class Publisher:
    """One batch at a time: the store's lock is held."""

    def __init__(
        self,
        *,
        index: Index,
        files: Files,
        folder: Path,
        writers: SegmentWriters,
        upkeep: Upkeep,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self._index = index
        self._files = files
        self._folder = folder
        self._writers = writers
        self._upkeep = upkeep
        self._limits = limits
        self._counters = counters

    def publish(self, records: Sequence[NewRecord], now_s: float) -> set[bytes]:
        """Keys that are there now. Raises NoRoom, IndexFault and OSError; then none of
        them is new."""
        keys = [record.meta.key for record in records]
        with self._index.read() as db:
            present = rows.present(db, keys, now_s)
        known = [record for record in records if record.meta.key in present]
        if known:
            with self._index.write() as db:
                for record in known:
                    rows.touch(db, [record.meta.key], record.retention, now_s)
        drafts: dict[bytes, _Draft] = {}
        for record in records:
            key = record.meta.key
            if key in present:
                self._counters.refused()
            elif key not in drafts and record.retention.keep_s > 0:
                header = encode_header(
                    record.meta, record.retention, written_s=now_s, payload=record.data
                )
                if header.span_bytes > self._limits.max_record_bytes:
                    self._counters.failed("a record is larger than a quarter of the cap")
                else:
                    drafts[key] = _Draft(record, header)
        if drafts:
            self._reserve(list(drafts.values()), now_s)
            written = self._write(list(drafts.values()))
            present |= self._commit(written, now_s)
        return present

    def _reserve(self, drafts: Sequence[_Draft], now_s: float) -> None:
        num_bytes = sum(draft.header.span_bytes for draft in drafts)
        if not self._upkeep.has_free_space(num_bytes):
            raise NoRoom("free disk space is down to the reserve")
        for _ in range(_MAX_EVICTIONS):
            try:
                with self._index.write() as db:
                    has_room = self._upkeep.has_room(db, num_bytes)
                    if has_room:
                        for draft in drafts:
                            day = expiry_day(now_s + draft.record.retention.keep_s)
                            draft.slot = self._writers.reserve(db, day, draft.header.span_bytes)
            except BaseException:
                self._writers.undo()
                raise
            self._writers.reserved()
            if has_room:
                return
            self._upkeep.evict(num_bytes, now_s)
        raise NoRoom("the cap leaves no room, and nothing more can be evicted")

    def _write(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Those whose bytes are on the disk."""
        for draft in drafts:
            assert draft.slot is not None
            if draft.slot.segment.is_broken:
                continue
            pad = bytes(draft.header.span_bytes - draft.header.payload_at
                        - draft.header.payload_bytes)  # fmt: skip
            head = header_block(draft.header)
            pieces = [memoryview(head), *draft.record.data, memoryview(pad)]
            try:
                self._writers.write(draft.slot, pieces)
            except OSError as error:
                self._counters.failed(f"write: {error.strerror}")
        for refusal in self._writers.sync():
            self._counters.failed(f"sync: {refusal.strerror}")
        return [draft for draft in drafts if draft.slot and not draft.slot.segment.is_broken]

    def _commit(self, drafts: Sequence[_Draft], now_s: float) -> set[bytes]:
        published: list[_Draft] = []
        try:
            with self._index.write() as db:
                tails: list[bytes] = []
                for draft in drafts:
                    assert draft.slot is not None
                    row = rows.NewRow(
                        meta=draft.record.meta,
                        retention=draft.record.retention,
                        payload_bytes=draft.header.payload_bytes,
                        span_bytes=draft.header.span_bytes,
                        segment_id=draft.slot.segment.segment_id,
                        offset=draft.slot.offset,
                        last_used_s=now_s,
                    )
                    if rows.insert(db, row):
                        published.append(draft)
                    tails += rows.covered_tails(db, row.meta)
                gone = rows.delete(db, tails)
                empty = self._writers.seal_retired(db)
                empty += rows.delete_empty(db, (place.segment_id for _, place in gone))
        except BaseException:
            self._writers.fail()
            raise
        self._writers.committed()
        for error in drop_files(self._files, self._folder, empty):
            self._counters.failed(f"unlink: {error.strerror}")
        for draft in published:
            self._counters.put(draft.header.payload_bytes)
        for _ in range(len(drafts) - len(published)):
            self._counters.refused()  # another process was first
        return {draft.record.meta.key for draft in drafts}
