"""hit = miss through device, host and disk: the real engine, the real stores, the toy models."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from journey_tiers import BLOCK, MIB, StoreAround, request, run, tokens, worker

from headwater.core.blocks import PrefixKey
from headwater.core.cache import MissReason, RecordMeta, Retention, StoredRecord
from headwater.core.ports import RecordStore

NUM_OUTPUT = 12


def cold_ids(prompt: Sequence[int], model: str = "toy") -> list[int]:
    with worker(None, model=model) as parts:
        return run(parts, [request("cold", prompt)]).ids["cold", 0]


@pytest.mark.parametrize("num_prompt", [17, 32, 33, 250])
def test_a_new_worker_hits_to_the_last_token_what_an_old_one_stored_c04(
    tmp_path: Path, num_prompt: int
) -> None:
    prompt = tokens(1, num_prompt)
    with worker(tmp_path / "kv") as parts:
        first = run(parts, [request("a", prompt)])
    turn = [*prompt, *first.ids["a", 0], 7, 8, 9]
    with worker(tmp_path / "kv") as parts:
        again = run(parts, [request("a", prompt)])
        assert again.ids == first.ids
        assert again.prompts["a"].num_miss_tokens == 1
        assert again.cache("a").num_disk_tokens == num_prompt - 1
        assert again.cache("a").reason is MissReason.NONE
    with worker(tmp_path / "kv") as parts:
        next_turn = run(parts, [request("b", turn)])
        # The last output token was chosen, never computed on.
        assert next_turn.cache("b").num_disk_tokens == num_prompt + NUM_OUTPUT - 1
    assert next_turn.ids["b", 0] == cold_ids(turn)


def test_other_weights_and_other_tenants_never_hit_c08_c12(tmp_path: Path) -> None:
    prompt = tokens(2, 100)
    with worker(tmp_path / "kv") as parts:
        run(parts, [request("a", prompt, tenant="k1")])
        other = run(parts, [request("b", prompt, tenant="k2")])
        assert other.cache("b").num_hit_tokens == 0
        assert other.cache("b").reason is MissReason.NEW
    with worker(tmp_path / "kv") as parts:
        other = run(parts, [request("b", prompt, tenant="k3"), request("c", prompt, tenant="k1")])
        assert other.cache("b").num_hit_tokens == 0
        assert other.cache("b").reason is MissReason.NEW
        assert other.cache("c").num_disk_tokens == 99
        assert dict(parts.scheduler.load().misses)["other_tenant"] == 1
    with worker(tmp_path / "kv", model="toy:seed=3") as parts:
        other = run(parts, [request("a", prompt, tenant="k1")])
        assert other.cache("a").num_hit_tokens == 0
        assert other.cache("a").reason is MissReason.OTHER_MODEL
        assert other.ids["a", 0] == cold_ids(prompt, "toy:seed=3")


def test_forty_sessions_through_a_tiny_device_and_host_never_mix_their_secrets_c01(
    tmp_path: Path,
) -> None:
    draw = random.Random(4)
    sessions = {f"s{i}": [*tokens(100, 48), *tokens(i, draw.randrange(90, 150))] for i in range(40)}
    expected: dict[str, list[int]] = {}
    with worker(None, num_blocks=1024) as parts:
        for name, prompt in sessions.items():
            expected[name] = run(parts, [request(name, prompt)]).ids[name, 0]
    seen = {"device": 0, "host": 0, "disk": 0}
    with worker(tmp_path / "kv", num_blocks=40, host_bytes=2 * MIB) as parts:
        for name, prompt in sessions.items():
            assert run(parts, [request(name, prompt)]).ids[name, 0] == expected[name]
        names = sorted(sessions)
        draw.shuffle(names)
        for number, name in enumerate(names):
            # Short requests run beside each revisit.
            short = request(f"short{number}", tokens(1000 + number, 20), 6)
            answers = run(parts, [short, request(name, sessions[name])], to_idle=number % 3 == 0)
            assert answers.ids[name, 0] == expected[name], "another session's facts"
            cache = answers.cache(name)
            seen["device"] += cache.num_device_tokens
            seen["host"] += cache.num_host_tokens
            seen["disk"] += cache.num_disk_tokens
        load = parts.scheduler.load()
        total = load.num_hit_tokens + load.num_miss_tokens
    assert all(seen.values()), seen
    revisits = sum(len(prompt) - 1 for prompt in sessions.values())
    assert sum(seen.values()) >= 0.9 * revisits
    assert total > 0


class FailingPuts(StoreAround):
    """Record number ``bad`` (from 0, in the order of first tries) is refused at every try."""

    def __init__(self, inner: RecordStore, bad: int) -> None:
        super().__init__(inner)
        self._bad = bad
        self._tried: list[PrefixKey] = []

    def put(self, meta: RecordMeta, data: Sequence[memoryview], retention: Retention) -> bool:
        if meta.key not in self._tried:
            self._tried.append(meta.key)
        if self._tried.index(meta.key) == self._bad:
            return False
        return super().put(meta, data, retention)


@pytest.mark.parametrize("first_bad", [0, 2, 9])
def test_a_write_that_fails_is_a_miss_from_there_on_and_the_output_is_right_c02(
    tmp_path: Path, first_bad: int
) -> None:
    prompt = tokens(5, 200)
    expected = cold_ids(prompt)
    with worker(tmp_path / "kv", around=lambda store: FailingPuts(store, first_bad)) as parts:
        assert run(parts, [request("a", prompt)]).ids["a", 0] == expected
    with worker(tmp_path / "kv") as parts:
        again = run(parts, [request("a", prompt)])
        assert again.ids["a", 0] == expected
        assert again.cache("a").num_disk_tokens == first_bad * BLOCK
    with worker(tmp_path / "kv") as parts:  # what was missing is there now
        assert run(parts, [request("a", prompt)]).cache("a").num_disk_tokens == 199


class SlowReads(StoreAround):
    def read(self, meta: RecordMeta, into: Sequence[memoryview]) -> None:
        time.sleep(0.2)
        super().read(meta, into)


def test_a_slow_disk_is_dropped_in_favour_of_computing(tmp_path: Path) -> None:
    prompt = tokens(6, 400)
    with worker(tmp_path / "kv") as parts:
        expected = run(parts, [request("a", prompt)]).ids
    with worker(tmp_path / "kv", around=SlowReads) as parts:
        # So that the pace of computing is known: slower than a good disk, faster than this one.
        run(parts, [request("pace", tokens(7, 300))], slowness=100)
        again = run(parts, [request("a", prompt)], slowness=100)
        assert again.ids == expected
        assert again.cache("a").reason is MissReason.SLOW
        assert BLOCK <= again.cache("a").num_disk_tokens < 200
        load = parts.scheduler.load()
        assert load.num_dropped_loads == 1
        assert dict(load.misses)["slow"] == 1


class HungReads(StoreAround):
    """Does not answer until the test lets it."""

    def __init__(self, inner: RecordStore, release: threading.Event) -> None:
        super().__init__(inner)
        self._release = release

    def find(self, keys: Sequence[PrefixKey]) -> list[StoredRecord | None]:
        self._release.wait(20)
        return super().find(keys)


def test_a_disk_that_hangs_costs_one_bounded_wait(tmp_path: Path) -> None:
    prompt = tokens(8, 100)
    release = threading.Event()
    try:
        with worker(tmp_path / "kv", around=lambda store: HungReads(store, release)) as parts:
            answers = run(parts, [request("a", prompt)], to_idle=False)
            assert answers.cache("a").reason is MissReason.UNAVAILABLE
            release.set()
    finally:
        release.set()
    assert answers.ids["a", 0] == cold_ids(prompt)


@pytest.mark.parametrize("window", [16, 40])
def test_window_models_give_the_ids_of_a_cold_run_from_checkpoints_c13(
    tmp_path: Path, window: int
) -> None:
    model = f"toy:family=gemma3,window={window},layers=4"
    prompt = tokens(9, 150)
    with worker(tmp_path / "kv", model=model) as parts:
        first = run(parts, [request("a", prompt)])
    turn = [*prompt, *first.ids["a", 0], 7, 8, 9]
    other = [*prompt, 9, 9, 9]
    with worker(tmp_path / "kv", model=model) as parts:
        answers = run(parts, [request("turn", turn)])
        answers_other = run(parts, [request("other", other)])
        assert answers.cache("turn").num_disk_tokens == len(prompt) + NUM_OUTPUT - 1
        assert answers_other.cache("other").num_hit_tokens == len(prompt)
        assert answers.cache("turn").num_replayed_tokens == 0
    assert answers.ids["turn", 0] == cold_ids(turn, model)
    assert answers_other.ids["other", 0] == cold_ids(other, model)


def test_replay_stores_no_window_and_computes_the_last_window_again_c13(tmp_path: Path) -> None:
    model = "toy:family=gemma3,window=16,layers=4"
    prompt = tokens(9, 150)
    with worker(tmp_path / "kv", model=model, window_kv="replay") as parts:
        run(parts, [request("a", prompt)])
    with worker(tmp_path / "kv", model=model, window_kv="replay") as parts:
        again = run(parts, [request("a", prompt)])
        assert again.cache("a").num_disk_tokens == 149
        assert again.cache("a").num_replayed_tokens == 16
        assert parts.scheduler.load().num_replayed_tokens == 16
    with worker(tmp_path / "kv", model=model) as parts:  # the other mode: another meaning of a hit
        assert run(parts, [request("a", prompt)]).cache("a").num_hit_tokens == 0
