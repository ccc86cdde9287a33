"""Microseconds per step of the sampler, by kind of row: ``python bench/sampler.py``.

Logits are random with a spread like a language model's (normal, sigma 3); a flat
one (sigma 0.5) is the worst case for top_p, which then keeps most of the vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from headwater.core.request import SamplingParams
from headwater.core.step import SampleSpec
from headwater.engine.sampler import Sampler


def median_us(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(options.rows, options.vocab, generator=generator)
    peaked, flat = normal * 3.0, normal * 0.5
    prompt = tuple(range(0, 20_000, 20))
    output = tuple(range(0, 4_000, 20))
    cases = {
        "greedy": (peaked, SamplingParams(temperature=0.0)),
        "greedy + logprobs 5": (peaked, SamplingParams(temperature=0.0, num_logprobs=5)),
        "greedy + all penalties": (
            peaked,
            SamplingParams(
                temperature=0.0,
                repetition_penalty=1.1,
                frequency_penalty=0.5,
                presence_penalty=0.5,
            ),
        ),
        "temperature 0.8": (peaked, SamplingParams(temperature=0.8)),
        "temperature 0.8, top_p 0.95": (peaked, SamplingParams(temperature=0.8, top_p=0.95)),
        "temperature 0.8, top_k 50": (peaked, SamplingParams(temperature=0.8, top_k=50)),
        "temperature 0.8, min_p 0.05": (peaked, SamplingParams(temperature=0.8, min_p=0.05)),
        "top_p 0.95, flat logits": (flat, SamplingParams(top_p=0.95)),
    }
    sampler = Sampler()
    print(f"{options.rows} rows, vocabulary {options.vocab}")
    print(f"{'case':32s} {'us/step':>9s} {'us/row':>8s}")
    for name, (logits, params) in cases.items():
        specs = [
            SampleSpec(
                params=params, position=len(prompt) + i, prompt_tokens=prompt, output_tokens=output
            )
            for i in range(options.rows)
        ]

        def step(logits: torch.Tensor = logits, specs: list[SampleSpec] = specs) -> object:
            return sampler.sample(logits, specs)

        step_us = median_us(step, options.repeats)
        print(f"{name:32s} {step_us:9.0f} {step_us / options.rows:8.1f}")


if __name__ == "__main__":
    main()
