"""A recipe with everything a chat can have, on bytes: reasoning, tools, forced calls.

A double for the real recipes, so that these tests are about the dialects. What
the model writes:

    <think>why</think>answer<call f>{"a": 1}</call>

and every part of a conversation is printed, so equal ids mean equal conversations.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from api_server import (
    END_ID,
    INFO,
    Script,
    ScriptedGenerator,
    Served,
    byte_recipe,
    prompt_report,
    sampled,
    serving,
)

from headwater.api.config import ApiConfig
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.core.request import FinishReason, Request, SequenceOutput
from headwater.recipe.conversation import Conversation, Message
from headwater.recipe.parsers import Stage
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from headwater.recipe.recipe import Capabilities, EncodedPrompt, Recipe
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_byte import IM_END_ID, IM_START_ID

TALK_INFO = replace(INFO, context_tokens=8192, num_blocks=512)


class TalkParser:
    """Reads the format above, a character at a time."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._stage: Stage = "answer"
        self._pending = ""
        self._arguments = ""
        self._num_calls = 0

    @property
    def control_literals(self) -> frozenset[str]:
        return frozenset()

    @property
    def stage(self) -> Stage:
        return self._stage

    def push(self, text: str) -> list[Part]:
        return [part for character in text for part in self._take(character)]

    def push_control(self, literal: str) -> list[Part]:
        return self.push(literal)

    def finish(self) -> list[Part]:
        pending, self._pending = self._pending, ""
        return self._said(pending)

    def _take(self, character: str) -> list[Part]:
        self._pending += character
        pending = self._pending
        in_call_mark = self._stage == "answer" and pending.startswith("<call ")
        if not in_call_mark and not any(mark.startswith(pending) for mark in self._marks):
            self._pending = ""
            return self._said(pending)
        if pending == "<think>":
            return self._enter("reasoning")
        if pending == "</think>":
            return self._enter("answer")
        if pending == "</call>":
            ends = _is_object(self._arguments)
            return [*self._enter("answer"), *([ToolCallEnd(self._num_calls - 1)] if ends else [])]
        if pending.startswith("<call ") and character == ">":
            name = pending.removeprefix("<call ").removesuffix(">")
            self._num_calls += 1
            self._arguments = ""
            start = ToolCallStart(self._num_calls - 1, self._new_call_id(), name)
            return [*self._enter("tool_call"), start]
        return []

    @property
    def _marks(self) -> tuple[str, ...]:
        """What may come in this stage."""
        ends = {"answer": ("<think>", "<call "), "reasoning": ("</think>",)}
        return ends.get(self._stage, ("</call>",))

    def _enter(self, stage: Stage) -> list[Part]:
        self._pending, self._stage = "", stage
        return []

    def _said(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._stage == "reasoning":
            return [ReasoningText(text)]
        if self._stage == "tool_call":
            self._arguments += text
            return [ToolCallArguments(self._num_calls - 1, text)]
        return [AnswerText(text)]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@dataclass
class TalkRecipe:
    """Implements :class:`headwater.recipe.recipe.Recipe`."""

    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(
            chat=True,
            tools=True,
            parallel_tools=True,
            forced_tools=True,
            thinking="optional",
            notes=("drops nothing",),
        )
    )
    seen: list[Conversation] = field(default_factory=list)
    _bytes: Recipe = field(default_factory=byte_recipe)
    _ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._bytes.tokenizer

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._bytes.end_token_ids

    @property
    def has_chat_template(self) -> bool:
        return True

    def encode(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> EncodedPrompt:
        self.seen.append(conversation)
        if not conversation.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        ids: list[int] = []
        for tool in conversation.tools:
            ids += f"{tool.name}|{tool.description}|{tool.parameters}\n".encode()
        for index, message in enumerate(conversation.messages):
            if "forbidden" in message.content:
                raise InvalidRequest(
                    f"messages[{index}].content is forbidden", param=f"messages[{index}].content"
                )
            ids += [IM_START_ID, *_spelt(message).encode()]
            if not message.continues:
                ids.append(IM_END_ID)
        if add_generation_prompt and not conversation.messages[-1].continues:
            ids += [IM_START_ID, *b"assistant:"]
        controls = [at for at, token in enumerate(ids) if token >= 256]
        return EncodedPrompt(tokens=tuple(ids), control_positions=tuple(controls))

    def open_parser(self, conversation: Conversation) -> TalkParser:
        return TalkParser(lambda: f"call_{next(self._ids)}")

    def turn_constraint(self, conversation: Conversation) -> Constraint | None:
        if conversation.tool_choice.kind in ("required", "named"):
            return Constraint("turn", conversation.tool_choice.name or "any")
        return conversation.answer

    def encode_completion(
        self, text: str, *, allow_control: bool = False, param: str = "prompt"
    ) -> EncodedPrompt:
        return self._bytes.encode_completion(text, allow_control=allow_control, param=param)

    def encode_ids(self, token_ids: Sequence[int], *, param: str = "prompt") -> EncodedPrompt:
        return self._bytes.encode_ids(token_ids, param=param)

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str:
        return self._bytes.decode(token_ids, keep_control=keep_control)


def _spelt(message: Message) -> str:
    """Everything but the ids of calls, which no format prints."""
    text = f"{message.role}:"
    if message.reasoning:
        text += f"<think>{message.reasoning}</think>"
    text += message.content
    for call in message.tool_calls:
        text += f"<call {call.name}>{call.arguments}</call>"
    return text


def write(text: str, cuts: Sequence[int] = (), *, hit: int = 0) -> Script:
    """The model writes ``text`` and ends its turn; steps end at ``cuts`` (bytes)."""

    async def play(request: Request) -> AsyncIterator[SequenceOutput]:
        limit = request.stop.max_output_tokens
        data = text.encode()[:limit]
        edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        if not cuts:
            edges = list(range(len(data) + 1))
        report = prompt_report(request, hit)
        yield SequenceOutput(request_id=request.request_id, index=0, prompt=report)
        for start, end in itertools.pairwise(edges):
            yield SequenceOutput(
                request_id=request.request_id,
                index=0,
                tokens=tuple(sampled(request, token) for token in data[start:end]),
            )
        is_cut = len(text.encode()) >= limit
        yield SequenceOutput(
            request_id=request.request_id,
            index=0,
            finish=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            stop_token_id=None if is_cut else END_ID,
        )

    return play


def check_constraint(constraint: Constraint) -> None:
    """A compiler's verdict: whatever says "bad" is."""
    if "bad" in constraint.source:
        raise InvalidRequest("the grammar does not compile")


def talk_generator() -> ScriptedGenerator:
    return ScriptedGenerator(home=TALK_INFO, info=TALK_INFO)


@contextmanager
def talking(config: ApiConfig | None = None, **options: Any) -> Iterator[Served]:
    """The app with a :class:`TalkRecipe`."""
    with serving(
        config,
        talk_generator(),
        recipe=options.pop("recipe", None) or TalkRecipe(),
        check_constraint=options.pop("check", check_constraint),
    ) as served:
        yield served


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a Messages or Responses stream; each one's name is its type."""
    events: list[dict[str, Any]] = []
    for frame in text.split("\n\n"):
        if not frame or frame.startswith(":"):
            continue
        name, _, data = frame.partition("\ndata: ")
        event = json.loads(data)
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
