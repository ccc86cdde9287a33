"""``POST /v1/completions``: text or ids in, their continuation out, with echo and logprobs.

Chunks and the whole answer have one shape here, so both are made by the same
function from the same events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from starlette.responses import Response

from headwater.api import ranges
from headwater.api.admission import Ask
from headwater.api.cache_report import CacheWire, HitExplainer
from headwater.api.calls import CallFacts
from headwater.api.config import ApiConfig
from headwater.api.decode import BodyDecoder, UnknownNames, unsupported
from headwater.api.failure import Failure
from headwater.api.generation import ChoiceEvent, Generation
from headwater.api.openai import wire
from headwater.api.openai.bodies import COMPLETION_TABLE, CompletionBody
from headwater.api.openai.errors import error_frame, error_response
from headwater.api.openai.sampling import (
    MAX_TOP_LOGPROBS,
    build_ask,
    include_usage,
)
from headwater.api.served import check_model
from headwater.api.stream import COMMENT_FRAME
from headwater.core.errors import InvalidRequest
from headwater.core.request import FinishReason, PromptReport
from headwater.recipe.output import OutputStream, OutputToken, describe_prompt
from headwater.recipe.recipe import EncodedPrompt, Recipe


@dataclass(frozen=True, slots=True)
class CompletionDialect:
    """Implements :class:`headwater.api.calls.Dialect`."""

    recipe: Recipe
    config: ApiConfig
    decoder: BodyDecoder[CompletionBody]
    name: str = field(default="completions", init=False)
    id_prefix: str = field(default="cmpl-", init=False)
    keepalive_frame: bytes = field(default=COMMENT_FRAME, init=False)

    @classmethod
    def create(cls, recipe: Recipe, config: ApiConfig, unknown: UnknownNames) -> CompletionDialect:
        decoder = BodyDecoder(
            CompletionBody, COMPLETION_TABLE, strict=config.strict, unknown=unknown
        )
        return cls(recipe, config, decoder)

    def parse(self, body: bytes, facts: CallFacts) -> CompletionCall:
        fields = self.decoder.decode(body)
        model = check_model(fields.model, facts, self.config)
        if fields.best_of not in (None, 1, fields.n):
            raise unsupported("best_of", "best_of other than n")
        num_logprobs = None
        if fields.logprobs is not None:
            num_logprobs = ranges.integer("logprobs", fields.logprobs, 0, 0, MAX_TOP_LOGPROBS)
        prompts = prompt_list(fields)
        ranges.count("prompt", len(prompts), self.config.max_choices, "prompts")
        ranges.count("n", len(prompts) * (fields.n or 1), self.config.max_choices, "prompts x n")
        ask = build_ask(
            fields,
            facts.info,
            self.config,
            prompt_param="prompt",
            max_name="max_tokens",
            max_tokens=fields.max_tokens,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_logprobs if fields.echo else None,
            prompts=lambda: tuple(self._encode(prompt) for prompt in prompts),
        )
        explainer = None
        if ask.cache.wants_report:
            explainer = HitExplainer(self.recipe.tokenizer, ask.prompts)
        return CompletionCall(
            recipe=self.recipe,
            facts=facts,
            model=model,
            ask=ask,
            stream=bool(fields.stream),
            include_usage=include_usage(fields),
            explainer=explainer,
            echoes=tuple(self._echo(prompt) for prompt in prompts) if fields.echo else None,
        )

    def error_response(self, failure: Failure) -> Response:
        return error_response(failure)

    def _encode(self, prompt: str | list[int]) -> EncodedPrompt:
        if isinstance(prompt, str):
            return self.recipe.encode_completion(prompt)
        return self.recipe.encode_ids(prompt)

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.recipe.decode(prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """Implements :class:`headwater.api.calls.ParsedCall`.

    ``echoes`` are the prompts' texts when the caller wants them before the output.
    """

    recipe: Recipe
    facts: CallFacts
    model: str
    ask: Ask
    stream: bool
    include_usage: bool
    explainer: HitExplainer | None  # None: the caller did not ask for the hits
    echoes: tuple[str, ...] | None
    conversation: None = field(default=None, init=False)

    def open_output(self, position: int) -> OutputStream:
        return OutputStream(
            self.recipe.tokenizer,
            stop_strings=self.ask.stop_strings,
            previous_id=self.ask.prompts[position].tokens[-1],
            text_offset=len(self.echoes[position]) if self.echoes else 0,
            list_tokens=self._wants_logprobs,
        )

    def error_frame(self, failure: Failure) -> bytes:
        return error_frame(failure)

    async def frames(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        async with aclosing(generation.events()) as events:
            async for event in events:
                part = self._part(event)
                if part.text or part.tokens or part.finish is not None:
                    yield wire.frame(self._answer([self._choice(event.choice, part)]))
        if self.include_usage or self.explainer is not None:
            last = self._answer([], wire.usage_wire(generation.usage))
            last.cache = self._caches(generation)
            yield wire.frame(last)
        yield wire.DONE_FRAME

    async def whole(self, generation: Generation) -> bytes:
        parts: defaultdict[int, list[_Part]] = defaultdict(list)
        async with aclosing(generation.events()) as events:
            async for event in events:
                parts[event.choice].append(self._part(event))
        choices = [self._choice(index, _joined(own)) for index, own in sorted(parts.items())]
        answer = self._answer(choices)
        answer.usage = wire.usage_wire(generation.usage)
        answer.cache = self._caches(generation)
        return wire.encode(answer)

    def _caches(self, generation: Generation) -> list[CacheWire | None] | UnsetType:
        """One entry for each prompt, in order."""
        if self.explainer is None:
            return UNSET
        return [
            self.explainer.explain(generation.reports.get(position), position)
            for position in range(len(self.ask.prompts))
        ]

    def _part(self, event: ChoiceEvent) -> _Part:
        """The event's own text and tokens, after the echo if it is the choice's first."""
        delta = event.delta
        part = _Part(delta.text, delta.tokens, delta.finish)
        if self.echoes is None or event.prompt is None:
            return part
        position = event.choice // self.ask.num_choices
        echo = _Part(self.echoes[position], self._echo_tokens(position, event.prompt))
        return _joined((echo, part))

    def _echo_tokens(self, position: int, report: PromptReport) -> tuple[OutputToken, ...]:
        if not self._wants_logprobs:
            return ()
        prompt = self.ask.prompts[position].tokens
        return describe_prompt(self.recipe.tokenizer, prompt, report.logprobs)

    def _choice(self, index: int, part: _Part) -> wire.CompletionChoice:
        return wire.CompletionChoice(
            index=index,
            text=part.text,
            logprobs=_logprobs(part.tokens) if self._wants_logprobs else None,
            finish_reason=None if part.finish is None else wire.finish_word(part.finish),
        )

    def _answer(
        self, choices: list[wire.CompletionChoice], usage: wire.UsageWire | None = None
    ) -> wire.CompletionAnswer:
        return wire.CompletionAnswer(
            id=self.facts.call_id,
            created=self.facts.created_s,
            model=self.model,
            choices=choices,
            usage=usage if self.include_usage else UNSET,
        )

    @property
    def _wants_logprobs(self) -> bool:
        return self.ask.sampling.num_logprobs is not None


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of one choice's answer."""

    text: str
    tokens: tuple[OutputToken, ...] = ()
    finish: FinishReason | None = None


def _joined(parts: Sequence[_Part]) -> _Part:
    return _Part(
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.tokens),
        parts[-1].finish,
    )


def _logprobs(tokens: Sequence[OutputToken]) -> wire.CompletionLogprobs:
    return wire.CompletionLogprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[
            None if token.logprob is None else wire.finite(token.logprob) for token in tokens
        ],
        top_logprobs=[
            {entry.text: wire.finite(entry.logprob) for entry in token.top}
            if token.logprob is not None
            else None
            for token in tokens
        ],
        text_offset=[token.text_offset for token in tokens],
    )


def prompt_list(body: CompletionBody) -> list[str | list[int]]:
    """All four forms of ``prompt`` as a list: text, texts, ids, lists of ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    ids = [item for item in prompt if isinstance(item, int)]
    if prompt and len(texts) == len(prompt):
        return [*texts]
    if prompt and len(lists) == len(prompt):
        return [*lists]
    if prompt and len(ids) == len(prompt):
        return [ids]
    raise InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, "
        "and not empty",
        param="prompt",
        code="invalid_type",
    )
