"""split = single, over the real door: whatever fleet answers, the answer is the same.

The same random questions go to one worker that does both, to a split, and to two workers,
each with a small pool and many questions at once. Everything is compared: ids, logprobs,
texts, finishes, and what is charged for.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from journey_fleet import Answer, Question, Questions, Verdict, ask, ask_all, describe, judge
from journey_server import Served, serving

TOY = ("--model=toy", "--numerics=reference", "--block-tokens=16")
ROOMY = ("--num-blocks=512",)
NUM_BLOCKS = 48
TIGHT = (f"--num-blocks={NUM_BLOCKS}", "--max-step-tokens=96", "--max-mixed-prefill-tokens=64")
SPLIT = ("--prefill=1", "--decode=1")
TWO = ("--both=2",)
NUM_QUESTIONS = 60
LONG = [
    Question(
        path="/v1/completions",
        body={
            "prompt": [seed] * 20, "max_tokens": 250, "temperature": 0.9, "seed": seed,
            "ignore_eos": True, "logprobs": 0, "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    for seed in range(10)
]  # fmt: skip


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return Questions(5).some(NUM_QUESTIONS)


@pytest.fixture(scope="module")
def single(
    questions: list[Question], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Answer], list[Answer]]:
    """What one worker with room for everything answers, one after the other."""
    folder = tmp_path_factory.mktemp("single")
    with serving(folder, *TOY, *ROOMY, "--both=1", "--cache-dir=none") as served:
        answers = ask_all(served, [*questions, *LONG], at_once=1)
    for answer in answers:
        assert answer.is_whole, answer
    return answers[: len(questions)], answers[len(questions) :]


@pytest.fixture(scope="module")
def expected(single: tuple[list[Answer], list[Answer]]) -> list[Answer]:
    return single[0]


@pytest.fixture(scope="module", params=[SPLIT, TWO], ids=["split", "two"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Small pools, nothing on disk."""
    folder = tmp_path_factory.mktemp("fleet")
    with serving(folder, *TOY, *TIGHT, *request.param, "--cache-dir=none") as served:
        wait_until_complete(served)
        yield served
        assert "Traceback" not in served.log.read_text()


def wait_until_complete(served: Served, num_workers: int = 2) -> None:
    """Readiness does not wait for a second worker."""
    served.wait_until("all workers", lambda: len(loads(served)) == num_workers)


def loads(served: Served) -> list[dict[str, object]]:
    """Of the workers that are up and said so."""
    workers = json.loads(served.get("/pools")[1])["workers"]
    return [w["load"] for w in workers if w["state"] == "up" and w["load"] is not None]


def total(served: Served, *names: str) -> int:
    """Of all workers, and of all those counts."""
    found = [load[name] for load in loads(served) for name in names]
    assert all(isinstance(count, int) for count in found)
    return sum(count for count in found if isinstance(count, int))


def wait_until_all_is_free(served: Served) -> None:
    served.wait_until("idle", lambda: total(served, "num_held_blocks") == 0, 20)
    assert total(served, "num_free_blocks", "num_cached_blocks") == 2 * NUM_BLOCKS


def check(
    questions: Sequence[Question], answers: Sequence[Answer], expected: Sequence[Answer]
) -> None:
    wrong = [
        describe(question, answer, want)
        for question, answer, want in zip(questions, answers, expected, strict=True)
        if judge(answer, want) is not Verdict.RIGHT
    ]
    assert not wrong, f"{len(wrong)} of {len(questions)}\n" + "\n".join(wrong[:3])


def charged(answer: Answer, name: str) -> int:
    assert answer.usage is not None
    count = answer.usage[name]
    assert isinstance(count, int)
    return count


def prompt_tokens(served: Served) -> float:
    """As told to callers and to the metrics page."""
    return sum(
        served.metric(f'headwater_prompt_tokens_total{{source="{source}"}}')
        for source in ("hit", "miss")
    )


def test_split_is_single_over_random_traffic_in_a_small_pool_and_all_is_counted_once(
    fleet: Served, questions: list[Question], expected: list[Answer]
) -> None:
    before = total(fleet, "num_hit_tokens", "num_miss_tokens")
    told = prompt_tokens(fleet)
    output = fleet.metric("headwater_output_tokens_total")
    check(questions, ask_all(fleet, questions, at_once=12), expected)
    wait_until_all_is_free(fleet)
    num_prompt = sum(charged(answer, "prompt_tokens") for answer in expected)
    num_output = sum(charged(answer, "completion_tokens") for answer in expected)
    assert prompt_tokens(fleet) - told == num_prompt
    assert fleet.metric("headwater_output_tokens_total") - output == num_output
    # The workers' own counts: a prompt counts once, whoever computed it.
    assert total(fleet, "num_hit_tokens", "num_miss_tokens") - before == num_prompt


