"""What callers may send: typed bodies, and tables of what is refused or ignored by name.

Types are checked by the decoder, ranges in ``sampling``. A null is an absent
field. Fields that OpenAI does not have: top_k, min_p, repetition_penalty,
min_tokens, ignore_eos, stop_token_ids, and token-id prompts.
"""

from __future__ import annotations

import msgspec

from headwater.api.caching import CacheFields
from headwater.api.decode import NULL, FieldTable


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CommonBody(CacheFields, kw_only=True):
    """Fields of all routes that take OpenAI's sampling."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    prompt_cache_retention: str | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = NULL  # JSON text, as OpenAI has it, or an object


class CallBody(msgspec.Struct):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    function_call: msgspec.Raw = NULL
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None  # DeepSeek's: the model goes on with this last message


class FunctionBody(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = NULL
    strict: bool | None = None


class ToolBody(msgspec.Struct):
    type: str
    function: FunctionBody | None = None


class NamedFunction(msgspec.Struct):
    name: str


class ToolChoiceBody(msgspec.Struct):
    type: str
    function: NamedFunction | None = None


class ThinkingBody(msgspec.Struct):
    """DeepSeek's switch: ``{"type": "enabled"}`` or ``{"type": "disabled"}``."""

    type: str


class TemplateKwargs(msgspec.Struct, forbid_unknown_fields=True):
    """The one word that a request may say to a template (I05)."""

    enable_thinking: bool | None = None


class NamedSchema(msgspec.Struct):
    schema: msgspec.Raw = NULL
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of them; ``json`` is a schema, as an object or as text."""

    json: msgspec.Raw = NULL
    regex: str | None = None
    grammar: str | None = None


class PromptBody(CommonBody, kw_only=True):
    """What decides a chat prompt besides its messages: shared with ``/tokenize``."""

    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: ThinkingBody | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatBody(PromptBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


# What changes nothing in the output here: account keeping, hints, storage we do not have.
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",  # which machine to ask, in a fleet; every prefix is looked for here
        "prediction",
    }
)

# Understood and not served. The tuples hold the values that ask for nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": (),
    "json_schema": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (False,),
    "lora": (),
    "lora_name": (),
}

CHAT_TABLE = FieldTable(
    refused=_REFUSED
    | {
        "audio": (),
        "modalities": (["text"],),
        "reasoning": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "echo": (False,),
        "best_of": (1,),
        # Templates come from the model, never from a request.
        "chat_template": (),
        "documents": ([],),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "mm_processor_kwargs": ({},),
    },
    ignored=_IGNORED,
)

COMPLETION_TABLE = FieldTable(
    refused=_REFUSED
    | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "suffix": ("",),
        "top_logprobs": (),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    },
    ignored=_IGNORED,
)
