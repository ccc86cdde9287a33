"""What the shape of headwater-mini saves, and what it costs: the encoder-decoder, measured.

    python bench/mini.py [--parts flops time stored weights recall agreement] [--json FILE]

flops      counted operations of a 4k-token prefill, decoder replay on against off
time       seconds to the first token of the same, of two servers in turn
stored     bytes a token that the disk tier is given, windows replayed against windows stored
           at every 512 tokens
weights    bytes that a prefill worker holds, of the model's
recall     a fact 2k tokens back: cold on one worker, and with two thirds of the prompt from disk
           after a restart, replayed and handed over; the share of right answers, and of equal ones
agreement  greedy tokens on held-out stories before the first difference, by kind of replay

Real weights, real servers; text is Python's own documentation where it may be any.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import torch
from cache import agreement, ask, cache_folder, settled
from serving import Row, Server, server, show
from tokenizers import Tokenizer
from torch.utils.flop_counter import FlopCounterMode

from headwater.core.blocks import BlockId
from headwater.core.request import replay_tokens
from headwater.core.step import SequenceId, StepPlan, StepRow
from headwater.engine.batch import BatchBuilder
from headwater.engine.kv_cache import allocate_kv, window_tokens
from headwater.engine.kv_plan import KVLimits, plan_kv
from headwater.model.catalogue import BUILT_IN, BUILT_IN_FOLDER, resolve
from headwater.model.family import ModelPart
from headwater.model.load import LoadedModel, load_model
from headwater.numerics.ops import KVFormat, Ops, WeightFormat
from headwater.numerics.reference import ReferenceOps

PREFILL_TOKENS = 4096
CHUNK_TOKENS = 512
UNIT_TOKENS = 512
BLOCK_TOKENS = 32
RECALL_TOKENS = 2048
AGREEMENT_HITS = (512, 1024, 2048)
AGREEMENT_TEXTS = 32
NO_DISK = "--cache-dir=none"
NO_BUDGET = "--step-budget-ms=none"
POOL = "--num-blocks=1024"
OFF = "--decoder-replay=off"
REPLAY = "--window-kv=replay"
SPLIT = ("--prefill=1", "--decode=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--recalled", type=int, default=40, help="facts that are asked for [40]")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows: list[Row] = []
    for part in options.parts:
        rows += PARTS[part](options)
        show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


@cache
def text_tokens() -> tuple[int, ...]:
    """Python's documentation in the model's tokens."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUILT_IN_FOLDER / "tokenizer.json"))


def prompt(number: int, num_tokens: int = PREFILL_TOKENS) -> list[int]:
    """Text that begins elsewhere for each number, so that nothing of it is a hit."""
    begin = number * 1999 % (len(text_tokens()) - num_tokens)
    return list(text_tokens()[begin : begin + num_tokens])


# Operations


def flops(_: argparse.Namespace) -> Iterator[Row]:
    ops = ReferenceOps()
    loaded = load_model(resolve(BUILT_IN), ops, WeightFormat.FP32)
    window = window_tokens(loaded.model.cache_plan)
    assert window is not None
    found = {}
    for name, late_start in (("off", 0), ("on", PREFILL_TOKENS - replay_tokens(window))):
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            prefill(loaded, ops, late_start, window)
        found[name] = counted.get_total_flops()
    yield Row("4,096-token prefill, counted, replay off", found["off"] / 1e9, "GFLOP")
    yield Row("the same, decoder replay on", found["on"] / 1e9, "GFLOP",
              found["on"] / found["off"], "off (at most 0.6)")  # fmt: skip