def test_callers_that_leave_in_the_middle_change_nothing_for_the_others_d01_e06(
    fleet: Served, questions: list[Question], expected: list[Answer]
) -> None:
    streamed: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}}
    leavers = [
        Question(path=q.path, body=q.body | streamed, leave_after=number % 5)
        for number, q in enumerate(questions)
    ]
    mixed: list[Question] = []
    wanted: list[Answer] = []
    for leaver, question, answer in zip(leavers, questions, expected, strict=True):
        mixed += [leaver, question]
        wanted += [answer, answer]
    check(mixed, ask_all(fleet, mixed, at_once=16), wanted)
    wait_until_all_is_free(fleet)


def test_e03_workers_that_give_way_to_outputs_longer_than_predicted_change_no_answer(
    fleet: Served, single: tuple[list[Answer], list[Answer]]
) -> None:
    short = Question(path="/v1/completions", body={"prompt": [1], "max_tokens": 1})
    ask_all(fleet, [short] * 150, at_once=16)  # so short is what the router expects from now on
    before = total(fleet, "num_preemptions")
    check(LONG, ask_all(fleet, LONG, at_once=len(LONG)), single[1])
    assert total(fleet, "num_preemptions") > before
    wait_until_all_is_free(fleet)


def test_d03_a_burst_of_fifty_that_leave_at_once_frees_every_block(
    fleet: Served, questions: list[Question], expected: list[Answer]
) -> None:
    long: dict[str, object] = {
        "prompt": [1] * 300, "max_tokens": 200, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    burst = [
        Question(path="/v1/completions", body=long | {"seed": seed}, leave_after=seed % 2)
        for seed in range(50)
    ]
    for answer in ask_all(fleet, burst, at_once=50):
        assert answer.broken is None
    check(questions[:8], ask_all(fleet, questions[:8]), expected[:8])
    wait_until_all_is_free(fleet)


def test_d04_a_prompt_over_the_limit_is_refused_before_any_worker_hears_of_it(
    fleet: Served,
) -> None:
    before = total(fleet, "num_hit_tokens", "num_miss_tokens", "num_steps")
    body: dict[str, object] = {"prompt": [1] * (16 * NUM_BLOCKS + 10), "max_tokens": 4}
    answer = ask(fleet, Question(path="/v1/completions", body=body | {"stream": True}))
    assert answer.status == 400
    assert answer.choices == {}
    assert total(fleet, "num_hit_tokens", "num_miss_tokens", "num_steps") == before


# The shared disk tier


def greedy(prompt: Sequence[int]) -> Question:
    body: dict[str, object] = {
        "prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    return Question(path="/v1/completions", body=body)


def hit_tokens(answer: Answer) -> int:
    return charged(answer, "prompt_cache_hit_tokens")


def pid_of(served: Served, flag: str) -> int:
    """Of the worker that was started with it."""
    (pid,) = [
        pid for pid in served.worker_pids()
        if flag in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    ]  # fmt: skip
    return pid


def kill(served: Served, flag: str) -> None:
    """Until the front knows of it."""
    os.kill(pid_of(served, flag), signal.SIGKILL)
    served.wait_until("its loss", lambda: len(loads(served)) < 2)


def test_what_one_worker_stored_the_other_finds_on_disk(
    tmp_path: Path, questions: list[Question], expected: list[Answer]
) -> None:
    prompt = [number * 7 % 256 for number in range(400)]
    flags = (*TOY, *TIGHT, *TWO, f"--cache-dir={tmp_path / 'kv'}")
    with serving(tmp_path, *flags) as served:
        wait_until_complete(served)
        first = ask(served, greedy(prompt))
        assert hit_tokens(first) == 0
        served.wait_until("storing", lambda: total(served, "num_queued_stores") == 0)
        (index,) = [index for index, load in enumerate(loads(served)) if load["num_steps"]]
        kill(served, f"--worker-id=both-{index}")
        again = ask(served, greedy(prompt))
        assert hit_tokens(again) == 399
        assert judge(again, first) is Verdict.RIGHT
        assert served.metric('headwater_cache_hit_tokens_total{tier="disk"}') == 399
        check(questions, ask_all(served, questions, at_once=12), expected)


def test_a_split_finds_on_disk_what_workers_that_are_gone_had(
    tmp_path: Path, questions: list[Question], expected: list[Answer]
) -> None:
    prompt = [number * 7 % 256 for number in range(400)]
    flags = (*TOY, *TIGHT, *SPLIT, f"--cache-dir={tmp_path / 'kv'}", "--restart-backoff-s=0.05")
    with serving(tmp_path, *flags) as served:
        first = ask(served, greedy(prompt))
        for role in ("prefill", "decode"):
            served.wait_until("storing", lambda: total(served, "num_queued_stores") == 0)
            kill(served, f"--role={role}")
            wait_until_complete(served)
            again = ask(served, greedy(prompt))
            assert judge(again, first) is Verdict.RIGHT
            assert hit_tokens(again) >= 384, "at least the whole blocks"
            longer = ask(served, greedy([*prompt, 1, 2, 3]))
            assert hit_tokens(longer) >= 384
        check(questions, ask_all(served, questions, at_once=12), expected)
        wait_until_all_is_free(served)
