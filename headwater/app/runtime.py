"""What both kinds of process need before anything else: a clock, a log, exit codes.

Standard library only, so that a worker does not load the front's parts.
"""

from __future__ import annotations

import logging
import sys
import time

EXIT_OK = 0
EXIT_FAILED = 2
EXIT_FRONT_GONE = 3
EXIT_HURRIED = 130  # a second signal did not wait for the orderly end


class MonotonicClock:
    """Seconds of this process; never set back."""

    def now_s(self) -> float:
        return time.monotonic()


def set_up_logging(level: str) -> None:
    """One line per event on stderr. No prompt, output or key is ever handed to it."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # Libraries that tell each request's address and size at info or debug.
    for name in ("httpx", "httpcore", "asyncio", "numba"):
        logging.getLogger(name).setLevel(logging.WARNING)
