"""What a model's output consists of, in order: the parts that every dialect frames.

    reasoning* (text | tool call)*

An output parser (one per model format) turns text and control tokens into these;
``api`` turns these into chunks, items or blocks. Nothing here knows either side.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the hidden reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerText:
    """More of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; ``index`` counts the calls of one turn from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of call ``index``."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Call ``index`` is complete: its arguments are a JSON object."""

    index: int


Part = ReasoningText | AnswerText | ToolCallStart | ToolCallArguments | ToolCallEnd
