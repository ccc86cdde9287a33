"""What a model with marks may write in a turn: formats and forced calls, around its reasoning."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from recipe_models import STYLES
from recipe_talks import RUN, WEATHER, answer, ask, talk

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe.chat import UNREADABLE_CALLS, ChatRecipe
from headwater.recipe.constraints import GrammarCompiler
from headwater.recipe.conversation import Conversation, ToolChoice
from headwater.recipe.parts import Part, ReasoningText, ToolCallStart

SCHEMA = Constraint("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}')
CALL = '<tool_call>\n{"name": "run", "arguments": {"argv": ["ls"]}}\n</tool_call>'
WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def recipe() -> ChatRecipe:
    """With the output format that its template's marks decide."""
    return ChatRecipe.from_source(STYLES["qwen3"]().source)


def output_ids(recipe: ChatRecipe, text: str) -> list[int]:
    ranges = recipe.tokenizer.control_ranges(text, [(0, len(text))])
    return recipe.tokenizer.encode_rendered(text, ranges)


def allows(recipe: ChatRecipe, conversation: Conversation, text: str) -> bool:
    """Whether the model may write ``text`` and then stop."""
    constraint = recipe.turn_constraint(conversation)
    if constraint is None:
        return True
    compiler = GrammarCompiler(lambda: (recipe.tokenizer, recipe.end_token_ids))
    matcher = compiler.compile(constraint)()
    return all(map(matcher.accept, output_ids(recipe, text))) and matcher.is_complete


def test_nothing_is_asked_so_anything_goes() -> None:
    assert recipe().turn_constraint(talk(ask("x"), tools=[RUN])) is None


@pytest.mark.parametrize(
    ("mode", "text", "is_allowed"),
    [
        ("off", '{"a": 1}', True),
        ("off", "hello", False),
        ("off", '<think>hm</think>{"a": 1}', False),
        ("on", '<think>\nhm {\n</think>\n\n{"a": 1}', True),
        ("on", '{"a": 1}', True),
        ("on", "<think>\nhm\n</think>\n\nhello", False),
        ("default", '<think>hm</think>{"a": 1}', True),
    ],
)
def test_an_answers_format_holds_behind_the_reasoning(
    mode: str, text: str, is_allowed: bool
) -> None:
    conversation = replace(talk(ask("x"), mode=mode), answer=SCHEMA)
    assert allows(recipe(), conversation, text) == is_allowed


@pytest.mark.parametrize(
    ("choice", "text", "is_allowed"),
    [
        (ToolChoice(kind="required"), CALL, True),
        (ToolChoice(kind="required"), f"{CALL}\n{WEATHER_CALL}", True),
        (ToolChoice(kind="required", parallel=False), f"{CALL}\n{WEATHER_CALL}", False),
        (ToolChoice(kind="required"), "I had rather not.", False),
        (ToolChoice(kind="required"), CALL.replace("run", "rm"), False),
        (ToolChoice(kind="named", name="run"), CALL, True),
        (ToolChoice(kind="named", name="run"), WEATHER_CALL, False),
        (ToolChoice(kind="required"), f"<think>hm</think>\n\n{CALL}", True),
    ],
)
def test_a_forced_call_is_written_in_the_formats_marks(
    choice: ToolChoice, text: str, is_allowed: bool
) -> None:
    conversation = replace(talk(ask("x"), tools=[RUN, WEATHER], mode="on"), tool_choice=choice)
    assert allows(recipe(), conversation, text) == is_allowed


def test_a_format_leaves_the_model_free_to_call_instead() -> None:
    made = recipe()
    conversation = replace(talk(ask("x"), tools=[RUN], mode="off"), answer=SCHEMA)
    assert allows(made, conversation, '{"a": 1}')
    assert allows(made, conversation, CALL)
    assert not allows(made, conversation, "hello")
    closed = replace(conversation, tool_choice=ToolChoice(kind="none"))
    assert not allows(made, closed, CALL)


def test_marks_that_are_typed_as_text_are_not_the_marks() -> None:
    made = recipe()
    conversation = replace(
        talk(ask("x"), tools=[RUN], mode="off"), tool_choice=ToolChoice(kind="required")
    )
    constraint = made.turn_constraint(conversation)
    assert constraint is not None
    compiler = GrammarCompiler(lambda: (made.tokenizer, made.end_token_ids))
    matcher = compiler.compile(constraint)()
    assert not all(map(matcher.accept, made.tokenizer.encode_text(CALL)))


def test_a_message_that_continues_has_its_reasoning_behind_it() -> None:
    made = recipe()
    last = replace(answer("so"), continues=True)
    conversation = replace(talk(ask("x"), last), answer=Constraint("regex", "[a-z]+"))
    assert allows(made, conversation, "metimes")
    assert not allows(made, conversation, "<think>hm</think>metimes")


def test_what_is_forced_is_what_the_parser_reads_back() -> None:
    made = recipe()
    conversation = talk(ask("x"), tools=[RUN], mode="on")
    parser = made.open_parser(conversation)
    parts: list[Part] = parser.push_control("<think>")
    parts += parser.push("\nhm\n")
    parts += parser.push_control("</think>")
    parts += parser.push("\n\n")
    parts += parser.push_control("<tool_call>")
    parts += parser.push("\n" + json.dumps({"name": "run", "arguments": {}}) + "\n")
    parts += [*parser.push_control("</tool_call>"), *parser.finish()]
    assert [part.name for part in parts if isinstance(part, ToolCallStart)] == ["run"]
    assert "hm" in "".join(part.text for part in parts if isinstance(part, ReasoningText))


@pytest.mark.parametrize("name", ["chatml", "llama31"])
def test_a_format_without_marks_refuses_to_force_a_call(name: str) -> None:
    made = ChatRecipe.from_source(STYLES[name]().source)
    assert not made.capabilities.forced_tools
    conversation = replace(
        talk(ask("x"), tools=[RUN]), tool_choice=ToolChoice(kind="named", name="run")
    )
    with pytest.raises(InvalidRequest, match="cannot be made to call") as caught:
        made.turn_constraint(conversation)
    assert caught.value.param == "tool_choice"
    assert made.turn_constraint(replace(talk(ask("x")), answer=SCHEMA)) == SCHEMA


def test_a_tool_that_is_not_offered_cannot_be_forced() -> None:
    conversation = replace(
        talk(ask("x"), tools=[RUN]), tool_choice=ToolChoice(kind="named", name="rm")
    )
    with pytest.raises(InvalidRequest) as caught:
        recipe().turn_constraint(conversation)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("name", "tools", "forced"),
    [("qwen3", True, True), ("llama31", True, False), ("xml", False, False), ("r1", False, False)],
)
def test_tools_are_offered_only_where_calls_can_be_read_back(
    name: str, tools: bool, forced: bool
) -> None:
    can = ChatRecipe.from_source(STYLES[name]().source).capabilities
    assert (can.tools, can.forced_tools) == (tools, forced)
    assert (UNREADABLE_CALLS in can.notes) == (not tools)
