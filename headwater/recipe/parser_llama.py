"""The format of Llama 3.1 and later: a turn that is a JSON object is a call.

    {"name": "read", "parameters": {"path": "a.txt"}}

Perhaps after the control token ``<|python_tag|>``; several calls stand one after
another, with blanks or ";" between them. A turn that begins with anything else is
an answer to its end. An object whose first key no call has is an answer too and
is not held back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from headwater.recipe.parser_json_call import JsonCall
from headwater.recipe.parsers import OutputParser, PlainParser, Stage
from headwater.recipe.parts import AnswerText, Part

PYTHON_TAG: Final = "<|python_tag|>"
_BETWEEN_CALLS: Final = " \t\r\n;"


@dataclass(frozen=True, slots=True)
class LlamaFormat:
    """Implements :class:`headwater.recipe.parsers.ParserFormat`."""

    reasoning: bool = False
    tools: bool = True

    def open(
        self, *, in_reasoning: bool, tools: bool, new_call_id: Callable[[], str]
    ) -> OutputParser:
        return LlamaParser(new_call_id) if tools else PlainParser()


LLAMA: Final = LlamaFormat()


class LlamaParser:
    """Implements :class:`headwater.recipe.parsers.OutputParser`."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._state: Literal["before_call", "call", "answer"] = "before_call"
        self._held = ""  # blanks or ";" that a call may follow
        self._call: JsonCall | None = None
        self._num_calls = 0

    @property
    def control_literals(self) -> frozenset[str]:
        return frozenset((PYTHON_TAG,))

    @property
    def stage(self) -> Stage:
        # Whether a turn is a call shows at its first character that is not blank.
        return "tool_call" if self._state == "call" else "answer"

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            match self._state:
                case "before_call":
                    text = self._read_before_call(text)
                case "call":
                    text = self._read_call(text, parts)
                case "answer":
                    parts.append(AnswerText(self._held + text))
                    self._held = text = ""
        return parts

    def push_control(self, literal: str) -> list[Part]:
        parts = self._give_up_call()
        self._state = "before_call"
        return parts

    def finish(self) -> list[Part]:
        parts = self._give_up_call()
        if self._held and not self._num_calls:
            parts.append(AnswerText(self._held))
        return parts

    def _read_before_call(self, text: str) -> str:
        rest = text.lstrip(_BETWEEN_CALLS if self._num_calls else None)
        self._held += text[: len(text) - len(rest)]
        if rest.startswith("{"):
            self._call = JsonCall(self._num_calls, self._new_call_id)
            self._state = "call"
        elif rest:
            if self._num_calls:
                self._held = ""  # blanks after a call belong to neither
            self._state = "answer"
        return rest

    def _read_call(self, text: str, parts: list[Part]) -> str:
        call = self._call
        assert call is not None
        had_begun = call.has_begun
        found, used = call.push(text)
        parts += found
        if call.has_begun and not had_begun:
            self._num_calls += 1
            self._held = ""
        if call.state == "broken":
            parts += self._give_up_call()
        elif call.state == "complete":
            self._call = None
            self._state = "before_call"
        return text[used:]

    def _give_up_call(self) -> list[Part]:
        """No call after all, or one that stays incomplete: what was held is answer text."""
        call, self._call = self._call, None
        if call is None:
            return []
        self._state = "answer"
        held, self._held = self._held, ""
        return [] if call.has_begun else [AnswerText(held + call.held)]
