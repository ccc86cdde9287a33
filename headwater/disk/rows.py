"""What the store asks its index: typed queries on a connection or in a transaction.

Times are unix seconds, handed in. Knows tables, not files; decides nothing.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwater.core.blocks import CacheIdentity, PrefixKey, token_bytes
from headwater.core.cache import KVPart, MissReason, RecordMeta, Retention
from headwater.disk.eviction import SECONDS_PER_TOKEN, SegmentUse, worth_s
from headwater.disk.record_format import (
    class_number,
    class_of,
    part_number,
    part_of,
    unpack_tokens,
)
from headwater.disk.retention import CLOCK_SLACK_S, DAY_S, StoredPiece

MAX_BYTES_FACT = "max_bytes"  # the cap of the server that opened the folder last
LATEST_FACT = "latest_s"  # the latest time that the store has seen

_MAX_KEYS = 500  # in one statement

META_COLUMNS = "key, parent, identity_id, part, start, tokens, payload_bytes"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record's bytes lie."""

    segment_id: int
    name: str
    offset: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class SegmentRow:
    segment_id: int
    name: str
    day: int
    file_bytes: int
    is_sealed: bool


@dataclass(frozen=True, slots=True)
class NewRow:
    """A record to publish. ``last_used_s`` and ``num_uses`` are the index's alone."""

    meta: RecordMeta
    retention: Retention
    payload_bytes: int
    span_bytes: int
    segment_id: int
    offset: int
    last_used_s: float


def first_hash(tokens: Sequence[int]) -> bytes:
    """Names a first block by its tokens alone, whoever computed it."""
    digest = hashlib.blake2b(token_bytes(tokens), digest_size=8, person=b"headwater-first")
    return digest.digest()


class Identities:
    """The names of identities by number. A number never changes its name."""

    def __init__(self) -> None:
        self._known: dict[int, CacheIdentity] = {}

    def of(self, db: sqlite3.Connection, identity_id: int) -> CacheIdentity:
        known = self._known.get(identity_id)
        if known is None:
            row = db.execute(
                "SELECT fingerprint, layout, tenant FROM identities WHERE identity_id = ?",
                (identity_id,),
            ).fetchone()
            if row is None:
                raise ValueError("a record of an unknown identity")
            known = self._known[identity_id] = CacheIdentity(*row)
        return known

    def meta(self, db: sqlite3.Connection, row: tuple[object, ...]) -> tuple[RecordMeta, int]:
        """A row of ``META_COLUMNS`` as the record's meta and its payload bytes."""
        key, parent, identity_id, part, start, tokens, payload_bytes = row
        if not (
            isinstance(key, bytes)
            and isinstance(parent, bytes)
            and isinstance(identity_id, int)
            and isinstance(part, int)
            and isinstance(start, int)
            and isinstance(tokens, bytes)
            and isinstance(payload_bytes, int)
        ):
            raise TypeError("a record's row has values of a wrong type")
        meta = RecordMeta(
            key=PrefixKey(key),
            parent=PrefixKey(parent),
            identity=self.of(db, identity_id),
            part=part_of(part),
            start=start,
            tokens=unpack_tokens(tokens),
        )
        return meta, payload_bytes


def identity_id(db: sqlite3.Connection, identity: CacheIdentity) -> int:
    names = (identity.model_fingerprint, identity.layout, identity.tenant)
    db.execute(
        "INSERT OR IGNORE INTO identities (fingerprint, layout, tenant) VALUES (?, ?, ?)", names
    )
    (found,) = db.execute(
        "SELECT identity_id FROM identities WHERE fingerprint = ? AND layout = ? AND tenant = ?",
        names,
    ).fetchone()
    return int(found)


def find(
    db: sqlite3.Connection, identities: Identities, keys: Sequence[bytes], now_s: float
) -> dict[bytes, tuple[RecordMeta, int]]:
    found: dict[bytes, tuple[RecordMeta, int]] = {}
    for at in range(0, len(keys), _MAX_KEYS):
        some = keys[at : at + _MAX_KEYS]
        marks = ",".join("?" * len(some))
        for row in db.execute(
            f"SELECT {META_COLUMNS} FROM records WHERE key IN ({marks}) AND expires_s > ?",  # noqa: S608
            (*some, now_s),
        ).fetchall():
            found[row[0]] = identities.meta(db, row)
    return found


