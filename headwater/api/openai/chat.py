"""``POST /v1/chat/completions``: body to prompt ids, events to chunks or one answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET
from starlette.responses import Response

from headwater.api import ranges
from headwater.api.admission import Ask
from headwater.api.calls import CallFacts
from headwater.api.config import ApiConfig
from headwater.api.decode import BodyDecoder, UnknownNames, unsupported
from headwater.api.failure import Failure
from headwater.api.generation import ChoiceEvent, Generation
from headwater.api.openai import wire
from headwater.api.openai.bodies import CHAT_TABLE, ChatBody, ContentPart, Message
from headwater.api.openai.errors import error_frame, error_response
from headwater.api.openai.models import check_model
from headwater.api.openai.sampling import (
    MAX_TOP_LOGPROBS,
    build_ask,
    include_usage,
)
from headwater.core.errors import InvalidRequest
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.messages import ChatMessage
from headwater.recipe.output import OutputDelta, OutputStream, OutputToken, joined_deltas
from headwater.recipe.text import join_text_parts


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """Implements :class:`headwater.api.calls.Dialect`."""

    recipe: ChatRecipe
    config: ApiConfig
    decoder: BodyDecoder[ChatBody]
    id_prefix: str = field(default="chatcmpl-", init=False)

    @classmethod
    def create(cls, recipe: ChatRecipe, config: ApiConfig, unknown: UnknownNames) -> ChatDialect:
        decoder = BodyDecoder(ChatBody, CHAT_TABLE, strict=config.strict, unknown=unknown)
        return cls(recipe, config, decoder)

    def parse(self, body: bytes, facts: CallFacts) -> ChatCall:
        fields = self.decoder.decode(body)
        model = check_model(fields.model, facts, self.config)
        max_name, max_tokens = _max_tokens(fields)
        # Numbers first: they cost nothing, rendering and tokenising do.
        num_logprobs = _num_logprobs(fields)
        ranges.count("messages", len(fields.messages), self.config.max_messages, "messages")
        ask = build_ask(
            fields,
            facts.info,
            self.config,
            prompt_param="messages",
            max_name=max_name,
            max_tokens=max_tokens,
            num_logprobs=num_logprobs,
            prompts=lambda: (
                self.recipe.encode_chat(
                    [chat_message(m, f"messages[{i}]") for i, m in enumerate(fields.messages)]
                ).tokens,
            ),
        )
        return ChatCall(
            recipe=self.recipe,
            facts=facts,
            model=model,
            ask=ask,
            stream=bool(fields.stream),
            include_usage=include_usage(fields),
        )

    def error_response(self, failure: Failure) -> Response:
        return error_response(failure)

    def error_frame(self, failure: Failure) -> bytes:
        return error_frame(failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """Implements :class:`headwater.api.calls.ParsedCall`."""

    recipe: ChatRecipe
    facts: CallFacts
    model: str
    ask: Ask
    stream: bool
    include_usage: bool

    def open_output(self, position: int) -> OutputStream:
        return OutputStream(
            self.recipe.tokenizer,
            stop_strings=self.ask.stop_strings,
            previous_id=self.ask.prompts[position][-1],
        )

    async def frames(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        async with aclosing(generation.events()) as events:
            async for event in events:
                chunks = self._chunks(event, first=event.choice not in begun)
                begun.add(event.choice)
                if chunks:
                    yield b"".join(chunks)
        if self.include_usage:
            yield self._frame([], wire.usage_wire(generation.usage))
        yield wire.DONE_FRAME

    async def whole(self, generation: Generation) -> bytes:
        deltas: defaultdict[int, list[OutputDelta]] = defaultdict(list)
        async with aclosing(generation.events()) as events:
            async for event in events:
                deltas[event.choice].append(event.delta)
        return wire.encode(
            wire.ChatAnswer(
                id=self.facts.call_id,
                created=self.facts.created_s,
                model=self.model,
                choices=[
                    self._choice(index, joined_deltas(parts))
                    for index, parts in sorted(deltas.items())
                ],
                usage=wire.usage_wire(generation.usage),
            )
        )

    def _choice(self, index: int, all_of_it: OutputDelta) -> wire.ChatChoice:
        return wire.ChatChoice(
            index=index,
            message=wire.ChatMessageWire(content=all_of_it.text),
            logprobs=self._logprobs(all_of_it.tokens),
            finish_reason=wire.finish_word(all_of_it.finish),
        )

    def _chunks(self, event: ChoiceEvent, *, first: bool) -> list[bytes]:
        """The role in a chunk of its own, then text, then the finish in a chunk of its own."""
        chunks: list[bytes] = []
        index, delta = event.choice, event.delta
        if first:
            opening = wire.ChatDelta(role="assistant", content="")
            chunks.append(self._frame([wire.ChatChunkChoice(index, opening)]))
        if delta.text or (delta.tokens and self._wants_logprobs):
            part = wire.ChatDelta(content=delta.text)
            choice = wire.ChatChunkChoice(index, part, self._logprobs(delta.tokens))
            chunks.append(self._frame([choice]))
        if delta.finish is not None:
            word = wire.finish_word(delta.finish)
            ending = wire.ChatChunkChoice(index, wire.ChatDelta(), finish_reason=word)
            chunks.append(self._frame([ending]))
        return chunks

    def _frame(
        self, choices: list[wire.ChatChunkChoice], usage: wire.UsageWire | None = None
    ) -> bytes:
        return wire.frame(
            wire.ChatChunk(
                id=self.facts.call_id,
                created=self.facts.created_s,
                model=self.model,
                choices=choices,
                # Asked for: null in every chunk but the last. Not asked for: no field at all.
                usage=usage if self.include_usage else UNSET,
            )
        )

    @property
    def _wants_logprobs(self) -> bool:
        return self.ask.sampling.num_logprobs is not None

    def _logprobs(self, tokens: Iterable[OutputToken]) -> wire.ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return wire.ChatLogprobs([_token_logprob(token) for token in tokens])


def chat_message(message: Message, where: str) -> ChatMessage:
    """One message in the recipe's form; raises InvalidRequest naming the part that cannot be.

    A list of text parts is joined by the recipe's one rule (A27); null is "".
    """
    if message.tool_calls or message.function_call or message.role in ("tool", "function"):
        raise unsupported(where, "a message with tool calls or a tool's result")
    match message.content:
        case None:
            if message.role != "assistant":
                raise InvalidRequest(
                    f"{where}.content is missing", param=f"{where}.content", code="invalid_type"
                )
            content = ""
        case str(text):
            content = text
        case parts:
            content = join_text_parts(
                _part_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts)
            )
    return ChatMessage(role=message.role, content=content, name=message.name)


def _part_text(part: ContentPart, where: str) -> str:
    if part.type not in ("text", "input_text", "output_text"):
        raise unsupported(where, "a content part other than text")
    if part.text is None:
        raise InvalidRequest(
            f"missing required field '{where}.text'",
            param=f"{where}.text",
            code="missing_required_parameter",
        )
    return part.text


def _max_tokens(body: ChatBody) -> tuple[str, int | None]:
    """The limit and the name it came under; the older name still counts."""
    if body.max_completion_tokens is None:
        return "max_tokens", body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; send one of them",
            param="max_tokens",
            code="invalid_value",
        )
    return "max_completion_tokens", body.max_completion_tokens


def _num_logprobs(body: ChatBody) -> int | None:
    num_top = ranges.integer("top_logprobs", body.top_logprobs, 0, 0, MAX_TOP_LOGPROBS)
    if body.logprobs:
        return num_top
    if num_top:
        raise InvalidRequest(
            "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value"
        )
    return None


def _token_logprob(token: OutputToken) -> wire.TokenLogprobWire:
    return wire.TokenLogprobWire(
        token=token.text,
        logprob=wire.finite(token.logprob),
        bytes=list(token.piece),
        top_logprobs=[
            wire.TopLogprob(entry.text, wire.finite(entry.logprob), list(entry.piece))
            for entry in token.top
        ],
    )
