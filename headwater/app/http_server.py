"""uvicorn, told what to serve. When to end is not its business.

Its own signal handlers would end this process before its workers, and would close the
door while the server drains. ``launch`` acts on signals and ends everything in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from headwater.api.gate import Gate
from headwater.app.groups import ServerSettings

# For last bytes to slow readers: when the server ends there is nothing else left to send.
LAST_BYTES_S = 5


class HttpServer(uvicorn.Server):
    """Ends after :meth:`stop`."""

    def __init__(self, gate: Gate, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                gate,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=settings.idle_connection_s,
                timeout_graceful_shutdown=LAST_BYTES_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, *, at_once: bool = False) -> None:
        """Close the door. Answers that are being written may finish, unless ``at_once``."""
        self.should_exit = True
        self.force_exit |= at_once
