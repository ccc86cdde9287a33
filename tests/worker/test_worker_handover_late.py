"""Prompts that change hands where late layers compute their last tokens only: split = single."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_fake_tiers import ManualClock
from worker_fleet import Fleet, Shape
from worker_late_engine import LateEngine
from worker_scripted_engine import VOCAB, Driver, make_request, make_scheduler

from headwater.core.errors import InvalidRequest
from headwater.core.fleet import HandoffEnd, HandoffRef, Holding, Phase
from headwater.core.request import FinishReason, Request
from headwater.worker.tiering import TierParts

WINDOW, REPLAY, ALIGNMENT = 5, 9, 2
REF = HandoffRef(handoff_id="h", peer_id="p", address="decode")
EARLY_OR_ALL = pytest.mark.parametrize("holds", list(Holding))


def make_fleet(
    rng: random.Random,
    holds: Holding,
    *,
    prefill: Shape | None = None,
    decode: Shape | None = None,
    has_tiers: bool = False,
) -> Fleet:
    return Fleet(
        rng, prefill=prefill, decode=decode, window_tokens=WINDOW, has_tiers=has_tiers,
        replay_tokens=REPLAY, alignment=ALIGNMENT, holds=holds,
    )  # fmt: skip


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


def alone(request: Request) -> dict[int, list[int]]:
    """The ids of one worker that does it all, with decoder replay, too."""
    engine = LateEngine(4, WINDOW, Holding.ALL)
    scheduler = make_scheduler(
        num_blocks=128,
        window_tokens=WINDOW,
        alignment=ALIGNMENT,
        decoder_replay_tokens=REPLAY,
        tier_parts=TierParts(memory=engine, clock=ManualClock()),
    )
    driver = Driver(scheduler, engine=engine)
    driver.submit(request)
    driver.run()
    return {index: ids for (_, index), ids in driver.ids.items()}


@EARLY_OR_ALL
@pytest.mark.parametrize("num_tokens", [1, 9, 12, 13, 14, 15, 16, 17, 25, 40, 41])
def test_the_prefill_side_computes_up_to_the_late_layers_and_decode_all_behind(
    num_tokens: int, holds: Holding
) -> None:
    fleet = make_fleet(random.Random(num_tokens), holds)
    request = make_request("a", prompt(1, num_tokens), 9)
    fleet.submit(request)
    fleet.run()
    call = fleet.calls["a"]
    assert call.num_attempts == 1
    assert call.tokens == alone(request)
    num_handed = max(num_tokens - REPLAY, 0) // ALIGNMENT * ALIGNMENT
    if num_handed < 4:  # a block
        num_handed = 0
    prefill, decode = fleet.prefill.engine, fleet.decode.engine
    assert isinstance(prefill, LateEngine)
    assert isinstance(decode, LateEngine)
    assert prefill.num_computed_tokens == num_handed
    assert prefill.num_late_tokens == 0
    assert decode.num_computed_tokens == num_tokens - num_handed + 8
    assert decode.num_late_tokens == min(num_tokens, REPLAY) + 8
    ends = [report.end for _, report in fleet.reports]
    assert ends == [HandoffEnd.DONE] * 2
    loads = [driver.scheduler.load() for driver in (fleet.prefill, fleet.decode)]
    assert sum(load.num_hit_tokens for load in loads) == 0
    assert sum(load.num_miss_tokens for load in loads) == num_tokens
    assert call.prompt is not None
    assert (call.prompt.num_hit_tokens, call.prompt.num_miss_tokens) == (0, num_tokens)


def test_what_is_handed_over_is_whole_blocks_and_the_window_of_the_place_where_decode_begins() -> (
    None
):
    fleet = make_fleet(random.Random(0), Holding.EARLY)
    fleet.submit(make_request("a", prompt(1, 41), 2))
    fleet.run()
    (_, report), *_ = fleet.reports
    assert report.num_tokens == 32
    # 8 rows of global KV, and those that hold [32 - 5 + 1, 32) of window KV.
    assert report.num_bytes == (8 + 1) * 16 * 4


def test_decode_begins_where_its_late_layers_do_although_it_holds_more() -> None:
    fleet = make_fleet(random.Random(3), Holding.EARLY)
    request = make_request("a", prompt(1, 40), 6)
    fleet.submit(request)
    fleet.run()
    fleet.start_prefill()
    decode = fleet.decode.engine
    assert isinstance(decode, LateEngine)
    before = decode.num_computed_tokens
    again = make_request("b", prompt(1, 40), 6)
    fleet.submit(again)
    fleet.run()
    assert fleet.calls["b"].tokens == alone(again) == fleet.calls["a"].tokens
    assert decode.num_computed_tokens - before == REPLAY + 5


@EARLY_OR_ALL
def test_the_next_turn_of_a_conversation_is_the_one_of_a_single_worker(holds: Holding) -> None:
    fleet = make_fleet(random.Random(3), holds, has_tiers=True)
    tokens = prompt(1, 30)
    fleet.submit(make_request("a", tokens, 6, keep_s=1000.0))
    fleet.run()
    longer = tokens + fleet.calls["a"].tokens[0] + prompt(2, 9)
    request = make_request("b", longer, 6, keep_s=1000.0)
    fleet.submit(request)
    fleet.run()
    assert fleet.calls["b"].tokens == alone(request)


def test_a_prompt_whose_every_token_is_scored_is_not_handed_over() -> None:
    fleet = make_fleet(random.Random(0), Holding.EARLY)
    request = make_request("a", prompt(1, 40), 5, num_prompt_logprobs=0)
    fleet.submit(request)
    fleet.run()
    assert fleet.calls["a"].tokens == alone(request)
    assert fleet.prefill.engine.num_computed_tokens == 0


@pytest.mark.parametrize("phase", [Phase.WHOLE, Phase.DECODE])
def test_a_worker_with_the_early_part_alone_refuses_everything_but_prompts_for_others(
    phase: Phase,
) -> None:
    fleet = make_fleet(random.Random(0), Holding.EARLY)
    scheduler = fleet.prefill.scheduler
    handoff = None if phase is Phase.WHOLE else REF
    with pytest.raises(InvalidRequest, match=f"only the early part.*the phase {phase}"):
        scheduler.submit(make_request("a", prompt(1, 40), 5), phase=phase, handoff=handoff)
    scheduler.audit()
    assert not scheduler.has_work


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 10**9))
def test_split_is_single_with_aborts_preemptions_faults_and_kills(seed: int) -> None:
    rng = random.Random(seed)
    fleet = make_fleet(
        rng,
        rng.choice(list(Holding)),
        prefill=Shape(
            num_blocks=rng.choice((24, 64)),
            max_step_tokens=rng.choice((8, 20, 64)),
            reserve_blocks_per_sequence=rng.choice((0, 1)),
        ),
        decode=Shape(
            num_blocks=rng.choice((24, 30, 64)),
            max_mixed_prefill_tokens=rng.choice((3, 16)),
            reserve_blocks_per_sequence=rng.choice((0, 1)),
        ),
        has_tiers=rng.random() < 0.4,
    )
    may_kill, may_fail = rng.random() < 0.5, rng.random() < 0.3
    conversations: list[list[int]] = [prompt(seed, 9)]
    aborted: set[str] = set()
    for number in range(14):
        old = rng.choice(conversations)
        fresh = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 25))]
        tokens = (old[: rng.randrange(len(old))] + fresh)[:50]
        conversations.append(tokens)
        request = make_request(
            f"r{number}",
            tokens,
            rng.randrange(1, 20),
            n=rng.choice((1, 1, 1, 2)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1000),
            priority=rng.choice((0, 0, 1)),
            num_prompt_logprobs=rng.choice((None, None, None, None, 0)),
            presence_penalty=rng.choice((0.0, 0.5)),
            keep_s=rng.choice((0.0, 1000.0)),
        )
        fleet.submit(request)
        for _ in range(rng.randrange(0, 40)):
            fleet.turn()
            if may_kill and rng.random() < 0.01:
                rng.choice((fleet.kill_prefill, fleet.kill_decode, fleet.cut))()
            if may_fail and rng.random() < 0.01:
                fleet.prefill.engine.fail_next = True
        if rng.random() < 0.2:
            name = f"r{rng.randrange(number + 1)}"
            aborted.add(name)
            fleet.abort(name)
    fleet.run()
    for name, call in fleet.calls.items():
        expected = alone(call.request)
        for index, ids in call.tokens.items():
            assert ids == expected[index][: len(ids)], "not the ids of one worker"
            if call.finishes[index] is not FinishReason.ABORTED:
                assert call.finishes[index] is FinishReason.LENGTH
                assert len(ids) == call.request.stop.max_output_tokens
            else:
                assert name in aborted
        if name not in aborted:
            assert call.prompt is not None
            told = call.prompt.num_hit_tokens + call.prompt.num_miss_tokens
            assert told == call.request.num_prompt_tokens
