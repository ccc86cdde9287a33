"""The outermost wrapper: one access line and one count per request, and the last catch.

Knows status, route, seconds and token counts; never a body, a query string, a
path as typed, or a header. Whatever no room foresaw ends here as a plain 500.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.api.config import ApiConfig
from headwater.api.failure import UNEXPECTED, ClientGone, log_failure
from headwater.api.guard import RenderFailure
from headwater.api.metrics import Metrics
from headwater.core.ports import Clock
from headwater.core.request import Usage

access_log = logging.getLogger("headwater.api.access")

RECORD = "headwater.record"  # key of the ASGI scope

STATUS_CLIENT_GONE = 499  # logged and counted only: there is nobody to send it to
NO_ROUTE = "unmatched"
PROBES = frozenset({"/health/live", "/health/ready", "/metrics"})
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@dataclass(slots=True)
class CallRecord:
    """Filled in while a request is answered; read once at its end."""

    arrived_s: float
    call_id: str = "-"
    status: int = 0
    usage: Usage = field(default_factory=Usage)
    complete: bool = False  # every choice reached its finish
    client_gone: bool = False


class Observer:
    """Counts and logs what ``app`` answers."""

    def __init__(
        self,
        app: ASGIApp,
        config: ApiConfig,
        metrics: Metrics,
        clock: Clock,
        render: RenderFailure,
    ) -> None:
        self._app = app
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = CallRecord(arrived_s=self._clock.now_s())
        scope[RECORD] = record

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        with self._metrics.http_in_flight.track_inprogress():
            try:
                await self._app(scope, receive, send_and_note)
            except ClientGone:
                # Hanging up after the last token is no leaving: the call was served.
                record.client_gone = not record.complete
            # The boundary of the process: a bug in one call must not show its text to
            # anyone, nor end the connection without an answer.
            except Exception as error:
                log_failure(error, record.call_id)
                if record.status == 0:
                    answer = self._render(scope["path"], UNEXPECTED)
                    await answer(scope, receive, send_and_note)
            finally:
                self._close(scope, record)

    def _close(self, scope: Scope, record: CallRecord) -> None:
        seconds = self._clock.now_s() - record.arrived_s
        route = scope.get("route")
        path = route.path if isinstance(route, Route) else NO_ROUTE
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        # Headers already sent keep their status: the stream's own ending is counted apart.
        status = record.status or STATUS_CLIENT_GONE
        self._metrics.http_request(path, method, status, seconds)
        if not self._config.access_log or (path in PROBES and not self._config.log_probes):
            return
        usage = record.usage
        access_log.info(
            "%s %s %d %.3fs prompt=%d hit=%d output=%d%s %s",
            method,
            path,
            status,
            seconds,
            usage.num_prompt_tokens,
            usage.num_hit_tokens,
            usage.num_output_tokens,
            " caller-left" if record.client_gone else "",
            record.call_id,
        )
