"""A conversation to DeepSeek's prompt text: rendered by ``deepseek_recipe``, origins found here.

The library returns the text and the ranges of its control tokens; it never
finds them by their spelling, so nothing typed is among them. Where outside text
went is found by rendering once more, with each text between two marks that
nobody can have written:

    first    ...<|User|>hi<|Assistant|>...
    second   ...<|User|>@5e0c.. 0<hi@5e0c.. 0><|Assistant|>...    -> "hi" is messages[0].content

Taking the marks out must give the first text again; if it does not, the prompt
is right all the same and has no origins. Knows no tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import deepseek_recipe as library

from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Conversation, Message, Tool
from headwater.recipe.deepseek_format import ASSISTANT, DeepseekVersion
from headwater.recipe.messages import Json, parse_object
from headwater.recipe.recipe import SpanPart
from headwater.recipe.tokenizer import CharRange

_EFFORTS: Final[dict[str, Literal["low", "high", "max"]]] = {
    "low": "low",
    "medium": "high",  # the formats have three steps; DeepSeek's own API reads medium as high
    "high": "high",
    "max": "max",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Characters [start, end) of the prompt are [start_char, end_char) of ``part`` of
    message (or, for ``tool``, tool) ``index``."""

    start: int
    end: int
    index: int
    part: SpanPart
    start_char: int
    end_char: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekPrompt:
    """Ranges ascend, do not overlap, and each holds one control literal."""

    text: str
    special_ranges: tuple[CharRange, ...]
    origins: tuple[Origin, ...]


@dataclass(slots=True)
class _Marks:
    """Where the marks stand, in the order in which they were handed out."""

    nonce: str
    places: list[tuple[int, SpanPart, int]] = field(default_factory=list)

    def around(self, text: str, index: int, part: SpanPart, num_chars: int | None = None) -> str:
        """``text`` between two marks; it stands for ``num_chars`` characters of its part."""
        if not text:  # formats treat an empty text differently
            return text
        number = self.open(index, part, len(text) if num_chars is None else num_chars)
        return f"{self.opening(number)}{text}{self.closing(number)}"

    def open(self, index: int, part: SpanPart, num_chars: int) -> int:
        self.places.append((index, part, num_chars))
        return len(self.places) - 1

    def opening(self, number: int) -> str:
        return f"@{self.nonce}{number}<"

    def closing(self, number: int) -> str:
        return f"@{self.nonce}{number}>"

    def taken_out(self, text: str) -> tuple[str, tuple[Origin, ...]]:
        """``text`` without marks, and what stood between them."""
        pattern = re.compile(
            # A whole entry of a tool's parameters is one mark: see _tool.
            rf'(?:, )?"@{self.nonce}(?P<entry>\d+)>": 0|@{self.nonce}(?P<number>\d+)(?P<side>[<>])'
        )
        pieces: list[str] = []
        opened: dict[int, int] = {}
        origins: list[Origin] = []
        position = length = 0
        for match in pattern.finditer(text):
            pieces.append(text[position : match.start()])
            length += len(pieces[-1])
            position = match.end()
            if match["side"] == "<":
                opened[int(match["number"])] = length
                continue
            number = int(match["entry"] or match["number"])
            start = opened.pop(number, None)
            if start is not None:
                index, part, num_chars = self.places[number]
                origins.append(
                    Origin(
                        start=start,
                        end=length,
                        index=index,
                        part=part,
                        start_char=0,
                        end_char=num_chars,
                    )
                )
        pieces.append(text[position:])
        return "".join(pieces), tuple(sorted(origins, key=lambda origin: origin.start))


def render(
    conversation: Conversation, version: DeepseekVersion, *, add_generation_prompt: bool = True
) -> DeepseekPrompt:
    """The prompt of a conversation that ``check_conversation`` has passed.

    Raises InvalidRequest naming the field: arguments or parameters that are not
    a JSON object, or that no JSON number can hold.
    """
    encoding = (
        library.DeepseekV41Encoding()
        if version is DeepseekVersion.V4_1
        else library.DeepseekV4Encoding()
    )
    prompt = encoding.render_conversation(
        _library_conversation(conversation, None, add_generation_prompt)
    )
    text, ranges = prompt.prompt, tuple(prompt.special_ranges)
    marks = _Marks(nonce=secrets.token_hex(16) + ":")
    marked = encoding.render_conversation(
        _library_conversation(conversation, marks, add_generation_prompt)
    )
    unmarked, origins = marks.taken_out(marked.prompt)
    if unmarked != text:
        origins = ()
    if not add_generation_prompt:
        text, ranges = _without_generation_prompt(text, ranges)
    return DeepseekPrompt(text=text, special_ranges=ranges, origins=origins)


