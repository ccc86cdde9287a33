"""The server measured from outside, beside the machine's own limits, in one run.

    python bench/serving.py [--model smollm2] [--json FILE]

Starts `headwater serve` with bf16 and with int8 weights in turn, sends token-id
prompts over HTTP as any client would, and prints each figure as a share of what
the machine can do (measured first) or of another figure of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headwater.app.load import LoadOptions, Recorder, run_load
from headwater.app.target import Target

START_LIMIT_S = 180.0
BLOCK_TOKENS = 32
POOL_BLOCKS = 512
PREFILL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what was measured, in which unit, and beside what."""

    what: str
    value: float
    unit: str
    ratio: float | None = None
    of: str = ""
    at_least: float | None = None


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int
    start_s: float  # from the command to the first answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def server(model: str, weights: str, *flags: str) -> Iterator[Server]:
    """`headwater serve` in a process of its own, until its first answer; ended on exit."""
    port = free_port()
    command = [
        sys.executable, "-m", "headwater.app.cli", "serve", f"--port={port}", f"--model={model}",
        f"--weights={weights}", "--no-access-log", "--log-level=warning", *flags,
    ]  # fmt: skip
    began_s = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with code {process.returncode}")
            if time.perf_counter() - began_s > START_LIMIT_S:
                raise SystemExit(f"no answer within {START_LIMIT_S:.0f} s")
            time.sleep(0.02)
        yield Server(f"{url}/v1", process.pid, time.perf_counter() - began_s)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def answers(url: str) -> bool:
    """Whether one token can be had."""
    body = json.dumps({"prompt": [300], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status: int = response.status
            return status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def load(
    url: str, *, num_input: int, num_output: int, concurrency: int, num_requests: int, seed: int
) -> Recorder:
    recorder = Recorder()
    options = LoadOptions(
        target=Target(base_url=url),
        endpoint="completions",
        prompt_kind="ids",
        num_requests=num_requests,
        num_warmup=1,
        concurrency=concurrency,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        vocab_size=40_000,
        seed=seed,
    )
    asyncio.run(run_load(options, recorder))
    failed = [sample.error_message for sample in recorder.samples if not sample.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first: {failed[0]}")
    return recorder


def decode_tokens_per_s(recorder: Recorder) -> float:
    """One stream: tokens after the first over the time they took, median over requests."""
    return statistics.median(
        (s.num_output_tokens - 1) / (s.chunk_times_s[-1] - s.chunk_times_s[0])
        for s in recorder.samples
    )


def ttft_s(recorder: Recorder) -> float:
    return statistics.median(s.ttft_s for s in recorder.samples if s.ttft_s is not None)


def step_parts_s(url: str) -> dict[str, float]:
    """Total seconds of steps by part so far, from /metrics."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.findall(r'^headwater_step_seconds_total\{part="(\w+)"\} (\S+)$', text, re.M)
    return {part: float(value) for part, value in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = measure(options.model, options.repeats)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def measure(model: str, repeats: int) -> list[Row]:
    from shape import model_shape

    from headwater.app.settings import usable_cores
    from headwater.numerics.probe import machine_limits

    limits = machine_limits(usable_cores())
    shape = model_shape(model)
    rows = [
        Row("machine: streaming read", limits.read_gb_per_s, "GB/s"),
        Row("machine: bf16 GEMM", limits.gemm_bf16_gflop_per_s, "GFLOP/s"),
        Row("machine: int8 GEMM", limits.gemm_int8_gop_per_s, "GOP/s"),
    ]
    with contextlib.suppress(OSError), server(model, "bf16"):
        pass  # fills the kernel cache and the page cache: the next start is warm
    # A pool that a few prompts fill: fresh memory for KV costs page faults (much in a virtual
    # machine), which a server that has been up for a while does not see.
    pool = f"--num-blocks={POOL_BLOCKS}"
    bound = limits.read_gb_per_s * 1e9 / shape.bf16_step_bytes
    gemm = limits.gemm_bf16_gflop_per_s * 1e9
    flops = shape.prefill_flops(PREFILL_TOKENS)
    with server(model, "bf16", pool) as alone:
        rows.append(Row("serve to first answer, warm disk", alone.start_s, "s"))
        fill(alone)
        one = statistics.median(one_stream(alone, seed) for seed in range(repeats))
        rows.append(
            Row("one stream, bf16, 128 in / 128 out", one, "tok/s", one / bound,
                f"bandwidth bound, {bound:.0f} tok/s", 0.65)
        )  # fmt: skip
        seconds = prefill_s(alone, repeats)
        rows.append(
            Row("prefill 2,048 tokens, bf16", PREFILL_TOKENS / seconds, "tok/s",
                flops / seconds / gemm, "bf16 GEMM rate", 0.6)
        )  # fmt: skip
        rows += sixteen_at_once(alone, one, repeats)
    with server(model, "bf16", pool) as bf16, server(model, "int8", pool) as int8:
        for served in (bf16, int8):
            fill(served)
        # A and B in turn, so that a change of the machine's speed meets both.
        pairs = [(one_stream(bf16, seed), one_stream(int8, seed)) for seed in range(repeats)]
        ratio = statistics.median(b / a for a, b in pairs)
        rows.append(
            Row("one stream, int8", statistics.median(b for _, b in pairs), "tok/s", ratio,
                "bf16, in turn", 1.4)
        )  # fmt: skip
    return rows


def fill(served: Server) -> None:
    """Write every block of the pool once."""
    load(
        served.url, num_input=PREFILL_TOKENS, num_output=1, concurrency=1, seed=1,
        num_requests=POOL_BLOCKS * BLOCK_TOKENS // PREFILL_TOKENS,
    )  # fmt: skip


def one_stream(served: Server, seed: int) -> float:
    """Decode tokens/s."""
    run = load(served.url, num_input=128, num_output=128, concurrency=1, num_requests=2, seed=seed)
    return decode_tokens_per_s(run)


def prefill_s(served: Server, repeats: int) -> float:
    """Seconds to the first token of a prompt that nothing of is cached."""
    runs = [
        load(served.url, num_input=PREFILL_TOKENS, num_output=1, concurrency=1, num_requests=2,
             seed=100 + n)
        for n in range(repeats)
    ]  # fmt: skip
    return statistics.median(ttft_s(run) for run in runs)


def sixteen_at_once(served: Server, one: float, repeats: int) -> list[Row]:
    before = step_parts_s(served.url)
    runs = [
        load(served.url, num_input=256, num_output=128, concurrency=16, num_requests=16,
             seed=200 + n)
        for n in range(repeats)
    ]  # fmt: skip
    after = step_parts_s(served.url)
    rate = statistics.median(
        sum(s.num_output_tokens for s in run.samples) / run.wall_s for run in runs
    )
    parts = {part: after[part] - before[part] for part in after}
    overhead = sum(parts.values()) - parts["forward"]
    return [
        Row("16 at once, 256 in / 128 out, output", rate, "tok/s", rate / one, "one stream", 3.0),
        Row("plan + sample + apply at 16", 1000 * overhead, "ms in all",
            overhead / sum(parts.values()), "all steps' time (at most 0.10)"),
    ]  # fmt: skip


def show(rows: list[Row]) -> None:
    table = Table("what", "value", "unit", "ratio", "of", "at least")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.value:,.1f}",
            row.unit,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            row.of,
            "" if row.at_least is None else f"{row.at_least:g}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
