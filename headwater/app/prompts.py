"""Prompts for the load generator: seeded, the same on every machine, with a shared prefix.

Pure: the same options give the same prompts. A text prompt has about one token
a word in common tokenizers (servers report the true count); an id prompt has
exactly the tokens asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwater.core.randomness import keyed_bits

# Below this many, vocabularies keep control tokens and single bytes.
FIRST_ID = 300

# Short, common words: one token each in most vocabularies.
_WORD_LIST = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea kid body information back parent face others
level office door health person art war history party result change morning reason research girl
guy moment air teacher force education
"""
WORDS = tuple(_WORD_LIST.split())

PromptKind = Literal["text", "ids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """``shared`` is the share of each prompt, from its start, that is the same in all."""

    kind: PromptKind
    num_tokens: int
    shared: float
    vocab_size: int
    seed: int


def make_prompt(options: PromptOptions, index: int) -> str | list[int]:
    """Prompt number ``index`` (negative ones are as good, for warm-up).

    >>> options = PromptOptions(kind="ids", num_tokens=8, shared=0.5, vocab_size=9000, seed=0)
    >>> make_prompt(options, 0)[:4] == make_prompt(options, 1)[:4]
    True
    """
    num_shared = round(options.num_tokens * options.shared)
    draws = [
        keyed_bits(options.seed, position, "bench shared" if position < num_shared else f"{index}")
        for position in range(options.num_tokens)
    ]
    if options.kind == "ids":
        return [FIRST_ID + draw % (options.vocab_size - FIRST_ID) for draw in draws]
    return " ".join(WORDS[draw % len(WORDS)] for draw in draws)
