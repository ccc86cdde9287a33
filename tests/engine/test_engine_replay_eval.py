"""What the replay meter says, on a small window model where the truth is known."""

from __future__ import annotations

import random

import pytest

from headwater.core.errors import ConfigError
from headwater.engine.replay_eval import HitKind, ReplayMeter
from headwater.model.catalogue import resolve
from headwater.model.load import load_model
from headwater.numerics.ops import KVFormat, WeightFormat
from headwater.numerics.select import select_ops

WINDOW = 16
HIT = 96
MODEL = f"toy:family=gemma3,window={WINDOW},layers=6,global_every=3"


def meter(model: str = MODEL, *, replay_tokens: int | None = None, scored: int = 8) -> ReplayMeter:
    ops = select_ops("cpu", "reference", WeightFormat.FP32, 1)
    loaded = load_model(resolve(model), ops, WeightFormat.FP32)
    return ReplayMeter(
        loaded.model, ops, KVFormat.FP32, max_hit_tokens=HIT, num_scored=scored, num_greedy=8,
        replay_tokens=replay_tokens,
    )  # fmt: skip


def text() -> list[int]:
    numbers = random.Random(7)
    return [numbers.randrange(1, 200) for _ in range(HIT + 8)]


def test_an_exact_hit_differs_by_rounding_only() -> None:
    sample = meter().measure(text(), HIT)
    assert max(sample.differences[HitKind.EXACT].divergence) < 1e-6
    assert all(sample.differences[HitKind.EXACT].top_agrees)
    assert sample.differences[HitKind.EXACT].num_greedy_agreed == sample.num_greedy_tokens


def test_replaying_the_whole_hit_is_the_cold_run() -> None:
    sample = meter(replay_tokens=HIT).measure(text(), HIT)
    assert max(sample.differences[HitKind.REPLAY].divergence) < 1e-6
    assert sample.differences[HitKind.REPLAY].num_greedy_agreed == sample.num_greedy_tokens


def test_a_replayed_window_costs_something_and_more_than_rounding() -> None:
    sample = meter().measure(text(), HIT)
    assert max(sample.differences[HitKind.REPLAY].divergence) > 100 * max(
        max(sample.differences[HitKind.EXACT].divergence), 1e-9
    )


def test_a_longer_replay_costs_less() -> None:
    short, long = (
        sum(meter(replay_tokens=n).measure(text(), HIT).differences[HitKind.REPLAY].divergence)
        for n in (4, 4 * WINDOW)
    )
    assert long < short


CED = f"toy:family=ced,window={WINDOW},layers=6"


def test_a_model_with_late_layers_is_measured_in_every_mode() -> None:
    measured = meter(CED)
    assert (measured.replay_tokens, measured.keep_tokens) == (WINDOW, WINDOW + 12)
    sample = measured.measure(text(), HIT)
    replays = dict(sample.differences)
    exact = replays.pop(HitKind.EXACT)
    assert list(replays) == [HitKind.ENCODER, HitKind.DECODER, HitKind.BOTH]
    assert max(exact.divergence) < 1e-6
    assert exact.num_greedy_agreed == 8
    for kind, difference in replays.items():
        assert max(difference.divergence) > 100 * max(max(exact.divergence), 1e-9), kind
    assert len({sum(difference.divergence) for difference in replays.values()}) == 3


def test_late_layers_that_compute_the_whole_prompt_cost_nothing() -> None:
    measured = meter(CED)
    sample = measured.measure(text(), WINDOW + 12)
    assert max(sample.differences[HitKind.DECODER].divergence) < 1e-6
    assert max(sample.differences[HitKind.BOTH].divergence) < 1e-6
    assert max(sample.differences[HitKind.ENCODER].divergence) > 1e-4


def test_a_hit_that_ends_within_a_row_of_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 2"):
        meter(CED).measure(text(), HIT - 1)


def test_a_model_without_windows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no window layers"):
        meter("toy")


def test_a_hit_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="context"):
        meter(scored=10**6)
