"""Small wishes of a chat: a sentence with a word, a comparison, a letter, advice, a choice.

Each gives (question, answer, thought). Knows no chat format.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from tools.mini.document import mark
from tools.mini.grammar import HOBBIES, SPOTS, at_spot, description, sentence
from tools.mini.words import COLOURS, DAYS, EVENTS, Words, joined, pronouns, with_article

Wish = tuple[str, str, str]

_BY_SIZE: Final = (
    "ant bee mouse frog squirrel rabbit cat fox sheep wolf lion horse camel giraffe elephant whale"
).split()
_SKILLS: Final = (
    "to swim|to cook|to draw|to play the guitar|to speak English|to dance|to write well|to sing|"
    "to ride a bicycle|to play chess|to bake bread|to paint|to run fast|to play the piano"
).split("|")
_ADVICE: Final = (
    "Practise a little every day.",
    "Begin with something easy.",
    "Ask a friend to help you.",
    "Do not give up if it is difficult at first.",
    "Take your time.",
    "Find a good teacher.",
    "Read a book about it.",
    "Write down what you have learned.",
    "Take a break when you are tired.",
    "Look how others do it.",
    "Set yourself a small goal.",
    "Have fun with it.",
)
_OPINIONS: Final = (
    ("dogs", "They are friendly and like to play."),
    ("cats", "They are quiet and soft."),
    ("books", "You can learn a lot from them."),
    ("music", "It makes people happy."),
    ("the sea", "It is wide and blue, and you can swim in it."),
    ("winter", "It is cold, but the snow is beautiful."),
    ("summer", "The days are long and warm."),
    ("rain", "The plants need it."),
    ("tea", "It is warm and tastes good."),
    ("coffee", "Many people drink it in the morning."),
    ("school", "You learn many things there and meet friends."),
    ("trains", "They are fast, and you can look out of the window."),
    ("bicycles", "They are quiet and good for your health."),
    ("the moon", "It shines at night and changes its shape."),
    ("gardens", "You can grow flowers and vegetables there."),
    ("bread", "It smells good and people eat it every day."),
    ("mountains", "They are high, and the air is fresh there."),
    ("birds", "They can fly, and many of them sing."),
    ("trees", "They give us shade, fruit and wood."),
    ("friends", "They help you and make you laugh."),
    ("computers", "They help us to work and to play."),
    ("the night", "It is dark and quiet, and most people sleep."),
    ("bees", "They make honey and help the flowers."),
    ("clocks", "They tell us what time it is."),
    ("letters", "It is nice to get one from a friend."),
    ("markets", "You can buy fresh food there."),
    ("rivers", "They carry water from the mountains to the sea."),
    ("stories", "They take us to other places."),
)


def use_word(rng: random.Random, words: Words) -> Wish:
    word = rng.choice(words.things)
    asked = rng.choice(
        (f"Write a sentence with the word {word}.", f"Use the word {word} in a sentence.",
         f'Make a sentence with "{word}".')
    )  # fmt: skip
    name, colour, adjective = (
        rng.choice(words.names),
        rng.choice(COLOURS),
        rng.choice(words.adjectives),
    )
    answer = rng.choice(
        (
            f"{name} put the {word} on the table.",
            f"There is a {colour} {word} {at_spot(rng.choice(SPOTS))}.",
            f"I have never seen such {with_article(adjective)} {word}.",
            f"The {word} belongs to my friend {name}.",
            f"{name} bought a new {word} on {rng.choice(DAYS)}.",
            f"Where did you find this {adjective} {word}?",
            f"My {word} is {colour}.",
        )
    )
    return asked, answer, f"I use the word {mark(word)}."


def bigger(rng: random.Random, words: Words) -> Wish:
    i, j = sorted(rng.sample(range(len(_BY_SIZE)), 2))
    small, large = _BY_SIZE[i], _BY_SIZE[j]
    a, b = (small, large) if rng.random() < 0.5 else (large, small)
    how = rng.randrange(3)
    if how == 0:
        asked = f"Which is bigger, {with_article(a)} or {with_article(b)}?"
        answer = (
            f"{_capital(with_article(mark(large), large))} is bigger than {with_article(small)}."
        )
    elif how == 1:
        asked = f"Which is smaller, {with_article(a)} or {with_article(b)}?"
        answer = (
            f"{_capital(with_article(mark(small), small))} is smaller than {with_article(large)}."
        )
    else:
        asked = f"Is {with_article(a)} bigger than {with_article(b)}?"
        is_so = a == large
        answer = (
            f"{'Yes' if is_so else 'No'}, {with_article(a)} is "
            f"{'bigger' if is_so else 'smaller'} than {with_article(b)}."
        )
    return asked, answer, "I compare the two animals."


def larger_number(rng: random.Random, words: Words) -> Wish:
    a, b = rng.sample(range(1, 1000 if rng.random() < 0.5 else 100), 2)
    if rng.random() < 0.5:
        return (
            f"Which number is larger, {a} or {b}?",
            f"{mark(str(max(a, b)))} is larger.",
            "I compare.",
        )
    return (
        f"Which number is smaller, {a} or {b}?",
        f"{mark(str(min(a, b)))} is smaller.",
        "I compare.",
    )


def letter(rng: random.Random, words: Words) -> Wish:
    name, me = rng.sample(words.names, 2)
    event, day, thing = rng.choice(EVENTS), rng.choice(DAYS), rng.choice(words.things)
    about = rng.choice(
        (
            (f"to {name} about the {event}", f"The {event} is on {day}. I hope that you can come."),
            (
                f"to {name} about {with_article(thing)}",
                f"I have found {with_article(thing)}. Is it yours?",
            ),
            (
                f"to thank {name} for the {thing}",
                f"Thank you for the {thing}. I like it very much.",
            ),
            (
                f"to invite {name} for {day}",
                f"Would you like to visit me on {day}? We could eat {rng.choice(words.foods)}.",
            ),
            (
                f"to {name}, who is ill",
                "I am sorry that you are ill. I hope you will be well again soon.",
            ),
        )
    )
    asked = f"Write a short {rng.choice(('letter', 'message', 'note'))} {about[0]}."
    ending = rng.choice((f"Best wishes,\n{me}", f"See you soon,\n{me}", f"Your friend\n{me}"))
    return asked, f"Dear {mark(name)},\n\n{about[1]}\n\n{ending}", "I write a short text."


def advice(rng: random.Random, words: Words) -> Wish:
    skill = rng.choice(_SKILLS)
    asked = rng.choice(
        (
            f"How can I learn {skill}?",
            f"Give me some advice. I want to learn {skill}.",
            f"I want to learn {skill}. What should I do?",
        )
    )
    chosen = rng.sample(_ADVICE, rng.randrange(2, 4))
    return asked, " ".join(chosen), "I give some simple advice."


def opinion(rng: random.Random, words: Words) -> Wish:
    noun, text = rng.choice(_OPINIONS)
    asked = rng.choice(
        (f"What do you think about {noun}?", f"Tell me something about {noun}.",
         f"Why do people like {noun}?", f"Do you like {noun}?", f"What can you say about {noun}?")
    )  # fmt: skip
    lead = rng.choice(("", f"Many people like {noun}. ", "I am a program, but I can say this. "))
    return asked, lead + text, "I say something simple about it."


def choice(rng: random.Random, words: Words) -> Wish:
    noun, group = rng.choice(
        (("an animal", words.animals), ("a food", words.foods), ("a city", words.cities),
         ("a colour", tuple(c for c in COLOURS if c != "orange")), ("a name", words.names),
         ("a job", words.jobs))
    )  # fmt: skip
    right = rng.choice(group)
    others = rng.sample([t for t in words.things if t not in group], 2)
    row = [right, *others]
    rng.shuffle(row)
    asked = f"Which of these words is {noun}: {', '.join(row)}?"
    return asked, f"{_capital(mark(right))} is {noun}.", f"I look for {noun}."


def read(rng: random.Random, words: Words) -> Wish:
    """A question about the one sentence that was given."""
    name, thing = rng.choice(words.names), rng.choice(words.things)
    colour, spot, day = rng.choice(COLOURS), rng.choice(SPOTS), rng.choice(DAYS)
    text = f"On {day} {name} saw {with_article(colour)} {thing} {at_spot(spot)}."
    asked, answer = rng.choice(
        (
            ("Who saw it?", f"{mark(name)} saw it."),
            ("What did {n} see?", f"{name} saw {with_article(colour)} {mark(thing)}."),
            ("When was that?", f"That was on {mark(day)}."),
            (f"What colour was the {thing}?", f"The {thing} was {mark(colour)}."),
            (f"Where was the {thing}?", f"The {thing} was {mark(at_spot(spot))}."),
        )
    )
    question = asked.replace("{n}", name)
    return f"{text} {question}", answer, text


def person(rng: random.Random, words: Words) -> Wish:
    """A few sentences about an invented person."""
    name, job, city = rng.choice(words.names), rng.choice(words.jobs), rng.choice(words.cities)
    subject, object_, possessive = pronouns(name)
    animal, food = rng.choice(words.animals), rng.choice(words.foods)
    asked = rng.choice(
        (
            f"Invent a person called {name}.",
            f"Write a few sentences about {name}, {with_article(job)}.",
            f"Describe {with_article(job)} named {name}.",
        )
    )
    parts = [
        f"{name} is {with_article(job)} and lives in {city}.",
        f"{subject.capitalize()} likes {rng.choice(HOBBIES)}.",
        f"{possessive.capitalize()} {animal} is always with {object_}.",
        f"In the evening {subject} often cooks {food}.",
        f"Everyone says that {subject} is {rng.choice(('kind', 'clever', 'funny', 'patient'))}.",
    ]
    chosen = [parts[0], *rng.sample(parts[1:], rng.randrange(2, 4))]
    return asked, " ".join(chosen), f"I write about {name}."


def dialogue(rng: random.Random, words: Words) -> Wish:
    a, b = rng.sample(words.names, 2)
    thing, spot = rng.choice(words.things), rng.choice(SPOTS)
    lines = rng.choice(
        (
            (
                f"Have you seen my {thing}?",
                f"Yes, it is {at_spot(spot)}.",
                "Thank you very much!",
                "You are welcome.",
            ),
            (
                f"What are you doing on {rng.choice(DAYS)}?",
                f"I am going to {spot}.",
                "Can I come with you?",
                "Of course.",
            ),
            (
                f"I have bought {with_article(thing)}.",
                "What colour is it?",
                f"It is {rng.choice(COLOURS)}.",
                "That sounds nice.",
            ),
            (
                "Are you hungry?",
                "Yes, very much.",
                f"I have some {rng.choice(words.foods)}.",
                "Wonderful, let us eat.",
            ),
            (
                "You look sad. What is wrong?",
                f"I have lost my {thing}.",
                "I will help you to find it.",
                "That is very kind of you.",
            ),
        )
    )
    asked = rng.choice(
        (f"Write a short dialogue between {a} and {b}.", f"Write a talk of {a} and {b}.")
    )
    text = "\n".join(f"{who}: {line}" for who, line in zip((a, b, a, b), lines, strict=True))
    return asked, text, "I write a short dialogue."


def describe(rng: random.Random, words: Words) -> Wish:
    what, text = description(rng, words)
    asked = rng.choice(
        (
            f"Describe {what}.",
            f"Tell me something about {what}.",
            f"Write a few sentences about {what}.",
        )
    )
    return asked, text.strip(), "I describe it in a few sentences."


def sentences(rng: random.Random, words: Words) -> Wish:
    count = rng.randrange(1, 4)
    asked = f"Write {('one sentence', 'two sentences', 'three sentences')[count - 1]}."
    return (
        asked,
        " ".join(sentence(rng, words) for _ in range(count)),
        "I write what was asked for.",
    )


def sort_out(rng: random.Random, words: Words) -> Wish:
    """Which names or numbers of a list, joined again."""
    names = rng.sample(words.names, rng.randrange(2, 5))
    things = rng.sample(words.things, len(names))
    pairs = [f"{n} has {with_article(t)}" for n, t in zip(names, things, strict=True)]
    i = rng.randrange(len(names))
    text = joined(pairs) + "."
    if rng.random() < 0.5:
        return (
            f"{text} Who has the {things[i]}?",
            f"{mark(names[i])} has the {things[i]}.",
            pairs[i] + ".",
        )
    return (
        f"{text} What does {names[i]} have?",
        f"{names[i]} has {with_article(mark(things[i]), things[i])}.",
        pairs[i] + ".",
    )


def _capital(text: str) -> str:
    """The first letter as a capital, whether or not a mark stands before it."""
    i = next(i for i, c in enumerate(text) if c.isalpha())
    return text[:i] + text[i].upper() + text[i + 1 :]


WISHES: Final[tuple[Callable[[random.Random, Words], Wish], ...]] = (
    use_word, bigger, larger_number, letter, advice, opinion, opinion, choice, read, read, person,
    dialogue, describe, sentences, sort_out, sort_out,
)  # fmt: skip
