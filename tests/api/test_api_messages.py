"""Anthropic's Messages over a real socket: blocks, events, usage, errors, counting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_server import (
    Script,
    Served,
    say_then_raise,
    wait_forever,
)
from api_talk import TalkRecipe, events_of, talking, write

from headwater.api.config import ApiConfig, ApiKey
from headwater.core.errors import EngineFault, NotReady, Overloaded

WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}
CALL = '<call weather>{"city": "Oslo"}</call>'


@pytest.fixture(scope="module")
def recipe() -> TalkRecipe:
    return TalkRecipe()


@pytest.fixture(scope="module")
def served(recipe: TalkRecipe) -> Iterator[Served]:
    with talking(ApiConfig(keepalive_s=0.05), recipe=recipe) as running:
        yield running


def anthropic_error(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    error: dict[str, Any] = body["error"]
    assert set(error) == {"type", "message"}
    return error


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a strict client puts together; checks the life cycle (A02)."""
    message: dict[str, Any] = {}
    open_block: dict[str, Any] | None = None
    pieces = ""
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == []
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(message["content"])
                open_block = event["content_block"]
                pieces = ""
                message["content"].append(open_block)
            case "content_block_delta":
                assert open_block is not None
                assert event["index"] == len(message["content"]) - 1
                delta = event["delta"]
                match delta["type"], open_block["type"]:
                    case "text_delta", "text":
                        open_block["text"] += delta["text"]
                    case "thinking_delta", "thinking":
                        open_block["thinking"] += delta["thinking"]
                    case "signature_delta", "thinking":
                        open_block["signature"] = delta["signature"]
                    case "input_json_delta", "tool_use":
                        pieces += delta["partial_json"]
                    case pair:
                        raise AssertionError(f"{pair} do not go together")
            case "content_block_stop":
                assert open_block is not None
                if open_block["type"] == "tool_use" and pieces:
                    open_block["input"] = json.loads(pieces)
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= event["delta"]
                message["usage"] = event["usage"]
            case "message_stop":
                assert event is events[-1]
            case "ping":
                assert message
            case other:
                raise AssertionError(other)
    return message


def both_ways(served: Served, **fields: object) -> dict[str, Any]:
    """The whole answer, which must equal the streamed one but for its id."""
    whole: dict[str, Any] = served.message(**fields).json()
    stream = served.message(**fields, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    streamed = assembled(events_of(stream.text))
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            block.pop("id", None)
    assert whole == streamed
    return whole


# ------------------------------------------------------------------ answers


def test_a02_each_kind_of_output_has_blocks_of_its_own(served: Served) -> None:
    served.generator.play(write(f"<think>hm</think>First.\n{CALL}\n{CALL}\nDone."))
    message = both_ways(served, tools=[WEATHER])
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use", "text"]
    thinking, first, call, _, last = message["content"]
    assert thinking["thinking"] == "hm"
    assert len(thinking["signature"]) > 20
    assert first["text"] == "First.\n"
    assert (call["name"], call["input"]) == ("weather", {"city": "Oslo"})
    assert last["text"] == "\nDone."


def test_an_empty_answer_has_no_blocks(served: Served) -> None:
    served.generator.play(write(""))
    message = both_ways(served)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


@pytest.mark.parametrize(
    ("text", "fields", "reason", "stop"),
    [
        ("abc@@ENDdef", {"stop_sequences": ["@@END"]}, "stop_sequence", "@@END"),
        ("abc", {"stop_sequences": ["@@END"]}, "end_turn", None),
        ("abc", {}, "end_turn", None),
        ("abc", {"max_tokens": 2}, "max_tokens", None),
        (CALL, {"tools": [WEATHER]}, "tool_use", None),
        (CALL, {"tools": [WEATHER], "max_tokens": len(CALL) - 9}, "max_tokens", None),
        ("no call", {"tools": [WEATHER], "tool_choice": {"type": "any"}}, "end_turn", None),
    ],
)
def test_a04_a16_why_a_turn_ended_is_told_the_same_streamed_or_not(
    served: Served, text: str, fields: dict[str, object], reason: str, stop: str | None
) -> None:
    served.generator.play(write(text))
    whole = served.message(**fields).json()
    *_, delta, _ = events_of(served.message(**fields, stream=True).text)
    for ended in (whole, delta["delta"]):
        assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, stop)


