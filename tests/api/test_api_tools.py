"""Chat Completions with tools, reasoning and answer formats, over a recipe that has all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_server import Served, chunks_of, error_of
from api_talk import TalkRecipe, talking, write

from headwater.core.constraint import Constraint
from headwater.recipe.conversation import Conversation, Thinking, Tool, ToolChoice

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"z": {}, "a": {}}},
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<call weather>{"city": "Oslo"}</call>'


@pytest.fixture(scope="module")
def recipe() -> TalkRecipe:
    return TalkRecipe()


@pytest.fixture(scope="module")
def served(recipe: TalkRecipe) -> Iterator[Served]:
    with talking(recipe=recipe) as running:
        yield running


def conversation_of(served: Served, recipe: TalkRecipe, **fields: object) -> Conversation:
    served.generator.play(write("ok"))
    answer = served.chat(**fields)
    assert answer.status_code == 200, answer.text
    return recipe.seen[-1]


def streamed_message(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """What a client puts together from a stream, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish: list[str] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["index"] == len(message["tool_calls"])
                    assert piece["function"]["arguments"] == ""
                    message["tool_calls"].append(
                        {"id": piece["id"], "type": piece["type"], "function": piece["function"]}
                    )
                else:
                    assert set(piece) == {"index", "function"}
                    call = message["tool_calls"][piece["index"]]
                    call["function"]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"]:
                finish.append(choice["finish_reason"])
    assert len(finish) == 1
    return message, finish[0]


# ------------------------------------------------------------------ calls out


A16_TABLE: list[tuple[str, int | None, str, int]] = [
    ("hello", None, "stop", 0),
    (CALL, None, "tool_calls", 1),
    (f"let me see{CALL}{CALL}", None, "tool_calls", 2),
    (CALL, len(CALL) - 10, "length", 1),
    ("hello", 3, "length", 0),
    ("<call weather>{oops", None, "tool_calls", 1),
]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize(("text", "limit", "reason", "num_calls"), A16_TABLE)
def test_a16_tool_calls_is_the_reason_only_with_a_call_streamed_or_not(
    served: Served, choice: object, text: str, limit: int | None, reason: str, num_calls: int
) -> None:
    served.generator.play(write(text))
    fields: dict[str, object] = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": limit}
    whole = served.chat(**fields).json()["choices"][0]
    streamed, streamed_reason = streamed_message(chunks_of(served.chat(**fields, stream=True).text))
    assert whole["finish_reason"] == streamed_reason == reason
    calls = whole["message"].get("tool_calls", [])
    assert len(calls) == len(streamed["tool_calls"]) == num_calls
    assert "tool_calls" not in whole["message"] or calls
    for one, other in zip(calls, streamed["tool_calls"], strict=True):
        assert one["function"] == other["function"]
    assert (whole["message"]["content"] or "") == streamed["content"]


def test_a_call_comes_with_id_type_name_and_arguments(served: Served) -> None:
    served.generator.play(write(f"I look.{CALL}\n\n{CALL}\n"))
    message = served.chat(tools=[WEATHER]).json()["choices"][0]["message"]
    assert message["content"] == "I look."
    first, second = message["tool_calls"]
    assert first["type"] == "function"
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert first["id"] != second["id"]


def test_content_is_null_when_there_are_only_calls(served: Served) -> None:
    served.generator.play(write(f"\n{CALL}\n"))
    assert served.chat(tools=[WEATHER]).json()["choices"][0]["message"]["content"] is None


def test_without_parallel_calls_the_first_one_ends_the_turn(served: Served) -> None:
    served.generator.play(write(f"{CALL}{CALL}and more"))
    for stream in (False, True):
        answer = served.chat(tools=[WEATHER], parallel_tool_calls=False, stream=stream)
        if stream:
            message, _ = streamed_message(chunks_of(answer.text))
        else:
            message = answer.json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == 1
        assert not message["content"]


