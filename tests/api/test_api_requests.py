"""What callers may ask: every field's range, shape and meaning, over a real socket."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import (
    CONTEXT_TOKENS,
    END_ID,
    MODEL_ID,
    Served,
    chunks_of,
    error_of,
    say,
    serving,
)

from headwater.api.config import ApiConfig

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        running.generator.play(say("hello"))
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    with serving(ApiConfig(strict=True)) as running:
        yield running


# ------------------------------------------------------------------ ranges and types


OUT_OF_RANGE: list[tuple[dict[str, object], str]] = [
    ({"temperature": 1e6}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": ["x"] * 100_000}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["x" * 5000]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 1000}, "stop_token_ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(10**5)}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[...]"),
    ({"seed": 1.5}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"model": 7}, "model"),
    ({"ignore_eos": 1}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), OUT_OF_RANGE, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("route", ["chat", "complete"])
def test_i07_a_value_out_of_range_is_a_400_that_names_its_field(
    served: Served, route: str, fields: dict[str, object], param: str
) -> None:
    answer = getattr(served, route)(**fields)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert param.partition("[")[0] in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "0x10", "+1"])
def test_i07_numbers_that_json_does_not_have_are_a_400(served: Served, literal: str) -> None:
    body = f'{{"prompt": "x", "temperature": {literal}}}'
    with served.client() as client:
        answer = client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [USER] * 100_000}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, None),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_i07_chat_bodies_that_make_no_sense_are_a_400(
    served: Served, fields: dict[str, object], param: str | None
) -> None:
    answer = served.chat(**fields)
    assert answer.status_code == 400
    if param is not None:
        assert error_of(answer)["param"] == param
    else:
        assert error_of(answer)["param"].startswith("messages[")


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], [[1], 2], [["a"]], {"a": 1}, None, [None], [512], [-1], [[1.5]]]
)
def test_i07_prompts_of_no_known_form_are_a_400(served: Served, prompt: object) -> None:
    answer = served.complete(prompt)
    assert answer.status_code == 400
    assert error_of(answer)["param"].startswith("prompt")


def test_i07_too_many_prompts_times_choices_is_a_400(served: Served) -> None:
    assert served.complete(["x"] * 129).status_code == 400
    answer = served.complete(["x"] * 10, n=100)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "n"


TOOLS = [{"type": "function", "function": {"name": "f"}}]

REFUSED: list[tuple[str, object]] = [
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("guided_json", {}),
    ("use_beam_search", True),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *REFUSED,
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ 1 }}"),
        ("response_format", {"type": "json_object"}),
        ("chat_template_kwargs", {"chat_template": "x"}),
        ("best_of", 2),
    ],
)
def test_what_would_change_the_output_and_is_not_served_is_refused_by_name(
    served: Served, name: str, value: object
) -> None:
    answer = served.chat(**{name: value})
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]
    assert "not supported" in error["message"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    served: Served, fields: dict[str, object], name: str
) -> None:
    answer = served.chat(**fields)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *REFUSED,
        ("suffix", "x"),
        ("best_of", 3),
        ("tools", TOOLS),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_completions_refuse_by_name_too(served: Served, name: str, value: object) -> None:
    answer = served.complete(**{name: value})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name


def test_fields_that_ask_for_nothing_and_nulls_are_accepted(served: Served) -> None:
    nothing: dict[str, object] = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
        "audio": None,
        "functions": None,
    }
    numbers = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "stream")
    assert served.chat(**nothing, **dict.fromkeys(numbers)).status_code == 200


def test_unknown_fields_are_tolerated_and_named_once_in_the_debug_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "headwater.api"):
        for _ in range(3):
            assert served.chat(future_field={"x": 1}, **{"odd name\n": 1}).status_code == 200
    said = [record.getMessage() for record in caplog.records if "not known" in record.getMessage()]
    assert len(said) == 2
    assert any("future_field" in message for message in said)
    assert not any("odd name" in message for message in said)


def test_strict_mode_refuses_unknown_fields_and_a_missing_model(strict: Served) -> None:
    answer = strict.chat(future_field=1)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "future_field"
    answer = strict.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "model"
    assert strict.complete(user="u").status_code == 200


# ------------------------------------------------------------------ models


def test_a_model_that_is_not_served_is_a_404_and_none_means_the_only_one(served: Served) -> None:
    for route in (served.chat, served.complete):
        answer = route(model="gpt-9")
        assert answer.status_code == 404
        assert error_of(answer)["code"] == "model_not_found"
        assert route(model=None).json()["model"] == MODEL_ID


def test_models_are_listed_and_found_also_under_names_with_slashes() -> None:
    with serving(ApiConfig(served_names=("org/toy", "alias"))) as served:
        listed = served.get("/v1/models").json()
        assert [card["id"] for card in listed["data"]] == ["org/toy", "alias"]
        card = served.get("/v1/models/org/toy").json()
        assert card["object"] == "model"
        assert card["context_tokens"] == CONTEXT_TOKENS
        assert served.get("/v1/models/toy").status_code == 404
        assert served.chat(model="alias").json()["model"] == "alias"
        assert served.chat(model="toy").status_code == 404


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("num_prompt_tokens", [2, CONTEXT_TOKENS - 1, CONTEXT_TOKENS])
@pytest.mark.parametrize(
    "limit", ["absent", None, 0, 1, CONTEXT_TOKENS, CONTEXT_TOKENS + 1, 10**12]
)
def test_a26_limits_near_the_context_edge(
    served: Served, name: str, num_prompt_tokens: int, limit: int | str | None
) -> None:
    """Absent and null: all the room. 0: prefill only. Too large: cut to the room."""
    served.generator.play(say("x" * 300))
    fields: dict[str, object] = {} if limit == "absent" else {name: limit}
    if name == "max_tokens":
        answer = served.complete([65] * num_prompt_tokens, **fields)
    else:
        overhead = served.chat("", max_tokens=0).json()["usage"]["prompt_tokens"]
        num_prompt_tokens = max(num_prompt_tokens, overhead)
        answer = served.chat("A" * (num_prompt_tokens - overhead), **fields)
    room = CONTEXT_TOKENS - num_prompt_tokens
    if room == 0 and limit != 0:
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "context_length_exceeded"
        return
    assert answer.status_code == 200, answer.text
    expected = min(limit, room) if isinstance(limit, int) else room
    assert answer.json()["usage"]["prompt_tokens"] == num_prompt_tokens
    assert answer.json()["usage"]["completion_tokens"] == expected
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert served.generator.requests[-1].stop.max_output_tokens == expected


# ------------------------------------------------------------------ what reaches the router


def test_every_sampling_field_reaches_the_request(served: Served) -> None:
    served.generator.play(say("ok"))
    fields: dict[str, object] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.25,
        "logit_bias": {"9": -100, "3": 2.5},
        "seed": 11,
        "min_tokens": 1,
        "max_tokens": 9,
        "ignore_eos": True,
        "stop_token_ids": [7, 8],
        "n": 2,
    }
    assert served.complete("abc", **fields).status_code == 200
    (request,) = served.generator.requests
    sampling, stop = request.sampling, request.stop
    assert request.prompt_tokens == tuple(b"abc")
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 0.25)
    assert sampling.logit_bias == ((3, 2.5), (9, -100.0))
    assert (sampling.seed, sampling.num_logprobs) == (11, None)
    assert (stop.min_output_tokens, stop.max_output_tokens) == (1, 9)
    assert stop.ignore_end
    assert stop.stop_token_ids == {7, 8}
    assert stop.end_token_ids == {END_ID}
    assert request.num_choices == 2


def test_absent_fields_mean_openai_defaults(served: Served) -> None:
    served.generator.play(say("ok"))
    served.complete()
    (request,) = served.generator.requests
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
    assert request.num_choices == 1
    assert not request.stop.ignore_end


def test_seeds_of_any_size_are_kept_or_folded_and_absent_ones_differ(served: Served) -> None:
    served.generator.play(say("ok"))
    for seed in (0, 2**64 - 1, -1, 2**64 + 5, -(10**30)):
        assert served.complete(["a", "b"], seed=seed).status_code == 200
        seeds = {request.sampling.seed for request in served.generator.requests[-2:]}
        assert seeds == {seed % 2**64}
    served.generator.play(say("ok"))
    for _ in range(4):
        served.complete()
    assert len({request.sampling.seed for request in served.generator.requests}) == 4


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [b"ab"]),
        (["a", "bc"], [b"a", b"bc"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
        ([97, END_ID], [(97, END_ID)]),
    ],
)
def test_all_four_forms_of_prompt_are_taken(
    served: Served, prompt: object, prompts: list[bytes | tuple[int, ...]]
) -> None:
    served.generator.play(say("ok"))
    assert served.complete(prompt).status_code == 200
    sent = {request.prompt_tokens for request in served.generator.requests}
    assert sent == {tuple(tokens) for tokens in prompts}


@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
def test_a27_content_as_parts_gives_the_tokens_of_the_string(served: Served, role: str) -> None:
    def tokens_of(content: object) -> tuple[int, ...]:
        served.generator.play(say("ok"))
        messages = [{"role": role, "content": content}, USER]
        assert served.chat(messages=messages).status_code == 200
        return served.generator.requests[0].prompt_tokens

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    assert tokens_of(parts("one")) == tokens_of("one")
    # The rule: parts are joined by one newline.
    assert tokens_of(parts("one", "two", "three")) == tokens_of("one\ntwo\nthree")
    assert tokens_of([]) == tokens_of("")
    if role == "assistant":
        assert tokens_of(None) == tokens_of("")


# ------------------------------------------------------------------ logprobs and echo


def test_chat_logprobs_list_each_token_with_its_bytes_and_alternatives(served: Served) -> None:
    served.generator.play(say("aé"))
    whole = served.chat(logprobs=True, top_logprobs=2).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9]]
    assert content[0]["token"] == "a"
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    stream = served.chat(logprobs=True, top_logprobs=2, stream=True)
    streamed: list[Any] = []
    for chunk in chunks_of(stream.text):
        logprobs = chunk["choices"][0]["logprobs"]
        streamed.extend(logprobs["content"] if logprobs else [])
    assert streamed == content


def test_chat_without_logprobs_has_null_there(served: Served) -> None:
    served.generator.play(say("a"))
    assert served.chat(logprobs=False).json()["choices"][0]["logprobs"] is None
    assert served.generator.requests[0].sampling.num_logprobs is None


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
def test_echo_puts_the_prompt_and_its_logprobs_before_the_output(
    served: Served, prompt: object
) -> None:
    served.generator.play(say("de"))
    whole = served.complete(prompt, echo=True, logprobs=1).json()
    choice = whole["choices"][0]
    assert choice["text"] == "abcde"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d", "e"],
        "token_logprobs": [None, -1.0, -1.0, -0.5, -0.5],
        "top_logprobs": [None, {"b": -1.0}, {"c": -1.0}, {"d": -0.5}, {"e": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert whole["usage"]["completion_tokens"] == 2
    merged: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    text = ""
    for chunk in chunks_of(served.complete(prompt, echo=True, logprobs=1, stream=True).text):
        part = chunk["choices"][0]
        text += part["text"]
        for name, values in part["logprobs"].items():
            merged[name] += values
    assert (text, merged) == ("abcde", choice["logprobs"])


def test_scoring_a_prompt_takes_echo_logprobs_and_no_output(served: Served) -> None:
    served.generator.play(say("zzz"))
    choice = served.complete("ab", echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choice["finish_reason"] == "length"
    assert served.generator.requests[0].num_prompt_logprobs == 0


def test_stops_are_looked_for_in_the_output_only(served: Served) -> None:
    served.generator.play(say("xSTOPy"))
    choice = served.complete("STOP", echo=True, stop="STOP").json()["choices"][0]
    assert choice["text"] == "STOPx"
    assert choice["finish_reason"] == "stop"


def test_a_token_that_cannot_be_chosen_has_a_finite_logprob() -> None:
    from headwater.api.openai import wire

    assert (
        json.loads(wire.encode(wire.TopLogprob("x", wire.finite(float("-inf")), [])))["logprob"]
        < -1000
    )
