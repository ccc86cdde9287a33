"""The store's folder: whose it is, which format, who uses it now.

    format          "headwater-kv 1": nothing of another version is ever read
    lock            shared by everyone who uses the folder; alone by who repairs it
    index.sqlite    and its -wal and -shm
    <day>-<random>.seg
    index.damaged   an index that was set aside, if there was one; rebuild: a wish for that

Knows names, modes and locks; not what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from headwater.core.errors import StoreError
from headwater.disk.files import Files
from headwater.disk.record_format import FORMAT_VERSION
from headwater.disk.segments import SEGMENT_SUFFIX

FORMAT_NAME = "format"
LOCK_NAME = "lock"
REBUILD_NAME = "rebuild"
FORMAT_TEXT = f"headwater-kv {FORMAT_VERSION}\n"
FOLDER_MODE = 0o700
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_MAX_TRIES = 1000
_TRY_S = 0.01


@dataclass(slots=True)
class OpenFolder:
    """``is_alone``: nobody else uses it, until ``share``."""

    path: Path
    files: Files
    descriptor: int
    is_writable: bool
    is_alone: bool

    def share(self) -> None:
        """Let others in. Raises StoreError when the lock is lost to another for too long."""
        if self.is_alone:
            self.is_alone = False
            _wait_for_lock(self.files, self.descriptor, self.path, may_be_alone=False)

    def close(self) -> None:
        """Let go of the lock. Safe to call twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                self.files.close(descriptor)


def make_folder(path: Path) -> Path:
    """The folder, made if it was not there. Raises StoreError where it would not be safe."""
    path = path.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=FOLDER_MODE)
        found = path.stat()
    except OSError as error:
        raise StoreError(
            f"the cache folder {path} cannot be made: {error.strerror}; choose another cache_dir"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path} is not a folder; choose another cache_dir")
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"the cache folder {path} belongs to another user, who could change what is in it; "
            "choose a cache_dir of your own, for example a new folder inside it"
        )
    if found.st_mode & 0o022:
        raise StoreError(
            f"others can write to the cache folder {path} "
            f"(mode {stat.S_IMODE(found.st_mode):04o}); run: chmod 700 {path}"
        )
    return path


def open_folder(files: Files, path: Path) -> OpenFolder:
    """Lock the folder, alone if nobody else has it. The caller repairs what it must, then
    calls ``share``. Raises StoreError."""
    path = make_folder(path)
    names = {entry.name for entry in path.iterdir()}
    if names and FORMAT_NAME not in names and names - {LOCK_NAME}:
        raise StoreError(
            f"{path} holds other files and is no cache of Headwater; choose another cache_dir"
        )
    is_writable = True
    try:
        descriptor = _open_lock(files, path)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise StoreError(f"the cache folder {path}: {error.strerror}") from error
        is_writable = False
        try:
            descriptor = files.open(path / LOCK_NAME, writable=False)
        except OSError as inner:
            raise StoreError(
                f"the cache folder {path} is read-only and holds no cache; choose another cache_dir"
            ) from inner
    folder = OpenFolder(path, files, descriptor, is_writable, is_alone=False)
    try:
        folder.is_alone = _wait_for_lock(files, descriptor, path, may_be_alone=is_writable)
        _check_format(folder)
    except BaseException:
        folder.close()
        raise
    return folder


def segment_files(path: Path) -> dict[str, int]:
    """Names and sizes of the segment files that are there."""
    found = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(SEGMENT_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
    return found


def other_bytes(path: Path, index_name: str) -> int:
    """What all other files take, ours or not: they count against the cap as well."""
    total = 0
    for parent, _, names in os.walk(path):
        total += _size(Path(parent))
        for name in names:
            is_counted = parent == str(path) and (
                name.endswith(SEGMENT_SUFFIX) or name.startswith(index_name)
            )
            if not is_counted:
                total += _size(Path(parent) / name)
    return total


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        return max(found.st_blocks * 512, found.st_size)
    return 0


def _open_lock(files: Files, path: Path) -> int:
    try:
        return files.open(path / LOCK_NAME, writable=True)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            return files.create(path / LOCK_NAME)
        return files.open(path / LOCK_NAME, writable=True)


def _wait_for_lock(files: Files, descriptor: int, path: Path, *, may_be_alone: bool) -> bool:
    """True: alone. False: with others."""
    for _ in range(_MAX_TRIES):
        if may_be_alone and files.try_lock(descriptor, shared=False):
            return True
        if files.try_lock(descriptor, shared=True):
            return False
        time.sleep(_TRY_S)  # somebody repairs the folder
    raise StoreError(
        f"another process has been repairing the cache folder {path} for "
        f"{_MAX_TRIES * _TRY_S:.0f} s; wait for it, end it, or choose another cache_dir"
    )


def _is_unfinished(text: bytes) -> bool:
    """Whether the first start ended, or the disk was full, before the file was whole."""
    return len(text) < len(FORMAT_TEXT) and FORMAT_TEXT.encode().startswith(text)


def _check_format(folder: OpenFolder) -> None:
    path = folder.path / FORMAT_NAME
    try:
        text = path.read_bytes()[:100] if path.exists() else b""
        if folder.is_alone and _is_unfinished(text) and not segment_files(folder.path):
            descriptor = (
                folder.files.open(path, writable=True)
                if path.exists()
                else folder.files.create(path)
            )
            try:
                folder.files.write(descriptor, [memoryview(FORMAT_TEXT.encode())], 0)
            finally:
                folder.files.close(descriptor)
            text = FORMAT_TEXT.encode()
        is_ours = text == FORMAT_TEXT.encode() and folder.is_writable
        if is_ours and stat.S_IMODE(folder.path.stat().st_mode) != FOLDER_MODE:
            folder.path.chmod(FOLDER_MODE)
    except OSError as error:
        raise StoreError(
            f"the cache folder {folder.path} cannot be used: {error.strerror}; "
            "free space or choose another cache_dir"
        ) from error
    if text != FORMAT_TEXT.encode():
        raise StoreError(
            f"the cache folder {folder.path} has another format "
            f"({text.decode(errors='replace').strip()!r}, this program writes "
            f"{FORMAT_TEXT.strip()!r}); choose another cache_dir, or delete the folder"
        )
