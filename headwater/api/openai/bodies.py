"""What callers may send: typed bodies, and tables of what is refused or ignored by name.

Types are checked by the decoder, ranges in ``sampling``. A null is an absent
field. Fields that OpenAI does not have: top_k, min_p, repetition_penalty,
min_tokens, ignore_eos, stop_token_ids, and token-id prompts.
"""

from __future__ import annotations

import msgspec

from headwater.api.decode import FieldTable


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """Fields of both generating routes."""

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


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw | None = None
    tool_call_id: str | None = None


class ChatBody(CommonBody, kw_only=True):
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
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
    }
)

# Understood and not served. The tuples hold the values that ask for nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
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
        "reasoning_effort": (),
        "reasoning": (),
        "thinking": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "echo": (False,),
        "best_of": (1,),
        # Templates come from the model, never from a request.
        "chat_template": (),
        "chat_template_kwargs": ({},),
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
        "suffix": ("",),
        "top_logprobs": (),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    },
    ignored=_IGNORED,
)
