"""Checks on a conversation before anything is made of it: what cannot be used is named.

Text must be Unicode and JSON must be JSON, however deep or strange it is sent;
what a template would drop in silence is found here too. Knows no template and no
tokenizer; every recipe calls ``check_conversation`` first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, NoReturn, TypeAlias

from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Conversation, Message, Tool
from headwater.recipe.text import require_encodable

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

# Real schemas nest about a dozen levels; the bound keeps recursion far from Python's own.
MAX_JSON_DEPTH: Final = 128


def check_conversation(conversation: Conversation) -> None:
    """Raise InvalidRequest naming the field whose text cannot be used.

    JSON text (arguments, parameters) is only looked at as text here:
    ``parse_object`` checks the rest when it is needed.
    """
    if not conversation.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    for index, message in enumerate(conversation.messages):
        _check_message(message, f"messages[{index}]")
        if message.continues:
            _check_continues(conversation, index)
    for index, tool in enumerate(conversation.tools):
        _check_tool(tool, f"tools[{index}]")


def parse_object(text: str, *, param: str, make: Callable[[str], str] = str) -> dict[str, Json]:
    """The JSON object that ``text`` holds; every string in it, keys too, goes through ``make``.

    Raises InvalidRequest naming ``param`` if it is no JSON object, nests deeper
    than MAX_JSON_DEPTH, or holds a number or string that JSON text cannot show.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(param) from None
    except ValueError:
        # The error's own text may quote what was sent.
        raise InvalidRequest(
            f"{param} is not valid JSON", param=param, code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be a JSON object", param=param, code="invalid_json")
    made = _made(value, make, param, MAX_JSON_DEPTH)
    assert isinstance(made, dict)
    return made


def num_chars(conversation: Conversation) -> int:
    """Characters from outside, which bound what a rendering may cost."""
    return sum(
        len(m.content)
        + len(m.reasoning or "")
        + len(m.name or "")
        + len(m.tool_call_id or "")
        + sum(len(c.call_id) + len(c.name) + len(c.arguments) for c in m.tool_calls)
        for m in conversation.messages
    ) + sum(len(t.name) + len(t.description) + len(t.parameters) for t in conversation.tools)


def has_later_system(conversation: Conversation) -> bool:
    """Whether a system message stands anywhere but first."""
    return any(m.role == "system" for m in conversation.messages[1:])


def _check_message(message: Message, where: str) -> None:
    require_encodable(message.content, param=f"{where}.content")
    for name, text in (
        ("reasoning", message.reasoning),
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
    ):
        if text is not None:
            require_encodable(text, param=f"{where}.{name}")
    for index, call in enumerate(message.tool_calls):
        here = f"{where}.tool_calls[{index}]"
        require_encodable(call.call_id, param=f"{here}.id")
        require_encodable(call.name, param=f"{here}.name")
        require_encodable(call.arguments, param=f"{here}.arguments")


def _check_continues(conversation: Conversation, index: int) -> None:
    message = conversation.messages[index]
    where = f"messages[{index}]"
    if index != len(conversation.messages) - 1 or message.role != "assistant":
        raise InvalidRequest(
            f"{where} cannot be continued; only a last assistant message can", param=where
        )
    if message.tool_calls or not (message.content.strip() or message.reasoning):
        raise InvalidRequest(
            f"{where} cannot be continued; it must hold text and no tool calls", param=where
        )


def _check_tool(tool: Tool, where: str) -> None:
    require_encodable(tool.name, param=f"{where}.name")
    require_encodable(tool.description, param=f"{where}.description")
    require_encodable(tool.parameters, param=f"{where}.parameters")


def _made(value: object, make: Callable[[str], str], param: str, depth: int) -> Json:
    if depth == 0:
        raise _too_deep(param)
    match value:
        case str():
            # "\\ud83d" is ASCII as JSON text and half a character as a string.
            require_encodable(value, param=param)
            return make(value)
        case dict():
            return {
                _made_key(key, make, param): _made(item, make, param, depth - 1)
                for key, item in value.items()
            }
        case list():
            return [_made(item, make, param, depth - 1) for item in value]
        case float() if value in (float("inf"), float("-inf")):
            raise InvalidRequest(f"{param} holds too large a number", param=param)
        case bool() | int() | float() | None:
            return value
    raise TypeError("json.loads made something that is not JSON")


def _made_key(key: str, make: Callable[[str], str], param: str) -> str:
    require_encodable(key, param=param)
    return make(key)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are not JSON


def _too_deep(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} nests more than {MAX_JSON_DEPTH} levels deep", param=param, code="too_deep"
    )
