"""Routes for operators: liveness, readiness, metrics and version. No heavy work in any.

Live means that this process answers; ready means that a request would be taken
now, as the router sees it, with the reason when it would not.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headwater import __version__
from headwater.api.metrics import CONTENT_TYPE, Metrics
from headwater.core.ports import Generator


def probe_routes(generator: Generator, metrics: Metrics) -> list[Route]:
    async def live(_: HttpRequest) -> Response:
        return _json({"status": "live"})

    async def ready(_: HttpRequest) -> Response:
        status = generator.status()
        if status.ready:
            return _json({"status": "ready"})
        return _json({"status": "not ready", "reason": status.reason}, status=503)

    async def metrics_page(_: HttpRequest) -> Response:
        return Response(metrics.page(), headers={"content-type": CONTENT_TYPE})

    async def version(_: HttpRequest) -> Response:
        return _json({"version": __version__})

    return [
        Route("/health/live", live, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/metrics", metrics_page, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
    ]


def _json(content: dict[str, str], *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
