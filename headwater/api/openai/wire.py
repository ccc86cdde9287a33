"""OpenAI's answer objects, encoded straight to bytes.

Structs instead of dicts: one encode of a chunk takes about a microsecond. A
field that is UNSET is left out, a field that is None is null; OpenAI's clients
tell the two apart.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from headwater.api.cache_report import CacheWire
from headwater.core.request import FinishReason, Usage

DONE_FRAME = b"data: [DONE]\n\n"
MIN_LOGPROB = -9999.0

FinishWord = Literal["stop", "length", "tool_calls"]

_encoder = msgspec.json.Encoder()


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageWire(msgspec.Struct):
    """``prompt_tokens`` includes the cached ones; DeepSeek's two fields split them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobWire(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprobWire]
    refusal: None = None


class FunctionCallWire(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallWire(msgspec.Struct):
    """A whole call, or with ``index`` a piece of one: then id, type and name come once."""

    function: FunctionCallWire
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessageWire(msgspec.Struct):
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallWire] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessageWire
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


class ChatAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageWire
    cache: CacheWire | UnsetType | None = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallWire] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageWire | UnsetType | None = UNSET
    cache: CacheWire | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; ``text_offset`` counts characters of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None


class CompletionAnswer(msgspec.Struct):
    """Whole answers and chunks have one shape; only ``usage`` differs. ``cache``: by prompt."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageWire | UnsetType | None = UNSET
    cache: list[CacheWire | None] | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


def encode(answer: msgspec.Struct) -> bytes:
    return _encoder.encode(answer)


def frame(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(chunk) + b"\n\n"


def finish_word(reason: FinishReason | None, *, has_calls: bool = False) -> FinishWord:
    """Only endings that the caller was served have a word; the others are errors.

    ``tool_calls`` needs a call that is there (A16); one that the limit may have
    cut short stays ``length``.
    """
    if reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def finite(logprob: float | None) -> float:
    """JSON has no infinity: a token that cannot be chosen is as unlikely as floats go."""
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)


def usage_wire(usage: Usage) -> UsageWire:
    return UsageWire(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_output_tokens,
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.num_hit_tokens),
        completion_tokens_details=CompletionTokensDetails(usage.num_reasoning_tokens),
        prompt_cache_hit_tokens=usage.num_hit_tokens,
        prompt_cache_miss_tokens=usage.num_miss_tokens,
    )
