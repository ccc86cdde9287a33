"""uvicorn, told what to serve and when to end.

Its own signal handlers raise the signal again when the server is done, which
would end this process before its worker. Here the signals only ask the server
to stop; ``launch`` then ends everything in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import uvicorn

from headwater.api.gate import Gate
from headwater.app.groups import ServerSettings


class HttpServer(uvicorn.Server):
    """Ends on :meth:`stop`: gently the first time, at once the second."""

    def __init__(self, gate: Gate, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                gate,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=settings.idle_connection_s,
                timeout_graceful_shutdown=round(settings.drain_s),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        yield

    def stop(self) -> None:
        """Finish what runs, up to ``server.drain_s``; called again: end now."""
        self.force_exit = self.should_exit
        self.should_exit = True
