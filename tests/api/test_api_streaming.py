"""Streams and whole answers: one state machine, so the same text, reasons and usage."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from api_server import (
    CONTEXT_TOKENS,
    MODEL_ID,
    Script,
    ScriptedGenerator,
    Served,
    chunks_of,
    error_of,
    frames_of,
    say,
    say_then_raise,
    serving,
    wait_forever,
    wait_until,
)

from headwater.api.config import ApiConfig
from headwater.core.errors import EngineFault, NotReady, Overloaded, PromptTooLong, WorkerLost
from headwater.core.request import FinishReason, Request, SequenceOutput


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ApiConfig(keepalive_s=0.05)) as running:
        yield running


def streamed_choice(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, str]:
    """Text and finish reason that a client would put together for one choice."""
    text, finish = "", []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if choice["finish_reason"] is not None:
                finish.append(choice["finish_reason"])
    assert len(finish) == 1
    return text, finish[0]


def both_ways(served: Served, **fields: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole = served.chat(**fields)
    assert whole.status_code == 200, whole.text
    stream = served.chat(**fields, stream=True, stream_options={"include_usage": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    return whole.json(), chunks_of(stream.text)


@pytest.mark.parametrize(
    ("script", "fields", "text", "finish"),
    [
        (say("hello"), {}, "hello", "stop"),
        (say("hello"), {"max_tokens": 3}, "hel", "length"),
        (say("alpha beta gamma delta"), {"stop": ["beta gamma"]}, "alpha ", "stop"),
        (say("alpha beta gamma delta", step_tokens=7), {"stop": "beta gamma"}, "alpha ", "stop"),
        (say(""), {}, "", "stop"),
        (say("hello"), {"max_completion_tokens": 0}, "", "length"),
    ],
)
def test_a16_stream_and_whole_answer_agree_on_text_finish_reason_and_usage(
    served: Served, script: Script, fields: dict[str, object], text: str, finish: str
) -> None:
    served.generator.play(script)
    whole, chunks = both_ways(served, **fields)
    choice = whole["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, finish)
    assert streamed_choice(chunks) == (text, finish)
    assert chunks[-1]["usage"] == whole["usage"]
    assert "tool_calls" not in choice["message"]


def test_all_chunks_carry_one_id_and_the_first_one_the_role(served: Served) -> None:
    served.generator.play(say("hey"))
    _, chunks = both_ways(served)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["delta"] == {}


@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}])
def test_a15_without_include_usage_no_chunk_has_usage_or_empty_choices(
    served: Served, options: object
) -> None:
    served.generator.play(say("hello"))
    fields: dict[str, object] = {} if options == "absent" else {"stream_options": options}
    for answer in (served.chat(stream=True, **fields), served.complete(stream=True, **fields)):
        for chunk in chunks_of(answer.text):
            assert chunk["choices"]
            assert "usage" not in chunk


def test_a15_include_usage_adds_one_last_chunk_with_usage_and_no_choices(served: Served) -> None:
    served.generator.play(say("hello", hit=2))
    options = {"include_usage": True}
    answers = (
        served.chat(stream=True, stream_options=options),
        served.complete(stream=True, stream_options=options),
    )
    for answer, request in zip(answers, served.generator.requests, strict=True):
        *others, last = chunks_of(answer.text)
        assert all(chunk["choices"] and chunk["usage"] is None for chunk in others)
        assert last["choices"] == []
        usage = last["usage"]
        assert usage["completion_tokens"] == 5
        assert usage["prompt_tokens"] == request.num_prompt_tokens
        assert usage["total_tokens"] == usage["prompt_tokens"] + 5
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2
        assert usage["prompt_cache_hit_tokens"] == 2
        assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 2


@pytest.mark.parametrize("text", ["😀", "👨‍👩‍👧", "漢字かな", "é😀é"])
def test_a12_characters_of_several_bytes_arrive_whole_one_token_per_step(
    served: Served, text: str
) -> None:
    served.generator.play(say(text))
    whole, chunks = both_ways(served)
    assert whole["choices"][0]["message"]["content"] == text
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert "\ufffd" not in choice["delta"].get("content", "")
    assert streamed_choice(chunks)[0] == text


def test_a12_an_output_that_ends_inside_a_character_shows_one_broken_mark_at_the_end(
    served: Served,
) -> None:
    served.generator.play(say("ab😀"))
    whole, chunks = both_ways(served, max_tokens=4)
    assert whole["choices"][0]["message"]["content"] == "ab\ufffd"
    assert streamed_choice(chunks) == ("ab\ufffd", "length")


def test_several_choices_keep_their_own_text_and_count_the_prompt_once(served: Served) -> None:
    served.generator.play(say("one", "two", "three"))
    whole, chunks = both_ways(served, n=3)
    assert [c["message"]["content"] for c in whole["choices"]] == ["one", "two", "three"]
    assert [streamed_choice(chunks, i)[0] for i in range(3)] == ["one", "two", "three"]
    num_prompt_tokens = len(served.generator.requests[-1].prompt_tokens)
    assert whole["usage"]["prompt_tokens"] == num_prompt_tokens
    assert whole["usage"]["completion_tokens"] == 11
    assert chunks[-1]["usage"] == whole["usage"]


def test_several_prompts_are_answered_in_order_of_prompt_then_choice(served: Served) -> None:
    async def echo_first_token(request: Request) -> AsyncIterator[SequenceOutput]:
        letter = chr(request.prompt_tokens[-1])
        async for output in say(letter + "0", letter + "1")(request):
            yield output

    served.generator.play(echo_first_token)
    whole = served.complete(["xa", "xb"], n=2).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]
    chunks = chunks_of(served.complete(["xa", "xb"], n=2, stream=True).text)
    assert [streamed_choice(chunks, i)[0] for i in range(4)] == ["a0", "a1", "b0", "b1"]
    assert len({request.request_id for request in served.generator.requests}) == 4


def test_a_stop_string_ends_its_choice_at_the_worker_while_others_go_on(served: Served) -> None:
    served.generator.play(say("aaXbb", "cccccc"))
    whole = served.chat(n=2, stop=["X"]).json()
    assert [c["message"]["content"] for c in whole["choices"]] == ["aa", "cccccc"]
    assert [c["finish_reason"] for c in whole["choices"]] == ["stop", "stop"]
    assert served.generator.aborted == [(served.generator.requests[0].request_id, 0)]
    # The token that completed the stop string was computed for the caller; later ones were not.
    assert whole["usage"]["completion_tokens"] == 3 + 6


def test_a07_headers_come_early_and_keepalives_bridge_a_long_prefill(served: Served) -> None:
    served.generator.play(say("done", delay_s=0.2, step_tokens=4))
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        with (
            served.client() as client,
            client.stream("POST", path, json={"stream": True, **prompt}) as response,
        ):
            lines = response.iter_lines()
            assert next(lines) == ": keepalive"
            text = "\n".join([": keepalive", *lines, ""])
        assert text.count(": keepalive") >= 2
        assert streamed_choice(chunks_of(text))[0] == "done"


def too_long(request: Request) -> AsyncIterator[SequenceOutput]:
    raise PromptTooLong(request.num_prompt_tokens, 99)


def busy(_: Request) -> AsyncIterator[SequenceOutput]:
    raise Overloaded("8 sequences wait; that is the limit", retry_after_s=2.5)


def starting(_: Request) -> AsyncIterator[SequenceOutput]:
    raise NotReady("the worker is restarting", retry_after_s=3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "complete"])
def test_a06_a_prompt_over_the_context_is_a_400_that_names_both_sizes(
    served: Served, route: str, stream: bool
) -> None:
    served.generator.play(say("never"))
    answer = getattr(served, route)("x" * 5000, stream=stream)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if route == "chat" else "prompt")
    assert "prompt is too long" in error["message"]
    assert str(CONTEXT_TOKENS) in error["message"]
    assert not served.generator.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize(
    ("script", "status", "code", "retry_after"),
    [
        (too_long, 400, "context_length_exceeded", None),
        (busy, 429, "overloaded", "3"),
        (starting, 503, "not_ready", "3"),
        (say_then_raise("", WorkerLost("pid 7 at /tmp/socket died")), 500, "worker_lost", None),
        (say_then_raise("", EngineFault("CUDA at 0xdead")), 500, "engine_fault", None),
        (say_then_raise("", RuntimeError("secret")), 500, "internal_error", None),
    ],
)
def test_a20_e05_a_refusal_before_the_first_token_is_a_real_status_also_for_streams(
    served: Served,
    script: Script,
    status: int,
    code: str,
    retry_after: str | None,
    route: str,
    stream: bool,
) -> None:
    served.generator.play(script)
    answer = getattr(served, route)(stream=stream)
    assert answer.status_code == status
    error = error_of(answer)
    assert error["code"] == code
    assert answer.headers.get("retry-after") == retry_after
    for internal in ("pid", "/tmp", "0xdead", "secret"):
        assert internal not in answer.text
    if status == 400:
        assert error["param"] == ("messages" if route == "chat" else "prompt")


@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize("error", [EngineFault("0xdead"), WorkerLost("x"), RuntimeError("0xdead")])
def test_a20_a_failure_after_three_tokens_is_one_error_event_and_no_success_mark(
    served: Served, route: str, error: Exception
) -> None:
    served.generator.play(say_then_raise("abc", error))
    stream = getattr(served, route)(stream=True)
    assert stream.status_code == 200
    *chunks, last = [json.loads(frame) for frame in frames_of(stream.text)]
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "0xdead" not in stream.text
    assert "[DONE]" not in stream.text
    assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
    whole = getattr(served, route)()
    assert whole.status_code == 500
    assert error_of(whole) == last["error"]


def test_a20_outputs_that_end_without_a_finish_are_an_error_not_an_empty_success(
    served: Served,
) -> None:
    async def nothing(_: Request) -> AsyncIterator[SequenceOutput]:
        return
        yield

    served.generator.play(nothing)
    assert served.chat().status_code == 500
    assert '"error"' in served.chat(stream=True).text


@pytest.mark.parametrize("finish", [FinishReason.ABORTED, FinishReason.FAILED])
def test_a20_an_ending_that_the_caller_did_not_get_served_is_an_error(
    served: Served, finish: FinishReason
) -> None:
    async def end(request: Request) -> AsyncIterator[SequenceOutput]:
        yield SequenceOutput(
            request_id=request.request_id, index=0, finish=finish, error="at 0xdead"
        )

    served.generator.play(end)
    answer = served.chat()
    assert answer.status_code == 500
    assert "0xdead" not in answer.text
    assert "finish_reason" not in served.chat(stream=True).text


@pytest.mark.parametrize("stream", [False, True])
def test_a20_zero_choices_is_a_400_before_any_header(served: Served, stream: bool) -> None:
    answer = served.chat(n=0, stream=stream)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "n"


def test_e05_one_refused_prompt_of_a_list_refuses_the_call_and_ends_the_others(
    served: Served,
) -> None:
    async def busy_for_b(request: Request) -> AsyncIterator[SequenceOutput]:
        if request.prompt_tokens[-1] == ord("b"):
            raise Overloaded("full", retry_after_s=1)
        async for output in wait_forever()(request):
            yield output

    served.generator.play(busy_for_b)
    answer = served.complete(["a", "b", "a"])
    assert answer.status_code == 429
    served.generator.wait_idle()


def test_e05_calls_over_the_doors_own_limit_get_429_with_retry_after() -> None:
    generator = ScriptedGenerator(wait_forever())
    with serving(ApiConfig(max_open_calls=2), generator) as served, served.client() as client:
        opened = [
            client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True})
            for _ in range(2)
        ]
        for stream in opened:
            stream.__enter__()
        refused = served.complete()
        assert refused.status_code == 429
        assert error_of(refused)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        for stream in opened:
            stream.__exit__(None, None, None)
        generator.wait_idle()
        generator.play(say("ok"))
        assert served.complete().status_code == 200


def leave_after(served: Served, body: dict[str, object], seconds: float) -> None:
    """Send a call and hang up ``seconds`` after it."""
    with served.client() as client, pytest.raises(httpx.TimeoutException):
        client.post("/v1/completions", json={"model": MODEL_ID, **body}, timeout=seconds)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["", "some text"])
def test_e06_a_caller_that_leaves_ends_the_work_at_once(
    served: Served, stream: bool, after: str
) -> None:
    """``after`` empty: queued or in prefill; else decoding."""
    before = served.metric("headwater_sequences_finished_total", reason="cancelled")
    output_before = served.metric("headwater_output_tokens_total")
    served.generator.play(wait_forever(after=after))
    if stream:
        with (
            served.client() as client,
            client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as got,
        ):
            if after:
                assert next(got.iter_bytes())
    else:
        leave_after(served, {"prompt": "x", "max_tokens": 200}, 0.2)
    served.generator.wait_idle(within_s=1)

    def cancelled() -> bool:
        return served.metric("headwater_sequences_finished_total", reason="cancelled") == before + 1

    wait_until(cancelled, 1)
    produced = served.metric("headwater_output_tokens_total") - output_before
    assert produced <= len(after)
    if after and not stream:
        assert produced == len(after)


def test_e06_a_slow_reader_that_leaves_while_the_socket_is_full_ends_the_work(
    served: Served,
) -> None:
    """The old bug: a stream that waits in send() is not cancelled, and its generator lives on."""

    async def flood(request: Request) -> AsyncIterator[SequenceOutput]:
        async for output in say("x" * 200_000, step_tokens=2000)(request):
            yield output
        async for output in wait_forever()(request):
            yield output

    served.generator.play(flood)
    served.generator.info = replace_context(served, 10**7)
    with (
        served.client() as client,
        client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as got,
    ):
        assert next(got.iter_bytes())
    served.generator.wait_idle(within_s=2)


def replace_context(served: Served, context_tokens: int) -> Any:
    from dataclasses import replace

    assert served.generator.info is not None
    return replace(served.generator.info, context_tokens=context_tokens)


def test_k06_a_caller_that_closes_right_after_the_last_chunk_was_served(served: Served) -> None:
    def finished(reason: str) -> float:
        return served.metric("headwater_sequences_finished_total", reason=reason)

    stopped, cancelled = finished("stop"), finished("cancelled")
    served.generator.play(say("bye"))
    for _ in range(5):
        with (
            served.client() as client,
            client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as got,
        ):
            for line in got.iter_lines():
                if '"finish_reason":"stop"' in line:
                    break
    wait_until(lambda: finished("stop") == stopped + 5, 2)
    assert finished("cancelled") == cancelled