def present(db: sqlite3.Connection, keys: Sequence[bytes], now_s: float) -> set[bytes]:
    return {
        key
        for key in keys
        if db.execute(
            "SELECT 1 FROM records WHERE key = ? AND expires_s > ?", (key, now_s)
        ).fetchone()
    }


def children(
    db: sqlite3.Connection, identities: Identities, parent: bytes, limit: int, now_s: float
) -> list[tuple[RecordMeta, int]]:
    rows = db.execute(
        f"SELECT {META_COLUMNS} FROM records WHERE parent = ? AND expires_s > ? "  # noqa: S608
        "ORDER BY last_used_s DESC LIMIT ?",
        (parent, now_s, limit),
    ).fetchall()
    return [identities.meta(db, row) for row in rows]


def identities_of_first_block(
    db: sqlite3.Connection, identities: Identities, tokens: Sequence[int], now_s: float
) -> list[CacheIdentity]:
    rows = db.execute(
        "SELECT DISTINCT identity_id FROM records WHERE first_hash = ? AND tokens = ? "
        "AND expires_s > ?",
        (first_hash(tokens), token_bytes(tokens), now_s),
    ).fetchall()
    return [identities.of(db, number) for (number,) in rows]


def place(db: sqlite3.Connection, key: bytes, now_s: float) -> Place | None:
    row = db.execute(
        "SELECT segment_id, name, offset, payload_bytes FROM records "
        "JOIN segments USING (segment_id) WHERE key = ? AND expires_s > ?",
        (key, now_s),
    ).fetchone()
    if row is None:
        return None
    segment_id, name, offset, payload_bytes = row
    if not (isinstance(name, str) and all(type(n) is int and n >= 0 for n in (offset, segment_id))):
        raise TypeError("a record's place has values of a wrong type")
    return Place(segment_id, name, offset, payload_bytes)


def insert(db: sqlite3.Connection, row: NewRow) -> bool:
    """Publish in place of an expired one; False when the key is there already."""
    meta = row.meta
    db.execute("DELETE FROM records WHERE key = ? AND expires_s <= ?", (meta.key, row.last_used_s))
    is_first = meta.start == 0 and meta.part is KVPart.GLOBAL
    done = db.execute(
        "INSERT OR IGNORE INTO records (key, parent, identity_id, part, class, start, num_tokens, "
        "tokens, first_hash, payload_bytes, span_bytes, segment_id, offset, last_used_s, keep_s, "
        "expires_s, num_uses) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
        (
            meta.key, meta.parent, identity_id(db, meta.identity), part_number(meta.part),
            class_number(row.retention.kind), meta.start, len(meta.tokens),
            token_bytes(meta.tokens), first_hash(meta.tokens) if is_first else None,
            row.payload_bytes, row.span_bytes, row.segment_id, row.offset, row.last_used_s,
            row.retention.keep_s, row.last_used_s + row.retention.keep_s,
        ),
    )  # fmt: skip
    if done.rowcount:
        db.execute("DELETE FROM tombstones WHERE key = ?", (meta.key,))
    return bool(done.rowcount)


def touch(
    db: sqlite3.Connection, keys: Iterable[bytes], retention: Retention, now_s: float
) -> None:
    """A use now. What is kept longer already stays so; the class is that of the longest."""
    until_s = now_s + retention.keep_s
    db.executemany(
        "UPDATE records SET class = CASE WHEN ? > expires_s THEN ? ELSE class END, "
        "last_used_s = ?, keep_s = max(expires_s, ?) - ?, expires_s = max(expires_s, ?), "
        "num_uses = num_uses + 1 WHERE key = ? AND expires_s > ?",
        (
            (until_s, class_number(retention.kind), now_s, until_s, now_s, until_s, key, now_s)
            for key in keys
        ),
    )


def covered_tails(db: sqlite3.Connection, meta: RecordMeta) -> list[bytes]:
    """Keys of shorter records under the same parent with which ``meta``'s tokens begin."""
    rows = db.execute(
        "SELECT key FROM records WHERE parent = ? AND num_tokens < ? AND part = ? AND start = ? "
        "AND tokens = substr(?, 1, length(tokens))",
        (meta.parent, len(meta.tokens), part_number(meta.part), meta.start,
         token_bytes(meta.tokens)),
    ).fetchall()  # fmt: skip
    return [key for (key,) in rows]


