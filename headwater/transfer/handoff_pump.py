"""A thread that carries what a handoff's side says and hears; the same for both sides.

    step's thread  --call, with the lock--> side --outbox--> [thread] --> socket
                   --wake----------------------------------> [thread]

The thread holds the lock to take and to give work, never while it copies, sends or waits,
so a step's thread waits for no byte. Knows sockets; what is said is the side's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger("headwater.transfer")

AFTER_FAULT_S = 0.1


class Wake:
    """Ends another thread's poll. Any thread may ring."""

    def __init__(self) -> None:
        self.fileno, self._write = os.pipe()
        os.set_blocking(self.fileno, False)
        os.set_blocking(self._write, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it rings loud enough
            os.write(self._write, b"\0")

    def silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fileno, 4096):
                pass

    def close(self) -> None:
        os.close(self.fileno)
        os.close(self._write)


class Pump:
    """Calls ``turn`` until it is closed, then ``end``, in a thread of its own.

    What ``turn`` raises is a bug of ours: it is logged, ``fault`` gives up what was under way,
    and the next turn serves the next handoffs."""

    def __init__(
        self,
        name: str,
        *,
        turn: Callable[[], None],
        fault: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self.wake = Wake()
        self._turn, self._fault, self._end = turn, fault, end
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread has ended. Safe to call twice."""
        if self._is_closing:
            return
        self._is_closing = True
        self.wake.ring()
        self._thread.join()
        self.wake.close()

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except Exception:
                log.exception("%s: all handoffs of this moment are given up", self._thread.name)
                self._fault()
                time.sleep(AFTER_FAULT_S)
        self._end()
