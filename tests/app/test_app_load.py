"""The load generator against a scripted server: what is timed, counted and reported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from app_fakes import FakeServer, Script

from headwater.app.bench import percentile, report, run, summarize
from headwater.app.completions import ReportedUsage
from headwater.app.load import LoadOptions, Recorder, Sample, run_load
from headwater.app.prompts import FIRST_ID, PromptOptions, make_prompt
from headwater.app.target import Target
from headwater.core.errors import ConfigError


def measure(options: LoadOptions) -> Recorder:
    recorder = Recorder()
    asyncio.run(run_load(options, recorder))
    return recorder


def options_for(server: FakeServer, **values: object) -> LoadOptions:
    defaults: dict[str, object] = {
        "target": Target(base_url=server.url, timeout_s=10),
        "num_requests": 3,
        "num_warmup": 0,
        "num_input_tokens": 8,
    }
    return LoadOptions(**{**defaults, **values})  # type: ignore[arg-type]


def test_ttft_is_the_first_chunk_with_content_and_itl_the_gaps_between_chunks() -> None:
    script = Script(chunks=("a", "b", "c"), pauses_s=(0.2, 0.1, 0.1))
    with FakeServer(script) as server:
        (sample,) = measure(options_for(server, num_requests=1)).samples
    assert sample.ok
    assert sample.ttft_s is not None
    # The role-only event and the comment come at once and are not content.
    assert sample.ttft_s >= 0.2
    assert len(sample.gaps_s) == 2
    assert all(gap >= 0.08 for gap in sample.gaps_s)
    assert sample.end_s - sample.start_s >= 0.4


def test_tokens_are_the_servers_count_and_chunks_only_without_one() -> None:
    with FakeServer(Script(), Script(usage=None)) as server:
        recorder = measure(options_for(server, num_requests=2, concurrency=1))
    assert [sample.num_output_tokens for sample in recorder.samples] == [5, 2]
    summary = summarize(recorder.samples, recorder.wall_s)
    assert summary.tokens_counted_by == "chunks"
    assert summary.num_input_tokens is None  # unknown for one of the two, so unknown


def test_concurrency_is_reached_and_never_exceeded() -> None:
    with FakeServer(Script(pauses_s=(0.05,))) as server:
        recorder = measure(options_for(server, num_requests=9, concurrency=3))
        assert server.max_in_flight == 3
    assert len(recorder.samples) == 9


def test_a_rate_starts_requests_without_waiting_for_answers() -> None:
    with FakeServer(Script(pauses_s=(0.3,))) as server:
        recorder = measure(options_for(server, num_requests=6, rate_per_s=200.0))
        assert server.max_in_flight > 1
    starts = sorted(sample.start_s for sample in recorder.samples)
    assert starts[-1] < 0.3


def test_warm_up_requests_are_sent_but_not_measured_and_not_repeated() -> None:
    with FakeServer() as server:
        recorder = measure(options_for(server, num_warmup=2))
        bodies = [json.dumps(body) for _, body in server.requests]
    assert recorder.num_warmed_up == 2
    assert len(recorder.samples) == 3
    assert len(set(bodies)) == len(bodies) == 5


def test_each_kind_of_failure_is_counted_by_its_name() -> None:
    scripts = (
        Script(),
        Script(status=429, error="queue is full"),
        Script(error="worker lost"),
        Script(finish=None),
        Script(chunks=()),
    )
    with FakeServer(*scripts) as server:
        recorder = measure(options_for(server, num_requests=5, concurrency=1))
    summary = summarize(recorder.samples, recorder.wall_s)
    assert summary.num_ok == 1
    assert summary.errors == {
        "HTTP 429": 1, "error in stream": 1, "cut short": 1, "no content": 1,
    }  # fmt: skip
    assert summary.num_output_tokens == 5
    assert "queue is full" in recorder.samples[1].error_message


def test_a_server_that_is_not_there_is_said_clearly(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        url = server.url
    options = LoadOptions(target=Target(base_url=url, model="m"), num_requests=1, num_warmup=0)
    assert run(options, None) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "no server answers at" in shown
    assert "headwater serve" in shown


def test_completions_take_token_ids_and_chat_takes_messages() -> None:
    with FakeServer() as server:
        measure(options_for(server, num_requests=1))
        measure(options_for(server, num_requests=1, endpoint="completions", prompt_kind="ids"))
        (chat_path, chat), (ids_path, ids) = server.requests
    assert chat_path == "/v1/chat/completions"
    assert chat["messages"]
    assert chat["ignore_eos"] is True
    assert ids_path == "/v1/completions"
    prompt = ids["prompt"]
    assert isinstance(prompt, list)
    assert len(prompt) == 8


def test_ignore_eos_is_left_out_when_switched_off() -> None:
    with FakeServer() as server:
        measure(options_for(server, num_requests=1, ignore_end=False))
        (_, body) = server.requests[0]
    assert "ignore_eos" not in body


def test_the_key_is_sent_and_in_no_report() -> None:
    with FakeServer() as server:
        target = Target(base_url=server.url, api_key="sk-marker")
        options = options_for(server, target=target)
        recorder = measure(options)
        assert server.headers[0]["Authorization"] == "Bearer sk-marker"
    assert "sk-marker" not in json.dumps(report(options, recorder, complete=True))


def test_the_json_file_holds_options_and_summary(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with FakeServer() as server:
        assert run(options_for(server), path) == 0
    found = json.loads(path.read_text())
    assert found["complete"] is True
    assert found["options"]["target"]["model"] == "fake-model"
    assert found["summary"]["num_ok"] == 3
    assert set(found["summary"]["ttft_s"]["percentiles"]) == {"p50", "p90", "p95", "p99"}


def test_breaking_off_keeps_what_was_measured() -> None:
    async def broken_off(options: LoadOptions, recorder: Recorder) -> None:
        seen = asyncio.Event()
        running = asyncio.create_task(run_load(options, recorder, on_change=seen.set))
        await seen.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    recorder = Recorder()
    scripts = (Script(), Script(pauses_s=(0.5,)))
    with FakeServer(*scripts) as server:
        asyncio.run(broken_off(options_for(server, concurrency=1), recorder))
    assert len(recorder.samples) == 1
    assert recorder.num_started == 2
    assert recorder.wall_s > 0


def test_prompts_depend_on_the_seed_alone_and_share_their_prefix() -> None:
    options = PromptOptions(kind="ids", num_tokens=40, shared=0.25, vocab_size=5000, seed=3)
    first, again, other = make_prompt(options, 0), make_prompt(options, 0), make_prompt(options, 1)
    assert first == again
    assert first[:10] == other[:10]
    assert first[10:] != other[10:]
    assert all(isinstance(token, int) and FIRST_ID <= token < 5000 for token in first)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"concurrency": 0}, "concurrency"),
        ({"rate_per_s": 0.0}, "rate"),
        ({"shared_prefix": 1.5}, "shared prefix"),
        ({"prompt_kind": "ids"}, "completions"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LoadOptions(target=Target(base_url="http://127.0.0.1:1/v1"), **values)  # type: ignore[arg-type]


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 50) == 3.0
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([7.0], 99) == 7.0


def test_a_run_without_answers_has_no_made_up_numbers() -> None:
    failed = Sample(
        start_s=0, end_s=1, chunk_times_s=(), usage=ReportedUsage(), error_kind="timeout"
    )
    summary = summarize([failed], 1.0)
    assert summary.num_ok == 0
    assert summary.ttft_s is None
    assert summary.output_tokens_per_s == 0
