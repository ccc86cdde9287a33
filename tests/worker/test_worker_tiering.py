"""The scheduler with tiers beyond the device: every way to a hit, and every way to lose one.

The scripted engine's KV is a digest of the whole prefix, so a wrong hit shows in the ids.
"""

from __future__ import annotations

import random

import pytest
from worker_fake_tiers import TICK_S, Habits, Stack
from worker_scripted_engine import VOCAB, Driver, ScriptedEngine, make_request, make_scheduler

from headwater.core.cache import MissReason, Tier, WindowKV
from headwater.core.request import FinishReason, Request
from headwater.worker.lookups import LOOK_LIMIT_S
from headwater.worker.tiering import TierParts

DAYS = 7 * 86400.0


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def kept(name: str, tokens: list[int], num_output: int = 8, **params: object) -> Request:
    return make_request(name, tokens, num_output, **{"keep_s": DAYS, **params})  # type: ignore[arg-type]


# The device alone


def test_the_device_hits_to_the_last_token_and_forks_inside_a_block() -> None:
    engine = ScriptedEngine(4)
    clock = Stack().clock
    driver = Driver(make_scheduler(tier_parts=TierParts(memory=engine, clock=clock)), engine=engine)
    tokens = prompt(1, 22)
    driver.submit(make_request("a", tokens))
    driver.run()
    turn = tokens + driver.ids["a", 0]
    driver.submit(
        make_request("same", tokens),
        make_request("turn", [*turn, 7, 8, 9]),
        make_request("fork", [*tokens[:14], 49, 49, 49]),
    )
    driver.run()
    hits = {name: driver.prompts[name, 0].num_hit_tokens for name in ("same", "turn", "fork")}
    # Of "turn" all but the last output token had KV, and that one is not in any.
    assert hits["same"] == 21
    assert hits["turn"] == len(turn) - 1
    assert hits["fork"] == 14
    assert engine.num_copies == 3


# A look


def test_a_prompt_that_was_stored_before_a_restart_is_a_hit_after_it_c04() -> None:
    stack = Stack()
    tokens = prompt(1, 41)
    cold = stack.ask(kept("a", tokens))
    assert cold.num_hit_tokens == 0
    assert cold.cache is not None
    assert cold.cache.reason is MissReason.NEW
    stack.restart()
    warm = stack.ask(kept("a", tokens))
    assert (warm.num_hit_tokens, warm.num_miss_tokens) == (40, 1)
    assert warm.cache is not None
    assert (warm.cache.num_device_tokens, warm.cache.num_disk_tokens) == (0, 40)
    assert warm.cache.reason is MissReason.NONE
    assert warm.cache.load_s > 0
    load = stack.scheduler.load()
    assert (load.num_disk_hit_tokens, load.num_hit_tokens, load.num_miss_tokens) == (40, 40, 1)
    assert load.misses == ()
    # What came from there need not go there again, and it lives on.
    assert stack.tiers.num_puts == 2, "the output's blocks alone"
    assert len(stack.tiers.touched) == 10


def test_the_next_turn_after_a_restart_hits_to_the_last_token_that_had_kv() -> None:
    stack = Stack()
    tokens = prompt(2, 30)
    stack.ask(kept("a", tokens, 9))
    turn = tokens + stack.driver.ids["a", 0]
    stack.restart()
    report = stack.ask(kept("b", [*turn, 1, 2, 3]))
    assert report.num_hit_tokens == len(turn) - 1


def test_a_fork_at_the_end_of_the_input_hits_to_its_last_token() -> None:
    stack = Stack()
    tokens = prompt(3, 30)
    stack.ask(kept("a", tokens, 9))
    stack.restart()
    other = [*tokens, 49, 49, 49, 49, 49]
    assert stack.ask(kept("b", other)).num_hit_tokens == 30


