"""A model with late layers, from request to ids: decoder replay, encoder replay, and hits.

The four equalities with replay on and off: hit = miss, one = many, whole = cut, and whatever
gave way = undisturbed. The real engine with plain numerics and real stores, a toy model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from journey_tiers import BLOCK, request, run, tokens, worker

from headwater.app.assemble import WorkerParts
from headwater.core.cache import MissReason
from headwater.core.request import Request
from headwater.core.step import StepPlan

MODEL = "toy:family=ced"
WINDOW, KEEP = 16, 28
SWITCH = pytest.mark.parametrize("decoder_replay", [True, False])


Ids = dict[tuple[str, int], list[int]]
ColdIds = Callable[[Sequence[Request], bool], Ids]


@pytest.fixture(scope="module")
def cold_ids() -> Iterator[ColdIds]:
    """Each alone, with nothing to hit, its prompt in one step; with decoder replay or without."""
    with worker(None, model=MODEL) as on, worker(None, model=MODEL, decoder_replay=False) as off:
        num_asked = 0

        def ids_of(requests: Sequence[Request], decoder_replay: bool) -> Ids:
            nonlocal num_asked
            ids: Ids = {}
            for asked in requests:
                num_asked += 1
                alone = replace(asked, tenant=f"alone{num_asked}")
                answers = run(on if decoder_replay else off, [alone])
                assert answers.prompts[asked.request_id].num_hit_tokens == 0
                ids |= answers.ids
            return ids

        yield ids_of


@SWITCH
def test_conversations_on_a_small_device_give_the_ids_of_cold_runs(
    tmp_path: Path, cold_ids: ColdIds, decoder_replay: bool
) -> None:
    """Turns of four conversations in a pool for one and a half; after a restart all turns again,
    in any order."""
    draw = random.Random(5)
    prompts = {f"c{i}": tokens(i, draw.randrange(30, 120)) for i in range(4)}
    asked: list[Request] = []
    ids: Ids = {}
    num_hits, num_replayed = {"device": 0, "disk": 0}, 0

    def ask(parts: WorkerParts, turn: Request) -> list[int]:
        nonlocal num_replayed
        answers = run(parts, [turn], to_idle=draw.random() < 0.5)
        report, cache = answers.prompts[turn.request_id], answers.cache(turn.request_id)
        assert report.num_hit_tokens + report.num_miss_tokens == len(turn.prompt_tokens)
        num_hits["device"] += cache.num_device_tokens
        num_hits["disk"] += cache.num_disk_tokens
        num_replayed += cache.num_replayed_tokens
        for key, found in answers.ids.items():
            assert ids.setdefault(key, found) == found
        return answers.ids[turn.request_id, 0]

    def new_worker() -> AbstractContextManager[WorkerParts]:
        return worker(
            tmp_path / "kv", model=MODEL, num_blocks=24, context_tokens=384,
            decoder_replay=decoder_replay,
        )  # fmt: skip

    with new_worker() as parts:
        for number in range(3):
            for name, prompt in prompts.items():
                asked.append(request(f"{name}.{number}", prompt, draw.randrange(1, 16)))
                # A new message may be longer than what late layers compute, or shorter.
                added = tokens(draw.randrange(10**6), draw.choice([1, 2, 7, 20, KEEP, 50]))
                prompt += [*ask(parts, asked[-1]), *added]
    with new_worker() as parts:
        for turn in draw.sample(asked, len(asked)):
            ask(parts, turn)
    assert all(num_hits.values()), num_hits
    assert (num_replayed > 0) == decoder_replay, "only a restart of late layers replays here"
    assert ids == cold_ids(asked, decoder_replay)


@SWITCH
@pytest.mark.parametrize("num_prompt", [KEEP + BLOCK, 97, 98, 200])
def test_a_restart_hits_what_was_stored_and_only_restarts_late_layers(
    tmp_path: Path, cold_ids: ColdIds, num_prompt: int, decoder_replay: bool
) -> None:
    prompt = tokens(1, num_prompt)
    with worker(tmp_path / "kv", model=MODEL, decoder_replay=decoder_replay) as parts:
        first = run(parts, [request("a", prompt)])
    turn = [*prompt, *first.ids["a", 0], 7, 8, 9]
    with worker(tmp_path / "kv", model=MODEL, decoder_replay=decoder_replay) as parts:
        again = run(parts, [request("a", prompt), request("turn", turn, tenant="")])
    assert again.ids["a", 0] == first.ids["a", 0]
    even = (num_prompt - 1) // 2 * 2  # two tokens share a row of KV
    cache = again.cache("a")
    assert (cache.num_disk_tokens, cache.reason) == (even, MissReason.NONE)
    late_start = num_prompt - KEEP
    assert cache.num_replayed_tokens == (even - late_start if decoder_replay else 0)
    stored = (num_prompt + 11) // 2 * 2  # the last output token was chosen, never computed on
    assert again.cache("turn").num_hit_tokens == stored
    [want] = cold_ids([request("turn", turn)], decoder_replay).values()
    assert again.ids["turn", 0] == want


@SWITCH
def test_batches_and_chunks_change_no_id(cold_ids: ColdIds, decoder_replay: bool) -> None:
    asked = [request(f"r{i}", tokens(i, n)) for i, n in enumerate((1, 15, 28, 29, 64, 131, 222))]
    want = cold_ids(asked, decoder_replay)
    for max_step_tokens in (33, 50, 512):
        with worker(
            None, model=MODEL, decoder_replay=decoder_replay, max_step_tokens=max_step_tokens
        ) as parts:
            assert run(parts, asked).ids == want


@SWITCH
def test_whoever_gives_way_goes_on_with_the_ids_it_would_have_had(
    cold_ids: ColdIds, decoder_replay: bool
) -> None:
    """Its late layers begin anew where they did: at its own prompt's end, not at its output's."""
    asked = [request(f"r{i}", tokens(i, 60 + i), 60) for i in range(4)]
    want = cold_ids(asked, decoder_replay)
    seen: list[StepPlan] = []
    with worker(
        None, model=MODEL, num_blocks=21, context_tokens=320, decoder_replay=decoder_replay
    ) as parts:
        assert run(parts, asked, seen=seen).ids == want
        assert parts.scheduler.load().num_preemptions > 0
    for plan in seen:
        for row in plan.rows:
            num_prompt = 60 + row.sequence_id
            assert row.late_start == (num_prompt - KEEP if decoder_replay else 0)


def test_several_hits_are_replayed_in_one_step(cold_ids: ColdIds) -> None:
    """Encoder replay is batched: nobody waits for another's."""
    common = tokens(3, 120)
    asked = [request(f"r{i}", [*common, *tokens(i, 20)]) for i in range(5)]
    want = cold_ids(asked, True)
    seen: list[StepPlan] = []
    with worker(None, model=MODEL) as parts:
        run(parts, [request("first", [*common, 5])])
        answers = run(parts, asked, seen=seen)
    assert answers.ids == want
    replays = [sum(row.num_replayed > 0 for row in plan.rows) for plan in seen]
    assert replays[0] == len(asked)
    assert sum(replays) == len(asked)
    for asks in asked:
        assert answers.cache(asks.request_id).num_replayed_tokens == 120 - (140 - KEEP)


