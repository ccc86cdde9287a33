"""A Chat Completions body as a Conversation: messages, tools, thinking, answer format.

Shared by the chat route and ``/tokenize``. Raises InvalidRequest naming the
field; ranges of numbers are ``sampling``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headwater.api import ranges
from headwater.api.config import ApiConfig
from headwater.api.conversing import FieldNames, Spoken
from headwater.api.decode import NULL, is_given, unsupported
from headwater.api.history import (
    call_arguments,
    check_choice,
    check_tools,
    effort_thinking,
    make_tool,
    required,
    schema_constraint,
)
from headwater.api.openai.bodies import (
    CallBody,
    ContentPart,
    Message,
    PromptBody,
    StructuredOutputs,
    ToolBody,
)
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe import conversation as speech
from headwater.recipe.text import join_text_parts

# As callers say them -> as conversations have them (A23).
_ROLES: dict[str, speech.Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def chat_conversation(messages: Sequence[Message], body: PromptBody, config: ApiConfig) -> Spoken:
    """Everything that decides the prompt and the form of the answer."""
    ranges.count("messages", len(messages), config.max_messages, "messages")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    check_tools(tools, "tools")
    choice = _tool_choice(body)
    check_choice(choice, tools, "tool_choice")
    last = len(messages) - 1
    answer, answer_name = _answer(body)
    thinking, thinking_name = _thinking(body)
    return Spoken(
        conversation=speech.Conversation(
            messages=tuple(
                _message(message, f"messages[{i}]", is_last=i == last)
                for i, message in enumerate(messages)
            ),
            tools=tools,
            tool_choice=choice,
            thinking=thinking,
            answer=answer,
        ),
        names=FieldNames(thinking=thinking_name, answer=answer_name),
    )


def text_of(content: str | list[ContentPart], where: str) -> str:
    """A string, or text parts joined by the one rule (A27)."""
    if isinstance(content, str):
        return content
    return join_text_parts(
        _part_text(part, f"{where}[{index}]") for index, part in enumerate(content)
    )


def _message(message: Message, where: str, *, is_last: bool) -> speech.Message:
    role = _ROLES.get(message.role)
    if is_given(message.function_call) or message.role == "function":
        raise unsupported(where, "a function_call, or the function role; use tool_calls: this")
    if role is None:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}",
            param=f"{where}.role",
            code="invalid_value",
        )
    if role != "assistant":
        for name in ("tool_calls", "reasoning_content", "prefix"):
            if getattr(message, name):
                raise _misplaced(where, name, "an assistant")
        if message.content is None:
            raise InvalidRequest(
                f"{where}.content is missing", param=f"{where}.content", code="invalid_type"
            )
    if message.tool_call_id is not None and role != "tool":
        raise _misplaced(where, "tool_call_id", "a tool")
    if message.prefix and not is_last:
        raise InvalidRequest(
            f"{where}.prefix: only the last message can be continued",
            param=f"{where}.prefix",
            code="invalid_value",
        )
    calls = message.tool_calls or ()
    return speech.Message(
        role=role,
        content=text_of(message.content or "", f"{where}.content"),
        reasoning=message.reasoning_content or None,
        tool_calls=tuple(_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
        tool_call_id=message.tool_call_id,
        name=message.name,
        continues=bool(message.prefix),
    )


def _part_text(part: ContentPart, where: str) -> str:
    if part.type not in _TEXT_PARTS:
        raise unsupported(where, "a content part other than text")
    return required(part.text, f"{where}.text")


def _call(call: CallBody, where: str) -> speech.ToolCall:
    if call.type not in (None, "function"):
        raise unsupported(f"{where}.type", "a call of anything but a function")
    return speech.ToolCall(
        call_id=call.id or "",
        name=call.function.name,
        arguments=call_arguments(call.function.arguments, f"{where}.function.arguments"),
    )


def _tool(tool: ToolBody, where: str) -> speech.Tool:
    if tool.type != "function":
        raise unsupported(f"{where}.type", "a tool other than a function")
    function = required(tool.function, f"{where}.function")
    return make_tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
        where=f"{where}.function",
    )


def _tool_choice(body: PromptBody) -> speech.ToolChoice:
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return speech.ToolChoice(parallel=parallel)
        case "auto" | "none" | "required" as kind:
            return speech.ToolChoice(kind=kind, parallel=parallel)
        case str():
            raise InvalidRequest(
                "tool_choice must be auto, none, required or a function",
                param="tool_choice",
                code="invalid_value",
            )
        case chosen:
            if chosen.type != "function" or chosen.function is None:
                raise unsupported("tool_choice", "a tool_choice other than a function")
            name = chosen.function.name
            return speech.ToolChoice(kind="named", name=name, parallel=parallel)


def _thinking(body: PromptBody) -> tuple[speech.Thinking, str]:
    """What the switches ask for together, and the name to blame."""
    found: list[tuple[speech.Thinking, str]] = []
    if body.reasoning_effort is not None:
        found.append(
            (effort_thinking(body.reasoning_effort, "reasoning_effort"), "reasoning_effort")
        )
    if body.thinking is not None:
        if body.thinking.type not in ("enabled", "disabled"):
            raise InvalidRequest(
                "thinking.type must be enabled or disabled",
                param="thinking.type",
                code="invalid_value",
            )
        is_on = body.thinking.type == "enabled"
        found.append((speech.Thinking(mode="on" if is_on else "off"), "thinking"))
    kwargs = body.chat_template_kwargs
    if kwargs is not None and kwargs.enable_thinking is not None:
        mode = speech.Thinking(mode="on" if kwargs.enable_thinking else "off")
        found.append((mode, "chat_template_kwargs"))
    if not found:
        return speech.Thinking(), "reasoning_effort"
    # The first one may carry an effort; the others can only agree.
    for other, name in found[1:]:
        if other.mode != found[0][0].mode:
            raise InvalidRequest(
                f"{found[0][1]} and {name} contradict each other", param=name, code="invalid_value"
            )
    return found[0]


def _answer(body: PromptBody) -> tuple[Constraint | None, str]:
    """The form the answer must have, and the name of the field that asks for it."""
    wanted = response_format(body)
    extension = body.structured_outputs
    if extension is None:
        return wanted, "response_format"
    if wanted is not None:
        raise InvalidRequest(
            "send response_format or structured_outputs, not both",
            param="structured_outputs",
            code="invalid_value",
        )
    return _structured(extension), "structured_outputs"


def response_format(body: PromptBody) -> Constraint | None:
    wanted = body.response_format
    match wanted.type if wanted is not None else "text":
        case "text":
            return None
        case "json_object":
            return Constraint("json_object")
        case "json_schema":
            named = wanted.json_schema if wanted is not None else None
            where = "response_format.json_schema.schema"
            return schema_constraint(NULL if named is None else named.schema, where)
        case _:
            raise InvalidRequest(
                "response_format.type must be text, json_object or json_schema",
                param="response_format.type",
                code="invalid_value",
            )


def _structured(wanted: StructuredOutputs) -> Constraint:
    name = "structured_outputs"
    given = [is_given(wanted.json), wanted.regex is not None, wanted.grammar is not None]
    if sum(given) != 1:
        raise InvalidRequest(
            f"{name} needs exactly one of json, regex and grammar",
            param=name,
            code="invalid_value",
        )
    if wanted.regex is not None:
        return Constraint("regex", wanted.regex)
    if wanted.grammar is not None:
        return Constraint("lark", wanted.grammar)
    schema = wanted.json
    if bytes(schema).startswith(b'"'):
        text = msgspec.json.decode(schema, type=str)
        try:
            schema = msgspec.json.decode(text, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(
                f"{name}.json is not valid JSON", param=f"{name}.json", code="invalid_json"
            ) from None
    return schema_constraint(schema, f"{name}.json")


def _misplaced(where: str, name: str, owner: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}.{name} belongs to {owner} message only",
        param=f"{where}.{name}",
        code="invalid_value",
    )
