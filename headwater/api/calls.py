"""One POST that generates, from its first body byte to its last answer byte.

    seat -> read body -> parse + tokenise (thread) -> start -> stream or whole

The same for every dialect; a :class:`Dialect` parses bodies and words answers.
Up to ``start`` every refusal is a real status; the caller's leaving ends the
work at any point.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headwater.api.admission import Ask, Entropy, build_requests
from headwater.api.body import read_json_body
from headwater.api.cache_report import CACHE_HEADER
from headwater.api.caching import namespace
from headwater.api.config import ApiConfig
from headwater.api.failure import ClientGone, Failure, failure_of, log_failure
from headwater.api.generation import Generation
from headwater.api.guard import CALLER
from headwater.api.metrics import Metrics
from headwater.api.observe import RECORD, CallRecord
from headwater.api.retention import Caller, choose_retention
from headwater.api.stream import send_json, send_stream, unless_gone
from headwater.core.errors import HeadwaterError, NotReady, Overloaded, PromptTooLong
from headwater.core.ports import Clock, Generator
from headwater.core.request import ModelInfo, Request
from headwater.recipe.conversation import Conversation
from headwater.recipe.output import OutputStream
from headwater.recipe.recipe import EncodedPrompt

NUM_PARSE_THREADS = 4

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What a dialect's answer says besides its content."""

    call_id: str
    created_s: int  # Unix time
    info: ModelInfo


class PromptRecorder(Protocol):
    """Takes note of prompts, where the operator wants that; returns at once."""

    def record(
        self,
        prompt: EncodedPrompt,
        *,
        conversation: Conversation | None,
        tenant: str,
        model: str,
        dialect: str,
    ) -> None: ...


class ParsedCall(Protocol):
    """One body, understood. Made by a dialect; both answers come from the same events."""

    @property
    def ask(self) -> Ask: ...

    @property
    def conversation(self) -> Conversation | None:
        """What the prompt was made of; None for text and ids."""
        ...

    @property
    def stream(self) -> bool: ...

    def open_output(self, position: int) -> OutputStream:
        """The text side of one choice of prompt ``position``."""
        ...

    def frames(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The whole event stream, its end mark included."""
        ...

    async def whole(self, generation: Generation) -> bytes:
        """The JSON answer."""
        ...

    def error_frame(self, failure: Failure) -> bytes:
        """The last frame of a stream that failed after its headers."""
        ...


class Dialect(Protocol):
    """How one route speaks. Stateless; ``parse`` runs in a thread."""

    @property
    def name(self) -> str: ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def keepalive_frame(self) -> bytes:
        """A sign of life inside a stream that has begun."""
        ...

    def parse(self, body: bytes, facts: CallFacts) -> ParsedCall:
        """Raises InvalidRequest or Refused."""
        ...

    def error_response(self, failure: Failure) -> Response: ...


@dataclass(slots=True)
class Door:
    """What every call needs, and how many are inside."""

    generator: Generator
    end_token_ids: frozenset[int]
    config: ApiConfig
    metrics: Metrics
    clock: Clock
    unix_time_s: Callable[[], float]
    entropy: Entropy = os.urandom
    recorder: PromptRecorder | None = None
    num_open_calls: int = 0
    # A few threads: a flood of long prompts queues here, and health goes on answering.
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_PARSE_THREADS, "headwater-parse")
    )

    @contextlib.contextmanager
    def seat(self) -> Iterator[None]:
        """A place inside. Raises Overloaded when all are taken."""
        if self.num_open_calls >= self.config.max_open_calls:
            raise Overloaded(
                f"{self.config.max_open_calls} calls are being answered; try again soon",
                retry_after_s=1.0,
            )
        self.num_open_calls += 1
        try:
            yield
        finally:
            self.num_open_calls -= 1

    def info(self) -> ModelInfo:
        """Raises NotReady until a worker has said what it serves."""
        info = self.generator.info
        if info is None:
            raise NotReady(f"no model is loaded yet ({self.generator.status().reason})")
        return info

    def facts(self, id_prefix: str) -> CallFacts:
        """Raises NotReady, as :meth:`info`."""
        return CallFacts(
            call_id=id_prefix + self.entropy(16).hex(),
            created_s=int(self.unix_time_s()),
            info=self.info(),
        )

    async def prepare(
        self, dialect: Dialect, body: bytes, facts: CallFacts, caller: Caller
    ) -> tuple[ParsedCall, tuple[Request, ...]]:
        """Parse, check and tokenise off the event loop."""

        def work() -> tuple[ParsedCall, tuple[Request, ...]]:
            call = dialect.parse(body, facts)
            tenant = namespace(caller.tenant, call.ask.cache.salt)
            requests = build_requests(
                call.ask,
                facts.info,
                self.end_token_ids,
                call_id=facts.call_id,
                tenant=tenant,
                retention=choose_retention(call.ask.cache, caller, self.config.keep),
                entropy=self.entropy,
            )
            if self.recorder is not None:
                for prompt in call.ask.prompts:
                    self.recorder.record(
                        prompt,
                        conversation=call.conversation,
                        tenant=tenant,
                        model=facts.info.model_id,
                        dialect=dialect.name,
                    )
            return call, requests

        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """The result of ``work``, done off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def read_body(self, http: HttpRequest) -> bytes:
        """Raises Refused for a body that is not JSON, too large or too slow."""
        return await read_json_body(
            http, max_bytes=self.config.max_body_bytes, timeout_s=self.config.body_timeout_s
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class CallRoute:
    """The ASGI endpoint of one dialect's route."""

    def __init__(self, door: Door, dialect: Dialect) -> None:
        self._door = door
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: CallRecord = scope[RECORD]
        try:
            with self._door.seat():
                facts = self._door.facts(self._dialect.id_prefix)
                record.call_id = facts.call_id
                body = await self._door.read_body(HttpRequest(scope, receive))
                work = self._answer(body, facts, record, scope[CALLER], send)
                del body  # may be large, and the call long
                await unless_gone(receive, work)
        except ClientGone:
            raise
        except HeadwaterError as error:
            if record.status:  # headers are out; the stream has said it
                raise
            log_failure(error, record.call_id)
            answer = self._dialect.error_response(failure_of(error))
            await answer(scope, receive, send)

    async def _answer(
        self, body: bytes, facts: CallFacts, record: CallRecord, caller: Caller, send: Send
    ) -> None:
        door = self._door
        call, requests = await door.prepare(self._dialect, body, facts, caller)
        del body
        generation = Generation(
            door.generator,
            requests,
            call.open_output,
            metrics=door.metrics,
            clock=door.clock,
            record=record,
        )
        try:
            await generation.start(door.config.refusal_wait_s)
            if call.stream:
                await send_stream(
                    send,
                    call.frames(generation),
                    keepalive_s=door.config.keepalive_s,
                    keepalive_frame=self._dialect.keepalive_frame,
                    error_frame=call.error_frame,
                    call_id=facts.call_id,
                    headers=_cache_headers(generation),
                )
            else:
                answer = await call.whole(generation)
                headers = (("x-request-id", facts.call_id), *_cache_headers(generation))
                await send_json(send, answer, headers=headers)
        except PromptTooLong as error:  # the router does not know what the field is called
            raise PromptTooLong(
                error.num_prompt_tokens, error.limit_tokens, param=call.ask.prompt_param
            ) from None
        finally:
            await generation.aclose()


def _cache_headers(generation: Generation) -> tuple[tuple[str, str], ...]:
    """What hit, where it is known by now: a stream's headers do not wait longer for it."""
    value = generation.cache_header
    return () if value is None else ((CACHE_HEADER, value),)
