"""Formats that mark reasoning with ``<think>`` and calls with ``<tool_call>``: Qwen, Hermes.

    <think> reasoning </think> answer <tool_call> {"name": ..., "arguments": {...}} </tool_call> ...

A mark that the tokenizer has as a control token counts only as that token; one
that it does not have is looked for in the text. In text, at most one mark's
beginning and a run of line breaks are held back.

What is not a call becomes answer text, marks included. Line breaks beside marks
belong to the format and are dropped, as is blank text between calls (A02).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from headwater.recipe.parser_json_call import JsonCall
from headwater.recipe.parsers import OutputParser, Stage
from headwater.recipe.parts import AnswerText, Part, ReasoningText

_BREAKS: Final = "\n"
_BLANKS: Final = " \t\r\n"

_State = Literal["reasoning", "answer", "before_call", "call", "after_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedFormat:
    """Implements :class:`headwater.recipe.parsers.ParserFormat`.

    A pair of marks is None where the format has none; ``controls`` are the marks
    that are control tokens.
    """

    reasoning_marks: tuple[str, str] | None = None
    call_marks: tuple[str, str] | None = None
    controls: frozenset[str] = frozenset()

    @property
    def reasoning(self) -> bool:
        return self.reasoning_marks is not None

    @property
    def tools(self) -> bool:
        return self.call_marks is not None

    def open(
        self, *, in_reasoning: bool, tools: bool, new_call_id: Callable[[], str]
    ) -> OutputParser:
        return MarkedParser(
            self, in_reasoning=in_reasoning and self.reasoning, tools=tools, new_call_id=new_call_id
        )


class MarkedParser:
    """Implements :class:`headwater.recipe.parsers.OutputParser`."""

    def __init__(
        self,
        marks: MarkedFormat,
        *,
        in_reasoning: bool,
        tools: bool,
        new_call_id: Callable[[], str],
    ) -> None:
        no_marks: tuple[str | None, str | None] = (None, None)
        reasoning_marks = marks.reasoning_marks or no_marks
        call_marks = (marks.call_marks if tools else None) or no_marks
        self._open_think, self._close_think = reasoning_marks
        self._open_call, self._close_call = call_marks
        self._controls = frozenset(
            mark for mark in (*reasoning_marks, *call_marks) if mark and mark in marks.controls
        )
        self._new_call_id = new_call_id
        self._state: _State = "reasoning" if in_reasoning else "answer"
        self._buffer = ""  # text not looked at to the end
        self._breaks = ""  # line breaks that a mark may follow
        self._dropped = _BREAKS if in_reasoning else ""  # blanks that a mark stood before
        self._has_answered = False  # an answer or a call was begun
        self._before_call = ""  # the opening mark and the blanks after it
        self._call: JsonCall | None = None
        self._num_calls = 0

    @property
    def control_literals(self) -> frozenset[str]:
        return self._controls

    @property
    def stage(self) -> Stage:
        match self._state:
            case "reasoning":
                return "reasoning"
            case "answer":
                return "answer"
            case _:
                return "tool_call"

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        return self._work(is_end=False)

    def push_control(self, literal: str) -> list[Part]:
        parts = self._work(is_end=True)
        self._take_mark(literal, parts)
        parts += self._work(is_end=False)
        return parts

    def finish(self) -> list[Part]:
        parts = self._work(is_end=True)
        self._give_up_call(parts)
        if self._state == "answer" and self._breaks:
            parts.append(AnswerText(self._breaks))
            self._breaks = ""
        return parts

    # -- the loop -----------------------------------------------------------------------

    def _work(self, *, is_end: bool) -> list[Part]:
        """Look at the buffer; with ``is_end`` no text can follow that would make a mark."""
        parts: list[Part] = []
        while self._buffer:
            before = (self._state, len(self._buffer))
            match self._state:
                case "reasoning" | "answer":
                    self._read_text(parts, is_end=is_end)
                case "before_call":
                    self._read_before_call(parts)
                case "call":
                    self._read_call(parts)
                case "after_call":
                    self._read_after_call(is_end=is_end)
            if (self._state, len(self._buffer)) == before:
                break
        return parts

    def _read_text(self, parts: list[Part], *, is_end: bool) -> None:
        marks = self._text_marks()
        found = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._show(self._buffer[:at], parts)
            self._buffer = self._buffer[at + len(mark) :]
            if not self._may_open(mark):
                self._show(mark, parts)
                return
            self._take_mark(mark, parts)
            return
        shown = len(self._buffer) if is_end else _end_of_sure_text(self._buffer, marks)
        self._show(self._buffer[:shown], parts)
        self._buffer = self._buffer[shown:]

    def _read_before_call(self, parts: list[Part]) -> None:
        rest = self._buffer.lstrip()
        self._before_call += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if rest.startswith("{"):
            self._call = JsonCall(self._num_calls, self._new_call_id)
            self._state = "call"
        elif rest:
            self._give_up_call(parts)

    def _read_call(self, parts: list[Part]) -> None:
        call = self._call
        assert call is not None
        had_begun = call.has_begun
        found, used = call.push(self._buffer)
        parts += found
        self._buffer = self._buffer[used:]
        if call.has_begun and not had_begun:
            self._num_calls += 1
            self._before_call = ""
        if call.state != "open":
            self._leave_call(parts)

    def _read_after_call(self, *, is_end: bool) -> None:
        """Blanks, then the closing mark if it is text; else the turn goes on without one."""
        self._buffer = self._buffer.lstrip()
        mark = self._close_call
        if not self._buffer or mark is None:
            return
        if mark not in self._controls:
            if self._buffer.startswith(mark):
                self._buffer = self._buffer[len(mark) :]
            elif mark.startswith(self._buffer) and not is_end:
                return
        self._enter("answer", _BLANKS)

    # -- marks --------------------------------------------------------------------------

    def _text_marks(self) -> list[str]:
        """Marks that may stand in the text of this state."""
        wanted = (
            [self._close_think]
            if self._state == "reasoning"
            else [self._open_call, self._open_think]
        )
        return [mark for mark in wanted if mark is not None and mark not in self._controls]

    def _may_open(self, mark: str) -> bool:
        """Reasoning that is marked in mere text comes first or not at all."""
        return mark != self._open_think or not self._has_answered

    def _take_mark(self, mark: str, parts: list[Part]) -> None:
        state = self._state
        if state == "call" and self._call is not None and self._call.in_string:
            self._buffer = mark + self._buffer  # a string of the arguments quotes it
            parts += self._work(is_end=False)
        elif mark == self._close_think and state == "reasoning":
            self._enter("answer", _BREAKS)
        elif mark == self._open_think and state in ("answer", "after_call"):
            self._enter("reasoning", _BREAKS)
        elif mark == self._open_call and state in ("answer", "after_call"):
            self._enter("before_call", "")
            self._before_call = mark
            self._has_answered = True
        elif mark == self._close_call and state == "after_call":
            self._enter("answer", _BLANKS)
        elif state in ("before_call", "call"):
            had_begun = self._call is not None and self._call.has_begun
            self._give_up_call(parts)
            if mark != self._close_call or not had_begun:
                self._take_mark(mark, parts)
        else:  # closes what is not open, or opens it twice
            if state == "after_call":
                self._enter("answer", _BLANKS)
            self._show(mark, parts)

    def _enter(self, state: _State, dropped: str) -> None:
        self._state = state
        self._breaks = ""
        self._dropped = dropped

    def _leave_call(self, parts: list[Part]) -> None:
        if self._call is not None and self._call.has_begun:
            self._call = None
            self._enter("after_call", _BLANKS)
        else:
            self._give_up_call(parts)

    def _give_up_call(self, parts: list[Part]) -> None:
        """No call after all, or one that stays incomplete: what was held is answer text."""
        if self._state not in ("before_call", "call"):
            return
        call, self._call = self._call, None
        held, self._before_call = self._before_call, ""
        if call is not None and call.has_begun:
            self._enter("answer", _BLANKS)
            return
        self._enter("answer", "")
        parts.append(AnswerText(held + ("" if call is None else call.held)))

    # -- text ---------------------------------------------------------------------------

    def _show(self, text: str, parts: list[Part]) -> None:
        text = text.lstrip(self._dropped)
        if not text:
            return
        self._dropped = ""
        text = self._breaks + text
        shown = text.rstrip(_BREAKS)
        self._breaks = text[len(shown) :]
        if not shown:
            return
        if self._state == "reasoning":
            parts.append(ReasoningText(shown))
        else:
            self._has_answered = self._has_answered or not shown.isspace()
            parts.append(AnswerText(shown))


def _end_of_sure_text(text: str, marks: list[str]) -> int:
    """Where the last part of ``text`` begins that may still become a mark."""
    longest = max((len(mark) for mark in marks), default=1)
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return start
    return len(text)
