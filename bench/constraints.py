"""What output constraints cost on a real vocabulary: ``python bench/constraints.py``.

Per kind of constraint: compiling it, copying it for one output, the mask of each token
of a usual output (the first time, then with a warm lexer), and taking the token. Then a
sampler step of constrained rows beside one of free rows. SmolLM2's tokenizer, one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from headwater.core.constraint import Constraint
from headwater.core.request import SamplingParams
from headwater.core.step import SampleSpec
from headwater.engine.sampler import Sampler
from headwater.model.catalogue import resolve
from headwater.model.load import open_model
from headwater.recipe.constraints import GrammarCompiler
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_load import load_tokenizer
from headwater.recipe.turn_grammar import after_reasoning

ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["dine-in", "delivery"]},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"what": {"type": "string"}, "price": {"type": "number"}},
                "required": ["what", "price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "kind", "items"],
    "additionalProperties": False,
}
ANSWER = (
    '{"name": "A fairly ordinary guest, with words", "kind": "delivery", '
    '"items": [{"what": "two pizzas", "price": 23.5}, {"what": "tea", "price": 3}]}'
)
SCHEMA = Constraint("json_schema", json.dumps(ORDER))
CASES = {
    "json_schema": (SCHEMA, ANSWER),
    "json_object": (Constraint("json_object"), ANSWER),
    "reasoning, then schema": (
        after_reasoning(SCHEMA, end="</think>"),
        f"The guest wants two pizzas and some tea.\nSo:</think>\n\n{ANSWER}",
    ),
    "regex [A-Z][a-z]+( [a-z]+)*": (
        Constraint("regex", r"[A-Z][a-z]+( [a-z]+)*"),
        "Hello there my friend of the sea and of the land",
    ),
}


def timed_us(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return (time.perf_counter() - start_s) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    source = open_model(resolve("smollm2")).tokenizer_source
    tokenizer = load_tokenizer(source)
    compiler = GrammarCompiler(lambda: (tokenizer, source.end_token_ids))
    vocabulary_us = timed_us(lambda: compiler.check(Constraint("regex", "a")))
    print(f"vocabulary of {tokenizer.vocab_size}: {vocabulary_us / 1000:.0f} ms, once")
    print(f"{'us':28} {'compile':>8} {'copy':>6} {'mask':>6} {'p95':>6} {'first':>6} {'take':>6}")
    for name, (constraint, text) in CASES.items():
        compile_us = timed_us(partial(compiler.check, constraint))
        start = compiler.compile(constraint)
        copy_us = min(timed_us(start) for _ in range(options.repeats))
        masks: list[list[float]] = []
        takes: list[float] = []
        for _ in range(options.repeats):
            matcher = start()
            masks.append([])
            for token_id in tokenizer.encode_text(text):
                masks[-1].append(timed_us(matcher.allowed_bits))
                takes.append(timed_us(partial(matcher.accept, token_id)))
        warm = sorted(us for run in masks[1:] for us in run)
        print(
            f"{name:28} {compile_us:8.0f} {copy_us:6.1f} {statistics.median(warm):6.1f} "
            f"{warm[int(0.95 * len(warm))]:6.0f} {max(masks[0]):6.0f} "
            f"{statistics.median(takes):6.1f}"
        )
    _sampler(options.rows, tokenizer, compiler, options.repeats)


def _sampler(rows: int, tokenizer: Tokenizer, compiler: GrammarCompiler, repeats: int) -> None:
    logits = (
        torch.randn(rows, tokenizer.vocab_size, generator=torch.Generator().manual_seed(0)) * 3.0
    )
    matcher = compiler.compile(SCHEMA)()
    for token_id in tokenizer.encode_text('{"name": "A'):  # inside a string: a wide mask
        assert matcher.accept(token_id)
    bits = matcher.allowed_bits()
    sampler = Sampler()
    print(f"sampler, {rows} rows, us a row:")
    for name, params in (
        ("greedy", SamplingParams(temperature=0.0)),
        ("temperature 0.8", SamplingParams(temperature=0.8)),
    ):
        free = [SampleSpec(params=params, position=i) for i in range(rows)]
        bound = [SampleSpec(params=params, position=i, allowed_bits=bits) for i in range(rows)]
        # A and B in turn: the machine's other work then falls on both.
        times = [
            (
                timed_us(partial(sampler.sample, logits, free)),
                timed_us(partial(sampler.sample, logits, bound)),
            )
            for _ in range(repeats)
        ]
        free_us, bound_us = (
            statistics.median(column) / rows for column in zip(*times, strict=True)
        )
        print(f"  {name:26} free {free_us:6.1f}, constrained {bound_us:6.1f}")


if __name__ == "__main__":
    main()
