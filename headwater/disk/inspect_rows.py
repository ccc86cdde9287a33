"""What an operator asks the index: walks over all of it, which servers never do."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from headwater.core.blocks import CacheIdentity
from headwater.core.cache import RecordMeta
from headwater.disk import rows
from headwater.disk.rows import META_COLUMNS


@dataclass(frozen=True, slots=True)
class Span:
    """A record's bytes, header and padding included."""

    segment_id: int
    name: str
    offset: int
    span_bytes: int


def delete_matching(
    db: sqlite3.Connection,
    *,
    tenant: str | None,
    fingerprint: str | None,
    used_before_s: float | None,
    limit: int,
) -> list[Span]:
    """Take up to ``limit`` records out of the index that fit all that is not None."""
    found = db.execute(
        "SELECT record_id, segment_id, name, offset, span_bytes FROM records "
        "JOIN identities USING (identity_id) JOIN segments USING (segment_id) "
        "WHERE (?1 IS NULL OR tenant = ?1) AND (?2 IS NULL OR fingerprint = ?2) "
        "AND (?3 IS NULL OR last_used_s < ?3) LIMIT ?4",
        (tenant, fingerprint, used_before_s, limit),
    ).fetchall()
    db.executemany("DELETE FROM records WHERE record_id = ?", ((row[0],) for row in found))
    return [Span(*row[1:]) for row in found]


def forget_unused(db: sqlite3.Connection, *, and_tombstones: bool) -> None:
    """Names of identities without a record, and the memory of what is gone."""
    db.execute(
        "DELETE FROM identities WHERE NOT EXISTS "
        "(SELECT 1 FROM records WHERE records.identity_id = identities.identity_id)"
    )
    if and_tombstones:
        db.execute("DELETE FROM tombstones")


def scan(
    db: sqlite3.Connection, identities: rows.Identities, after_id: int, limit: int, now_s: float
) -> tuple[int, list[tuple[RecordMeta, int]]]:
    """The next records in the order of writing, and where to go on."""
    found = db.execute(
        f"SELECT {META_COLUMNS}, record_id FROM records "  # noqa: S608
        "WHERE record_id > ? AND expires_s > ? ORDER BY record_id LIMIT ?",
        (after_id, now_s, limit),
    ).fetchall()
    last_id = found[-1][-1] if found else after_id
    return last_id, [identities.meta(db, row[:-1]) for row in found]


def all_identities(db: sqlite3.Connection, identities: rows.Identities) -> list[CacheIdentity]:
    found = db.execute("SELECT DISTINCT identity_id FROM records").fetchall()
    return [identities.of(db, number) for (number,) in found]
