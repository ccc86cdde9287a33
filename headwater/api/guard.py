"""The first thing a request meets: deny by default, on every path and method.

An ASGI wrapper around the routes. It runs before routing, so a path that no
route knows is refused like any other, and a new route cannot forget the check.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.api.auth import HostList, Keyring
from headwater.api.config import ApiConfig
from headwater.api.failure import Failure, Refused
from headwater.api.retention import Caller

# Exact spellings, GET and HEAD only: what a process supervisor needs, and nothing else.
PUBLIC_PATHS = frozenset({"/health/live"})

CALLER = "headwater.caller"  # key of the ASGI scope

EVERYBODY = Caller()  # of a server without keys

RenderFailure = Callable[[str, Failure], Response]


class Guard:
    """Lets a request through to ``app`` with its caller in the scope, or answers it."""

    def __init__(self, app: ASGIApp, config: ApiConfig, render: RenderFailure) -> None:
        self._app = app
        self._render = render
        self._keys = Keyring(config.keys) if config.keys else None
        self._hosts = HostList(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self._app(scope, receive, send)
            case "http":
                try:
                    scope[CALLER] = self._caller(scope)
                except Refused as error:
                    answer = self._render(scope["path"], error.failure)
                    await answer(scope, receive, send)
                else:
                    await self._app(scope, receive, send)
            case _:
                # No route speaks anything else (a websocket, say): close it unopened.
                await send({"type": "websocket.close", "code": 1008})

    def _caller(self, scope: Scope) -> Caller:
        if self._keys is None:
            self._hosts.check(scope["headers"])
            return EVERYBODY
        if scope["path"] in PUBLIC_PATHS and scope["method"] in ("GET", "HEAD"):
            return EVERYBODY
        return self._keys.caller_of(scope["headers"])