def test_whitespace_without_a_call_is_an_answer_even_when_tools_are_offered(
    served: Served,
) -> None:
    served.generator.play(write(" \n"))
    assert served.chat(tools=[WEATHER]).json()["choices"][0]["message"]["content"] == " \n"


@pytest.mark.parametrize("text", [f"I look.\n{CALL}\n{CALL}", f"<think>hm</think>yes{CALL}no"])
def test_logprobs_list_the_visible_answer_only_streamed_or_not(served: Served, text: str) -> None:
    served.generator.play(write(text))
    choice = served.chat(tools=[WEATHER], logprobs=True).json()["choices"][0]
    listed = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in listed) == choice["message"]["content"]
    streamed: list[Any] = []
    for chunk in chunks_of(served.chat(tools=[WEATHER], logprobs=True, stream=True).text):
        logprobs = chunk["choices"][0]["logprobs"]
        streamed.extend(logprobs["content"] if logprobs else [])
    assert streamed == listed


# ------------------------------------------------------------------ reasoning


def test_reasoning_has_a_field_of_its_own_and_is_counted(served: Served) -> None:
    served.generator.play(write("<think>hm</think>yes"))
    whole = served.chat().json()
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm")
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] >= 2
    options = {"include_usage": True}
    chunks = chunks_of(served.chat(stream=True, stream_options=options).text)
    assert streamed_message(chunks)[0]["reasoning_content"] == "hm"
    assert chunks[-1]["usage"]["completion_tokens_details"] == details


def test_a11_stop_strings_are_looked_for_in_the_answer_only(served: Served) -> None:
    served.generator.play(write("<think>STOP here?</think>the answer STOP more"))
    for stream in (False, True):
        answer = served.chat(stop=["STOP"], stream=stream)
        if stream:
            message, reason = streamed_message(chunks_of(answer.text))
        else:
            choice = answer.json()["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
        assert message["reasoning_content"] == "STOP here?"
        assert message["content"] == "the answer "
        assert reason == "stop"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": "low"}, Thinking(mode="on", effort="low")),
        ({"reasoning_effort": "xhigh"}, Thinking(mode="on", effort="max")),
        ({"reasoning_effort": "none"}, Thinking(mode="off")),
        ({"thinking": {"type": "enabled"}}, Thinking(mode="on")),
        ({"thinking": {"type": "disabled"}}, Thinking(mode="off")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking(mode="off")),
        (
            {"reasoning_effort": "high", "thinking": {"type": "enabled"}},
            Thinking(mode="on", effort="high"),
        ),
    ],
)
def test_every_switch_of_thinking_is_understood(
    served: Served, recipe: TalkRecipe, fields: dict[str, object], expected: Thinking
) -> None:
    assert conversation_of(served, recipe, **fields).thinking == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "thinking"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template": "{% for x in y %}"}, "chat_template"),
    ],
)
def test_i05_templates_and_their_arguments_are_not_taken_from_requests(
    served: Served, fields: dict[str, object], param: str
) -> None:
    answer = served.chat(**fields)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


# ------------------------------------------------------------------ conversations in


def history(arguments: object) -> list[dict[str, object]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]


def test_calls_results_and_reasoning_of_earlier_turns_reach_the_recipe(
    served: Served, recipe: TalkRecipe
) -> None:
    said = conversation_of(served, recipe, messages=history('{"a":1}'))
    user, assistant, tool = said.messages
    assert user.content == "hi"
    assert assistant.reasoning == "hm"
    assert assistant.tool_calls[0].call_id == "c1"
    assert assistant.tool_calls[0].arguments == '{"a":1}'
    assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "c1", "sunny")


