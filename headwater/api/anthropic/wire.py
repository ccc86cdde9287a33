"""Anthropic's answer objects and events, encoded straight to bytes.

An event's name is its ``type``; clients read both.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from headwater.api.cache_report import CacheWire
from headwater.api.segments import CallSegment, ReasoningSegment, Segment, TextSegment
from headwater.core.request import FinishReason, Usage
from headwater.recipe.output import OutputDelta

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

PING_FRAME = b'event: ping\ndata: {"type":"ping"}\n\n'

_encoder = msgspec.json.Encoder()


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class UsageWire(msgspec.Struct):
    """Disjoint input counts (K01): their sum is the prompt. Nothing is charged for writing
    to the cache, so ``cache_creation_input_tokens`` is 0 and new tokens are plain input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageWire(msgspec.Struct, tag="message"):
    id: str
    model: str
    content: Sequence[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: UsageWire
    cache: CacheWire | msgspec.UnsetType | None = msgspec.UNSET
    role: Literal["assistant"] = "assistant"


class MessageStart(msgspec.Struct, tag="message_start"):
    message: MessageWire


class BlockStart(msgspec.Struct, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    signature: str


class InputDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    delta: Ending
    usage: UsageWire


class MessageStop(msgspec.Struct, tag="message_stop"):
    pass


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def encode(answer: msgspec.Struct) -> bytes:
    return _encoder.encode(answer)


def frame(event: Event) -> bytes:
    name = str(event.__struct_config__.tag).encode()
    return b"event: " + name + b"\ndata: " + _encoder.encode(event) + b"\n\n"


def usage_wire(usage: Usage) -> UsageWire:
    return UsageWire(
        input_tokens=usage.num_miss_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.num_hit_tokens,
        output_tokens=usage.num_output_tokens,
        output_tokens_details=OutputTokensDetails(usage.num_reasoning_tokens),
    )


def ending(delta: OutputDelta, *, has_calls: bool) -> Ending:
    """Why a turn ended (A04): the limit first, then the caller's string, then a call."""
    if delta.finish is FinishReason.LENGTH:
        return Ending("max_tokens", None)
    if delta.stop_string is not None:
        return Ending("stop_sequence", delta.stop_string)
    return Ending("tool_use" if has_calls else "end_turn", None)


def blocks_of(turn: Sequence[Segment], *, shows_thinking: bool) -> list[ContentBlock]:
    """The content of an answer that is not streamed."""
    blocks: list[ContentBlock] = []
    for segment in turn:
        match segment:
            case ReasoningSegment(text=text):
                blocks.append(ThinkingBlock(text if shows_thinking else "", signature(text)))
            case TextSegment(text=text):
                blocks.append(TextBlock(text))
            case CallSegment(call_id=call_id, name=name, arguments=arguments, is_complete=whole):
                # A call cut short has no object to show; the reason says max_tokens.
                raw = msgspec.Raw(arguments.encode() if whole else b"{}")
                blocks.append(ToolUseBlock(call_id, name, raw))
    return blocks


def signature(thinking: str) -> str:
    """A digest of the thinking: clients want a signature, and drop blocks without one.

    It is not checked when it comes back: what is in a conversation is outside
    text, whoever wrote it.
    """
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()