def delete(db: sqlite3.Connection, keys: Iterable[bytes]) -> list[tuple[bytes, Place]]:
    """Take them out of the index; gives those that were there and where they lay."""
    gone = []
    for key in keys:
        row = db.execute(
            "DELETE FROM records WHERE key = ? RETURNING segment_id, offset, payload_bytes",
            (key,),
        ).fetchone()
        if row is not None:
            segment_id, offset, payload_bytes = row
            name = db.execute(
                "SELECT name FROM segments WHERE segment_id = ?", (segment_id,)
            ).fetchone()
            gone.append((key, Place(segment_id, name[0] if name else "", offset, payload_bytes)))
    return gone


def delete_at(db: sqlite3.Connection, key: bytes, place: Place) -> bool:
    """Take it out of the index if it still lies there."""
    done = db.execute(
        "DELETE FROM records WHERE key = ? AND segment_id = ? AND offset = ?",
        (key, place.segment_id, place.offset),
    )
    return bool(done.rowcount)


def bury(
    db: sqlite3.Connection, keys: Iterable[bytes], reason: MissReason, max_tombstones: int
) -> None:
    """Remember why they are gone; the oldest memories go."""
    db.executemany(
        "INSERT OR REPLACE INTO tombstones (key, reason) VALUES (?, ?)",
        ((key, reason.value) for key in keys),
    )
    db.execute(
        "DELETE FROM tombstones WHERE seq <= (SELECT max(seq) FROM tombstones) - ?",
        (max_tombstones,),
    )


def absence(db: sqlite3.Connection, key: bytes, now_s: float) -> MissReason:
    if db.execute(
        "SELECT 1 FROM records WHERE key = ? AND expires_s <= ?", (key, now_s)
    ).fetchone():
        return MissReason.EXPIRED
    row = db.execute("SELECT reason FROM tombstones WHERE key = ?", (key,)).fetchone()
    return MissReason(row[0]) if row else MissReason.NEW


# Segments


def add_segment(db: sqlite3.Connection, name: str, day: int) -> int:
    done = db.execute(
        "INSERT INTO segments (name, day, file_bytes, is_sealed) VALUES (?, ?, 0, 0)", (name, day)
    )
    return int(done.lastrowid or 0)


def set_segment_bytes(db: sqlite3.Connection, segment_id: int, file_bytes: int) -> None:
    db.execute("UPDATE segments SET file_bytes = ? WHERE segment_id = ?", (file_bytes, segment_id))


def seal(db: sqlite3.Connection, segment_id: int, file_bytes: int) -> None:
    db.execute(
        "UPDATE segments SET file_bytes = ?, is_sealed = 1 WHERE segment_id = ?",
        (file_bytes, segment_id),
    )


def set_segment_day(db: sqlite3.Connection, segment_id: int, day: int) -> None:
    db.execute("UPDATE segments SET day = ? WHERE segment_id = ?", (day, segment_id))


def segments(db: sqlite3.Connection) -> list[SegmentRow]:
    rows = db.execute(
        "SELECT segment_id, name, day, file_bytes, is_sealed FROM segments"
    ).fetchall()
    return [
        SegmentRow(number, name, day, size, bool(sealed))
        for number, name, day, size, sealed in rows
    ]


def segments_over(db: sqlite3.Connection, before_day: int) -> list[SegmentRow]:
    rows = db.execute(
        "SELECT segment_id, name, day, file_bytes, is_sealed FROM segments "
        "WHERE is_sealed = 1 AND day < ?",
        (before_day,),
    ).fetchall()
    return [
        SegmentRow(number, name, day, size, bool(sealed))
        for number, name, day, size, sealed in rows
    ]


def segment(db: sqlite3.Connection, segment_id: int) -> SegmentRow | None:
    row = db.execute(
        "SELECT segment_id, name, day, file_bytes, is_sealed FROM segments WHERE segment_id = ?",
        (segment_id,),
    ).fetchone()
    if row is None:
        return None
    number, name, day, size, is_sealed = row
    return SegmentRow(number, name, day, size, bool(is_sealed))


def segment_bytes(db: sqlite3.Connection) -> int:
    """What all segment files take or are about to take."""
    (total,) = db.execute("SELECT coalesce(sum(file_bytes), 0) FROM segments").fetchone()
    return int(total)