@SWITCH
def test_replayed_windows_are_no_miss_and_are_computed_in_one_step_too(
    tmp_path: Path, decoder_replay: bool
) -> None:
    prompts = {f"r{i}": tokens(i, 130 + i) for i in range(3)}
    with worker(
        tmp_path / "kv", model=MODEL, window_kv="replay", decoder_replay=decoder_replay
    ) as parts:
        first = run(parts, [request(name, prompt) for name, prompt in prompts.items()])
    seen: list[StepPlan] = []
    with worker(
        tmp_path / "kv", model=MODEL, window_kv="replay", decoder_replay=decoder_replay
    ) as parts:
        again = run(parts, [request(name, prompt) for name, prompt in prompts.items()], seen=seen)
    assert max(sum(row.num_replayed > 0 for row in plan.rows) for plan in seen) > 1
    for name, prompt in prompts.items():
        cache, report = again.cache(name), again.prompts[name]
        assert report.num_hit_tokens + report.num_miss_tokens == len(prompt)
        even = (len(prompt) - 1) // 2 * 2
        assert cache.num_disk_tokens == even
        late_start = len(prompt) - KEEP if decoder_replay else even
        assert cache.num_replayed_tokens == even - min(late_start, even - WINDOW)
        assert len(again.ids[name, 0]) == len(first.ids[name, 0])


