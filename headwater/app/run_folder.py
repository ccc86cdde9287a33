"""The folder of one front's sockets: only its user can enter it, and a kill leaves no trace.

The front holds a lock in it while it lives. Whoever finds a folder whose lock is free, the
next front or one of its own workers, removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "headwater-"
LOCK = "front.lock"


class RunFolder:
    """Made with mode 0700, under the system's folder for temporary files."""

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            remove_if_left(left)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_if_left(folder: Path) -> None:
    """Remove a run folder whose front is gone; anything else stays."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # no run folder, or not ours, or gone
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # its front lives
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