def test_a_store_that_does_not_answer_is_waited_for_a_bounded_time() -> None:
    stack = Stack(Habits(look_ticks=10_000))
    tokens = prompt(1, 21)
    stack.driver.submit(kept("a", tokens))
    for _ in range(round(LOOK_LIMIT_S / TICK_S) - 1):
        stack.driver.step()
        assert not stack.driver.ids
    while ("a", 0) not in stack.driver.finishes:
        stack.driver.step()
    stack.check(kept("a", tokens))
    cache = stack.driver.prompts["a", 0].cache
    assert cache is not None
    assert cache.reason is MissReason.UNAVAILABLE
    # Nobody else waits for it while it is silent, and it is asked again when it has spoken.
    assert stack.scheduler.load().num_waiting == 0
    num_steps = round(stack.clock.time_s / TICK_S)
    stack.driver.submit(kept("b", prompt(2, 21), 1))
    while ("b", 0) not in stack.driver.finishes:
        stack.driver.step()
    assert stack.clock.time_s < (num_steps + 10) * TICK_S
    assert dict(stack.scheduler.load().misses) == {"unavailable": 2}
    stack.habits.look_ticks = 1
    for work in stack.tiers.running:
        work.ticks = 0
    stack.driver.run()
    stack.ask(kept("c", prompt(3, 21), 1))
    assert stack.tiers.num_looks == 2


def test_a_look_holds_nobody_else_up_and_its_request_keeps_its_place() -> None:
    stack = Stack(Habits(look_ticks=6), max_step_tokens=8)
    stack.driver.submit(kept("first", prompt(1, 20), 2))
    stack.habits.look_ticks = 2
    stack.driver.submit(kept("second", prompt(2, 60), 2))
    while ("first", 0) not in stack.driver.prompts:
        stack.driver.step()
    assert ("second", 0) in stack.driver.prompts
    assert ("second", 0) not in stack.driver.finishes
    stack.driver.run()
    # From then on the earlier one is served first.
    assert next(iter(stack.driver.finishes)) == ("first", 0)


def test_nothing_is_asked_where_the_device_has_it_all_or_a_block_would_not_do() -> None:
    stack = Stack()
    tokens = prompt(1, 40)
    stack.ask(kept("short", tokens[:4]))
    assert stack.tiers.num_looks == 0
    stack.ask(kept("a", tokens))
    assert stack.tiers.num_looks == 1
    stack.ask(kept("again", tokens))
    assert stack.tiers.num_looks == 1


def test_prompt_logprobs_ask_for_all_of_the_prompt_to_be_computed() -> None:
    stack = Stack()
    tokens = prompt(1, 40)
    stack.ask(kept("a", tokens))
    report = stack.ask(kept("b", tokens, num_prompt_logprobs=0))
    assert report.num_hit_tokens == 0
    assert report.cache is not None
    assert report.cache.reason is MissReason.ASKED
    assert report.logprobs is not None
    assert len(report.logprobs) == 39
    assert stack.tiers.num_looks == 1


def test_another_tenants_prompt_is_new_to_the_caller_and_counted_for_the_operator_c12() -> None:
    stack = Stack()
    tokens = prompt(1, 40)
    stack.ask(kept("a", tokens, tenant="k1"))
    stack.habits.reason = MissReason.OTHER_TENANT
    report = stack.ask(kept("b", tokens, tenant="k2"))
    assert report.num_hit_tokens == 0
    assert report.cache is not None
    assert report.cache.reason is MissReason.NEW
    assert dict(stack.scheduler.load().misses) == {"new": 1, "other_tenant": 1}


def test_what_the_device_evicted_since_the_look_is_looked_for_again() -> None:
    stack = Stack(num_blocks=24, reserve_blocks_per_sequence=0)
    tokens = prompt(1, 48)
    stack.ask(kept("a", tokens, 1))
    stack.restart()
    stack.ask(kept("head", tokens[:33], 1))  # the device has the head again
    num_looks = stack.tiers.num_looks
    # A request that takes nearly all blocks runs while the next one has looked and waits.
    stack.driver.submit(make_request("big", prompt(2, 80), 8))
    stack.driver.submit(kept("b", [*tokens, 1, 2], 1))
    stack.driver.run()
    assert stack.tiers.num_looks == num_looks + 3
    assert stack.driver.prompts["b", 0].num_hit_tokens >= 44
    stack.check(kept("b", [*tokens, 1, 2], 1))


