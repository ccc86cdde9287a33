"""Grammars of a whole assistant turn: reasoning first, calls of tools in their markup.

    after_reasoning      reasoning </think> answer
    tool_calls           <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>

Made of ``grammar_terms``. A *mark* is an id where the model's vocabulary has a
control token for it, which no text can stand for, and a text where it has not.
Knows no template; recipes whose format has these shapes call it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Tool, ToolChoice
from headwater.recipe.grammar_checks import invalid, parse_schema
from headwater.recipe.grammar_terms import (
    TEXT,
    control,
    json_term,
    literal,
    object_term,
    term,
)
from headwater.recipe.tokenizer import Tokenizer

Mark = int | str

# A model that likes one call may never stop making it; no real turn has as many.
MAX_FORCED_CALLS = 32


def mark(tokenizer: Tokenizer, text: str) -> Mark:
    """The control id that ``text`` names, else ``text`` itself."""
    token_id = tokenizer.control_id(text)
    return text if token_id is None else token_id


def after_reasoning(
    constraint: Constraint, *, end: Mark, begin: Mark | None = None, is_open: bool = True
) -> Constraint:
    """Free reasoning up to and with ``end``, at most two newlines, then ``constraint``.

    ``is_open``: the prompt has begun the reasoning already. Otherwise the model may
    begin it with ``begin``, or answer at once.
    """
    reasoning = "reasoning gap" if is_open else f"({_mark(begin or '')} reasoning gap)?"
    return _turn(
        f"start: {reasoning} answer",
        *_up_to("reasoning", end),
        r"gap: /\n{0,2}/",
        f"answer: {term(constraint)}",
    )


def tool_calls(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    begin: Mark,
    end: Mark,
    arguments_key: str = "arguments",
) -> Constraint:
    """One call for ``named``, one of ``tools`` for ``required``, several if ``parallel``.

    With ``auto``, any text may come before, between and after calls, or no call at all.
    The arguments are an object of the tool's schema: exactly where ``strict``, as far
    as it can be enforced elsewhere. Raises InvalidRequest for a named tool that is not
    among ``tools``, or a schema that ``grammar_checks`` refuses.
    """
    offered = [tool for tool in tools if choice.kind != "named" or tool.name == choice.name]
    if not offered:
        raise InvalidRequest(
            "tool_choice asks for a tool that is not among the tools", param="tool_choice"
        )
    if choice.kind == "auto":
        again = "*" if choice.parallel else "?"
        start = f"start: (text_and_begin call){again} text"
        lines = [*_up_to("text_and_begin", begin), *_without("text", begin)]
    else:
        more = f' ("\\n" begin call){{0,{MAX_FORCED_CALLS - 1}}}' if choice.parallel else ""
        start = f"start: begin call{more}"
        lines = [f"begin: {_mark(begin)}"]
    lines.append(
        f'call: "\\n" ({" | ".join(f"call_{i}" for i in range(len(offered)))}) '
        + (f'"\\n" {_mark(end)}')
    )
    for index, tool in enumerate(offered):
        opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments_key}": '
        lines.append(f'call_{index}: {literal(opening)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: {_arguments(tool)}")
    return _turn(start, *lines)


def _arguments(tool: Tool) -> str:
    try:
        schema = parse_schema(tool.parameters)
    except InvalidRequest as error:
        raise invalid(f"tool {tool.name!r}: {error}", "invalid_json_schema") from None
    if not tool.strict:
        return object_term(schema)
    return json_term({"type": "object", **schema})


def _mark(mark: Mark) -> str:
    return control(mark) if isinstance(mark, int) else literal(mark)


def _up_to(rule: str, mark: Mark) -> list[str]:
    """``rule``: any text up to the first ``mark``, and the mark."""
    if isinstance(mark, int):
        return [f"{rule}: {TEXT} {control(mark)}"]
    return [rf"{rule}[lazy]: /(.|\n)*{_escaped(mark)}/"]


def _without(rule: str, mark: Mark) -> list[str]:
    """``rule``: any text that does not hold ``mark``."""
    if isinstance(mark, int):
        return [f"{rule}: {TEXT}"]
    name = rule.upper()
    return [rf"{rule}: {name}", rf"{name}: {TEXT} & ~/(.|\n)*{_escaped(mark)}(.|\n)*/"]


def _escaped(text: str) -> str:
    """``text`` as a regex between slashes."""
    return "".join({"\n": r"\n", "/": r"\/"}.get(char, re.escape(char)) for char in text)


def _turn(*lines: str) -> Constraint:
    return Constraint("turn", "\n".join(lines) + "\n")
