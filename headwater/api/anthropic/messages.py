"""``POST /v1/messages`` and ``/v1/messages/count_tokens``.

Both go through the same conversation and the same encoding, so a count equals
the input of the later call (A01). ``message_start`` waits for the first output, which
says how much of the prompt came from the cache (A03) and may say no more than that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from headwater.api import ranges
from headwater.api.admission import Ask
from headwater.api.anthropic import wire
from headwater.api.anthropic.blocks import BlockWriter
from headwater.api.anthropic.bodies import COUNT_TABLE, MESSAGES_TABLE, CountBody, MessagesBody
from headwater.api.anthropic.conversation import messages_conversation
from headwater.api.anthropic.errors import error_frame, error_response
from headwater.api.cache_report import CacheWire, HitExplainer
from headwater.api.caching import cache_ask
from headwater.api.calls import CallFacts
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing, Spoken
from headwater.api.decode import BodyDecoder, UnknownNames
from headwater.api.failure import Failure
from headwater.api.generation import Generation
from headwater.api.history import missing
from headwater.api.ranges import MAX_TEMPERATURE, MAX_TOKENS_ASKED
from headwater.api.segments import CallSegment, segments
from headwater.api.served import check_model
from headwater.core.request import SamplingParams
from headwater.recipe.conversation import Conversation
from headwater.recipe.output import OutputDelta, OutputStream, joined_deltas


@dataclass(frozen=True, slots=True)
class MessagesDialect:
    """Implements :class:`headwater.api.calls.Dialect`."""

    conversing: Conversing
    config: ApiConfig
    decoder: BodyDecoder[MessagesBody]
    name: str = field(default="messages", init=False)
    id_prefix: str = field(default="msg_", init=False)
    keepalive_frame: bytes = field(default=wire.PING_FRAME, init=False)

    @classmethod
    def create(
        cls, conversing: Conversing, config: ApiConfig, unknown: UnknownNames
    ) -> MessagesDialect:
        decoder = BodyDecoder(MessagesBody, MESSAGES_TABLE, strict=config.strict, unknown=unknown)
        return cls(conversing, config, decoder)

    def parse(self, body: bytes, facts: CallFacts) -> MessagesCall:
        fields = self.decoder.decode(body)
        model = check_model(fields.model, facts, self.config)
        if fields.max_tokens is None and self.config.strict:
            raise missing("max_tokens")
        # Numbers first: they cost nothing, rendering, tokenising and compiling do.
        sampling = self._sampling(fields, facts)
        max_tokens = fields.max_tokens
        if max_tokens is not None:
            ranges.integer("max_tokens", max_tokens, 0, 0, MAX_TOKENS_ASKED)
        stops = ranges.stop_strings("stop_sequences", fields.stop_sequences or (), self.config)
        caching = cache_ask(fields, has_tools=bool(fields.tools))
        spoken = _spoken(fields, self.conversing, self.config)
        prompt = self.conversing.encode(spoken)
        return MessagesCall(
            conversing=self.conversing,
            conversation=spoken.conversation,
            facts=facts,
            model=model,
            ask=Ask(
                prompts=(prompt,),
                prompt_param="messages",
                sampling=sampling,
                seed=None,
                num_choices=1,
                max_output_tokens=max_tokens,
                min_output_tokens=0,
                stop_strings=stops,
                stop_token_ids=frozenset(),
                ignore_end=False,
                constraint=self.conversing.constraint(spoken),
                cache=caching,
            ),
            stream=bool(fields.stream),
            explainer=self.conversing.explainer(spoken, prompt) if caching.wants_report else None,
            shows_thinking=fields.thinking is None or fields.thinking.display != "omitted",
        )

    def error_response(self, failure: Failure) -> Response:
        return error_response(failure)

    def _sampling(self, fields: MessagesBody, facts: CallFacts) -> SamplingParams:
        return SamplingParams(
            temperature=ranges.number("temperature", fields.temperature, 1.0, 0.0, MAX_TEMPERATURE),
            top_p=ranges.number("top_p", fields.top_p, 1.0, 0.0, 1.0, above=True),
            top_k=min(
                ranges.integer("top_k", fields.top_k, 0, 0, 2**31 - 1), facts.info.vocab_size
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesCall:
    """Implements :class:`headwater.api.calls.ParsedCall`."""

    conversing: Conversing
    conversation: Conversation
    facts: CallFacts
    model: str
    ask: Ask
    stream: bool
    explainer: HitExplainer | None  # None: the caller did not ask for the hit
    shows_thinking: bool

    def open_output(self, position: int) -> OutputStream:
        return self.conversing.open_output(
            self.conversation,
            stop_strings=self.ask.stop_strings,
            previous_id=self.ask.prompts[position].tokens[-1],
        )

    def error_frame(self, failure: Failure) -> bytes:
        return error_frame(failure)

    async def frames(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        writer: BlockWriter | None = None
        async with aclosing(generation.events()) as events:
            async for event in events:
                frames: list[bytes] = []
                if writer is None:
                    writer = BlockWriter(shows_thinking=self.shows_thinking)
                    frames.append(self._start(generation))
                frames += writer.write(event.delta.parts)
                if event.delta.finish is not None:
                    frames += writer.close()
                    usage = wire.usage_wire(generation.usage)
                    ending = wire.ending(event.delta, has_calls=writer.had_call)
                    frames.append(wire.frame(wire.MessageDelta(ending, usage)))
                    frames.append(wire.frame(wire.MessageStop()))
                if frames:
                    yield b"".join(frames)

    async def whole(self, generation: Generation) -> bytes:
        deltas: list[OutputDelta] = []
        async with aclosing(generation.events()) as events:
            async for event in events:
                deltas.append(event.delta)
        all_of_it = joined_deltas(deltas)
        turn = segments(all_of_it.parts)
        has_calls = any(isinstance(segment, CallSegment) for segment in turn)
        ending = wire.ending(all_of_it, has_calls=has_calls)
        return wire.encode(
            wire.MessageWire(
                id=self.facts.call_id,
                model=self.model,
                content=wire.blocks_of(turn, shows_thinking=self.shows_thinking),
                stop_reason=ending.stop_reason,
                stop_sequence=ending.stop_sequence,
                usage=wire.usage_wire(generation.usage),
                cache=self._cache(generation),
            )
        )

    def _start(self, generation: Generation) -> bytes:
        message = wire.MessageWire(
            id=self.facts.call_id,
            model=self.model,
            content=(),
            stop_reason=None,
            stop_sequence=None,
            usage=wire.usage_wire(generation.usage),
            cache=self._cache(generation),
        )
        return wire.frame(wire.MessageStart(message))

    def _cache(self, generation: Generation) -> CacheWire | UnsetType | None:
        if self.explainer is None:
            return UNSET
        return self.explainer.explain(generation.reports.get(0))


@dataclass(frozen=True, slots=True)
class CountDialect:
    """Implements :class:`headwater.api.direct.DirectDialect`."""

    conversing: Conversing
    config: ApiConfig
    decoder: BodyDecoder[CountBody]
    id_prefix: str = field(default="count_", init=False)

    @classmethod
    def create(
        cls, conversing: Conversing, config: ApiConfig, unknown: UnknownNames
    ) -> CountDialect:
        decoder = BodyDecoder(CountBody, COUNT_TABLE, strict=config.strict, unknown=unknown)
        return cls(conversing, config, decoder)

    def answer(self, body: bytes, facts: CallFacts) -> bytes:
        fields = self.decoder.decode(body)
        check_model(fields.model, facts, self.config)
        prompt = self.conversing.encode(_spoken(fields, self.conversing, self.config))
        return msgspec.json.encode({"input_tokens": len(prompt.tokens)})

    def error_response(self, failure: Failure) -> Response:
        return error_response(failure)


def _spoken(fields: CountBody, conversing: Conversing, config: ApiConfig) -> Spoken:
    return messages_conversation(fields, config, conversing.recipe.capabilities.thinking)
