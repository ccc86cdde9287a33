"""Reading one record into the caller's memory, and not trusting anything on the way.

The index says where; the record itself must say that it is what was asked for, and its sums
must hold. A record that moved or went while it was read is looked up again.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from headwater.core.cache import RecordMeta
from headwater.core.errors import RecordLost
from headwater.disk import rows
from headwater.disk.index import Index
from headwater.disk.record_format import BadRecord, checksum, decode_header, payload_offset
from headwater.disk.segments import SegmentReaders

_MAX_LOOKUPS = 4  # a record moves at most once in a segment's life
# The bytes themselves cannot be had: reading again will not help.
_LOST = (errno.EIO, errno.ENOENT, errno.EISDIR)


class DamagedRecord(Exception):
    """The record at this place failed a check; it is still in the index."""

    def __init__(self, message: str, place: rows.Place) -> None:
        super().__init__(message)
        self.place = place


class RecordReader:
    """Any thread may call it."""

    def __init__(self, *, index: Index, readers: SegmentReaders) -> None:
        self._index = index
        self._readers = readers

    def read(self, meta: RecordMeta, into: Sequence[memoryview], now_s: float) -> None:
        """Raises RecordLost when it is gone, DamagedRecord, IndexFault, and OSError when the
        system refuses for a reason that may pass."""
        place = self._place(meta, now_s)
        for _ in range(_MAX_LOOKUPS):
            failure = self._try(place, meta, into)
            if failure is None:
                return
            again = self._place(meta, now_s)
            if again == place:
                raise DamagedRecord(failure, place)
            place = again
        raise RecordLost("the record moved again and again", is_damaged=False)

    def _place(self, meta: RecordMeta, now_s: float) -> rows.Place:
        with self._index.read() as db:
            place = rows.place(db, meta.key, now_s)
        if place is None:
            raise RecordLost("the record is gone", is_damaged=False)
        return place

    def _try(self, place: rows.Place, meta: RecordMeta, into: Sequence[memoryview]) -> str | None:
        """What is wrong, or None."""
        payload_bytes = sum(piece.nbytes for piece in into)
        head = memoryview(bytearray(payload_offset(meta)))
        span_bytes = len(head) + payload_bytes
        try:
            num_read = self._readers.read(place.name, [head, *into], place.offset)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return f"the system cannot read it ({errno.errorcode.get(error.errno or 0)})"
        if num_read != span_bytes:
            return "it is cut off"
        try:
            header = decode_header(head)
        except BadRecord as error:
            return str(error)
        if header.meta != meta or header.payload_bytes != payload_bytes:
            return "it is another record"
        if checksum(into) != header.payload_sum:
            return "the payload's checksum differs"
        return None
