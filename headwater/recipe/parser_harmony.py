"""OpenAI's harmony format (gpt-oss): messages with a heading, all marks control tokens.

    <|channel|>analysis<|message|> reasoning <|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|> answer <|return|>

The heading says what the message is: a recipient in ``functions`` makes it that
call's arguments, the channel ``analysis`` makes it reasoning, anything else is
answer. ``<|call|>`` and ``<|return|>`` end the turn, so no parser sees them.
Format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headwater.recipe.parser_json_call import is_json_object
from headwater.recipe.parsers import OutputParser, Stage
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
START: Final = "<|start|>"
END: Final = "<|end|>"
CONSTRAIN: Final = "<|constrain|>"
_MARKS: Final = frozenset((CHANNEL, MESSAGE, START, END, CONSTRAIN))
_RECIPIENT: Final = re.compile(r"\bto=functions\.([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """Implements :class:`headwater.recipe.parsers.ParserFormat`."""

    reasoning: bool = True
    tools: bool = True

    def open(
        self, *, in_reasoning: bool, tools: bool, new_call_id: Callable[[], str]
    ) -> OutputParser:
        return HarmonyParser(new_call_id, tools=tools, in_reasoning=in_reasoning)


HARMONY: Final = HarmonyFormat()


class HarmonyParser:
    """Implements :class:`headwater.recipe.parsers.OutputParser`."""

    def __init__(self, new_call_id: Callable[[], str], *, tools: bool, in_reasoning: bool) -> None:
        self._new_call_id = new_call_id
        self._tools = tools
        self._stage: Stage = "reasoning" if in_reasoning else "answer"
        self._heading = ""
        self._arguments: list[str] = []
        self._num_calls = 0

    @property
    def control_literals(self) -> frozenset[str]:
        return _MARKS

    @property
    def stage(self) -> Stage:
        return self._stage

    def push(self, text: str) -> list[Part]:
        if not text:
            return []
        match self._stage:
            case "heading":
                self._heading += text
                return []
            case "reasoning":
                return [ReasoningText(text)]
            case "answer":
                return [AnswerText(text)]
            case "tool_call":
                self._arguments.append(text)
                return [ToolCallArguments(self._num_calls - 1, text)]

    def push_control(self, literal: str) -> list[Part]:
        if literal == MESSAGE:
            return self._begin_message() if self._stage == "heading" else self.push(literal)
        if self._stage == "heading":
            # One blank: what stands on both sides of a mark are two words.
            self._heading = "" if literal == START else f"{self._heading} "
            return []
        parts = self._end_message()
        self._stage = "heading"
        self._heading = ""
        return parts

    def finish(self) -> list[Part]:
        return self._end_message()

    def _begin_message(self) -> list[Part]:
        recipient = _RECIPIENT.search(self._heading)
        if recipient is not None and self._tools:
            self._stage = "tool_call"
            self._num_calls += 1
            return [ToolCallStart(self._num_calls - 1, self._new_call_id(), recipient[1])]
        self._stage = "reasoning" if "analysis" in self._heading.split() else "answer"
        return []

    def _end_message(self) -> list[Part]:
        if self._stage != "tool_call":
            return []
        text = "".join(self._arguments)
        self._arguments.clear()
        return [ToolCallEnd(self._num_calls - 1)] if is_json_object(text) else []
