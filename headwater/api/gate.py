"""The door before there is anything behind it: live, not ready, and saying why.

A large model loads for minutes; liveness must hold meanwhile, or whoever
watches the process ends it. ``app`` serves a Gate from the start and opens it
with the finished app.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.api.failure import Failure, FailureKind
from headwater.api.render import render_failure

LIVE_PATH = "/health/live"
READY_PATH = "/health/ready"
_RETRY_AFTER_S = 2


class Gate:
    """An ASGI app that answers for itself until :meth:`open`, then hands everything on."""

    def __init__(self, reason: Callable[[], str]) -> None:
        """``reason()`` says what is being waited for."""
        self._reason = reason
        self._app: Starlette | None = None
        self._life = AsyncExitStack()

    async def open(self, app: Starlette) -> None:
        """Serve ``app`` from now on. Its lifespan begins here and ends with :meth:`close`."""
        await self._life.enter_async_context(app.router.lifespan_context(app))
        self._app = app

    async def close(self) -> None:
        await self._life.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope["path"])(scope, receive, send)

    def _answer(self, path: str) -> Response:
        if path == LIVE_PATH:
            return Response(msgspec.json.encode({"status": "live"}), media_type="application/json")
        if path == READY_PATH:
            return Response(
                msgspec.json.encode({"status": "not ready", "reason": self._reason()}),
                status_code=503,
                media_type="application/json",
            )
        # Nothing is known of any model yet, so this tells a caller without a key nothing.
        return render_failure(
            path,
            Failure(
                status=503,
                kind=FailureKind.NOT_READY,
                message="the server is starting; try again shortly",
                headers=(("Retry-After", str(_RETRY_AFTER_S)),),
            ),
        )
