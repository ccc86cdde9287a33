"""``GET /pools``: the fleet as the router sees it, for ``headwater pools`` and other tools.

Raw counters that only grow, and what waits now. Two looks tell what was done between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headwater.core.ports import BucketStatus, Generator, HandoffTotals, WorkerStatus

PATH = "/pools"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsBody:
    """The route's whole answer. Seconds are of the front's clock since its start."""

    ready: bool
    reason: str
    num_in_flight: int
    num_resumed: int
    workers: tuple[WorkerStatus, ...]
    buckets: tuple[BucketStatus, ...]
    handoffs: HandoffTotals


def pools_routes(generator: Generator) -> list[Route]:
    async def pools(_: HttpRequest) -> Response:
        status = generator.status()
        body = PoolsBody(
            ready=status.ready,
            reason=status.reason,
            num_in_flight=status.num_in_flight,
            num_resumed=status.num_resumed,
            workers=status.workers,
            buckets=status.buckets,
            handoffs=status.handoffs,
        )
        return Response(msgspec.json.encode(body), media_type="application/json")

    return [Route(PATH, pools, methods=["GET"])]
