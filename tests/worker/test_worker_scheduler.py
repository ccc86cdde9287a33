"""Scheduler over a scripted engine: what comes out is right, whatever happens around it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from worker_scripted_engine import (
    VOCAB,
    Driver,
    digest,
    expected_ids,
    make_request,
    make_scheduler,
    score,
)

from headwater.core.errors import ConfigError, InvalidRequest, PromptTooLong
from headwater.core.randomness import derived_seed
from headwater.core.request import FinishReason
from headwater.core.step import StepRow
from headwater.worker.limits import SchedulerConfig


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def test_a_greedy_run_gives_the_models_ids_and_hit_plus_miss_is_the_prompt() -> None:
    driver = Driver(make_scheduler())
    tokens = prompt(1, 21)
    driver.submit(make_request("a", tokens))
    driver.run()
    driver.submit(make_request("b", tokens))
    driver.run()
    for name, num_hits in (("a", 0), ("b", 20)):
        assert driver.ids[name, 0] == expected_ids(tokens, 8)
        assert driver.reason(name) is FinishReason.LENGTH
        report = driver.prompts[name, 0]
        assert (report.num_hit_tokens, report.num_miss_tokens) == (num_hits, 21 - num_hits)
    load = driver.scheduler.load()
    assert (load.num_hit_tokens, load.num_miss_tokens) == (20, 22)
    assert load.num_output_tokens == 16
    assert load.num_recomputed_tokens == 0


@pytest.mark.parametrize("chunk_tokens", range(1, 26))
def test_ids_are_equal_whatever_the_chunk_size(chunk_tokens: int) -> None:
    driver = Driver(make_scheduler(max_step_tokens=chunk_tokens, max_running_sequences=1))
    tokens = prompt(2, 23)
    driver.submit(make_request("a", tokens))
    driver.run()
    assert driver.ids["a", 0] == expected_ids(tokens, 8)
    assert max(plan.num_tokens for plan in driver.plans) <= chunk_tokens
    assert len(driver.plans) == -(-23 // chunk_tokens) + 7


@pytest.mark.parametrize("mixed_tokens", [1, 3, 16])
def test_ids_are_equal_alone_and_among_others(mixed_tokens: int) -> None:
    driver = Driver(make_scheduler(max_mixed_prefill_tokens=mixed_tokens))
    prompts = {f"r{i}": prompt(i % 5, 5 + 3 * i) for i in range(15)}
    for name, tokens in prompts.items():
        driver.submit(make_request(name, tokens, 10))
        driver.step()
    driver.run()
    for name, tokens in prompts.items():
        assert driver.ids[name, 0] == expected_ids(tokens, 10)


def test_decode_rows_go_first_and_prefill_shares_the_step_within_its_limits() -> None:
    driver = Driver(make_scheduler(max_step_tokens=64, max_mixed_prefill_tokens=16))
    driver.submit(make_request("a", prompt(1, 8), 20))
    driver.step()
    driver.submit(make_request("b", prompt(2, 50), 20))
    for _ in range(4):
        driver.step()
    mixed = driver.plans[1:]
    assert [len(plan.rows[0].tokens) for plan in mixed] == [1, 1, 1, 1]
    assert [len(plan.rows[1].tokens) for plan in mixed] == [16, 16, 16, 2]
    # E01: the running answer got a token in every one of these steps.
    assert len(driver.ids["a", 0]) == 5
    driver.run()


def test_full_blocks_are_shared_as_soon_as_a_chunk_or_a_decoded_block_is_applied() -> None:
    driver = Driver(make_scheduler(max_step_tokens=8, max_running_sequences=2))
    tokens = prompt(3, 20)
    driver.submit(make_request("a", tokens, 30))
    driver.step()  # [0, 8) is computed
    driver.submit(make_request("b", tokens[:9], 1, priority=-1))
    driver.step()
    assert driver.prompts["b", 0].num_hit_tokens == 8
    while len(driver.ids.get(("a", 0), [])) < 10:
        driver.step()
    longer = tokens + driver.ids["a", 0]
    driver.submit(make_request("c", longer, 1))
    driver.step()
    assert driver.prompts["c", 0].num_hit_tokens == 28  # of 29 with KV, still running
    driver.run()
    assert driver.ids["a", 0] == expected_ids(tokens, 30)


def test_e03_a_small_pool_preempts_but_finishes_everything_with_the_same_ids() -> None:
    # Four requests that each grow to 44 of 64 tokens: at most one can finish at a time.
    driver = Driver(make_scheduler(num_blocks=16, reserve_blocks_per_sequence=0))
    prompts = {f"r{i}": prompt(i, 4) for i in range(4)}
    for name, tokens in prompts.items():
        driver.submit(make_request(name, tokens, 41))
    while not driver.scheduler.load().num_preemptions:
        driver.step()
    driver.submit(make_request("new", prompt(9, 4), 4))
    while ("new", 0) not in driver.ids:
        driver.step()
    assert driver.scheduler.load().num_waiting == 0, "new work overtook a preempted one"
    driver.run(max_steps=400)
    for name, tokens in prompts.items():
        assert driver.ids[name, 0] == expected_ids(tokens, 41)
    load = driver.scheduler.load()
    assert load.num_recomputed_tokens > 0
    # Recompute stays small beside the work: no thrash.
    assert load.num_recomputed_tokens < load.num_output_tokens
    computed = driver.engine.num_computed_tokens
    unique = sum(len(t) + 40 for t in prompts.values()) + 4 + 3
    assert computed == unique + load.num_recomputed_tokens
    assert next(iter(driver.finishes)) == ("r0", 0), "the oldest finishes first"


def test_e03_what_can_never_fit_is_refused_at_the_door() -> None:
    scheduler = make_scheduler(num_blocks=4, block_tokens=4, context_tokens=100)
    with pytest.raises(PromptTooLong):
        scheduler.submit(make_request("a", prompt(0, 17), 1))
    with pytest.raises(InvalidRequest, match="at most 7 output tokens") as error:
        scheduler.submit(make_request("a", prompt(0, 10), 8))
    assert error.value.code == "kv_capacity_exceeded"
    assert not scheduler.has_work
    driver = Driver(scheduler)
    driver.submit(make_request("a", prompt(0, 10), 7))
    driver.submit(make_request("b", prompt(1, 16), 1))
    driver.run()
    assert len(driver.ids["a", 0]) == 7
    assert len(driver.ids["b", 0]) == 1


def test_context_is_a_hard_limit() -> None:
    driver = Driver(make_scheduler(context_tokens=20))
    with pytest.raises(PromptTooLong, match="20 tokens > 19 maximum"):
        driver.submit(make_request("a", prompt(0, 20), 1))
    driver.submit(make_request("b", prompt(0, 15), 1000))
    driver.submit(make_request("c", prompt(0, 20), 0))
    driver.run()
    assert len(driver.ids["b", 0]) == 5
    assert driver.reason("b") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", []), "empty"),
        (make_request("a", [1], n=0), "n must be"),
        (make_request("a", [1], -1), "max tokens"),
        (make_request("used", [1]), "in use"),
    ],
)
def test_a_request_without_meaning_is_refused(request_: object, message: str) -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("used", [1]))
    with pytest.raises(InvalidRequest, match=message):
        scheduler.submit(request_)  # type: ignore[arg-type]


def test_a_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_running_sequences must be >= 1, got 0"):
        SchedulerConfig(context_tokens=1, max_running_sequences=0)
    with pytest.raises(ConfigError, match=r"max_step_tokens \(8\) must be >="):
        SchedulerConfig(context_tokens=1, max_step_tokens=8)
    with pytest.raises(ConfigError, match="reserve_blocks_per_sequence"):
        SchedulerConfig(context_tokens=1, reserve_blocks_per_sequence=-1)


def test_more_important_requests_start_first_and_running_ones_are_limited() -> None:
    driver = Driver(make_scheduler(max_running_sequences=2))
    for i in range(4):
        driver.submit(make_request(f"late{i}", prompt(i, 4), 6, priority=1))
    driver.submit(make_request("soon", prompt(8, 4), 6))
    driver.step()
    assert set(driver.ids) == {("soon", 0), ("late0", 0)}
    driver.run()
    assert [name for name, _ in driver.finishes] == ["soon", "late0", "late1", "late2", "late3"]
    assert max(len(plan.rows) for plan in driver.plans) == 2


def test_four_choices_compute_the_prompt_once_and_differ_by_seed() -> None:
    driver = Driver(make_scheduler())
    tokens = prompt(5, 22)
    driver.submit(make_request("a", tokens, 6, temperature=1.0, seed=11, n=4))
    driver.run()
    assert len({tuple(driver.ids["a", i]) for i in range(4)}) == 4
    for index in range(4):
        alone = Driver(make_scheduler())
        seed = derived_seed(11, index)
        alone.submit(make_request("x", tokens, 6, temperature=1.0, seed=seed))
        alone.run()
        assert alone.ids["x", 0] == driver.ids["a", index]
    # 22 once, then only the 2 tokens behind the full blocks for each sibling.
    assert driver.engine.num_computed_tokens == 22 + 3 * 2 + 4 * 5
    assert list(driver.prompts) == [("a", 0)]
    load = driver.scheduler.load()
    assert load.num_hit_tokens + load.num_miss_tokens == 22


def test_choices_with_the_same_greedy_ids_share_only_whole_blocks() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", prompt(5, 16), 12, n=3))
    driver.run()
    for index in range(3):
        assert driver.ids["a", index] == expected_ids(prompt(5, 16), 12)


def test_siblings_go_on_when_the_first_choice_ends_before_the_prompt_is_computed() -> None:
    driver = Driver(make_scheduler(max_step_tokens=8))
    tokens = prompt(5, 20)
    driver.submit(make_request("a", tokens, 4, n=3))
    driver.abort("a", 0)  # not even started: the next one reports the prompt
    driver.step()
    driver.abort("a", 1)  # halfway: its last output carries the report
    driver.run()
    assert [driver.reason("a", i) for i in range(3)] == [
        FinishReason.ABORTED,
        FinishReason.ABORTED,
        FinishReason.LENGTH,
    ]
    assert driver.ids["a", 2] == expected_ids(tokens, 4)
    assert list(driver.prompts) == [("a", 1)]
    load = driver.scheduler.load()
    assert load.num_hit_tokens + load.num_miss_tokens == 20


def test_stop_and_end_ids_finish_without_becoming_output() -> None:
    tokens = prompt(1, 6)
    ids = expected_ids(tokens, 8)
    third = ids[2]
    assert third not in ids[:2]
    for kind in ("stop_token_ids", "end_token_ids"):
        driver = Driver(make_scheduler())
        driver.submit(make_request("a", tokens, 8, **{kind: frozenset({third})}))  # type: ignore[arg-type]
        driver.run()
        assert driver.ids["a", 0] == ids[:2]
        assert driver.reason("a") is FinishReason.STOP
        assert driver.finishes["a", 0].stop_token_id == third
        assert driver.scheduler.load().num_output_tokens == 2


def test_ignore_end_makes_the_end_id_an_ordinary_token() -> None:
    tokens = prompt(1, 6)
    ids = expected_ids(tokens, 8)
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", tokens, 8, end_token_ids=frozenset(ids[2:3]), ignore_end=True))
    driver.run()
    assert driver.ids["a", 0] == ids


def test_ending_ids_are_banned_until_the_minimum_is_out() -> None:
    driver = Driver(make_scheduler())
    every_other = frozenset(range(0, VOCAB, 2))
    driver.submit(
        make_request("a", prompt(1, 6), 50, min_output_tokens=5, end_token_ids=every_other)
    )
    driver.run()
    ids = driver.ids["a", 0]
    assert len(ids) >= 5
    assert not every_other & set(ids)
    assert driver.reason("a") is FinishReason.STOP


def test_zero_output_tokens_computes_the_prompt_and_samples_nothing() -> None:
    driver = Driver(make_scheduler(max_step_tokens=8))
    driver.submit(make_request("a", prompt(1, 20), 0, n=2))
    driver.run()
    assert all(row.sample is None for plan in driver.plans for row in plan.rows)
    for index in range(2):
        assert driver.ids["a", index] == []
        assert driver.reason("a", index) is FinishReason.LENGTH
    assert driver.prompts["a", 0].num_miss_tokens == 20


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("max_output_tokens", [0, 3])
def test_prompt_logprobs_cover_the_prompt_across_chunks_even_when_it_is_cached(
    chunk_tokens: int, max_output_tokens: int
) -> None:
    driver = Driver(make_scheduler(max_step_tokens=chunk_tokens, max_running_sequences=1))
    tokens = prompt(4, 18)
    driver.submit(make_request("warm", tokens, 1))
    driver.run()
    driver.submit(make_request("a", tokens, max_output_tokens, num_prompt_logprobs=0, n=2))
    driver.run()
    report = driver.prompts["a", 0]
    assert (report.num_hit_tokens, report.num_miss_tokens) == (0, 18)
    assert report.logprobs is not None
    assert [s.token_id for s in report.logprobs] == tokens[1:]
    state, scores = 0, []
    for token, following in pairwise(tokens):
        state = digest(state, token)
        scores.append(score(state, following))
    assert [s.logprob for s in report.logprobs] == scores


def test_prompt_logprobs_are_whole_after_a_preemption_in_the_middle_of_the_prompt() -> None:
    driver = Driver(
        make_scheduler(
            num_blocks=12, max_step_tokens=8, max_mixed_prefill_tokens=3,
            reserve_blocks_per_sequence=0,
        )
    )  # fmt: skip
    driver.submit(make_request("old", prompt(1, 4), 30))
    driver.step()
    driver.step()
    tokens = prompt(2, 37)
    driver.submit(make_request("new", tokens, 2, num_prompt_logprobs=0))
    driver.run()
    assert driver.scheduler.load().num_preemptions >= 1
    logprobs = driver.prompts["new", 0].logprobs
    assert logprobs is not None
    assert [s.token_id for s in logprobs] == tokens[1:]
    assert driver.ids["new", 0] == expected_ids(tokens, 2)


def test_a_preempted_prompt_is_not_scored_again_where_its_blocks_are_still_cached() -> None:
    driver = Driver(
        make_scheduler(
            num_blocks=12, max_step_tokens=8, max_mixed_prefill_tokens=4,
            reserve_blocks_per_sequence=0,
        )
    )  # fmt: skip
    driver.submit(make_request("old", prompt(1, 4), 6))
    driver.step()
    driver.submit(make_request("new", prompt(2, 40), 1, num_prompt_logprobs=0))
    while not driver.scheduler.load().num_preemptions:
        driver.step()
    driver.run()
    logprobs = driver.prompts["new", 0].logprobs
    assert logprobs is not None
    assert [s.token_id for s in logprobs] == prompt(2, 40)[1:]
    assert driver.scheduler.load().num_recomputed_tokens == 0


def test_who_was_planned_to_hit_blocks_that_an_earlier_start_evicts_waits_for_the_next_step() -> (
    None
):
    # a and b compute the same prompt; a's head is the published one, b's tail hangs on it.
    driver = Driver(make_scheduler(num_blocks=7, reserve_blocks_per_sequence=0))
    tokens = prompt(1, 5)
    driver.submit(make_request("a", tokens, 1), make_request("b", tokens, 20))
    for _ in range(4):
        driver.step()
    driver.submit(make_request("z", prompt(2, 12), 1))
    driver.step()
    load = driver.scheduler.load()
    assert (load.num_free_blocks, load.num_cached_blocks, load.num_held_blocks) == (0, 4, 3)
    # x evicts the head (oldest), so y loses its hit on the tail that b holds, too.
    longer = [*tokens, *driver.ids["b", 0][:3], 7]
    driver.submit(make_request("x", prompt(3, 8), 1), make_request("y", longer, 1))
    driver.step()
    assert len(driver.plans[-1].rows) == 2
    assert driver.scheduler.load().num_waiting == 1
    driver.run()
    assert driver.prompts["y", 0].num_miss_tokens == 9
    assert driver.ids["y", 0] == expected_ids(longer, 1)
    assert driver.ids["b", 0] == expected_ids(tokens, 20)


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", [7], 1, num_prompt_logprobs=2))
    driver.run()
    assert driver.prompts["a", 0].logprobs == ()


def test_history_is_copied_into_the_plan_only_when_a_penalty_needs_it() -> None:
    driver = Driver(make_scheduler())
    driver.submit(
        make_request("none", [1, 2], 4),
        make_request("presence", [3, 4], 4, presence_penalty=0.5),
        make_request("repetition", [5, 6], 4, repetition_penalty=1.1),
    )
    driver.run()

    def last_row(first_token: int) -> StepRow:
        ids = {row.sequence_id for row in driver.plans[0].rows if row.tokens[0] == first_token}
        return [row for plan in driver.plans for row in plan.rows if row.sequence_id in ids][-1]

    for first_token, has_prompt, has_output in (
        (1, False, False),
        (3, False, True),
        (5, True, True),
    ):
        sample = last_row(first_token).sample
        assert sample is not None
        assert bool(sample.prompt_tokens) == has_prompt
        assert len(sample.output_tokens) == (3 if has_output else 0)


def test_a_tenant_never_hits_anothers_prompt() -> None:
    driver = Driver(make_scheduler())
    tokens = prompt(1, 20)
    for name, tenant in (("a", "x"), ("b", "y"), ("c", "x")):
        driver.submit(make_request(name, tokens, 2, tenant=tenant))
        driver.run()
    assert [driver.prompts[name, 0].num_hit_tokens for name in "abc"] == [0, 0, 16]


def test_a_block_table_is_the_same_object_until_it_grows() -> None:
    driver = Driver(make_scheduler())
    driver.submit(make_request("a", prompt(1, 4), 8))
    driver.run()
    tables = [plan.rows[0].block_table for plan in driver.plans]
    assert [len(table) for table in tables] == [1, 2, 2, 2, 2, 3, 3, 3]
    assert tables[1] is tables[4]
