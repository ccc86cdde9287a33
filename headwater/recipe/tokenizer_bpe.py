"""BPE tokenizers (byte-level, or with byte fallback) that no text can trick.

The trouble: the tokenizers library finds added tokens by their spelling, so a
user who types ``<|im_end|>`` ends a turn (B01). Here every control token is
renamed ("sealed") to two characters that nobody types, and a special range is
replaced by the sealed name before encoding:

    rendered  <|im_start|>user\\nhi <|im_end|><|im_end|>
    ranges    ^^^^^^^^^^^^                  ^^^^^^^^^^   (the first <|im_end|> was typed)
    encoded   S0          user\\nhi <|im_end|>S1

If text does contain the seal, a break token, whose id is thrown away, follows
each one, so that no typed pair can form a sealed name. All else (normalizer,
word splitting, spaces around added tokens) is the model's own, so benign text
gets the same ids. Knows no template but its source text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken as LibraryToken
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE

from headwater.core.errors import ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.detokenizer import decode_ids
from headwater.recipe.tokenizer import CharRange, DummyPrefix
from headwater.recipe.tokenizer_json import AddedToken, BpeModel, TokenizerJson, added_token
from headwater.recipe.tokenizer_vocabulary import (
    SPACE,
    dummy_prefix,
    says_begin,
    token_bytes_table,
    unencodable_characters,
)

_SEAL = "\U0010ffff"  # a noncharacter: valid in Unicode strings, never assigned
_NAMES_START = 0xF0000  # plane 15 is private use: _SEAL + chr(_NAMES_START + k) names control k
_MAX_CONTROLS = 0xFFFE
_BREAK = _SEAL + "\U00100000"
# Marks of reasoning and of images, also for models whose format is not a chat template.
_MARKS = frozenset({"<think>", "</think>", "<start_of_image>", "<end_of_image>"})


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A tokenizer.json whose control tokens have sealed names."""

    tokenizer: LibraryTokenizer
    names: dict[str, str]  # control literal -> sealed name
    ids: dict[str, int]  # control literal -> id
    hidden_ids: frozenset[int]
    break_id: int


