"""Dense forms without chat that teach looking back: pairs, lists and copies.

Used most at the start of training. Knows no tokenizer.
"""

from __future__ import annotations

import random

from tools.mini.chat_format import BOS, EOS
from tools.mini.document import GIVEN, KEY, Document
from tools.mini.grammar import sentence
from tools.mini.room import Room
from tools.mini.words import COLOURS, Words, digits, made_up


def _word(rng: random.Random, words: Words) -> str:
    how = rng.random()
    if how < 0.3:
        return rng.choice(words.secrets)
    if how < 0.5:
        return rng.choice(words.things)
    if how < 0.6:
        return rng.choice(words.names)
    if how < 0.7:
        return rng.choice(words.foods)
    if how < 0.8:
        return rng.choice(words.animals)
    if how < 0.9:
        return rng.choice(words.adjectives)
    return made_up(rng)


def _key(rng: random.Random, words: Words) -> str:
    how = rng.random()
    if how < 0.4:
        return f"{rng.choice((*COLOURS, *words.adjectives))} {rng.choice(words.things)}"
    if how < 0.6:
        return rng.choice(words.names)
    return _word(rng, words)


def _value(rng: random.Random, words: Words) -> str:
    return digits(rng, rng.choice((1, 2, 3, 4))) if rng.random() < 0.4 else _word(rng, words)


def _opened() -> Document:
    document = Document(is_whole=False)
    document.add(BOS, 0.0)
    return document


def listed(rng: random.Random, room: Room) -> Document:
    """``key: value`` lines, then the keys again in any order, many times."""
    most = max(2, min(int(3 + 40 * room.stage), room.chars // 45))
    count = rng.randrange(2, most + 1)
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        pairs[_key(rng, room.words)] = _value(rng, room.words)
    colon = rng.choice((": ", ": ", " = ", " -> ", " is "))
    document = _opened()
    document.add("".join(f"{k}{colon}{v}\n" for k, v in pairs.items()), GIVEN)
    document.add(rng.choice(("\n", "---\n", "Again:\n")), GIVEN)
    used = len(document.text)
    keys = list(pairs)
    while used < 0.9 * room.chars:
        for key in rng.sample(keys, len(keys)):
            document.add(key, GIVEN)
            document.add(colon, 0.5)
            document.add(pairs[key], KEY)
            document.add("\n", 0.5)
            used += len(key) + len(pairs[key]) + len(colon) + 1
            if used > 0.95 * room.chars:
                break
        if rng.random() < 0.3:
            break
    document.add(EOS, 0.2)
    return document


def paired(rng: random.Random, room: Room) -> Document:
    """Pairs of words drawn again and again: after a word that was seen, its partner follows."""
    count = rng.randrange(3, max(4, min(int(6 + 40 * room.stage), room.chars // 40)) + 1)
    firsts = list({_word(rng, room.words) for _ in range(count)})
    partner = {first: _value(rng, room.words) for first in firsts}
    seen: set[str] = set()
    document = _opened()
    used = 0
    while used < 0.9 * room.chars:
        first = rng.choice(firsts)
        document.add((" " if used else "") + first, 0.05)
        document.add(f" {partner[first]}", 2.5 if first in seen else 0.05)
        document.add(",", 0.2)
        seen.add(first)
        used += len(first) + len(partner[first]) + 3
    return document


def copied(rng: random.Random, room: Room) -> Document:
    """A row of words or a few sentences, and the same again."""
    limit = max(20, int(room.chars * 0.42))
    length = rng.randrange(20, limit + 1)
    parts: list[str] = []
    size = 0
    is_prose = rng.random() < 0.35
    while size < length:
        part = sentence(rng, room.words) if is_prose else _word(rng, room.words)
        parts.append(part)
        size += len(part) + 1
    text = " ".join(parts)
    before, between = rng.choice(
        (("repeat: ", "\n"), ("", "\n"), ("copy: ", "\ncopy: "), ("", "\n\n"), ("A: ", "\nB: "))
    )
    document = _opened()
    document.add(before + text + between, 0.2 if is_prose else 0.05)
    document.add(text, 1.5)
    while len(text) < 0.25 * room.chars and rng.random() < 0.5:
        document.add(between, 0.3)
        document.add(text, 1.0)
        break
    document.add(EOS, 0.5)
    return document
