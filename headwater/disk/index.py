"""The store's index: a SQLite file, its tables, its connections and its faults.

One connection reads and one writes, each behind a lock, so that a lookup never waits for a
write. The log is a WAL that is not synced on every commit: after a power cut the last commits
may be missing, never half there. Knows no segment files and no policies; ``rows`` has the queries.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from headwater.disk.files import Files

INDEX_NAME = "index.sqlite"
SCHEMA_VERSION = 1
READ_TIMEOUT_S = 1.0
WRITE_TIMEOUT_S = 2.0  # how long a commit of another process may take
PAGE_BYTES = 4096

# Rows lie in the order in which they were written, which is the order of prompts: the rows of
# one prefix share pages, and the indexes hold small row numbers instead of whole keys.
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE identities (
    identity_id INTEGER PRIMARY KEY AUTOINCREMENT,
    fingerprint TEXT NOT NULL, layout TEXT NOT NULL, tenant TEXT NOT NULL,
    UNIQUE (fingerprint, layout, tenant)
);
CREATE TABLE segments (
    segment_id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    day INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    is_sealed INTEGER NOT NULL
);
CREATE TABLE records (
    record_id INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    parent BLOB NOT NULL,
    identity_id INTEGER NOT NULL,
    part INTEGER NOT NULL,
    class INTEGER NOT NULL,
    start INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    first_hash BLOB,
    payload_bytes INTEGER NOT NULL,
    span_bytes INTEGER NOT NULL,
    segment_id INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    last_used_s REAL NOT NULL,
    keep_s REAL NOT NULL,
    expires_s REAL NOT NULL,
    num_uses INTEGER NOT NULL
);
CREATE INDEX records_by_parent ON records (parent, last_used_s);
CREATE INDEX records_by_length ON records (parent, num_tokens);
CREATE INDEX records_by_segment ON records (segment_id, offset);
CREATE INDEX first_blocks ON records (first_hash) WHERE first_hash IS NOT NULL;
CREATE TABLE tombstones (seq INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, reason TEXT NOT NULL);
"""


class Access(Enum):
    WRITE = "write"
    READ = "read"  # others may write
    FROZEN = "frozen"  # on a medium that nobody writes


class IndexFault(Exception):
    """SQLite refused. ``is_corrupt``: the file itself is wrong and must be built anew."""

    def __init__(self, message: str, *, is_corrupt: bool) -> None:
        super().__init__(message)
        self.is_corrupt = is_corrupt


def fault_of(error: sqlite3.Error) -> IndexFault:
    code = getattr(error, "sqlite_errorcode", None)
    # Our statements are right, so a table or column that is not there is the file's fault.
    is_corrupt = code is not None and code & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_FORMAT,
    )
    return IndexFault(f"index: {error}", is_corrupt=is_corrupt)


class Index:
    """An open index. Raises IndexFault from every method that asks SQLite."""

    def __init__(
        self, files: Files, folder: Path, access: Access, *, log_bytes: int = 4 * 2**20
    ) -> None:
        """``log_bytes``: the WAL is written back when it is so long. Creates the tables in an
        empty file; the file itself must exist."""
        self._files = files
        self._folder = folder
        self.access = access
        self.is_new = False  # it had no tables
        self._log_pages = max(16, log_bytes // PAGE_BYTES)
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        try:
            if access is Access.WRITE:
                self._writer = self._connect(WRITE_TIMEOUT_S)
                self._make_tables(self._writer)
            self._reader = self._connect(READ_TIMEOUT_S)
            self._check_schema(self._reader)
        except sqlite3.Error as error:
            self.close()
            raise fault_of(error) from error
        except IndexFault:
            self.close()
            raise

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The reading connection; each statement sees what is committed when it begins."""
        with self._read_lock:
            if self._reader is None:
                raise IndexFault("index: closed", is_corrupt=False)
            try:
                yield self._reader
            except sqlite3.Error as error:
                raise fault_of(error) from error
            except (TypeError, ValueError, KeyError) as error:
                raise IndexFault("index: a row makes no sense", is_corrupt=True) from error

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction, alone among all processes: all of it, or nothing when this raises."""
        with self._write_lock:
            if self._writer is None:
                raise IndexFault("index: not open for writing", is_corrupt=False)
            writer = self._writer
            try:
                writer.execute("BEGIN IMMEDIATE")
                try:
                    yield writer
                    writer.execute("COMMIT")
                except BaseException:
                    self._roll_back()
                    raise
            except sqlite3.Error as error:
                raise fault_of(error) from error
            except (TypeError, ValueError, KeyError) as error:
                raise IndexFault("index: a row makes no sense", is_corrupt=True) from error

    def file_bytes(self) -> int:
        """Bytes of the index and its log now."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                total += (self._folder / (INDEX_NAME + suffix)).stat().st_size
        return total

    def close(self) -> None:
        """The last one to close writes the log back. Safe to call twice."""
        for name, lock in (("_reader", self._read_lock), ("_writer", self._write_lock)):
            with lock:
                connection: sqlite3.Connection | None = getattr(self, name)
                setattr(self, name, None)
                if connection is not None:
                    with contextlib.suppress(sqlite3.Error):
                        connection.close()

    def _roll_back(self) -> None:
        """Whatever happens here, the next transaction starts on a connection without one."""
        if self._writer is None:
            return
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                self._writer.close()  # which rolls back
            self._writer = None
            self._writer = self._connect(WRITE_TIMEOUT_S)

    def _connect(self, timeout_s: float) -> sqlite3.Connection:
        query = {
            Access.WRITE: "mode=rw",
            Access.READ: "mode=ro",
            Access.FROZEN: "mode=ro&immutable=1",
        }[self.access]
        path = (self._folder / INDEX_NAME).resolve()
        connection = self._files.connect(f"{path.as_uri()}?{query}", timeout_s)
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute("PRAGMA temp_store = MEMORY")  # no file outside the cap
        if self.access is Access.WRITE:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {self._log_pages}")
            connection.execute(f"PRAGMA journal_size_limit = {self._log_pages * PAGE_BYTES}")
        return connection

    def _make_tables(self, writer: sqlite3.Connection) -> None:
        if writer.execute("SELECT 1 FROM sqlite_master").fetchone():
            return  # a full disk must not keep an index from being read
        self.is_new = True
        writer.execute("BEGIN IMMEDIATE")
        try:
            if not writer.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in _SCHEMA.split(";"):
                    writer.execute(statement)
                writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            writer.execute("COMMIT")
        except BaseException:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            raise

    def _check_schema(self, reader: sqlite3.Connection) -> None:
        (version,) = reader.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            raise IndexFault(f"index: schema {version}, not {SCHEMA_VERSION}", is_corrupt=True)
        for table in ("facts", "identities", "segments", "records", "tombstones"):
            reader.execute(f"SELECT * FROM {table} LIMIT 1").fetchone()  # noqa: S608
