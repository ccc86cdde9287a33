"""A worker process: build, say Hello, work until told to stop or the front is gone.

Started by ``processes`` as ``headwater worker``. Its standard input is the front's
lifeline; signals that a terminal or a service manager sends to the whole group are
the front's to act on, which drains first and ends its worker last.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from headwater.app.runtime import EXIT_FRONT_GONE, EXIT_OK, MonotonicClock, set_up_logging
from headwater.app.settings import Settings, set_thread_environment, usable_cores


def run(settings: Settings, *, connect: str, worker_id: str) -> int:
    """Serve the front at ``connect``. Returns the exit code."""
    set_up_logging(settings.server.log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with_the_front()
    set_thread_environment(settings.engine.threads or usable_cores())
    # After the environment: torch and numba read it when they are imported.
    from headwater.app.assemble import build_worker
    from headwater.transfer.channels import SocketWorkerPort

    clock = MonotonicClock()
    parts = build_worker(settings, clock)
    port = SocketWorkerPort(connect)
    try:
        parts.loop(worker_id, port, clock, stopping=lambda: False).run()
    finally:
        port.close()
    return EXIT_OK


def _end_with_the_front() -> None:
    """End this process when standard input closes: the front holds its other end."""

    def watch() -> None:
        # Not sys.stdin: its lock, held by this thread, would abort a process that ends by itself.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        # Not sys.exit: the main thread may be deep in a kernel, and nothing needs saving.
        os._exit(EXIT_FRONT_GONE)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
