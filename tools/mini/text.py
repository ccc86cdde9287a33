"""The texts that do not come from a grammar: a teacher's answers and prose of packages.

Reads them from files where they are, drops what is broken, and keeps one
exchange in twenty for the evaluation. Without files there is a small built-in text, so that
everything that uses ``Texts`` works in a fresh checkout. Knows no tokenizer.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HELD_OUT_EVERY: Final = 20
_MAX_CHARS: Final = 1200
_LONGEST_SENTENCE: Final = 24  # words, on average
_RARE: Final = 4  # answers that use a word, of all answers
_MOST_RARE: Final = 0.1  # of an answer's words
_BAD_MARKS: Final = ("http", "```", "|", "{", "#", "$", "[", "(", "%", "&", "<", ";", "\n- ", "_")
_BAD_PHRASES: Final = (
    "as an ai", "language model", "i'm sorry, but", "i apologize", "smollm", "hugging",
    "sexual", "drug", "murder", "weapon", "kill",
)  # fmt: skip
_BAD_WORDS: Final = frozenset(
    (
        "bitch damn hell shit fuck ass sex sexy nude naked rape gun bomb corpse suicide ai ais "
        "chatbot robotics smollm god gods nazi terrorist slave whore drunk cocaine porn"
    ).split()
)
# The teacher knows little: what it says of the world is mostly wrong, its stories do no harm.
_ASKS_FOR_KNOWLEDGE: Final = (
    "Explain", "What do you know", "What is the difference", "How can I learn", "Give me three",
    "Why do people", "What does a",
)  # fmt: skip
_WORD: Final = re.compile(r"[a-z']+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    user: str
    assistant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """``prose`` are paragraphs of running English; ``stories`` the longer answers."""

    exchanges: tuple[Exchange, ...]
    held_out: tuple[Exchange, ...]
    stories: tuple[str, ...]
    prose: tuple[str, ...]

    @classmethod
    def load(cls, *, teacher: Path | None = None, prose: Path | None = None) -> Texts:
        """From the teacher's lines and a text file of paragraphs; missing files are empty."""
        kept, held_out = _split(_exchanges(teacher))
        return cls(
            exchanges=kept or _BUILT_IN[:-2],
            held_out=held_out or _BUILT_IN[-2:],
            stories=tuple(e.assistant for e in kept if len(e.assistant) > 250)
            or tuple(e.assistant for e in _BUILT_IN[:-2]),
            prose=tuple(_paragraphs(prose)) or _BUILT_IN_PROSE,
        )

    @classmethod
    def builtin(cls) -> Texts:
        return cls.load()


def is_good(answer: str) -> bool:
    """Whether an answer is worth learning: whole, plain, and not going in circles.

    >>> is_good("Because it rains. Because it rains. Because it rains.")
    False
    >>> is_good("Because the sun is warm and the days are long.")
    True
    """
    if not 25 <= len(answer) <= _MAX_CHARS or answer[-1] not in '.!?"':
        return False
    if not answer.isascii() or not (answer[0].isupper() or answer[0] == '"'):
        return False
    if any(mark in answer for mark in _BAD_MARKS) or any(c.isdigit() for c in answer):
        return False
    if answer.count('"') % 2:
        return False
    lower = answer.lower()
    if any(phrase in lower for phrase in _BAD_PHRASES):
        return False
    sentences = [s.strip() for s in re.split(r"[.!?]+", lower) if s.strip()]
    if len(set(sentences)) < len(sentences):
        return False
    spoken = words_of(answer)
    if not _BAD_WORDS.isdisjoint(spoken):
        return False
    if len(spoken) < 5 or len(spoken) > _LONGEST_SENTENCE * len(sentences):
        return False
    threes = [tuple(spoken[i : i + 3]) for i in range(len(spoken) - 2)]
    if len(set(threes)) < 0.9 * len(threes):
        return False
    content = Counter(word for word in spoken if len(word) > 3).most_common(1)
    return not content or content[0][1] <= max(4, 0.1 * len(spoken))


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _split(exchanges: Iterable[Exchange]) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    kept: list[Exchange] = []
    held_out: list[Exchange] = []
    for exchange in exchanges:
        (held_out if _is_held_out(exchange) else kept).append(exchange)
    return tuple(kept), tuple(held_out)


def _is_held_out(exchange: Exchange) -> bool:
    """By the text alone, so that a longer file keeps the same ones out."""
    return zlib.crc32(exchange.assistant.encode()) % _HELD_OUT_EVERY == 0


def _exchanges(path: Path | None) -> Iterator[Exchange]:
    if path is None or not path.is_file():
        return
    seen: set[str] = set()
    good: list[Exchange] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # the last line of a file that is still being written
        user, assistant = str(value["user"]), _plain(str(value["assistant"]))
        if user.startswith(_ASKS_FOR_KNOWLEDGE):
            continue
        if assistant not in seen and is_good(assistant):
            seen.add(assistant)
            good.append(Exchange(user=user, assistant=assistant))
    uses = Counter(word for e in good for word in set(words_of(e.assistant)))
    for exchange in good:
        spoken = words_of(exchange.assistant)
        if sum(uses[word] < _RARE for word in spoken) <= _MOST_RARE * len(spoken):
            yield exchange


def _plain(text: str) -> str:
    """Typographic marks and emphasis in plain spelling."""
    for fancy, plain in (
        ("\u2019", "'"), ("\u2018", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u2014", " - "),
        ("\u2013", "-"), ("\u2026", "..."), ("\u00e9", "e"), ("**", ""), ("*", ""),
    ):  # fmt: skip
        text = text.replace(fancy, plain)
    return text.strip()


def _paragraphs(path: Path | None) -> Iterator[str]:
    if path is None or not path.is_file():
        return
    for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
        text = " ".join(paragraph.split())
        if 60 <= len(text) <= 3000:
            yield text


_BUILT_IN: Final = (
    Exchange(
        user="Tell me a very short story that happens in the garden.",
        assistant=(
            "A small snail lived under a stone in the garden. Every morning it walked to the red "
            "flowers and drank the cold dew. One day it rained, and the snail was very happy. It "
            "invited a bee to share the wet leaves, and they became friends."
        ),
    ),
    Exchange(
        user="Explain in simple words what a bridge is.",
        assistant=(
            "A bridge is a road over water or over a valley. People and cars use it to get to the "
            "other side."
        ),
    ),
    Exchange(
        user="Why do people like tea? Answer briefly.",
        assistant="Tea is warm, it tastes good, and it gives people a quiet moment in the day.",
    ),
    Exchange(
        user="Describe an owl in three short sentences.",
        assistant=(
            "An owl is a bird with big round eyes. It sleeps during the day and hunts at night. "
            "Its wings make almost no sound."
        ),
    ),
)
_BUILT_IN_PROSE: Final = (
    "The road to the village follows the river for a mile and then climbs the hill. From the top "
    "one can see the church, the mill and the fields on both sides of the water.",
    "Bread is made of flour, water and salt. The dough has to rest for some hours before it goes "
    "into the oven, and the smell of it fills the whole house.",
)
