"""A conversation in one form, whichever dialect it came in: what every recipe encodes.

Dialects (``api``) fill it, recipes (``template``, ``deepseek``) print it. Only
values: nothing here knows a tokenizer, a template or a wire format. Text in it
is outside text, all of it: contents, reasoning, names, descriptions, schemas,
arguments and results may hold anything and never become control tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headwater.core.constraint import Constraint

# Always one of these by the time a Conversation exists: ``developer`` is system-class (A23).
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that an assistant turn made. ``arguments`` is a JSON object in one normal
    form (B07): the caller's key order, no spaces after separators are added or removed
    when it came as text, ``json.dumps`` defaults when it came as an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. ``reasoning`` and ``tool_calls`` belong to assistants, ``tool_call_id`` to tools.

    ``continues`` marks a last assistant message that the model is to go on with
    instead of starting a new turn.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    continues: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may ask for. ``parameters`` is its JSON Schema as compact JSON
    text, keys in the caller's order (a reordered tool is another prefix)."""

    name: str
    description: str = ""
    parameters: str = '{"type":"object","properties":{}}'
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """``named`` forces ``name``; ``required`` forces some call; ``none`` forbids them."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None  # exactly for ``named``
    parallel: bool = True  # several calls in one turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Whether the model reasons before it answers; ``default`` is the model's own habit."""

    mode: Literal["default", "on", "off"] = "default"
    effort: Literal["low", "medium", "high", "max"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Everything that decides the prompt of one chat call, and the form of its answer."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: Thinking = field(default_factory=Thinking)
    answer: Constraint | None = None  # of the visible answer, never of the reasoning
