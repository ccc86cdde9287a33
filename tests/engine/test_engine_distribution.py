"""The arithmetic of one row: every filter beside a slow and obvious version of itself."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.randomness import keyed_uniform
from headwater.core.request import SamplingParams
from headwater.engine import distribution
from headwater.engine.distribution import Floats, Kept


def logits_of(*values: float) -> Floats:
    return np.array(values, np.float32)


def random_logits(seed: int, size: int, spread: float = 3.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def slow_keep(logits: Floats, params: SamplingParams) -> dict[int, float]:
    """Sort everything, walk down the list: the definition, token by token."""
    temperature = max(params.temperature, distribution.MIN_TEMPERATURE)
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - logits.max()) / np.float32(temperature)).tolist()
    by_logit = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    if params.top_k:
        by_logit = by_logit[: params.top_k]
    ranked = sorted(by_logit, key=lambda i: (-weights[i], i))
    if params.top_p < 1.0:
        goal = params.top_p * math.fsum(weights[i] for i in ranked)
        nucleus: list[int] = []
        for i in ranked:
            nucleus.append(i)
            if math.fsum(weights[j] for j in nucleus) >= goal:
                break
        ranked = nucleus
    ranked = [i for i in ranked if weights[i] >= params.min_p]
    total = math.fsum(weights[i] for i in ranked)
    return {i: weights[i] / total for i in sorted(ranked)}


def probabilities(logits: Floats, params: SamplingParams) -> dict[int, float]:
    ids, shares = distribution.keep(logits, params).probabilities()
    return dict(zip(ids.tolist(), shares.tolist(), strict=True))


filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-6, 0.1, 0.7, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 10_000]),
    top_p=st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.951, 0.999]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.3, 1.0]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    params=filters,
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1, 2, 63, 64, 65, 300]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_filters_keep_what_sorting_the_whole_row_keeps(
    params: SamplingParams, seed: int, size: int, spread: float
) -> None:
    logits = random_logits(seed, size, spread)
    want = slow_keep(logits, params)
    got = probabilities(logits, params)
    # Where a float32 sum lands next to the goal, one token more or less is as right.
    odd = set(got) ^ set(want)
    assert len(odd) <= (1 if params.top_p < 1.0 else 0), (params, odd)
    if not odd:
        assert got == pytest.approx(want, rel=1e-5, abs=1e-9)
    assert sum(got.values()) == pytest.approx(1.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    values=st.lists(st.sampled_from([-1.0, 0.0, 2.0, 2.5]), min_size=1, max_size=200),
    k=st.integers(0, 220),
)
def test_top_ids_are_the_sorted_rows_first_and_prefer_low_ids_on_ties(
    values: list[float], k: int
) -> None:
    want = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert distribution.top_ids(logits_of(*values), k).tolist() == want


def test_top_ids_work_for_few_and_for_many_of_a_large_row() -> None:
    logits = random_logits(1, 5_000)
    order = np.argsort(-logits, kind="stable")
    for k in (1, 20, 77, 78, 79, 4_999, 5_000):
        assert distribution.top_ids(logits, k).tolist() == order[:k].tolist()


def test_equal_probabilities_at_the_edge_of_top_p_keep_the_lower_ids() -> None:
    four_equal = logits_of(0.0, 0.0, 0.0, 0.0)
    assert set(probabilities(four_equal, SamplingParams(top_p=0.5))) == {0, 1}
    assert set(probabilities(four_equal, SamplingParams(top_p=0.51))) == {0, 1, 2}
    # ln 2 above the rest: shares 1/5, 2/5, 1/5, 1/5.
    one_ahead = logits_of(0.0, math.log(2), 0.0, 0.0)
    assert set(probabilities(one_ahead, SamplingParams(top_p=0.6))) == {0, 1}
    assert set(probabilities(four_equal, SamplingParams(top_k=3))) == {0, 1, 2}


def test_top_p_of_a_flat_row_falls_back_to_sorting_all_of_it() -> None:
    flat = random_logits(3, 20_000, spread=0.2)
    kept = distribution.keep(flat, SamplingParams(top_p=0.99))
    assert kept.ids is not None
    shares = np.exp(flat.astype(np.float64))
    shares /= shares.sum()
    inside = shares[kept.ids].sum()
    assert inside + 1e-6 >= 0.99
    assert inside - shares[kept.ids].min() < 0.99 + 1e-6  # no token too many


def test_top_p_counts_mass_among_what_top_k_left() -> None:
    # Shares 0.4, 0.3, 0.2, 0.1; of the first two, 4/7 and 3/7.
    logits = np.log(logits_of(0.4, 0.3, 0.2, 0.1))
    assert set(probabilities(logits, SamplingParams(top_k=2, top_p=0.55))) == {0}
    assert set(probabilities(logits, SamplingParams(top_p=0.55))) == {0, 1}


def test_penalties_follow_the_hand_worked_example() -> None:
    """Vocabulary of 6; prompt 0 1, output 1 2 2; repetition 2, frequency 0.5, presence 0.25.

    id  logit  repeated      counts  after
    0    4.0   4 / 2 = 2       0      2.0
    1   -1.0  -1 * 2 = -2      1     -2 - 0.5 - 0.25 = -2.75
    2    3.0   3 / 2 = 1.5     2      1.5 - 1.0 - 0.25 = 0.25
    3    1.0   not seen        0      1.0
    4    5.0   banned          0     -inf
    5    0.0   bias +100       0    100.0
    """
    edited = distribution.edit(
        logits_of(4.0, -1.0, 3.0, 1.0, 5.0, 0.0),
        SamplingParams(
            repetition_penalty=2.0,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            logit_bias=((5, 100.0),),
        ),
        np.array([0, 1, 1, 2]),
        np.array([1, 2]),
        np.array([1, 2]),
        frozenset({4}),
    )
    assert edited.tolist() == [2.0, -2.75, 0.25, 1.0, -math.inf, 100.0]


def test_bias_comes_before_the_repetition_penalty() -> None:
    no_ids = np.empty(0, np.int64)
    edited = distribution.edit(
        logits_of(-1.0, 0.0),
        SamplingParams(repetition_penalty=2.0, logit_bias=((0, 3.0),)),
        np.array([0]),
        no_ids,
        no_ids,
        (),
    )
    assert edited.tolist() == [1.0, 0.0]  # (-1 + 3) / 2, not -1 * 2 + 3


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    no_ids = np.empty(0, np.int64)
    logits = logits_of(1.0, 2.0)
    params = SamplingParams(logit_bias=((-1, 5.0), (2, 5.0)))
    edited = distribution.edit(logits, params, no_ids, no_ids, no_ids, {-1, 2, 10**9})
    assert edited.tolist() == logits.tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=6),
        SamplingParams(temperature=1.5, top_p=0.9),
        SamplingParams(min_p=0.1),
    ],
)
def test_draws_follow_the_exact_probabilities(params: SamplingParams) -> None:
    """Chi-square over 20,000 seeds; the bound is the 99.99% point for 60 degrees or fewer."""
    logits = random_logits(7, 200, spread=1.5)
    kept = distribution.keep(logits, params)
    num_draws = 20_000
    seen = Counter(
        distribution.draw(kept, keyed_uniform(seed, 5, "sample")) for seed in range(num_draws)
    )
    want = slow_keep(logits, params)
    assert set(seen) <= set(want)
    common = {i: p for i, p in want.items() if p * num_draws >= 50}
    rest = 1.0 - sum(common.values())
    chi_square = sum((seen[i] - p * num_draws) ** 2 / (p * num_draws) for i, p in common.items())
    if rest * num_draws >= 5:
        num_rest = sum(n for i, n in seen.items() if i not in common)
        chi_square += (num_rest - rest * num_draws) ** 2 / (rest * num_draws)
    degrees = len(common)
    # Wilson-Hilferty: the upper 99.99% point of chi-square with this many degrees.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < limit


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0]), min_size=1, max_size=300).filter(
        lambda w: max(w) == 1.0
    ),
    uniform=st.one_of(
        st.sampled_from([0.0, 0.5, 1.0 - 2.0**-53]),
        st.floats(0.0, 1.0, exclude_max=True),
    ),
)
def test_a_draw_is_never_a_token_of_weight_zero(weights: list[float], uniform: float) -> None:
    index = distribution.draw(Kept(None, logits_of(*weights)), uniform)
    assert weights[index] > 0.0
    below = math.fsum(weights[:index]) / math.fsum(weights)
    upto = math.fsum(weights[: index + 1]) / math.fsum(weights)
    assert below - 1e-6 <= uniform <= upto + 1e-6


def test_log_normaliser_agrees_with_float64() -> None:
    for spread in (0.01, 3.0, 200.0):
        logits = random_logits(11, 5_000, spread)
        exact = logits.astype(np.float64)
        want = exact.max() + math.log(np.exp(exact - exact.max()).sum())
        assert distribution.log_normaliser(logits) == pytest.approx(want, abs=2e-6, rel=1e-7)
