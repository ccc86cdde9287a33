"""Joins a model file that packages bring in parts, once, into a file of ours.

A package index limits a package's size, so that a larger file comes as several
packages. The first start writes the whole file into the user's cache folder:

    parts -> FILE.part (under the lock FILE.lock) -> checked, flushed -> FILE

So FILE is there whole or not at all, whoever else starts or dies meanwhile; what a
killed start left is written over by the next. Knows nothing of what the file holds.
``catalogue`` says where the parts are; ``load`` calls.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headwater.core.errors import ModelError

log = logging.getLogger("headwater.model")

_CHUNK_BYTES = 2**20
_LOCK_WAIT_S = 120.0  # another process that joins needs seconds
_LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsLocation:
    """A GGUF file in parts: one behind the other they are ``folder / file_name``."""

    parts: tuple[Path, ...]
    folder: Path
    file_name: str
    num_bytes: int
    sha256: str
    install: str  # the package that brings the parts, for messages
    model_id: str


def joined_file(location: PartsLocation) -> Path:
    """The whole file; written first if it is not there.

    Raises ModelError when a part is missing or not what it should be, and when the
    folder cannot be written.
    """
    target = location.folder / location.file_name
    try:
        target = target.expanduser()
        if _is_whole(target, location.num_bytes):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{target.name}.lock")):
            # Whoever held the lock may have written it meanwhile.
            if not _is_whole(target, location.num_bytes):
                _join(location, target)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise ModelError(
            f"{location.model_id}: cannot write its weights, {location.num_bytes:,} bytes, to "
            f"{target} ({error}); make room there and let this user write, or "
            "write the packages' parts one behind the other into a .gguf file of your own and "
            "pass that"
        ) from error
    return target


def _is_whole(file: Path, num_bytes: int) -> bool:
    # The content was checked before the file got this name: its length tells enough,
    # and hashing a quarter of a gigabyte at every start of every process does not pay.
    return file.is_file() and file.stat().st_size == num_bytes


def _join(location: PartsLocation, target: Path) -> None:
    log.info("joining the parts of %s into %s", location.model_id, target)
    temporary = target.with_name(f"{target.name}.part")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as out:
            for part in location.parts:
                for chunk in _chunks(part):
                    digest.update(chunk)
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != location.sha256:
            raise ModelError(
                f"{location.model_id}: the parts that {location.install} brings do not make the "
                f"file they should (sha256 {digest.hexdigest()}, expected {location.sha256}); "
                "install it again with --force-reinstall"
            )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _chunks(part: Path) -> Iterator[bytes]:
    try:
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise ModelError(
            f"cannot read {part}, a part of a model ({error.strerror or error}); "
            "install its package again with --force-reinstall"
        ) from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; the system releases it when a process dies."""
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ModelError(
                        f"another process has held {path} for {_LOCK_WAIT_S:.0f} s; "
                        "end it, or wait for it, and start again"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        yield
