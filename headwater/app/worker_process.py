"""A worker process: build, say Hello, work until told to stop or the front is gone.

Started by ``processes``, or by ``joined_worker`` for a front elsewhere. Its standard input
is its starter's lifeline: when that closes, the worker may still store its last KV, and not
for long. Signals that a terminal or a service manager sends to the whole group are the
starter's to act on: a front drains first and ends its workers last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from headwater.app.joined_worker import is_remote, worker_secret
from headwater.app.run_folder import remove_if_left
from headwater.app.runtime import EXIT_FRONT_GONE, EXIT_OK, MonotonicClock, set_up_logging
from headwater.app.settings import Settings, set_thread_environment, worker_threads
from headwater.core.fleet import Role
from headwater.core.ports import WorkerPort
from headwater.transfer.channels import SocketWorkerPort
from headwater.transfer.joining import FrontUnreachable, JoinPort
from headwater.transfer.peer import FleetKeys

log = logging.getLogger("headwater.worker")

# From the front's end to ours: less than the front waits before it kills (``processes``).
ORDERLY_END_S = 4.0


class Lifeline:
    """Ends this process when standard input closes: the front holds its other end."""

    def __init__(self, folder: Path | None) -> None:
        """``folder``: of the front's sockets, where it is on this machine."""
        self._folder = folder
        self._is_working = threading.Event()
        self._is_cut = threading.Event()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def begin_work(self) -> None:
        """From here on there may be KV to store: the end may take a moment."""
        self._is_working.set()

    @property
    def is_cut(self) -> bool:
        return self._is_cut.is_set()

    def tidy(self) -> None:
        """Take away what a front that was killed could not."""
        if self.is_cut and self._folder is not None:
            remove_if_left(self._folder)

    def _watch(self) -> None:
        # Not sys.stdin: its lock, held by this thread, would abort a process that ends by itself.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self._is_cut.set()
        if self._is_working.is_set():
            time.sleep(ORDERLY_END_S)  # the main thread is quicker, unless it is stuck
        self.tidy()
        # Not sys.exit: the main thread may be deep in a kernel.
        os._exit(EXIT_FRONT_GONE)


def run(settings: Settings, *, connect: str, worker_id: str, role: Role) -> int:
    """Serve the front at ``connect`` for one life. Returns the exit code."""
    set_up_logging(settings.server.log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lifeline = Lifeline(run_folder_of(connect))
    set_thread_environment(worker_threads(settings))
    try:
        # Before the model: an address or a secret that is wrong is known at once.
        with contextlib.closing(_open_port(settings, connect)) as port:
            _work(settings, port, lifeline, worker_id, role)
            if isinstance(port, JoinPort) and port.ending is not None:
                raise port.ending
            lifeline.tidy()
    except FrontUnreachable as error:
        log.warning("%s", error)
        return EXIT_FRONT_GONE
    return EXIT_OK


def _work(
    settings: Settings, port: WorkerPort, lifeline: Lifeline, worker_id: str, role: Role
) -> None:
    # After the environment: torch and numba read it when they are imported.
    from headwater.app.assemble import build_worker

    clock = MonotonicClock()
    parts = build_worker(settings, clock, role=role)
    lifeline.begin_work()
    try:
        parts.loop(worker_id, port, clock, stopping=lambda: lifeline.is_cut).run()
    finally:
        parts.close()


def run_folder_of(connect: str) -> Path | None:
    """The folder of the front's sockets, where it is on this machine."""
    return None if is_remote(connect) else Path(connect.removeprefix("ipc://")).parent


def _open_port(settings: Settings, connect: str) -> SocketWorkerPort | JoinPort:
    if not is_remote(connect):
        return SocketWorkerPort(connect)
    keys = FleetKeys.of(worker_secret(settings))
    return JoinPort(connect, keys, silent_s=settings.fleet.joined_silent_s)
