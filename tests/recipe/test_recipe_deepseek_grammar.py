"""What a constrained DeepSeek turn may be: compiled, and followed token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from recipe_deepseek import (
    BOTH,
    V4_1,
    deepseek_recipe,
    deepseek_source,
    dsml_calls,
    output_ids,
    read_output,
)
from recipe_talks import RUN, WEATHER, ask, talk

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe.constraints import GrammarCompiler
from headwater.recipe.conversation import Conversation, Tool, ToolChoice
from headwater.recipe.deepseek_format import DSML, END_THINK, DeepseekVersion
from headwater.recipe.messages import Json
from headwater.recipe.parts import ToolCallArguments, ToolCallEnd
from headwater.recipe.schema_values import PossibleValues, possible_values

OPENING = f"\n\n<{DSML} calls>\n"
NUMBER = Constraint("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},'
                                   '"required":["a"],"additionalProperties":false}')  # fmt: skip


def forced(
    *tools: Tool, kind: str = "required", name: str | None = None, parallel: bool = True
) -> Conversation:
    choice = ToolChoice(kind="named" if kind == "named" else "required", name=name,
                        parallel=parallel)  # fmt: skip
    return replace(talk(ask("q"), tools=tools), tool_choice=choice)


def allows(
    conversation: Conversation,
    text: str,
    *,
    version: DeepseekVersion = V4_1,
    as_text: bool = False,
    is_whole: bool = True,
) -> bool:
    """Whether the model may write ``text`` and, if it is the whole turn, then stop."""
    recipe = deepseek_recipe(version)
    constraint = recipe.turn_constraint(conversation)
    assert constraint is not None
    matcher = GrammarCompiler.from_source(deepseek_source(version)).compile(constraint)()
    for token_id in output_ids(recipe, text, as_text=as_text):
        bits = matcher.allowed_bits()
        is_allowed = bool(bits[token_id // 8] >> token_id % 8 & 1)
        assert matcher.accept(token_id) == is_allowed
        if not is_allowed:
            return False
    return not is_whole or matcher.is_complete


def calls(
    *made: tuple[str, Sequence[tuple[str, str, str]]], version: DeepseekVersion = V4_1
) -> str:
    """A block of calls without its opening, which the prompt holds."""
    text = dsml_calls(version, *made)
    return text[text.index("\n", 3) + 1 :]


def test_an_unlimited_turn_has_no_grammar() -> None:
    recipe = deepseek_recipe(V4_1)
    assert recipe.turn_constraint(talk(ask("q"), tools=[RUN])) is None


def test_an_answers_format_binds_the_answer_and_not_the_reasoning() -> None:
    thinking = replace(talk(ask("q")), answer=NUMBER)
    assert allows(thinking, f'well {{"b"}}\n\n{END_THINK}{{"a": 3}}')
    assert allows(thinking, f'{END_THINK}{{"a": 3}}')
    assert not allows(thinking, f'hm{END_THINK}{{"b": 3}}')
    assert not allows(thinking, '{"a": 3}')  # still in the reasoning
    # Only the control token ends the reasoning.
    assert not allows(thinking, f'hm{END_THINK}{{"a": 3}}', as_text=True)
    off = replace(talk(ask("q"), mode="off"), answer=NUMBER)
    assert deepseek_recipe(V4_1).turn_constraint(off) == NUMBER


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (Constraint("json_object"), '{"x": [1, {}]}', "[1]"),
        (Constraint("regex", "a/b[0-9]+"), "a/b12", "ab12"),
        (Constraint("lark", 'start: "x" y\ny: /[0-9]{2}/'), "x12", "x1"),
    ],
)
def test_every_kind_of_format_can_follow_reasoning(answer: Constraint, good: str, bad: str) -> None:
    conversation = replace(talk(ask("q")), answer=answer)
    assert allows(conversation, f"hm{END_THINK}{good}")
    assert not allows(conversation, f"hm{END_THINK}{bad}")


def test_with_a_format_and_tools_a_turn_is_an_answer_or_calls() -> None:
    conversation = replace(talk(ask("q"), tools=[RUN]), answer=NUMBER)
    block = dsml_calls(V4_1, ("run", [("argv", "false", '["ls"]')]))
    assert allows(conversation, f'hm{END_THINK}{{"a": 3}}')
    assert allows(conversation, f"hm{END_THINK}{block}")
    assert not allows(conversation, f"hm{END_THINK}so{block}")
    forbidden = replace(conversation, tool_choice=ToolChoice(kind="none"))
    assert not allows(forbidden, f"hm{END_THINK}{block}")


@pytest.mark.parametrize("version", BOTH)
def test_a_forced_call_is_one_of_the_tools_with_arguments_of_its_schema(
    version: DeepseekVersion,
) -> None:
    conversation = forced(WEATHER, RUN)
    good = [
        ("get_weather", [("city", "true", 'Oslo </b> "x"\n'), ("days", "false", "3")]),
        ("get_weather", [("city", "true", ""), ("unit", "true", "C")]),
        ("run", [("argv", "false", '["ls", "-l"]')]),
        ("run", []),
    ]
    for made in good:
        assert allows(conversation, calls(made, version=version), version=version), made
    assert allows(conversation, calls(*good, version=version), version=version)
    bad = [
        ("other", []),
        ("get_weather", []),  # city is required
        ("get_weather", [("city", "true", "x"), ("unit", "true", "K")]),
        ("get_weather", [("city", "false", '"x"')]),
        ("get_weather", [("city", "true", "x"), ("days", "false", "many")]),
        ("get_weather", [("city", "true", "x"), ("more", "true", "y")]),
        ("run", [("argv", "false", "[1]")]),
    ]
    for made in bad:
        assert not allows(conversation, calls(made, version=version), version=version), made


def test_a_named_tool_is_the_only_one_and_parallel_calls_can_be_forbidden() -> None:
    one = calls(("run", []))
    two = calls(("run", []), ("run", []))
    named = forced(WEATHER, RUN, kind="named", name="run")
    assert allows(named, one)
    assert allows(named, two)
    assert not allows(named, calls(("get_weather", [("city", "true", "x")])))
    alone = forced(WEATHER, RUN, parallel=False)
    assert allows(alone, one)
    assert not allows(alone, two)


def test_a_tool_without_properties_takes_any_arguments() -> None:
    conversation = forced(Tool(name="f", parameters='{"type":"object"}'))
    assert allows(conversation, calls(("f", [])))
    assert allows(conversation, calls(("f", [("a", "true", "x"), ("b", "false", "[1, null]")])))
    assert not allows(conversation, calls(("f", [("a", "false", "oops")])))


def test_optional_and_referenced_types_may_be_text_or_json() -> None:
    schema = {
        "type": "object",
        "properties": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"$ref": "#/$defs/Kind"},
        },
        "$defs": {"Kind": {"enum": ["a", "b", 3]}},
    }
    conversation = forced(Tool(name="f", parameters=json.dumps(schema), strict=True))
    assert allows(conversation, calls(("f", [("maybe", "true", "x"), ("kind", "true", "a")])))
    assert allows(conversation, calls(("f", [("maybe", "false", "null"), ("kind", "false", "3")])))
    assert not allows(conversation, calls(("f", [("kind", "true", "c")])))


def test_what_the_grammar_allows_is_read_as_complete_calls() -> None:
    recipe = deepseek_recipe(V4_1)
    conversation = forced(WEATHER, RUN)
    text = calls(
        ("get_weather", [("city", "true", 'a\n"b" \\'), ("days", "false", "3")]), ("run", [])
    )
    assert allows(conversation, text)
    parts = read_output(recipe, conversation, [output_ids(recipe, text)]).parts
    arguments = [json.loads(part.text) for part in parts if isinstance(part, ToolCallArguments)]
    assert arguments == [{"city": 'a\n"b" \\', "days": 3}, {}]
    assert sum(isinstance(part, ToolCallEnd) for part in parts) == 2


@pytest.mark.parametrize(
    ("conversation", "param"),
    [
        (forced(kind="required"), "tool_choice"),
        (forced(RUN, kind="named", name="other"), "tool_choice"),
        (forced(Tool(name='a"b')), None),
        (forced(Tool(name="f", parameters="nope")), None),
    ],
)
def test_what_cannot_be_forced_is_refused(conversation: Conversation, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        deepseek_recipe(V4_1).turn_constraint(conversation)
    assert refused.value.param == param


def test_possible_values_follow_references_only_so_far() -> None:
    endless: dict[str, Json] = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert possible_values(endless) == PossibleValues(any_text=True, other=True)
    assert possible_values({"type": ["string", "null"]}) == PossibleValues(
        any_text=True, other=True
    )
    assert possible_values({"const": 3}) == PossibleValues(other=True)
