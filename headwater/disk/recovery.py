"""What a start, and each sweep, puts right: what dead processes left, and a lost index.

Safe beside living processes: a segment is only touched when its lock can be had, within a
transaction, and segments are only made within one. Costs a look at each segment file, not at
its records; only a lost index has every header read.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path

from headwater.core.errors import StoreError
from headwater.disk import rows
from headwater.disk.files import Files
from headwater.disk.folder import REBUILD_NAME, OpenFolder, other_bytes, segment_files
from headwater.disk.index import INDEX_NAME, Access, Index, IndexFault
from headwater.disk.record_format import (
    ALIGN_BYTES,
    MAX_HEADER_BYTES,
    BadRecord,
    RecordHeader,
    aligned,
    decode_header,
    header_bytes_at,
)
from headwater.disk.retention import expiry_day
from headwater.disk.segments import SEGMENT_SUFFIX, drop_files

DAMAGED_NAME = "index.damaged"


@dataclass(frozen=True, slots=True)
class Repairs:
    """What was found and put right."""

    num_lost_records: int = 0  # rows whose bytes are not there
    num_files: int = 0  # segment files without a record, dropped
    num_rebuilt_records: int = 0
    other_bytes: int = 0  # of files that are neither segments nor the index


def open_index(folder: OpenFolder, *, log_bytes: int, now_s: float) -> tuple[Index, Repairs]:
    """The folder's index, whole: built anew from the segments if it cannot be read.

    Raises StoreError when it cannot be opened, or not be repaired because others use it.
    """
    files, path = folder.files, folder.path
    if not folder.is_writable:
        return _open_to_read(folder), Repairs(other_bytes=other_bytes(path, INDEX_NAME))
    try:
        _make_file(folder)
        if folder.is_alone and (path / REBUILD_NAME).exists():
            raise IndexFault("index: found damaged before", is_corrupt=True)
        index = Index(files, path, Access.WRITE, log_bytes=log_bytes)
        if index.is_new and segment_files(path):
            return index, rebuild(index, files, path, now_s)
        try:
            return index, recover(index, files, path)
        except (IndexFault, OSError) as fault:
            if isinstance(fault, IndexFault) and fault.is_corrupt:
                index.close()
                raise
            # No space for it now. Nothing wrong is served meanwhile: reads check everything.
            return index, Repairs(other_bytes=other_bytes(path, INDEX_NAME))
    except IndexFault as fault:
        if not (fault.is_corrupt and folder.is_alone):
            raise StoreError(
                f"the cache folder {path}: {fault}; "
                + (
                    "stop the other servers that use it, so that it can be repaired"
                    if fault.is_corrupt
                    else "free space, or choose another cache_dir"
                )
            ) from fault
    except OSError as error:
        raise StoreError(
            f"the cache folder {path} cannot be used: {error.strerror}; "
            "free space or choose another cache_dir"
        ) from error
    return _replace_index(folder, log_bytes=log_bytes, now_s=now_s)


def recover(index: Index, files: Files, folder: Path) -> Repairs:
    """Seal or drop what dead processes left open, and drop rows and files without each other."""
    num_lost = 0
    orphans: list[str] = []
    with index.write() as db:
        present = segment_files(folder)
        known = rows.segments(db)
        for row in known:
            size = present.get(row.name)
            if size is None:
                num_lost += len(rows.pieces(db, row.segment_id))
                rows.delete_segment(db, row.segment_id)
                continue
            if not row.is_sealed and not _seal_dead(db, files, folder, row):
                continue
            num_lost += _drop_beyond(db, row.segment_id, size)
            orphans += rows.delete_empty(db, [row.segment_id])
        names = {row.name for row in known}
        orphans += [
            name for name in present if name not in names and _is_unlocked(files, folder / name)
        ]
    drop_files(files, folder, orphans)
    return Repairs(
        num_lost_records=num_lost,
        num_files=len(orphans),
        other_bytes=other_bytes(folder, INDEX_NAME),
    )


def rebuild(index: Index, files: Files, folder: Path, now_s: float) -> Repairs:
    """Fill an empty index from the headers in the segments. Ages are those of the last write:
    later uses were only in the index."""
    num_rebuilt = 0
    for name in sorted(segment_files(folder)):
        with contextlib.suppress(OSError):
            descriptor = files.open(folder / name, writable=False)
            try:
                size = os.fstat(descriptor).st_size
                with index.write() as db:
                    segment_id = rows.add_segment(db, name, 0)
                    day = 0
                    for offset, header in _scan(files, descriptor, size):
                        row = rows.NewRow(
                            meta=header.meta,
                            retention=header.retention,
                            payload_bytes=header.payload_bytes,
                            span_bytes=header.span_bytes,
                            segment_id=segment_id,
                            offset=offset,
                            last_used_s=min(header.written_s, now_s),
                        )
                        expires_s = row.last_used_s + header.retention.keep_s
                        if expires_s > now_s and rows.insert(db, row):
                            num_rebuilt += 1
                            day = max(day, expiry_day(expires_s))
                    rows.seal(db, segment_id, size)
                    rows.set_segment_day(db, segment_id, day)
            finally:
                files.close(descriptor)
    return replace(recover(index, files, folder), num_rebuilt_records=num_rebuilt)


def _scan(files: Files, descriptor: int, size: int) -> list[tuple[int, RecordHeader]]:
    """The records that are whole by their headers; goes on at the next page after anything else."""
    found = []
    offset = 0
    page = bytearray(ALIGN_BYTES)
    while offset < size:
        try:
            num_read = files.read(descriptor, [memoryview(page)], offset)
            header_bytes = header_bytes_at(memoryview(page)[:num_read])
            block = bytearray(aligned(min(header_bytes, MAX_HEADER_BYTES)))
            num_read = files.read(descriptor, [memoryview(block)], offset)
            header = decode_header(memoryview(block)[:num_read])
        except BadRecord:
            offset += ALIGN_BYTES
            continue
        if offset + header.span_bytes > size:
            break  # torn
        found.append((offset, header))
        offset += header.span_bytes
    return found


def _open_to_read(folder: OpenFolder) -> Index:
    # A log that was not written back must be read too; without one nobody is writing.
    log = folder.path / f"{INDEX_NAME}-wal"
    first = Access.READ if log.exists() and log.stat().st_size else Access.FROZEN
    try:
        return Index(folder.files, folder.path, first)
    except IndexFault as fault:
        raise StoreError(
            f"the read-only cache folder {folder.path}: {fault}; "
            "open it writable once, or choose another cache_dir"
        ) from fault


def _make_file(folder: OpenFolder) -> None:
    """SQLite gives the files beside the index the index's own mode."""
    if not (folder.path / INDEX_NAME).exists():
        with contextlib.suppress(FileExistsError):
            folder.files.close(folder.files.create(folder.path / INDEX_NAME))