class BpeTokenizer:
    """Implements :class:`headwater.recipe.tokenizer.Tokenizer`. Threads may share one."""

    def __init__(self, spec: TokenizerJson, source: TokenizerSource) -> None:
        """Takes ``spec`` over: it is changed while it is sealed."""
        self._vocab_size = source.vocab_size
        self._bos_token_id = source.bos_token_id
        self._adds_bos = source.bos_token_id is not None and says_begin(spec, source)
        self._dummy_prefix = dummy_prefix(spec)
        # Both read the tokens' own names, so they come before sealing.
        self._unencodable = unencodable_characters(spec)
        self._token_bytes = token_bytes_table(spec)
        sealed = _seal(spec, source.chat_template or "")
        self._tokenizer = sealed.tokenizer
        self._names = sealed.names
        self._ids = sealed.ids
        self._literals = {token_id: literal for literal, token_id in sealed.ids.items()}
        self._control_ids = frozenset(sealed.ids.values())
        self._hidden_ids = sealed.hidden_ids
        self._break_id = sealed.break_id
        longest_first = sorted(sealed.names, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_token_id

    @property
    def adds_bos(self) -> bool:
        return self._adds_bos

    @property
    def dummy_prefix(self) -> DummyPrefix:
        return self._dummy_prefix

    def encode_text(self, text: str) -> list[int]:
        return self.encode_rendered(text, ())

    def encode_rendered(self, text: str, special_ranges: Sequence[CharRange]) -> list[int]:
        sealed, _ = self._sealed_text(text, special_ranges)
        # The batch calls release the interpreter lock, encode() does not: a long
        # prompt would stop every other thread, the event loop's included.
        ids = self._tokenizer.encode_batch_fast([sealed], add_special_tokens=False)[0].ids
        if _SEAL in text:
            return [token_id for token_id in ids if token_id != self._break_id]
        return ids

    def encode_with_starts(
        self, text: str, special_ranges: Sequence[CharRange]
    ) -> tuple[list[int], list[int]]:
        sealed, shifts = self._sealed_text(text, special_ranges)
        encoding = self._tokenizer.encode_batch([sealed], add_special_tokens=False)[0]
        ids: list[int] = []
        starts: list[int] = []
        sealed_from = [at for at, _ in shifts]
        for token_id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id != self._break_id:
                ids.append(token_id)
                starts.append(start + shifts[bisect_right(sealed_from, start) - 1][1])
        return ids, starts

    def control_ranges(self, text: str, placed: Sequence[CharRange]) -> list[CharRange]:
        return [
            match.span()
            for start, end in placed
            for match in self._control_pattern.finditer(text, start, end)
        ]

    def control_id(self, literal: str) -> int | None:
        return self._ids.get(literal)

    def token_literal(self, token_id: int) -> str | None:
        if token_id in self._literals:
            return self._literals[token_id]
        if 0 <= token_id < len(self._token_bytes):
            return self._token_bytes[token_id].decode(errors="replace") or None
        return None

    def token_bytes(self, token_id: int) -> bytes:
        # Weights often have more rows than the tokenizer has tokens.
        if 0 <= token_id < len(self._token_bytes):
            return self._token_bytes[token_id]
        return b""

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control_ids

    def is_hidden(self, token_id: int) -> bool:
        return token_id in self._hidden_ids

    def decode(self, ids: Sequence[int], *, keep_control: bool = False) -> str:
        return decode_ids(self, ids, keep_control=keep_control)

    def _sealed_text(
        self, text: str, special_ranges: Sequence[CharRange]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text for the library, and how its positions map back.

        A shift ``(at, delta)`` says: from position ``at`` of the sealed text on,
        up to the next shift, ``original = sealed + delta``.
        """
        pieces: list[str] = []
        shifts = [(0, 0)]
        position = length = 0
        for start, end in [*special_ranges, (len(text), len(text))]:
            plain = text[position:start]
            if self._unencodable is not None:
                plain = self._unencodable.sub("\ufffd", plain)
            if _SEAL in plain:
                for part in plain.split(_SEAL):
                    pieces += [part, _SEAL, _BREAK]
                    length += len(part) + 1 + len(_BREAK)
                    shifts.append((length, shifts[-1][1] - len(_BREAK)))
                # The last part had no seal after it.
                del pieces[-2:], shifts[-1]
                length -= 1 + len(_BREAK)
            else:
                pieces.append(plain)
                length += len(plain)
            if end > start:
                name = self._names.get(text[start:end])
                if name is None:
                    raise ValueError("a special range does not hold a control literal")
                pieces.append(name)
                length += len(name)
                shifts.append((length, end - length))
            position = end
        return "".join(pieces), shifts


def _is_control(token: AddedToken, chat_template: str) -> bool:
    """Whether an added token has a meaning that text must not be able to forge.

    Added tokens that are not special are of two kinds: markers of a prompt
    format (``<tool_call>``, ``<|fim_prefix|>``), and mere text that is worth an
    id (runs of spaces, ``<h1>``). Only the second may come from text.
    """
    content = token["content"]
    if token.get("special", False) or content in _MARKS:
        return True
    if not content.replace(SPACE, " ").strip():
        return False
    return "|" in content or "\uff5c" in content or content in chat_template


def _seal(spec: TokenizerJson, chat_template: str) -> _Sealed:
    """Rename the control tokens of ``spec`` (in place) and build it."""
    model = spec["model"]
    vocab = model["vocab"]
    names: dict[str, str] = {}
    ids: dict[str, int] = {}
    hidden: set[int] = set()
    added: list[AddedToken] = []
    for token in spec["added_tokens"]:
        content = token["content"]
        if content in names or not content:
            continue
        if not _is_control(token, chat_template):
            added.append(token)
            continue
        names[content] = _SEAL + chr(_NAMES_START + len(names))
        ids[content] = token["id"]
        if token.get("special", False):
            hidden.add(token["id"])
        added.append(AddedToken(**{**token, "content": names[content]}))
    if len(names) > _MAX_CONTROLS:
        raise ModelError(f"the tokenizer has {len(names)} control tokens; too many")
    _forget(model, set(names))
    for token in added:
        # The library takes an added token's id from the vocabulary if it is there.
        vocab[token["content"]] = token["id"]
    break_id = max(vocab.values(), default=-1) + 1
    vocab[_BREAK] = break_id
    added.append(added_token(break_id, _BREAK, special=True))
    spec["added_tokens"] = added
    spec["post_processor"] = None
    spec["truncation"] = None
    spec["padding"] = None
    spec["decoder"] = None  # decoding is ours, from token_bytes_table
    spec.setdefault("normalizer", None)
    spec.setdefault("pre_tokenizer", None)
    return _Sealed(
        tokenizer=_build(spec),
        names=names,
        ids=ids,
        hidden_ids=frozenset(hidden),
        break_id=break_id,
    )


def _build(spec: TokenizerJson) -> LibraryTokenizer:
    """The library's tokenizer of ``spec``; raises ModelError for what it does not take."""
    # Vocabulary and merges, up to 10^6 entries, are handed over as they are: as JSON,
    # which carries the rest, they take the library and us three times as long.
    model = spec["model"]
    rest = {**spec, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    options = {
        name: value
        for name, value in model.items()
        if name not in ("type", "vocab", "merges") and value is not None
    }
    try:
        tokenizer = LibraryTokenizer.from_str(json.dumps(rest, ensure_ascii=False))
        tokenizer.model = BPE(model["vocab"], [_pair(m) for m in model["merges"]], **options)
        tokenizer.add_tokens([_library_token(token) for token in spec["added_tokens"]])
    except Exception as error:  # the library raises bare Exception for any malformed field
        raise ModelError(f"the tokenizer cannot be built: {error}") from error
    return tokenizer


def _library_token(token: AddedToken) -> LibraryToken:
    """Its id is that of its content in the vocabulary."""
    return LibraryToken(
        token["content"],
        single_word=token.get("single_word", False),
        lstrip=token.get("lstrip", False),
        rstrip=token.get("rstrip", False),
        normalized=token.get("normalized", False),
        special=token.get("special", False),
    )


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _forget(model: BpeModel, literals: set[str]) -> None:
    """Take control literals out of the vocabulary, and the merges that would need them."""
    vocab = model["vocab"]
    gone = {literal for literal in literals if vocab.pop(literal, None) is not None}
    if model.get("unk_token") in gone:
        model["unk_token"] = None
    if not gone:
        return
    model["merges"] = [
        [left, right]
        for left, right in map(_pair, model["merges"])
        if left not in gone and right not in gone and left + right not in gone
    ]
