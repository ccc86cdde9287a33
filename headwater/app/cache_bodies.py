"""A saved request body of any dialect, as the prompts that a server would make of it.

Reads a body with the door's own types and encodes it with the model's own recipe, so
what is compared with a cache is what a call would ask it. Knows no server and no cache.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from headwater.api.anthropic.bodies import MESSAGES_TABLE, MessagesBody
from headwater.api.anthropic.conversation import messages_conversation
from headwater.api.caching import CacheFields
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing, Spoken, refuse_constraints
from headwater.api.decode import BodyDecoder, UnknownNames
from headwater.api.openai.bodies import CHAT_TABLE, COMPLETION_TABLE, ChatBody, CompletionBody
from headwater.api.openai.completions import prompt_list
from headwater.api.openai.conversation import chat_conversation
from headwater.api.openai.responses_bodies import RESPONSES_TABLE, ResponsesBody
from headwater.api.openai.responses_input import responses_conversation
from headwater.api.openai.responses_tools import offered_tools
from headwater.core.errors import ConfigError, InvalidRequest
from headwater.recipe.recipe import EncodedPrompt, Recipe

BodyDialect = Literal["chat", "responses", "messages", "completions"]
DIALECTS: tuple[BodyDialect, ...] = ("chat", "responses", "messages", "completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBody:
    """``places`` are its messages as the body counts them; ``salt`` is its ``cache_salt``."""

    dialect: BodyDialect
    prompts: tuple[EncodedPrompt, ...]
    places: tuple[str, ...] = ()
    salt: str | None = None


def read_file(file: str) -> bytes:
    """The bytes of ``file``, ``-`` for standard input. Raises ConfigError."""
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None


def read_body(
    body: bytes, recipe: Recipe, config: ApiConfig, dialect: BodyDialect | None = None
) -> ReadBody:
    """``body`` as ``dialect``, or as the one that its fields belong to. A bare list is
    the messages of a chat call. Raises InvalidRequest naming the field."""
    if body.lstrip().startswith(b"["):
        body = b'{"messages": ' + body + b"}"
    dialect = dialect or dialect_of(body)
    conversing = Conversing(recipe, refuse_constraints)
    unknown = UnknownNames()
    spoken: Spoken
    fields: CacheFields
    match dialect:
        case "completions":
            asked = BodyDecoder(
                CompletionBody, COMPLETION_TABLE, strict=False, unknown=unknown
            ).decode(body)
            return ReadBody(
                dialect=dialect,
                prompts=tuple(_encoded(recipe, prompt) for prompt in prompt_list(asked)),
                salt=asked.cache_salt,
            )
        case "responses":
            fields = items = BodyDecoder(
                ResponsesBody, RESPONSES_TABLE, strict=False, unknown=unknown
            ).decode(body)
            offered = offered_tools(items.tools or (), strict=False)
            spoken = responses_conversation(items, offered, config)
        case "messages":
            fields = turns = BodyDecoder(
                MessagesBody, MESSAGES_TABLE, strict=False, unknown=unknown
            ).decode(body)
            spoken = messages_conversation(turns, config, recipe.capabilities.thinking)
        case "chat":
            fields = chat = BodyDecoder(ChatBody, CHAT_TABLE, strict=False, unknown=unknown).decode(
                body
            )
            spoken = chat_conversation(chat.messages, chat, config)
    return ReadBody(
        dialect=dialect,
        prompts=(conversing.encode(spoken),),
        places=spoken.places,
        salt=fields.cache_salt,
    )


def dialect_of(body: bytes) -> BodyDialect:
    """The dialect that the body's fields belong to: chat, where nothing says otherwise.

    >>> dialect_of(b'{"input": "x"}'), dialect_of(b'{"messages": [], "system": "x"}')
    ('responses', 'messages')
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("the body is no JSON object", code="invalid_json") from None
    if "input" in fields:
        return "responses"
    if "prompt" in fields:
        return "completions"
    tools = bytes(fields.get("tools", b""))
    is_messages = "system" in fields or "stop_sequences" in fields or b'"input_schema"' in tools
    return "messages" if is_messages else "chat"


def _encoded(recipe: Recipe, prompt: str | list[int]) -> EncodedPrompt:
    if isinstance(prompt, str):
        return recipe.encode_completion(prompt)
    return recipe.encode_ids(prompt)
