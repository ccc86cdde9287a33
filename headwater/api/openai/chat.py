"""``POST /v1/chat/completions``: body to prompt ids, events to chunks or one answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from headwater.api import ranges
from headwater.api.admission import Ask
from headwater.api.cache_report import CacheWire, HitExplainer
from headwater.api.calls import CallFacts
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing
from headwater.api.decode import BodyDecoder, UnknownNames
from headwater.api.failure import Failure
from headwater.api.generation import ChoiceEvent, Generation
from headwater.api.openai import wire
from headwater.api.openai.bodies import CHAT_TABLE, ChatBody
from headwater.api.openai.conversation import chat_conversation
from headwater.api.openai.errors import error_frame, error_response
from headwater.api.openai.sampling import (
    MAX_TOP_LOGPROBS,
    build_ask,
    include_usage,
)
from headwater.api.segments import CallSegment, ReasoningSegment, segments
from headwater.api.served import check_model
from headwater.api.stream import COMMENT_FRAME
from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Conversation
from headwater.recipe.output import OutputDelta, OutputStream, OutputToken, joined_deltas
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """Implements :class:`headwater.api.calls.Dialect`."""

    conversing: Conversing
    config: ApiConfig
    decoder: BodyDecoder[ChatBody]
    name: str = field(default="chat", init=False)
    id_prefix: str = field(default="chatcmpl-", init=False)
    keepalive_frame: bytes = field(default=COMMENT_FRAME, init=False)

    @classmethod
    def create(
        cls, conversing: Conversing, config: ApiConfig, unknown: UnknownNames
    ) -> ChatDialect:
        decoder = BodyDecoder(ChatBody, CHAT_TABLE, strict=config.strict, unknown=unknown)
        return cls(conversing, config, decoder)

    def parse(self, body: bytes, facts: CallFacts) -> ChatCall:
        fields = self.decoder.decode(body)
        model = check_model(fields.model, facts, self.config)
        max_name, max_tokens = _max_tokens(fields)
        # Numbers first: they cost nothing, rendering, tokenising and compiling do.
        num_logprobs = _num_logprobs(fields)
        spoken = chat_conversation(fields.messages, fields, self.config)
        ask = build_ask(
            fields,
            facts.info,
            self.config,
            prompt_param="messages",
            max_name=max_name,
            max_tokens=max_tokens,
            num_logprobs=num_logprobs,
            has_tools=bool(fields.tools),
            prompts=lambda: (self.conversing.encode(spoken),),
        )
        explainer = None
        if ask.cache.wants_report:
            explainer = self.conversing.explainer(spoken, ask.prompts[0])
        return ChatCall(
            conversing=self.conversing,
            conversation=spoken.conversation,
            facts=facts,
            model=model,
            ask=replace(ask, constraint=self.conversing.constraint(spoken)),
            stream=bool(fields.stream),
            include_usage=include_usage(fields),
            explainer=explainer,
        )

    def error_response(self, failure: Failure) -> Response:
        return error_response(failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """Implements :class:`headwater.api.calls.ParsedCall`."""

    conversing: Conversing
    conversation: Conversation
    facts: CallFacts
    model: str
    ask: Ask
    stream: bool
    include_usage: bool
    explainer: HitExplainer | None  # None: the caller did not ask for the hit

    def open_output(self, position: int) -> OutputStream:
        return self.conversing.open_output(
            self.conversation,
            stop_strings=self.ask.stop_strings,
            previous_id=self.ask.prompts[position].tokens[-1],
            list_tokens=self._wants_logprobs,
        )

    def error_frame(self, failure: Failure) -> bytes:
        return error_frame(failure)

    async def frames(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        calling: set[int] = set()
        async with aclosing(generation.events()) as events:
            async for event in events:
                delta = event.delta
                is_first = event.choice not in begun
                # What hit comes long before the first token; clients take the first chunk for it.
                if is_first and not delta.num_tokens and delta.finish is None:
                    continue
                chunks = self._chunks(event, calling, first=is_first)
                begun.add(event.choice)
                if chunks:
                    yield b"".join(chunks)
        if self.include_usage or self.explainer is not None:
            usage = wire.usage_wire(generation.usage)
            yield self._frame([], usage, self._cache(generation))
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
                cache=self._cache(generation),
            )
        )

    def _cache(self, generation: Generation) -> CacheWire | UnsetType | None:
        if self.explainer is None:
            return UNSET
        return self.explainer.explain(generation.reports.get(0))

    def _choice(self, index: int, all_of_it: OutputDelta) -> wire.ChatChoice:
        turn = segments(all_of_it.parts)
        calls = [
            wire.ToolCallWire(
                wire.FunctionCallWire(segment.name, segment.arguments),
                id=segment.call_id,
                type="function",
            )
            for segment in turn
            if isinstance(segment, CallSegment)
        ]
        reasoning = "".join(s.text for s in turn if isinstance(s, ReasoningSegment))
        return wire.ChatChoice(
            index=index,
            message=wire.ChatMessageWire(
                # OpenAI's clients expect null, not "", beside calls.
                content=all_of_it.text or (None if calls else ""),
                reasoning_content=reasoning or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(all_of_it.tokens),
            finish_reason=wire.finish_word(all_of_it.finish, has_calls=bool(calls)),
        )

    def _chunks(self, event: ChoiceEvent, calling: set[int], *, first: bool) -> list[bytes]:
        """The role in a chunk of its own, then the parts, then the finish in one of its own.

        ``calling`` gathers the choices that have made a call.
        """
        chunks: list[bytes] = []
        index, delta = event.choice, event.delta
        if first:
            opening = wire.ChatDelta(role="assistant", content="")
            chunks.append(self._frame([wire.ChatChunkChoice(index, opening)]))
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        for part in delta.parts:
            piece = _piece(part)
            if piece is None:
                continue
            if isinstance(part, ToolCallStart):
                calling.add(index)
            choice = wire.ChatChunkChoice(index, piece)
            if isinstance(part, AnswerText):
                choice.logprobs, logprobs = logprobs, None
            chunks.append(self._frame([choice]))
        if logprobs is not None:  # of tokens whose text came earlier
            rest = wire.ChatChunkChoice(index, wire.ChatDelta(content=""), logprobs)
            chunks.append(self._frame([rest]))
        if delta.finish is not None:
            word = wire.finish_word(delta.finish, has_calls=index in calling)
            ending = wire.ChatChunkChoice(index, wire.ChatDelta(), finish_reason=word)
            chunks.append(self._frame([ending]))
        return chunks

    def _frame(
        self,
        choices: list[wire.ChatChunkChoice],
        usage: wire.UsageWire | None = None,
        cache: CacheWire | UnsetType | None = UNSET,
    ) -> bytes:
        return wire.frame(
            wire.ChatChunk(
                id=self.facts.call_id,
                created=self.facts.created_s,
                model=self.model,
                choices=choices,
                # Asked for: null in every chunk but the last. Not asked for: no field at all.
                usage=usage if self.include_usage else UNSET,
                cache=cache,
            )
        )

    @property
    def _wants_logprobs(self) -> bool:
        return self.ask.sampling.num_logprobs is not None

    def _logprobs(self, tokens: Iterable[OutputToken]) -> wire.ChatLogprobs | None:
        if not self._wants_logprobs:
            return None
        return wire.ChatLogprobs([_token_logprob(token) for token in tokens])


def _piece(part: Part) -> wire.ChatDelta | None:
    """One part as a delta; the end of a call has none."""
    match part:
        case AnswerText(text=text):
            return wire.ChatDelta(content=text)
        case ReasoningText(text=text):
            return wire.ChatDelta(reasoning_content=text)
        case ToolCallStart(index=number, call_id=call_id, name=name):
            function = wire.FunctionCallWire(name=name, arguments="")
            call = wire.ToolCallWire(function, index=number, id=call_id, type="function")
            return wire.ChatDelta(tool_calls=[call])
        case ToolCallArguments(index=number, text=text):
            function = wire.FunctionCallWire(arguments=text)
            return wire.ChatDelta(tool_calls=[wire.ToolCallWire(function, index=number)])
        case _:
            return None


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
