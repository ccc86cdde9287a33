"""Rotary tables: what each kind of scaling promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwater.model.config import (
    DivisorScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
)
from headwater.model.rope import inverse_frequencies, rotary_table
from headwater.model.toy_source import ToyOptions


def config_with(scaling: RopeScaling, context_tokens: int = 256) -> ModelConfig:
    config = ToyOptions(heads=1, kv_heads=1).config()
    return replace(config, rope_scaling=scaling, context_tokens=context_tokens)


PLAIN = inverse_frequencies(ToyOptions(heads=1, kv_heads=1).config())[0]


def test_the_table_turns_one_pair_per_column_and_starts_at_rest() -> None:
    cos, sin = rotary_table(ToyOptions(context=100).config())
    assert cos.shape == sin.shape == (100, 8)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos[0], torch.ones(8))
    assert torch.equal(sin[0], torch.zeros(8))
    assert sin[1, 0] == pytest.approx(0.8414710)  # the first pair turns one radian a token


def test_linear_scaling_at_factor_times_p_is_plain_at_p() -> None:
    cos, _ = rotary_table(config_with(LinearScaling(factor=4.0)))
    plain, _ = rotary_table(ToyOptions(heads=1, kv_heads=1).config())
    torch.testing.assert_close(cos[::4], plain[:64], atol=1e-5, rtol=0)


def test_dynamic_scaling_changes_nothing_within_the_original_context() -> None:
    within = config_with(DynamicScaling(factor=4.0, original_context_tokens=256), 256)
    torch.testing.assert_close(inverse_frequencies(within)[0], PLAIN)
    beyond = replace(within, context_tokens=1024)
    frequencies = inverse_frequencies(beyond)[0]
    assert frequencies[0] == 1.0
    assert (frequencies[1:] < PLAIN[1:]).all()


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    scaling = YarnScaling(factor=8.0, original_context_tokens=512, attention_factor=1.2)
    frequencies, attention_factor = inverse_frequencies(config_with(scaling))
    assert attention_factor == 1.2
    torch.testing.assert_close(frequencies[:3], PLAIN[:3])
    torch.testing.assert_close(frequencies[-10:], PLAIN[-10:] / 8)
    cos, _ = rotary_table(config_with(scaling))
    torch.testing.assert_close(cos[0], torch.full((32,), 1.2))


def test_llama3_keeps_fast_pairs_and_divides_slow_ones() -> None:
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=512
    )
    frequencies, _ = inverse_frequencies(config_with(scaling))
    torch.testing.assert_close(frequencies[:10], PLAIN[:10])
    torch.testing.assert_close(frequencies[-10:], PLAIN[-10:] / 8)
    assert (frequencies.diff() < 0).all()


def test_divisors_divide_each_frequency() -> None:
    divisors = tuple(1.0 + i for i in range(32))
    frequencies, _ = inverse_frequencies(config_with(DivisorScaling(divisors=divisors)))
    torch.testing.assert_close(frequencies, PLAIN / torch.tensor(divisors))
