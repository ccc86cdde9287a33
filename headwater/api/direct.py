"""POST routes that answer at once: counting and tokenising. No generation, no place in a queue.

The same door as for generating calls (seat, body rules, parse threads, errors in
the dialect); the router is never asked.
"""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.api.calls import CallFacts, Door
from headwater.api.failure import ClientGone, Failure, failure_of, log_failure
from headwater.api.observe import RECORD, CallRecord
from headwater.api.stream import unless_gone
from headwater.core.errors import HeadwaterError


class DirectDialect(Protocol):
    """How one such route speaks. Stateless."""

    @property
    def id_prefix(self) -> str: ...

    def answer(self, body: bytes, facts: CallFacts) -> bytes:
        """The JSON answer; runs in a thread. Raises InvalidRequest or Refused."""
        ...

    def error_response(self, failure: Failure) -> Response: ...


class DirectRoute:
    """The ASGI endpoint of one route."""

    def __init__(self, door: Door, dialect: DirectDialect) -> None:
        self._door = door
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: CallRecord = scope[RECORD]
        try:
            with self._door.seat():
                facts = self._door.facts(self._dialect.id_prefix)
                record.call_id = facts.call_id
                body = await self._door.read_body(HttpRequest(scope, receive))
                work = self._door.in_thread(lambda: self._dialect.answer(body, facts))
                answer = Response(await unless_gone(receive, work), media_type="application/json")
        except ClientGone:
            raise
        except HeadwaterError as error:
            log_failure(error, record.call_id)
            answer = self._dialect.error_response(failure_of(error))
        answer.headers["x-request-id"] = record.call_id
        await answer(scope, receive, send)
