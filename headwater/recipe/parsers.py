"""From what a model wrote to parts: the port of output parsers, and the plain one.

One parser per choice, fed in order with text and with the control tokens of its
format. What it returns must not depend on how the text was cut into pieces: the
parts, merged, are a function of the whole. ``output`` feeds it; ``parser_*`` and
``deepseek_*`` hold the formats, ``parser_choice`` says which one a template needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
)

# ``heading``: words of the format that say what will follow, and are no part themselves.
Stage = Literal["reasoning", "answer", "tool_call", "heading"]


class OutputParser(Protocol):
    """One choice's parser. Parts come out in the order the model wrote them.

    A tool call that has no ToolCallEnd is not complete: the output ended inside
    it, or what the model wrote there is not JSON. Nothing a model wrote is lost:
    markup that turns out not to be a call comes out as answer text.
    """

    @property
    def control_literals(self) -> frozenset[str]:
        """Control tokens that mean something to this parser: only these are given to
        ``push_control``. Other control tokens are hidden, or are text."""
        ...

    @property
    def stage(self) -> Stage:
        """What the next character will belong to, as far as can be told."""
        ...

    def push(self, text: str) -> list[Part]:
        """Take decoded text. It is never a control token, however it is spelt."""
        ...

    def push_control(self, literal: str) -> list[Part]:
        """Take a control token that the model wrote, one of ``control_literals``."""
        ...

    def finish(self) -> list[Part]:
        """The output has ended: give what was held back."""
        ...


class ParserFormat(Protocol):
    """How one kind of model marks its reasoning and its calls."""

    @property
    def reasoning(self) -> bool:
        """Whether it marks reasoning."""
        ...

    @property
    def tools(self) -> bool:
        """Whether it marks tool calls."""
        ...

    def open(
        self, *, in_reasoning: bool, tools: bool, new_call_id: Callable[[], str]
    ) -> OutputParser:
        """A parser for one choice. ``in_reasoning``: the prompt itself opened the
        reasoning. ``tools``: the prompt offered tools, so calls are looked for."""
        ...


class PlainParser:
    """A format without markup: every text is the answer."""

    @property
    def control_literals(self) -> frozenset[str]:
        return frozenset()

    @property
    def stage(self) -> Stage:
        return "answer"

    def push(self, text: str) -> list[Part]:
        return [AnswerText(text)] if text else []

    def push_control(self, literal: str) -> list[Part]:
        return self.push(literal)

    def finish(self) -> list[Part]:
        return []


def merged_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Neighbouring pieces of one text as one part: what a caller who does not stream is sent.

    >>> merged_parts([AnswerText("a"), AnswerText("b")])
    (AnswerText(text='ab'),)
    """
    merged: list[Part] = []
    run: list[str] = []

    def close_run(first: Part | None) -> None:
        match first:
            case ReasoningText():
                merged.append(ReasoningText("".join(run)))
            case AnswerText():
                merged.append(AnswerText("".join(run)))
            case ToolCallArguments(index=index):
                merged.append(ToolCallArguments(index, "".join(run)))
            case _:
                pass
        run.clear()

    previous: Part | None = None
    for part in parts:
        if not isinstance(part, ReasoningText | AnswerText | ToolCallArguments):
            close_run(previous)
            merged.append(part)
            previous = None
            continue
        if previous is None or not _continues(previous, part):
            close_run(previous)
        run.append(part.text)
        previous = part
    close_run(previous)
    return tuple(merged)


def answer_text(parts: Sequence[Part]) -> str:
    """The visible answer in ``parts``."""
    return "".join(part.text for part in parts if isinstance(part, AnswerText))


def _continues(previous: Part, part: Part) -> bool:
    if isinstance(previous, ToolCallArguments) and isinstance(part, ToolCallArguments):
        return previous.index == part.index
    return type(previous) is type(part)
