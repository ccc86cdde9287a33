"""``headwater bench``: what a load run found, as a table and as JSON.

The statistics here are pure functions over samples; ``load`` takes the samples.
Says what was counted by the server and what by chunks, and how many requests
failed and why, since a fast answer to half of the requests is not a fast server.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater import __version__
from headwater.app.load import LoadOptions, Recorder, Sample, run_load
from headwater.core.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
EXIT_OK = 0
EXIT_FAILURES = 1  # some request failed
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """One quantity over requests (or over chunks), in seconds."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run says. Rates are over the wall time of the measured part, prefill included."""

    num_ok: int
    num_failed: int
    errors: dict[str, int]
    wall_s: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float | None
    num_output_tokens: int
    num_input_tokens: int | None
    num_hit_tokens: int | None
    tokens_counted_by: str
    ttft_s: Distribution | None
    itl_s: Distribution | None
    time_per_output_token_s: Distribution | None
    e2e_s: Distribution | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks of ``ordered`` (ascending, not empty).

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.5
    """
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Sequence[float]) -> Distribution | None:
    """None for no values: a distribution of nothing has no numbers."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        minimum=ordered[0],
        maximum=ordered[-1],
        percentiles={f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES},
    )


def summarize(samples: Sequence[Sample], wall_s: float) -> Summary:
    """Failed requests count as failed and enter no other number."""
    good = [sample for sample in samples if sample.ok]
    num_output = sum(sample.num_output_tokens for sample in good)
    by_server = all(sample.is_counted for sample in good)
    num_input = _total([sample.usage.num_prompt_tokens for sample in good])
    per_token = [
        (sample.chunk_times_s[-1] - sample.chunk_times_s[0]) / (sample.num_output_tokens - 1)
        for sample in good
        if sample.num_output_tokens > 1
    ]
    return Summary(
        num_ok=len(good),
        num_failed=len(samples) - len(good),
        errors=dict(Counter(sample.error_kind for sample in samples if sample.error_kind)),
        wall_s=wall_s,
        requests_per_s=len(good) / wall_s if wall_s else 0.0,
        output_tokens_per_s=num_output / wall_s if wall_s else 0.0,
        input_tokens_per_s=num_input / wall_s if num_input is not None and wall_s else None,
        num_output_tokens=num_output,
        num_input_tokens=num_input,
        num_hit_tokens=_total([sample.usage.num_hit_tokens for sample in good]),
        tokens_counted_by="server" if by_server else "chunks",
        ttft_s=distribution([sample.ttft_s for sample in good if sample.ttft_s is not None]),
        itl_s=distribution([gap for sample in good for gap in sample.gaps_s]),
        time_per_output_token_s=distribution(per_token),
        e2e_s=distribution([sample.end_s - sample.start_s for sample in good]),
    )


def _total(counts: Sequence[int | None]) -> int | None:
    """Unknown if any is: a sum over some requests would look like a sum over all."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def report(options: LoadOptions, recorder: Recorder, *, complete: bool) -> dict[str, object]:
    """The run as plain values for JSON; the key is left out."""
    described = asdict(options)
    described["target"] = {"base_url": options.target.base_url, "model": recorder.model}
    return {
        "headwater_version": __version__,
        "complete": complete,
        "options": described,
        "num_delayed_starts": recorder.num_delayed_starts,
        "summary": asdict(summarize(recorder.samples, recorder.wall_s)),
    }


def show(summary: Summary, recorder: Recorder, console: Console) -> None:
    """Two tables: totals, and distributions in milliseconds."""
    totals = Table(title=f"{recorder.model}", show_header=False)
    totals.add_row("requests", f"{summary.num_ok} answered, {summary.num_failed} failed")
    for kind, count in sorted(summary.errors.items()):
        totals.add_row("", f"[red]{count} x {kind}[/red]")
    totals.add_row("wall time", f"{summary.wall_s:.2f} s")
    totals.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    totals.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    if summary.input_tokens_per_s is not None:
        totals.add_row("input tokens/s", f"{summary.input_tokens_per_s:.1f}")
    totals.add_row("output tokens", f"{summary.num_output_tokens} (by {summary.tokens_counted_by})")
    if summary.num_input_tokens is not None:
        hits = "" if summary.num_hit_tokens is None else f", {summary.num_hit_tokens} hit"
        totals.add_row("input tokens", f"{summary.num_input_tokens}{hits}")
    if recorder.num_delayed_starts:
        totals.add_row("late starts", f"{recorder.num_delayed_starts}: the rate was not reached")
    console.print(totals)

    table = Table("milliseconds", "mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = (
        ("TTFT", summary.ttft_s),
        ("ITL (between chunks)", summary.itl_s),
        ("per output token after the first", summary.time_per_output_token_s),
        ("whole answer", summary.e2e_s),
    )
    for name, found in rows:
        if found is not None:
            values = (found.mean, *found.percentiles.values(), found.maximum)
            table.add_row(name, *(f"{value * 1000:.1f}" for value in values))
    console.print(table)


def run(options: LoadOptions, json_path: Path | None) -> int:
    """Measure, show, write. Ctrl-C shows (and writes) what was measured so far."""
    if json_path is not None:
        _check_writable(json_path)
    recorder = Recorder()
    interrupted = False
    try:
        _measure(options, recorder)
    except KeyboardInterrupt:
        interrupted = True
    console = Console()
    summary = summarize(recorder.samples, recorder.wall_s)
    show(summary, recorder, console)
    messages = {s.error_kind: s.error_message for s in recorder.samples if s.error_kind}
    for message in messages.values():
        console.print(message, style="red", markup=False, highlight=False)
    if interrupted:
        console.print(f"interrupted: {options.num_requests - len(recorder.samples)} not finished")
    if json_path is not None:
        text = json.dumps(report(options, recorder, complete=not interrupted), indent=2)
        json_path.write_text(text + "\n", encoding="utf-8")
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if summary.num_failed else EXIT_OK


def _check_writable(path: Path) -> None:
    """Before minutes of load, not after."""
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _measure(options: LoadOptions, recorder: Recorder) -> None:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        warmup = progress.add_task("warm-up", total=options.num_warmup)
        measured = progress.add_task("measured", total=options.num_requests)

        def on_change() -> None:
            progress.update(warmup, completed=recorder.num_warmed_up)
            progress.update(measured, completed=len(recorder.samples))

        asyncio.run(run_load(options, recorder, on_change=on_change))
