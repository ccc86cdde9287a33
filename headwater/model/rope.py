"""Rotary embedding tables: frequencies under each kind of scaling, then cos and sin.

Pure functions of a ModelConfig. One table serves every position up to the
served context, because cached KV is reused by sequences of any length: a
token's rotation may depend on its position only.

Dynamic NTK scaling as published depends on the current length, which changes
the rotation of tokens already cached. Here its base is that of the *served*
context, for all positions: no scaling at all when served within the original
context, and equal to the published form for a sequence that fills the context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.model.config import (
    DivisorScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoScaling,
    YarnScaling,
)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """(radians per position, float32 [head_dim / 2]; factor on cos and sin)."""
    plain = _plain(config.rope_theta, config.head_dim)
    match config.rope_scaling:
        case NoScaling():
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case DivisorScaling(divisors=divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32), 1.0
        case DynamicScaling() as scaling:
            return _dynamic(scaling, config), 1.0
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, config), scaling.attention_factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0


def rotary_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [context_tokens, head_dim / 2], scaled as ``Ops.rotate`` takes them."""
    frequencies, factor = inverse_frequencies(config)
    positions = torch.arange(config.context_tokens, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos() * factor, angles.sin() * factor


def _plain(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents


def _dynamic(scaling: DynamicScaling, config: ModelConfig) -> Tensor:
    original = scaling.original_context_tokens
    length = max(config.context_tokens, original)
    growth = scaling.factor * length / original - (scaling.factor - 1)
    head_dim = config.head_dim
    theta = config.rope_theta * growth ** (head_dim / (head_dim - 2))
    return _plain(theta, head_dim)


def _yarn(plain: Tensor, scaling: YarnScaling, config: ModelConfig) -> Tensor:
    """Section 3.2: pair i keeps its frequency when it turns at least ``beta_fast`` times
    within the original context, is interpolated below ``beta_slow`` turns, and in
    between is mixed linearly in i."""
    head_dim = config.head_dim

    def pair_turning(num_turns: float) -> float:
        """The (fractional) pair index that makes ``num_turns`` in the original context."""
        wavelength = scaling.original_context_tokens / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # head_dim - 1, not the last pair's index: released checkpoints assume it.
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    interpolated_share = ((pairs - low) / width).clamp(0, 1)
    interpolated = plain / scaling.factor
    return interpolated * interpolated_share + plain * (1 - interpolated_share)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    num_turns = scaling.original_context_tokens * plain / (2 * math.pi)
    kept_share = (num_turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    kept_share = kept_share.clamp(0, 1)
    return plain / scaling.factor * (1 - kept_share) + plain * kept_share