def test_a11_a_stop_sequence_inside_thinking_does_not_stop(served: Served) -> None:
    served.generator.play(write("<think>say STOP?</think>yes STOP no"))
    message = both_ways(served, stop_sequences=["STOP"])
    assert message["content"][0]["thinking"] == "say STOP?"
    assert message["content"][1]["text"] == "yes "


def test_thinking_can_be_left_out_of_the_answer(served: Served) -> None:
    served.generator.play(write("<think>hm</think>yes"))
    message = both_ways(served, thinking={"type": "adaptive", "display": "omitted"})
    assert message["content"][0]["thinking"] == ""
    assert message["content"][0]["signature"]


@pytest.mark.parametrize("hit", [0, 20])
def test_a03_k01_k02_usage_is_true_from_the_first_event_and_its_buckets_are_disjoint(
    served: Served, hit: int
) -> None:
    served.generator.play(write("<think>hm</think>yes", hit=hit))
    prompt = {"content": "x" * 500}
    whole = served.message(**prompt).json()["usage"]
    events = events_of(served.message(**prompt, stream=True).text)
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    total = served.generator.requests[0].num_prompt_tokens
    for usage in (whole, first, last):
        assert usage["cache_read_input_tokens"] == hit
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] == total - hit
    assert whole == last
    assert first["output_tokens"] <= last["output_tokens"] == len("<think>hm</think>yes")
    assert last["output_tokens_details"]["thinking_tokens"] >= 2
    assert served.metric("headwater_prompt_tokens_total", source="hit") >= hit


def test_a07_before_the_first_event_comments_keep_the_line_and_then_pings(served: Served) -> None:
    served.generator.play(wait_forever())
    with (
        served.client() as client,
        client.stream(
            "POST",
            "/v1/messages",
            json={"stream": True, "messages": [{"role": "user", "content": "x"}]},
        ) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == ": keepalive"
    served.generator.wait_idle()
    served.generator.play(wait_forever(after="abc"))
    with (
        served.client() as client,
        client.stream(
            "POST",
            "/v1/messages",
            json={"stream": True, "messages": [{"role": "user", "content": "x"}]},
        ) as answer,
    ):
        seen = [line for line in _until(answer.iter_lines(), "event: ping") if line]
    assert seen[0] == "event: message_start"
    served.generator.wait_idle()


def _until(lines: Iterator[str], last: str) -> Iterator[str]:
    for line in lines:
        yield line
        if line == last:
            return


# ------------------------------------------------------------------ tolerance and refusals


def test_a05_unknown_fields_betas_and_query_strings_are_tolerated(served: Served) -> None:
    served.generator.play(write("ok"))
    body = {
        "model": "toy",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "x"}],
        "future_field": {"x": 1},
        "context_management": {},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    }
    for query in ("", "?beta=true", "?x=1&y"):
        answer = served.post(f"/v1/messages{query}", body, **{"anthropic-beta": "a-b-2099,c-d"})
        assert answer.status_code == 200, answer.text


def test_a05_strict_mode_refuses_unknown_fields_and_wants_max_tokens() -> None:
    with talking(ApiConfig(strict=True)) as served:
        answer = served.message(future_field=1)
        assert answer.status_code == 400
        assert "future_field" in anthropic_error(answer)["message"]
        answer = served.message(max_tokens=None)
        assert "max_tokens" in anthropic_error(answer)["message"]
        assert served.message().status_code == 200


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
            "messages[0].content[0].name",
        ),
        (
            {
                "system": "s",
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "user", "content": "forbidden"},
                ],
            },
            "messages[1].content is forbidden",
        ),
        ({"system": "forbidden"}, "system.content is forbidden"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        (
            {"output_format": {"type": "json_schema", "schema": {"const": "bad"}}},
            "output_format",
        ),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"model": 7}, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bodies_that_make_no_sense_are_a_400_in_anthropics_shape(
    served: Served, fields: dict[str, object], said: str, stream: bool
) -> None:
    served.generator.play(write("ok"))
    answer = served.message(**fields, stream=stream)
    assert answer.status_code == 400
    error = anthropic_error(answer)
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert not served.generator.requests


