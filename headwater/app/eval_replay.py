"""``headwater eval replay``: what replays cost in output quality, by hit length.

Loads the model here, in this process, and compares hits with cold runs over real
text: a file of the caller's, or the documentation that comes with Python. Knows no
server and no cache; ``engine.replay_eval`` measures, this file picks texts and prints.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles

from rich.console import Console
from rich.table import Table

from headwater.app.settings import Settings, set_thread_environment, usable_cores
from headwater.core.errors import ConfigError
from headwater.engine.replay_eval import HitKind, ReplayMeter, ReplaySample
from headwater.recipe.load import load_recipe

HITS = (512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    hits: tuple[int, ...] = HITS
    num_texts: int = 8
    num_scored: int = 64
    num_greedy: int = 64
    replay_tokens: int | None = None  # None: the model's window
    text_file: Path | None = None  # None: Python's own documentation
    as_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All texts of one hit length, one kind of hit."""

    num_hit_tokens: int
    kind: str
    divergence_mean: float  # nats
    divergence_p95: float
    top_agreement: float  # share of scored tokens
    greedy_agreement: float  # share of generated tokens before the first difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hits", default=",".join(map(str, HITS)), metavar="N,N", help=f"hit lengths [{HITS}]"
    )
    parser.add_argument("--texts", type=int, default=8, metavar="N", help="texts per length [8]")
    parser.add_argument(
        "--scored", type=int, default=64, metavar="N", help="tokens of the text after the hit [64]"
    )
    parser.add_argument(
        "--greedy", type=int, default=64, metavar="N", help="tokens then generated [64]"
    )
    parser.add_argument(
        "--replay-tokens", type=int, default=None, metavar="N", help="[the model's window]"
    )
    parser.add_argument(
        "--text", type=Path, default=None, metavar="FILE", help="[the documentation of Python]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def options_from(arguments: argparse.Namespace) -> ReplayOptions:
    """Raises ConfigError for a number that makes no sense."""
    try:
        hits = tuple(sorted({int(item) for item in arguments.hits.split(",")}))
    except ValueError:
        raise ConfigError(f"--hits takes numbers with commas, got {arguments.hits!r}") from None
    for name, value in (
        ("--hits", min(hits)),
        ("--texts", arguments.texts),
        ("--scored", arguments.scored),
        ("--replay-tokens", 1 if arguments.replay_tokens is None else arguments.replay_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if arguments.greedy < 0:
        raise ConfigError(f"--greedy must be at least 0, got {arguments.greedy}")
    return ReplayOptions(
        hits=hits,
        num_texts=arguments.texts,
        num_scored=arguments.scored,
        num_greedy=arguments.greedy,
        replay_tokens=arguments.replay_tokens,
        text_file=arguments.text,
        as_json=arguments.json,
    )


def run(settings: Settings, options: ReplayOptions) -> int:
    """Measure and print. Raises ConfigError for a model without windows or too short a text."""
    num_threads = settings.engine.threads or usable_cores()
    set_thread_environment(num_threads)
    from headwater.app.assemble import kv_format, weight_format
    from headwater.model.catalogue import resolve
    from headwater.model.load import load_model
    from headwater.numerics.select import select_ops

    weights = weight_format(settings)
    ops = select_ops(settings.model.device, settings.model.numerics, weights, num_threads)
    loaded = load_model(resolve(settings.model.model), ops, weights)
    meter = ReplayMeter(
        loaded.model,
        ops,
        kv_format(settings),
        max_hit_tokens=max(options.hits),
        num_scored=options.num_scored,
        num_greedy=options.num_greedy,
        replay_tokens=options.replay_tokens,
    )
    tokenizer = load_recipe(loaded.tokenizer_source).tokenizer
    # Far more characters than tokens are wanted: what is left over is not tokenized.
    num_tokens = options.num_texts * (max(options.hits) + options.num_scored)
    tokens = tokenizer.encode_text(_text(options.text_file)[: 12 * num_tokens])
    if len(tokens) < num_tokens:
        raise ConfigError(
            f"the text has {len(tokens)} tokens, but {num_tokens} are needed; give a longer one, "
            "or fewer --texts or shorter --hits"
        )
    stride = len(tokens) // options.num_texts
    begin = [] if loaded.config.bos_token_id is None else [loaded.config.bos_token_id]
    summaries: list[Summary] = []
    for hit in options.hits:
        length = hit + options.num_scored
        samples = [
            meter.measure([*begin, *tokens[start : start + length]][:length], hit)
            for start in range(0, options.num_texts * stride, stride)
        ]
        summaries += [_summary(kind, samples) for kind in samples[0].differences]
    if options.as_json:
        print(json.dumps([_as_dict(summary) for summary in summaries], indent=2))
    else:
        _print(loaded.model_id, meter, options, summaries)
    return os.EX_OK


def _text(path: Path | None) -> str:
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {path}: {error}") from None


def _summary(kind: HitKind, samples: Sequence[ReplaySample]) -> Summary:
    differences = [sample.differences[kind] for sample in samples]
    divergence = [value for item in differences for value in item.divergence]
    agrees = [agree for item in differences for agree in item.top_agrees]
    num_greedy = sum(sample.num_greedy_tokens for sample in samples)
    return Summary(
        num_hit_tokens=samples[0].num_hit_tokens,
        kind=kind.value,
        divergence_mean=fmean(divergence),
        divergence_p95=quantiles(divergence, n=20)[-1] if len(divergence) > 1 else divergence[0],
        top_agreement=fmean(agrees),
        greedy_agreement=sum(item.num_greedy_agreed for item in differences) / max(num_greedy, 1),
    )


def _as_dict(summary: Summary) -> dict[str, object]:
    return {name: getattr(summary, name) for name in Summary.__dataclass_fields__}


def _print(
    model_id: str, meter: ReplayMeter, options: ReplayOptions, summaries: Sequence[Summary]
) -> None:
    keep_tokens = meter.keep_tokens
    late = "" if keep_tokens is None else f", {keep_tokens} by late layers"
    table = Table(
        title=f"{model_id}: {meter.replay_tokens} tokens replayed{late}, {options.num_texts} texts "
        f"a length, {options.num_scored} tokens scored, {options.num_greedy} generated"
    )
    for name in ("hit tokens", "hit", "KL mean", "KL p95", "top-1 the same", "greedy the same"):
        table.add_column(name, justify="left" if name == "hit" else "right")
    for summary in summaries:
        table.add_row(
            f"{summary.num_hit_tokens:,}",
            summary.kind,
            f"{summary.divergence_mean:.2e}",
            f"{summary.divergence_p95:.2e}",
            f"{summary.top_agreement:.3f}",
            f"{summary.greedy_agreement:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(
        "KL in nats against a cold run. exact: windows kept, only chunk borders differ (rounding). "
        + (
            "replay: windows computed again."
            if keep_tokens is None
            else "encoder: windows computed again (replay); decoder: late layers compute a "
            "prompt's end only."
        )
        + " greedy: share of generated tokens before the first difference."
    )
