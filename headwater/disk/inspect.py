"""An operator's view of a store's folder: what is in it, is it whole, make it go.

Works on the folder while servers use it; sizes, ages and names, never content.
Knows the index and the record format, not the store object and not the command line.
"""

from __future__ import annotations

import contextlib
import datetime
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.core.blocks import CacheIdentity, PrefixKey, block_keys
from headwater.core.cache import KVPart, MissReason, RecordMeta, RetentionClass
from headwater.core.errors import RecordLost, StoreError
from headwater.disk import inspect_rows, rows
from headwater.disk.capacity_plan import MAX_TOMBSTONES
from headwater.disk.files import SystemFiles
from headwater.disk.folder import FORMAT_NAME, OpenFolder, open_folder, segment_files
from headwater.disk.index import Access, Index, IndexFault
from headwater.disk.reading import DamagedRecord, RecordReader
from headwater.disk.record_format import class_of, part_number, part_of
from headwater.disk.retention import DAY_S
from headwater.disk.segments import SegmentReaders, drop_files, wipe

_BATCH = 256  # records between two looks at the index
_MAX_CHILDREN = 64  # as many as a server's own lookup compares


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityUse:
    """What is kept under one model fingerprint, layout and tenant."""

    identity: CacheIdentity
    num_records: int
    num_tokens: int  # of the global parts
    num_bytes: int
    last_used_s: float  # unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassUse:
    kind: RetentionClass
    num_records: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DayUse:
    """What expires on one day, unless it is used before."""

    day: str  # UTC, as 2026-01-31
    num_records: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileUse:
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSummary:
    num_records: int  # not expired
    num_tokens: int  # of the global parts
    num_bytes: int  # of all files: what counts against the cap
    max_bytes: int | None  # the cap of the server that opened the folder last; None: none yet
    num_tombstones: int  # names of records that are gone, kept to explain misses
    by_identity: tuple[IdentityUse, ...]  # most bytes first
    by_class: tuple[ClassUse, ...]
    by_day: tuple[DayUse, ...]  # soonest first
    files: tuple[FileUse, ...]  # by name


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCounts:
    num_records: int  # read and compared with their checksums
    num_bytes: int
    num_damaged: int
    num_dropped: int  # damaged ones that are gone now
    num_orphaned: int  # segment files without any record, and records without a file


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeCounts:
    num_records: int
    num_bytes: int  # of those records
    num_files: int  # segment files that went with them


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRecord:
    """One record by what it is worth; ``name`` is the start of its prefix key in hex."""

    name: str
    identity: CacheIdentity
    part: KVPart
    kind: RetentionClass
    end: int  # tokens from the start of the prompt to its end
    num_tokens: int
    num_bytes: int
    last_used_s: float
    expires_s: float
    num_uses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityMatch:
    """How many leading tokens of a prompt one identity holds, and why it ends there."""

    identity: CacheIdentity
    num_tokens: int  # full blocks and the tail
    num_tail_tokens: int  # of them in a record that the prompt does not use whole
    reason: MissReason


def summarise(folder: Path, *, now_s: float) -> FolderSummary:
    """``now_s``: unix seconds. Raises StoreError when ``folder`` is no store that can be read."""
    with _opened(folder) as view:
        with view.index.read() as db:
            by_identity = db.execute(
                "SELECT fingerprint, layout, tenant, count(*), "
                "sum(CASE WHEN part = ? THEN num_tokens ELSE 0 END), sum(span_bytes) AS size, "
                "max(last_used_s) FROM records JOIN identities USING (identity_id) "
                "WHERE expires_s > ? GROUP BY identity_id ORDER BY size DESC",
                (part_number(KVPart.GLOBAL), now_s),
            ).fetchall()
            by_class = db.execute(
                "SELECT class, count(*), sum(span_bytes) FROM records WHERE expires_s > ? "
                "GROUP BY class ORDER BY class",
                (now_s,),
            ).fetchall()
            by_day = db.execute(
                "SELECT CAST(expires_s / ? AS INTEGER) AS day, count(*), sum(span_bytes) "
                "FROM records WHERE expires_s > ? GROUP BY day ORDER BY day",
                (DAY_S, now_s),
            ).fetchall()
            max_bytes = rows.get_fact(db, rows.MAX_BYTES_FACT)
            _, num_tombstones = rows.counts(db)
        files = _files(view.folder.path)
    identities = tuple(
        IdentityUse(
            identity=CacheIdentity(fingerprint, layout, tenant),
            num_records=num_records,
            num_tokens=num_tokens,
            num_bytes=num_bytes,
            last_used_s=last_used_s,
        )
        for fingerprint, layout, tenant, num_records, num_tokens, num_bytes, last_used_s in (
            by_identity
        )
    )
    return FolderSummary(
        num_records=sum(use.num_records for use in identities),
        num_tokens=sum(use.num_tokens for use in identities),
        num_bytes=sum(file.num_bytes for file in files),
        max_bytes=None if max_bytes is None else int(max_bytes),
        num_tombstones=num_tombstones,
        by_identity=identities,
        by_class=tuple(
            ClassUse(kind=class_of(kind), num_records=num_records, num_bytes=num_bytes)
            for kind, num_records, num_bytes in by_class
        ),
        by_day=tuple(
            DayUse(day=_day_name(day), num_records=num_records, num_bytes=num_bytes)
            for day, num_records, num_bytes in by_day
        ),
        files=files,
    )