@pytest.mark.parametrize("kind", ["image", "document"])
def test_i02_images_and_documents_are_a_400_and_nothing_is_fetched(
    served: Served, kind: str
) -> None:
    source = {"type": "url", "url": "http://127.0.0.1:1/x"}
    block = {"type": kind, "source": source}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    for content in ([block], [result]):
        answer = served.message(content)
        assert answer.status_code == 400
        message = anthropic_error(answer)["message"]
        assert kind in message
        assert "not supported" in message or "takes text only" in message


def test_a06_a_prompt_that_is_too_long_is_a_400_that_clients_recognise(served: Served) -> None:
    answer = served.message("x" * 9000, stream=True)
    assert answer.status_code == 400
    message = anthropic_error(answer)["message"]
    assert message.startswith("prompt is too long: ")
    assert "8192 maximum" in message


@pytest.mark.parametrize(
    ("script", "status", "kind"),
    [
        (say_then_raise("", Overloaded("full", retry_after_s=2)), 429, "rate_limit_error"),
        (say_then_raise("", NotReady("starting")), 503, "overloaded_error"),
        (say_then_raise("", EngineFault("x")), 500, "api_error"),
    ],
)
def test_a20_failures_before_the_first_token_have_a_status(
    served: Served, script: Script, status: int, kind: str
) -> None:
    served.generator.play(script)
    answer = served.message(stream=True)
    assert answer.status_code == status
    assert anthropic_error(answer)["type"] == kind


def test_a20_a_failure_midway_is_one_error_event_and_the_end(served: Served) -> None:
    served.generator.play(say_then_raise("abc", EngineFault("x")))
    events = events_of(served.message(stream=True).text)
    assert events[0]["type"] == "message_start"
    assert events[-1]["error"]["type"] == "api_error"
    assert not [event for event in events if event["type"] in ("message_delta", "message_stop")]


def test_paths_of_this_dialect_are_refused_in_its_words() -> None:
    with talking(ApiConfig(keys=(ApiKey("a", "sk"),))) as served:
        served.generator.play(write("ok"))
        answer = served.message()
        assert answer.status_code == 401
        assert anthropic_error(answer)["type"] == "authentication_error"
        key = {"x-api-key": "sk"}
        assert served.get("/v1/messages", **key).status_code == 405
        anthropic_error(served.get("/v1/messages", **key))
        answer = served.get("/v1/messages/nowhere", **key)
        assert answer.status_code == 404
        assert anthropic_error(answer)["type"] == "not_found_error"
        body = {"messages": [{"role": "user", "content": "x"}], "model": "other"}
        answer = served.post("/v1/messages", body, **key)
        assert anthropic_error(answer)["type"] == "not_found_error"


# ------------------------------------------------------------------ counting


def test_a01_a_count_equals_the_input_of_the_later_call_and_takes_no_place(
    served: Served,
) -> None:
    served.generator.play(write("ok", hit=30))
    body = {
        "model": "toy",
        "system": [{"type": "text", "text": "be kind"}, {"type": "text", "text": "always"}],
        "tools": [WEATHER, {"name": "other", "description": "x", "input_schema": {}}],
        "messages": [{"role": "user", "content": "hello"}],
        "thinking": {"type": "adaptive"},
    }
    answer = served.post("/v1/messages/count_tokens?beta=true", body)
    assert answer.status_code == 200, answer.text
    counted = answer.json()
    assert set(counted) == {"input_tokens"}
    assert not served.generator.requests
    full = body | {"max_tokens": 5, "stop_sequences": ["x"], "temperature": 0.1}
    assert served.post("/v1/messages/count_tokens", full).json() == counted
    usage = served.post("/v1/messages", full).json()["usage"]
    inputs = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert counted["input_tokens"] == sum(usage[name] for name in inputs)


def test_a01_counting_says_what_is_wrong_in_anthropics_shape(served: Served) -> None:
    answer = served.post("/v1/messages/count_tokens", {"messages": "x"})
    assert answer.status_code == 400
    assert "messages" in anthropic_error(answer)["message"]
    long = {"messages": [{"role": "user", "content": "x" * 9000}]}
    assert served.post("/v1/messages/count_tokens", long).json()["input_tokens"] > 9000
