"""A small tokenizer trained on the generated documents, once for all tests of this folder."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer

from tools.mini.mixture import sample_texts
from tools.mini.text import Texts
from tools.mini.tokenizer import train


@cache
def small_tokenizer() -> Tokenizer:
    return train(sample_texts(Texts.builtin(), count=300, seed=1), vocabulary=1024)