# A load


def test_a_load_takes_no_budget_and_holds_nobody_up() -> None:
    stack = Stack(max_step_tokens=16)
    tokens = prompt(1, 40)
    stack.ask(kept("a", tokens, 1))
    stack.restart()
    stack.habits.load_ticks = 5
    stack.driver.submit(kept("warm", tokens, 1), make_request("cold", prompt(2, 30), 2))
    while ("warm", 0) not in stack.driver.prompts:
        stack.driver.step()
    assert stack.driver.reason("cold") is FinishReason.LENGTH
    assert stack.scheduler.load().num_loading == 0
    stack.driver.run()
    assert stack.driver.prompts["warm", 0].num_hit_tokens == 39


def test_loading_is_left_out_where_computing_is_predicted_to_be_faster() -> None:
    stack = Stack()
    tokens = prompt(1, 64)
    stack.ask(kept("a", tokens))
    stack.restart()
    stack.habits.load_s = 1.0
    pace(stack, tokens_per_s=1000.0)
    report = stack.ask(kept("b", tokens))
    assert report.num_hit_tokens == 0
    assert report.cache is not None
    assert report.cache.reason is MissReason.SLOW
    assert stack.tiers.num_loads == 0


def test_a_load_that_turns_out_slow_is_dropped_and_what_came_is_a_hit() -> None:
    stack = Stack()
    tokens = prompt(1, 64)
    stack.ask(kept("a", tokens))
    stack.restart()
    pace(stack, tokens_per_s=1000.0)  # 64 ms for all of it
    stack.habits.load_ticks = 20  # 20 ms a record
    report = stack.ask(kept("b", tokens))
    assert stack.scheduler.load().num_dropped_loads == 1
    assert report.cache is not None
    assert report.cache.reason is MissReason.SLOW
    assert 0 < report.cache.num_disk_tokens < 60
    assert report.num_hit_tokens == report.cache.num_disk_tokens


def test_a_load_that_never_moves_is_dropped_even_where_no_pace_is_known() -> None:
    stack = Stack()
    tokens = prompt(1, 64)
    stack.ask(kept("a", tokens))
    stack.restart()
    stack.habits.load_ticks = 100_000
    stack.driver.submit(kept("b", tokens))
    stack.driver.step()
    stack.driver.step()
    assert stack.scheduler.load().num_loading == 1
    stack.clock.time_s += 60
    while ("b", 0) not in stack.driver.finishes:
        stack.driver.step()
    stack.check(kept("b", tokens))
    # The hung load still owns its blocks, and the audit knows.
    assert stack.scheduler.is_keeping
    assert stack.scheduler.load().num_held_blocks > 0
    stack.habits.load_ticks = 1
    stack.driver.run()


@pytest.mark.parametrize("bad_row", range(10))
def test_a_record_that_fails_its_check_ends_the_hit_there_and_the_rest_is_computed_c01(
    bad_row: int,
) -> None:
    stack = Stack()
    tokens = prompt(1, 41)
    stack.ask(kept("a", tokens))
    stack.restart()
    stack.habits.fails_load = lambda meta: meta.start == 4 * bad_row
    report = stack.ask(kept("b", tokens))
    assert report.num_hit_tokens == 4 * bad_row
    assert report.cache is not None
    assert report.cache.reason is MissReason.DAMAGED
    assert report.cache.num_disk_tokens == 4 * bad_row


def test_an_abort_while_loading_gives_the_blocks_back_when_the_loader_is_done() -> None:
    stack = Stack()
    tokens = prompt(1, 64)
    stack.ask(kept("a", tokens))
    stack.restart()
    stack.habits.load_ticks = 4
    stack.driver.submit(kept("b", tokens))
    while stack.scheduler.load().num_loading == 0:
        stack.driver.step()
    stack.driver.step()
    stack.driver.abort("b")
    assert stack.driver.reason("b") is FinishReason.ABORTED
    assert ("b", 0) not in stack.driver.prompts
    assert stack.scheduler.load().num_held_blocks > 0
    stack.scheduler.audit()
    stack.driver.run()
    assert stack.scheduler.load().num_hit_tokens == 0


