"""``headwater worker`` started by hand: keeps one worker at a front, one life after another.

    keep --starts--> worker process (--once) --tcp, curve--> front
      ^                  |
      +--- backoff <-----+  the front is gone, the connection was cut, the worker crashed

A life is a process: what a life left in memory is gone with it, and its KV on disk is not.
Ends by itself when the front refuses the worker: another would be refused, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time

from headwater.app.runtime import EXIT_FAILED, EXIT_OK, set_up_logging
from headwater.app.secret_file import read_secret
from headwater.app.settings import Settings, as_flags, worker_environment, worker_threads
from headwater.core.errors import ConfigError
from headwater.core.fleet import Role

SIGNAL_CHECK_S = 0.1

log = logging.getLogger("headwater.worker")


def is_remote(connect: str) -> bool:
    """Whether the front is reached over a network; else it started this process itself."""
    return connect.startswith("tcp://")


def worker_secret(settings: Settings) -> bytes:
    """Raises ConfigError without a usable secret file."""
    path = settings.fleet.secret_file
    if path is None:
        raise ConfigError("a front is joined with its secret: name the file with --secret-file")
    return read_secret(path)


def default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def keep(settings: Settings, *, connect: str, worker_id: str, role: Role) -> int:
    """Until SIGINT or SIGTERM, or until the front refuses. Returns the exit code."""
    set_up_logging(settings.server.log_level)
    worker_secret(settings)  # first: a bad file is known at once
    return _Keeper(settings, connect=connect, worker_id=worker_id, role=role).run()


class _Keeper:
    def __init__(self, settings: Settings, *, connect: str, worker_id: str, role: Role) -> None:
        self._settings = settings
        self._command = [
            sys.executable, "-m", "headwater.app.cli", "worker", "--once",
            f"--connect={connect}", f"--worker-id={worker_id}", f"--role={role}",
            *as_flags(settings),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._end())
        worker = self._settings.worker
        backoff_s = worker.restart_backoff_s
        while True:
            start_s = time.monotonic()
            code = self._live()
            if self._is_ending:
                return EXIT_OK
            if code == EXIT_FAILED:
                log.error("the worker is not started again: see its last line")
                return EXIT_FAILED
            if time.monotonic() - start_s > worker.restart_backoff_max_s:
                backoff_s = worker.restart_backoff_s
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.warning("the worker ended with %s; the next one in %.1f s", how, backoff_s)
            if not self._pause(backoff_s):
                return EXIT_OK
            backoff_s = min(2 * backoff_s, worker.restart_backoff_max_s)

    def _pause(self, seconds: float) -> bool:
        """False when a signal came meanwhile."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not self._is_ending:
            time.sleep(min(seconds, SIGNAL_CHECK_S))
        return not self._is_ending

    def _live(self) -> int:
        # Its standard input is its lifeline: it ends when this process does, however that ends.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            env=worker_environment(worker_threads(self._settings)),
        )
        if self._is_ending:  # the signal came before there was a process
            self._cut()
        code = self._process.wait()
        self._cut()
        return code

    def _end(self) -> None:
        """The first signal lets the worker store its KV; the second does not wait for it."""
        process = self._process
        if self._is_ending and process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self._is_ending = True
        self._cut()

    def _cut(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
