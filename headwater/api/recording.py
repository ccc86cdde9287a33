"""Opt-in request records: who asks what stays unsaid, only where prompts part is written down.

    parse thread --record()--> bounded queue --> one writer thread --> FILE, FILE.1
                                                                       FILE.key

``record`` never waits and never fails a request: what does not fit in the queue, or
cannot be written, is counted. FILE is renamed to FILE.1 before it would pass half of
``max_bytes``. FILE.key holds the random key of the digests, mode 0600 like the rest:
while it is there, records of before and after a restart compare; delete it (and start
again) and nothing that was written can be compared with what comes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.core.errors import ConfigError
from headwater.recipe.conversation import Conversation
from headwater.recipe.recipe import EncodedPrompt
from headwater.recipe.record import to_line
from headwater.recipe.record_maker import KEY_BYTES, RecordMaker

log = logging.getLogger(__name__)

MAX_LOG_BYTES: Final = 128 * 2**20
MAX_QUEUED: Final = 256
MAX_KEPT_MAKERS: Final = 1024
CLOSE_LIMIT_S: Final = 5.0
_FILE_MODE: Final = 0o600
# A link in the file's place would lead the writer elsewhere.
_OPEN_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    """One prompt on its way to the writer."""

    prompt: EncodedPrompt
    conversation: Conversation | None
    tenant: str
    model: str
    dialect: str
    time_s: float


class RequestRecorder:
    """Writes one line per prompt. ``record`` may be called from any thread."""

    def __init__(
        self,
        path: Path,
        key: bytes,
        *,
        max_bytes: int = MAX_LOG_BYTES,
        max_queued: int = MAX_QUEUED,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        """Starts the writer; ``open`` is the usual way in. ``max_bytes`` bounds both files."""
        self.num_recorded = 0
        self.num_dropped = 0  # the queue was full
        self.num_errors = 0  # not written: the system refused, or the line alone is too long
        self._path = path
        self._key = key
        self._max_file_bytes = max_bytes // 2
        self._is_torn = True  # until a line of ours is whole: the last server may have crashed
        self._unix_time_s = unix_time_s
        self._makers: dict[str, RecordMaker] = {}
        self._queue: queue.Queue[_Noted | None] = queue.Queue(max_queued)
        self._closing = threading.Event()
        self._counting = threading.Lock()  # many threads drop; one counts the rest
        self._writer = threading.Thread(target=self._run, name="headwater-recording", daemon=True)
        self._writer.start()

    @classmethod
    def open(cls, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> RequestRecorder:
        """Raises ConfigError if ``path`` or its key cannot be used."""
        try:
            os.close(os.open(path, _OPEN_FLAGS, _FILE_MODE))
            path.chmod(_FILE_MODE)
            key = _key_beside(path)
        except OSError as error:
            raise ConfigError(
                f"cannot record requests to {path}: {error.strerror}; name a file in a folder "
                "that this user may write, with record_requests"
            ) from None
        return cls(path, key, max_bytes=max_bytes)

    def record(
        self,
        prompt: EncodedPrompt,
        *,
        conversation: Conversation | None,
        tenant: str,
        model: str,
        dialect: str,
    ) -> None:
        """Note one prompt; returns at once. ``conversation`` is None for text and ids."""
        noted = _Noted(
            prompt=prompt,
            conversation=conversation,
            tenant=tenant,
            model=model,
            dialect=dialect,
            time_s=self._unix_time_s(),
        )
        try:
            self._queue.put_nowait(noted)
        except queue.Full:
            with self._counting:
                self.num_dropped += 1

    def close(self) -> None:
        """Write what is queued, for CLOSE_LIMIT_S at most. Safe to call twice."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then it is not waiting: it looks after each line
            self._queue.put_nowait(None)
        self._writer.join(CLOSE_LIMIT_S)

    def _run(self) -> None:
        while True:
            noted = self._queue.get()
            if noted is not None:
                self._write(noted)
            if self._closing.is_set() and self._queue.empty():
                return

    def _write(self, noted: _Noted) -> None:
        try:
            maker = self._maker(noted.tenant)
            record = maker.record(
                noted.prompt,
                noted.conversation,
                time_s=noted.time_s,
                model=noted.model,
                dialect=noted.dialect,
            )
            self._append(to_line(record))
            self.num_recorded += 1
        # The thread must outlive whatever one prompt does to it: later ones are still wanted.
        except Exception as error:
            self.num_errors += 1
            if self.num_errors == 1:
                # Its type only: an error's text may quote what it met.
                name = errno.errorcode.get(getattr(error, "errno", None) or 0, "")
                log.warning(
                    "a request was not recorded (%s %s); more are only counted",
                    type(error).__name__,
                    name,
                )

    def _maker(self, tenant: str) -> RecordMaker:
        maker = self._makers.get(tenant)
        if maker is None:
            if len(self._makers) >= MAX_KEPT_MAKERS:  # callers may name parts of their tenant
                self._makers.clear()
            maker = self._makers[tenant] = RecordMaker(self._key, tenant)
        return maker

    def _append(self, line: bytes) -> None:
        if len(line) > self._max_file_bytes:
            raise OSError(errno.EFBIG, "the line alone is longer than the log may be")
        file = os.open(self._path, _OPEN_FLAGS, _FILE_MODE)
        try:
            size = os.fstat(file).st_size
            if size and size + len(line) > self._max_file_bytes:
                os.close(file)
                file = -1
                self._path.replace(f"{self._path}.1")
                file = os.open(self._path, _OPEN_FLAGS, _FILE_MODE)
            # One write of a whole line: servers that share the file do not mix theirs. What a
            # crash or a full disk cut off gets its end first, or it would spoil this line too.
            data = b"\n" + line if self._is_torn else line
            self._is_torn = os.write(file, data) != len(data)
            if self._is_torn:
                raise OSError(errno.ENOSPC, "the line was cut off")
        finally:
            if file >= 0:
                os.close(file)


def _key_beside(path: Path) -> bytes:
    """The log's key, made if there is none. Raises OSError, ConfigError for a damaged one."""
    place = path.with_name(path.name + ".key")
    draft = path.with_name(f"{path.name}.key.{os.urandom(8).hex()}")
    if not place.exists():
        # Written whole before it has its name; of two servers at once, one key stays.
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _FILE_MODE)
        try:
            os.write(file, os.urandom(KEY_BYTES))
            os.close(file)
            os.link(draft, place)
        except FileExistsError:
            log.debug("another server made the key first")
        finally:
            draft.unlink()
    file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        is_private = stat.S_IMODE(os.fstat(file).st_mode) & 0o077 == 0
        key = os.read(file, KEY_BYTES + 1)
    finally:
        os.close(file)
    if len(key) != KEY_BYTES or not is_private:
        raise ConfigError(
            f"{place} is not a key of {KEY_BYTES} bytes that only this user can read; delete it "
            "to start with a new key (older records cannot be compared then)"
        )
    return key
