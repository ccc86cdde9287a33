"""KV that outlives its process: real servers on one folder, restarted, side by side, killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
from journey_server import Served, serving, start

TOY = ("--model=toy", "--numerics=reference", "--num-blocks=256")


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(num_tokens)]


def ask(served: Served, tokens: object, max_tokens: int = 12) -> tuple[str, int]:
    """Text, and how many prompt tokens were a hit."""
    status, body = served.post(
        "/v1/completions",
        {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
    )
    assert status == 200, body
    choices, usage = body["choices"], body["usage"]
    assert isinstance(choices, list)
    assert isinstance(usage, dict)
    return choices[0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_restarted_server_and_one_beside_it_hit_what_was_stored_c04_c06_c07(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    flags = (*TOY, f"--cache-dir={tmp_path / 'kv'}")
    with serving(folders[0], *flags) as served:
        first = ask(served, prompt(1, 200))
        assert first[1] == 0
        # Ended at once: what the last request left is stored on the way out.
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    with serving(folders[0], *flags) as served:
        assert ask(served, prompt(1, 200)) == (first[0], 199)
        with serving(folders[1], *flags) as other:
            assert ask(other, prompt(1, 200)) == (first[0], 199)
            third = ask(other, prompt(2, 150))
            assert other.metric('headwater_cache_hit_tokens_total{tier="disk"}') == 199
            # Nobody tells it: it looks.
            other.wait_until(
                "storing", lambda: other.metric("headwater_cache_queued_stores") == 0, 20
            )
            assert ask(served, prompt(2, 150)) == (third[0], 149)
            text = served.log.read_text() + other.log.read_text()
    assert "disk kv:" in text
    assert "room for" in text, "the plan is printed at the start (K07)"
    assert "Traceback" not in text


def test_a_worker_killed_while_it_writes_leaves_only_whole_records_c04(tmp_path: Path) -> None:
    prompts = [prompt(seed, 300) for seed in range(8)]
    (tmp_path / "cold").mkdir()
    with serving(tmp_path / "cold", *TOY, "--cache-dir=none") as served:
        expected = [ask(served, tokens)[0] for tokens in prompts]
    with serving(tmp_path, *TOY) as served:
        for crowd in (prompts[:4], prompts[4:]):
            (worker,) = served.worker_pids()
            before = num_misses(served)
            thread = threading.Thread(target=ask_all, args=(served, crowd))
            thread.start()
            # The first prompt is done and on its way to the disk, the others are computed.
            served.wait_until("an answer", lambda n=before: num_misses(served) > n, 20)
            os.kill(worker, signal.SIGKILL)
            served.wait_until("another worker", lambda old=worker: is_replaced(served, old))
            thread.join(timeout=60)
            assert not thread.is_alive()
        answers = [ask(served, tokens) for tokens in prompts]
        assert [text for text, _ in answers] == expected
    with serving(tmp_path, *TOY) as served:
        again = [ask(served, tokens) for tokens in prompts]
        assert [text for text, _ in again] == expected
        assert again[0][1] == 299
        assert "Traceback" not in served.log.read_text()


def ask_all(served: Served, prompts: list[list[int]]) -> None:
    """Whatever comes of it."""
    for tokens in prompts:
        served.post("/v1/completions", {"prompt": tokens, "max_tokens": 1})


def num_misses(served: Served) -> float:
    return served.metric('headwater_prompt_tokens_total{source="miss"}')


def is_replaced(served: Served, old: int) -> bool:
    pids = served.worker_pids()
    return len(pids) == 1 and old not in pids and served.get("/health/ready")[0] == 200


def test_the_next_turn_with_a_real_model_hits_to_the_last_token_after_a_restart(
    tmp_path: Path,
) -> None:
    history = [{"role": "user", "content": "Name three rivers of Europe, with one fact each."}]
    flags = ("--model=smollm2",)

    def chat(served: Served, messages: object) -> tuple[str, int, int]:
        status, body = served.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": 48, "temperature": 0}
        )
        assert status == 200, body
        choices, usage = body["choices"], body["usage"]
        assert isinstance(choices, list)
        assert isinstance(usage, dict)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return choices[0]["message"]["content"], usage["prompt_tokens"], cached

    with serving(tmp_path, *flags) as served:
        text, num_first, cached = chat(served, history)
        assert cached == 0
        turn = [
            *history,
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And one of Asia."},
        ]
        # Fast kernels round a hit's few tokens otherwise than the same tokens in a long
        # chunk, so a hit of the disk is compared with the same hit of the device.
        again = chat(served, history)
        assert again[1:] == (num_first, num_first - 1)
    with serving(tmp_path, *flags) as served:
        assert chat(served, history) == again
        _, num_second, cached = chat(served, turn)
        # All of the first turn but the one token that had no KV, and its end.
        assert num_first + 40 < cached < num_second
        assert served.metric('headwater_cache_hit_tokens_total{tier="disk"}') > num_first


@pytest.mark.parametrize("is_named", [False, True])
def test_a_folder_that_cannot_be_used_is_an_error_only_if_somebody_chose_it(
    tmp_path: Path, is_named: bool
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    if is_named:
        served = start(tmp_path, *TOY, f"--cache-dir={tmp_path / 'cache' / 'kv'}")
        assert served.process.wait(timeout=60) == 2
        log = served.log.read_text()
        assert "Traceback" not in log
        assert str(tmp_path / "cache") in log
        return
    with serving(tmp_path, *TOY) as served:
        ask(served, prompt(1, 40))
        assert "disk kv: off" in served.log.read_text()


def test_a_cap_that_the_disk_cannot_hold_is_refused_at_the_start_k07(tmp_path: Path) -> None:
    served = start(tmp_path, *TOY, "--cache-max-bytes=900TiB")
    assert served.process.wait(timeout=60) == 2
    log = served.log.read_text()
    assert "cache_max_bytes" in log
    assert "Traceback" not in log
