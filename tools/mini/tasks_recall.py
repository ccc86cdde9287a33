"""Facts in a text and questions about them: what small models learn slowest.

A fact is a key (what is asked for) and a value that cannot be guessed. Its statement,
question and answer share the words of the key, so that finding the key in the text is
what answers. Documents are sized in characters by ``Room``; knows no tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tools.mini.chat_format import BOS, EOS, Chat, Turn, render
from tools.mini.document import GIVEN, PROSE, Document, mark, unmarked
from tools.mini.grammar import description, sentence, story
from tools.mini.room import Room
from tools.mini.words import (
    COLOURS,
    DAYS,
    EVENTS,
    MONTHS,
    PREPOSITIONS,
    Words,
    digits,
    made_up,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """``answer`` has the value marked; ``short`` is the value alone."""

    key: str
    statement: str
    question: str
    answer: str
    short: str


def _fact(key: str, statement: str, question: str, value: str, answer: str = "") -> Fact:
    """``statement`` holds the value as ``@``; the answer says the same unless given."""
    spoken = answer or statement
    return Fact(
        key=key,
        statement=statement.replace("@", value),
        question=question,
        answer=spoken.replace("@", mark(value)),
        short=value,
    )


def _thing(rng: random.Random, words: Words) -> str:
    how = rng.random()
    thing = rng.choice(words.things)
    if how < 0.45:
        return f"{rng.choice(COLOURS)} {thing}"
    if how < 0.9:
        return f"{rng.choice(words.adjectives)} {thing}"
    return f"{rng.choice(words.adjectives)} {rng.choice(COLOURS)} {thing}"


def _person(rng: random.Random, words: Words) -> str:
    name = rng.choice(words.names)
    return f"{name} {rng.choice(words.last_names)}" if rng.random() < 0.35 else name


def _number(rng: random.Random) -> str:
    return digits(rng, rng.choice((2, 3, 3, 4, 4, 4, 5)))


def _code(rng: random.Random, words: Words) -> Fact:
    thing = _thing(rng, words)
    noun = rng.choice(("code", "number", "code", "pin"))
    return _fact(
        f"{noun} {thing}",
        f"The {noun} of the {thing} is @.",
        rng.choice(
            (
                f"What is the {noun} of the {thing}?",
                f"Which {noun} does the {thing} have?",
                f"Tell me the {noun} of the {thing}.",
            )
        ),
        _number(rng),
    )


def _pet(rng: random.Random, words: Words) -> Fact:
    who, animal = _person(rng, words), rng.choice(words.animals)
    return _fact(
        f"pet {who} {animal}",
        f"{who}'s {animal} is called @.",
        rng.choice((f"What is {who}'s {animal} called?", f"What is the name of {who}'s {animal}?")),
        rng.choice(words.pets),
    )


def _event(rng: random.Random, words: Words) -> Fact:
    who, event = _person(rng, words), rng.choice(EVENTS)
    value = rng.choice((rng.choice(DAYS), f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}"))
    return _fact(
        f"event {who} {event}",
        f"The {event} with {who} is on @.",
        rng.choice(
            (f"When is the {event} with {who}?", f"On which day is the {event} with {who}?")
        ),
        value,
    )


def _lies(rng: random.Random, words: Words) -> Fact:
    thing = _thing(rng, words)
    place = f"{rng.choice(PREPOSITIONS)} the {_thing(rng, words)}"
    return _fact(
        f"where {thing}",
        f"The {thing} is @.",
        rng.choice((f"Where is the {thing}?", f"Where can I find the {thing}?")),
        place,
    )


def _secret(rng: random.Random, words: Words) -> Fact:
    who = _person(rng, words)
    noun = rng.choice(("secret word", "password", "magic word"))
    value = rng.choice((rng.choice(words.secrets), made_up(rng)))
    return _fact(
        f"{noun} {who}",
        f"The {noun} of {who} is @.",
        rng.choice((f"What is the {noun} of {who}?", f"Tell me the {noun} of {who}.")),
        value,
    )


def _the_secret(rng: random.Random, words: Words) -> Fact:
    noun = rng.choice(("secret word", "password", "magic number", "secret code", "door code"))
    is_number = noun.endswith(("number", "code"))
    value = _number(rng) if is_number else rng.choice((rng.choice(words.secrets), made_up(rng)))
    return _fact(
        noun,
        f"The {noun} is @.",
        rng.choice(
            (f"What is the {noun}?", f"Do you remember the {noun}?", f"Tell me the {noun}.")
        ),
        value,
    )


def _likes(rng: random.Random, words: Words) -> Fact:
    who = _person(rng, words)
    return _fact(
        f"likes {who}",
        f"{who} likes @ best.",
        rng.choice((f"What does {who} like best?", f"Which food does {who} like best?")),
        rng.choice(words.foods),
    )


def _lives(rng: random.Random, words: Words) -> Fact:
    who = _person(rng, words)
    return _fact(
        f"lives {who}",
        f"{who} lives in @.",
        rng.choice((f"Where does {who} live?", f"In which city does {who} live?")),
        rng.choice(words.cities),
    )


def _works(rng: random.Random, words: Words) -> Fact:
    who = _person(rng, words)
    return _fact(
        f"works {who}",
        f"{who} works as a @.",
        rng.choice((f"What does {who} work as?", f"What is the job of {who}?")),
        rng.choice([job for job in words.jobs if job[0] not in "aeiou"]),
    )


def _price(rng: random.Random, words: Words) -> Fact:
    thing = _thing(rng, words)
    return _fact(
        f"price {thing}",
        f"The {thing} costs @ coins.",
        rng.choice((f"How much does the {thing} cost?", f"What is the price of the {thing}?")),
        digits(rng, rng.choice((1, 2, 2, 3))),
    )


def _age(rng: random.Random, words: Words) -> Fact:
    who = _person(rng, words)
    return _fact(f"age {who}", f"{who} is @ years old.", f"How old is {who}?", digits(rng, 2))


def _phone(rng: random.Random, words: Words) -> Fact:
    who = _person(rng, words)
    return _fact(
        f"phone {who}",
        f"The phone number of {who} is @.",
        rng.choice((f"What is the phone number of {who}?", f"How can I call {who}?")),
        digits(rng, rng.choice((4, 4, 5))),
    )


def _colour(rng: random.Random, words: Words) -> Fact:
    who, thing = _person(rng, words), rng.choice(words.things)
    return _fact(
        f"colour {who} {thing}",
        f"{who}'s {thing} is @.",
        rng.choice((f"What colour is {who}'s {thing}?", f"What is the colour of {who}'s {thing}?")),
        rng.choice(COLOURS),
    )


def _owner(rng: random.Random, words: Words) -> Fact:
    thing = _thing(rng, words)
    return _fact(
        f"owner {thing}",
        f"The {thing} belongs to @.",
        rng.choice((f"Who owns the {thing}?", f"To whom does the {thing} belong?")),
        _person(rng, words),
    )


def _inside(rng: random.Random, words: Words) -> Fact:
    thing = _thing(rng, words)
    value = f"a {rng.choice(COLOURS).replace('orange', 'green')} {rng.choice(words.things)}"
    return _fact(
        f"inside {thing}",
        f"Inside the {thing} there is @.",
        rng.choice((f"What is inside the {thing}?", f"What is there inside the {thing}?")),
        value,
    )


def _named(rng: random.Random, words: Words) -> Fact:
    animal, adjective = rng.choice(words.animals), rng.choice(words.adjectives)
    return _fact(
        f"name {adjective} {animal}",
        f"The name of the {adjective} {animal} is @.",
        rng.choice(
            (
                f"What is the name of the {adjective} {animal}?",
                f"What is the {adjective} {animal} called?",
            )
        ),
        rng.choice((rng.choice(words.pets), made_up(rng).capitalize())),
    )


_KINDS: Final[tuple[Callable[[random.Random, Words], Fact], ...]] = (
    _code, _code, _code, _pet, _event, _lies, _secret, _secret, _the_secret, _likes, _lives,
    _works, _price, _age, _phone, _colour, _owner, _inside, _named,
)  # fmt: skip


def facts(rng: random.Random, words: Words, count: int) -> list[Fact]:
    """``count`` facts, no two of which answer the same question.

    Now and then all are of one kind, so that only the key tells them apart.
    """
    kinds = _KINDS if rng.random() < 0.65 else tuple(rng.sample(_KINDS, 2))
    found: dict[str, Fact] = {}
    tries = 0
    while len(found) < count and tries < 20 * count:
        tries += 1
        fact = rng.choice(kinds if tries < 5 * count else _KINDS)(rng, words)
        found.setdefault(fact.key, fact)
    return list(found.values())


def filler(rng: random.Random, room: Room, chars: int) -> list[str]:
    """Sentences and short texts of about ``chars`` characters in all."""
    parts: list[str] = []
    left = chars
    while left > 30:
        how = rng.random()
        if left < 200 or how < 0.3:
            text = sentence(rng, room.common)
        elif how < 0.45:
            text = story(rng, room.common)
        elif how < 0.55:
            text = description(rng, room.common)[1]
        elif how < 0.75:
            text = rng.choice(room.texts.prose)
        else:
            text = rng.choice(room.texts.stories).replace("\n", " ")
        if len(text) > left + 40:
            text = sentence(rng, room.common)
        parts.append(text)
        left -= len(text) + 1
    return parts


def _mixed(rng: random.Random, statements: list[str], fillers: list[str]) -> str:
    """Statements in their order among the fillers, anywhere."""
    gaps = sorted(rng.randrange(len(fillers) + 1) for _ in statements)
    parts: list[str] = []
    done = 0
    for at, statement in zip(gaps, statements, strict=True):
        parts.extend(fillers[done:at])
        done = at
        parts.append(statement)
    parts.extend(fillers[done:])
    return rng.choice((" ", " ", "\n")).join(parts)


_INTRODUCTIONS: Final = (
    "Remember this.", "Read this text.", "Here are some facts.", "Please remember these facts.",
    "Here is a text.", "This is what we know.", "Read the text and answer my questions.",
    "Notes:", "Keep this in mind.",
)  # fmt: skip
_READY: Final = (
    "I will remember that.", "All right, I will keep it in mind.", "Thank you, I have read it.",
    "I have read the text. What would you like to know?", "Yes, I will remember it.", "Noted.",
)  # fmt: skip
_UNKNOWN: Final = (
    "The text does not say that.", "I do not know, the text does not say it.",
    "That is not in the text.",
)  # fmt: skip


def _thought(rng: random.Random, fact: Fact) -> str:
    return rng.choice(("The text says: ", "I was told: ", "I remember: ")) + fact.answer


def _answer(rng: random.Random, fact: Fact, is_short: bool) -> str:
    return mark(fact.short) + "." if is_short else fact.answer


def recall(rng: random.Random, room: Room) -> Document:
    """A chat in which facts are given and asked for again."""
    words = room.words
    budget = room.chars
    most = max(2, min(int(2 + 4 * room.stage + budget / 160), 2 + int(60 * room.stage) + 4))
    count = rng.randrange(2, most + 1) if rng.random() < 0.7 else most
    count = min(count, max(2, budget // 130))
    known = facts(rng, words, count)
    asked = rng.sample(known, len(known))
    # Each question costs about as much as its fact; at least a third of the room is for them.
    used = sum(len(f.statement) + 1 for f in known)
    questions: list[Fact] = []
    for fact in asked:
        cost = len(fact.question) + len(fact.answer) + 20
        if used + cost > 0.92 * budget and questions:
            break
        questions.append(fact)
        used += cost
    if used < 0.6 * budget and rng.random() < 0.3:  # some are asked for twice
        again = rng.sample(questions, max(1, len(questions) // 3))
        questions += again
        used += sum(len(f.question) + len(f.answer) + 20 for f in again)
    free = max(0, int(0.95 * budget) - used)
    if rng.random() < 0.25 and not room.is_long:
        free = rng.randrange(free + 1)
    text = _mixed(rng, [f.statement for f in known], filler(rng, room, free))
    introduction = rng.choice(_INTRODUCTIONS)
    is_short = rng.random() < 0.12
    thinking = rng.random() < 0.4
    turns: list[Turn] = []
    system: str | None = None
    weight = PROSE if free > used else GIVEN
    how = rng.random()
    lead = ""
    if how < 0.25:
        system = f"{introduction} {text}" if rng.random() < 0.6 else text
    elif how < 0.55:
        lead = f"{introduction} {text}\n" if rng.random() < 0.7 else f"{text}\n"
    else:
        turns.append(Turn(role="user", text=f"{introduction} {text}", weight=weight))
        turns.append(
            Turn(
                role="assistant", text=rng.choice(_READY), thought="I should remember these facts."
            )
        )
    if rng.random() < 0.15:
        turns.extend(_many_at_once(rng, lead, questions, weight))
        return render(Chat(turns=turns, system=system, thinking=thinking, system_weight=weight))
    for i, fact in enumerate(questions):
        question = fact.question
        if is_short and i == 0:
            question += rng.choice((" Answer briefly.", " Only the answer, please."))
        turns.append(Turn(role="user", text=lead + question, weight=weight if lead else GIVEN))
        if not lead and room.stage > 0.2 and rng.random() < 0.03:
            turns[-1:] = _unknown(rng, room, known)
            continue
        lead = ""
        turns.append(
            Turn(role="assistant", text=_answer(rng, fact, is_short), thought=_thought(rng, fact))
        )
    return render(Chat(turns=turns, system=system, thinking=thinking, system_weight=weight))


def _many_at_once(
    rng: random.Random, lead: str, questions: list[Fact], weight: float
) -> list[Turn]:
    """All questions in one message, all answers in one."""
    lines = "\n".join(f.question for f in questions)
    answers = "\n".join(f.answer for f in questions)
    head = rng.choice(("Answer these questions.\n", "Answer each question.\n", ""))
    return [
        Turn(role="user", text=lead + head + lines, weight=weight if lead else GIVEN),
        Turn(role="assistant", text=answers, thought="I look for each answer in the text."),
    ]


def _unknown(rng: random.Random, room: Room, known: list[Fact]) -> list[Turn]:
    """A question that the text does not answer."""
    keys = {fact.key for fact in known}
    other = next((f.question for f in facts(rng, room.words, 4) if f.key not in keys), None)
    return [
        Turn(role="user", text=other or "Who wrote this text?"),
        Turn(
            role="assistant", text=rng.choice(_UNKNOWN), thought="I do not find that in the text."
        ),
    ]


def step_by_step(rng: random.Random, room: Room) -> Document:
    """One fact in each turn, then the questions; with small talk between."""
    budget = room.chars
    known = facts(rng, room.words, max(2, min(int(2 + 12 * room.stage), budget // 230)))
    turns: list[Turn] = []
    for fact in known:
        turns.append(Turn(role="user", text=fact.statement))
        turns.append(
            Turn(
                role="assistant",
                text=rng.choice(
                    ("I will remember that.", "Noted.", "Good to know.", "Okay.", "I see.")
                ),
                thought="I should remember this.",
            )
        )
    for fact in rng.sample(known, len(known)):
        turns.append(Turn(role="user", text=fact.question))
        turns.append(Turn(role="assistant", text=fact.answer, thought=_thought(rng, fact)))
    return render(Chat(turns=turns, thinking=rng.random() < 0.4))


def plain_facts(rng: random.Random, room: Room) -> Document:
    """Facts and the same facts again in another order, without a chat."""
    known = facts(rng, room.words, max(2, min(int(3 + 20 * room.stage), room.chars // 90)))
    document = Document()
    document.add(BOS, 0.0)
    document.add(" ".join(f.statement for f in known), GIVEN)
    document.add("\n\n", GIVEN)
    for fact in rng.sample(known, len(known)):
        key, _, rest = fact.answer.partition(mark(fact.short))
        document.add(unmarked(key), 0.3)
        document.add(fact.short, 3.0)
        document.add(rest + " ", 1.0)
    document.add(EOS, 0.5)
    return document
