"""What the door spends on one streamed token: ids to text, text to parts, parts to frames.

    python bench/api.py [--tokens 20000] [--rounds 5]

One core, no socket and no engine: committed tokens are fed one a step, as a
decode step brings them, through the running call's own state machine into the
bytes that would be sent. Each dialect beside the part that all share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from headwater.api.admission import build_requests
from headwater.api.anthropic.messages import MessagesDialect
from headwater.api.calls import CallFacts, Dialect
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing, refuse_constraints
from headwater.api.decode import UnknownNames
from headwater.api.generation import Generation
from headwater.api.metrics import Metrics
from headwater.api.observe import CallRecord
from headwater.api.openai.chat import ChatDialect
from headwater.api.openai.responses import ResponsesDialect
from headwater.core.control import NO_TIME
from headwater.core.ports import ServiceStatus
from headwater.core.request import (
    FinishReason,
    ModelInfo,
    PromptReport,
    Request,
    RequestId,
    SampledToken,
    SequenceOutput,
)
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.load import load_recipe
from headwater.recipe.recipe import Recipe

WORDS = b"the quick brown fox jumps over the lazy dog\n"

INFO = ModelInfo(
    model_id="bytes",
    family="llama",
    fingerprint="f",
    vocab_size=512,
    context_tokens=10**7,
    block_tokens=16,
    num_blocks=64,
    kv_bytes_per_token=64,
    weights_format="fp32",
    weights_bytes=1,
    numerics="reference",
    device="cpu",
)


@dataclass(frozen=True, slots=True)
class Playback:
    """A Generator that has every output at hand."""

    num_tokens: int

    @property
    def info(self) -> ModelInfo:
        return INFO

    def status(self) -> ServiceStatus:
        return ServiceStatus(
            ready=True,
            reason="",
            num_in_flight=0,
            num_worker_restarts=0,
            load=None,
            step_totals=NO_TIME,
        )

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        first = SequenceOutput(
            request_id=request.request_id,
            index=0,
            prompt=PromptReport(num_hit_tokens=0, num_miss_tokens=request.num_prompt_tokens),
        )
        yield first
        steps = [
            SequenceOutput(request_id=request.request_id, index=0, tokens=(SampledToken(token),))
            for token in WORDS
        ]
        for number in range(self.num_tokens):
            yield steps[number % len(steps)]
            if number % 64 == 63:
                await asyncio.sleep(0)  # a router would have waited for the next step
        yield replace(first, prompt=None, finish=FinishReason.STOP)

    async def abort_choice(self, request: Request, index: int) -> None:
        """Nothing here runs on."""


class SteadyClock:
    def now_s(self) -> float:
        return time.monotonic()


async def stream_once(dialect: Dialect, body: bytes, num_tokens: int, metrics: Metrics) -> float:
    """Seconds from the first event to the last frame."""
    facts = CallFacts(call_id=dialect.id_prefix + "0" * 32, created_s=0, info=INFO)
    call = dialect.parse(body, facts)
    requests = build_requests(
        call.ask, INFO, frozenset(), call_id="c", tenant="", entropy=os.urandom
    )
    generation = Generation(
        Playback(num_tokens),
        requests,
        call.open_output,
        metrics=metrics,
        clock=SteadyClock(),
        record=CallRecord(arrived_s=0.0),
    )
    started_s = time.perf_counter()
    await generation.start(1.0)
    num_bytes = 0
    async for frame in call.frames(generation):
        num_bytes += len(frame)
    taken_s = time.perf_counter() - started_s
    await generation.aclose()
    if num_bytes < num_tokens * 50:
        raise SystemExit("the stream is shorter than it can be; the figures would mean nothing")
    return taken_s


def shared_once(recipe: Recipe, num_tokens: int) -> float:
    """Seconds of the recipe's part alone."""
    conversing = Conversing(recipe, refuse_constraints)
    dialect = ChatDialect.create(conversing, ApiConfig(), UnknownNames())
    facts = CallFacts(call_id="x", created_s=0, info=INFO)
    stream = dialect.parse(CHAT_BODY, facts).open_output(0)
    steps = [
        SequenceOutput(request_id=RequestId("x"), index=0, tokens=(SampledToken(token),))
        for token in WORDS
    ]
    started_s = time.perf_counter()
    for number in range(num_tokens):
        stream.push(steps[number % len(steps)])
    return time.perf_counter() - started_s


CHAT_BODY = json.dumps(
    {"messages": [{"role": "user", "content": "x"}], "stop": ["\n\nUser:", "###"]}
).encode()
MESSAGES_BODY = json.dumps(
    {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["\n\nUser:", "###"]}
).encode()
RESPONSES_BODY = json.dumps({"input": "x"}).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    source = TokenizerSource(kind="byte", vocab_size=INFO.vocab_size, model_id=INFO.model_id)
    recipe = load_recipe(source)
    conversing = Conversing(recipe, refuse_constraints)
    config, unknown = ApiConfig(), UnknownNames()
    dialects: dict[str, tuple[Dialect, bytes]] = {
        "chat": (ChatDialect.create(conversing, config, unknown), CHAT_BODY),
        "responses": (ResponsesDialect.create(conversing, config, unknown), RESPONSES_BODY),
        "messages": (MessagesDialect.create(conversing, config, unknown), MESSAGES_BODY),
    }
    metrics = Metrics(Playback(0))
    best_s = dict.fromkeys(["ids to parts alone", *dialects], float("inf"))
    # Interleaved, and the best round counts: others may use the machine meanwhile.
    for _ in range(arguments.rounds):
        taken_s = shared_once(recipe, arguments.tokens)
        best_s["ids to parts alone"] = min(best_s["ids to parts alone"], taken_s)
        for name, (dialect, body) in dialects.items():
            taken_s = asyncio.run(stream_once(dialect, body, arguments.tokens, metrics))
            best_s[name] = min(best_s[name], taken_s)
    print(f"{'path':<20} {'us/token':>9} {'tokens/s':>10}  (one token a step, two stop strings)")
    for name, seconds in best_s.items():
        per_token_us = seconds / arguments.tokens * 1e6
        print(f"{name:<20} {per_token_us:>9.2f} {arguments.tokens / seconds:>10,.0f}")


if __name__ == "__main__":
    main()