def prefill(loaded: LoadedModel, ops: Ops, late_start: int, window: int) -> None:
    """A prompt in chunks, and the logits of its last token."""
    model, num_blocks = loaded.model, PREFILL_TOKENS // BLOCK_TOKENS
    plan = plan_kv(
        KVLimits(block_tokens=BLOCK_TOKENS, num_blocks=num_blocks),
        bytes_per_token=1,
        model_context_tokens=PREFILL_TOKENS,
        available_bytes=2**62,
    )
    kv = allocate_kv(ops, plan, model.cache_plan, KVFormat.FP32).layers
    batches = BatchBuilder(
        block_tokens=BLOCK_TOKENS,
        num_blocks=num_blocks,
        context_tokens=PREFILL_TOKENS,
        vocab_size=model.config.vocab_size,
        device=ops.device,
        window_tokens=window,
        has_late=True,
    )
    tokens, hidden = prompt(0), torch.empty(0)
    for begin in range(0, PREFILL_TOKENS, CHUNK_TOKENS):
        row = StepRow(
            sequence_id=SequenceId(0),
            start=begin,
            tokens=tuple(tokens[begin : begin + CHUNK_TOKENS]),
            block_table=tuple(map(BlockId, range(num_blocks))),
            late_start=late_start,
        )
        step = batches.build(StepPlan((row,)))
        hidden = model.forward(step.ids, step.batch, kv)
    model.logits(hidden[-1:])


# Time


def prefill_time(options: argparse.Namespace) -> Iterator[Row]:
    flags = (NO_DISK, NO_BUDGET, POOL)
    with (
        server(BUILT_IN, "bf16", *flags) as on,
        server(BUILT_IN, "bf16", OFF, *flags) as off,
    ):
        pairs = []
        for number in range(-2, options.repeats):  # the first rounds touch memory and make kernels
            order = (on, off) if number % 2 else (off, on)
            seconds = {served.pid: ask(served, prompt(100 + number)).ttft_s for served in order}
            if number >= 0:
                pairs.append((seconds[off.pid], seconds[on.pid]))
    yield Row("4,096-token prefill, first token, replay off",
              1000 * statistics.median(a for a, _ in pairs), "ms")  # fmt: skip
    yield Row("the same, decoder replay on", 1000 * statistics.median(b for _, b in pairs), "ms",
              statistics.median(b / a for a, b in pairs), "off, in turn (at most 0.7)")  # fmt: skip


# Bytes


def stored(_: argparse.Namespace) -> Iterator[Row]:
    """A conversation of 512 tokens a turn: each turn's end stores its windows, or none do."""
    modes = {
        "windows of all layers at every 512 tokens (no replay)": (OFF,),
        "windows of the early layers at every 512 (decoder replay)": (),
        "no windows (both replays)": (REPLAY,),
    }
    found = {}
    for name, flags in modes.items():
        with cache_folder() as folder, server(BUILT_IN, "bf16", folder, NO_BUDGET, *flags) as made:
            for end in range(UNIT_TOKENS, PREFILL_TOKENS + 1, UNIT_TOKENS):
                settled(made, prompt(0)[:end])
            found[name] = unmoving(made, 'headwater_cache_stored_bytes_total{tier="disk"}')
    first = next(iter(found.values()))
    for name, num_bytes in found.items():
        yield Row(f"stored: {name}", num_bytes / PREFILL_TOKENS, "bytes a token",
                  num_bytes / first, "no replay (both: at most 0.6)")  # fmt: skip


def unmoving(served: Server, name: str) -> float:
    """The metric once three looks are alike. A worker tells it after a step, so each look
    follows one, of a prompt too short to be stored."""
    seen: list[float] = []
    while len(seen) < 30 and (len(seen) < 3 or len(set(seen[-3:])) > 1):
        ask(served, prompt(1)[:1])
        time.sleep(0.7)
        seen.append(metric(served, name))
    return seen[-1]


def metric(served: Server, name: str) -> float:
    page = f"{served.url.removesuffix('/v1')}/metrics"
    with urllib.request.urlopen(page, timeout=10) as response:
        text: str = response.read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name}"
    return float(found[1])


def weights(_: argparse.Namespace) -> Iterator[Row]:
    early = load_model(
        resolve(BUILT_IN), ReferenceOps(), WeightFormat.BF16, part=ModelPart.EARLY
    )  # fmt: skip
    share = early.weights_bytes / early.full_weights_bytes
    yield Row("weights of a worker", early.full_weights_bytes / 1e6, "MB")
    yield Row("of a prefill worker", early.weights_bytes / 1e6, "MB", share,
              "the whole (at most 0.6)")  # fmt: skip


# Quality


