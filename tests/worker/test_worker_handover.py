"""Prompts that change hands between two workers: split = single, whatever happens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_fleet import Fleet, Shape
from worker_scripted_engine import VOCAB, Driver, make_request, make_scheduler

from headwater.core.errors import InvalidRequest
from headwater.core.fleet import HandoffEnd, HandoffRef, HandoffReport, Phase, Resume
from headwater.core.request import FinishReason, Request

run_settings = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
REF = HandoffRef(handoff_id="h", peer_id="p", address="a")


def prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=num_tokens)


def alone(request: Request) -> dict[int, list[int]]:
    """The ids of one worker that does it all."""
    driver = Driver(make_scheduler(num_blocks=128))
    driver.submit(request)
    driver.run()
    return {index: ids for (_, index), ids in driver.ids.items()}


def ends(fleet: Fleet, name: str) -> list[HandoffEnd]:
    return [report.end for who, report in fleet.reports if who == name]


@pytest.mark.parametrize("window_tokens", [None, 6])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6, 16, 17, 18, 40])
def test_a_prompt_is_computed_by_one_and_goes_on_at_the_other(
    num_tokens: int, window_tokens: int | None
) -> None:
    fleet = Fleet(random.Random(num_tokens), window_tokens=window_tokens)
    request = make_request("a", prompt(1, num_tokens), 9)
    fleet.submit(request)
    fleet.run()
    call = fleet.calls["a"]
    assert call.num_attempts == 1
    assert call.tokens == alone(request)
    assert call.finishes == {0: FinishReason.LENGTH}
    assert ends(fleet, "prefill") == ends(fleet, "decode") == [HandoffEnd.DONE]
    # The last token's logits choose the first output token, and that is all that decode did.
    is_handed = num_tokens > 4
    num_decoded = 1 + 8 if is_handed else num_tokens + 8
    assert fleet.decode.engine.num_computed_tokens == num_decoded
    assert fleet.prefill.engine.num_computed_tokens == (num_tokens - 1 if is_handed else 0)
    loads = [driver.scheduler.load() for driver in (fleet.prefill, fleet.decode)]
    assert sum(load.num_hit_tokens for load in loads) == 0
    assert sum(load.num_miss_tokens for load in loads) == num_tokens
    assert call.prompt is not None
    assert (call.prompt.num_hit_tokens, call.prompt.num_miss_tokens) == (0, num_tokens)


def test_rows_are_taken_while_later_ones_are_computed() -> None:
    fleet = Fleet(random.Random(0), prefill=Shape(max_step_tokens=8))
    fleet.submit(make_request("a", prompt(1, 120), 2))
    while not fleet.decode.engine.slots:
        fleet.turn()
    assert fleet.prefill.engine.num_computed_tokens < 60
    fleet.run()


def test_the_report_tells_what_was_a_hit_where_it_was_computed() -> None:
    fleet = Fleet(random.Random(0))
    first = prompt(1, 20)
    fleet.submit(make_request("a", first, 1))
    fleet.run()
    fleet.start_decode()  # so that the next prompt is no hit there
    fleet.submit(make_request("b", first + prompt(2, 10), 3))
    fleet.run()
    told = fleet.calls["b"].prompt
    assert told is not None
    assert (told.num_hit_tokens, told.num_miss_tokens) == (19, 11)
    assert told.cache is not None
    assert told.cache.num_device_tokens == 19


def test_what_decode_holds_is_not_sent_and_a_whole_hit_ends_the_prefill() -> None:
    fleet = Fleet(random.Random(0), prefill=Shape(max_step_tokens=8))
    tokens = prompt(1, 121)
    fleet.submit(make_request("a", tokens, 2))
    fleet.run()
    fleet.start_prefill()
    fleet.submit(make_request("b", tokens[:108] + prompt(2, 13), 2))
    fleet.run()
    num_bytes = [report.num_bytes for _, report in fleet.reports[-2:]]
    assert num_bytes == [3 * 16 * 4] * 2  # the last three rows
    fleet.start_prefill()
    fleet.submit(make_request("c", tokens, 2))
    fleet.run()
    assert {report.num_bytes for _, report in fleet.reports[-2:]} == {0}
    assert fleet.prefill.engine.num_computed_tokens < 60
    told = fleet.calls["c"].prompt
    assert told is not None
    assert told.num_hit_tokens == 120


def test_what_the_tiers_keep_of_a_prompt_does_not_stand_in_for_what_its_peer_sends() -> None:
    fleet = Fleet(random.Random(0), has_tiers=True)
    tokens = prompt(1, 40)
    fleet.submit(make_request("a", tokens, 2, keep_s=1000.0))
    fleet.run()
    fleet.start_decode()
    request = make_request("b", tokens[:21] + prompt(2, 10), 4, keep_s=1000.0)
    fleet.submit(request)
    fleet.run()
    assert fleet.calls["b"].num_attempts == 1
    assert fleet.calls["b"].tokens == alone(request)


def test_the_next_turn_of_a_conversation_hits_what_was_handed_over() -> None:
    fleet = Fleet(random.Random(3), window_tokens=6)
    tokens = prompt(1, 30)
    fleet.submit(make_request("a", tokens, 6))
    fleet.run()
    longer = tokens + fleet.calls["a"].tokens[0] + prompt(2, 9)
    request = make_request("b", longer, 6)
    fleet.submit(request)
    fleet.run()
    assert fleet.calls["b"].tokens == alone(request)


@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_ends_both_sides(n: int) -> None:
    fleet = Fleet(random.Random(5), prefill=Shape(max_step_tokens=8))
    for turns in range(0, 60, 3):
        name = f"r{turns}"
        fleet.submit(make_request(name, prompt(turns, 40), 20, n=n))
        for _ in range(turns):
            fleet.turn()
        fleet.abort(name)
        fleet.run()
        reasons = set(fleet.calls[name].finishes.values())
        assert reasons <= {FinishReason.ABORTED, FinishReason.LENGTH}


def test_an_abort_of_the_leader_leaves_the_prompt_to_the_next_choice() -> None:
    fleet = Fleet(random.Random(5), prefill=Shape(max_step_tokens=8))
    request = make_request("a", prompt(1, 40), 5, n=3, temperature=1.0)
    fleet.submit(request)
    while not fleet.decode.engine.slots:
        fleet.turn()
    fleet.abort("a", 0)
    fleet.run()
    call = fleet.calls["a"]
    assert {index: call.tokens[index] for index in (1, 2)} == {
        index: alone(request)[index] for index in (1, 2)
    }
    assert fleet.decode.engine.num_computed_tokens < 40  # the prompt still came from elsewhere


def test_d08_a_failed_prefill_is_told_at_once_and_nothing_is_computed_in_its_place() -> None:
    fleet = Fleet(random.Random(5))
    fleet.prefill.engine.fail_next = True
    request = make_request("a", prompt(1, 40), 5)
    fleet.submit(request)
    fleet.run()
    call = fleet.calls["a"]
    assert call.num_attempts == 2
    assert call.tokens == alone(request)
    assert fleet.clock.now_s() < 0.2  # no lease was waited for
    failed = [report for _, report in fleet.reports if report.end is HandoffEnd.FAILED]
    assert failed
    assert "on fire" in failed[0].reason


def test_a_decode_sequence_whose_handoff_failed_holds_nothing_until_the_routers_word() -> None:
    fleet = Fleet(random.Random(5))
    request = make_request("a", prompt(1, 40), 5, n=2)
    scheduler = fleet.decode.scheduler
    scheduler.submit(request, phase=Phase.DECODE, handoff=REF)
    for _ in range(2):
        fleet.decode.step()
    assert scheduler.load().num_held_blocks == 10
    reports: list[HandoffReport] = []
    while not reports:
        fleet.clock.time_s += 0.1
        fleet.taker.core.tick(fleet.clock.now_s())
        fleet.decode.step()
        reports += scheduler.take_handoffs()
    assert reports[0].end is HandoffEnd.FAILED
    assert scheduler.load().num_held_blocks == 0
    assert not fleet.decode.finishes
    assert not fleet.decode.is_busy
    fleet.decode.abort("a")
    assert {last.finish for last in fleet.decode.finishes.values()} == {FinishReason.ABORTED}
    scheduler.audit()


def test_d04_a_prompt_that_is_too_long_is_refused_by_both_sides() -> None:
    fleet = Fleet(random.Random(0))
    request = make_request("a", prompt(1, 300), 5)
    for driver, phase in ((fleet.prefill, Phase.PREFILL), (fleet.decode, Phase.DECODE)):
        with pytest.raises(InvalidRequest, match="too long"):
            driver.scheduler.submit(request, phase=phase, handoff=REF)
        driver.scheduler.audit()
        assert not driver.is_busy


def test_a_worker_without_a_sender_or_receiver_refuses_its_phase() -> None:
    scheduler = make_scheduler()
    request = make_request("a", prompt(1, 30), 5)
    with pytest.raises(InvalidRequest, match="hands no prompts over"):
        scheduler.submit(request, phase=Phase.PREFILL, handoff=REF)
    with pytest.raises(InvalidRequest, match="takes no prompts over"):
        scheduler.submit(request, phase=Phase.DECODE, handoff=REF)
    scheduler.audit()
    assert not scheduler.has_work


@run_settings
@given(seed=st.integers(0, 10**9))
def test_split_is_single_with_aborts_preemptions_faults_and_kills(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(
        rng,
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
        window_tokens=rng.choice((None, None, 3, 7)),
        has_tiers=rng.random() < 0.4,
    )
    may_kill, may_fail = rng.random() < 0.4, rng.random() < 0.3
    does_both = rng.random() < 0.5
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
        if does_both and rng.random() < 0.5:
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
            fleet.submit_whole(make_request(f"whole{number}", tokens, rng.randrange(20, 60)))
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
    for name, request in fleet.wholes.items():
        last = fleet.prefill.finishes[name, 0]
        if last.finish is not FinishReason.FAILED:
            assert fleet.prefill.ids[name, 0] == alone(request)[0]


# Going on after a worker was lost


@pytest.mark.parametrize("num_committed", [0, 1, 4, 7])
@pytest.mark.parametrize("phase", [Phase.WHOLE, Phase.DECODE])
def test_a_resumed_choice_goes_on_exactly_where_it_was(num_committed: int, phase: Phase) -> None:
    request = make_request(
        "a", prompt(1, 22), 9, n=2, temperature=1.0, seed=7, repetition_penalty=1.2
    )
    expected = alone(request)
    resume = [Resume(index=1, tokens=tuple(expected[1][:num_committed]))]
    fleet = Fleet(random.Random(0))
    if phase is Phase.WHOLE:
        fleet.decode.scheduler.submit(request, resume=resume)
    else:
        ref = replace(REF, address="decode")
        fleet.decode.scheduler.submit(request, phase=phase, handoff=ref, resume=resume)
        fleet.prefill.scheduler.submit(request, phase=Phase.PREFILL, handoff=ref)
    while fleet.turn():
        pass
    assert fleet.decode.reason("a", 1) is FinishReason.LENGTH
    assert fleet.decode.ids == {("a", 1): expected[1][num_committed:]}
    # Its prompt was reported with the first token that was told.
    assert (("a", 1) in fleet.decode.prompts) == (num_committed == 0)


def test_a_resumed_choice_stops_where_it_would_have() -> None:
    request = make_request("a", prompt(1, 22), 9)
    ids = alone(request)[0]
    end = next(i for i in range(3, 9) if ids[i] not in ids[:i])
    stopping = make_request(
        "a", prompt(1, 22), 9, end_token_ids=frozenset({ids[end]}), min_output_tokens=2
    )
    driver = Driver(make_scheduler())
    driver.scheduler.submit(stopping, resume=[Resume(index=0, tokens=tuple(ids[:2]))])
    driver.run()
    assert driver.reason("a") is FinishReason.STOP
    assert driver.ids["a", 0] == ids[2:end]


@pytest.mark.parametrize(
    "resume",
    [
        [Resume(index=2, tokens=(1,))],
        [Resume(index=0, tokens=(1,)), Resume(index=0, tokens=(1, 2))],
        [Resume(index=0, tokens=(1,) * 9)],
    ],
)
def test_a_resumption_of_what_cannot_go_on_is_refused(resume: list[Resume]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequest):
        scheduler.submit(make_request("a", prompt(1, 22), 9, n=2), resume=resume)
    scheduler.audit()
    assert not scheduler.has_work


# What the router is told of the cache


def test_kv_events_add_up_to_what_can_be_hit() -> None:
    rng = random.Random(2)
    driver = Driver(make_scheduler(num_blocks=20))
    scheduler = driver.scheduler
    first = scheduler.take_kv_events()
    assert first is not None
    assert first.reset
    known: set[bytes] = set(first.added)
    for number in range(40):
        driver.submit(make_request(f"r{number}", prompt(rng.randrange(12), 20), 6))
        for _ in range(rng.randrange(8)):
            driver.step()
        events = scheduler.take_kv_events()
        if events is not None:
            assert not events.reset
            assert not known & set(events.added)
            assert known >= set(events.removed)
            known = (known | set(events.added)) - set(events.removed)
        assert scheduler.take_kv_events() is None
    driver.run()
    events = scheduler.take_kv_events()
    if events is not None:
        known = (known | set(events.added)) - set(events.removed)
    kv = scheduler._kv
    full = {entry.key for entry in kv._index if len(entry.tokens) == 4}
    assert known == full
    assert known