def verify(folder: Path, *, drop_damaged: bool, now_s: float) -> VerifyCounts:
    """Read every record that has not expired. Raises StoreError as ``summarise``."""
    identities = rows.Identities()
    num_records = num_bytes = num_damaged = num_dropped = last_id = 0
    with _opened(folder) as view:
        readers = SegmentReaders(view.folder.files, view.folder.path, max_open=16)
        reader = RecordReader(index=view.index, readers=readers)
        with contextlib.closing(readers):
            while True:
                with view.index.read() as db:
                    last_id, batch = inspect_rows.scan(db, identities, last_id, _BATCH, now_s)
                if not batch:
                    break
                for meta, payload_bytes in batch:
                    try:
                        reader.read(meta, [memoryview(bytearray(payload_bytes))], now_s)
                    except RecordLost:
                        continue  # it went while we looked
                    except DamagedRecord as damage:
                        num_damaged += 1
                        num_dropped += drop_damaged and _drop(view, meta.key, damage.place)
                    num_records += 1
                    num_bytes += payload_bytes
        with view.index.read() as db:
            known = {segment.name for segment in rows.segments(db)}
        num_orphaned = len(known ^ segment_files(view.folder.path).keys())
    return VerifyCounts(
        num_records=num_records,
        num_bytes=num_bytes,
        num_damaged=num_damaged,
        num_dropped=num_dropped,
        num_orphaned=num_orphaned,
    )


def purge(
    folder: Path,
    *,
    now_s: float,
    tenant: str | None = None,
    fingerprint: str | None = None,
    unused_for_s: float | None = None,
    everything: bool = False,
) -> PurgeCounts:
    """Remove the records that fit all that is given, and their bytes. Raises StoreError when
    nothing is given, or as ``summarise``."""
    if not everything and tenant is None and fingerprint is None and unused_for_s is None:
        raise StoreError("say what to purge: a tenant, a model, an age, or everything")
    used_before_s = None if unused_for_s is None else now_s - unused_for_s
    num_records = num_bytes = 0
    dropped: set[str] = set()
    with _opened(folder, must_write=True) as view:
        files, path = view.folder.files, view.folder.path
        while True:
            with view.index.write() as db:
                gone = inspect_rows.delete_matching(
                    db,
                    tenant=tenant,
                    fingerprint=fingerprint,
                    used_before_s=used_before_s,
                    limit=_BATCH,
                )
                empty = rows.delete_empty(db, (piece.segment_id for piece in gone))
                if not gone:
                    inspect_rows.forget_unused(db, and_tombstones=everything)
            if not gone:
                break
            for piece in gone:
                num_records += 1
                num_bytes += piece.span_bytes
                if piece.name not in empty:
                    wipe(files, path, piece.name, piece.offset, piece.span_bytes)
            drop_files(files, path, empty)
            dropped.update(empty)
    return PurgeCounts(num_records=num_records, num_bytes=num_bytes, num_files=len(dropped))


def top(folder: Path, n: int, *, now_s: float) -> tuple[TopRecord, ...]:
    """The ``n`` most used records, the last used first among equals."""
    with _opened(folder) as view, view.index.read() as db:
        found = db.execute(
            "SELECT key, fingerprint, layout, tenant, part, class, start, num_tokens, span_bytes, "
            "last_used_s, expires_s, num_uses FROM records JOIN identities USING (identity_id) "
            "WHERE expires_s > ? ORDER BY num_uses DESC, last_used_s DESC LIMIT ?",
            (now_s, n),
        ).fetchall()
    return tuple(
        TopRecord(
            name=key[:6].hex(),
            identity=CacheIdentity(fingerprint, layout, tenant),
            part=part_of(part),
            kind=class_of(kind),
            end=start + num_tokens,
            num_tokens=num_tokens,
            num_bytes=num_bytes,
            last_used_s=last_used_s,
            expires_s=expires_s,
            num_uses=num_uses,
        )
        for (
            key, fingerprint, layout, tenant, part, kind, start, num_tokens, num_bytes,
            last_used_s, expires_s, num_uses,
        ) in found
    )  # fmt: skip


