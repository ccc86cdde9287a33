"""Rows of token ids with loss weights: every kind of document in its share, packed.

Which share each kind has, and how hard it is, depends on how far training is
(``stage``). Endless and the same for the same seed. Knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.mini.document import Document
from tools.mini.room import Room
from tools.mini.tasks_chat import prose, talk, taught
from tools.mini.tasks_raw import copied, listed, paired
from tools.mini.tasks_recall import plain_facts, recall, step_by_step
from tools.mini.tasks_small import small
from tools.mini.tasks_tools import calls
from tools.mini.text import Texts
from tools.mini.words import Part, words

# Somewhat fewer than on average, so that most documents fit.
_CHARS_PER_TOKEN: Final = 3.9
_DENSE_CHARS_PER_TOKEN: Final = 2.6
_MIN_TOKENS_OF_CALLS: Final = 520  # the format's own text about tools is long
_MOST_MISSES: Final = 8  # documents that do not fit before a row is left as it is
_MOST_WAITING: Final = 16
_LONG: Final = 0.35  # of the documents fill most of a long row
_ENOUGH: Final = 100  # tokens that are worth a document
_RECALL: Final = (recall, step_by_step, plain_facts)

Task = Callable[[random.Random, Room], Document]


class Row(NamedTuple):
    """``weights[i]`` is the weight of predicting ``ids[i + 1]``; 0 for padding.

    ids: int32 [row_tokens + 1], weights: float32 [row_tokens].
    """

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]


class _Encoded(NamedTuple):
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]  # of each token itself
    is_whole: bool


def shares(stage: float) -> list[tuple[Task, float]]:
    """Each kind of document and its share of the tokens, which add up to 1."""
    raw = 0.38 if stage < 0.15 else max(0.05, 0.24 - 0.3 * (stage - 0.15))
    chat_recall = 0.22 if stage < 0.15 else min(0.35, 0.26 + 0.2 * (stage - 0.15))
    rest = 1.0 - raw - chat_recall
    return [
        (listed, 0.35 * raw),
        (paired, 0.2 * raw),
        (copied, 0.25 * raw),
        (plain_facts, 0.2 * raw),
        (recall, 0.85 * chat_recall),
        (step_by_step, 0.15 * chat_recall),
        (talk, 0.38 * rest),
        (taught, 0.12 * rest),
        (prose, 0.09 * rest),
        (calls, 0.28 * rest),
        (small, 0.13 * rest),
    ]


def encode(tokenizer: Tokenizer, document: Document) -> _Encoded:
    """Ids and weights of a document; a token weighs what its last character weighs."""
    encoding = tokenizer.encode(document.text, add_special_tokens=False)
    ids = np.array(encoding.ids, dtype=np.int32)
    lengths = np.array([len(text) for text, _ in document.pieces], dtype=np.int64)
    values = np.array([weight for _, weight in document.pieces], dtype=np.float32)
    ends = np.array(encoding.offsets, dtype=np.int64)[:, 1] - 1
    at = np.searchsorted(np.cumsum(lengths), ends, side="right")
    return _Encoded(ids, values[at], document.is_whole)


def rows(
    tokenizer_dir: Path, texts: Texts, *, row_tokens: int, stage: float, seed: int
) -> Iterator[Row]:
    """Endless rows of ``row_tokens`` predictions each, for a model that is ``stage`` far."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    rng = random.Random(f"{seed} {row_tokens} {stage:.4f}")
    source = _Source(tokenizer, texts, row_tokens, stage, rng)
    length = row_tokens + 1
    waiting: list[_Encoded] = []  # whole documents for which there was no room yet
    while True:
        ids = np.zeros(length, dtype=np.int32)
        weights = np.zeros(length, dtype=np.float32)
        used = misses = 0
        while used < length and misses < _MOST_MISSES:
            left = length - used
            fitting = next((i for i, d in enumerate(waiting) if len(d.ids) <= left), None)
            if fitting is not None:
                document = waiting.pop(fitting)
            else:
                document = source.next(left)
            size = len(document.ids)
            if size > left and document.is_whole:
                misses += 1
                if size <= length and len(waiting) < _MOST_WAITING:
                    waiting.append(document)
                continue
            taken = min(size, left)
            ids[used : used + taken] = document.ids[:taken]
            weights[used : used + taken] = document.weights[:taken]
            used += taken
        yield Row(ids, weights[1:].copy())


class _Source:
    """Documents for what is left of a row, each kind in its share of the tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Texts,
        row_tokens: int,
        stage: float,
        rng: random.Random,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._words = words(Part.TRAINED)
        self._common = words(Part.ALL)
        self._row_tokens = row_tokens
        self._stage = stage
        self._rng = rng
        self._shares = [
            (task, share)
            for task, share in shares(stage)
            if task is not calls or row_tokens >= _MIN_TOKENS_OF_CALLS
        ]
        total = sum(share for _, share in self._shares)
        self._shares = [(task, share / total) for task, share in self._shares]
        self._owed = [0.0] * len(self._shares)

    def next(self, left: int) -> _Encoded:
        """A document of the kind that is furthest behind its share; ``left``: of the row."""
        noisy = [owed + self._rng.random() * 200 for owed in self._owed]
        index = max(range(len(noisy)), key=noisy.__getitem__)
        task = self._shares[index][0]
        if task is calls and left < _MIN_TOKENS_OF_CALLS:
            index = (index + 1) % len(self._shares)
            task = self._shares[index][0]
        document = self._made(task, left)
        size = len(document.ids)
        for i, (_, share) in enumerate(self._shares):
            self._owed[i] += share * size
        self._owed[index] -= size
        return document

    def _made(self, task: Task, left: int) -> _Encoded:
        is_long = self._row_tokens >= 1000 and self._rng.random() < _LONG
        share = self._rng.uniform(0.7, 0.97) if is_long else self._rng.uniform(0.1, 0.6)
        tokens = (
            self._row_tokens * share if is_long else max(64.0, min(self._row_tokens, 1200) * share)
        )
        if tokens > left > _ENOUGH and self._rng.random() < 0.5:
            tokens = left  # a document that ends with the row
        is_dense = task in (listed, paired, small)
        per_token = _DENSE_CHARS_PER_TOKEN if is_dense else _CHARS_PER_TOKEN
        room = Room(
            chars=int(tokens * per_token),
            stage=self._stage,
            words=self._words if task in _RECALL else self._common,
            common=self._common,
            texts=self._texts,
            is_long=is_long,
        )
        return encode(self._tokenizer, task(self._rng, room))


def sample_texts(texts: Texts, *, count: int, seed: int) -> Iterator[str]:
    """``count`` documents of all kinds, for training the tokenizer."""
    rng = random.Random(seed)
    tasks = shares(0.5)
    for _ in range(count):
        task = rng.choices([t for t, _ in tasks], [s for _, s in tasks])[0]
        room = Room(
            chars=rng.choice((300, 600, 1200, 2400)),
            stage=rng.random(),
            words=words(Part.ALL),
            common=words(Part.ALL),
            texts=texts,
        )
        yield task(rng, room).text
    yield from texts.prose
