"""Pieces of a conversation that every dialect spells a little differently: calls, tools, effort.

Pure functions over decoded values; each refusal names the field as the caller
spelt it. Used by the dialects when they fill a Conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Literal, TypeVar

import msgspec

from headwater.api.decode import is_given
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Thinking, Tool, ToolChoice

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARS = 256
NO_ARGUMENTS = "{}"

ValueT = TypeVar("ValueT")
Effort = Literal["low", "medium", "high", "max"]

# The words of all dialects. "none" is no effort but a switch.
_EFFORTS: Final[dict[str, Effort]] = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


def call_arguments(value: msgspec.Raw | str, where: str) -> str:
    """A call's arguments in the one normal form (B07); raises InvalidRequest naming ``where``.

    JSON text stays as it is, an object becomes text, nothing becomes ``{}``.

    >>> call_arguments('{"city":"Oslo"}', "x"), call_arguments(msgspec.Raw(b'{"a":1}'), "x")
    ('{"city":"Oslo"}', '{"a": 1}')
    """
    try:
        decoded: object = value if isinstance(value, str) else msgspec.json.decode(value)
        if decoded is None:
            return NO_ARGUMENTS
        if isinstance(decoded, str):
            text = decoded
            if not text.strip():
                return NO_ARGUMENTS
            if isinstance(msgspec.json.decode(text), dict):
                return text
        elif isinstance(decoded, dict):
            # Other letters than ASCII stay themselves: the model reads this.
            return json.dumps(decoded, ensure_ascii=False)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    raise InvalidRequest(
        f"{where} must be a JSON object, or the text of one", param=where, code="invalid_value"
    )


def make_tool(
    *,
    name: str,
    description: str | None,
    parameters: msgspec.Raw,
    strict: bool,
    where: str,
    schema_name: str = "parameters",
) -> Tool:
    """A function; ``where`` is the place of its definition. Raises InvalidRequest."""
    if not 0 < len(name) <= MAX_TOOL_NAME_CHARS:
        raise InvalidRequest(
            f"{where}.name must have 1 to {MAX_TOOL_NAME_CHARS} characters",
            param=f"{where}.name",
            code="invalid_value",
        )
    if not is_given(parameters):
        return Tool(name=name, description=description or "", strict=strict)
    return Tool(
        name=name,
        description=description or "",
        parameters=schema_text(parameters, f"{where}.{schema_name}"),
        strict=strict,
    )


def schema_text(schema: msgspec.Raw, where: str) -> str:
    """A JSON Schema as compact text, keys in the caller's order. Raises InvalidRequest."""
    raw = bytes(schema)
    if not raw.startswith(b"{"):
        raise InvalidRequest(f"{where} must be a JSON object", param=where, code="invalid_type")
    return msgspec.json.format(raw, indent=-1).decode()


def check_tools(tools: Sequence[Tool], where: str) -> None:
    """Raises InvalidRequest for too many tools, or two of one name."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"{where} must be at most {MAX_TOOLS}, got {len(tools)}",
            param=where,
            code="invalid_value",
        )
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequest(
                f"{where}[{index}]: two tools have the same name",
                param=f"{where}[{index}]",
                code="invalid_value",
            )
        seen.add(tool.name)


def check_choice(choice: ToolChoice, tools: Sequence[Tool], where: str) -> None:
    """Raises InvalidRequest when a call is forced that cannot be made."""
    if choice.kind in ("required", "named") and not tools:
        raise InvalidRequest(f"{where} needs tools", param=where, code="invalid_value")
    if choice.kind == "named" and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequest(
            f"{where} names a tool that is not in tools", param=where, code="invalid_value"
        )


def effort_thinking(effort: str | None, where: str) -> Thinking:
    """What a word of effort asks for; raises InvalidRequest for an unknown one.

    >>> effort_thinking("none", "x").mode, effort_thinking("xhigh", "x").effort
    ('off', 'max')
    """
    if effort is None:
        return Thinking()
    if effort == "none":
        return Thinking(mode="off")
    if effort not in _EFFORTS:
        raise InvalidRequest(
            f"{where} must be one of none, {', '.join(_EFFORTS)}",
            param=where,
            code="invalid_value",
        )
    return Thinking(mode="on", effort=_EFFORTS[effort])


def schema_constraint(schema: msgspec.Raw, where: str) -> Constraint:
    """A JSON Schema that the answer must match. Raises InvalidRequest."""
    if not is_given(schema):
        raise missing(where)
    return Constraint("json_schema", schema_text(schema, where))


def required(value: ValueT | None, where: str) -> ValueT:
    """``value``, or InvalidRequest if the field at ``where`` is absent or null."""
    if value is None:
        raise missing(where)
    return value


def missing(where: str) -> InvalidRequest:
    """The error for an absent field."""
    return InvalidRequest(
        f"missing required field '{where}'", param=where, code="missing_required_parameter"
    )
