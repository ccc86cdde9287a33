"""A GGUF file's tokenizer, brought into the shape of a tokenizer.json.

GGUF stores tokens, types and merges (or scores), and names the rest: ``model``
says which algorithm, ``pre`` which splitting of text into words. A name that is
not listed here is refused, because a wrong split gives wrong ids in silence.
Knows no file format; called by ``tokenizer_load``.

Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import groupby
from typing import cast

from headwater.core.errors import ModelError
from headwater.recipe.tokenizer_json import AddedToken, BpeModel, Json, TokenizerJson, added_token


class TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# How each model family cuts text into words before merging. The names are those
# of tokenizer.ggml.pre; the patterns are part of the models' published tokenizers.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_LLAMA3_WORDS,),
    "qwen2": (_QWEN2_WORDS,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_SAME_AS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "qwen3": "qwen2",
}
# Their words are looked up whole before they are merged from pieces.
_WHOLE_WORDS_FIRST = {"llama-bpe"}
_COMPOSED_UNICODE = {"qwen2"}
_BEGINS_BY_DEFAULT = {"llama-bpe"}

_SPACE = "\u2581"  # how a SentencePiece vocabulary spells a space


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> TokenizerJson:
    """The tokenizer.json that says the same as ``tokenizer.ggml.*``.

    Raises ModelError naming the field that is missing, malformed or unknown.
    """
    model = metadata.get("tokenizer.ggml.model")
    match model:
        case "gpt2":
            return _byte_level(metadata)
        case "llama":
            return _sentence_piece(metadata)
        case _:
            raise ModelError(f"tokenizer.ggml.model {model!r} is not supported; gpt2 and llama are")


def begins_with_bos(metadata: Mapping[str, object]) -> bool:
    """Whether prompts begin with the begin id: as the file says, else as its kind does."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(said, bool):
        return said
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return _pre_name(metadata) in _BEGINS_BY_DEFAULT


def _byte_level(metadata: Mapping[str, object]) -> TokenizerJson:
    tokens, types = _vocabulary(metadata)
    pre = _pre_name(metadata)
    splits: list[Json] = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in _SPLITS[pre]
    ]
    byte_level: dict[str, Json] = {
        "type": "ByteLevel",
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        "trim_offsets": True,
        "use_regex": False,
    }
    return _assemble(
        tokens,
        types,
        merges=_strings(metadata, "tokenizer.ggml.merges"),
        byte_fallback=False,
        whole_words_first=pre in _WHOLE_WORDS_FIRST,
        finds_spelt_spaces=False,
        normalizer={"type": "NFC"} if pre in _COMPOSED_UNICODE else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        decoder=byte_level,
    )


def _sentence_piece(metadata: Mapping[str, object]) -> TokenizerJson:
    tokens, types = _vocabulary(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list | tuple) or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores must have one number per token")
    spaces: list[Json] = []
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    if has_prefix:
        spaces.append({"type": "Prepend", "prepend": _SPACE})
    spaces.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return _assemble(
        tokens,
        types,
        merges=_merges_by_score(tokens, types, cast("list[float]", scores)),
        byte_fallback=True,
        whole_words_first=False,
        # A typed U+2581 means a space, so it is part of a run of spaces too. Not with a
        # prefix, which the library would put before the run that it looks for.
        finds_spelt_spaces=not has_prefix,
        normalizer={"type": "Sequence", "normalizers": spaces},
        pre_tokenizer=None,
        decoder={"type": "ByteFallback"},
    )


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """The merge list that makes BPE join pieces as SentencePiece does: best score first.

    Every split of a token into two tokens is a merge with the token's score.
    """
    mergeable = {
        token: index for index, token in enumerate(tokens) if types[index] == TokenType.NORMAL
    }
    ranked: list[list[str]] = []
    by_score = sorted(mergeable.values(), key=scores.__getitem__, reverse=True)
    for _, equals in groupby(by_score, key=scores.__getitem__):
        pairs: list[tuple[int, int]] = []
        for index in equals:
            token = tokens[index]
            for cut in range(1, len(token)):
                left = mergeable.get(token[:cut])
                right = mergeable.get(token[cut:])
                if left is not None and right is not None:
                    pairs.append((left, right))
        pairs.sort()
        ranked += [[tokens[left], tokens[right]] for left, right in pairs]
    return ranked


def _assemble(
    tokens: list[str],
    types: list[int],
    *,
    merges: list[str] | list[list[str]],
    byte_fallback: bool,
    whole_words_first: bool,
    finds_spelt_spaces: bool,
    normalizer: Json,
    pre_tokenizer: Json,
    decoder: Json,
) -> TokenizerJson:
    added: list[AddedToken] = []
    for token_id, token_type in enumerate(types):
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
            added.append(added_token(token_id, tokens[token_id], special=True))
        elif token_type == TokenType.USER_DEFINED:
            is_spaces = not tokens[token_id].strip(" ")
            added.append(
                added_token(
                    token_id,
                    tokens[token_id],
                    special=False,
                    normalized=is_spaces and finds_spelt_spaces,
                )
            )
    model = BpeModel(
        type="BPE",
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=merges,
        byte_fallback=byte_fallback,
        ignore_merges=whole_words_first,
        unk_token=None,
        fuse_unk=False,
    )
    return TokenizerJson(
        version="1.0",
        added_tokens=added,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        post_processor=None,
        decoder=decoder,
        model=model,
    )


def _vocabulary(metadata: Mapping[str, object]) -> tuple[list[str], list[int]]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        raise ModelError(
            "tokenizer.ggml.token_type is missing: without it a typed control token could not "
            "be told from a real one; convert the model again with a current converter"
        )
    if not isinstance(types, list | tuple) or len(types) != len(tokens):
        raise ModelError("tokenizer.ggml.token_type must have one number per token")
    return tokens, [int(token_type) for token_type in types]


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise ModelError(f"{key} must be a list of strings")
    return list(values)


def _pre_name(metadata: Mapping[str, object]) -> str:
    name = metadata.get("tokenizer.ggml.pre", "default")
    name = _SAME_AS.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in _SPLITS:
        known = ", ".join(sorted([*_SPLITS, *_SAME_AS]))
        raise ModelError(f"tokenizer.ggml.pre {name!r} is not supported; these are: {known}")
    return name
