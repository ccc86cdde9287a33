"""Walks matchers of the byte vocabulary: used by the tests of constraints and turn grammars."""

from __future__ import annotations

import json

from headwater.core.constraint import Constraint
from headwater.core.ports import Matcher
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.constraints import GrammarCompiler

VOCAB = 300
AB = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"enum": ["x", "yy"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


def byte_compiler() -> GrammarCompiler:
    return GrammarCompiler.from_source(TokenizerSource(kind="byte", vocab_size=VOCAB))


def allowed(matcher: Matcher) -> set[int]:
    bits = int.from_bytes(matcher.allowed_bits(), "little")
    return {token_id for token_id in range(VOCAB) if bits >> token_id & 1}


def accepts(matcher: Matcher, text: str | list[int]) -> bool:
    """Whether the mask lets every token through and the matcher takes it."""
    ids = list(text.encode()) if isinstance(text, str) else text
    return all(token_id in allowed(matcher) and matcher.accept(token_id) for token_id in ids)


def ending(matcher: Matcher) -> str:
    """Whether the output may stop, must, or cannot yet."""
    if matcher.must_stop:
        assert matcher.is_complete
        return "must"
    return "may" if matcher.is_complete else "no"


def matches(compiler: GrammarCompiler, constraint: Constraint, text: str | list[int]) -> bool:
    matcher = compiler.compile(constraint)()
    return accepts(matcher, text) and matcher.is_complete
