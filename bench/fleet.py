"""A fleet of real workers: what a split and the router's buckets do, and what faults do to it.

    python bench/fleet.py [--parts throughput gaps buckets] [--repeats 3] [--json FILE]
    python bench/fleet.py --faults 200 [--seed 1]

throughput  16 requests at once: a prefill and a decode worker against one that does both, on
            the same cores
gaps        the worst gap of 4 running answers while 6k-token prompts come back to back: the
            split against one worker without a step budget (`step_budget.py` has the budget)
buckets     200-token prompts behind a queue of 6k-token ones: the router's length buckets
            against first come, first served
faults      random rounds of killed, stopped and cut workers under load, with a toy model whose
            undisturbed answers are known

A and B take turns. `router.py` has decisions per second, `handoff.py` what moving KV costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from serving import START_LIMIT_S, Row, Server, answers, free_port, load, server, show
from step_budget import LONG_TOKENS, NO_BUDGET, Client, Found, gaps_round, high

if TYPE_CHECKING:
    from journey_fleet import Verdict  # in tests/journey, which only the faults need

SPLIT = ("--prefill=1", "--decode=1")
BOTH = ("--both=1",)
NO_DISK = "--cache-dir=none"
BLOCKS = "--num-blocks=1024"  # of each worker
QUEUE_BLOCKS = "--num-blocks=1536"
NUM_LONG = 6
NUM_SHORT = 10
SHORT_TOKENS = 200
SHORT_EVERY_S = 1.0
FIRST_COME = "--serve-first-come-first-served"
QUESTIONS = 80


def main() -> None:
    if FIRST_COME in sys.argv:
        sys.argv.remove(FIRST_COME)
        serve_first_come()
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--faults", type=int, default=0, help="only that, so many rounds")
    parser.add_argument("--seed", type=int, default=1, help="of the faults [1]")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.faults:
        raise SystemExit(faults(options.faults, options.seed))
    rows: list[Row] = []
    for part in options.parts:
        rows += PARTS[part](options.model, options.repeats)
        show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


# Throughput


def throughput(model: str, repeats: int) -> list[Row]:
    with (
        server(model, "bf16", *BOTH, NO_DISK, BLOCKS) as both,
        server(model, "bf16", *SPLIT, NO_DISK, BLOCKS) as split,
    ):
        pairs = []
        for number in range(-1, repeats):
            order = (split, both) if number % 2 else (both, split)
            rates = {served.pid: output_tokens_per_s(served, 300 + number) for served in order}
            if number >= 0:  # the first round is warm-up
                pairs.append((rates[both.pid], rates[split.pid]))
    return [
        Row("16 at once, 256 in / 128 out, both", statistics.median(a for a, _ in pairs), "tok/s"),
        Row("the same, split", statistics.median(b for _, b in pairs), "tok/s",
            statistics.median(b / a for a, b in pairs), "both, same cores, in turn", 0.9),
    ]  # fmt: skip


def output_tokens_per_s(served: Server, seed: int) -> float:
    run = load(
        served.url, num_input=256, num_output=128, concurrency=16, num_requests=32, seed=seed
    )
    return sum(sample.num_output_tokens for sample in run.samples) / run.wall_s


# Gaps


def gaps(model: str, repeats: int) -> list[Row]:
    found = {"split": Found(), "free": Found()}
    with (
        server(model, "bf16", *SPLIT, NO_DISK, BLOCKS) as split,
        server(model, "bf16", *BOTH, NO_DISK, BLOCKS, *NO_BUDGET) as free,
    ):
        servers = {"split": split, "free": free}
        for served in servers.values():
            asyncio.run(gaps_round(Client(served, model, 1), Found()))
        for number in range(repeats):
            for name, served in servers.items():
                asyncio.run(gaps_round(Client(served, model, 100 + number), found[name]))
    worst, worst_free = (statistics.median(f.worst_gaps_s) for f in found.values())
    long, long_free = (statistics.median(f.long_s) for f in found.values())
    usual, usual_free = (high(f.gaps_s, 0.95) for f in found.values())
    return [
        Row("worst token gap beside 6k prompts, both, no budget", 1000 * worst_free, "ms"),
        Row("the same, split", 1000 * worst, "ms", worst / worst_free, "no budget (at most 0.25)"),
        Row("95% of gaps, split", 1000 * usual, "ms", usual / usual_free, "no budget"),
        Row("a 6k prompt beside 4 answers, split", long, "s", long / long_free, "no budget"),
    ]


# Buckets


@dataclass(slots=True)
class Queue:
    """What became of the prompts of one server's rounds, in seconds to their only token."""

    short_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    last_long_s: list[float] = field(default_factory=list)  # a round each