def recall(options: argparse.Namespace) -> Iterator[Row]:
    sys.path.append(str(Path(__file__).parents[1]))
    from tools.mini.evaluate_sets import is_right, recall_items
    from tools.mini.text import Texts

    items = recall_items(
        tokenizer(), Texts.builtin(), distance=RECALL_TOKENS, count=options.recalled
    )
    prompts = [tokenizer().encode(item.prompt, add_special_tokens=False).ids for item in items]
    texts: dict[str, list[str]] = {}
    with server(BUILT_IN, "bf16", NO_DISK, OFF) as served:
        texts["cold, no replay"] = [answer(served, tokens)[0] for tokens in prompts]
    with server(BUILT_IN, "bf16", NO_DISK) as served:
        texts["cold, decoder replay"] = [answer(served, tokens)[0] for tokens in prompts]
    with cache_folder() as folder:
        flags = (folder, REPLAY, *SPLIT)
        with server(BUILT_IN, "bf16", *flags) as served:
            for tokens in prompts:
                answer(served, tokens[: len(tokens) * 2 // 3], 1)
        with server(BUILT_IN, "bf16", *flags) as served:
            found = [answer(served, tokens) for tokens in prompts]
            num_handoffs = handoffs(served)
    again = "after a restart, from disk, replayed, handed over"
    texts[again] = [text for text, _ in found]
    num_hit = sum(hit for _, hit in found)
    hits = f"{num_hit / sum(map(len, prompts)):.0%} hit, {num_handoffs} hand-overs"
    cold = texts["cold, decoder replay"]
    for name, said in texts.items():
        right = [is_right(item, text) for item, text in zip(items, said, strict=True)]
        share = statistics.mean(right)
        yield Row(f"recall, {RECALL_TOKENS:,} tokens back, {name}", 100 * share, "%", share,
                  f"{len(items)} asked" + (f"; {hits}" if name == again else ""), 0.9)  # fmt: skip
    same = statistics.mean(map(str.__eq__, texts[again], cold))
    begun = statistics.mean(map(agreement, texts[again], cold))
    yield Row("the same answers in both", 100 * same, "%", same,
              f"cold, decoder replay; of characters {begun:.2f}", 1.0)  # fmt: skip


def answer(served: Server, tokens: Sequence[int], max_tokens: int = 40) -> tuple[str, int]:
    """Text up to the model's own end, and hit tokens."""
    body = {"prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{served.url}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        said = json.loads(response.read())
    return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]


def handoffs(served: Server) -> int:
    with urllib.request.urlopen(f"{served.url.removesuffix('/v1')}/pools", timeout=10) as response:
        num_done: int = json.loads(response.read())["handoffs"]["num_done"]
    return num_done


def greedy_agreement(_: argparse.Namespace) -> Iterator[Row]:
    sys.path.append(str(Path(__file__).parents[1]))
    from tools.mini.grammar import story
    from tools.mini.words import Part, words

    rng = random.Random("bench")
    kept_out = words(Part.HELD_OUT)
    stories = "\n\n".join(story(rng, kept_out) for _ in range(1_500))
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "stories.txt"
        text.write_text(stories)
        command = [
            sys.executable, "-m", "headwater.app.cli", "eval", "replay", f"--model={BUILT_IN}",
            f"--hits={','.join(map(str, AGREEMENT_HITS))}", f"--text={text}",
            f"--texts={AGREEMENT_TEXTS}", "--json",
        ]  # fmt: skip
        run = subprocess.run(command, check=True, capture_output=True, text=True)
    for row in json.loads(run.stdout):
        share, near = row["greedy_agreement"], row["top_agreement"]
        yield Row(f"{row['num_hit_tokens']:,} tokens, {row['kind']}: greedy tokens the same",
                  100 * share, "%", share,
                  f"64 a text; KL {row['divergence_mean']:.1e}, likeliest {near:.3f}",
                  0.9)  # fmt: skip


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "flops": flops,
    "time": prefill_time,
    "stored": stored,
    "weights": weights,
    "recall": recall,
    "agreement": greedy_agreement,
}


if __name__ == "__main__":
    main()
