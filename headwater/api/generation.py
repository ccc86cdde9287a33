"""One call while it runs: its requests, their choices, what was counted, how it ended.

    generate() per request --pump task--> one queue --> events() --> dialect's frames or whole

The one state machine behind streaming and not: a dialect sees the same events
either way. Choices are numbered over the whole call: prompt p's choice i is
p * num_choices + i. Knows no dialect and no socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headwater.api.cache_report import cache_header
from headwater.api.metrics import Ending, Metrics
from headwater.api.observe import CallRecord
from headwater.api.reasons import told
from headwater.api.stream import end_tasks
from headwater.core.errors import EngineFault, InvalidRequest, NotReady, Overloaded
from headwater.core.ports import Clock, Generator
from headwater.core.request import FinishReason, PromptReport, Request, SequenceOutput, Usage
from headwater.recipe.output import OutputDelta, OutputStream

# With these the router never took the request: no sequence existed.
_REFUSALS = (Overloaded, NotReady, InvalidRequest)


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What one step brought for one choice. ``prompt`` comes with the choice's first event,
    ``delta.finish`` with its last."""

    choice: int
    delta: OutputDelta
    prompt: PromptReport | None


@dataclass(slots=True)
class _Choice:
    stream: OutputStream
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    last_output_s: float | None = None
    finish: FinishReason | None = None


