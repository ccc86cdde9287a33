"""``POST /v1/responses``: items in, items out, nothing stored between calls.

The opening events are sent at once; usage and output come with the last one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.responses import Response

from headwater.api import ranges
from headwater.api.admission import Ask
from headwater.api.cache_report import CacheWire, HitExplainer
from headwater.api.caching import cache_ask
from headwater.api.calls import CallFacts
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing
from headwater.api.decode import BodyDecoder, UnknownNames, unsupported
from headwater.api.failure import Failure, FailureKind
from headwater.api.generation import Generation
from headwater.api.openai import responses_wire as wire
from headwater.api.openai.errors import error_response
from headwater.api.openai.responses_bodies import (
    INCLUDES,
    RESPONSES_TABLE,
    Reasoning,
    ResponsesBody,
    TextConfig,
    TextFormat,
)
from headwater.api.openai.responses_input import responses_conversation
from headwater.api.openai.responses_items import ItemWriter
from headwater.api.openai.responses_tools import offered_tools
from headwater.api.served import check_model
from headwater.api.stream import COMMENT_FRAME
from headwater.core.errors import InvalidRequest
from headwater.core.request import FinishReason, SamplingParams
from headwater.recipe.conversation import Conversation
from headwater.recipe.output import OutputDelta, OutputStream, joined_deltas

MAX_METADATA = 16
MAX_METADATA_CHARS = 512
_SUMMARIES = ("auto", "concise", "detailed")


@dataclass(frozen=True, slots=True)
class ResponsesDialect:
    """Implements :class:`headwater.api.calls.Dialect`."""

    conversing: Conversing
    config: ApiConfig
    decoder: BodyDecoder[ResponsesBody]
    unknown: UnknownNames
    name: str = field(default="responses", init=False)
    id_prefix: str = field(default="resp_", init=False)
    keepalive_frame: bytes = field(default=COMMENT_FRAME, init=False)

    @classmethod
    def create(
        cls, conversing: Conversing, config: ApiConfig, unknown: UnknownNames
    ) -> ResponsesDialect:
        decoder = BodyDecoder(ResponsesBody, RESPONSES_TABLE, strict=config.strict, unknown=unknown)
        return cls(conversing, config, decoder, unknown)

    def parse(self, body: bytes, facts: CallFacts) -> ResponsesCall:
        fields = self.decoder.decode(body)
        model = check_model(fields.model, facts, self.config)
        # Numbers first: they cost nothing, rendering, tokenising and compiling do.
        temperature = ranges.number(
            "temperature", fields.temperature, 1.0, 0.0, ranges.MAX_TEMPERATURE
        )
        top_p = ranges.number("top_p", fields.top_p, 1.0, 0.0, 1.0, above=True)
        max_tokens = fields.max_output_tokens
        if max_tokens is not None:
            ranges.integer("max_output_tokens", max_tokens, 0, 0, ranges.MAX_TOKENS_ASKED)
        _check_metadata(fields.metadata or {})
        for name in fields.include or ():
            if name not in INCLUDES:
                raise unsupported("include", "something that is asked for in 'include'")
        if fields.text is not None and fields.text.verbosity not in (None, "medium"):
            raise unsupported("text.verbosity", "a text.verbosity other than medium")
        reasoning = fields.reasoning or Reasoning()
        summary = _summary(reasoning)
        offered = offered_tools(fields.tools or (), strict=self.config.strict)
        for kind in offered.left_out:
            self.unknown.note(f"tools.{kind}")
        caching = cache_ask(
            fields,
            has_tools=bool(fields.tools),
            prompt_cache_retention=fields.prompt_cache_retention,
        )
        spoken = responses_conversation(fields, offered, self.config)
        prompt = self.conversing.encode(spoken)
        ask = Ask(
            prompts=(prompt,),
            prompt_param="input",
            sampling=SamplingParams(temperature=temperature, top_p=top_p),
            seed=None,
            num_choices=1,
            max_output_tokens=max_tokens,
            min_output_tokens=0,
            stop_strings=(),
            stop_token_ids=frozenset(),
            ignore_end=False,
            constraint=self.conversing.constraint(spoken),
            cache=caching,
        )
        opening = wire.ResponseWire(
            id=facts.call_id,
            created_at=facts.created_s,
            model=model,
            status="in_progress",
            output=(),
            usage=None,
            error=None,
            incomplete_details=None,
            instructions=fields.instructions,
            max_output_tokens=max_tokens,
            metadata=fields.metadata or {},
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            reasoning=wire.ReasoningEcho(reasoning.effort, summary),
            temperature=temperature,
            text=fields.text or TextConfig(format=TextFormat("text")),
            tool_choice=fields.tool_choice or "auto",
            tools=offered.echoed,
            top_p=top_p,
        )
        return ResponsesCall(
            conversing=self.conversing,
            conversation=spoken.conversation,
            ask=ask,
            stream=bool(fields.stream),
            opening=opening,
            explainer=self.conversing.explainer(spoken, prompt) if caching.wants_report else None,
            writer=ItemWriter(
                facts.call_id.removeprefix(self.id_prefix),
                as_summary=summary is not None,
                callers_name=offered.callers_name,
            ),
        )

    def error_response(self, failure: Failure) -> Response:
        return error_response(failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall:
    """Implements :class:`headwater.api.calls.ParsedCall`."""

    conversing: Conversing
    conversation: Conversation
    ask: Ask
    stream: bool
    opening: wire.ResponseWire
    explainer: HitExplainer | None  # None: the caller did not ask for the hit
    writer: ItemWriter

    def open_output(self, position: int) -> OutputStream:
        return self.conversing.open_output(
            self.conversation,
            stop_strings=self.ask.stop_strings,
            previous_id=self.ask.prompts[position].tokens[-1],
        )

    def error_frame(self, failure: Failure) -> bytes:
        """``response.failed``, with the items that were complete."""
        failed = replace(
            self.opening,
            status="failed",
            output=list(self.writer.items),
            error=wire.ResponseError(_error_code(failure), failure.message),
        )
        return self._response_event("failed", failed)

    async def frames(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        yield self._response_event("created", self.opening) + self._response_event(
            "in_progress", self.opening
        )
        async with aclosing(generation.events()) as events:
            async for event in events:
                frames = self.writer.write(event.delta.parts)
                finish = event.delta.finish
                if finish is not None:
                    frames += self.writer.finish(is_cut=finish is FinishReason.LENGTH)
                    answer = self._answer(finish, generation)
                    frames.append(self._response_event(answer.status, answer))
                if frames:
                    yield b"".join(frames)

    async def whole(self, generation: Generation) -> bytes:
        deltas: list[OutputDelta] = []
        async with aclosing(generation.events()) as events:
            async for event in events:
                deltas.append(event.delta)
        all_of_it = joined_deltas(deltas)
        self.writer.write(all_of_it.parts)
        self.writer.finish(is_cut=all_of_it.finish is FinishReason.LENGTH)
        return wire.encode(self._answer(all_of_it.finish, generation))

    def _answer(self, finish: FinishReason | None, generation: Generation) -> wire.ResponseWire:
        is_cut = finish is FinishReason.LENGTH
        cache: CacheWire | UnsetType | None = UNSET
        if self.explainer is not None:
            cache = self.explainer.explain(generation.reports.get(0))
        return replace(
            self.opening,
            cache=cache,
            status="incomplete" if is_cut else "completed",
            incomplete_details=wire.IncompleteDetails() if is_cut else None,
            output=list(self.writer.items),
            usage=wire.usage_wire(generation.usage),
        )

    def _response_event(self, name: str, response: wire.ResponseWire) -> bytes:
        return self.writer.numbered(
            lambda number: wire.ResponseEvent(f"response.{name}", number, response)
        )


def _summary(reasoning: Reasoning) -> str | None:
    """How the caller wants the reasoning summarised; None: in the clear."""
    summary = reasoning.summary or reasoning.generate_summary
    if summary is not None and summary not in (*_SUMMARIES, "none"):
        raise InvalidRequest(
            f"reasoning.summary must be one of {', '.join(_SUMMARIES)}",
            param="reasoning.summary",
            code="invalid_value",
        )
    return None if summary == "none" else summary


def _check_metadata(metadata: dict[str, str]) -> None:
    ranges.count("metadata", len(metadata), MAX_METADATA, "entries")
    longest = max((len(text) for pair in metadata.items() for text in pair), default=0)
    ranges.count("metadata", longest, MAX_METADATA_CHARS, "characters in a key or value")


def _error_code(failure: Failure) -> str:
    """One of the few codes that this API has."""
    if failure.code == "context_length_exceeded":
        return failure.code
    return {
        FailureKind.INVALID_REQUEST: "invalid_prompt",
        FailureKind.OVERLOADED: "rate_limit_exceeded",
    }.get(failure.kind, "server_error")
