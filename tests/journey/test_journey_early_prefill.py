"""split = single where a prefill worker holds only the early part of the model: real processes.

The same random questions go to one worker that does both and to splits: with a prefill worker
that keeps the early layers only, with decoder replay off, with one of each kind beside each
other, and to one whose workers are killed. Everything is compared: ids, logprobs, texts,
finishes, and what is charged for.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from journey_fleet import Answer, Question, Questions, Verdict, ask, ask_all, describe, judge
from journey_server import LIMIT_S, Served, free_port, serving
from test_journey_fleet import joining

# A window of 16 and 2 x 6 tokens of drafts: late layers compute a prompt's last 28 tokens.
TOY = ("--model=toy:family=ced", "--numerics=reference", "--block-tokens=16", "--cache-dir=none")
NUM_BLOCKS = 48
TIGHT = (f"--num-blocks={NUM_BLOCKS}", "--max-step-tokens=96", "--max-mixed-prefill-tokens=64")
SPLIT = ("--prefill=1", "--decode=1")
TWO_OF_EACH = ("--prefill=2", "--decode=2", "--restart-backoff-s=0.05")
OFF = "--decoder-replay=off"
OTHER_MODEL = "--model=toy:family=ced,seed=1"
NUM_REPLAYED = 28
NUM_QUESTIONS = 30


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return Questions(11).some(NUM_QUESTIONS)


def answers_of_one(folder: Path, questions: Sequence[Question], *flags: str) -> list[Answer]:
    """What one worker with room for everything answers, one after the other."""
    with serving(folder, *TOY, *flags, "--num-blocks=512", "--both=1") as served:
        answers = ask_all(served, questions, at_once=1)
    for answer in answers:
        assert answer.is_whole, answer
    return answers


@pytest.fixture(scope="module")
def scored() -> list[Question]:
    """Whose prompt logprobs are asked for."""
    return [greedy(num_tokens, echo=True) for num_tokens in (20, 90, 150)]


@pytest.fixture(scope="module")
def single(
    questions: list[Question], scored: list[Question], tmp_path_factory: pytest.TempPathFactory
) -> list[Answer]:
    return answers_of_one(tmp_path_factory.mktemp("single"), [*questions, *scored])


@pytest.fixture(scope="module")
def expected(single: list[Answer]) -> list[Answer]:
    return single[:NUM_QUESTIONS]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("split"), *TOY, *TIGHT, *SPLIT) as served:
        wait_until_up(served, 2)
        yield served
        assert "Traceback" not in served.log.read_text()


def workers(served: Served) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(served.get("/pools")[1])["workers"]
    return [worker for worker in found if worker["state"] == "up" and worker["load"] is not None]


def wait_until_up(served: Served, num_workers: int) -> None:
    served.wait_until("all workers", lambda: len(workers(served)) == num_workers)


def loads(served: Served) -> list[dict[str, int]]:
    return [worker["load"] for worker in workers(served)]  # type: ignore[misc]


def wait_until_all_is_free(served: Served) -> None:
    served.wait_until("idle", lambda: not sum(load["num_held_blocks"] for load in loads(served)))
    for load in loads(served):
        assert load["num_free_blocks"] + load["num_cached_blocks"] == NUM_BLOCKS


def handoffs(served: Served) -> dict[str, int]:
    totals: dict[str, int] = json.loads(served.get("/pools")[1])["handoffs"]
    return totals


def check(
    questions: Sequence[Question], answers: Sequence[Answer], expected: Sequence[Answer]
) -> None:
    wrong = [
        describe(question, answer, want)
        for question, answer, want in zip(questions, answers, expected, strict=True)
        if judge(answer, want) is not Verdict.RIGHT
    ]
    assert not wrong, f"{len(wrong)} of {len(questions)}\n" + "\n".join(wrong[:3])


def greedy(num_tokens: int, **more: object) -> Question:
    body: dict[str, object] = {
        "prompt": [(7 * place + num_tokens) % 256 for place in range(num_tokens)],
        "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0,
    }  # fmt: skip
    return Question(path="/v1/completions", body=body | more)


# What it holds


def test_the_prefill_worker_keeps_less_of_the_model_and_all_say_how_much(split: Served) -> None:
    prefill, decode = sorted(workers(split), key=lambda worker: worker["role"] == "decode")
    assert (prefill["holds"], decode["holds"]) == ("early", "all")
    held, whole = prefill["weights_bytes"], decode["weights_bytes"]
    assert isinstance(held, int)
    assert isinstance(whole, int)
    assert prefill["saved_weights_bytes"] == whole - held
    assert decode["saved_weights_bytes"] == 0
    assert held < 0.6 * whole
    told = re.findall(
        r"a (\w+) worker: it holds ([\d.]+) MB of the model's ([\d.]+) MB of weights, ([\d.]+) MB",
        split.log.read_text(),
    )
    said = {role: [float(size) * 1e6 for size in sizes] for role, *sizes in told}
    assert said == {
        "prefill": pytest.approx([held, whole, whole - held], abs=5e4),
        "decode": pytest.approx([whole, whole, 0], abs=5e4),
    }


# split = single


def test_split_is_single_over_random_traffic_in_a_small_pool_and_all_is_counted_once(
    split: Served, questions: list[Question], expected: list[Answer]
) -> None:
    before = sum(load["num_hit_tokens"] + load["num_miss_tokens"] for load in loads(split))
    num_done = handoffs(split)["num_done"]
    check(questions, ask_all(split, questions, at_once=12), expected)
    wait_until_all_is_free(split)
    assert handoffs(split)["num_done"] > num_done
    after = sum(load["num_hit_tokens"] + load["num_miss_tokens"] for load in loads(split))
    usages = [answer.usage for answer in expected if answer.usage is not None]
    assert len(usages) == len(expected)
    assert after - before == sum(int(str(usage["prompt_tokens"])) for usage in usages)


def test_callers_that_leave_in_the_middle_change_nothing_for_the_others(
    split: Served, questions: list[Question], expected: list[Answer]
) -> None:
    streamed: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
    mixed: list[Question] = []
    wanted: list[Answer] = []
    for number, (question, answer) in enumerate(zip(questions, expected, strict=True)):
        body = question.body | streamed
        mixed += [Question(path=question.path, body=body, leave_after=number % 5), question]
        wanted += [answer, answer]
    check(mixed, ask_all(split, mixed, at_once=16), wanted)
    wait_until_all_is_free(split)


@pytest.mark.parametrize("num_tokens", [1, 27, 28, 43, 44, 45, 60, 200])
def test_decode_computes_what_late_layers_do_and_all_of_a_short_prompt(
    split: Served, num_tokens: int
) -> None:
    before = handoffs(split)
    assert ask(split, greedy(num_tokens)).is_whole
    num_handed = (num_tokens - NUM_REPLAYED) // 2 * 2
    if num_handed < 16:  # a block
        num_handed = 0
    wait_until_all_is_free(split)
    split.wait_until(
        "the report", lambda: handoffs(split)["num_done"] == before["num_done"] + bool(num_handed)
    )
    assert handoffs(split)["num_tokens"] - before["num_tokens"] == num_handed


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_by_who_has_all_layers(
    split: Served, scored: list[Question], single: list[Answer]
) -> None:
    before = handoffs(split)
    check(scored, ask_all(split, scored), single[NUM_QUESTIONS:])
    assert handoffs(split) == before


def test_split_is_single_with_decoder_replay_off_and_all_weights_are_loaded(
    tmp_path: Path, questions: list[Question]
) -> None:
    single, fleet = tmp_path / "single", tmp_path / "fleet"
    single.mkdir()
    fleet.mkdir()
    some = questions[:12]
    expected = answers_of_one(single, some, OFF)
    with serving(fleet, *TOY, *TIGHT, *SPLIT, OFF) as served:
        wait_until_up(served, 2)
        assert {worker["holds"] for worker in workers(served)} == {"all"}
        check(some, ask_all(served, some, at_once=12), expected)
        wait_until_all_is_free(served)
        assert handoffs(served)["num_done"] > 0


# Losses


def test_workers_that_are_killed_cost_no_answer_and_come_back_as_they_were(
    tmp_path: Path, questions: list[Question], expected: list[Answer]
) -> None:
    with serving(tmp_path, *TOY, *TIGHT, *TWO_OF_EACH) as served:
        wait_until_up(served, 4)
        answers: list[Answer] = []
        asking = threading.Thread(
            target=lambda: answers.extend(ask_all(served, questions, at_once=12))
        )
        asking.start()
        for role in ("prefill", "decode"):
            wait_for_handoffs(served, handoffs(served)["num_done"] + 2, asking)
            os.kill(pids_of(served, role)[0], signal.SIGKILL)
        asking.join()
        check(questions, answers, expected)
        wait_until_up(served, 4)
        wait_until_all_is_free(served)
        held = sorted((str(worker["role"]), str(worker["holds"])) for worker in workers(served))
        assert held == [("decode", "all")] * 2 + [("prefill", "early")] * 2
        assert json.loads(served.get("/pools")[1])["num_resumed"] > 0


def wait_for_handoffs(served: Served, num_done: int, asking: threading.Thread) -> None:
    served.wait_until(
        "traffic", lambda: handoffs(served)["num_done"] >= num_done or not asking.is_alive()
    )


def pids_of(served: Served, role: str) -> list[int]:
    return [pid for pid in served.worker_pids() if f"--role={role}" in words_of(pid)]


def words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


# Workers that join


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("0123456789abcdef" * 4)
    return path


def test_a_worker_that_differs_is_refused_and_one_with_all_weights_works_beside_the_other(
    tmp_path: Path, secret: Path, questions: list[Question], expected: list[Answer]
) -> None:
    port = free_port()
    flags = (f"--control-listen={port}", f"--secret-file={secret}")
    guest = (*TOY, *TIGHT, "--role=prefill")
    with serving(tmp_path, *TOY, *TIGHT, *SPLIT, *flags) as served:
        wait_until_up(served, 2)
        with joining(tmp_path, port, secret, *guest, OFF) as (misfit, log):
            assert misfit.wait(timeout=LIMIT_S) == 2
            # Without decoder replay the windows of late layers change hands, too.
            found = re.search(r"KV layout (\S+), the front serves (\S+);", log.read_text())
            assert found is not None
            assert [layout.count("window16:3x") for layout in found.groups()] == [2, 1]
        with joining(tmp_path, port, secret, *guest, OTHER_MODEL) as (misfit, log):
            assert misfit.wait(timeout=LIMIT_S) == 2
            assert re.search(r"model fingerprint \w+, the front serves \w+", log.read_text())
        assert len(workers(served)) == 2
        with joining(tmp_path, port, secret, *guest, "--prefill-weights=all"):
            wait_until_up(served, 3)
            held = sorted((str(w["role"]), str(w["holds"])) for w in workers(served))
            assert held == [("decode", "all"), ("prefill", "all"), ("prefill", "early")]
            # While the other one is away, it computes the prompts; then both do.
            os.kill(pids_of(served, "prefill")[0], signal.SIGKILL)
            served.wait_until("its loss", lambda: len(workers(served)) == 2)
            check(questions[:8], ask_all(served, questions[:8]), expected[:8])
            assert all(load["num_steps"] for load in loads(served))
            wait_until_up(served, 3)
            check(questions, ask_all(served, questions, at_once=12), expected)
            wait_until_all_is_free(served)