class Generation:
    """Runs ``requests`` and merges their outputs. Always :meth:`aclose` it.

    ``open_stream`` makes the text side of one choice of prompt p.
    """

    def __init__(
        self,
        generator: Generator,
        requests: Sequence[Request],
        open_stream: Callable[[int], OutputStream],
        *,
        metrics: Metrics,
        clock: Clock,
        record: CallRecord,
    ) -> None:
        self._generator = generator
        self._requests = requests
        self._metrics = metrics
        self._clock = clock
        self._record = record
        self._choices = [
            _Choice(open_stream(position))
            for position, request in enumerate(requests)
            for _ in range(request.num_choices)
        ]
        self._reports: dict[int, PromptReport] = {}
        self._pumps: list[asyncio.Task[None]] = []
        # An output of request p, or a pump that has ended.
        self._arrived: asyncio.Queue[tuple[int, SequenceOutput] | asyncio.Task[None]] = (
            asyncio.Queue()
        )
        self._quiet = set(range(len(requests)))  # requests without an output so far
        self._settled = asyncio.Event()
        self._refused = False
        self._failed = False
        self._booked = False

    async def start(self, refusal_wait_s: float) -> None:
        """Hand the requests to the router and wait a moment for its refusal.

        Returns at the first output of every request (which may be no more than what hit), or
        after ``refusal_wait_s``.
        Raises what a request was refused with; then nothing of the call runs on.
        """
        for position in range(len(self._requests)):
            pump = asyncio.create_task(self._pump(position))
            pump.add_done_callback(self._pump_ended)
            self._pumps.append(pump)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(refusal_wait_s):
                await self._settled.wait()
        for position in self._quiet:
            pump = self._pumps[position]
            if pump.done() and not pump.cancelled() and (error := pump.exception()) is not None:
                self._refused = isinstance(error, _REFUSALS)
                self._failed = True
                await end_tasks(*self._pumps)
                raise error

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """Events of all choices, ending after the last finish. Raises what ended it early."""
        num_open = len(self._choices)
        try:
            while num_open:
                match await self._arrived.get():
                    case (position, output):
                        event = self._take(position, output)
                        if event is None:
                            continue
                        if event.delta.finish is not None:
                            num_open -= 1
                            await self._end_early(position, output)
                        yield event
                    case pump:
                        pump.result()  # raises what the request failed with
                        self._check_complete(self._pumps.index(pump))
        except Exception:
            self._failed = True
            raise

    @property
    def reports(self) -> Mapping[int, PromptReport]:
        """What is known so far of each prompt's hit, by its place in the call."""
        return self._reports

    @property
    def cache_header(self) -> str | None:
        """None until every prompt's hit is known."""
        if len(self._reports) < len(self._requests):
            return None
        return cache_header(self._reports.values())

    @property
    def usage(self) -> Usage:
        """What has been computed so far; a prompt counts once, whatever its choices."""
        return Usage(
            num_hit_tokens=sum(report.num_hit_tokens for report in self._reports.values()),
            num_miss_tokens=sum(report.num_miss_tokens for report in self._reports.values()),
            num_output_tokens=sum(choice.num_output_tokens for choice in self._choices),
            num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    async def aclose(self) -> None:
        """Stop what still runs and book the call, once. Safe at any moment."""
        try:
            await end_tasks(*self._pumps)
        finally:
            # Also when the caller hangs up in this very moment and we are cancelled.
            self._book()

    def _book(self) -> None:
        if self._booked or self._refused:
            return
        self._booked = True
        self._take_rest()
        usage = self._record.usage = self.usage
        self._metrics.prompt_hit_tokens.inc(usage.num_hit_tokens)
        self._metrics.prompt_miss_tokens.inc(usage.num_miss_tokens)
        self._metrics.output_tokens.inc(usage.num_output_tokens)
        for report in self._reports.values():
            if report.cache is not None and report.cache.load_s > 0:
                self._metrics.cache_load_seconds.observe(report.cache.load_s)
        self._record.complete = all(choice.finish is not None for choice in self._choices)
        unfinished = Ending.FAILED if self._failed else Ending.CANCELLED
        for choice in self._choices:
            # The engine's word counts, not the socket's: a caller that hangs up
            # after its last token was served.
            ending = unfinished if choice.finish is None else Ending(choice.finish.value)
            self._metrics.sequence_finished(ending)

    async def _pump(self, position: int) -> None:
        outputs = self._generator.generate(self._requests[position])
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if output.prompt is not None:
                    output = replace(output, prompt=told(output.prompt))
                    self._note_hit(position, output)
                self._arrived.put_nowait((position, output))
                if self._quiet:
                    self._quiet.discard(position)
                    if not self._quiet:
                        self._settled.set()

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        if pump.cancelled():
            return
        self._arrived.put_nowait(pump)
        if pump.exception() is not None:
            self._settled.set()

    def _take(self, position: int, output: SequenceOutput) -> ChoiceEvent | None:
        number = position * self._requests[position].num_choices + output.index
        choice = self._choices[number]
        if choice.finish is not None:  # its stop string was seen; this was on its way
            return None
        if output.finish is FinishReason.FAILED:
            raise EngineFault(output.error or "the step failed")
        if output.finish is FinishReason.ABORTED:
            raise EngineFault("the worker aborted a sequence that nobody had asked it to")
        delta = choice.stream.push(output)
        self._note_time(choice, len(output.tokens))
        choice.num_output_tokens += delta.num_tokens
        choice.num_reasoning_tokens += delta.num_reasoning_tokens
        choice.finish = delta.finish
        return ChoiceEvent(number, delta, output.prompt)

    def _note_hit(self, position: int, output: SequenceOutput) -> None:
        """Choices of one prompt share it: the first choice's report counts."""
        if output.prompt is None or (output.index != 0 and position in self._reports):
            return
        self._reports[position] = output.prompt

    async def _end_early(self, position: int, output: SequenceOutput) -> None:
        """A choice whose text is complete (a stop string) need not be computed further."""
        if output.finish is None:
            await self._generator.abort_choice(self._requests[position], output.index)

    def _take_rest(self) -> None:
        """Count what was computed but never asked for: the caller left before it was sent."""
        while not self._arrived.empty():
            item = self._arrived.get_nowait()
            if isinstance(item, tuple):
                # What went wrong is of no interest any more; the choice stays unfinished.
                with contextlib.suppress(EngineFault):
                    self._take(*item)

    def _note_time(self, choice: _Choice, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now_s = self._clock.now_s()
        if choice.last_output_s is not None:
            gap_s = (now_s - choice.last_output_s) / num_tokens
            self._metrics.inter_token_seconds.observe(gap_s)
        elif all(other.last_output_s is None for other in self._choices):
            self._metrics.first_token_seconds.observe(now_s - self._record.arrived_s)
        choice.last_output_s = now_s

    def _check_complete(self, position: int) -> None:
        num_choices = self._requests[position].num_choices
        own = self._choices[position * num_choices : (position + 1) * num_choices]
        if any(choice.finish is None for choice in own):
            raise EngineFault("the request's outputs ended before all its choices had finished")
