"""Processes that die, files that are broken, ports that are taken: what the user sees."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from journey_server import Served, is_alive, serving, start

TOY = ("--model=toy", "--numerics=reference", "--num-blocks=64")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, *TOY) as made:
        yield made


def ask(served: Served, max_tokens: int = 4) -> tuple[int, dict[str, object]]:
    body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True}
    return served.post("/v1/completions", body)


def test_a_worker_that_is_killed_fails_its_requests_clearly_and_is_replaced(served: Served) -> None:
    (worker,) = served.worker_pids()
    answers: list[tuple[int, dict[str, object]]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(served, 1000)))
    thread.start()
    served.wait_until("work", lambda: served.num_held_blocks > 0)
    os.kill(worker, signal.SIGKILL)
    thread.join(timeout=10)
    assert not thread.is_alive(), "the request hangs"
    status, body = answers[0]
    assert status in (500, 503)
    assert "worker" in json.dumps(body)
    served.wait_until("a restart", lambda: served.get("/health/ready")[0] == 200)
    assert served.worker_pids() != [worker]
    assert ask(served)[0] == 200
    assert served.metric("headwater_worker_restarts_total") == 1


def test_j01_readiness_names_the_reason_while_the_worker_restarts(served: Served) -> None:
    os.kill(served.worker_pids()[0], signal.SIGKILL)
    seen: list[str] = []

    def not_ready() -> bool:
        status, body = served.get("/health/ready")
        seen.append(body)
        return status == 503

    served.wait_until("not ready", not_ready, limit_s=10)
    assert "worker process" in seen[-1]
    assert served.get("/health/live")[0] == 200


def test_no_worker_outlives_a_front_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY) as served:
        (worker,) = served.worker_pids()
        served.process.kill()
        served.process.wait()
        served.wait_until("the worker's end", lambda: not is_alive(worker), limit_s=10)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(tmp_path: Path, how: signal.Signals) -> None:
    with serving(tmp_path, *TOY) as served:
        (worker,) = served.worker_pids()
        served.process.send_signal(how)
        assert served.process.wait(timeout=20) in (0, -how, 128 + how, 130)
        served.wait_until("the worker's end", lambda: not is_alive(worker), limit_s=10)
        log = served.log.read_text()
        assert "Traceback" not in log
        assert list(tmp_path.glob("headwater-*")) == [], "a socket folder is left"


def test_a_signal_to_the_whole_group_lets_the_front_drain_with_its_worker(tmp_path: Path) -> None:
    with serving(tmp_path, *TOY) as served:
        answers: list[tuple[int, dict[str, object]]] = []
        thread = threading.Thread(target=lambda: answers.append(ask(served, 300)))
        thread.start()
        served.wait_until("work", lambda: served.num_held_blocks > 0)
        os.killpg(served.process.pid, signal.SIGTERM)
        thread.join(timeout=30)
        assert answers
        assert answers[0][0] == 200, "the running request was cut"
        assert served.process.wait(timeout=20) == 0
        assert "worker lost" not in served.log.read_text()


def ended(served: Served) -> tuple[int, str]:
    """Exit code and log; a start that fails on purpose has no trace of an accident in it."""
    code = served.process.wait(timeout=60)
    log = served.log.read_text()
    assert "Traceback" not in log
    assert "Fatal" not in log
    assert "signal" not in log
    return code, log


def test_a_model_that_is_not_there_ends_the_start_with_one_clear_line(tmp_path: Path) -> None:
    code, log = ended(start(tmp_path, "--model=smolm2"))
    assert code == 2
    assert "smollm2" in log, "the nearest name"


def test_a_truncated_gguf_ends_the_start_with_one_clear_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 100)
    code, log = ended(start(tmp_path, f"--model={broken}"))
    assert code == 2
    assert "broken.gguf" in log


def test_a_hub_model_without_a_network_ends_the_start_with_what_to_do(tmp_path: Path) -> None:
    code, log = ended(start(tmp_path, "--model=example/not-a-model-of-anyone"))
    assert code == 2
    assert "HF_HOME" in log


def test_a_port_in_use_is_said_before_any_model_loads(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        began_s = time.monotonic()
        code, log = ended(start(tmp_path, *TOY, f"--port={taken.getsockname()[1]}"))
        assert code == 2
        assert "cannot listen" in log
        assert time.monotonic() - began_s < 30


def test_a_stranger_host_without_a_key_is_refused_at_start(tmp_path: Path) -> None:
    code, log = ended(start(tmp_path, *TOY, "--host=0.0.0.0"))
    assert code == 2
    assert "--api-key-file" in log


def test_bad_input_of_every_kind_is_refused_and_the_next_request_is_served(served: Served) -> None:
    url = f"{served.root}/v1/completions"
    for data, kind in (
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json"),
        (b'{"prompt": "x", "temperature": 1e6}', "application/json"),
        (b'{"prompt": "x", "n": 1000000}', "application/json"),
        (b'{"prompt": [-1]}', "application/json"),
        (b'{"prompt": [99999999]}', "application/json"),
        (b'{"prompt": "' + b"x" * 200_000 + b'"}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
    ):
        command = [
            "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"Content-Type: {kind}",
            "--data-binary", "@-", url,
        ]  # fmt: skip
        status = subprocess.run(command, input=data, capture_output=True, check=True).stdout
        assert status[:1] == b"4", (data[:40], status)
        assert ask(served)[0] == 200
    served.wait_until("idle", lambda: served.num_held_blocks == 0, limit_s=10)
