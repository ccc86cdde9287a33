"""Tools, calls, results and reasoning through chat templates: the model's ids, or a clear 400."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from recipe_models import STYLES, TOOL_STYLES
from recipe_talks import (
    CALL_WITH_TEXT,
    OSLO,
    PARALLEL,
    REASONED,
    RUN,
    TOOL_TALKS,
    WEATHER,
    answer,
    ask,
    call,
    calling,
    plain_ids,
    result,
    talk,
    with_mode,
)

from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Conversation, Thinking, ToolCall, ToolChoice
from headwater.recipe.messages import MAX_JSON_DEPTH
from headwater.recipe.recipe import PromptSpan
from headwater.recipe.template_probe import CHANGES_HISTORY, DROPS_REASONING, NO_EFFORT


@pytest.mark.parametrize("talk_name", TOOL_TALKS)
@pytest.mark.parametrize("name", TOOL_STYLES)
def test_tools_calls_and_results_give_the_ids_of_the_models_own_template(
    name: str, talk_name: str
) -> None:
    style, conversation = STYLES[name](), TOOL_TALKS[talk_name]
    assert list(style.recipe.encode(conversation).tokens) == plain_ids(style, conversation)
    done = style.recipe.encode(conversation, add_generation_prompt=False)
    assert list(done.tokens) == plain_ids(style, conversation, generation=False)


@pytest.mark.parametrize("name", ["qwen3", "xml"])
@pytest.mark.parametrize("mode", ["default", "on", "off"])
@pytest.mark.parametrize("conversation", [REASONED, PARALLEL, CALL_WITH_TEXT])
def test_reasoning_and_parallel_calls_too_whatever_the_switch(
    name: str, mode: str, conversation: Conversation
) -> None:
    style, conversation = STYLES[name](), with_mode(conversation, mode)
    assert list(style.recipe.encode(conversation).tokens) == plain_ids(style, conversation)


# -- what a template can carry, found by probing -----------------------------------------


@pytest.mark.parametrize(
    ("name", "tools", "parallel", "thinking", "notes"),
    [
        ("chatml", False, False, "none", ()),
        ("llama3", False, False, "none", ()),
        ("gemma", False, False, "none", ()),
        ("inst", False, False, "none", ()),
        ("metaspace", False, False, "none", ()),
        ("qwen", False, False, "optional", (DROPS_REASONING, CHANGES_HISTORY, NO_EFFORT)),
        ("qwen3", True, True, "optional", (DROPS_REASONING, CHANGES_HISTORY, NO_EFFORT)),
        ("xml", True, True, "optional", ()),
        ("llama31", True, False, "none", ()),
        ("r1", True, True, "always", (DROPS_REASONING, NO_EFFORT)),
    ],
)
def test_capabilities_are_what_the_template_prints(
    name: str, tools: bool, parallel: bool, thinking: str, notes: tuple[str, ...]
) -> None:
    can = STYLES[name]().recipe.capabilities
    assert can.chat
    assert (can.tools, can.parallel_tools, can.thinking) == (tools, parallel, thinking)
    assert can.notes == notes


@pytest.mark.parametrize("name", ["chatml", "gemma", "llama3", "inst"])
def test_tools_that_the_template_would_not_print_are_refused_by_name(name: str) -> None:
    recipe = STYLES[name]().recipe
    with pytest.raises(InvalidRequest, match="no format for tools") as caught:
        recipe.encode(talk(ask("hello"), tools=[RUN]))
    assert caught.value.param == "tools"
    # Where no tool may be called, leaving them out changes nothing for the caller.
    none = replace(talk(ask("hello"), tools=[RUN]), tool_choice=ToolChoice(kind="none"))
    assert recipe.encode(none).tokens == recipe.encode(talk(ask("hello"))).tokens


def test_calls_that_the_template_would_drop_are_refused_by_name() -> None:
    recipe = STYLES["chatml"]().recipe
    with pytest.raises(InvalidRequest) as caught:
        recipe.encode(talk(ask("hello"), calling(call("run", {})), result("ok")))
    assert caught.value.param == "messages[1].tool_calls[0]"
    with pytest.raises(InvalidRequest) as caught:
        STYLES["llama31"]().recipe.encode(CALL_WITH_TEXT)
    assert caught.value.param == "messages[1]"
    with pytest.raises(InvalidRequest, match="single tool calls"):
        STYLES["llama31"]().recipe.encode(PARALLEL)


def test_a_thinking_switch_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="does not reason") as caught:
        STYLES["llama31"]().recipe.encode(talk(ask("hello"), mode="on"))
    assert caught.value.param == "thinking"
    with pytest.raises(InvalidRequest, match="always reasons"):
        STYLES["r1"]().recipe.encode(talk(ask("hello"), mode="off"))
    assert STYLES["r1"]().recipe.encode(talk(ask("hello"), mode="on"))
    assert STYLES["chatml"]().recipe.encode(talk(ask("hello"), mode="off"))


def test_effort_reaches_a_template_that_reads_it() -> None:
    recipe = STYLES["xml"]().recipe
    hard = replace(talk(ask("hello")), thinking=Thinking(mode="on", effort="max"))
    assert recipe.decode(recipe.encode(hard).tokens, keep_control=True).endswith("<think>[high]")


def test_a_new_parser_knows_whether_the_prompt_opened_the_reasoning() -> None:
    opened: list[bool] = []

    class Listening:
        reasoning = tools = True

        def open(self, *, in_reasoning: bool, tools: bool, new_call_id: object) -> object:
            opened.append(in_reasoning)
            return object()

    recipe = STYLES["xml"]().recipe
    recipe = type(recipe).from_source(STYLES["xml"]().source, parser_format=Listening())  # type: ignore[arg-type]
    for mode in ("default", "on", "off"):
        recipe.open_parser(talk(ask("hello"), mode=mode))
    recipe.open_parser(talk(ask("hello"), replace(answer("so"), continues=True), mode="on"))
    recipe.open_parser(talk(ask("hello"), replace(answer("", "hm"), continues=True)))
    assert opened == [False, True, False, False, True]


# -- arguments (B07) -----------------------------------------------------------------------


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_b07_arguments_sent_as_text_or_as_an_object_give_the_same_ids(name: str) -> None:
    recipe = STYLES[name]().recipe
    as_object = json.dumps({"city": "Oslo", "days": 2})
    prompts = [
        recipe.encode(
            talk(
                ask("hello"),
                calling(ToolCall(call_id="call_0001", name="get_weather", arguments=arguments)),
                result("cold"),
                tools=[WEATHER],
            )
        ).tokens
        for arguments in (as_object, '{"city": "Oslo", "days": 2}')
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_b07_arguments_are_encoded_once(name: str) -> None:
    recipe = STYLES[name]().recipe
    text = recipe.decode(recipe.encode(TOOL_TALKS["called"]).tokens)
    if name == "xml":
        assert '<parameter=note>\na "b"\n\tc \\ 東京 é\n</parameter>' in text
    elif name == "r1":
        assert json.dumps(OSLO) in text
    else:
        assert json.dumps(OSLO, ensure_ascii=False) in text


@pytest.mark.parametrize(
    "arguments", ["", "{", "[]", "1", '"x"', "null", '{"a": NaN}', '{"a": 1e999}', "{}x"]
)
@pytest.mark.parametrize("name", TOOL_STYLES)
def test_b07_arguments_that_are_no_json_object_are_refused_by_name(
    name: str, arguments: str
) -> None:
    bad = ToolCall(call_id="call_0001", name="run", arguments=arguments)
    with pytest.raises(InvalidRequest) as caught:
        STYLES[name]().recipe.encode(talk(ask("hello"), calling(bad), result("ok"), tools=[RUN]))
    assert caught.value.param == "messages[1].tool_calls[0].arguments"


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_keys_keep_the_callers_order(name: str) -> None:
    if name == "xml":  # this template sorts what stands beside the properties
        return
    recipe = STYLES[name]().recipe
    parameters = '{"zeta":1,"type":"object","properties":{"b":{},"a":{}},"alpha":2}'
    tool = replace(RUN, parameters=parameters)
    prompt = recipe.encode(talk(ask("x"), calling(call("run", {"b": 1, "a": 2})), result("ok"),
                                tools=[tool]))  # fmt: skip
    text = "".join(recipe.decode(prompt.tokens).split())
    assert parameters in text
    assert '{"b":1,"a":2}' in text


# -- a last message that goes on -----------------------------------------------------------


@pytest.mark.parametrize("name", STYLES)
def test_a_message_that_continues_ends_the_prompt(name: str) -> None:
    style = STYLES[name]()
    last = replace(answer("hello wor"), continues=True)
    prompt = style.recipe.encode(talk(ask("the fox"), last))
    text = style.recipe.decode(prompt.tokens)
    assert text.endswith("hello wor")
    closed = style.recipe.encode(talk(ask("the fox"), answer("hello wor")))
    assert prompt.num_control_tokens < closed.num_control_tokens


def test_reasoning_can_be_continued_where_the_template_prints_it() -> None:
    recipe = STYLES["xml"]().recipe
    last = replace(answer("", "hm, so"), continues=True)
    prompt = recipe.encode(talk(ask("x"), last))
    assert recipe.decode(prompt.tokens, keep_control=True).endswith("<think>hm, so")
    with pytest.raises(InvalidRequest, match="does not print its text"):
        STYLES["chatml"]().recipe.encode(talk(ask("x"), last))


def test_only_a_last_assistant_message_with_text_can_continue() -> None:
    recipe = STYLES["qwen3"]().recipe
    first = replace(answer("a"), continues=True)
    for conversation in (
        talk(ask("x"), first, ask("y")),
        talk(replace(ask("x"), continues=True)),
        talk(ask("x"), replace(calling(call("run", {})), continues=True)),
        talk(ask("x"), replace(answer("  "), continues=True)),
    ):
        with pytest.raises(InvalidRequest, match="cannot be continued") as caught:
            recipe.encode(conversation)
        assert str(caught.value.param).startswith("messages[")


# -- where tokens come from ----------------------------------------------------------------


def spans_by_place(spans: tuple[PromptSpan, ...]) -> Iterator[tuple[int, str]]:
    return ((span.message_index, span.part) for span in spans)


@pytest.mark.parametrize("name", ["qwen3", "xml"])
def test_spans_name_message_part_and_characters(name: str) -> None:
    recipe = STYLES[name]().recipe
    prompt = recipe.encode(REASONED)
    found = set(spans_by_place(prompt.spans))
    assert {
        (0, "tool"),
        (0, "content"),
        (1, "tool_call"),
        (2, "content"),
        (3, "content"),
        (4, "content"),
        (5, "tool_call"),
        (5, "content"),
        (6, "content"),
        (5, "reasoning"),
    } <= found
    previous = 0
    for span in prompt.spans:
        assert previous <= span.start < span.end <= len(prompt.tokens)
        previous = span.end
        if span.part == "content":
            source = REASONED.messages[span.message_index].content
            assert recipe.decode(prompt.tokens[span.start : span.end]) == source
            assert (span.start_char, span.end_char) == (0, len(source))


def test_trimmed_text_says_which_characters_are_left() -> None:
    recipe = STYLES["llama3"]().recipe
    prompt = recipe.encode(talk(ask("  hello world \n")))
    (span,) = prompt.spans
    assert recipe.decode(prompt.tokens[span.start : span.end]) == "hello world"
    assert (span.start_char, span.end_char) == (2, 13)


def test_a_tool_printed_as_json_is_one_span_of_the_whole_definition() -> None:
    prompt = STYLES["qwen3"]().recipe.encode(talk(ask("x"), tools=[WEATHER, RUN]))
    tools = [span for span in prompt.spans if span.part == "tool"]
    assert [span.message_index for span in tools] == [0, 1]
    for span, tool in zip(tools, (WEATHER, RUN), strict=True):
        size = len(tool.name + tool.description + tool.parameters)
        assert (span.start_char, span.end_char) == (0, size)


# -- hostile input -------------------------------------------------------------------------


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 10_000, 1_000_000])
def test_i03_deep_nesting_is_refused_by_name(depth: int) -> None:
    recipe = STYLES["qwen3"]().recipe
    with pytest.raises(InvalidRequest, match="levels deep") as caught:
        recipe.encode(talk(ask("x"), tools=[RUN, replace(RUN, parameters=nested(depth))]))
    assert caught.value.param == "tools[1].parameters"
    deep = ToolCall(call_id="call_0001", name="run", arguments=nested(depth))
    with pytest.raises(InvalidRequest, match="levels deep") as caught:
        recipe.encode(talk(ask("x"), calling(deep), result("ok"), tools=[RUN]))
    assert caught.value.param == "messages[1].tool_calls[0].arguments"


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_nesting_up_to_the_bound_is_served(name: str) -> None:
    tool = replace(RUN, parameters=nested(MAX_JSON_DEPTH - 1))
    assert STYLES[name]().recipe.encode(talk(ask("x"), tools=[tool]))


HALF = "\ud83d"
SURROGATES: dict[str, Conversation] = {
    "messages[0].content": talk(ask(HALF)),
    "messages[1].reasoning": talk(ask("x"), answer("y", HALF)),
    "messages[0].name": talk(replace(ask("x"), name=HALF)),
    "messages[1].tool_calls[0].id": talk(ask("x"), calling(call("run", {}, HALF))),
    "messages[1].tool_calls[0].name": talk(ask("x"), calling(call(HALF, {}))),
    "messages[1].tool_calls[0].arguments": talk(ask("x"), calling(call("run", {"a": [HALF]}))),
    "messages[2].tool_call_id": talk(ask("x"), calling(call("run", {})), result("y", HALF)),
    "messages[2].content": talk(ask("x"), calling(call("run", {})), result(HALF)),
    "tools[0].name": talk(ask("x"), tools=[replace(RUN, name=HALF)]),
    "tools[0].description": talk(ask("x"), tools=[replace(RUN, description=HALF)]),
    "tools[1].parameters": talk(
        ask("x"), tools=[RUN, replace(RUN, parameters=json.dumps({"properties": {HALF: 1}}))]
    ),
}


@pytest.mark.parametrize("param", SURROGATES)
@pytest.mark.parametrize("name", ["qwen3", "r1"])
def test_half_a_character_is_refused_by_name_wherever_it_stands(name: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match="unpaired surrogate") as caught:
        STYLES[name]().recipe.encode(SURROGATES[param])
    assert caught.value.param == param


LARGE: dict[str, Callable[[int], Conversation]] = {
    "a long session": lambda n: talk(
        ask("x"),
        *(m for i in range(n) for m in (calling(call("run", {"a": i}, f"c{i}")), result("ok"))),
        tools=[RUN],
    ),
    "many tools": lambda n: talk(ask("x"), tools=[replace(RUN, name=f"t{i}") for i in range(n)]),
    "a wide schema": lambda n: talk(
        ask("x"),
        tools=[
            replace(
                RUN,
                parameters=json.dumps(
                    {"type": "object", "properties": {f"p{i}": {"a": "b\n"} for i in range(n)}}
                ),
            )
        ],
    ),
    "many escapes": lambda n: talk(
        ask("x"), calling(call("run", {"a": '\n"x' * 10 * n})), result("ok"), tools=[RUN]
    ),
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("name", ["qwen3", "r1"])
def test_i07_large_conversations_with_tools_are_served_at_linear_cost(name: str, kind: str) -> None:
    recipe = STYLES[name]().recipe

    def seconds(size: int) -> float:
        conversation = LARGE[kind](size)
        started_s = time.process_time()
        assert recipe.encode(conversation).spans
        return time.process_time() - started_s

    small_s = max(seconds(200), 0.02)
    # Ten times the size: far from the hundred times of quadratic cost.
    assert seconds(2000) < 40 * small_s
