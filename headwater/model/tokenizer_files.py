"""Collects what ``recipe`` needs to build a tokenizer: files or metadata, unread.

Decides only one thing: which ids end a turn or a text, because that is spread
over several files and conventions. Called by ``load``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from headwater.core.errors import ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.config import ModelConfig
from headwater.model.fields import Fields

# GGUF names one end-of-text id, where many chat models have several. Control
# tokens with these texts end a turn or a text in every model that has them.
_END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
    }
)
_GGUF_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_CONTROL = 3  # tokenizer.ggml.token_type of a control token


def tokenizer_from_folder(folder: Path, config: ModelConfig, model_id: str) -> TokenizerSource:
    """From ``tokenizer.json``, ``tokenizer_config.json``, the generation config and a template.

    Raises ModelError when tokenizer.json is missing or a file is not JSON.
    """
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ModelError(
            f"{tokenizer} is missing; models that ship only tokenizer.model (SentencePiece) "
            "must be converted: transformers' save_pretrained writes tokenizer.json"
        )
    settings = optional_json(folder / "tokenizer_config.json")
    generation = Fields(
        optional_json(folder / "generation_config.json"), str(folder / "generation_config.json")
    )
    end_ids = config.eos_token_ids | generation.token_ids("eos_token_id")
    named_end = _id_of_text(settings, _token_text(settings.get("eos_token")))
    bos_id = config.bos_token_id
    if bos_id is None:
        bos_id = _id_of_text(settings, _token_text(settings.get("bos_token")))
    return TokenizerSource(
        kind="hf",
        tokenizer_json=tokenizer.read_bytes(),
        tokenizer_config=settings,
        chat_template=_folder_template(folder, settings),
        bos_token_id=bos_id,
        end_token_ids=end_ids if named_end is None else end_ids | {named_end},
        vocab_size=config.vocab_size,
        model_id=model_id,
    )


def tokenizer_from_gguf(
    metadata: Mapping[str, object], config: ModelConfig, model_id: str, where: str
) -> TokenizerSource:
    """From the ``tokenizer.*`` keys; raises ModelError when the file has no vocabulary."""
    kept = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    fields = Fields(kept, where)
    tokens = kept.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ModelError(f"{where}: tokenizer.ggml.tokens is missing: the file has no tokenizer")
    types = kept.get("tokenizer.ggml.token_type")
    end_ids: set[int] = set()
    for name in _GGUF_END_IDS:
        end_ids |= fields.token_ids(f"tokenizer.ggml.{name}")
    if isinstance(types, list):
        end_ids |= {
            index
            for index, (text, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _GGUF_CONTROL and text in _END_TEXTS
        }
    template = kept.get("tokenizer.chat_template")
    return TokenizerSource(
        kind="gguf",
        gguf_metadata=kept,
        chat_template=template if isinstance(template, str) else None,
        bos_token_id=fields.token_id("tokenizer.ggml.bos_token_id"),
        end_token_ids=frozenset(end_ids),
        vocab_size=config.vocab_size,
        model_id=model_id,
    )


def optional_json(path: Path) -> dict[str, object]:
    """The object in ``path``; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _folder_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """A template file wins over the one inside tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    inline = optional_json(folder / "chat_template.json").get("chat_template")
    inline = inline if inline is not None else settings.get("chat_template")
    if isinstance(inline, str):
        return inline
    for entry in _mappings(inline):  # several named templates: the default one
        template = entry.get("template")
        if entry.get("name") == "default" and isinstance(template, str):
            return template
    return None


def _token_text(token: object) -> str | None:
    """A special token is its text, or an object with the text as ``content``."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _id_of_text(settings: Mapping[str, object], text: str | None) -> int | None:
    table = settings.get("added_tokens_decoder")
    if text is None or not isinstance(table, Mapping):
        return None
    for token_id, entry in table.items():
        if _token_text(entry) == text and str(token_id).isdecimal():
            return int(token_id)
    return None


def _mappings(value: object) -> Iterable[Mapping[str, object]]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list) else []
