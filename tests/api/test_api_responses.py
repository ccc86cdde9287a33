"""OpenAI's Responses over a real socket: items, event life cycles, echo, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_server import Script, Served, error_of, say_then_raise, wait_forever
from api_talk import TalkRecipe, events_of, talking, write

from headwater.api.config import ApiConfig
from headwater.core.constraint import Constraint
from headwater.core.errors import EngineFault, NotReady, Overloaded
from headwater.recipe.conversation import Conversation, Thinking, ToolChoice

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
    "strict": True,
}
CALL = '<call weather>{"city": "Oslo"}</call>'
NAMED = {"type": "function", "name": "weather"}


@pytest.fixture(scope="module")
def recipe() -> TalkRecipe:
    return TalkRecipe()


@pytest.fixture(scope="module")
def served(recipe: TalkRecipe) -> Iterator[Served]:
    with talking(ApiConfig(keepalive_s=0.05), recipe=recipe) as running:
        yield running


def conversation_of(served: Served, recipe: TalkRecipe, **fields: object) -> Conversation:
    served.generator.play(write("ok"))
    answer = served.respond(**fields)
    assert answer.status_code == 200, answer.text
    return recipe.seen[-1]


def lives(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, deltas in a row as one; sequence numbers must rise by one."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if not (name.endswith(".delta") and names and names[-1] == name):
            names.append(name)
    return names


MESSAGE_LIFE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
REASONING_LIFE = [
    "output_item.added",
    "content_part.added",
    "reasoning_text.delta",
    "reasoning_text.done",
    "content_part.done",
    "output_item.done",
]
SUMMARY_LIFE = [
    "output_item.added",
    "reasoning_summary_part.added",
    "reasoning_summary_text.delta",
    "reasoning_summary_text.done",
    "reasoning_summary_part.done",
    "output_item.done",
]
CALL_LIFE = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
OPENING = ["created", "in_progress"]


@pytest.mark.parametrize(
    ("text", "life"),
    [
        ("hello", MESSAGE_LIFE),
        (CALL, CALL_LIFE),
        (f"I look.{CALL}{CALL}", [*MESSAGE_LIFE, *CALL_LIFE, *CALL_LIFE]),
        (f"<think>hm</think>yes{CALL}", [*REASONING_LIFE, *MESSAGE_LIFE, *CALL_LIFE]),
        ("", [name for name in MESSAGE_LIFE if name != "output_text.delta"]),
    ],
)
def test_a21_every_item_lives_its_whole_life_in_order(
    served: Served, text: str, life: list[str]
) -> None:
    served.generator.play(write(text))
    stream = served.respond(tools=[WEATHER], stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = events_of(stream.text)
    assert lives(events) == [*OPENING, *life, "completed"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert final["output"] == done
    assert [item["status"] for item in done] == ["completed"] * len(done)
    whole = served.respond(tools=[WEATHER]).json()
    assert without_ids(whole) == without_ids(final)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    return response | {"id": "", "created_at": 0, "output": items}


def test_a21_deltas_and_done_events_agree_and_name_their_item(served: Served) -> None:
    served.generator.play(write(f"<think>hm</think>hello{CALL}"))
    events = events_of(served.respond(tools=[WEATHER], stream=True).text)
    for kind, full, text in (
        ("output_text", "text", "hello"),
        ("reasoning_text", "text", "hm"),
        ("function_call_arguments", "arguments", '{"city": "Oslo"}'),
    ):
        deltas = [e for e in events if e["type"] == f"response.{kind}.delta"]
        (done,) = [e for e in events if e["type"] == f"response.{kind}.done"]
        assert "".join(e["delta"] for e in deltas) == done[full] == text
        (item,) = [
            e["item"]
            for e in events
            if e["type"] == "response.output_item.added" and e["item"]["id"] == done["item_id"]
        ]
        assert item["status"] == "in_progress"
        assert {e["item_id"] for e in deltas} == {item["id"]}
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert [e["output_index"] for e in added] == [0, 1, 2]


def test_reasoning_comes_as_a_summary_when_one_is_asked_for(served: Served) -> None:
    served.generator.play(write("<think>hm</think>yes"))
    fields = {"reasoning": {"effort": "high", "summary": "auto"}}
    events = events_of(served.respond(**fields, stream=True).text)
    assert lives(events) == [*OPENING, *SUMMARY_LIFE, *MESSAGE_LIFE, "completed"]
    item = served.respond(**fields).json()["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert item["content"] == []


def test_an_output_limit_makes_it_incomplete_and_says_why(served: Served) -> None:
    served.generator.play(write(f"hello{CALL}"))
    for limit, kind in ((3, "message"), (len("hello" + CALL) - 9, "function_call")):
        fields = {"tools": [WEATHER], "max_output_tokens": limit}
        whole = served.respond(**fields).json()
        events = events_of(served.respond(**fields, stream=True).text)
        assert events[-1]["type"] == "response.incomplete"
        for response in (whole, events[-1]["response"]):
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            assert response["output"][-1]["type"] == kind
            assert response["output"][-1]["status"] == "incomplete"
        assert "response.function_call_arguments.done" not in [e["type"] for e in events]


def test_k01_usage_includes_cached_tokens_and_names_them(served: Served) -> None:
    served.generator.play(write("<think>hm</think>yes", hit=7))
    whole = served.respond("x" * 100).json()["usage"]
    last = events_of(served.respond("x" * 100, stream=True).text)[-1]["response"]["usage"]
    total = served.generator.requests[0].num_prompt_tokens
    assert whole == last
    assert whole["input_tokens"] == total
    assert whole["input_tokens_details"]["cached_tokens"] == 7
    assert whole["output_tokens"] == len("<think>hm</think>yes")
    assert whole["output_tokens_details"]["reasoning_tokens"] >= 2
    assert whole["total_tokens"] == total + whole["output_tokens"]


def test_what_was_asked_is_echoed_and_nothing_is_stored(served: Served) -> None:
    served.generator.play(write("ok"))
    asked = {
        "instructions": "be kind",
        "tools": [WEATHER],
        "tool_choice": "auto",
        "metadata": {"a": "b"},
        "max_output_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "store": True,
        "user": "u",
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "prompt_cache_key": "k",
        "service_tier": "auto",
    }
    answer = served.respond(**asked).json()
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    for name in ("instructions", "tools", "metadata", "temperature", "top_p", "text"):
        assert answer[name] == asked[name], name
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert answer["parallel_tool_calls"] is False
    assert (answer["store"], answer["previous_response_id"]) == (False, None)
    assert served.generator.requests[0].sampling.temperature == 0.5


# ------------------------------------------------------------------ items in


def test_items_of_one_turn_become_one_message(served: Served, recipe: TalkRecipe) -> None:
    said = conversation_of(
        served,
        recipe,
        instructions="be kind",
        tools=[WEATHER],
        content=[
            {"role": "developer", "content": "be short"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"b": 1}'},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": ""},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [{"type": "input_text", "text": "rain"}],
            },
            {"role": "assistant", "content": "Sunny and rain."},
            {"role": "user", "content": "and?"},
        ],
    )
    assert [m.role for m in said.messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    turn = said.messages[3]
    assert (turn.reasoning, turn.content) == ("hm", "I look.")
    assert [call.arguments for call in turn.tool_calls] == ['{"b": 1}', "{}"]
    assert [m.tool_call_id for m in said.messages[4:6]] == ["a", "b"]
    assert said.messages[5].content == "rain"


def test_a23_instructions_developer_and_system_items_keep_their_order(
    served: Served, recipe: TalkRecipe
) -> None:
    items = [{"role": role, "content": role} for role in ("developer", "user", "system")]
    said = conversation_of(served, recipe, instructions="first", content=items)
    assert [(m.role, m.content) for m in said.messages] == [
        ("system", "first"),
        ("system", "developer"),
        ("user", "user"),
        ("system", "system"),
    ]


def test_reasoning_is_taken_back_from_summary_too_and_foreign_reasoning_is_left_out(
    served: Served, recipe: TalkRecipe
) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"role": "user", "content": "c"},
    ]
    said = conversation_of(served, recipe, content=items)
    assert [(m.role, m.reasoning) for m in said.messages] == [
        ("user", None),
        ("assistant", "hm"),
        ("user", None),
    ]


@pytest.mark.parametrize(
    ("fields", "choice", "thinking"),
    [
        ({}, ToolChoice(), Thinking()),
        ({"tool_choice": "required"}, ToolChoice(kind="required"), Thinking()),
        ({"tool_choice": NAMED}, ToolChoice(kind="named", name="weather"), Thinking()),
        ({"parallel_tool_calls": False}, ToolChoice(parallel=False), Thinking()),
        (
            {"reasoning": {"effort": "minimal"}},
            ToolChoice(),
            Thinking(mode="on", effort="low"),
        ),
        ({"reasoning": {"effort": "none"}}, ToolChoice(), Thinking(mode="off")),
        ({"reasoning": {"effort": None, "summary": None}}, ToolChoice(), Thinking()),
    ],
)
def test_choices_and_effort(
    served: Served,
    recipe: TalkRecipe,
    fields: dict[str, object],
    choice: ToolChoice,
    thinking: Thinking,
) -> None:
    said = conversation_of(served, recipe, tools=[WEATHER], **fields)
    assert (said.tool_choice, said.thinking) == (choice, thinking)
    assert said.tools[0].strict
    assert said.tools[0].parameters == '{"type":"object","properties":{"b":{},"a":{}}}'


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint("json_object")),
        (
            {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True},
            Constraint("json_schema", '{"type":"object"}'),
        ),
    ],
)
def test_text_formats_reach_the_request_and_are_echoed(
    served: Served, wanted: dict[str, object], expected: Constraint | None
) -> None:
    served.generator.play(write("{}"))
    answer = served.respond(text={"format": wanted})
    assert answer.json()["text"]["format"] == wanted
    assert served.generator.requests[0].constraint == expected


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": []}, "input"),
        ({"content": 5}, "input"),
        ({"content": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"content": [{"role": "user"}]}, "input[0].content"),
        ({"content": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"content": [{"type": "local_shell_call"}]}, "input[0].type"),
        ({"content": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        (
            {
                "content": [
                    {"type": "function_call", "call_id": "x", "name": "f", "arguments": "["},
                ]
            },
            "input[0].arguments",
        ),
        ({"content": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {
                "instructions": "i",
                "content": [
                    {"type": "reasoning", "summary": []},
                    {"role": "user", "content": "forbidden"},
                ],
            },
            "input[1].content",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}, "tools": [WEATHER]}, "tool_choice.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"const": "bad"}}}},
            "text.format",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"top_k": 5}, "top_k"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_makes_no_sense_or_is_not_served_is_a_400_that_names_the_place(
    served: Served, fields: dict[str, object], param: str, stream: bool
) -> None:
    served.generator.play(write("ok"))
    answer = served.respond(**fields, stream=stream)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert not served.generator.requests


@pytest.mark.parametrize("kind", ["input_image", "input_file"])
def test_i02_images_and_files_are_a_400_and_nothing_is_fetched(served: Served, kind: str) -> None:
    part = {"type": kind, "image_url": "http://127.0.0.1:1/x", "file_url": "file:///etc/passwd"}
    answer = served.respond([{"role": "user", "content": [part]}])
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "input[0].content[0].type"
    assert "not supported" in error_of(answer)["message"]


def test_a05_unknown_fields_are_tolerated_and_strict_mode_refuses_them(served: Served) -> None:
    served.generator.play(write("ok"))
    assert served.respond(future_field={"x": 1}).status_code == 200
    with talking(ApiConfig(strict=True)) as strict:
        assert error_of(strict.respond(future_field=1))["param"] == "future_field"


def test_a06_a_prompt_that_is_too_long_is_a_400_that_clients_recognise(served: Served) -> None:
    error = error_of(served.respond("x" * 9000, stream=True))
    assert error["message"].startswith("prompt is too long: ")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (say_then_raise("", Overloaded("full", retry_after_s=2)), 429),
        (say_then_raise("", NotReady("starting")), 503),
        (say_then_raise("", EngineFault("x")), 500),
    ],
)
def test_a20_failures_before_the_first_token_have_a_status(
    served: Served, script: Script, status: int
) -> None:
    served.generator.play(script)
    answer = served.respond(stream=True)
    assert answer.status_code == status
    error_of(answer)


def test_a20_a_failure_midway_is_one_failed_event_and_the_end(served: Served) -> None:
    served.generator.play(say_then_raise("abc", EngineFault("x")))
    events = events_of(served.respond(stream=True).text)
    assert lives(events)[-1] == "failed"
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert "engine failed" in response["error"]["message"]


def test_a07_the_opening_events_come_before_the_first_token(served: Served) -> None:
    served.generator.play(wait_forever())
    body = {"input": "x", "stream": True}
    with served.client() as client, client.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        assert any(line == ": keepalive" for line in lines)
    served.generator.wait_idle()