def buckets(model: str, repeats: int) -> list[Row]:
    found = {"buckets": Queue(), "first": Queue()}
    flags = (f"--model={model}", "--weights=bf16", *BOTH, NO_DISK, QUEUE_BLOCKS)
    with server(model, "bf16", *flags[2:]) as bucketed, first_come_server(*flags) as first:
        servers = {"buckets": bucketed, "first": first}
        for served in servers.values():
            asyncio.run(queue_round(Client(served, model, 1), Queue()))
        for number in range(repeats):
            for name, served in servers.items():
                asyncio.run(queue_round(Client(served, model, 200 + number), found[name]))
    with_buckets, without = found["buckets"], found["first"]
    short, short_first = high(with_buckets.short_s, 0.95), high(without.short_s, 0.95)
    last, last_first = (statistics.median(queue.last_long_s) for queue in (with_buckets, without))
    mean, mean_first = (statistics.mean(queue.long_s) for queue in (with_buckets, without))
    behind = f"{NUM_LONG} of {LONG_TOKENS:,}"
    return [
        Row(f"TTFT p95 of {SHORT_TOKENS} tokens behind {behind}, first come", short_first, "s"),
        Row("the same, buckets", short, "s", short / short_first, "first come (at most 0.2)"),
        Row("the last long prompt, buckets", last, "s", last / last_first,
            "first come (at most 1.3)"),
        Row("the mean long prompt, buckets", mean, "s", mean / mean_first, "first come"),
    ]  # fmt: skip


async def queue_round(client: Client, found: Queue) -> None:
    """All long prompts at once, then a short one each second."""
    long = [asyncio.create_task(client.timed(LONG_TOKENS)) for _ in range(NUM_LONG)]
    await asyncio.sleep(0.3)
    short = []
    for _ in range(NUM_SHORT):
        short.append(asyncio.create_task(client.timed(SHORT_TOKENS)))
        await asyncio.sleep(SHORT_EVERY_S)
    found.short_s += await asyncio.gather(*short)
    seconds = await asyncio.gather(*long)
    found.long_s += seconds
    found.last_long_s.append(max(seconds))


@contextlib.contextmanager
def first_come_server(*flags: str) -> Iterator[Server]:
    """`headwater serve` whose router has one bucket for all prompts, so that it serves them in
    the order they came. There is no setting for that: nobody would want it."""
    port = free_port()
    command = [
        sys.executable, __file__, FIRST_COME, "serve", f"--port={port}", "--no-access-log",
        "--log-level=warning", *flags,
    ]  # fmt: skip
    began_s = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            if process.poll() is not None or time.perf_counter() - began_s > START_LIMIT_S:
                raise SystemExit("the server without buckets did not start")
            time.sleep(0.02)
        yield Server(f"{url}/v1", process.pid, time.perf_counter() - began_s)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def serve_first_come() -> None:
    """This process as that server."""
    from headwater.app.cli import main as command_line
    from headwater.router import buckets as router_buckets

    longest = 2**31

    def one_bucket(context_tokens: int) -> tuple[int, ...]:
        return longest, longest + 1, longest + 2

    vars(router_buckets)["bucket_bounds"] = one_bucket
    raise SystemExit(command_line())


# Faults


def faults(num_rounds: int, seed: int) -> int:
    """Gives the exit code."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "journey"))
    from journey_fleet_faults import (
        Driver,
        Standing,
        Tally,
        files_in_shared_memory,
        fleet,
        leftovers,
        make_questions,
        random_fault,
    )

    draw, shared_memory = random.Random(seed), files_in_shared_memory()
    # On the disk of the working folder: /tmp may be memory.
    with tempfile.TemporaryDirectory(prefix=".fleet-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        questions, expected = make_questions(folder / "single", seed, QUESTIONS)
        print(f"{len(questions)} questions, answered by one worker alone")
        with fleet(folder) as made:
            driver = Driver(made, questions, expected, seed)
            start = Standing.of(made.served.process.pid)
            for number in range(num_rounds):
                fault = random_fault(draw)
                began_s, num_failures = time.perf_counter(), len(driver.tally.failures)
                driver.round(fault)
                print(
                    f"{number + 1:4} {time.perf_counter() - began_s:5.1f} s  {fault!s:50} "
                    f"{shown(driver.tally.by_fault.get(str(fault), Counter()))}",
                    flush=True,
                )
                for failure in driver.tally.failures[num_failures:]:
                    print(failure, flush=True)
            made.served.wait_until("all workers again", lambda: made.is_complete)
            end = Standing.of(made.served.process.pid)
        left = leftovers(made, shared_memory)
        left += [f"shared memory {file}" for file in files_in_shared_memory() - shared_memory]
        tally: Tally = driver.tally
        log = made.served.log.read_text()
    print(
        f"{tally.num_rounds} rounds, {tally.num_harmed} with somebody to harm, "
        f"{tally.verdicts.total()} answers: {shown(tally.verdicts)}\n"
        f"requests that went on elsewhere: {log.count('goes on elsewhere')}\n"
        f"worst answer {tally.worst_answer_s:.1f} s; all blocks free "
        f"{tally.worst_free_s:.2f} s after a round's last answer at most\n"
        f"the front's threads {start.num_threads} -> {end.num_threads}, "
        f"open files {start.num_files} -> {end.num_files}\n"
        f"tracebacks in its log: {log.count('Traceback')}\n"
        f"left behind: {left or 'nothing'}"
    )
    return 1 if tally.failures or left else 0


def shown(counts: Counter[Verdict]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


PARTS: dict[str, Callable[[str, int], list[Row]]] = {
    "throughput": throughput,
    "gaps": gaps,
    "buckets": buckets,
}


if __name__ == "__main__":
    main()
