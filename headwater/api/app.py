"""Joins the door's parts into one ASGI app.

    Observer( Guard( routes ) )

A further dialect adds its routes here and its error words in ``render``.
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
from headwater.api.anthropic.messages import CountDialect, MessagesDialect
from headwater.api.calls import CallRoute, Dialect, Door, PromptRecorder
from headwater.api.config import ApiConfig
from headwater.api.conversing import ConstraintCheck, Conversing, refuse_constraints
from headwater.api.decode import UnknownNames
from headwater.api.direct import DirectDialect, DirectRoute
from headwater.api.failure import Failure, FailureKind
from headwater.api.guard import Guard
from headwater.api.metrics import Metrics
from headwater.api.observe import Observer
from headwater.api.openai.chat import ChatDialect
from headwater.api.openai.completions import CompletionDialect
from headwater.api.openai.models import model_routes
from headwater.api.openai.responses import ResponsesDialect
from headwater.api.openai.tokenize import DetokenizeDialect, TokenizeDialect
from headwater.api.pools import pools_routes
from headwater.api.probes import probe_routes
from headwater.api.render import render_failure
from headwater.core.ports import Clock, Generator
from headwater.recipe.recipe import Recipe


def create_app(
    generator: Generator,
    recipe: Recipe,
    config: ApiConfig,
    clock: Clock,
    *,
    unix_time_s: Callable[[], float] = time.time,
    entropy: Entropy = os.urandom,
    check_constraint: ConstraintCheck = refuse_constraints,
    recorder: PromptRecorder | None = None,
) -> Starlette:
    """The HTTP app, for any ASGI server. Holds no state outside itself.

    ``clock`` times requests for log and metrics; ``unix_time_s`` dates answers;
    ``entropy`` makes call ids and the seeds of calls that bring none.
    ``check_constraint`` compiles a grammar in a parse thread, to refuse a bad one
    before any header; without it constrained output is refused. ``recorder`` takes note of
    each prompt; it is the caller's to close.
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
        recorder=recorder,
    )
    conversing = Conversing(recipe, check_constraint)
    calls: dict[str, Dialect] = {
        "/v1/chat/completions": ChatDialect.create(conversing, config, unknown),
        "/v1/completions": CompletionDialect.create(recipe, config, unknown),
        "/v1/responses": ResponsesDialect.create(conversing, config, unknown),
        "/v1/messages": MessagesDialect.create(conversing, config, unknown),
    }
    direct: dict[str, DirectDialect] = {
        "/v1/messages/count_tokens": CountDialect.create(conversing, config, unknown),
        "/tokenize": TokenizeDialect.create(conversing, config, unknown),
        "/detokenize": DetokenizeDialect.create(recipe, config, unknown),
    }
    routes = [
        *(Route(path, CallRoute(door, d), methods=["POST"]) for path, d in calls.items()),
        *(Route(path, DirectRoute(door, d), methods=["POST"]) for path, d in direct.items()),
        *model_routes(door, recipe.capabilities),
        *probe_routes(generator, metrics),
        *pools_routes(generator),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        door.close()

    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(
                Observer, config=config, metrics=metrics, clock=clock, render=render_failure
            ),
            Middleware(Guard, config=config, render=render_failure),
        ],
        exception_handlers={404: _no_route, 405: _wrong_method},
        lifespan=lifespan,
    )
    # A redirect would name the path again; a path is served as spelt or not at all.
    app.router.redirect_slashes = False
    return app


async def _no_route(http: HttpRequest, _: Exception) -> Response:
    failure = Failure(
        status=404, kind=FailureKind.NOT_FOUND, message="no such route", code="unknown_url"
    )
    return render_failure(http.url.path, failure)


async def _wrong_method(http: HttpRequest, error: Exception) -> Response:
    allowed = (error.headers or {}) if isinstance(error, HTTPException) else {}
    failure = Failure(
        status=405,
        kind=FailureKind.INVALID_REQUEST,
        message=f"this route does not take {http.method}",
        code="method_not_allowed",
        headers=tuple(allowed.items()),
    )
    return render_failure(http.url.path, failure)
