"""Several real processes: workers that join, are refused, drain, die, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from journey_server import Served, children_of, free_port, is_alive, is_ready, serving

TOY = ("--model=toy", "--numerics=reference", "--num-blocks=64")
LONG = {"prompt": [1, 2, 3], "max_tokens": 800, "ignore_eos": True, "n": 8, "stream": True}
SECRET = "0123456789abcdef" * 4


def ask(served: Served, max_tokens: int = 8) -> tuple[int, dict[str, object]]:
    body = {
        "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0,
        "logprobs": 0,
    }  # fmt: skip
    return served.post("/v1/completions", body)


def text_of(answer: tuple[int, dict[str, object]]) -> object:
    status, body = answer
    assert status == 200, body
    choices = body["choices"]
    assert isinstance(choices, list)
    return choices[0]["logprobs"]["tokens"]


def log_of(served: Served) -> str:
    return served.log.read_text()


class Stream:
    """A long streamed answer; ``text`` is all of it once its connection has ended."""

    def __init__(self, served: Served) -> None:
        self._curl = subprocess.Popen(
            ["curl", "-sN", "-H", "Content-Type: application/json", "-d", json.dumps(LONG),
             f"{served.root}/v1/completions"],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._curl.stdout is not None
        self._text = self._curl.stdout.read(64)  # it runs
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._curl.stdout is not None
        self._text += self._curl.stdout.read()
        self._curl.stdout.close()
        self._curl.wait()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def events(self) -> list[str]:
        self._thread.join(timeout=60)
        assert self.is_over
        lines = self._text.decode().splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(SECRET)
    return path


@contextlib.contextmanager
def joining(
    folder: Path, port: int, secret: Path, *flags: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A worker started by hand, and its log."""
    log = folder / f"worker-{len(list(folder.glob('worker-*')))}.log"
    command = [
        sys.executable, "-m", "headwater.app.cli", "worker", f"--connect=tcp://127.0.0.1:{port}",
        f"--secret-file={secret}", "--restart-backoff-s=0.1",
        "--restart-backoff-max-s=0.5", *TOY, *flags,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder)},
        )
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)


# Drain (J03)


def test_j03_at_sigterm_running_streams_finish_and_new_requests_are_503(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, "--drain-s=60") as served:
        stream = Stream(served)
        served.process.send_signal(signal.SIGTERM)
        served.wait_until("not ready", lambda: served.get("/health/ready")[0] == 503)
        assert "draining" in served.get("/health/ready")[1]
        assert served.get("/health/live")[0] == 200
        status, body = ask(served)
        assert status == 503
        assert body["error"]["code"] == "not_ready"  # type: ignore[index]
        status, body = served.post(
            "/v1/messages",
            {"model": "toy", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]},
        )
        assert (status, body["type"]) == (503, "error")
        assert not stream.is_over, "the stream ended before anything was asked"
        assert stream.events[-1] == "[DONE]"
        assert served.process.wait(timeout=20) == 0
        assert list(tmp_path.glob("headwater-*")) == []


def test_j03_over_the_limit_a_stream_ends_with_an_error_and_the_exit_is_clean(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, *TOY, "--drain-s=0.2") as served:
        workers = served.worker_pids()
        stream = Stream(served)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(timeout=20) == 0
        assert "send the request again" in stream.events[-1]
        assert json.loads(stream.events[-1])["error"]["code"] == "not_ready"
        assert not any(is_alive(pid) for pid in workers)
        assert "Traceback" not in log_of(served)


def test_j03_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY, "--drain-s=3600") as served:
        workers = served.worker_pids()
        os.kill(workers[0], signal.SIGSTOP)  # stuck: an orderly end would wait for it
        served.process.send_signal(signal.SIGTERM)
        served.wait_until("an end begun", lambda: "ending" in log_of(served))
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=10) in (0, 130)
        served.wait_until("the workers' end", lambda: not any(is_alive(p) for p in workers))
        assert list(tmp_path.glob("headwater-*")) == []


# Fleets of one machine


