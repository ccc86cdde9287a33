"""The answer objects and events of Responses, encoded straight to bytes.

An event's name is its ``type``; clients read both. Every event carries its
number, so a client can tell that it missed none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from headwater.api.cache_report import CacheWire
from headwater.api.openai.responses_bodies import TextConfig, ToolBody, ToolChoiceBody
from headwater.core.request import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]

_encoder = msgspec.json.Encoder()


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, tag="message"):
    id: str
    status: ItemStatus
    content: Sequence[OutputText] = ()
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: Sequence[SummaryText] = ()
    content: Sequence[ReasoningText] = ()
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # writing to the cache is not charged for


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """``input_tokens`` includes the cached ones (K01)."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningEcho(msgspec.Struct):
    effort: str | None
    summary: str | None


class ResponseWire(msgspec.Struct, kw_only=True):
    """The answer, and with ``status`` in_progress its opening; what was asked is echoed."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: Sequence[OutputItem]
    usage: ResponseUsage | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningEcho
    temperature: float
    text: TextConfig
    tool_choice: str | ToolChoiceBody
    tools: Sequence[ToolBody]
    top_p: float
    cache: CacheWire | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["response"] = "response"
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False  # nothing is stored, whatever was asked
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(msgspec.Struct):
    """created, in_progress, completed, incomplete, failed."""

    type: str
    sequence_number: int
    response: ResponseWire


class ItemEvent(msgspec.Struct):
    """output_item.added, output_item.done."""

    type: str
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct):
    """content_part.added, content_part.done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class SummaryPartEvent(msgspec.Struct):
    """reasoning_summary_part.added, reasoning_summary_part.done."""

    type: str
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    part: SummaryText


class TextDeltaEvent(msgspec.Struct):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: tuple[()] = ()
    type: Literal["response.output_text.delta"] = "response.output_text.delta"


class TextDoneEvent(msgspec.Struct):
    sequence_number: int
    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: tuple[()] = ()
    type: Literal["response.output_text.done"] = "response.output_text.done"


class ReasoningDeltaEvent(msgspec.Struct):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"


class ReasoningDoneEvent(msgspec.Struct):
    sequence_number: int
    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"


class SummaryDeltaEvent(msgspec.Struct):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    summary_index: int = 0
    type: Literal["response.reasoning_summary_text.delta"] = "response.reasoning_summary_text.delta"


class SummaryDoneEvent(msgspec.Struct):
    sequence_number: int
    item_id: str
    output_index: int
    text: str
    summary_index: int = 0
    type: Literal["response.reasoning_summary_text.done"] = "response.reasoning_summary_text.done"


class ArgumentsDeltaEvent(msgspec.Struct):
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    type: Literal["response.function_call_arguments.delta"] = (
        "response.function_call_arguments.delta"
    )


class ArgumentsDoneEvent(msgspec.Struct):
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"


Event = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | SummaryPartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | SummaryDeltaEvent
    | SummaryDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)


def encode(answer: msgspec.Struct) -> bytes:
    return _encoder.encode(answer)


def frame(event: Event) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


def usage_wire(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details=InputDetails(usage.num_hit_tokens),
        output_tokens=usage.num_output_tokens,
        output_tokens_details=OutputDetails(usage.num_reasoning_tokens),
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
    )
