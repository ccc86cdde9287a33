"""The port between a model's way of being spoken to and everyone who speaks: ``Recipe``.

Two implementations: ``template`` (any chat template) and ``deepseek``. ``load``
chooses one from a model's files. A recipe holds no state between calls, so
threads may share it; what belongs to one output is in the parser it opens.
Knows no dialect, no HTTP and no tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headwater.core.constraint import Constraint
from headwater.recipe.conversation import Conversation
from headwater.recipe.parsers import OutputParser
from headwater.recipe.tokenizer import Tokenizer

SpanPart = Literal["content", "reasoning", "tool_call", "tool", "name"]
ThinkingSupport = Literal["none", "optional", "always"]
NewCallId = Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Tokens [start, end) of a prompt that came from outside, and from where.

    They hold characters [start_char, end_char) of ``part`` of
    ``messages[message_index]``; for part ``tool``, of the definition
    ``tools[message_index]``. Tokens that no span covers are the format's own.
    """

    start: int
    end: int
    message_index: int
    part: SpanPart = "content"
    start_char: int = 0
    end_char: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model will see it.

    ``control_positions`` are the indexes of control ids: the begin token and
    what the format placed, never anything that came from outside.
    """

    tokens: tuple[int, ...]
    control_positions: tuple[int, ...] = ()
    spans: tuple[PromptSpan, ...] = ()

    @property
    def num_control_tokens(self) -> int:
        return len(self.control_positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this model's format can carry. What it cannot is refused by name, before encoding.

    ``notes`` are sentences for the log and the model list, such as "drops the
    reasoning of earlier turns, so turn n+1 does not extend turn n".
    """

    chat: bool = False
    tools: bool = False
    parallel_tools: bool = False
    forced_tools: bool = False  # tool choice ``required`` and ``named``
    thinking: ThinkingSupport = "none"
    notes: tuple[str, ...] = ()


class Recipe(Protocol):
    """How one model is spoken to."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids by which the model ends its turn or the text."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def encode(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> EncodedPrompt:
        """The prompt that asks for the next assistant message.

        Raises InvalidRequest naming the field: text that is not Unicode, what
        the format cannot carry, or a message that it would leave out in silence.
        """
        ...

    def open_parser(self, conversation: Conversation) -> OutputParser:
        """A fresh parser for one choice of the answer to ``encode(conversation)``."""
        ...

    def turn_constraint(self, conversation: Conversation) -> Constraint | None:
        """The grammar of everything the model may write in this turn, or None for no limit.

        It holds the answer's format and forced tool calls, wrapped in the
        format's reasoning and tool markup. Raises InvalidRequest for what the
        format cannot be held to.
        """
        ...

    def encode_completion(
        self, text: str, *, allow_control: bool = False, param: str = "prompt"
    ) -> EncodedPrompt:
        """``text`` with the model's begin token before it, if the model has that habit.

        Control literals in ``text`` are ordinary text. With ``allow_control``
        the caller vouches for the whole text (a prompt that was rendered
        elsewhere): literals become control ids, and a begin token is not doubled.
        """
        ...

    def encode_ids(self, token_ids: Sequence[int], *, param: str = "prompt") -> EncodedPrompt:
        """A prompt given as ids, taken as it is; raises InvalidRequest for an id out of range."""
        ...

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str: ...


def random_call_id() -> str:
    """An id for a tool call the model made; clients send it back with the result.

    It is never part of a prompt, so it needs no seed, but it must differ between turns.
    """
    return "call_" + secrets.token_hex(12)
