"""headwater-mini, the real weights, with plain numerics: what must be equal is equal.

With decoder replay off, and with it on and windows kept: a hit, a batch and chunks change no id.
Where windows are computed again instead of kept, distributions are near those of a cold run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch
from journey_tiers import request, run, worker

from headwater.engine.replay_eval import HitKind, ReplayMeter, ReplaySample
from headwater.model.catalogue import BUILT_IN, resolve
from headwater.model.load import load_model
from headwater.numerics.ops import KVFormat, Ops, WeightFormat
from headwater.numerics.reference import ReferenceOps
from headwater.recipe.load import load_recipe

WINDOW, KEEP = 128, 140
SWITCH = pytest.mark.parametrize("decoder_replay", [True, False])
_PARTS = (
    "the teacher|my sister|a small boy|the old farmer|Anna|the captain",
    "sees|carries|wants|paints|finds|sells",
    "a red boat|the key|two apples|an old map|the yellow bird|a letter",
    "in the garden|near the river|at night|for a friend|on the hill|every morning",
)


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return ReferenceOps()


class Writer:
    """Simple English in the model's own tokens, the same for the same seed."""

    def __init__(self) -> None:
        source = load_model(resolve(BUILT_IN), ReferenceOps(), WeightFormat.FP32).tokenizer_source
        self._encode = load_recipe(source).tokenizer.encode_text

    def tokens(self, seed: int, num_tokens: int) -> list[int]:
        draw = random.Random(seed)
        sentences = (
            " ".join(draw.choice(part.split("|")) for part in _PARTS).capitalize() + "."
            for _ in range(num_tokens)
        )
        return [0, *self._encode(" ".join(sentences))][:num_tokens]


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


@SWITCH
def test_hit_is_miss_through_disk_and_restart(
    tmp_path: Path, writer: Writer, decoder_replay: bool
) -> None:
    prompt = writer.tokens(1, 470)
    with worker(tmp_path / "kv", model=BUILT_IN, decoder_replay=decoder_replay) as parts:
        first = run(parts, [request("a", prompt)])
    turn = [*prompt, *first.ids["a", 0], *writer.tokens(2, 31)]
    with worker(
        tmp_path / "kv", model=BUILT_IN, decoder_replay=decoder_replay, context_tokens=1024
    ) as parts:
        again = run(parts, [request("a", prompt), request("turn", turn)])
        cold = run(parts, [request("cold", turn, tenant="another")])
    assert again.cache("a").num_disk_tokens == 468, "all but the last, at a whole row"
    # The last token of the answer was chosen, never computed on.
    assert again.cache("turn").num_hit_tokens == 480
    assert (again.cache("turn").num_replayed_tokens > 0) == decoder_replay
    assert cold.cache("cold").num_hit_tokens == 0
    assert again.ids["a", 0] == first.ids["a", 0]
    assert again.ids["turn", 0] == cold.ids["cold", 0]


@SWITCH
def test_alone_is_as_in_a_batch_and_whole_as_in_chunks(
    writer: Writer, decoder_replay: bool
) -> None:
    asked = [
        request(f"r{i}", writer.tokens(10 + i, length), 8)
        for i, length in enumerate((2, KEEP, WINDOW + 3, 333))
    ]
    with worker(None, model=BUILT_IN, decoder_replay=decoder_replay) as parts:
        alone = {key: ids for one in asked for key, ids in run(parts, [one]).ids.items()}
    with worker(None, model=BUILT_IN, decoder_replay=decoder_replay, max_step_tokens=97) as parts:
        assert run(parts, asked).ids == alone


@pytest.fixture(scope="module")
def replayed(ops: Ops, writer: Writer) -> list[ReplaySample]:
    model = load_model(resolve(BUILT_IN), ops, WeightFormat.FP32).model
    meter = ReplayMeter(model, ops, KVFormat.FP32, max_hit_tokens=384, num_scored=24, num_greedy=0)
    assert (meter.replay_tokens, meter.keep_tokens) == (WINDOW, KEEP)
    return [meter.measure(writer.tokens(seed, 408), 384) for seed in (21, 22)]


# Nats, on the mean: rounding for what is exact, and for the rest what training leaves, which
# has seen windows begin anew. Two models that differ in kind are whole nats apart.
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (HitKind.EXACT, 1e-6),
        (HitKind.DECODER, 0.005),
        (HitKind.ENCODER, 0.005),
        (HitKind.BOTH, 0.005),
    ],
)
def test_a_replay_is_near_the_full_computation(
    replayed: list[ReplaySample], kind: HitKind, tolerance: float
) -> None:
    found = [value for sample in replayed for value in sample.differences[kind].divergence]
    assert len(found) == 48
    assert fmean(found) < tolerance
