"""Counting, copying, spelling and small sums, in chat form. Knows no tokenizer."""

from __future__ import annotations

import random

from tools.mini.chat_format import Chat, Turn, render
from tools.mini.document import Document, mark
from tools.mini.grammar import sentence
from tools.mini.room import Room
from tools.mini.words import Words, digits, made_up

Pair = tuple[str, str, str]  # question, answer, thought


def count(rng: random.Random, words: Words) -> Pair:
    """From a to b, up or down, by ones, twos, fives or tens."""
    step = rng.choice((1, 1, 1, 1, 2, 5, 10))
    start = rng.choice((1, 1, 1, 2, 3, rng.randrange(0, 90)))
    if step > 1:
        start = rng.choice((step, 0, start))
    length = rng.randrange(3, 21 if step == 1 else 11)
    numbers = list(range(start, start + step * length, step))
    way, thought = "", f"I count from {numbers[0]} to {numbers[-1]}."
    if rng.random() < 0.25:
        numbers.reverse()
        way = rng.choice(("down ", "backwards "))
        thought = f"I count down from {numbers[0]} to {numbers[-1]}."
    ending = {1: "", 2: " by twos", 5: " by fives", 10: " by tens"}[step]
    asked = rng.choice(
        (
            f"Count {way}from {numbers[0]} to {numbers[-1]}{ending}.",
            f"Please count {way}from {numbers[0]} to {numbers[-1]}{ending}.",
            f"Can you count {way}from {numbers[0]} to {numbers[-1]}{ending}?",
        )
    )
    return asked, ", ".join(map(str, numbers)), thought


def copy(rng: random.Random, words: Words) -> Pair:
    """Repeat exactly what is written."""
    how = rng.random()
    if how < 0.4:
        text = " ".join(rng.choices((*words.secrets, *words.things), k=rng.randrange(2, 9)))
    elif how < 0.6:
        text = " ".join(digits(rng, rng.randrange(1, 5)) for _ in range(rng.randrange(1, 6)))
    elif how < 0.75:
        text = " ".join(made_up(rng) for _ in range(rng.randrange(1, 5)))
    else:
        text = sentence(rng, words)
    asked = rng.choice(
        ("Repeat exactly: ", "Repeat: ", "Say this again: ", "Copy this text: ", "Please repeat: ",
         "Write exactly this: ", "Echo: ")
    )  # fmt: skip
    return asked + text, mark(text), "I copy the text."


def spell(rng: random.Random, words: Words) -> Pair:
    """A word letter by letter."""
    word = rng.choice((rng.choice(words.secrets), rng.choice(words.things), made_up(rng)))
    mark_between = rng.choice(("-", "-", " "))
    asked = rng.choice(
        (f"Spell the word {word}.", f"How do you spell {word}?", f"Spell {word}.",
         f"Write the letters of {word}.")
    )  # fmt: skip
    return asked, mark("-".join(word) if mark_between else word), f"I spell {word}."


def add(rng: random.Random, words: Words) -> Pair:
    """Sums and differences of small numbers."""
    a, b = rng.randrange(0, 21), rng.randrange(0, 21)
    if rng.random() < 0.7:
        asked = rng.choice((f"What is {a} + {b}?", f"What is {a} plus {b}?", f"Add {a} and {b}."))
        return asked, f"{a} plus {b} is {mark(str(a + b))}.", f"{a} + {b} = {mark(str(a + b))}"
    a, b = max(a, b), min(a, b)
    asked = rng.choice((f"What is {a} - {b}?", f"What is {a} minus {b}?"))
    return asked, f"{a} minus {b} is {mark(str(a - b))}.", f"{a} - {b} = {mark(str(a - b))}"


_MAKERS = (count, count, copy, copy, copy, spell, add)


def small(rng: random.Random, room: Room) -> Document:
    """A talk of one to several such wishes."""
    turns: list[Turn] = []
    size = 0
    while True:
        asked, answer, thought = rng.choice(_MAKERS)(rng, room.words)
        turns.append(Turn(role="user", text=asked))
        turns.append(Turn(role="assistant", text=answer, thought=thought))
        size += len(asked) + 2 * len(answer) + 24
        if size > 0.6 * room.chars or rng.random() < (0.03 if room.is_long else 0.25):
            break
    return render(Chat(turns=turns, thinking=rng.random() < 0.4), is_whole=False)
