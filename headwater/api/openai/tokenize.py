"""``POST /tokenize`` and ``/detokenize``: exactly the ids that a real call would prefill.

A prompt goes the way of ``/v1/completions``, messages the way of
``/v1/chat/completions``; the latter's control tokens are marked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from starlette.responses import Response

from headwater.api import ranges
from headwater.api.calls import CallFacts
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing
from headwater.api.decode import BodyDecoder, FieldTable, UnknownNames
from headwater.api.failure import Failure
from headwater.api.openai.bodies import CHAT_TABLE, Message, PromptBody
from headwater.api.openai.conversation import chat_conversation
from headwater.api.openai.errors import error_response
from headwater.api.served import check_model
from headwater.core.errors import InvalidRequest
from headwater.recipe.recipe import EncodedPrompt, Recipe


class TokenizeBody(PromptBody, kw_only=True):
    """``prompt``, or a chat call's body, of which only what decides the prompt counts."""

    messages: list[Message] | None = None
    prompt: str | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class TokenizeAnswer(msgspec.Struct):
    tokens: tuple[int, ...]
    count: int
    control_positions: tuple[int, ...]
    max_model_len: int


# As in chat, less what this route knows itself.
TOKENIZE_TABLE = FieldTable(
    refused={k: v for k, v in CHAT_TABLE.refused.items() if k != "add_generation_prompt"},
    ignored=CHAT_TABLE.ignored,
)
DETOKENIZE_TABLE = FieldTable(refused={}, ignored=frozenset())


@dataclass(frozen=True, slots=True)
class TokenizeDialect:
    """Implements :class:`headwater.api.direct.DirectDialect`."""

    conversing: Conversing
    config: ApiConfig
    decoder: BodyDecoder[TokenizeBody]
    id_prefix: str = field(default="tok-", init=False)

    @classmethod
    def create(
        cls, conversing: Conversing, config: ApiConfig, unknown: UnknownNames
    ) -> TokenizeDialect:
        decoder = BodyDecoder(TokenizeBody, TOKENIZE_TABLE, strict=config.strict, unknown=unknown)
        return cls(conversing, config, decoder)

    def answer(self, body: bytes, facts: CallFacts) -> bytes:
        fields = self.decoder.decode(body)
        check_model(fields.model, facts, self.config)
        prompt = self._encode(fields)
        return msgspec.json.encode(
            TokenizeAnswer(
                tokens=prompt.tokens,
                count=len(prompt.tokens),
                control_positions=prompt.control_positions,
                max_model_len=facts.info.context_tokens,
            )
        )

    def error_response(self, failure: Failure) -> Response:
        return error_response(failure)

    def _encode(self, fields: TokenizeBody) -> EncodedPrompt:
        match fields.prompt, fields.messages:
            case str(prompt), None:
                return self.conversing.recipe.encode_completion(prompt)
            case None, list(messages):
                spoken = chat_conversation(messages, fields, self.config)
                add = fields.add_generation_prompt is not False
                return self.conversing.encode(spoken, add_generation_prompt=add)
            case _:
                raise InvalidRequest(
                    "send either prompt or messages", param="prompt", code="invalid_value"
                )


@dataclass(frozen=True, slots=True)
class DetokenizeDialect:
    """Implements :class:`headwater.api.direct.DirectDialect`. Control tokens are shown."""

    recipe: Recipe
    config: ApiConfig
    decoder: BodyDecoder[DetokenizeBody]
    id_prefix: str = field(default="detok-", init=False)

    @classmethod
    def create(cls, recipe: Recipe, config: ApiConfig, unknown: UnknownNames) -> DetokenizeDialect:
        decoder = BodyDecoder(
            DetokenizeBody, DETOKENIZE_TABLE, strict=config.strict, unknown=unknown
        )
        return cls(recipe, config, decoder)

    def answer(self, body: bytes, facts: CallFacts) -> bytes:
        fields = self.decoder.decode(body)
        check_model(fields.model, facts, self.config)
        for value in fields.tokens:
            ranges.token_id("tokens", value, facts.info.vocab_size)
        return msgspec.json.encode({"prompt": self.recipe.decode(fields.tokens, keep_control=True)})

    def error_response(self, failure: Failure) -> Response:
        return error_response(failure)