@pytest.mark.parametrize("num_prompt", [WINDOW, KEEP, KEEP + BLOCK - 1])
@pytest.mark.parametrize("window_kv", ["checkpoint", "replay"])
def test_a_prompt_that_late_layers_compute_whole_is_no_hit(window_kv: str, num_prompt: int) -> None:
    """A hit would save less than a block of it."""
    prompt = tokens(4, num_prompt)
    with worker(None, model=MODEL, window_kv=window_kv) as parts:
        first = run(parts, [request("a", prompt)])
        again = run(parts, [request("b", prompt)])
    assert again.ids["b", 0] == first.ids["a", 0]
    cache = again.cache("b")
    assert (cache.num_hit_tokens, cache.reason) == (0, MissReason.TOO_SHORT)


def test_a_hit_no_longer_than_the_window_is_not_replayed() -> None:
    prompt = tokens(4, 80)
    with worker(None, model=MODEL, window_kv="replay", decoder_replay=False) as parts:
        run(parts, [request("a", prompt[:WINDOW], 1)])
        assert run(parts, [request("b", prompt)]).cache("b").num_replayed_tokens == 0


def test_prompt_logprobs_see_every_layer_at_every_token() -> None:
    prompt = tokens(5, 150)
    scored = replace(request("s", prompt), num_prompt_logprobs=1)
    plain = request("p", prompt)
    found = []
    for decoder_replay in (True, False):
        with worker(None, model=MODEL, decoder_replay=decoder_replay) as parts:
            run(parts, [plain])
            seen: list[StepPlan] = []
            answers = run(parts, [scored], seen=seen)
            assert all(row.late_start == 0 for plan in seen for row in plan.rows)
            assert answers.cache("s").reason is MissReason.ASKED
            found.append((answers.ids, answers.prompts["s"].logprobs))
    on, off = found
    assert on[0] == off[0]
    assert on[1] is not None
    assert off[1] is not None
    assert len(on[1]) == 149
    for one, other in zip(on[1], off[1], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_replay_on_and_off_never_hit_each_others_kv(tmp_path: Path) -> None:
    """Off keeps late layers' windows, on has none that are worth keeping."""
    prompt = tokens(6, 150)
    with worker(tmp_path / "kv", model=MODEL) as parts:
        run(parts, [request("a", prompt)])
    with worker(tmp_path / "kv", model=MODEL, decoder_replay=False) as parts:
        cache = run(parts, [request("a", prompt)]).cache("a")
        assert (cache.num_hit_tokens, cache.reason) == (0, MissReason.OTHER_MODEL)


def test_late_layers_compute_the_end_of_a_prompt_only() -> None:
    prompt = tokens(7, 300)
    seen: list[StepPlan] = []
    with worker(None, model=MODEL, max_step_tokens=64) as parts:
        run(parts, [request("a", prompt, 4)], seen=seen)
    late = [row for plan in seen for row in plan.rows if row.end > row.late_start]
    assert sum(row.end - max(row.start, row.late_start) for row in late) == KEEP + 3
    assert sum(len(row.tokens) for plan in seen for row in plan.rows) == 300 + 3
