"""Opt-in request records: private files, a hard cap, and never a request that fails for them."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from api_server import MODEL_ID, ScriptedGenerator, SteadyClock, byte_recipe, wait_until

from headwater.api.app import create_app
from headwater.api.config import ApiConfig
from headwater.api.recording import RequestRecorder
from headwater.core.errors import ConfigError
from headwater.recipe.advice import advise
from headwater.recipe.conversation import Conversation, Message
from headwater.recipe.record import BadRecord, RequestRecord, from_line

SECRET = "the plan is to leave at dawn"


def conversation(text: str = SECRET) -> Conversation:
    return Conversation(messages=(Message(role="user", content=text),))


def note(recorder: RequestRecorder, text: str = SECRET, tenant: str = "t") -> None:
    asked = conversation(text)
    recorder.record(
        byte_recipe().encode(asked), conversation=asked, tenant=tenant, model="m", dialect="chat"
    )


def records(path: Path) -> list[RequestRecord]:
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(from_line(line))
        except BadRecord:
            continue
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_records_are_private_and_hold_neither_text_nor_tenant(tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    recorder = RequestRecorder.open(log)
    note(recorder, tenant="a-key's-name")
    recorder.close()
    assert recorder.num_recorded == 1
    key = tmp_path / "requests.log.key"
    assert sorted(tmp_path.iterdir()) == [log, key]
    assert (mode(log), mode(key), key.stat().st_size) == (0o600, 0o600, 32)
    written = log.read_bytes()
    for word in [*SECRET.split(), "a-key's-name"]:
        assert len(word) < 4 or word.encode() not in written
    assert key.read_bytes() not in written


def test_records_before_and_after_a_restart_compare(tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    for _ in range(2):
        recorder = RequestRecorder.open(log)
        note(recorder)
        recorder.close()
    first, second = records(log)
    assert first.spans == second.spans
    (tmp_path / "requests.log.key").unlink()
    recorder = RequestRecorder.open(log)
    note(recorder)
    recorder.close()
    third = records(log)[-1]
    assert third.num_tokens == first.num_tokens
    assert third.tenant != first.tenant
    assert all(a.pieces != b.pieces for a, b in zip(third.spans, first.spans, strict=True))


def test_order_is_kept_and_all_threads_are_heard(tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    recorder = RequestRecorder.open(log)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: note(recorder, f"{n} {SECRET}"), range(60)))
    recorder.close()
    assert (recorder.num_recorded, recorder.num_dropped) == (60, 0)
    assert len(records(log)) == 60
    one = RequestRecorder.open(tmp_path / "one.log")
    for length in range(1, 40):
        note(one, "x" * length)
    one.close()
    sizes = [record.num_tokens for record in records(tmp_path / "one.log")]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 39


def test_c05_the_log_stays_under_its_cap_with_one_older_file(tmp_path: Path) -> None:
    log = tmp_path / "requests.log"
    key = os.urandom(32)
    cap = 20_000
    recorder = RequestRecorder(log, key, max_bytes=cap, max_queued=1000)
    for number in range(200):
        note(recorder, f"{number} {SECRET}")
    recorder.close()
    older = tmp_path / "requests.log.1"
    assert recorder.num_recorded == 200
    assert sorted(tmp_path.iterdir()) == [log, older]
    assert log.stat().st_size + older.stat().st_size <= cap
    assert mode(older) == 0o600
    kept = [*records(older), *records(log)]
    assert len(kept) < 200
    assert [r.time_s for r in kept] == sorted(r.time_s for r in kept)
    # A prompt whose line alone is longer is counted, and the next one is written.
    recorder = RequestRecorder(log, key, max_bytes=1000)
    note(recorder, SECRET * 200)
    note(recorder, "hi")
    recorder.close()
    assert (recorder.num_errors, recorder.num_recorded) == (1, 1)


def test_a_full_queue_drops_and_counts_and_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = threading.Event()
    real: Callable[[RequestRecorder, bytes], None] = RequestRecorder._append

    def slow_append(self: RequestRecorder, line: bytes) -> None:
        assert blocked.wait(10)
        real(self, line)

    monkeypatch.setattr(RequestRecorder, "_append", slow_append)
    recorder = RequestRecorder(tmp_path / "log", os.urandom(32), max_queued=3)
    for _ in range(20):
        note(recorder)
    assert recorder.num_dropped >= 16
    blocked.set()
    recorder.close()
    assert recorder.num_recorded + recorder.num_dropped == 20
    recorder.close()  # twice is fine


def test_c02_what_the_system_refuses_is_counted_and_later_records_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    recorder = RequestRecorder.open(folder / "log")
    for path in (folder / "log", folder / "log.key"):
        path.unlink()
    folder.rmdir()
    note(recorder)
    wait_until(lambda: recorder.num_errors == 1, 5.0)
    folder.mkdir()
    note(recorder)
    recorder.close()
    assert (recorder.num_errors, recorder.num_recorded) == (1, 1)
    assert len(records(folder / "log")) == 1
    assert "ENOENT" in caplog.text
    assert str(SECRET) not in caplog.text


def test_c04_a_line_that_a_crash_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    log = tmp_path / "log"
    recorder = RequestRecorder.open(log)
    note(recorder)
    recorder.close()
    whole = log.read_bytes()
    log.write_bytes(whole + whole[: len(whole) // 2])
    recorder = RequestRecorder.open(log)
    note(recorder)
    note(recorder)
    recorder.close()
    assert len(records(log)) == 3
    assert advise(records(log)).num_requests == 3


@pytest.mark.parametrize("damage", ["short", "readable", "link"])
def test_a_key_that_others_could_know_is_refused(tmp_path: Path, damage: str) -> None:
    log, key = tmp_path / "log", tmp_path / "log.key"
    RequestRecorder.open(log).close()
    match damage:
        case "short":
            key.write_bytes(b"short")
        case "readable":
            key.chmod(0o644)
        case _:
            key.rename(tmp_path / "elsewhere")
            key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        RequestRecorder.open(log)


def test_a_place_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_requests"):
        RequestRecorder.open(tmp_path / "no such folder" / "log")
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="cannot record"):
        RequestRecorder.open(tmp_path / "link")
    assert target.read_text() == "mine"


def test_two_servers_may_share_a_log_and_its_key(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ThreadPoolExecutor(8) as threads:
        recorders = list(threads.map(lambda _: RequestRecorder.open(log), range(8)))
    for recorder in recorders:
        note(recorder)
    for recorder in recorders:
        recorder.close()
    found = records(log)
    assert len(found) == 8
    assert len({record.tenant for record in found}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.key"]


async def test_every_dialect_is_recorded_with_its_spans(tmp_path: Path) -> None:
    recorder = RequestRecorder.open(tmp_path / "log")
    app = create_app(
        ScriptedGenerator(), byte_recipe(), ApiConfig(), SteadyClock(), recorder=recorder
    )
    messages = [{"role": "user", "content": SECRET}]
    calls: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/messages": {"messages": messages, "max_tokens": 5},
        "/v1/responses": {"input": SECRET},
        "/v1/completions": {"prompt": [SECRET, "another"]},
    }
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for path, body in calls.items():
            response = await client.post(path, json={"model": MODEL_ID, **body})
            assert response.status_code == 200, response.text
        refused = await client.post("/v1/chat/completions", json={"messages": []})
        assert refused.status_code == 400
    recorder.close()
    found = records(tmp_path / "log")
    assert len({record.dialect for record in found}) == 4
    assert len(found) == 5
    assert {record.model for record in found} == {MODEL_ID}
    kinds = [{span.kind for span in record.spans} for record in found]
    assert kinds == [{"format", "user"}] * 3 + [{"text"}] * 2
    # One conversation through three dialects is one prompt.
    assert found[0].spans == found[1].spans == found[2].spans