def match(
    folder: Path, tokens: Sequence[int], block_tokens: int, *, now_s: float
) -> tuple[IdentityMatch, ...]:
    """What each identity in the folder holds of ``tokens``, most tokens first."""
    with _opened(folder) as view, view.index.read() as db:
        identities = rows.Identities()
        found = [
            _match_one(db, identities, identity, tokens, block_tokens, now_s)
            for identity in inspect_rows.all_identities(db, identities)
        ]
    return tuple(sorted(found, key=lambda one: one.num_tokens, reverse=True))


def _match_one(
    db: sqlite3.Connection,
    identities: rows.Identities,
    identity: CacheIdentity,
    tokens: Sequence[int],
    block_tokens: int,
    now_s: float,
) -> IdentityMatch:
    wanted = list(block_keys(identity.root_key(), tokens, block_tokens))
    held = rows.find(db, identities, [key for key, _ in wanted], now_s)
    parent, end = identity.root_key(), 0
    next_key: PrefixKey | None = None
    for key, content in wanted:
        if key not in held or held[key][0].tokens != content:
            next_key = key
            break
        parent, end = key, end + block_tokens
    rest = tuple(tokens[end : end + block_tokens])
    num_tail_tokens, differs = 0, False
    for meta, _ in rows.children(db, identities, parent, _MAX_CHILDREN, now_s):
        num_shared = _num_shared(meta, rest)
        if meta.identity != identity or num_shared < num_tail_tokens:
            continue
        does_differ = num_shared < min(len(meta.tokens), len(rest))
        differs = does_differ or (differs and num_shared == num_tail_tokens)
        num_tail_tokens = num_shared
    num_tokens = end + num_tail_tokens
    reason = MissReason.NEW
    if num_tokens >= len(tokens) - 1:
        reason = MissReason.NONE
    elif next_key and (why := rows.absence(db, next_key, now_s)) is not MissReason.NEW:
        reason = why
    elif 0 < num_tokens < block_tokens:
        reason = MissReason.TOO_SHORT
    elif differs and num_tokens:
        reason = MissReason.DIFFERS
    return IdentityMatch(
        identity=identity,
        num_tokens=num_tokens,
        num_tail_tokens=num_tail_tokens,
        reason=reason,
    )


def _num_shared(meta: RecordMeta, rest: Sequence[int]) -> int:
    for position, (ours, theirs) in enumerate(zip(meta.tokens, rest, strict=False)):
        if ours != theirs:
            return position
    return min(len(meta.tokens), len(rest))


@dataclass(frozen=True, slots=True)
class _View:
    folder: OpenFolder
    index: Index


@contextlib.contextmanager
def _opened(folder: Path, *, must_write: bool = False) -> Iterator[_View]:
    """The folder as it is: nothing is made, repaired or locked away from servers."""
    folder = folder.expanduser()
    if not (folder / FORMAT_NAME).exists():
        raise StoreError(f"{folder} holds no cache of Headwater; check cache_dir")
    opened = open_folder(SystemFiles(), folder)
    try:
        opened.share()
        if must_write and not opened.is_writable:
            raise StoreError(f"the cache folder {folder} is read-only; nothing was changed")
        access = Access.WRITE if opened.is_writable else Access.READ
        try:
            with contextlib.closing(Index(opened.files, opened.path, access)) as index:
                yield _View(opened, index)
        except IndexFault as fault:
            raise StoreError(
                f"the cache folder {folder}: {fault}; a server that starts alone repairs it"
            ) from fault
    finally:
        opened.close()


def _drop(view: _View, key: PrefixKey, place: rows.Place) -> bool:
    if not view.folder.is_writable:
        return False
    with view.index.write() as db:
        if not rows.delete_at(db, key, place):
            return False
        rows.bury(db, [key], MissReason.DAMAGED, MAX_TOMBSTONES)
        empty = rows.delete_empty(db, [place.segment_id])
    drop_files(view.folder.files, view.folder.path, empty)
    return True


def _files(path: Path) -> tuple[FileUse, ...]:
    found = []
    for file in sorted(path.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found.append(FileUse(name=file.name, num_bytes=file.lstat().st_size))
    return tuple(found)


def _day_name(day: int) -> str:
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()