def test_a_loading_sequence_gives_way_to_one_that_decodes() -> None:
    stack = Stack(num_blocks=24, reserve_blocks_per_sequence=0)
    tokens = prompt(1, 60)
    stack.ask(kept("a", tokens, 1))
    stack.restart()
    stack.driver.submit(make_request("old", prompt(2, 4), 40))
    while ("old", 0) not in stack.driver.prompts:
        stack.driver.step()
    stack.habits.load_ticks = 40
    stack.driver.submit(kept("new", tokens, 1))
    stack.driver.run()
    assert stack.scheduler.load().num_preemptions >= 1
    stack.check(kept("new", tokens, 1))
    stack.check(make_request("old", prompt(2, 4), 40))


# Keeping


def test_what_asks_for_no_keeping_is_on_the_device_only() -> None:
    stack = Stack(Habits(has_host=True), num_blocks=16)
    for seed in range(6):
        stack.ask(make_request(f"r{seed}", prompt(seed, 40)))
    assert not stack.kept[Tier.DISK]
    assert not stack.kept[Tier.HOST]


def test_a_prefix_that_nobody_asked_to_keep_is_stored_with_the_first_who_does() -> None:
    stack = Stack()
    tokens = prompt(1, 40)
    stack.ask(make_request("a", tokens))
    stack.ask(kept("b", [*tokens, 1, 2, 3, 4, 5, 6]))
    stack.restart()
    assert stack.ask(kept("c", [*tokens, 1, 2, 3, 4, 9])).num_hit_tokens == 44


def test_a_failed_step_stores_nothing_of_what_it_wrote() -> None:
    stack = Stack(max_step_tokens=16)
    tokens = prompt(1, 40)
    stack.driver.submit(kept("a", tokens))
    while stack.scheduler.load().num_steps < 2:
        stack.driver.step()
    stack.engine.fail_next = True
    stack.driver.run()
    assert stack.driver.reason("a") is FinishReason.FAILED
    ends = {record.meta.end for record in stack.kept[Tier.DISK].values()}
    assert max(ends, default=0) % 16 == 0
    stack.restart()
    stack.ask(kept("b", tokens))


def test_an_aborted_output_is_kept_to_its_last_computed_token() -> None:
    stack = Stack()
    tokens = prompt(1, 30)
    stack.driver.submit(kept("a", tokens, 50))
    while len(stack.driver.ids.get(("a", 0), [])) < 6:
        stack.driver.step()
    stack.driver.abort("a")
    stack.driver.run()
    turn = tokens + stack.driver.ids["a", 0]
    stack.restart()
    assert stack.ask(kept("b", [*turn, 1, 2])).num_hit_tokens == len(turn) - 1


def test_a_lost_store_is_a_miss_and_nothing_else_c02() -> None:
    stack = Stack(Habits(loses_store=lambda meta: meta.start == 12))
    tokens = prompt(1, 41)
    stack.ask(kept("a", tokens))
    stack.restart()
    assert stack.ask(kept("b", tokens)).num_hit_tokens == 12


def test_what_the_disk_did_not_take_is_stored_when_it_is_used_again_c02() -> None:
    stack = Stack(Habits(loses_store=lambda meta: meta.start == 12))
    tokens = prompt(1, 41)
    stack.ask(kept("a", tokens))
    stack.habits.loses_store = lambda meta: False
    stack.ask(kept("b", tokens))
    stack.restart()
    assert stack.ask(kept("c", tokens)).num_hit_tokens == 40


def test_pins_leave_most_of_the_pool_to_who_needs_it() -> None:
    stack = Stack(Habits(store_ticks=50), num_blocks=32)
    for seed in range(4):
        stack.driver.submit(kept(f"r{seed}", prompt(seed, 60), 4))
    for _ in range(400):
        if not stack.driver.step():
            break
        assert stack.tiers.num_queued_writes <= 4
    for seed in range(4):
        stack.check(kept(f"r{seed}", prompt(seed, 60), 4))
    assert stack.scheduler.load().num_dropped_stores > 0


