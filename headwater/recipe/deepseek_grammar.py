"""What a DeepSeek turn may consist of, as a grammar: the answer's format and forced calls.

    answer format        reasoning </think> answer
    forced call          call+ </DSML calls>             (the prompt opened the block)
    both, call optional  reasoning </think> (answer | <DSML calls> call+ </DSML calls>)

Control tokens are named by id, so no text can stand for one. A call's arguments
come in the order of its schema, each by its own schema: exactly where the tool is
``strict``, as far as it can be enforced elsewhere. A parameter that is a string is
written as plain text, on which an enum is imposed but no pattern or length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Conversation, Tool
from headwater.recipe.deepseek_format import DeepseekVersion
from headwater.recipe.deepseek_render import forces_call, thinks
from headwater.recipe.grammar_checks import invalid, parse_schema
from headwater.recipe.grammar_terms import (
    TEXT,
    control,
    json_term,
    literal,
    problem_of,
    term,
)
from headwater.recipe.messages import Json
from headwater.recipe.schema_values import DEFINITIONS, possible_values
from headwater.recipe.turn_grammar import MAX_FORCED_CALLS, after_reasoning

_AS_TEXT: Final = literal('" string="true">')
_AS_JSON: Final = literal('" string="false">')
_ANY_NAME: Final = r'/[^"<>\n]+/'
# Up to the next control token, before which stand the first two characters of a closing tag.
_TEXT_AND_CLOSE: Final = r"/(.|\n)*<\//"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekTokens:
    """The control ids that a turn's markup is made of."""

    dsml_id: int
    end_think_id: int


def turn_constraint(
    conversation: Conversation, version: DeepseekVersion, tokens: DeepseekTokens
) -> Constraint | None:
    """The grammar of the whole turn; None if anything goes.

    Raises InvalidRequest for a forced tool that is not offered, or a schema or
    format that cannot be enforced.
    """
    answer = conversation.answer
    calls = _CallRules(version, tokens, parallel=conversation.tool_choice.parallel)
    if forces_call(conversation):
        rules = calls.rules(_forced_tools(conversation))
        return _turn("start: calls_and_close", *rules)
    if answer is None:
        return None
    may_call = conversation.tools and conversation.tool_choice.kind != "none"
    if not may_call:
        if thinks(conversation):
            return after_reasoning(answer, end=tokens.end_think_id)
        return answer
    reasoning = f"{TEXT} {control(tokens.end_think_id)} " if thinks(conversation) else ""
    return _turn(
        f"start: {reasoning}(gap answer | calls)",
        r"gap: /\n{0,2}/",
        f"answer: {term(answer)}",
        *calls.rules(conversation.tools),
    )


def _forced_tools(conversation: Conversation) -> Sequence[Tool]:
    choice = conversation.tool_choice
    forced = [t for t in conversation.tools if choice.kind == "required" or t.name == choice.name]
    if not forced:
        raise InvalidRequest(
            "tool_choice asks for a tool that is not among the tools", param="tool_choice"
        )
    return forced


def _turn(*lines: str) -> Constraint:
    return Constraint("turn", "\n".join(lines) + "\n")


class _CallRules:
    """The rules ``calls`` (a whole block) and ``calls_and_close`` (one that is open)."""

    def __init__(self, version: DeepseekVersion, tokens: DeepseekTokens, *, parallel: bool) -> None:
        self._version = version
        self._dsml = control(tokens.dsml_id)
        self._more = f" call{{0,{MAX_FORCED_CALLS - 1}}}" if parallel else ""

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        lines = [
            f'calls: "\\n\\n<" {self._tag("calls", ">" + chr(10))} calls_and_close',
            f'calls_and_close: call{self._more} "</" {self._tag("calls", ">")}',
            "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
            f"text_and_close: {_TEXT_AND_CLOSE}",
        ]
        for index, tool in enumerate(tools):
            try:
                self._add_tool(index, tool, lines)
            except InvalidRequest as error:
                raise invalid(f"tool {tool.name!r}: {error}", "invalid_json_schema") from None
        return lines

    def _add_tool(self, index: int, tool: Tool, lines: list[str]) -> None:
        _require_quotable(tool.name)
        schema = parse_schema(tool.parameters)
        opening = self._tag("invoke", f' name="{tool.name}">\n')
        closing = self._tag("invoke", ">\n")
        parameters = self._parameters(index, tool, schema, lines)
        lines.append(f'call_{index}: "<" {opening} {parameters} "</" {closing}')

    def _parameters(self, index: int, tool: Tool, schema: dict[str, Json], lines: list[str]) -> str:
        """All parameters of a call in order, as an expression over rules added to ``lines``."""
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            lines.append(f"parameter_{index}: {self._parameter(_ANY_NAME, {}, tool)}")
            return f"parameter_{index}*"
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        shared: dict[str, Json] = {key: schema[key] for key in DEFINITIONS if key in schema}
        names: list[str] = []
        for number, (name, value) in enumerate(properties.items()):
            _require_quotable(name)
            found: dict[str, Json] = {**shared, **value} if isinstance(value, dict) else {}
            rule = f"parameter_{index}_{number}"
            lines.append(f"{rule}: {self._parameter(literal(name), found, tool)}")
            names.append(rule if name in needed else f"{rule}?")
        return " ".join(names)

    def _parameter(self, name: str, schema: dict[str, Json], tool: Tool) -> str:
        forms: list[str] = []
        values = possible_values(schema)
        if values.texts:
            forms.append(f'{_AS_TEXT} ({" | ".join(map(literal, values.texts))}) "</"')
        elif values.any_text:
            forms.append(f"{_AS_TEXT} text_and_close")
        if values.other:
            forms.append(f'{_AS_JSON} {_value_term(schema, is_strict=tool.strict)} "</"')
        opening = self._tag("parameter", ' name="')
        return f'"<" {opening} {name} ({" | ".join(forms)}) {self._tag("parameter", ">" + chr(10))}'

    def _tag(self, name: str, rest: str) -> str:
        return f"{self._dsml} {literal(self._version.tag(name) + rest)}"


def _value_term(schema: dict[str, Json], *, is_strict: bool) -> str:
    wanted = json_term(schema, is_lenient=not is_strict)
    return json_term({}) if not is_strict and problem_of(f"start: {wanted}") else wanted


def _require_quotable(name: str) -> None:
    """The format writes names between quotes and has no escape for one."""
    if not name or '"' in name or "\n" in name:
        raise invalid("a name cannot be empty or hold quotes or line breaks", "invalid_value")
