"""Parts for the tests of the disk store: records with bytes of their own, a clock that is set,
and a system that refuses on request. The store, its files and its index are real."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.core.blocks import CacheIdentity, PrefixKey, block_keys, chain_key
from headwater.core.cache import KVPart, RecordMeta, Retention, RetentionClass
from headwater.core.ports import RecordStore
from headwater.disk.files import SystemFiles
from headwater.disk.store import DiskConfig, DiskStore

MIB = 2**20
DAY_S = 86400.0
NOW_S = 20_000 * DAY_S + 1000.0
US = CacheIdentity("model", "layout", "tenant")
WEEK = Retention(RetentionClass.CHAT, 7 * DAY_S)
DAYS = Retention(RetentionClass.AGENT, 3 * DAY_S)
BLOCK = 4
SIZE = 5000


class SetClock:
    """Unix seconds that only a test moves. Called, or asked as a ``Clock``."""

    def __init__(self, at_s: float = NOW_S) -> None:
        self.at_s = at_s

    def __call__(self) -> float:
        return self.at_s

    def now_s(self) -> float:
        return self.at_s


def chain(tokens: Sequence[int], identity: CacheIdentity = US) -> list[RecordMeta]:
    """The records of the full blocks, then one of the rest, if there is a rest."""
    metas: list[RecordMeta] = []
    parent = identity.root_key()
    for key, content in block_keys(parent, tokens, BLOCK):
        metas.append(meta_of(key, parent, len(metas) * BLOCK, content, identity))
        parent = key
    rest = tuple(tokens[len(metas) * BLOCK :])
    if rest:
        metas.append(meta_of(chain_key(parent, rest), parent, len(metas) * BLOCK, rest, identity))
    return metas


def meta_of(
    key: PrefixKey, parent: PrefixKey, start: int, tokens: tuple[int, ...], identity: CacheIdentity
) -> RecordMeta:
    return RecordMeta(
        key=key, parent=parent, identity=identity, part=KVPart.GLOBAL, start=start, tokens=tokens
    )


def first_blocks(numbers: Sequence[int], identity: CacheIdentity = US) -> list[RecordMeta]:
    """One record each, of prompts that have nothing in common."""
    return [chain([number] * BLOCK, identity)[0] for number in numbers]


def content(meta: RecordMeta, size: int = SIZE) -> bytes:
    """What the KV of this prefix is: no other record has these bytes."""
    return random.Random(meta.key).randbytes(size)


def pieces(data: bytes) -> list[memoryview]:
    """In uneven pieces, as a block's layers are."""
    view = memoryview(data)
    return [view[:7], view[7:300], view[300:]]


def put(
    store: RecordStore,
    metas: Sequence[RecordMeta],
    retention: Retention = WEEK,
    size: int = SIZE,
) -> list[bool]:
    return [store.put(meta, pieces(content(meta, size)), retention) for meta in metas]


def kept(store: RecordStore, metas: Sequence[RecordMeta]) -> list[bool]:
    return [found is not None for found in store.find([meta.key for meta in metas])]


def read(store: RecordStore, meta: RecordMeta, size: int = SIZE) -> bytes:
    into = bytearray(size)
    view = memoryview(into)
    store.read(meta, [view[:500], view[500:501], view[501:]])
    return bytes(into)


def open_store(
    folder: Path,
    clock: SetClock | None = None,
    *,
    max_bytes: int | None = 64 * MIB,
    files: SystemFiles | None = None,
    segment_bytes: int = 64 * MIB,
    reserve_bytes: int = 0,
) -> DiskStore:
    return DiskStore(
        DiskConfig(
            folder=folder,
            max_bytes=max_bytes,
            reserve_bytes=reserve_bytes,
            segment_bytes=segment_bytes,
        ),
        clock or SetClock(),
        files,
    )


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def disk_bytes(folder: Path) -> int:
    """What ``du`` says, and no less than the files' own sizes."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # others may be at work
            found = path.lstat()
            total += max(found.st_blocks * 512, found.st_size)
    return total


class FaultyFiles(SystemFiles):
    """Refuses the calls that a test names, from the nth on, for as long as it wants.

    ``calls`` counts all calls by name. Index commits are the call "commit".
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.refused: dict[str, int] = {}  # name -> errno
        self.refuse_call: int | None = None  # the one call, counted over all names
        self.refuse_errno = errno.ENOSPC
        self.num_calls = 0
        self.num_refused = 0
        self.free: int | None = None

    def ask(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.num_calls += 1
        code = self.refused.get(name)
        if self.num_calls == self.refuse_call:
            code = self.refuse_errno
        if code is not None:
            self.num_refused += 1
            raise OSError(code, os.strerror(code))

    def create(self, path: Path) -> int:
        self.ask("create")
        return super().create(path)

    def open(self, path: Path, *, writable: bool) -> int:
        if writable:
            self.ask("open")
        return super().open(path, writable=writable)

    def write(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> None:
        try:
            self.ask("write")
        except OSError:
            # The disk fills up in the middle of a write.
            whole = b"".join(pieces)
            super().write(descriptor, [memoryview(whole[: len(whole) // 2])], offset)
            raise
        super().write(descriptor, pieces, offset)

    def read(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        self.ask("read")
        return super().read(descriptor, pieces, offset)

    def sync(self, descriptor: int) -> None:
        self.ask("sync")
        super().sync(descriptor)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        self.ask("truncate")
        super().truncate(descriptor, num_bytes)

    def unlink(self, path: Path) -> None:
        self.ask("unlink")
        super().unlink(path)

    def free_bytes(self, folder: Path) -> int:
        return super().free_bytes(folder) if self.free is None else self.free

    def connect(self, uri: str, timeout_s: float) -> sqlite3.Connection:
        files = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
                if sql == "COMMIT":
                    try:
                        files.ask("commit")
                    except OSError as error:
                        raise sqlite3.OperationalError("database or disk is full") from error
                return super().execute(sql, parameters)

        return sqlite3.connect(
            uri,
            uri=True,
            timeout=timeout_s,
            isolation_level=None,
            check_same_thread=False,
            factory=Connection,
        )


class ReadOnlyFiles(SystemFiles):
    """A medium that takes no writes: the superuser who runs tests may write to any folder."""

    def create(self, path: Path) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open(self, path: Path, *, writable: bool) -> int:
        if writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return super().open(path, writable=False)

    def connect(self, uri: str, timeout_s: float) -> sqlite3.Connection:
        assert "mode=ro" in uri
        return super().connect(uri, timeout_s)
