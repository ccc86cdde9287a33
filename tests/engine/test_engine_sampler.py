"""Batches of rows: each row's token and logprobs are its own business."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwater.core.request import SampledToken, SamplingParams
from headwater.core.step import SampleSpec
from headwater.engine.sampler import Sampler, first_argmax

VOCAB_SIZE = 1_000


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3.0


def spec(params: SamplingParams, position: int = 10) -> SampleSpec:
    return SampleSpec(
        params=params,
        position=position,
        prompt_tokens=(1, 2, 3, 3),
        output_tokens=(5, 6, 6),
        banned_ids=frozenset(),
    )


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, num_logprobs=5),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.8, top_p=0.95),
    SamplingParams(seed=3, top_k=40, min_p=0.02, num_logprobs=0),
    SamplingParams(seed=4, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=20),
    SamplingParams(seed=5, logit_bias=((7, 100.0),)),
    SamplingParams(seed=6, presence_penalty=-2.0, top_p=0.5),
]


def test_a_row_gets_the_same_token_and_logprobs_alone_and_among_others() -> None:
    logits = random_logits(16)
    specs = [spec(MIXED[i % len(MIXED)], position=i) for i in range(16)]
    together = Sampler().sample(logits, specs)
    for i in range(16):
        alone = Sampler().sample(logits[i : i + 1].clone(), [specs[i]])
        assert alone == [together[i]]
    backwards = Sampler().sample(logits.flip(0).contiguous(), specs[::-1])
    assert backwards[::-1] == together


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(len(MIXED))
    before = logits.clone()
    Sampler().sample(logits, [spec(params) for params in MIXED])
    assert torch.equal(logits, before)


def test_the_seed_and_the_position_decide_and_nothing_else() -> None:
    logits = random_logits(1).expand(60, -1)
    one_seed = [spec(SamplingParams(seed=9), position=4) for _ in range(60)]
    assert len({token and token.token_id for token in Sampler().sample(logits, one_seed)}) == 1
    seeds = [spec(SamplingParams(seed=s), position=4) for s in range(60)]
    assert len({token and token.token_id for token in Sampler().sample(logits, seeds)}) > 5
    positions = [spec(SamplingParams(seed=9), position=p) for p in range(60)]
    assert len({token and token.token_id for token in Sampler().sample(logits, positions)}) > 5


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, [5, 500, 999]] = 2.0
    greedy = spec(SamplingParams(temperature=0.0))
    assert Sampler().sample(logits, [greedy, greedy]) == [SampledToken(5), SampledToken(0)]
    assert first_argmax(logits) == [5, 0]


def test_first_argmax_is_what_the_host_path_takes() -> None:
    logits = random_logits(8).round()  # rounding makes ties
    logits[3, 17] = math.nan
    logits[4] = -math.inf
    logits[5, 3] = math.inf
    greedy = spec(SamplingParams(temperature=0.0))
    tokens = Sampler().sample(logits, [greedy] * 8)
    assert first_argmax(logits) == [token and token.token_id for token in tokens]
    assert tokens[3] is tokens[4] is tokens[5] is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_none_and_the_others_their_tokens(
    bad: float, temperature: float
) -> None:
    logits = random_logits(3)
    specs = [spec(SamplingParams(temperature=temperature, num_logprobs=2)) for _ in range(3)]
    want = Sampler().sample(logits, specs)
    logits[1, 321] = bad
    got = Sampler().sample(logits, specs)
    assert got == [want[0], None, want[2]]
    assert Sampler().score(logits, [0, 0, 0], 1)[1] is None


def test_logprobs_are_of_the_models_own_distribution() -> None:
    """Before temperature, penalties and bias: what was asked for does not change them."""
    logits = random_logits(1)
    params = SamplingParams(
        temperature=0.3,
        repetition_penalty=1.5,
        logit_bias=((400, 100.0),),
        num_logprobs=3,
    )
    [token] = Sampler().sample(logits, [spec(params)])
    assert token is not None
    assert token.token_id == 400
    exact = torch.log_softmax(logits[0].double(), dim=-1)
    assert token.logprob == pytest.approx(exact[400].item(), abs=1e-5)
    best = torch.topk(exact, 3)
    assert [t.token_id for t in token.top] == best.indices.tolist()
    assert [t.logprob for t in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_logprobs_of_all_tokens_sum_to_one() -> None:
    logits = random_logits(1)
    every = Sampler().score(logits.expand(VOCAB_SIZE, -1), range(VOCAB_SIZE), 0)
    total = math.fsum(math.exp(token.logprob or 0.0) for token in every if token is not None)
    assert total == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("num_logprobs", "has_logprob", "num_top"),
    [(None, False, 0), (0, True, 0), (20, True, 20), (5_000, True, VOCAB_SIZE)],
)
def test_each_row_gets_the_logprobs_it_asked_for(
    num_logprobs: int | None, has_logprob: bool, num_top: int
) -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=num_logprobs)
    [token] = Sampler().sample(random_logits(1), [spec(params)])
    assert token is not None
    assert (token.logprob is not None) == has_logprob
    assert len(token.top) == num_top
    if num_top:  # greedy: the chosen token leads
        assert (token.top[0].token_id, token.top[0].logprob) == (token.token_id, token.logprob)


def test_banned_ids_are_never_chosen() -> None:
    logits = random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=3, seed=1)):
        banned = replace(spec(params), banned_ids=frozenset(order[:-1]))
        [token] = Sampler().sample(logits, [banned])
        assert token == SampledToken(order[-1])
        all_banned = replace(spec(params), banned_ids=frozenset(order))
        assert Sampler().sample(logits, [all_banned]) == [None]


def test_presence_and_frequency_look_at_the_output_and_repetition_at_the_prompt_too() -> None:
    logits = torch.full((1, VOCAB_SIZE), -50.0)
    logits[0, [2, 6, 9]] = torch.tensor([5.0, 4.0, 3.0])  # 2: prompt only; 6: twice in output

    def greedy(params: SamplingParams) -> int:
        [token] = Sampler().sample(logits, [spec(replace(params, temperature=0.0))])
        assert token is not None
        return token.token_id

    assert greedy(SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)) == 2
    assert greedy(SamplingParams(repetition_penalty=1.4)) == 2  # 5 / 1.4 > 3
    assert greedy(SamplingParams(repetition_penalty=2.0)) == 9  # 5 / 2 and 4 / 2 < 3
    assert greedy(SamplingParams(repetition_penalty=0.5, presence_penalty=-3.0)) == 6  # 8+3 > 10


def test_a_prompts_distinct_ids_are_cached_by_identity_within_a_bound() -> None:
    sampler = Sampler(num_cached_prompts=2)
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    logits = torch.zeros(1, VOCAB_SIZE)
    for i in range(10):
        logits[0] = 0.0
        logits[0, i] = 1.0
        logits[0, i + 1] = 0.9
        seen = replace(spec(params), prompt_tokens=tuple([i] * 3), output_tokens=())
        for _ in range(2):
            assert sampler.sample(logits, [seen]) == [SampledToken(i + 1)]
    assert len(sampler._prompt_ids) == 2


@pytest.mark.parametrize("temperature", [1e-45, 1e-9, 1e-6, 1.0, 100.0, 1e30])
@pytest.mark.parametrize("spread", [0.0, 1e-30, 1.0, 1e4, 1e37])
def test_i07_extreme_values_neither_crash_nor_give_nan(temperature: float, spread: float) -> None:
    logits = random_logits(1).clamp(-4, 4) * spread
    for params in (
        SamplingParams(),
        SamplingParams(top_p=1e-30),
        SamplingParams(top_p=1.0 - 1e-12),
        SamplingParams(top_k=1),
        SamplingParams(top_k=VOCAB_SIZE - 1, top_p=0.999, min_p=1.0),
        SamplingParams(logit_bias=((3, -100.0), (4, 100.0)), min_p=1e-30),
        SamplingParams(repetition_penalty=1e-3, frequency_penalty=2.0, presence_penalty=-2.0),
    ):
        extreme = spec(replace(params, temperature=temperature, num_logprobs=1))
        [token] = Sampler().sample(logits, [extreme])
        assert token is not None
        assert 0 <= token.token_id < VOCAB_SIZE
        assert token.logprob is not None
        assert token.logprob <= 1e-6
        assert all(t.logprob <= 1e-6 for t in token.top)


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(20)
    specs = [spec(SamplingParams(temperature=1e-6, seed=s)) for s in range(20)]
    tokens = Sampler().sample(logits, specs)
    assert [token and token.token_id for token in tokens] == first_argmax(logits)
