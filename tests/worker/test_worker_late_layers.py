"""Late layers in the scheduler: where they begin, what they compute, what that does to a hit.

The scripted engine keeps their KV apart: each sequence's own, from one place on. Its checks
fail where a token sees what another sequence or an earlier life of its own wrote, and other
ids come out where the layers began elsewhere.
"""

from __future__ import annotations

import pytest
from worker_fake_tiers import ManualClock, Stack
from worker_late_engine import LateEngine, late_ids
from worker_scripted_engine import Driver, make_request, make_scheduler

from headwater.core.cache import MissReason, WindowKV
from headwater.core.errors import ConfigError
from headwater.core.fleet import Holding, Resume
from headwater.core.request import Request
from headwater.core.step import StepRow
from headwater.worker.tiering import TierParts

DAYS = 7 * 86400.0
WINDOW, KEEP = 6, 8


def make_driver(
    *, num_blocks: int = 64, max_step_tokens: int = 64, reserve_blocks_per_sequence: int = 1
) -> Driver:
    engine = LateEngine(4, WINDOW, Holding.ALL)
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        max_mixed_prefill_tokens=8,
        reserve_blocks_per_sequence=reserve_blocks_per_sequence,
        window_tokens=WINDOW,
        decoder_replay_tokens=KEEP,
        tier_parts=TierParts(memory=engine, clock=ManualClock()),
    )
    return Driver(scheduler, engine=engine)


def rows_of(driver: Driver) -> list[StepRow]:
    return [row for plan in driver.plans for row in plan.rows]


@pytest.mark.parametrize("num_prompt", [1, KEEP, KEEP + 1, 40])
@pytest.mark.parametrize("max_step_tokens", [8, 64])
def test_late_layers_compute_the_last_tokens_of_a_prompt_and_all_output(
    num_prompt: int, max_step_tokens: int
) -> None:
    driver = make_driver(max_step_tokens=max_step_tokens)
    prompt, start = list(range(num_prompt)), max(num_prompt - KEEP, 0)
    driver.submit(make_request("a", prompt, 5))
    driver.run()
    assert driver.ids["a", 0] == late_ids(prompt, 5, start)
    rows = rows_of(driver)
    assert sum(max(row.end - max(row.start, start), 0) for row in rows) == num_prompt - start + 4
    assert {row.late_start for row in rows} == {start}


def test_a_preempted_sequence_begins_its_late_layers_where_they_began() -> None:
    driver = make_driver(num_blocks=12, reserve_blocks_per_sequence=0)
    requests = [make_request(f"r{i}", [i] * 14, 20) for i in range(3)]
    driver.submit(*requests)
    driver.run()
    assert driver.scheduler.load().num_preemptions > 0
    for request in requests:
        found = driver.ids[str(request.request_id), 0]
        assert found == late_ids(request.prompt_tokens, 20, 14 - KEEP)


@pytest.mark.parametrize(("num_prompt_logprobs", "start"), [(None, 12), (0, 0)])
def test_a_request_that_moved_with_output_begins_them_where_the_lost_worker_did(
    num_prompt_logprobs: int | None, start: int
) -> None:
    driver = make_driver()
    prompt = list(range(20))
    ids = late_ids(prompt, 12, start)
    request = make_request("a", prompt, 12, num_prompt_logprobs=num_prompt_logprobs)
    driver.scheduler.submit(request, resume=[Resume(index=0, tokens=tuple(ids[:6]))])
    driver.run()
    assert driver.ids["a", 0] == ids[6:]


def test_prompt_logprobs_are_scored_by_every_layer() -> None:
    driver = make_driver()
    driver.submit(make_request("before", range(30), 1))
    driver.run()
    driver.submit(make_request("a", range(30), 3, num_prompt_logprobs=0, n=2))
    driver.run()
    logprobs = driver.prompts["a", 0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 29
    assert driver.ids["a", 0] == driver.ids["a", 1] == late_ids(range(30), 3, 0)


def test_late_layers_without_a_memory_to_copy_in_are_refused() -> None:
    with pytest.raises(ConfigError, match="memory to copy"):
        make_scheduler(window_tokens=WINDOW, decoder_replay_tokens=KEEP)


def kept(name: str, tokens: list[int], num_output: int = 8, *, n: int = 1) -> Request:
    return make_request(name, tokens, num_output, n=n, keep_s=DAYS)


@pytest.mark.parametrize("num_new", [1, 3, KEEP - 1, KEEP, KEEP + 9])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_next_turn_hits_all_that_was_computed_and_computes_from_its_restart_on(
    restarts: bool, num_new: int
) -> None:
    """From disk too: as much window KV is kept as the shortest next message needs."""
    stack = Stack(window_tokens=WINDOW, decoder_replay_tokens=KEEP)
    tokens = list(range(41))
    stack.ask(kept("a", tokens, 9))
    turn = [*tokens, *stack.driver.ids["a", 0], *[49] * num_new]
    if restarts:
        stack.restart()
    report = stack.ask(kept("b", turn))
    assert report.num_hit_tokens == 49  # the last output token was never computed on
    assert report.cache is not None
    assert report.cache.num_replayed_tokens == max(49 - (len(turn) - KEEP), 0)


def test_other_choices_compute_late_layers_of_their_own() -> None:
    stack = Stack(window_tokens=WINDOW, decoder_replay_tokens=KEEP)
    request = kept("a", list(range(41)), 6, n=3)
    stack.driver.submit(request)
    stack.driver.run()
    stack.check(request)
    assert isinstance(stack.engine, LateEngine)
    assert stack.engine.num_late_tokens == 3 * (KEEP + 5)
    assert stack.engine.num_computed_tokens == 41 + 2 * KEEP + 3 * 5


def test_hits_end_with_whole_rows_of_kv() -> None:
    stack = Stack(window_tokens=WINDOW, alignment=2, decoder_replay_tokens=KEEP)
    tokens = list(range(40))
    stack.ask(kept("a", tokens, 1))
    for num_same, num_hit in ((35, 34), (36, 36)):
        report = stack.ask(kept(f"fork{num_same}", [*tokens[:num_same], *[49] * 20]))
        assert report.num_hit_tokens == num_hit
    again = stack.ask(kept("again", tokens))
    assert again.num_hit_tokens == 38
    assert again.cache is not None
    assert again.cache.reason is MissReason.NONE


def test_a_look_that_can_save_nothing_is_not_made() -> None:
    stack = Stack(window_tokens=WINDOW, decoder_replay_tokens=KEEP)
    tokens = list(range(30))
    stack.ask(kept("a", tokens))
    num_looks = stack.tiers.num_looks
    stack.ask(kept("again", tokens))
    stack.ask(kept("short", tokens[: KEEP + 3]))  # less than a block of it can be a hit
    assert stack.tiers.num_looks == num_looks


def test_a_replay_of_windows_begins_where_late_layers_do_or_before() -> None:
    stack = Stack(window_tokens=WINDOW, decoder_replay_tokens=KEEP, window_kv=WindowKV.REPLAY)
    tokens = list(range(41))
    stack.ask(kept("a", tokens, 1))
    stack.restart()
    report = stack.ask(kept("again", tokens))
    assert report.cache is not None
    assert (report.num_hit_tokens, report.cache.num_replayed_tokens) == (40, KEEP - 1)
    stack.restart()
    report = stack.ask(kept("more", [*tokens, *[49] * 20]))
    assert report.cache is not None
    assert (report.num_hit_tokens, report.cache.num_replayed_tokens) == (41, WINDOW)
