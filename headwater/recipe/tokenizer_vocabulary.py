"""What a BPE vocabulary says about bytes, spaces and the begin token.

Reads a tokenizer.json (``tokenizer_json``) before ``tokenizer_bpe`` seals it.
Knows nothing of encoding.
"""

from __future__ import annotations

import re

from headwater.core.errors import ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.tokenizer import DummyPrefix
from headwater.recipe.tokenizer_gguf import begins_with_bos
from headwater.recipe.tokenizer_json import TokenizerJson, component_types, find_component

SPACE = "\u2581"  # how vocabularies with byte fallback spell a space
_NEVER = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})  # bytes that UTF-8 does not use


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's spelling of bytes as printable characters: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: byte for byte in printable}
    alphabet.update({0x100 + index: byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


def _is_byte_level(spec: TokenizerJson) -> bool:
    types = component_types(spec.get("decoder")) | component_types(spec.get("pre_tokenizer"))
    return "ByteLevel" in types


def unencodable_characters(spec: TokenizerJson) -> re.Pattern[str] | None:
    """Characters that the vocabulary has no bytes for; text shows them as U+FFFD.

    Vocabularies trained without some byte exist (SmolLM2 has no 0x04, and none
    of the planes 4 to 11). The library would drop such a character in silence,
    or turn it into the unknown token, which is a control token.
    """
    vocab = spec["model"]["vocab"]
    if not _is_byte_level(spec):
        if spec["model"].get("byte_fallback", False):
            missing_names = {f"<0x{byte:02X}>" for byte in range(256)} - vocab.keys()
            if missing_names:
                raise ModelError("the vocabulary falls back to bytes but does not have all 256")
            return None
        raise ModelError(
            "tokenizer.json: a BPE model that is neither byte-level nor has byte_fallback "
            "cannot encode every text and is not supported"
        )
    missing = {byte for char, byte in _BYTE_OF_CHAR.items() if chr(char) not in vocab}
    if missing & {*range(0x80, 0xC0), 0xEF}:
        raise ModelError("the byte-level vocabulary does not have the bytes of UTF-8 text")
    gaps = [_characters_that_begin_with(byte) for byte in sorted(missing) if byte not in _NEVER]
    if not gaps:
        return None
    parts = "".join(f"{re.escape(chr(first))}-{re.escape(chr(last))}" for first, last in gaps)
    return re.compile(f"[{parts}]")


def _characters_that_begin_with(byte: int) -> tuple[int, int]:
    """First and last code point whose UTF-8 form begins with ``byte``."""
    if byte < 0x80:
        return byte, byte
    if byte < 0xE0:
        first = (byte & 0x1F) << 6
        return first, first + 0x3F
    if byte < 0xF0:
        first = (byte & 0x0F) << 12
        return max(first, 0x800), first + 0xFFF
    first = (byte & 0x07) << 18
    return max(first, 0x10000), min(first + 0x3FFFF, 0x10FFFF)


def token_bytes_table(spec: TokenizerJson) -> list[bytes]:
    """Bytes of every id, b"" where the vocabulary has a hole."""
    model = spec["model"]
    vocab = model["vocab"]
    added = spec["added_tokens"]
    size = max([*vocab.values(), *(token["id"] for token in added)], default=-1) + 1
    table = [b""] * size
    if _is_byte_level(spec):
        for token, token_id in vocab.items():
            try:
                table[token_id] = token.translate(_BYTE_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:  # not spelt in bytes: an added token listed here too
                table[token_id] = token.encode()
        spaces = {}
    else:
        spaces = {ord(SPACE): " "}
        byte_of_token = {f"<0x{byte:02X}>": byte for byte in range(256)}
        for token, token_id in vocab.items():
            byte = byte_of_token.get(token)
            spelt = token.translate(spaces).encode()
            table[token_id] = spelt if byte is None else bytes((byte,))
    for entry in added:
        literal = entry["content"]
        table[entry["id"]] = (
            literal if entry.get("special") else literal.translate(spaces)
        ).encode()
    return table


def dummy_prefix(spec: TokenizerJson) -> DummyPrefix:
    """Where the tokenizer's own components put a space before text."""
    if "Prepend" in component_types(spec.get("normalizer")):
        return DummyPrefix.SEGMENT
    metaspace = find_component(spec.get("pre_tokenizer"), "Metaspace")
    if metaspace is None:
        return DummyPrefix.NEVER
    # Files from before prepend_scheme say add_prefix_space, true by default.
    default = "always" if metaspace.get("add_prefix_space", True) else "never"
    match metaspace.get("prepend_scheme", default):
        case "always":
            return DummyPrefix.SEGMENT
        case "first":
            return DummyPrefix.FIRST
        case _:
            return DummyPrefix.NEVER


def says_begin(spec: TokenizerJson, source: TokenizerSource) -> bool:
    """Whether the model's own tokenizer puts its begin id before a prompt."""
    if source.kind == "gguf":
        return begins_with_bos(source.gguf_metadata)
    said = source.tokenizer_config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    template = find_component(spec.get("post_processor"), "TemplateProcessing")
    single = template.get("single") if template is not None else None
    first = single[0] if isinstance(single, list) and single else None
    special = first.get("SpecialToken") if isinstance(first, dict) else None
    if not isinstance(special, dict):
        return False
    return any(
        token["id"] == source.bos_token_id and token["content"] == special.get("id")
        for token in spec["added_tokens"]
    )
