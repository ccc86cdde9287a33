"""The parts of a tokenizer.json that the recipe reads and rewrites, with types.

Checks the shape once, so that the rest of the room works on known fields. A
GGUF file's tokenizer is brought into the same shape by ``tokenizer_gguf``.
"""

from __future__ import annotations

import json
from typing import TypedDict, cast

from headwater.core.errors import ModelError

# Normalizers, pre-tokenizers and decoders pass through unread but for their
# "type" tree, which ``component_types`` walks.
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class AddedToken(TypedDict):
    """A token that is matched in text before the model splits it."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class BpeModel(TypedDict, total=False):
    type: str
    vocab: dict[str, int]
    merges: list[str] | list[list[str]]
    byte_fallback: bool
    ignore_merges: bool
    unk_token: str | None
    fuse_unk: bool


class TokenizerJson(TypedDict, total=False):
    version: str
    truncation: Json
    padding: Json
    added_tokens: list[AddedToken]
    normalizer: Json
    pre_tokenizer: Json
    post_processor: Json
    decoder: Json
    model: BpeModel


def added_token(
    token_id: int, content: str, *, special: bool, normalized: bool = False
) -> AddedToken:
    """An added token that is matched exactly where it stands, in the text as it came or,
    with ``normalized``, as the normalizer leaves it."""
    return AddedToken(
        id=token_id,
        content=content,
        single_word=False,
        lstrip=False,
        rstrip=False,
        normalized=normalized,
        special=special,
    )


def read_tokenizer_json(data: bytes) -> TokenizerJson:
    """Parse and check a tokenizer.json; raises ModelError naming what is wrong in it."""
    try:
        parsed = json.loads(data)
    except ValueError as error:  # also UnicodeDecodeError
        raise ModelError(f"tokenizer.json is not valid JSON: {error}") from None
    if not isinstance(parsed, dict) or not isinstance(model := parsed.get("model"), dict):
        raise ModelError("tokenizer.json has no 'model' object")
    model_type = model.get("type", "BPE")  # old files leave it out
    if model_type != "BPE":
        raise ModelError(f"tokenizer.json: model.type {model_type!r} is not supported; only BPE is")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise ModelError("tokenizer.json: model.vocab must map tokens to ids")
    if not isinstance(model.get("merges"), list):
        raise ModelError("tokenizer.json: model.merges must be a list")
    added = parsed.get("added_tokens") or []
    if not all(
        isinstance(token, dict)
        and isinstance(token.get("id"), int)
        and isinstance(token.get("content"), str)
        for token in added
    ):
        raise ModelError("tokenizer.json: every entry of added_tokens needs id and content")
    parsed["added_tokens"] = added
    return cast(TokenizerJson, parsed)


def component_types(component: Json) -> set[str]:
    """The "type" names in a normalizer, pre-tokenizer or decoder, nested ones included."""
    found: set[str] = set()
    pending = [component]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, dict):
            if isinstance(name := node.get("type"), str):
                found.add(name)
            pending.extend(node.values())
    return found


def find_component(component: Json, type_name: str) -> dict[str, Json] | None:
    """The first component named ``type_name`` in a (nested) Sequence, or None."""
    pending = [component]
    while pending:
        node = pending.pop(0)
        if isinstance(node, list):
            pending.extend(node)
        elif isinstance(node, dict):
            if node.get("type") == type_name:
                return node
            pending.extend(node.values())
    return None
