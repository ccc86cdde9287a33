"""The system calls of the store, behind one seam: tests make every one of them fail.

Loops over short reads and writes and over the system's limit of pieces per call. Raises
OSError as the system does. Knows file descriptors, not records.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

_MAX_PIECES = 1024  # IOV_MAX where it is smallest among systems that we run on
FILE_MODE = 0o600


class Files(Protocol):
    """What the store asks of the system. One implementation, and wrappers in tests."""

    def create(self, path: Path) -> int:
        """A new file, readable and writable by its owner alone. Raises if there is one."""
        ...

    def open(self, path: Path, *, writable: bool) -> int: ...

    def close(self, descriptor: int) -> None: ...

    def read(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        """Fill ``pieces`` from ``offset`` on; gives fewer bytes only at the file's end."""
        ...

    def write(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> None: ...

    def sync(self, descriptor: int) -> None:
        """Data and size are on the disk when it returns."""
        ...

    def truncate(self, descriptor: int, num_bytes: int) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def try_lock(self, descriptor: int, *, shared: bool) -> bool:
        """Take the advisory lock of this open file, or say that another has it. It goes when
        the descriptor is closed or its process dies."""
        ...

    def expect_order(self, descriptor: int) -> None:
        """It will be read front to back: read far ahead. A hint."""
        ...

    def free_bytes(self, folder: Path) -> int: ...

    def connect(self, uri: str, timeout_s: float) -> sqlite3.Connection: ...


class SystemFiles:
    """The system's own."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def open(self, path: Path, *, writable: bool) -> int:
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        num_read = 0
        left = [piece for piece in pieces if piece.nbytes]
        while left:
            now = os.preadv(descriptor, left[:_MAX_PIECES], offset + num_read)
            if not now:
                break
            num_read += now
            left = _after(left, now)
        return num_read

    def write(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> None:
        num_written = 0
        left = [piece for piece in pieces if piece.nbytes]
        while left:
            now = os.pwritev(descriptor, left[:_MAX_PIECES], offset + num_written)
            if not now:  # never seen for regular files; an endless loop would be worse
                raise OSError(errno.EIO, "the system wrote nothing")
            num_written += now
            left = _after(left, now)

    def sync(self, descriptor: int) -> None:
        if hasattr(os, "fdatasync"):
            os.fdatasync(descriptor)
        else:  # pragma: no cover - macOS
            os.fsync(descriptor)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        os.ftruncate(descriptor, num_bytes)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def try_lock(self, descriptor: int, *, shared: bool) -> bool:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def expect_order(self, descriptor: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def free_bytes(self, folder: Path) -> int:
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def connect(self, uri: str, timeout_s: float) -> sqlite3.Connection:
        # Transactions are begun and ended by hand; a connection is used by one thread at a time.
        return sqlite3.connect(
            uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
        )


def _after(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``pieces`` after their first ``num_bytes``."""
    for position, piece in enumerate(pieces):
        if num_bytes < piece.nbytes:
            return [piece[num_bytes:], *pieces[position + 1 :]]
        num_bytes -= piece.nbytes
    return []
