"""KV kept beyond a restart, measured at the door of a real server.

    python bench/cache.py [--models smollm2 gemma3] [--steps 60] [--repeats 7] [--json FILE]

traces     agents' requests one after the other, the server restarted in between: hit tokens
           as a share of what an earlier request already held (found here, by token)
first      a 1,900-token prompt of which 1,800 are stored: cold, warm, and after a restart,
           with nothing else going on
writing    decode rate of running streams while their KV goes to disk, against no disk tier
equality   greedy answers of hits against those of a server that has never seen the prompts

Each figure stands beside another of the same run; A and B take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from serving import Row, Server, decode_tokens_per_s, load, server, show
from traces import TraceOptions, agent_requests, plain_text, without_tools

from headwater.app.completions import ReportedUsage, open_client, stream_answer
from headwater.app.prompts import FIRST_ID, PromptOptions, make_prompt
from headwater.app.recipe_show import tokenizer_source
from headwater.app.target import Target
from headwater.recipe.conversation import Conversation
from headwater.recipe.load import load_recipe
from headwater.recipe.recipe import Recipe

PROMPT_TOKENS = 1900
STORED_TOKENS = 1800
TAIL_TOKENS = PROMPT_TOKENS - STORED_TOKENS
SETTLE_LIMIT_S = 10.0
ANSWER_TOKENS = 32
NO_DISK = "--cache-dir=none"
OTHER_CHUNKS = ("--max-step-tokens=256", "--max-mixed-prefill-tokens=256")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one streamed completion was: seconds to its first token, and its counts."""

    ttft_s: float
    text: str
    usage: ReportedUsage

    @property
    def num_hit_tokens(self) -> int:
        return self.usage.num_hit_tokens or 0


