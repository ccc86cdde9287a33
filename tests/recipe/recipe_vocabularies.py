"""Small vocabularies for the tests: trained on the text below, or spelt out by hand."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, cast

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, trainers

from headwater.core.tokenizer_source import TokenizerSource

CORPUS = (
    "the quick brown fox jumps over the lazy dog. It's 1234 o'clock, don't you think? "
    "user assistant system model hello world im_start im_end end_of_turn eot_id "
    "naïve café 中文 测试 日本語 emoji 👩‍👩‍👧 🙂 \n\n    indented    code\t\n" * 3
)


@cache
def _trained_bytes() -> dict[str, Any]:
    """A byte-level BPE model of about 600 tokens."""
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        [CORPUS],
        trainers.BpeTrainer(
            vocab_size=600,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return cast(dict[str, Any], json.loads(tokenizer.to_str()))


def _added(token_id: int, content: str, **flags: bool) -> dict[str, object]:
    entry: dict[str, object] = {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {**entry, **flags}


def make_source(
    document: dict[str, Any], template: str | None, config: dict[str, object], **ids: int
) -> TokenizerSource:
    size = 1 + max(
        *document["model"]["vocab"].values(), *(t["id"] for t in document["added_tokens"])
    )
    return TokenizerSource(
        kind="hf",
        tokenizer_json=json.dumps(document).encode(),
        tokenizer_config=config,
        chat_template=template,
        bos_token_id=ids.get("bos"),
        end_token_ids=frozenset({ids["eos"]}),
        vocab_size=size + 8,  # weights are often padded
        model_id="test",
    )


def byte_level(
    literals: list[tuple[str, dict[str, bool]]], *, words: str | None, nfc: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    document = cast(dict[str, Any], json.loads(json.dumps(_trained_bytes())))
    first = max(document["model"]["vocab"].values()) + 1
    ids = {literal: first + index for index, (literal, _) in enumerate(literals)}
    document["added_tokens"] = [_added(ids[text], text, **flags) for text, flags in literals]
    document["normalizer"] = {"type": "NFC"} if nfc else None
    document["decoder"] = document["pre_tokenizer"]
    if words is not None:
        byte_level = {**document["pre_tokenizer"], "use_regex": False}
        split = {
            "type": "Split",
            "pattern": {"Regex": words},
            "behavior": "Isolated",
            "invert": False,
        }
        document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    document["model"]["ignore_merges"] = words is not None
    return document, ids


def pieces_model(
    control: list[str], text_tokens: list[str]
) -> tuple[dict[str, Any], dict[str, int]]:
    """A vocabulary with byte fallback, whose words begin with U+2581."""
    words = [
        *("he", "hel", "hell", "hello", "\u2581hello", "wo", "wor", "worl", "world"),
        *("\u2581world", "th", "the", "\u2581the", "\u2581\u2581", "us", "user", "mod", "model"),
        *("<", ">", "/"),
    ]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [t for t in text_tokens if t not in tokens]
    tokens += [chr(c) for c in range(33, 127)]
    tokens += [*"éü中文\u2581\n"]
    tokens = list(dict.fromkeys([*tokens, "hell", "worl", *words]))
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        [token[:cut], token[cut:]]
        for token in words
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *(_added(vocab[t], t) for t in control),
            *(_added(vocab[t], t, special=False) for t in text_tokens),
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": control[0],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return document, vocab