def segment_end(db: sqlite3.Connection, segment_id: int) -> int:
    """Where its last published record ends; 0 when it has none."""
    row = db.execute(
        "SELECT offset + span_bytes FROM records WHERE segment_id = ? ORDER BY offset DESC LIMIT 1",
        (segment_id,),
    ).fetchone()
    return int(row[0]) if row else 0


def pieces(db: sqlite3.Connection, segment_id: int, from_offset: int = 0) -> list[StoredPiece]:
    rows = db.execute(
        "SELECT key, offset, span_bytes, last_used_s, start, expires_s FROM records "
        "WHERE segment_id = ? AND offset + span_bytes > ? ORDER BY offset",
        (segment_id, from_offset),
    ).fetchall()
    return [
        StoredPiece(key, offset, span_bytes, worth_s(last_used_s, start), expires_s)
        for key, offset, span_bytes, last_used_s, start, expires_s in rows
    ]


def use_of(db: sqlite3.Connection, key: bytes) -> tuple[Retention, float]:
    """How long it is kept from its last use, and when that was."""
    kind, keep_s, last_used_s = db.execute(
        "SELECT class, keep_s, last_used_s FROM records WHERE key = ?", (key,)
    ).fetchone()
    return Retention(class_of(kind), keep_s), last_used_s


def move(db: sqlite3.Connection, key: bytes, segment_id: int, offset: int, span_bytes: int) -> None:
    db.execute(
        "UPDATE records SET segment_id = ?, offset = ?, span_bytes = ? WHERE key = ?",
        (segment_id, offset, span_bytes, key),
    )


def delete_segment(db: sqlite3.Connection, segment_id: int) -> None:
    db.execute("DELETE FROM records WHERE segment_id = ?", (segment_id,))
    db.execute("DELETE FROM segments WHERE segment_id = ?", (segment_id,))


def delete_empty(db: sqlite3.Connection, segment_ids: Iterable[int]) -> list[str]:
    """Forget sealed segments that have no record left; gives the names of their files."""
    names = []
    for segment_id in set(segment_ids):
        row = db.execute(
            "DELETE FROM segments WHERE segment_id = ? AND is_sealed = 1 AND NOT EXISTS "
            "(SELECT 1 FROM records WHERE records.segment_id = segments.segment_id) "
            "RETURNING name",
            (segment_id,),
        ).fetchone()
        if row is not None:
            names.append(str(row[0]))
    return names


def evictable(db: sqlite3.Connection, now_s: float) -> list[SegmentUse]:
    """Sealed segments with what their records are worth; an expired record is worth nothing."""
    rows = db.execute(
        "SELECT segment_id, file_bytes, coalesce(sum(span_bytes), 0), "
        "coalesce(sum(CASE WHEN expires_s > ? THEN span_bytes * (last_used_s - start * ?) "
        "ELSE 0 END) / sum(span_bytes), 0) "
        "FROM segments LEFT JOIN records USING (segment_id) WHERE is_sealed = 1 "
        "GROUP BY segment_id",
        (now_s, SECONDS_PER_TOKEN),
    ).fetchall()
    return [
        SegmentUse(segment_id=number, file_bytes=size, live_bytes=live, worth_s=worth)
        for number, size, live, worth in rows
    ]


# The clock, and what the store knows of itself


def redate(db: sqlite3.Connection, now_s: float) -> None:
    """Records that were last used after ``now_s`` count as used now (the clock was set back)."""
    db.execute(
        "UPDATE segments SET day = min(day, CAST((SELECT max(? + keep_s) FROM records "
        "WHERE records.segment_id = segments.segment_id) / ? AS INTEGER)) "
        "WHERE segment_id IN (SELECT segment_id FROM records WHERE last_used_s > ?)",
        (now_s, DAY_S, now_s + CLOCK_SLACK_S),
    )
    db.execute(
        "UPDATE records SET last_used_s = ?, expires_s = ? + keep_s WHERE last_used_s > ?",
        (now_s, now_s, now_s + CLOCK_SLACK_S),
    )


def get_fact(db: sqlite3.Connection, name: str) -> float | None:
    row = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return float(row[0]) if row else None


def set_fact(db: sqlite3.Connection, name: str, value: float) -> None:
    db.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (name, value))


def counts(db: sqlite3.Connection) -> tuple[int, int]:
    """Records and tombstones."""
    (num_records,) = db.execute("SELECT count(*) FROM records").fetchone()
    (num_tombstones,) = db.execute("SELECT count(*) FROM tombstones").fetchone()
    return int(num_records), int(num_tombstones)
