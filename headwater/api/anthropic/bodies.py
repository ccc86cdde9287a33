"""What callers of Messages may send: typed bodies, and what is refused or ignored by name.

Blocks of all kinds share one type: which fields a kind needs is checked where it
is read, so that a refusal can name the place. A null is an absent field.
"""

from __future__ import annotations

import msgspec

from headwater.api.caching import CacheFields
from headwater.api.decode import NULL, FieldTable


class Block(msgspec.Struct):
    """A content block, in a message, in ``system`` or in a tool's result."""

    type: str
    text: str | None = None  # text
    thinking: str | None = None  # thinking
    id: str | None = None  # tool_use
    name: str | None = None
    input: msgspec.Raw = NULL
    tool_use_id: str | None = None  # tool_result
    content: str | list[Block] | None = None
    is_error: bool | None = None
    tool_name: str | None = None  # tool_reference, in a tool's result


class MessageBody(msgspec.Struct):
    role: str
    content: str | list[Block]


class ToolBody(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = NULL
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoiceBody(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class AnswerFormat(msgspec.Struct):
    type: str
    schema: msgspec.Raw = NULL


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: AnswerFormat | None = None


class CountBody(CacheFields, kw_only=True):
    """What decides the prompt: all that ``count_tokens`` reads, of the cache's fields none."""

    messages: list[MessageBody]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerFormat | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: int | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


# What changes nothing in the output here: account keeping, hints, cache marks (all
# prefixes are cached), speed.
_IGNORED = frozenset(
    {
        "metadata",
        "service_tier",
        "cache_control",
        "diagnostics",
        "inference_geo",
        "speed",
        "user_profile_id",
        "workspace_id",
        "betas",
    }
)

# Understood and not served. The tuples hold the values that ask for nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}

MESSAGES_TABLE = FieldTable(refused=_REFUSED, ignored=_IGNORED)
# A caller may count with the whole body of the call that follows.
COUNT_TABLE = FieldTable(
    refused=_REFUSED,
    ignored=_IGNORED
    | (
        frozenset(MessagesBody.__struct_encode_fields__)
        - frozenset(CountBody.__struct_encode_fields__)
    ),
)
