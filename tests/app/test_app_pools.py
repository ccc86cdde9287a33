"""``headwater pools``: what an operator sees of a fleet, from two looks at its front."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from headwater.api.pools import PoolsBody
from headwater.app.cli import main
from headwater.core.control import WorkerLoad
from headwater.core.fleet import Holding, Role
from headwater.core.ports import BucketStatus, HandoffTotals, WorkerState, WorkerStatus

LOAD = WorkerLoad(
    num_waiting=3, num_prefilling=1, num_decoding=4, num_free_blocks=5, num_cached_blocks=5,
    num_held_blocks=10, num_steps=6, num_preemptions=0, num_recomputed_tokens=0,
    num_hit_tokens=7, num_miss_tokens=8, num_output_tokens=9,
)  # fmt: skip
BUSY = PoolsBody(
    ready=True,
    reason="ready",
    num_in_flight=9,
    num_resumed=2,
    workers=(
        WorkerStatus(
            worker_id="prefill-0", role=Role.PREFILL, state=WorkerState.UP, load=LOAD,
            num_in_flight=5, queue_s=1.5, up_s=10.0, prefill_s=6.0,
        ),
        WorkerStatus(
            worker_id="decode-0", role=Role.DECODE, state=WorkerState.UP, up_s=10.0, decode_s=2.0
        ),
    ),
    buckets=(
        BucketStatus(max_miss_tokens=2048, num_waiting=2, queue_s=0.25, oldest_s=0.5),
        BucketStatus(max_miss_tokens=None, num_waiting=0, queue_s=0.0, oldest_s=0.0),
    ),
    handoffs=HandoffTotals(num_done=4, num_failed=1, num_tokens=7200),
)  # fmt: skip
LATER = replace(
    BUSY,
    workers=(
        replace(BUSY.workers[0], up_s=11.0, prefill_s=6.5),
        replace(BUSY.workers[1], up_s=11.0, decode_s=2.1),
    ),
)


@contextmanager
def answering(*bodies: bytes, status: int = 200) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A front whose looks are ``bodies``, one after another; and what was asked of it."""
    asked: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = bodies[min(len(asked), len(bodies) - 1)]
            asked.append((self.path, self.headers.get("Authorization", "")))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_two_looks_tell_what_was_done_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(msgspec.json.encode(BUSY), msgspec.json.encode(LATER)) as (url, asked):
        assert main(["pools", "--url", url, "--over", "0.01", "--json", "--api-key", "k"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert asked == [("/pools", "Bearer k")] * 2
    uses = {use["role"]: use for use in found["balance"]["pools"]}
    assert uses["prefill"]["utilisation"] == pytest.approx(0.5)
    assert uses["decode"]["utilisation"] == pytest.approx(0.1)
    assert found["balance"]["queue_s"] == 0.25
    assert found["now"]["workers"][0]["load"]["num_waiting"] == 3


def test_a_worker_that_holds_a_part_of_its_model_is_shown_as_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefill = replace(
        BUSY.workers[0], holds=Holding.EARLY, weights_bytes=12 << 20, saved_weights_bytes=11 << 20
    )
    decode = replace(BUSY.workers[1], weights_bytes=23 << 20)
    body = replace(BUSY, workers=(prefill, decode))
    with answering(msgspec.json.encode(body)) as (url, _):
        assert main(["pools", "--url", url, "--over", "0"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[3:] for row in rows if row and row[0] in ("prefill-0", "decode-0")}
    assert shown["prefill-0"][:2] == ["12/23", "5"]
    assert shown["decode-0"][:2] == ["23", "0"]


def test_one_look_is_all_since_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(msgspec.json.encode(BUSY)) as (url, asked):
        assert main(["pools", "--url", url, "--over", "0"]) == 0
    shown = capsys.readouterr().out
    assert len(asked) == 1
    for text in ("prefill-0", "decode-0", "60%", "20%", "< 2048", "the rest", "50%", "0.25"):
        assert text in shown, text
    # (6 done + 1.5 + 0.25 queued) of 9.75 s are prefill
    assert "79% of the time for prompts: prefill : decode = 1 : 1" in shown
    assert "4 handoffs done, 1 failed, 7200 tokens" in " ".join(shown.split())


def test_a_fleet_that_is_not_ready_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    down = replace(BUSY.workers[1], state=WorkerState.DOWN, reason="restarting: exit code 3")
    body = replace(
        BUSY, ready=False, reason="no decode worker is up", workers=(BUSY.workers[0], down)
    )
    with answering(msgspec.json.encode(body)) as (url, _):
        assert main(["pools", "--url", url, "--over", "0"]) == 1
    shown = capsys.readouterr().out
    assert "not ready: no decode worker is up" in shown
    assert "decode-0 is down: restarting: exit code 3" in shown


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{}", 401, "--api-key"),
        (b"{}", 404, "is it a Headwater"),
        (b'{"ready": 1}', 200, "another version"),
        (b"<html>", 200, "another version"),
    ],
)
def test_a_server_of_another_kind_is_one_line(
    body: bytes, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(body, status=status) as (url, _):
        assert main(["pools", "--url", url]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err


def test_no_server_and_a_wrong_time_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b"{}") as (url, _):
        pass
    assert main(["pools", "--url", url]) == 2
    assert "no server answers" in capsys.readouterr().err
    assert main(["pools", "--over", "nan"]) == 2
    assert "--over" in capsys.readouterr().err
