"""What a step time budget does for running answers and short prompts, from outside.

    python bench/step_budget.py [--model smollm2] [--rounds 3] [--budget-ms MS] [--json FILE]

Two servers on one machine, in turn: one with a budget, one that takes whole steps of prompt
tokens. Each round, on each of them:

    gaps    4 answers stream while prompts of 6k tokens come back to back
    short   prompts of 200 tokens come while 6k-token ones are queued and computed

Prints the worst gap between tokens, the time to first token of the short prompts, and how
well the worker knew what its steps would take.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import time
import urllib.request
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from serving import Row, Server, server, show

from headwater.app.completions import open_client, stream_answer
from headwater.app.target import Target

NUM_STREAMS = 4
STREAM_INPUT = 128
LONG_TOKENS = 6000
NUM_LONG = 2
SHORT_TOKENS = 200
SHORT_EVERY_S = 1.0
NUM_SHORT = 8
VOCAB = 40_000
# What a server without a budget is: whole steps, whether answers run or not.
NO_BUDGET = ("--step-budget-ms=none", "--max-step-tokens=2048", "--max-mixed-prefill-tokens=2048")
BLOCKS = "--num-blocks=1024"


@dataclass(slots=True)
class Found:
    """What one server's rounds gave."""

    worst_gaps_s: list[float] = field(default_factory=list)  # a round each
    gaps_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    short_ttfts_s: list[float] = field(default_factory=list)
    queued_long_s: list[float] = field(default_factory=list)  # while short ones came between


class Client:
    """Sends token ids, tells when each chunk came."""

    def __init__(self, served: Server, model: str, seed: int) -> None:
        self._model = model
        self._target = Target(base_url=served.url)
        self._rng = random.Random(seed)

    async def ask(self, num_input: int, num_output: int, times_s: list[float]) -> None:
        """Adds to ``times_s`` as chunks with content come."""
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(300, VOCAB) for _ in range(num_input)],
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with (
            open_client(self._target) as client,
            aclosing(stream_answer(client, self._target, "/completions", body)) as deltas,
        ):
            async for delta in deltas:
                if delta.text:
                    times_s.append(time.perf_counter())

    async def timed(self, num_input: int) -> float:
        """Seconds to the end of an answer of one token."""
        start_s = time.perf_counter()
        await self.ask(num_input, 1, [])
        return time.perf_counter() - start_s


async def gaps_round(client: Client, found: Found) -> None:
    streams: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(client.ask(STREAM_INPUT, 2000, times)) for times in streams]
    while not all(len(times) > 2 for times in streams):
        await asyncio.sleep(0.01)
        for task in tasks:
            if task.done():
                task.result()
    begin_s = time.perf_counter()
    for _ in range(NUM_LONG):
        found.long_s.append(await client.timed(LONG_TOKENS))
    end_s = time.perf_counter()
    for task in tasks:
        assert not task.done(), "an answer ended before the prompts did"
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    worst_s = 0.0
    for times in streams:
        # The gap that was open when the prompts ended counts as far as it went.
        seen = [t for t in times if begin_s <= t < end_s]
        gaps = [b - a for a, b in itertools.pairwise([begin_s, *seen, end_s])]
        found.gaps_s += gaps
        worst_s = max(worst_s, *gaps)
    found.worst_gaps_s.append(worst_s)


async def short_round(client: Client, found: Found) -> None:
    long = [asyncio.create_task(client.timed(LONG_TOKENS)) for _ in range(NUM_LONG)]
    await asyncio.sleep(0.3)
    short = []
    for _ in range(NUM_SHORT):
        short.append(asyncio.create_task(client.timed(SHORT_TOKENS)))
        await asyncio.sleep(SHORT_EVERY_S)
    found.short_ttfts_s += await asyncio.gather(*short)
    found.queued_long_s += await asyncio.gather(*long)


def metric(served: Server, name: str) -> float:
    """One sample of /metrics, labels written as on the page."""
    with urllib.request.urlopen(served.url.removesuffix("/v1") + "/metrics", timeout=10) as page:
        found = re.search(rf"^{re.escape(name)} (\S+)$", page.read().decode(), re.MULTILINE)
    assert found is not None, f"no {name} on the metrics page"
    return float(found[1])


def high(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def measure(model: str, rounds: int, budget_ms: float | None) -> list[Row]:
    flags = () if budget_ms is None else (f"--step-budget-ms={budget_ms:g}",)
    common = (BLOCKS, "--cache-dir=none")
    found = {"budget": Found(), "none": Found()}
    with (
        server(model, "bf16", *common, *flags) as budgeted,
        server(model, "bf16", *common, *NO_BUDGET) as free,
    ):
        servers = {"budget": budgeted, "none": free}
        for name, served in servers.items():  # new memory, and what the fit starts from
            asyncio.run(gaps_round(Client(served, model, 1), Found()))
            print(f"{name}: warm")
        before = {kept: kept_steps(budgeted, kept) for kept in ("yes", "no")}
        for number in range(rounds):
            for name, served in servers.items():
                client = Client(served, model, 100 + number)
                asyncio.run(gaps_round(client, found[name]))
                asyncio.run(short_round(client, found[name]))
                print(
                    f"round {number} {name}: worst gap {found[name].worst_gaps_s[-1]:.3f} s, "
                    f"load average {os.getloadavg()[0]:.1f}"
                )
        steps = {kept: kept_steps(budgeted, kept) - before[kept] for kept in ("yes", "no")}
        error = metric(budgeted, "headwater_step_prediction_error")
    return rows(found["budget"], found["none"], steps["yes"] / sum(steps.values()), error)


def kept_steps(served: Server, kept: str) -> float:
    return metric(served, f'headwater_budgeted_steps_total{{kept="{kept}"}}')


def rows(budget: Found, none: Found, share_kept: float, error: float) -> list[Row]:
    worst, worst_none = (statistics.median(f.worst_gaps_s) for f in (budget, none))
    long, long_none = (statistics.median(f.long_s) for f in (budget, none))
    short, short_none = (high(f.short_ttfts_s, 0.95) for f in (budget, none))
    queued, queued_none = (statistics.median(f.queued_long_s) for f in (budget, none))
    return [
        Row("worst token gap beside 6k prompts, no budget", 1000 * worst_none, "ms"),
        Row("the same with a budget", 1000 * worst, "ms", worst / worst_none,
            "no budget (at most 0.25)"),
        Row("95% of gaps, budget", 1000 * high(budget.gaps_s, 0.95), "ms",
            high(budget.gaps_s, 0.95) / high(none.gaps_s, 0.95), "no budget"),
        Row("a 6k prompt beside 4 answers, budget", long, "s", long / long_none, "no budget"),
        Row("TTFT p95 of 200 tokens among 6k ones, budget", 1000 * short, "ms",
            short / short_none, "no budget"),
        Row("the 6k ones among 200-token ones, budget", queued, "s", queued / queued_none,
            "no budget"),
        Row("steps within 1.25 x budget", 100 * share_kept, "%", share_kept, "all", 0.95),
        Row("median prediction error", 100 * error, "%", error, "predicted (at most 0.15)"),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-ms", type=float, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    found = measure(options.model, options.rounds, options.budget_ms)
    show(found)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
