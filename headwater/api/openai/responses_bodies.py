"""What callers of Responses may send: typed bodies, and what is refused or ignored by name.

Items of all kinds share one type: which fields a kind needs is checked where it
is read, so that a refusal can name the place. A null is an absent field.
"""

from __future__ import annotations

import msgspec

from headwater.api.caching import CacheFields
from headwater.api.decode import NULL, FieldTable


class InputPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """Without a ``type``: a message."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class ToolBody(msgspec.Struct, omit_defaults=True):
    """A function, or a namespace with functions in it."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None
    tools: list[ToolBody] | msgspec.UnsetType = msgspec.UNSET  # of a namespace


class ToolChoiceBody(msgspec.Struct):
    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    schema: msgspec.Raw = NULL
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its older name


class ResponsesBody(CacheFields, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    prompt_cache_retention: str | None = None


# What may be asked to be included: reasoning comes in the clear, so there is nothing
# encrypted to add; sources and pictures belong to tools that are refused anyway.
INCLUDES = frozenset({"reasoning.encrypted_content"})

RESPONSES_TABLE = FieldTable(
    refused={
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "moderation": (),
        "context_management": ([],),
        # Known from Chat Completions; this API has no such fields.
        "stop": ([],),
        "n": (1,),
        "seed": (),
        "logit_bias": ({},),
        "frequency_penalty": (0, 0.0),
        "presence_penalty": (0, 0.0),
        "top_k": (0,),
        "min_p": (0, 0.0),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
    },
    ignored=frozenset(
        {
            "store",  # nothing is stored either way, and the answer says so
            "stream_options",
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "service_tier",
            "max_tool_calls",  # counts calls that a server runs; there are none
            "client_metadata",
        }
    ),
)