class Held:
    """All prompts so far, as a tree of tokens: how much of a new one an earlier one held."""

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def look_and_keep(self, tokens: Sequence[int]) -> int:
        chain, num_held, goes_on = 0, 0, True
        for position, token in enumerate(tokens):
            chain = hash((chain, position, token))
            goes_on = goes_on and chain in self._kept
            num_held += goes_on
            self._kept.add(chain)
        # The last token is always computed.
        return min(num_held, len(tokens) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--steps", type=int, default=60, help="requests of each agent [60]")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=6000, help="of an agent's last prompt [6000]")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", nargs="+", default=["traces", "first", "writing", "equality"])
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows: list[Row] = []
    for model in options.models:
        for part in options.parts:
            rows += list(measure(part, model, options))
            show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def measure(part: str, model: str, options: argparse.Namespace) -> Iterator[Row]:
    match part:
        case "traces":
            trace = TraceOptions(
                num_agents=options.agents, num_steps=options.steps, num_tokens=options.tokens
            )
            yield from traces(model, trace, options.restarts)
        case "first":
            yield from first_token(model, options.repeats)
        case "writing":
            yield from writing(model, options.repeats)
        case "equality":
            yield from equality(model, options.repeats)
        case _:
            raise SystemExit(f"no such part: {part}")


@contextmanager
def cache_folder() -> Iterator[str]:
    """The flag of a fresh disk tier, on the disk of the working folder: /tmp may be memory."""
    with tempfile.TemporaryDirectory(prefix=".cache-bench-", dir=Path.cwd()) as folder:
        yield f"--cache-dir={folder}/kv"


def traces(model: str, trace: TraceOptions, num_restarts: int) -> Iterator[Row]:
    recipe = load_recipe(tokenizer_source(model))
    prompts = [prompt_ids(recipe, request.conversation) for request in agent_requests(trace)]
    held = Held()
    num_held = num_hit = num_held_cold = num_hit_cold = 0
    worst = 1.0
    share = -(-len(prompts) // (num_restarts + 1))
    with cache_folder() as folder:
        for start in range(0, len(prompts), share):
            with server(model, "bf16", folder) as served:
                for number, tokens in enumerate(prompts[start : start + share]):
                    could = held.look_and_keep(tokens)
                    answer = ask(served, tokens, num_output=4)
                    # Where an answer happened to be what the trace goes on with, hits go further.
                    hit = min(could, answer.num_hit_tokens)
                    num_held, num_hit = num_held + could, num_hit + hit
                    worst = min(worst, hit / could) if could else worst
                    if number < trace.num_agents and start:  # the first ones after a restart
                        num_held_cold += could
                        num_hit_cold += hit
    total = sum(map(len, prompts))
    name = f"{model}: {len(prompts)} requests up to {max(map(len, prompts)):,} tokens"
    yield share_of(f"{name}, hits", num_hit, num_held, "tokens held before", 0.99)
    yield share_of(f"{model}: the same, of all input", num_hit, total,
                   f"input tokens; ideal {num_held / total:.1%}", 0.96)  # fmt: skip
    yield Row(f"{model}: the worst request", 100 * worst, "%", worst, "tokens held before")
    if num_held_cold:
        yield share_of(f"{model}: each agent's first after {num_restarts} restarts",
                       num_hit_cold, num_held_cold, "tokens held before")  # fmt: skip


def share_of(what: str, part: int, whole: int, of: str, at_least: float | None = None) -> Row:
    return Row(what, 100 * part / whole, "%", part / whole, f"{whole:,} {of}", at_least)


def prompt_ids(recipe: Recipe, conversation: Conversation) -> tuple[int, ...]:
    """The exact prompt: with the model's template where it has one."""
    if recipe.has_chat_template:
        return recipe.encode(without_tools(conversation)).tokens
    return recipe.encode_completion(plain_text(conversation)).tokens


def first_token(model: str, repeats: int) -> Iterator[Row]:
    """Cold and stored prompts in turn, before and after a restart.

    Each waits until nothing is written any more, as for a caller who reads an answer
    before going on; but for the first kind of hit, which follows its prefix at once.
    """
    with cache_folder() as folder:
        with server(model, "bf16", folder) as served:
            ask(served, random_ids(PROMPT_TOKENS, -1))  # the kernels of these shapes are there now
            at_once, warm = [], []
            for number in range(repeats):
                cold = settled(served, random_ids(PROMPT_TOKENS, 1000 + number))
                settled(served, random_ids(STORED_TOKENS, number))
                at_once.append((cold, ask(served, random_ids(PROMPT_TOKENS, number))))
                again = [
                    *random_ids(STORED_TOKENS, number),
                    *random_ids(TAIL_TOKENS, 4000 + number),
                ]
                warm.append((cold, settled(served, again)))
                settled(served, random_ids(STORED_TOKENS, 2000 + number))  # for the restart
        with server(model, "bf16", folder) as served:
            ask(served, random_ids(PROMPT_TOKENS, -2))
            restarted = []
            for number in range(repeats):
                stored = settled(served, random_ids(PROMPT_TOKENS, 2000 + number))
                cold = settled(served, random_ids(PROMPT_TOKENS, 3000 + number))
                restarted.append((cold, stored))
    cold_s = statistics.median(cold.ttft_s for cold, _ in restarted)
    what = f"{model}: {PROMPT_TOKENS:,} tokens, {STORED_TOKENS:,} stored"
    yield Row(f"{model}: {PROMPT_TOKENS:,} tokens, cold", 1000 * cold_s, "ms to first token")
    for name, found in (
        ("warm, its prefix being written to disk", at_once),
        ("warm", warm),
        ("after a restart", restarted),
    ):
        seconds = statistics.median(hit.ttft_s for _, hit in found)
        ratio = statistics.median(hit.ttft_s / cold.ttft_s for cold, hit in found)
        hits = min(hit.num_hit_tokens for _, hit in found)
        yield Row(f"{what}, {name}", 1000 * seconds, "ms to first token", ratio,
                  f"cold, in turn (at most 0.12); hits {hits:,}")  # fmt: skip


def settled(served: Server, tokens: Sequence[int]) -> Answer:
    """``ask``, once no block waits to be written."""
    end_s = time.monotonic() + SETTLE_LIMIT_S
    while time.monotonic() < end_s:
        with urllib.request.urlopen(
            f"{served.url.removesuffix('/v1')}/metrics", timeout=10
        ) as answer:
            if "\nheadwater_cache_queued_stores 0" in answer.read().decode():
                break
        time.sleep(0.05)
    time.sleep(0.1)  # the system's own writing
    return ask(served, tokens)


def writing(model: str, repeats: int) -> Iterator[Row]:
    """Streams whose KV is stored while they decode, against a server without a disk tier."""
    streams = {"one stream": 1, "eight streams": 8}
    with (
        cache_folder() as folder,
        server(model, "bf16", folder) as storing,
        server(model, "bf16", NO_DISK) as plain,
    ):
        for name, concurrency in streams.items():
            pairs = []
            for number in range(-1, repeats):
                order = (storing, plain) if number % 2 else (plain, storing)
                rates = {s.pid: decode_rate(s, concurrency, 50 + number) for s in order}
                if number >= 0:  # the first round is warm-up
                    pairs.append((rates[plain.pid], rates[storing.pid]))
            rate = statistics.median(storing_rate for _, storing_rate in pairs)
            ratio = statistics.median(b / a for a, b in pairs)
            yield Row(f"{model}: {name}, while storing", rate, "tok/s", ratio,
                      "no disk tier, in turn", 0.97)  # fmt: skip


def decode_rate(served: Server, concurrency: int, seed: int) -> float:
    run = load(
        served.url, num_input=256, num_output=128, concurrency=concurrency,
        num_requests=2 * concurrency, seed=seed,
    )  # fmt: skip
    return decode_tokens_per_s(run)


def equality(model: str, repeats: int) -> Iterator[Row]:
    """Whether hits after a restart answer like a cold run, on real text: with reference numerics
    they must; fast kernels round otherwise when a prompt is cut elsewhere, so greedy answers may
    part, hit or not."""
    recipe = load_recipe(tokenizer_source(model))
    trace = TraceOptions(num_agents=repeats, num_forks=0, num_steps=4, num_tokens=1200)
    # Without the system message, which they share: a cold run must find nothing.
    prompts = [
        prompt_ids(recipe, request.conversation)[-600:]
        for request in agent_requests(trace)
        if request.step == trace.num_steps - 1
    ]
    for numerics, weights in (("reference", "fp32"), ("fast", "bf16")):
        flags = (f"--numerics={numerics}",)
        with cache_folder() as folder:
            with server(model, weights, folder, *flags) as served:
                for tokens in prompts:
                    ask(served, tokens[: len(tokens) * 3 // 4])
            with server(model, weights, folder, *flags) as served:
                found = [ask(served, tokens, num_output=ANSWER_TOKENS) for tokens in prompts]
        with server(model, weights, NO_DISK, *flags) as served:
            cold = [ask(served, tokens, num_output=ANSWER_TOKENS) for tokens in prompts]
        with server(model, weights, NO_DISK, *OTHER_CHUNKS, *flags) as served:
            recut = [ask(served, tokens, num_output=ANSWER_TOKENS) for tokens in prompts]
        hits = sum(answer.num_hit_tokens for answer in found) / sum(map(len, prompts))
        for name, answers in ((f"{hits:.0%} hits", found), ("no disk, other chunks", recut)):
            same = [agreement(a.text, b.text) for a, b in zip(answers, cold, strict=True)]
            mean = statistics.mean(same)
            is_exact = numerics == "reference" and answers is found
            yield Row(f"{model}, {numerics}: answers up to the first difference, {name}",
                      100 * mean, "%", mean, f"cold; {same.count(1.0)} of {len(same)} equal",
                      1.0 if is_exact else None)  # fmt: skip


def agreement(one: str, other: str) -> float:
    """The share of both that they begin with in common."""
    num_common = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )
    return num_common / max(len(one), len(other), 1)


def random_ids(num_tokens: int, seed: int) -> list[int]:
    """Ids that no other seed shares; a shorter prompt of a seed begins its longer one."""
    found = make_prompt(
        PromptOptions(kind="ids", num_tokens=num_tokens, shared=0.0, vocab_size=40_000, seed=0),
        seed,
    )
    assert isinstance(found, list)
    assert min(found) >= FIRST_ID
    return found


def ask(served: Server, tokens: Sequence[int], num_output: int = 1) -> Answer:
    """One greedy completion of ``tokens``, timed by its first text."""
    return asyncio.run(_ask(served, tokens, num_output))


async def _ask(served: Server, tokens: Sequence[int], num_output: int) -> Answer:
    target = Target(base_url=served.url)
    body = {
        "prompt": list(tokens), "max_tokens": num_output, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    text: list[str] = []
    usage = ReportedUsage()
    first_s: float | None = None
    async with open_client(target) as client:
        await client.get(f"{served.url}/models")  # the connection is there before the clock starts
        began_s = time.perf_counter()
        async with aclosing(stream_answer(client, target, "/completions", body)) as deltas:
            async for delta in deltas:
                if delta.text and first_s is None:
                    first_s = time.perf_counter()
                text.append(delta.text)
                usage = delta.usage or usage
    ended_s = time.perf_counter()
    return Answer((first_s or ended_s) - began_s, "".join(text), usage)


if __name__ == "__main__":
    main()
