"""A whole turn as what it consists of: reasoning, texts and calls, in order.

    ReasoningText("a") ReasoningText("b") AnswerText("c")  ->  reasoning "ab", text "c"

For answers that are not streamed; streams send the parts themselves. Knows no
dialect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headwater.recipe.parsers import merged_parts
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class ReasoningSegment:
    text: str


@dataclass(frozen=True, slots=True)
class TextSegment:
    text: str


@dataclass(slots=True)
class CallSegment:
    """``arguments`` is a JSON object once ``is_complete``; before, it was cut short."""

    call_id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


Segment = ReasoningSegment | TextSegment | CallSegment


def segments(parts: Iterable[Part]) -> list[Segment]:
    """The turn that ``parts`` make up, however they were cut."""
    found: list[Segment] = []
    calls: dict[int, CallSegment] = {}
    for part in merged_parts(parts):
        match part:
            case ReasoningText(text=text):
                found.append(ReasoningSegment(text))
            case AnswerText(text=text):
                found.append(TextSegment(text))
            case ToolCallStart(index=index, call_id=call_id, name=name):
                calls[index] = CallSegment(call_id, name)
                found.append(calls[index])
            case ToolCallArguments(index=index, text=text):
                calls[index].arguments += text
            case ToolCallEnd(index=index):
                calls[index].is_complete = True
    return found