def test_b07_arguments_as_text_and_as_an_object_are_one_thing(
    served: Served, recipe: TalkRecipe
) -> None:
    prompts = []
    for arguments in ('{"city": "Ålesund", "n": 1}', {"city": "Ålesund", "n": 1}):
        conversation_of(served, recipe, messages=history(arguments))
        prompts.append(served.generator.requests[-1].prompt_tokens)
    assert prompts[0] == prompts[1]
    for empty in ("", " ", None):
        said = conversation_of(served, recipe, messages=history(empty))
        assert said.messages[1].tool_calls[0].arguments == "{}"


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", '"x"', [1], 7, "nul", "[" * 5000])
def test_b07_arguments_that_are_no_object_are_a_400_that_names_them(
    served: Served, arguments: object
) -> None:
    answer = served.chat(messages=history(arguments))
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages[1].tool_calls[0].function.arguments"


def test_a23_developer_and_later_system_messages_keep_their_place(
    served: Served, recipe: TalkRecipe
) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": [{"type": "text", "text": "d"}]},
    ]
    said = conversation_of(served, recipe, messages=messages)
    assert [(m.role, m.content) for m in said.messages] == [
        ("user", "a"),
        ("system", "b"),
        ("user", "c"),
        ("system", "d"),
    ]


def test_tools_keep_their_order_and_their_schemas_key_order(
    served: Served, recipe: TalkRecipe
) -> None:
    said = conversation_of(
        served, recipe, tools=[WEATHER, OTHER], tool_choice=NAMED, parallel_tool_calls=False
    )
    parameters = '{"type":"object","properties":{"z":{},"a":{}}}'
    assert said.tools == (
        Tool(name="weather", description="of a city", parameters=parameters),
        Tool(name="other"),
    )
    assert said.tool_choice == ToolChoice(kind="named", name="weather", parallel=False)


def test_a_last_assistant_message_with_prefix_is_continued(
    served: Served, recipe: TalkRecipe
) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "prefix": True},
    ]
    said = conversation_of(served, recipe, messages=messages)
    assert [message.continues for message in said.messages] == [False, True]


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, None),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
        ({"messages": [USER, {**USER, "content": "forbidden"}]}, "messages[1].content"),
        ({"messages": []}, "messages"),
    ],
)
def test_tools_and_messages_that_make_no_sense_are_a_400_that_names_the_place(
    served: Served, fields: dict[str, object], param: str | None
) -> None:
    answer = served.chat(**fields)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == (param or "messages[0].tool_calls")


@pytest.mark.parametrize("part", ["image_url", "input_image", "input_audio", "file"])
def test_i02_parts_other_than_text_are_a_400_and_nothing_is_fetched(
    served: Served, part: str
) -> None:
    content = [{"type": part, part: {"url": "http://127.0.0.1:1/x.png"}}]
    answer = served.chat(content)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages[0].content[0]"


# ------------------------------------------------------------------ answer formats


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Constraint("json_schema", SCHEMA_TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, Constraint("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint("lark", 'start: "a"')),
        (
            {"tools": [WEATHER], "tool_choice": NAMED},
            Constraint("turn", "weather"),
        ),
    ],
)
def test_the_form_of_the_answer_reaches_the_request(
    served: Served, fields: dict[str, object], expected: Constraint | None
) -> None:
    served.generator.play(write("ok"))
    assert served.chat(**fields).status_code == 200
    assert served.generator.requests[-1].constraint == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "bad"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"guided_json": {}}, "guided_json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_i03_a_form_that_cannot_be_is_a_400_before_any_header(
    served: Served, fields: dict[str, object], param: str, stream: bool
) -> None:
    served.generator.play(write("ok"))
    answer = served.chat(**fields, stream=stream)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert not served.generator.requests


def test_models_tell_what_the_format_can_carry(served: Served) -> None:
    served.generator.play(write("ok"))
    (card,) = served.get("/v1/models").json()["data"]
    assert card["capabilities"] == {
        "chat": True,
        "tools": True,
        "parallel_tools": True,
        "forced_tools": True,
        "thinking": "optional",
    }
    assert card["notes"] == ["drops nothing"]