def test_two_workers_answer_like_one_and_nothing_outlives_a_front_that_is_killed(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, *TOY, "--both=2") as served:
        served.wait_until("both", lambda: len(up(served)) == 2)
        assert len({str(text_of(ask(served))) for _ in range(4)}) == 1
        shown = subprocess.run(
            [sys.executable, "-m", "headwater.app.cli", "pools", "--url", served.root],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert str(up(served)[1]["worker_id"]) in shown.stdout
        workers = served.worker_pids()
        assert len(workers) == 2
        served.process.kill()
        served.process.wait()
        served.wait_until(
            "the workers' end", lambda: not any(is_alive(pid) for pid in workers), limit_s=15
        )
        assert list(tmp_path.glob("headwater-*")) == []


PROMPTS = [[1 + token % 200 for token in range(length)] for length in (3, 33, 100, 400)]


def answers_of(served: Served) -> list[object]:
    """Greedy and sampled, short and long, each twice: the second time is a hit."""
    found = []
    for prompt in PROMPTS * 2:
        for temperature in (0.0, 1.0):
            body = {
                "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "seed": 7, "n": 2,
                "temperature": temperature,
            }  # fmt: skip
            status, answer = served.post("/v1/completions", body)
            assert status == 200, answer
            found.append(answer["choices"])
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The answers of one worker that does it all."""
    with serving(tmp_path_factory.mktemp("one"), *TOY, "--cache-dir=none") as served:
        return answers_of(served)


def test_a_split_fleet_answers_like_one_worker_and_says_what_is_missing(
    tmp_path: Path, alone: list[object]
) -> None:
    with serving(tmp_path, *TOY, "--prefill=1", "--decode=1", "--cache-dir=none") as served:
        assert answers_of(served) == alone
        report = json.loads(served.get("/pools")[1])
        assert report["handoffs"]["num_done"] > 0
        assert report["handoffs"]["num_failed"] == 0
        prefiller = pid_of(served, "prefill")
        os.kill(prefiller, signal.SIGKILL)
        served.wait_until("not ready", lambda: served.get("/health/ready")[0] == 503)
        assert "prefill" in served.get("/health/ready")[1]
        served.wait_until("a new one", lambda: is_ready(served))
        assert answers_of(served) == alone


def test_workers_that_change_role_answer_like_one(tmp_path: Path, alone: list[object]) -> None:
    with serving(tmp_path, *TOY, "--both=2", "--elastic", "--cache-dir=none") as served:
        served.wait_until(
            "a division",
            lambda: {worker["acting"] for worker in pools(served)} == {"prefill", "decode"},
        )
        assert answers_of(served) == alone
        assert json.loads(served.get("/pools")[1])["handoffs"]["num_done"] > 0


# Workers that join


def test_a_front_serves_with_workers_that_join_and_refuses_the_others_by_name(
    tmp_path: Path, secret: Path
) -> None:
    port = free_port()
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(SECRET[::-1])
    with serving(tmp_path, *TOY, f"--control-listen={port}", f"--secret-file={secret}") as served:
        alone = text_of(ask(served))
        with joining(tmp_path, port, other) as (stranger, log):
            assert stranger.wait(timeout=60) == 2
            assert "same secret" in log.read_text()
        with joining(tmp_path, port, secret, "--block-tokens=64") as (misfit, log):
            assert misfit.wait(timeout=60) == 2
            assert "block64" in log.read_text()
            assert "block32" in log.read_text()
        served.wait_until("both refusals", lambda: "may not join" in log_of(served))
        assert "were refused: not the secret" in log_of(served)
        assert SECRET[:16] not in log_of(served)
        assert is_ready(served)
        with joining(tmp_path, port, secret) as (keeper, _):
            served.wait_until("a guest", lambda: len(pools(served)) == 2)
            os.kill(served.worker_pids()[0], signal.SIGKILL)
            served.wait_until("the guest alone", lambda: len(up(served)) == 1)
            assert text_of(ask(served)) == alone, "a guest computes what the host's worker does"
            keeper.send_signal(signal.SIGTERM)
            assert keeper.wait(timeout=20) == 0
            served.wait_until("no guest", lambda: len(pools(served)) == 1)


def test_workers_that_joined_hand_over_to_each_other(
    tmp_path: Path, secret: Path, alone: list[object]
) -> None:
    port = free_port()
    fleet = ("--both=0", f"--control-listen={port}", f"--secret-file={secret}")
    with (
        joining(tmp_path, port, secret, "--role=prefill", "--cache-dir=none"),
        joining(tmp_path, port, secret, "--role=decode", "--cache-dir=none") as (decoder, _),
        serving(tmp_path, *TOY, *fleet) as served,
    ):
        assert answers_of(served) == alone
        assert json.loads(served.get("/pools")[1])["handoffs"]["num_done"] > 0
        decoder.send_signal(signal.SIGTERM)
        served.wait_until("not ready", lambda: served.get("/health/ready")[0] == 503)
        assert "decode" in served.get("/health/ready")[1]


def test_a_worker_by_hand_outlives_its_crash_and_its_front_but_not_its_keeper(
    tmp_path: Path, secret: Path
) -> None:
    port = free_port()
    fleet = ("--both=0", f"--control-listen={port}", f"--secret-file={secret}")
    with joining(tmp_path, port, secret) as (keeper, _):
        with serving(tmp_path, *TOY, *fleet) as served:
            first = text_of(ask(served))
            kill_and_wait(served, children_of(keeper.pid)[0])
            served.wait_until("a loss", lambda: pools(served) == [])
            served.wait_until("another life", lambda: is_ready(served))
            assert text_of(ask(served)) == first
        with serving(tmp_path, *TOY, *fleet) as served:
            assert text_of(ask(served)) == first
            (worker,) = children_of(keeper.pid)
            keeper.kill()
            served.wait_until("the worker's end", lambda: not is_alive(worker), limit_s=15)
            served.wait_until("its loss", lambda: pools(served) == [], limit_s=15)
            assert served.get("/health/ready")[0] == 503


def pid_of(served: Served, role: str) -> int:
    for pid in served.worker_pids():
        if f"--role={role}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            return pid
    raise AssertionError(f"no {role} worker")


def kill_and_wait(served: Served, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    served.wait_until("its end", lambda: not is_alive(pid))


def pools(served: Served) -> list[dict[str, object]]:
    workers: list[dict[str, object]] = json.loads(served.get("/pools")[1])["workers"]
    return workers


def up(served: Served) -> list[dict[str, object]]:
    return [worker for worker in pools(served) if worker["state"] == "up"]
