"""How a server ends: what signals ask for, and in which order everything stops.

1st signal: not ready, new requests 503 --drain_s--> what still runs ends with an error
            --> workers store their KV and end --> exit 0
2nd signal: workers are killed, connections cut
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Protocol

log = logging.getLogger("headwater")


class Ending:
    """SIGINT and SIGTERM, counted. Made in the event loop's thread."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


class Drainable(Protocol):
    """What ``drain`` needs of the router."""

    async def drain(self, limit_s: float) -> int: ...


async def drain(service: Drainable, ending: Ending, limit_s: float) -> None:
    """Let what runs finish, up to ``limit_s``, or until a second signal."""
    log.info("ending: requests that run may go on for %g s", limit_s)
    draining = asyncio.create_task(service.drain(limit_s))
    hurrying = asyncio.create_task(ending.hurried.wait())
    try:
        await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            num_cut = draining.result()
            if num_cut:
                log.warning("%d requests had not finished and ended with an error", num_cut)
    finally:
        for task in (draining, hurrying):
            task.cancel()
        await asyncio.gather(draining, hurrying, return_exceptions=True)
