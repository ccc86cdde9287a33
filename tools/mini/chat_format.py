"""A conversation with its answers as DeepSeek V4.1 text, fast, in weighted pieces.

Says what ``deepseek_recipe.DeepseekV41Encoding`` says (a test compares them over many
conversations) plus what a model has to write: its answers, calls and end tokens. In
thinking mode without tools the reasoning of earlier turns is left out, as the format
does. Knows nothing of what the conversations are about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import deepseek_recipe as library

from tools.mini.document import ANSWER, GIVEN, KEY, Document, mark

BOS: Final = library.SpecialToken.Bos.default_str()
EOS: Final = library.SpecialToken.Eos.default_str()
SYSTEM: Final = library.SpecialToken.System.default_str()
USER: Final = library.SpecialToken.User.default_str()
ASSISTANT: Final = library.SpecialToken.Assistant.default_str()
THINK: Final = library.SpecialToken.ThinkingStart.default_str()
END_THINK: Final = library.SpecialToken.ThinkingEnd.default_str()
DSML: Final = library.SpecialToken.Dsml.default_str()

_EFFORT: Final[dict[str, int]] = {"low": 50, "high": 75, "max": 100}
Effort = Literal["low", "high", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments are JSON values."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message. ``weight`` is of the text of a user or a tool."""

    role: Literal["user", "assistant", "tool"]
    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    weight: float = GIVEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDefinition:
    """A function with its JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, object]

    @property
    def line(self) -> str:
        return json.dumps(
            {"name": self.name, "description": self.description, "parameters": self.parameters},
            ensure_ascii=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A whole conversation; ends with an assistant turn, or with what asks for one."""

    turns: Sequence[Turn]
    system: str | None = None
    tools: Sequence[ToolDefinition] = ()
    thinking: bool = False
    effort: Effort = "high"
    system_weight: float = GIVEN


def _tools_frame() -> tuple[str, str]:
    """What the format writes before and after the lines of the schemas."""
    rendered = library.DeepseekV41Encoding().render_conversation(
        library.Conversation(
            [library.SystemMessage("@"), library.UserMessage("u")],
            thinking_mode=False,
            tools=[library.ToolDefinition("n", "d", {})],
        )
    )
    line = ToolDefinition(name="n", description="d", parameters={}).line
    before, after = rendered.prompt.split(line)
    return before.removeprefix(BOS + SYSTEM + "@"), after.removesuffix(
        USER + "u" + ASSISTANT + END_THINK
    )


TOOLS_BEFORE, TOOLS_AFTER = _tools_frame()


def render(chat: Chat, *, is_whole: bool = True) -> Document:
    """The text of the conversation; every answer ends with its end token."""
    document = Document(is_whole=is_whole)
    document.add(BOS, 0.0)
    if chat.thinking:
        effort = _EFFORT[chat.effort]
        document.add(
            f"{SYSTEM}Reasoning Effort: {effort} (range 1-100, the higher the value, the more "
            "thorough the reasoning)\n\n",
            0.02,
        )
    elif chat.system is not None or chat.tools:
        document.add(SYSTEM, 0.02)
    if chat.system is not None:
        document.add(chat.system, chat.system_weight)
    if chat.tools:
        document.add(TOOLS_BEFORE, 0.01)
        document.add("\n".join(tool.line for tool in chat.tools), 0.05)
        document.add(TOOLS_AFTER, 0.01)
    last_user = max(i for i, turn in enumerate(chat.turns) if turn.role == "user")
    previous = "system"
    for i, turn in enumerate(chat.turns):
        if turn.role == "assistant":
            thinks = chat.thinking and (bool(chat.tools) or i > last_user)
            document.add(ASSISTANT + (THINK if thinks else END_THINK), 0.05)
            if thinks:
                document.add(turn.thought + END_THINK, ANSWER, KEY)
            document.add(turn.text + calls_text(turn.calls) + EOS, ANSWER, KEY)
        else:
            document.add("\n\n" if previous in ("user", "tool") else USER, 0.05)
            text = turn.text if turn.role == "user" else f"<tool_result>{turn.text}</tool_result>"
            document.add(text, turn.weight)
        previous = turn.role
    if previous != "assistant":
        document.add(ASSISTANT + (THINK if chat.thinking else END_THINK), 0.0)
    return document


def prompt_text(chat: Chat) -> str:
    """What the model is given: everything up to the first token of the next answer."""
    return render(chat).text


def calls_text(calls: Sequence[Call]) -> str:
    """The block of calls that an answer ends with; nothing for no calls."""
    if not calls:
        return ""
    lines = ["", "", f"<{DSML} calls>"]
    for call in calls:
        lines.append(f'<{DSML} invoke name="{mark(call.name)}">')
        lines.append("\n".join(_parameter(k, v) for k, v in call.arguments.items()))
        lines.append(f"</{DSML} invoke>")
    lines.append(f"</{DSML} calls>")
    return "\n".join(lines)


def _parameter(name: str, value: object) -> str:
    is_text = isinstance(value, str)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    flag = "true" if is_text else "false"
    return f'<{DSML} parameter name="{mark(name)}" string="{flag}">{mark(text)}</{DSML} parameter>'
