"""The load generator: sends requests at a concurrency or a rate and times every chunk.

Knows no statistics and no terminal: it fills a ``Recorder`` that ``bench``
reads, also when the run is broken off. Times are seconds since the measured
part began. Client and server share the machine in a local run: the client
costs CPU time too.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

import httpx

from headwater.app.completions import (
    ReportedUsage,
    StreamFailed,
    first_model,
    open_client,
    stream_answer,
)
from headwater.app.prompts import FIRST_ID, PromptKind, PromptOptions, make_prompt
from headwater.app.target import Target
from headwater.core.errors import ConfigError
from headwater.core.randomness import keyed_uniform

# At a rate the server cannot follow, requests pile up in the client. This bounds
# the pile; starts that it delays are counted, since they hide queueing time.
MAX_IN_FLIGHT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One load run. ``rate_per_s`` None: ``concurrency`` requests are always in flight;
    else requests start at random (exponential) intervals, ``rate_per_s`` on average."""

    target: Target
    endpoint: Literal["chat", "completions"] = "chat"
    prompt_kind: PromptKind = "text"
    num_requests: int = 32
    num_warmup: int = 2
    concurrency: int = 4
    rate_per_s: float | None = None
    num_input_tokens: int = 256
    num_output_tokens: int = 128
    shared_prefix: float = 0.0
    vocab_size: int = 32_000
    seed: int = 0
    ignore_end: bool = True  # send ignore_eos, so that every answer has the length asked for

    def __post_init__(self) -> None:
        for name, low in (
            ("num_requests", 1), ("num_warmup", 0), ("concurrency", 1),
            ("num_input_tokens", 1), ("num_output_tokens", 1), ("vocab_size", FIRST_ID + 1),
        ):  # fmt: skip
            if getattr(self, name) < low:
                raise ConfigError(
                    f"bench: {name} must be at least {low}, got {getattr(self, name)}"
                )
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise ConfigError(f"bench: rate must be more than 0, got {self.rate_per_s}")
        if not 0 <= self.shared_prefix <= 1:
            raise ConfigError(f"bench: shared prefix must be 0 to 1, got {self.shared_prefix}")
        if self.prompt_kind == "ids" and self.endpoint != "completions":
            raise ConfigError("bench: prompts of token ids need --endpoint completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. ``chunk_times_s`` has the arrival of every chunk with content."""

    start_s: float
    end_s: float
    chunk_times_s: tuple[float, ...]
    usage: ReportedUsage
    error_kind: str | None = None
    error_message: str = ""

    @property
    def ok(self) -> bool:
        return self.error_kind is None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from sending to the first chunk with content."""
        return self.chunk_times_s[0] - self.start_s if self.chunk_times_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Time between chunks, which is the ITL where a chunk carries one token."""
        times = self.chunk_times_s
        return tuple(after - before for before, after in itertools.pairwise(times))

    @property
    def is_counted(self) -> bool:
        """Whether the server said how many tokens it sent."""
        return self.usage.num_output_tokens is not None

    @property
    def num_output_tokens(self) -> int:
        """As the server counted, else one a chunk."""
        counted = self.usage.num_output_tokens
        return len(self.chunk_times_s) if counted is None else counted


@dataclass(slots=True)
class Recorder:
    """What a run has found so far; complete when ``run_load`` returned."""

    model: str = ""
    samples: list[Sample] = field(default_factory=list)
    num_started: int = 0
    num_delayed_starts: int = 0  # at a rate: started late, since MAX_IN_FLIGHT were running
    num_warmed_up: int = 0
    wall_s: float = 0.0


async def run_load(
    options: LoadOptions,
    recorder: Recorder,
    *,
    on_change: Callable[[], None] = lambda: None,
    now_s: Callable[[], float] = time.perf_counter,
) -> None:
    """Warm up, then measure ``options.num_requests`` requests into ``recorder``.

    A request that fails is a sample with an error. Raises StreamFailed only if
    the model's name is not given and cannot be asked for.
    """
    async with open_client(options.target) as client:
        recorder.model = options.target.model or await first_model(client, options.target)
        run = _Run(options, client, recorder, on_change, now_s)
        await run.warm_up()
        await run.measure()


class _Run:
    """One load run over one client."""

    def __init__(
        self,
        options: LoadOptions,
        client: httpx.AsyncClient,
        recorder: Recorder,
        on_change: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._options = options
        self._client = client
        self._recorder = recorder
        self._on_change = on_change
        self._now_s = now_s
        self._prompts = PromptOptions(
            kind=options.prompt_kind,
            num_tokens=options.num_input_tokens,
            shared=options.shared_prefix,
            vocab_size=options.vocab_size,
            seed=options.seed,
        )

    async def warm_up(self) -> None:
        """Unmeasured requests, with prompts that the measured ones do not repeat."""
        waiting = iter(range(self._options.num_warmup))

        async def one_after_another() -> None:
            for index in waiting:
                await self._ask(-1 - index, origin_s=0.0)
                self._recorder.num_warmed_up += 1
                self._on_change()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._options.concurrency, self._options.num_warmup)):
                group.create_task(one_after_another())

    async def measure(self) -> None:
        origin_s = self._now_s()
        try:
            if self._options.rate_per_s is None:
                await self._at_concurrency(origin_s)
            else:
                await self._at_rate(origin_s, self._options.rate_per_s)
        finally:
            # Also when broken off: what was measured until then took this long.
            self._recorder.wall_s = self._now_s() - origin_s

    async def _at_concurrency(self, origin_s: float) -> None:
        waiting = iter(range(self._options.num_requests))

        async def one_after_another() -> None:
            # The iterator is shared: each task takes the next request when it is free.
            for index in waiting:
                await self._record(index, origin_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._options.concurrency, self._options.num_requests)):
                group.create_task(one_after_another())

    async def _at_rate(self, origin_s: float, rate_per_s: float) -> None:
        room = asyncio.Semaphore(MAX_IN_FLIGHT)
        due_s = 0.0

        async def one(index: int) -> None:
            try:
                await self._record(index, origin_s)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for index in range(self._options.num_requests):
                await asyncio.sleep(max(0.0, due_s - (self._now_s() - origin_s)))
                if room.locked():
                    self._recorder.num_delayed_starts += 1
                await room.acquire()
                group.create_task(one(index))
                # Inverse of the exponential distribution; 1 - u is never 0.
                draw = keyed_uniform(self._options.seed, index, "bench arrival")
                due_s += -math.log(1.0 - draw) / rate_per_s

    async def _record(self, index: int, origin_s: float) -> None:
        self._recorder.num_started += 1
        self._recorder.samples.append(await self._ask(index, origin_s))
        self._on_change()

    async def _ask(self, index: int, origin_s: float) -> Sample:
        path, body = self._body(make_prompt(self._prompts, index))
        times: list[float] = []
        usage = ReportedUsage()
        failure: StreamFailed | None = None
        start_s = self._now_s() - origin_s
        try:
            answer = stream_answer(self._client, self._options.target, path, body)
            async with aclosing(answer) as deltas:
                async for delta in deltas:
                    if delta.text or delta.reasoning:
                        times.append(self._now_s() - origin_s)
                    usage = delta.usage or usage
            if not times:
                failure = StreamFailed("no content", "the answer held no text")
        except StreamFailed as error:
            failure = error
        return Sample(
            start_s=start_s,
            end_s=self._now_s() - origin_s,
            chunk_times_s=tuple(times),
            usage=usage,
            error_kind=failure.kind if failure else None,
            error_message=str(failure) if failure else "",
        )

    def _body(self, prompt: str | list[int]) -> tuple[str, Mapping[str, object]]:
        options = self._options
        common: dict[str, object] = {
            "model": self._recorder.model,
            "max_tokens": options.num_output_tokens,
            "temperature": 0,
        }
        if options.ignore_end:
            common["ignore_eos"] = True
        if options.endpoint == "completions":
            return "/completions", {**common, "prompt": prompt}
        return "/chat/completions", {**common, "messages": [{"role": "user", "content": prompt}]}