def _replace_index(folder: OpenFolder, *, log_bytes: int, now_s: float) -> tuple[Index, Repairs]:
    files, path = folder.files, folder.path
    try:
        with contextlib.suppress(FileNotFoundError):
            (path / INDEX_NAME).replace(path / DAMAGED_NAME)
        for suffix in ("-wal", "-shm"):
            files.unlink(path / (INDEX_NAME + suffix))
        _make_file(folder)
        index = Index(files, path, Access.WRITE, log_bytes=log_bytes)
        repairs = rebuild(index, files, path, now_s)
        files.unlink(path / REBUILD_NAME)
    except (OSError, IndexFault) as error:
        raise StoreError(
            f"the index of the cache folder {path} is damaged and cannot be built anew ({error}); "
            "free space, choose another cache_dir, or delete the folder"
        ) from error
    return index, repairs


def _seal_dead(db: sqlite3.Connection, files: Files, folder: Path, row: rows.SegmentRow) -> bool:
    """Cut off what was never published. False: its writer lives."""
    descriptor = files.open(folder / row.name, writable=True)
    try:
        if not files.try_lock(descriptor, shared=False):
            return False
        size = min(rows.segment_end(db, row.segment_id), os.fstat(descriptor).st_size)
        files.truncate(descriptor, size)
        rows.seal(db, row.segment_id, size)
    finally:
        files.close(descriptor)
    return True


def _drop_beyond(db: sqlite3.Connection, segment_id: int, size: int) -> int:
    """Rows that point past their file's end: after a power cut, or when somebody cut the file."""
    if rows.segment_end(db, segment_id) <= size:
        return 0
    lost = [piece.key for piece in rows.pieces(db, segment_id, from_offset=size)]
    rows.delete(db, lost)
    return len(lost)


def _is_unlocked(files: Files, path: Path) -> bool:
    assert path.suffix == SEGMENT_SUFFIX
    try:
        descriptor = files.open(path, writable=True)
    except OSError:
        return False
    try:
        return files.try_lock(descriptor, shared=False)
    finally:
        files.close(descriptor)
