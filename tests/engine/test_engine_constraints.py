"""The sampler under an output constraint's mask."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.core.request import SamplingParams
from headwater.core.step import SampleSpec
from headwater.engine.distribution import ceilings
from headwater.engine.sampler import Sampler

VOCAB = 70


def bits(*ids: int, num_words: int = 3) -> bytes:
    return sum(1 << token_id for token_id in ids).to_bytes(4 * num_words, "little")


def logits() -> torch.Tensor:
    return torch.linspace(0.0, 6.9, VOCAB)[None]


def spec(
    allowed_bits: bytes | None,
    params: SamplingParams | None = None,
    *,
    banned_ids: frozenset[int] = frozenset(),
) -> SampleSpec:
    return SampleSpec(
        params=params or SamplingParams(temperature=0.0),
        position=7,
        prompt_tokens=(1, 2),
        output_tokens=(3, 3),
        banned_ids=banned_ids,
        allowed_bits=allowed_bits,
    )


def test_bits_are_ids_in_ascending_order_and_nothing_lies_behind_the_last() -> None:
    ids = [0, 9, 31, 32, 69]
    found = ceilings(bits(*ids), VOCAB)
    assert found.shape == (VOCAB,)
    assert np.flatnonzero(found == np.inf).tolist() == ids
    assert np.flatnonzero(found == -np.inf).tolist() == sorted(set(range(VOCAB)) - set(ids))
    short = ceilings(bits(0, 31, num_words=1), VOCAB)
    assert np.flatnonzero(short == np.inf).tolist() == [0, 31]
    assert (short[32:] == -np.inf).all()


def test_the_best_allowed_id_is_taken() -> None:
    (token,) = Sampler().sample(logits(), [spec(bits(4, 41, 7))])
    assert token is not None
    assert token.token_id == 41


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.0, logit_bias=((60, 100.0), (5, -100.0))),
        SamplingParams(repetition_penalty=1.3, presence_penalty=1.0),
        SamplingParams(temperature=0.0, repetition_penalty=0.5),
    ],
)
def test_nothing_else_brings_a_forbidden_id_back(params: SamplingParams) -> None:
    allowed = (1, 3, 5)
    for seed in range(50):
        (token,) = Sampler().sample(logits(), [spec(bits(*allowed), replace(params, seed=seed))])
        assert token is not None
        assert token.token_id in allowed


def test_logprobs_are_those_of_the_model_not_of_the_constraint() -> None:
    row = logits()
    (token,) = Sampler().sample(
        row, [spec(bits(4), SamplingParams(temperature=0.0, num_logprobs=2))]
    )
    assert token is not None
    expected = torch.log_softmax(row[0].double(), dim=0)
    assert math.isclose(token.logprob or 0.0, float(expected[4]), rel_tol=1e-5)
    assert [top.token_id for top in token.top] == [69, 68]


def test_the_row_beside_a_constrained_one_is_free_and_the_logits_stay_as_they_are() -> None:
    rows = logits().repeat(2, 1)
    before = rows.clone()
    free, bound = Sampler().sample(rows, [spec(None), spec(bits(2))])
    assert free is not None
    assert bound is not None
    assert (free.token_id, bound.token_id) == (69, 2)
    assert torch.equal(rows, before)


def test_a_row_that_is_not_numbers_fails_whatever_its_mask_hides() -> None:
    for bad in (math.nan, math.inf):
        row = logits()
        row[0, 50] = bad
        assert Sampler().sample(row, [spec(bits(2, 50))]) == [None]
        assert Sampler().sample(row, [spec(bits(2))]) == [None]


def test_a_mask_that_bans_leave_empty_gives_no_token_instead_of_a_wrong_one() -> None:
    two_rows = logits().repeat(2, 1)
    nothing_left = spec(bits(4), banned_ids=frozenset({4}))
    assert Sampler().sample(two_rows, [nothing_left, spec(bits())]) == [None, None]
