"""Joins the door's parts into one ASGI app.

    Observer( Guard( routes ) )

A further dialect adds its routes here and its error words in ``_render``.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headwater.api.admission import Entropy
from headwater.api.calls import CallRoute, Door
from headwater.api.config import ApiConfig
from headwater.api.decode import UnknownNames
from headwater.api.failure import Failure, FailureKind
from headwater.api.guard import Guard
from headwater.api.metrics import Metrics
from headwater.api.observe import Observer
from headwater.api.openai.chat import ChatDialect
from headwater.api.openai.completions import CompletionDialect
from headwater.api.openai.errors import error_response
from headwater.api.openai.models import model_routes
from headwater.api.probes import probe_routes
from headwater.core.ports import Clock, Generator
from headwater.recipe.chat import ChatRecipe


def create_app(
    generator: Generator,
    recipe: ChatRecipe,
    config: ApiConfig,
    clock: Clock,
    *,
    unix_time_s: Callable[[], float] = time.time,
    entropy: Entropy = os.urandom,
) -> Starlette:
    """The HTTP app, for any ASGI server. Holds no state outside itself.

    ``clock`` times requests for log and metrics; ``unix_time_s`` dates answers;
    ``entropy`` makes call ids and the seeds of calls that bring none.
    """
    metrics = Metrics(generator)
    unknown = UnknownNames()
    door = Door(
        generator=generator,
        end_token_ids=recipe.end_token_ids,
        config=config,
        metrics=metrics,
        clock=clock,
        unix_time_s=unix_time_s,
        entropy=entropy,
    )
    routes = [
        Route(
            "/v1/chat/completions",
            CallRoute(door, ChatDialect.create(recipe, config, unknown)),
            methods=["POST"],
        ),
        Route(
            "/v1/completions",
            CallRoute(door, CompletionDialect.create(recipe, config, unknown)),
            methods=["POST"],
        ),
        *model_routes(door),
        *probe_routes(generator, metrics),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        door.close()

    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Observer, config=config, metrics=metrics, clock=clock, render=_render),
            Middleware(Guard, config=config, render=_render),
        ],
        exception_handlers={404: _no_route, 405: _wrong_method},
        lifespan=lifespan,
    )
    # A redirect would name the path again; a path is served as spelt or not at all.
    app.router.redirect_slashes = False
    return app


def _render(path: str, failure: Failure) -> Response:
    """``failure`` in the dialect that ``path`` belongs to."""
    return error_response(failure)


async def _no_route(http: HttpRequest, _: Exception) -> Response:
    failure = Failure(
        status=404, kind=FailureKind.NOT_FOUND, message="no such route", code="unknown_url"
    )
    return _render(http.url.path, failure)


async def _wrong_method(http: HttpRequest, error: Exception) -> Response:
    allowed = (error.headers or {}) if isinstance(error, HTTPException) else {}
    failure = Failure(
        status=405,
        kind=FailureKind.INVALID_REQUEST,
        message=f"this route does not take {http.method}",
        code="method_not_allowed",
        headers=tuple(allowed.items()),
    )
    return _render(http.url.path, failure)
