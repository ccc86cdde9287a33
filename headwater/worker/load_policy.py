"""Load a stored prefix, or compute it? And when to stop waiting for a load. Pure.

Takes seconds and tokens, returns yes or no: no clock, no tiers. A hit must not be
slower than a miss: what could be computed sooner is computed.
"""

from __future__ import annotations

# Differences below this are noise; it also covers what a load costs besides its bytes.
NOISE_S = 0.005
# Whatever is predicted, and even where nothing is known yet: a load that takes longer hangs.
LONGEST_LOAD_S = 30.0


def is_worth_loading(load_s: float, num_tokens: int, tokens_per_s: float | None) -> bool:
    """Whether ``load_s`` is no more than computing the ``num_tokens`` that the load saves.

    Until a prefill rate is known, loading is taken to be right.

    >>> is_worth_loading(0.2, 1000, tokens_per_s=2000.0)
    True
    >>> is_worth_loading(0.6, 1000, tokens_per_s=2000.0)
    False
    """
    if num_tokens <= 0:
        return False
    if tokens_per_s is None:
        return load_s <= LONGEST_LOAD_S
    return load_s <= num_tokens / tokens_per_s + NOISE_S


def is_worth_waiting(
    elapsed_s: float,
    num_loaded: int,
    num_records: int,
    num_tokens: int,
    tokens_per_s: float | None,
) -> bool:
    """Whether the rest of a load that runs for ``elapsed_s`` is still no slower than computing it.

    The rest is predicted from the pace so far. As long as nothing has come, the load may
    take what computing all ``num_tokens`` would have: at worst it then costs as much again.

    >>> is_worth_waiting(0.1, 5, 10, 1000, tokens_per_s=2000.0)  # 0.1 s more for 500 tokens
    True
    >>> is_worth_waiting(0.5, 5, 10, 1000, tokens_per_s=2000.0)  # 0.5 s more
    False
    """
    if elapsed_s > LONGEST_LOAD_S:
        return False
    if tokens_per_s is None or elapsed_s <= NOISE_S:
        return True
    if num_loaded == 0:
        return elapsed_s <= num_tokens / tokens_per_s + NOISE_S
    num_left = num_records - num_loaded
    left_s = elapsed_s / num_loaded * num_left
    return left_s <= num_tokens * num_left / num_records / tokens_per_s + NOISE_S