def thinks(conversation: Conversation) -> bool:
    """Whether this turn begins with reasoning; the models' own habit is that it does."""
    return conversation.thinking.mode != "off"


def forces_call(conversation: Conversation) -> bool:
    """Whether the prompt itself opens the block of calls."""
    return conversation.tool_choice.kind in ("required", "named")


def _without_generation_prompt(
    text: str, ranges: tuple[CharRange, ...]
) -> tuple[str, tuple[CharRange, ...]]:
    """Cut the role and thinking tokens at the end, if the prompt does end with them."""
    if len(ranges) >= 2 and ranges[-1][1] == len(text):
        start, end = ranges[-2]
        if text[start:end] == ASSISTANT and end == ranges[-1][0]:
            return text[:start], ranges[:-2]
    return text, ranges


def _library_conversation(
    conversation: Conversation, marks: _Marks | None, add_generation_prompt: bool
) -> library.Conversation:
    answer = conversation.answer
    kind = answer.kind if answer is not None else None
    choice: Literal["auto", "none", "required"] = (
        "none" if conversation.tool_choice.kind == "none" else "auto"
    )
    if forces_call(conversation) and add_generation_prompt:
        choice = "required"  # the prompt opens the block of calls
    tools = [_tool(tool, index, marks) for index, tool in enumerate(conversation.tools)]
    schema = None
    if answer is not None and kind == "json_schema":
        schema = parse_object(answer.source, param="response_format")
    thinking = thinks(conversation)
    effort = conversation.thinking.effort
    try:
        return library.Conversation(
            [
                _message(message, index, marks, thinking)
                for index, message in enumerate(conversation.messages)
            ],
            thinking_mode=thinking,
            tools=tools or None,
            tool_choice=choice,
            reasoning_effort=_EFFORTS[effort] if effort is not None and thinking else None,
            response_format="json_object" if kind == "json_object" else "text",
            response_schema=schema,
            response_regex=answer.source if answer is not None and kind == "regex" else None,
        )
    except OverflowError:
        raise _no_json_number("response_format") from None


def _message(message: Message, index: int, marks: _Marks | None, thinking: bool) -> library.Message:
    def outside(text: str, part: SpanPart) -> str:
        return text if marks is None else marks.around(text, index, part)

    content = outside(message.content, "content")
    match message.role:
        case "system":
            return library.SystemMessage(content)
        case "user":
            return library.UserMessage(content)
        case "tool":
            return library.ToolMessage(content, message.tool_call_id)
        case "assistant":
            # A turn without reasoning had none: the format says so in thinking mode.
            reasoning = message.reasoning or ("" if thinking else None)
            return library.AssistantMessage(
                content,
                outside(reasoning, "reasoning") if reasoning else reasoning,
                [
                    library.ToolCall(
                        call.call_id,
                        outside(call.name, "tool_call"),
                        _arguments(
                            call.arguments,
                            f"messages[{index}].tool_calls[{number}].arguments",
                            outside,
                            is_marked=marks is not None,
                        ),
                    )
                    for number, call in enumerate(message.tool_calls)
                ]
                or None,
                message.continues,
            )


def _arguments(
    text: str, param: str, outside: Callable[[str, SpanPart], str], *, is_marked: bool
) -> str:
    """Arguments are re-spelt as tags, so only their strings keep an origin."""
    parsed = parse_object(text, param=param)
    if not is_marked:
        return text
    return json.dumps(_with_strings(parsed, lambda s: outside(s, "tool_call")))


def _with_strings(value: Json, make: Callable[[str], str]) -> Json:
    """``value`` with its strings, but not its keys, replaced."""
    match value:
        case str():
            return make(value)
        case dict():
            return {key: _with_strings(item, make) for key, item in value.items()}
        case list():
            return [_with_strings(item, make) for item in value]
        case _:
            return value


def _tool(tool: Tool, index: int, marks: _Marks | None) -> library.ToolDefinition:
    param = f"tools[{index}].parameters"
    name = tool.name
    parameters = parse_object(tool.parameters, param=param)
    if marks is not None:
        num_chars = len(tool.name) + len(tool.description) + len(tool.parameters)
        number = marks.open(index, "tool", num_chars)
        # The definition is one line that ends with the parameters: an entry more marks its end.
        name = marks.opening(number) + name
        parameters = {**parameters, marks.closing(number): 0}
    try:
        return library.ToolDefinition(name, tool.description, parameters, tool.strict)
    except OverflowError:
        raise _no_json_number(param) from None
    except RecursionError:
        raise InvalidRequest(f"{param} nests too deep", param=param, code="too_deep") from None


def _no_json_number(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} holds a number that is too large", param=param)
