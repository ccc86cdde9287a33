"""A scripted Generator, and the real app behind real sockets on a free loopback port.

Scripts play what a worker would commit, byte by byte, so that a test knows each
token; the recipe is the real one for byte models.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import uvicorn

from headwater.api.app import create_app
from headwater.api.calls import PromptRecorder
from headwater.api.config import ApiConfig
from headwater.api.conversing import ConstraintCheck, refuse_constraints
from headwater.core.cache import CacheReport, StoreStats, Tier
from headwater.core.control import StepTiming, WorkerLoad
from headwater.core.ports import ServiceStatus
from headwater.core.request import (
    FinishReason,
    ModelInfo,
    PromptReport,
    Request,
    RequestId,
    SampledToken,
    SequenceOutput,
    TokenLogprob,
)
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.recipe import Recipe

Script = Callable[[Request], AsyncIterator[SequenceOutput]]

MODEL_ID = "toy"
CONTEXT_TOKENS = 256
END_ID = 258  # the byte recipe's end of turn

INFO = ModelInfo(
    model_id=MODEL_ID,
    family="llama",
    fingerprint="f",
    vocab_size=512,
    context_tokens=CONTEXT_TOKENS,
    block_tokens=16,
    num_blocks=64,
    kv_bytes_per_token=64,
    weights_format="fp32",
    weights_bytes=1,
    numerics="reference",
    device="cpu",
)

LOAD = WorkerLoad(
    num_waiting=1,
    num_prefilling=2,
    num_decoding=3,
    num_free_blocks=40,
    num_cached_blocks=14,
    num_held_blocks=10,
    num_steps=7,
    num_preemptions=1,
    num_recomputed_tokens=5,
    num_hit_tokens=100,
    num_miss_tokens=50,
    num_output_tokens=0,
    num_loading=1,
    num_host_hit_tokens=20,
    num_disk_hit_tokens=30,
    num_replayed_tokens=4,
    num_dropped_loads=1,
    num_dropped_stores=2,
    num_queued_stores=3,
    misses=(("new", 5), ("expired", 1)),
    tiers=(
        StoreStats(tier=Tier.HOST, num_records=7, num_bytes=700, max_bytes=7000),
        StoreStats(
            tier=Tier.DISK,
            num_records=9,
            num_bytes=900,
            max_bytes=9000,
            num_evicted=6,
            num_expired=5,
            num_damaged=4,
            num_errors=3,
            is_writable=False,
        ),
    ),
    step_error=0.125,
    num_budgeted_steps=7,
    num_steps_within=6,
)

TIMING = StepTiming(
    plan_s=0.001,
    forward_s=0.02,
    sample_s=0.003,
    apply_s=0.004,
    num_prefill_tokens=1,
    num_decode_tokens=1,
    predicted_s=0.025,
)


class SteadyClock:
    """Real monotonic seconds."""

    def now_s(self) -> float:
        return time.monotonic()


def byte_recipe() -> ChatRecipe:
    source = TokenizerSource(kind="byte", vocab_size=INFO.vocab_size, model_id=MODEL_ID)
    return ChatRecipe.from_source(source)


def sampled(request: Request, token_id: int) -> SampledToken:
    num_logprobs = request.sampling.num_logprobs
    if num_logprobs is None:
        return SampledToken(token_id)
    top = tuple(TokenLogprob(token_id + i, -0.5 - i) for i in range(num_logprobs))
    return SampledToken(token_id, -0.5, top)


def prompt_report(request: Request, hit: int, cache: CacheReport | None = None) -> PromptReport:
    logprobs = None
    if request.num_prompt_logprobs is not None:
        logprobs = tuple(
            SampledToken(token, -1.0, (TokenLogprob(token, -1.0),))
            for token in request.prompt_tokens[1:]
        )
    return PromptReport(
        num_hit_tokens=hit,
        num_miss_tokens=request.num_prompt_tokens - hit,
        cache=cache,
        logprobs=logprobs,
    )


def say_with_hit(text: str, report: CacheReport, *, prefill_s: float = 0.0) -> Script:
    """What hit as soon as it is settled, in an output of its own; ``text`` after the prefill."""

    async def play(request: Request) -> AsyncIterator[SequenceOutput]:
        hit = prompt_report(request, report.num_hit_tokens, report)
        for index in range(request.num_choices):
            yield SequenceOutput(request_id=request.request_id, index=index, prompt=hit)
        await asyncio.sleep(prefill_s)
        async for output in say(text)(request):
            yield replace(output, prompt=None)

    return play


def say(*texts: str | bytes, hit: int = 0, delay_s: float = 0.0, step_tokens: int = 1) -> Script:
    """Choice i says ``texts[i]`` (the last text when there are more choices), then ends its turn.

    Cut to the request's limit, as a worker would, with LENGTH.
    """

    async def play(request: Request) -> AsyncIterator[SequenceOutput]:
        spoken = [
            text.encode() if isinstance(text, str) else text
            for text in (texts[min(i, len(texts) - 1)] for i in range(request.num_choices))
        ]
        limit = request.stop.max_output_tokens
        for index, data in enumerate(spoken):
            ids = list(data[:limit])
            ended = len(data) < limit
            steps = [ids[at : at + step_tokens] for at in range(0, len(ids), step_tokens)] or [[]]
            for number, step in enumerate(steps):
                if delay_s:
                    await asyncio.sleep(delay_s)
                is_last = number == len(steps) - 1
                yield SequenceOutput(
                    request_id=request.request_id,
                    index=index,
                    tokens=tuple(sampled(request, token) for token in step),
                    prompt=prompt_report(request, hit) if number == 0 else None,
                    finish=FinishReason.LENGTH if is_last and not ended else None,
                )
            if ended:
                yield SequenceOutput(
                    request_id=request.request_id,
                    index=index,
                    finish=FinishReason.STOP,
                    stop_token_id=END_ID,
                )

    return play


def say_then_raise(text: str, error: Exception) -> Script:
    """``text`` without an end, then ``error``."""

    async def play(request: Request) -> AsyncIterator[SequenceOutput]:
        report: PromptReport | None = prompt_report(request, 0)
        for token in text.encode():
            yield SequenceOutput(
                request_id=request.request_id,
                index=0,
                tokens=(sampled(request, token),),
                prompt=report,
            )
            report = None
        raise error

    return play


def wait_forever(*, after: str = "") -> Script:
    """``after``, one byte a millisecond, then silence: a long prefill or a stuck decode."""

    async def play(request: Request) -> AsyncIterator[SequenceOutput]:
        report: PromptReport | None = prompt_report(request, 0)
        for token in after.encode():
            await asyncio.sleep(0.001)
            yield SequenceOutput(
                request_id=request.request_id,
                index=0,
                tokens=(sampled(request, token),),
                prompt=report,
            )
            report = None
        await asyncio.Event().wait()

    return play


@dataclass
class ScriptedGenerator:
    """A Generator that plays a script, and remembers what was asked of it."""

    script: Script = field(default_factory=lambda: say("hello"))
    info: ModelInfo | None = INFO
    home: ModelInfo = INFO  # what ``play`` sets ``info`` back to
    ready: bool = True
    reason: str = "ready"
    requests: list[Request] = field(default_factory=list)
    aborted: list[tuple[RequestId, int]] = field(default_factory=list)
    running: set[RequestId] = field(default_factory=set)

    def status(self) -> ServiceStatus:
        return ServiceStatus(
            ready=self.ready,
            reason=self.reason,
            num_in_flight=len(self.running),
            num_worker_restarts=2,
            load=LOAD,
            step_totals=TIMING,
        )

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            async for output in self.script(request):
                yield output
        finally:
            self.running.discard(request.request_id)

    async def abort_choice(self, request: Request, index: int) -> None:
        self.aborted.append((request.request_id, index))

    def play(self, script: Script) -> None:
        """From now on, and with the memory of earlier requests wiped."""
        self.script = script
        self.requests.clear()
        self.aborted.clear()
        self.info = self.home
        self.ready, self.reason = True, "ready"

    def wait_idle(self, within_s: float = 2.0) -> None:
        wait_until(lambda: not self.running, within_s)


@dataclass(frozen=True)
class Served:
    """A running server."""

    generator: ScriptedGenerator
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.Client:
        # No TLS here: reading the certificate store would be most of a test's time.
        return httpx.Client(base_url=self.url, timeout=10, trust_env=False, verify=False, **options)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, headers=headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path, headers=headers)

    def chat(self, content: object = "hi", **fields: object) -> httpx.Response:
        body = {"model": MODEL_ID, "messages": [{"role": "user", "content": content}]} | fields
        return self.post("/v1/chat/completions", body)

    def message(self, content: object = "hi", **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL_ID, "max_tokens": 1000, "messages": messages} | fields
        return self.post("/v1/messages", body)

    def respond(self, content: object = "hi", **fields: object) -> httpx.Response:
        return self.post("/v1/responses", {"model": MODEL_ID, "input": content} | fields)

    def complete(self, prompt: object = "hi", **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL_ID, "prompt": prompt} | fields)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of the metrics page; 0 while it is not there."""
        inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        wanted = f"{name}{{{inside}}} " if labels else f"{name} "
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(wanted):
                return float(line.removeprefix(wanted))
        return 0.0

    def raw(self, data: bytes, *, read: bool = True, first_line_only: bool = False) -> bytes:
        """Send bytes as they are; read until the server closes, or until the status is there."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(data)
            received = b""
            while read and not (first_line_only and b"\r\n" in received):
                part = connection.recv(65536)
                if not part:
                    break
                received += part
            return received


@contextlib.contextmanager
def serving(
    config: ApiConfig | None = None,
    generator: ScriptedGenerator | None = None,
    *,
    recipe: Recipe | None = None,
    check_constraint: ConstraintCheck = refuse_constraints,
    recorder: PromptRecorder | None = None,
) -> Iterator[Served]:
    """The app on a free loopback port, in a thread with its own event loop."""
    generator = generator or ScriptedGenerator()
    app = create_app(
        generator,
        recipe or byte_recipe(),
        replace(config or ApiConfig(), refusal_wait_s=0.02),
        SteadyClock(),
        check_constraint=check_constraint,
        recorder=recorder,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started, 10)
        yield Served(generator, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def wait_until(condition: Callable[[], bool], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.002)


def frames_of(text: str) -> list[str]:
    """The payloads of a stream's ``data:`` frames, in order; comments are skipped."""
    return [
        frame.removeprefix("data: ")
        for frame in text.split("\n\n")
        if frame and not frame.startswith(":")
    ]


def chunks_of(text: str) -> list[dict[str, Any]]:
    """A complete stream's chunks; the end mark must be there."""
    frames = frames_of(text)
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of an OpenAI-style answer, complete as clients expect it."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
