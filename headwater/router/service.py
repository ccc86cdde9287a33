"""The service loop: one worker's life after another, and the requests that live in it.

    launch -> Hello -> [ submit, StepDone, ... ] -> lost -> fail what it held -> back off -> launch

Implements the Generator port. A request enters only while a worker is up and
admission agrees; each accepted request ends exactly once: finished, aborted by
its caller, or failed with the worker that held it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from headwater.core.control import (
    NO_TIME,
    PROTOCOL_VERSION,
    Abort,
    FromWorker,
    Hello,
    StepDone,
    Submit,
    WorkerLoad,
)
from headwater.core.errors import (
    EngineFault,
    HeadwaterError,
    NotReady,
    Overloaded,
    PromptTooLong,
    WorkerLost,
)
from headwater.core.ports import Clock, ServiceStatus, WorkerChannel, WorkerLauncher
from headwater.core.request import FinishReason, ModelInfo, Request, RequestId, SequenceOutput
from headwater.core.tokenizer_source import TokenizerSource
from headwater.router.policy import (
    AdmissionLimits,
    InFlight,
    RefuseBusy,
    RefuseSize,
    decide_admission,
)

log = logging.getLogger("headwater.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    start_limit_s: float = 600.0  # from launch to Hello; over it the worker is given up
    stuck_after_s: float = 30.0  # pending work without a step for so long: not ready
    backoff_first_s: float = 0.5
    backoff_max_s: float = 30.0


@dataclass(slots=True)
class _Call:
    """One accepted request: what arrived for it and has not been taken yet."""

    request: Request
    arrived: list[SequenceOutput] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    open_choices: set[int] = field(default_factory=set)
    started: bool = False
    lost: bool = False


class Router:
    """Admission, dispatch and worker supervision for one worker. Use :meth:`run` as a task."""

    def __init__(self, launcher: WorkerLauncher, config: RouterConfig, clock: Clock) -> None:
        self._launcher = launcher
        self._config = config
        self._clock = clock
        self._calls: dict[RequestId, _Call] = {}
        self._channel: WorkerChannel | None = None
        self._hello: Hello | None = None
        self._up = False
        self._ready = asyncio.Event()
        self._reason = "starting: the worker is loading the model"
        self._num_restarts = 0
        self._load: WorkerLoad | None = None
        self._step_totals = NO_TIME
        self._last_progress_s = clock.now_s()

    # ------------------------------------------------------------ what api sees

    @property
    def info(self) -> ModelInfo | None:
        return self._hello.info if self._hello else None

    async def wait_ready(self) -> tuple[ModelInfo, TokenizerSource]:
        """What the first worker to come up serves, and how to speak to it."""
        await self._ready.wait()
        assert self._hello is not None
        return self._hello.info, self._hello.tokenizer

    def status(self) -> ServiceStatus:
        ready, reason = self._up, self._reason
        idle_s = self._clock.now_s() - self._last_progress_s
        if ready and self._calls and idle_s > self._config.stuck_after_s:
            ready, reason = False, f"stuck: work is pending and no step ended for {idle_s:.0f} s"
        return ServiceStatus(
            ready=ready,
            reason=reason,
            num_in_flight=len(self._calls),
            num_worker_restarts=self._num_restarts,
            load=self._load,
            step_totals=self._step_totals,
        )

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        call = self._admit(request)
        try:
            assert self._channel is not None
            await self._channel.send(Submit(request=request))
            while call.open_choices or call.arrived:
                while not call.arrived:
                    if call.lost:
                        raise WorkerLost(
                            "the worker that computed this request died; send the request again"
                        )
                    await call.wake.wait()
                    call.wake.clear()
                outputs, call.arrived = call.arrived, []
                for output in outputs:
                    if output.finish is FinishReason.FAILED:
                        raise EngineFault(output.error or "the step failed")
                    yield output
        finally:
            await self._leave(call)

    async def abort_choice(self, request: Request, index: int) -> None:
        call = self._calls.get(request.request_id)
        if call is not None and index in call.open_choices:
            await self._tell(Abort(request_id=request.request_id, index=index))

    def _admit(self, request: Request) -> _Call:
        if not self._up or self._hello is None:
            raise NotReady(f"the server cannot take requests now ({self._reason})")
        in_flight = InFlight(
            num_sequences=sum(len(c.open_choices) for c in self._calls.values()),
            num_waiting_tokens=sum(
                c.request.num_prompt_tokens for c in self._calls.values() if not c.started
            ),
        )
        match decide_admission(request, in_flight, self._config.limits, self._hello.info):
            case RefuseBusy(message=message, retry_after_s=retry_after_s):
                raise Overloaded(message, retry_after_s=retry_after_s)
            case RefuseSize(limit_tokens=limit_tokens):
                raise PromptTooLong(request.num_prompt_tokens, limit_tokens)
        if not self._calls:
            self._last_progress_s = self._clock.now_s()  # idle until now, not stuck
        call = _Call(request, open_choices=set(range(request.num_choices)))
        self._calls[request.request_id] = call
        return call

    async def _leave(self, call: _Call) -> None:
        """The caller is done with the request, one way or another; the worker must be, too."""
        self._calls.pop(call.request.request_id, None)
        if call.open_choices and not call.lost:
            await self._tell(Abort(request_id=call.request.request_id))

    async def _tell(self, message: Abort) -> None:
        # A worker that is gone holds nothing that could be aborted.
        with contextlib.suppress(WorkerLost):
            if self._channel is not None:
                await self._channel.send(message)

    # ------------------------------------------------------------ the worker's life

    async def run(self) -> None:
        """Keep one worker alive until cancelled. A worker that cannot even start the first
        time ends the loop with its error: nothing would get better by waiting."""
        backoff_s = self._config.backoff_first_s
        while True:
            channel: WorkerChannel | None = None
            try:
                channel = await self._launcher.launch()
                messages = channel.messages()
                self._welcome(channel, await self._first_word(messages))
                backoff_s = self._config.backoff_first_s
                async for message in messages:
                    if isinstance(message, StepDone):
                        self._dispatch(message)
            except HeadwaterError as error:
                self._down(error)
                if self._hello is None:
                    raise
            finally:
                self._up = False
                if channel is not None:
                    await channel.close()
            log.warning("worker lost (%s); starting another in %.1f s", self._reason, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._config.backoff_max_s)
            self._num_restarts += 1

    async def _first_word(self, messages: AsyncIterator[FromWorker]) -> Hello:
        limit_s = self._config.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                message = await anext(messages)
        except TimeoutError:
            raise WorkerLost(
                f"the worker did not load its model within {limit_s:.0f} s; "
                "raise worker.start_timeout_s if it needs longer"
            ) from None
        if not isinstance(message, Hello):
            raise WorkerLost("the worker did not say Hello first; start both from one installation")
        return message

    def _welcome(self, channel: WorkerChannel, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise WorkerLost(
                f"worker speaks protocol {hello.protocol_version}, the front {PROTOCOL_VERSION}; "
                "start both from one installation"
            )
        if self._hello is not None and hello.info.fingerprint != self._hello.info.fingerprint:
            raise WorkerLost(
                f"the restarted worker serves model {hello.info.fingerprint}, "
                f"the front serves {self._hello.info.fingerprint}; restart the server"
            )
        self._hello, self._channel = hello, channel
        self._load = None
        self._last_progress_s = self._clock.now_s()
        self._up, self._reason = True, "ready"
        self._ready.set()

    def _dispatch(self, message: StepDone) -> None:
        self._last_progress_s = self._clock.now_s()
        self._load = message.load
        if message.timing is not None:
            self._step_totals += message.timing
        for output in message.outputs:
            call = self._calls.get(output.request_id)
            if call is None:  # its caller has left; the abort is on its way
                continue
            call.started = True
            if output.finish is not None:
                call.open_choices.discard(output.index)
            call.arrived.append(output)
            call.wake.set()

    def _down(self, error: HeadwaterError) -> None:
        self._up = False
        self._reason = f"restarting: {error}"
        for call in self._calls.values():
            call.lost = True
            call.wake.set()
