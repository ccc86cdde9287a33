"""Scheduler under aborts, failed steps, wrong results and random load."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from worker_scripted_engine import (
    VOCAB,
    Driver,
    expected_ids,
    make_request,
    make_scheduler,
)

from headwater.core.errors import EngineFault, InvalidChange
from headwater.core.request import FinishReason, RequestId, SampledToken
from headwater.core.step import RowResult, StepResult

TOKENS = list(range(10))


def test_e06_an_abort_frees_everything_in_any_state() -> None:
    driver = Driver(make_scheduler(max_running_sequences=2, max_mixed_prefill_tokens=4))
    driver.submit(make_request("decoding", TOKENS, 50))
    driver.step()
    driver.submit(make_request("prefilling", range(20, 40), 50), make_request("waiting", TOKENS))
    driver.step()
    load = driver.scheduler.load()
    assert (load.num_decoding, load.num_prefilling, load.num_waiting) == (1, 1, 1)
    for name in ("decoding", "prefilling", "waiting"):
        driver.abort(name)
        driver.scheduler.audit()
        assert driver.reason(name) is FinishReason.ABORTED
    assert not driver.scheduler.has_work
    assert driver.scheduler.load().num_held_blocks == 0
    assert driver.scheduler.plan() is None


def test_e06_an_abort_during_a_step_ends_with_that_step_and_keeps_its_token_back() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", TOKENS, 50), make_request("b", TOKENS, 3))
    driver.step()
    plan = driver.scheduler.plan()
    assert plan is not None
    assert driver.scheduler.abort(RequestId("a")) == []
    assert driver.scheduler.abort(RequestId("a")) == []
    driver.collect(driver.scheduler.apply(plan, driver.engine.run(plan)))
    driver.scheduler.audit()
    assert driver.reason("a") is FinishReason.ABORTED
    assert len(driver.ids["a", 0]) == 1
    driver.run()
    assert driver.ids["b", 0] == expected_ids(TOKENS, 3)


def test_one_choice_can_end_while_the_others_go_on() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", TOKENS, 10, n=3))
    for _ in range(3):
        driver.step()
    driver.abort("a", 1)
    driver.run()
    assert driver.reason("a", 1) is FinishReason.ABORTED
    for index in (0, 2):
        assert driver.ids["a", index] == expected_ids(TOKENS, 10)


def test_aborting_what_is_not_there_gives_nothing() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", TOKENS, 1, n=2))
    assert driver.scheduler.abort(RequestId("b")) == []
    assert driver.scheduler.abort(RequestId("a"), 7) == []
    driver.run()
    assert driver.scheduler.abort(RequestId("a")) == []


def test_a_failed_step_ends_its_sequences_and_the_others_go_on() -> None:
    driver = Driver(make_scheduler(max_running_sequences=2))
    driver.submit(make_request("a", TOKENS, 5), make_request("b", range(20, 30), 5))
    driver.submit(make_request("c", TOKENS, 5))
    driver.step()
    driver.engine.fail_next = True
    driver.step()
    for name in ("a", "b"):
        assert driver.reason(name) is FinishReason.FAILED
        assert driver.finishes[name, 0].error == "the device is on fire"
    driver.run()
    # What was published before the failure is sound and still hit.
    assert driver.prompts["c", 0].num_hit_tokens == 8
    assert driver.ids["c", 0] == expected_ids(TOKENS, 5)


def test_blocks_of_a_failed_step_are_never_hit() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", TOKENS, 5, n=2))
    driver.engine.fail_next = True
    driver.step()
    assert driver.reason("a", 0) is FinishReason.FAILED
    assert driver.scheduler.load().num_cached_blocks == 0
    driver.run()  # the sibling computes the prompt itself
    assert driver.ids["a", 1] == expected_ids(TOKENS, 5)


def test_an_abort_during_a_step_that_fails_is_an_abort() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", TOKENS, 5))
    plan = driver.scheduler.plan()
    assert plan is not None
    driver.scheduler.abort(RequestId("a"))
    driver.collect(driver.scheduler.fail(plan, EngineFault("lost")))
    assert driver.reason("a") is FinishReason.ABORTED
    driver.run()


def test_a_result_that_does_not_answer_the_plan_changes_nothing_and_can_be_failed() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", TOKENS, 5), make_request("b", range(20, 30), 5))
    plan = driver.scheduler.plan()
    assert plan is not None
    rows = driver.engine.run(plan).rows
    wrong = [
        rows[:1],
        rows[::-1],
        (rows[0], replace(rows[1], token=None)),
        (rows[0], replace(rows[1], prompt_logprobs=(SampledToken(1),))),
    ]
    for wrong_rows in wrong:
        with pytest.raises(EngineFault):
            driver.scheduler.apply(plan, StepResult(tuple(wrong_rows)))
    driver.collect(driver.scheduler.fail(plan, EngineFault("wrong rows")))
    assert set(driver.finishes) == {("a", 0), ("b", 0)}
    driver.run()


def test_a_row_without_usable_logits_fails_alone_and_its_blocks_are_never_hit() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", TOKENS, 5), make_request("b", range(20, 30), 5))
    plan = driver.scheduler.plan()
    assert plan is not None
    rows = list(driver.engine.run(plan).rows)
    rows[0] = RowResult(rows[0].sequence_id, error="not a number")
    driver.collect(driver.scheduler.apply(plan, StepResult(tuple(rows))))
    assert driver.finishes["a", 0].error == "not a number"
    driver.submit(make_request("again", TOKENS, 1))
    driver.run()
    assert driver.prompts["again", 0].num_hit_tokens == 0
    assert driver.ids["b", 0] == expected_ids(range(20, 30), 5)


def test_steps_are_planned_and_applied_one_at_a_time() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", TOKENS, 5))
    plan = driver.scheduler.plan()
    assert plan is not None
    with pytest.raises(InvalidChange, match="neither applied nor failed"):
        driver.scheduler.plan()
    driver.scheduler.apply(plan, driver.engine.run(plan))
    with pytest.raises(InvalidChange, match="not the step that was planned last"):
        driver.scheduler.fail(plan, EngineFault("late"))


@pytest.mark.parametrize("num_blocks", [14, 60])
def test_1000_random_requests_with_aborts_leave_the_blocks_where_they_began(
    num_blocks: int,
) -> None:
    rng = random.Random(num_blocks)
    driver = Driver(make_scheduler(num_blocks=num_blocks, context_tokens=50))
    shared = [rng.randrange(VOCAB) for _ in range(30)]
    prompts: dict[str, list[int]] = {}
    limits: dict[str, int] = {}
    choices: dict[str, int] = {}
    for number in range(1000):
        name = f"r{number}"
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
        prompts[name] = shared[: rng.randrange(0, 31)] + tail
        limits[name] = rng.randrange(0, 13)
        choices[name] = rng.choice((1, 1, 1, 3))
        driver.submit(
            make_request(
                name,
                prompts[name],
                limits[name],
                n=choices[name],
                priority=rng.choice((0, 0, 1)),
                num_prompt_logprobs=rng.choice((None, None, 0)),
            )
        )
        if rng.random() < 0.2:
            victim = f"r{rng.randrange(max(0, number - 10), number + 1)}"
            driver.abort(victim, rng.choice((None, 0, 1)))
        if rng.random() < 0.02:
            driver.engine.fail_next = True
        for _ in range(rng.randrange(0, 8)):
            driver.step()
    driver.run()

    load = driver.scheduler.load()
    assert load.num_free_blocks + load.num_cached_blocks == num_blocks
    assert (load.num_waiting, load.num_prefilling, load.num_decoding) == (0, 0, 0)
    finished = 0
    for name, tokens in prompts.items():
        for index in range(choices[name]):
            ids = driver.ids[name, index]
            assert ids == expected_ids(tokens, len(ids))
            if driver.reason(name, index) is FinishReason.LENGTH:
                assert len(ids) == limits[name]
                finished += 1
    assert finished > 700
    reported = [(n, p) for (n, _), p in driver.prompts.items()]
    assert len({n for n, _ in reported}) == len(reported), "a prompt was reported twice"
    for name, report in reported:
        assert report.num_hit_tokens + report.num_miss_tokens == len(prompts[name])
    assert load.num_hit_tokens == sum(p.num_hit_tokens for _, p in reported)
    assert load.num_miss_tokens == sum(p.num_miss_tokens for _, p in reported)
    if num_blocks == 14:
        assert load.num_preemptions > 0