def test_a_store_that_hangs_does_not_stop_those_that_need_blocks() -> None:
    stack = Stack(Habits(store_ticks=10**6), num_blocks=24, reserve_blocks_per_sequence=0)
    requests = [kept(f"r{seed}", prompt(seed, 8), 50) for seed in range(4)]
    stack.driver.submit(*requests)
    for _ in range(2000):
        stack.driver.step()
        if len(stack.driver.finishes) == 4:
            break
    for request in requests:
        stack.check(request)
        assert stack.driver.reason(str(request.request_id)) is FinishReason.LENGTH
    assert stack.scheduler.load().num_preemptions > 0


def test_what_must_go_from_a_small_device_goes_to_the_host_and_comes_back() -> None:
    stack = Stack(Habits(has_host=True, has_disk=False), num_blocks=32)
    prompts = [prompt(seed, 25) for seed in range(12)]
    for number, tokens in enumerate(prompts):
        stack.ask(kept(f"a{number}", tokens, 2))
    host_tokens = 0
    for number, tokens in enumerate(prompts):
        report = stack.ask(kept(f"b{number}", tokens, 2))
        assert report.cache is not None
        host_tokens += report.cache.num_host_tokens
    assert host_tokens > 200
    assert stack.scheduler.load().num_host_hit_tokens == host_tokens


def test_an_orderly_end_stores_the_last_output() -> None:
    stack = Stack()
    tokens = prompt(1, 41)
    stack.driver.submit(kept("a", tokens, 2))
    while ("a", 0) not in stack.driver.finishes:
        stack.driver.step()
    assert stack.scheduler.is_keeping
    stack.clock.tick = stack.tiers.tick
    stack.scheduler.close()
    assert stack.tiers.is_closed
    stack.restart(orderly=False)
    assert stack.ask(kept("b", tokens, 2)).num_hit_tokens == 40


# Windows


@pytest.mark.parametrize("window_kv", list(WindowKV))
@pytest.mark.parametrize("window_tokens", [4, 6, 9, 16])
def test_window_models_hit_after_a_restart_in_both_ways_c13(
    window_kv: WindowKV, window_tokens: int
) -> None:
    stack = Stack(window_tokens=window_tokens, window_kv=window_kv)
    tokens = prompt(1, 61)
    stack.ask(kept("a", tokens, 9))
    turn = tokens + stack.driver.ids["a", 0]
    stack.restart()
    report = stack.ask(kept("b", [*turn, 1, 2, 3]))
    assert report.cache is not None
    assert report.num_hit_tokens == len(turn) - 1
    replayed = window_tokens if window_kv is WindowKV.REPLAY else 0
    assert report.cache.num_replayed_tokens == replayed
    assert stack.scheduler.load().num_replayed_tokens == replayed
    rows = [row for plan in stack.driver.plans for row in plan.rows]
    assert sum(row.num_replayed for row in rows) == replayed
    # Never before what is there, and the same for all its rows.
    assert len({row.window_start for row in rows}) == 1
    assert 0 < rows[0].window_start <= len(turn) - 1 - replayed
    num_windows = sum(r.meta.part == "window" for r in stack.kept[Tier.DISK].values())
    assert (num_windows > 0) is (window_kv is WindowKV.CHECKPOINT)
    again = stack.ask(kept("c", [*turn, 1, 2, 9]))
    assert again.num_hit_tokens == len(turn) + 2


@pytest.mark.parametrize("window_kv", list(WindowKV))
def test_a_regenerated_answer_of_a_window_model_hits_the_whole_input(window_kv: WindowKV) -> None:
    stack = Stack(window_tokens=9, window_kv=window_kv)
    tokens = prompt(1, 61)
    stack.ask(kept("a", tokens, 20))
    stack.restart()
    other = [*tokens, 49, 49, 49]
    assert stack.ask(kept("b", other)).num_hit_tokens == 61


def pace(stack: Stack, tokens_per_s: float) -> None:
    """Make the scheduler believe that it prefills so fast."""
    stack.engine.tokens_per_s = tokens_per_s
    stack.ask(make_request("pace", prompt(99, 60), 1))
