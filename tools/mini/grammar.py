"""Stories, descriptions and single sentences from a grammar of simple English.

Each function makes grammatical text with characters that keep their names and
pronouns. Knows no chat format.
"""

from __future__ import annotations

import random
from typing import Final

from tools.mini.plots import PLOTS
from tools.mini.words import COLOURS, FEMALE, Words, joined, pronouns, with_article

PLACES: Final = (
    "in a small village|in a big city|near the forest|by the sea|in an old house|on a farm|"
    "in the mountains|by a quiet lake|on an island|at the edge of the town|next to the river|"
    "in a little house with a garden|near the old bridge|above a bakery|behind the school"
).split("|")
SPOTS: Final = (
    "the garden|the park|the market|the kitchen|the forest|the beach|the school|the library|"
    "the station|the river|the old tower|the hill|the yard|the field|the bakery|the museum|"
    "the lake|the old bridge|the barn|the castle|the cellar|the town hall|the workshop"
).split("|")
_AT: Final = {
    "the market": "at", "the beach": "on", "the station": "at", "the river": "at",
    "the hill": "on", "the field": "in", "the old bridge": "on", "the lake": "at",
}  # fmt: skip


def at_spot(spot: str) -> str:
    """
    >>> at_spot("the hill"), at_spot("the garden")
    ('on the hill', 'in the garden')
    """
    return f"{_AT.get(spot, 'in')} {spot}"


WEATHER: Final = (
    "The sun was shining|It was raining|It was a cold morning|The wind was strong|"
    "Snow was falling|It was a warm evening|The sky was grey|It was a bright day|"
    "The fog was thick|It was very quiet"
).split("|")
TIMES: Final = (
    "One day|One morning|One evening|Last week|On a Sunday|In the spring|One winter day|"
    "After school|Before lunch|Early in the morning|One summer afternoon|Late at night"
).split("|")
KINDS: Final = (
    "small brave kind clever shy young quiet curious cheerful lazy careful hungry friendly lonely "
    "old strong tiny proud patient"
).split()
HOBBIES: Final = (
    "to read books|to draw pictures|to sing songs|to climb trees|to play in the snow|to swim|"
    "to look at the stars|to bake bread|to collect stones|to run fast|to help others|"
    "to tell stories|to ride a bicycle|to listen to music|to walk in the rain|to plant flowers"
).split("|")
_ENDINGS: Final = (
    "From that day on they were best friends.",
    "{n} never forgot that day.",
    "{n} went home and told everyone about it.",
    "That night {n} slept very well.",
    "{n} learned that it is good to ask for help.",
    "They had tea and cake and were happy.",
    "And that was the end of a good day.",
    "{n} smiled all the way home.",
    "{n} learned that friends are more important than things.",
    "The next day they met again {i}.",
    "{n} was tired, but very happy.",
    "Since then {n} has always been kind to everyone.",
)
_TALK: Final = (
    '"Can you help me?" asked {n}. "Of course," said {h}.',
    '"Do not worry," said {h}. "Everything will be good."',
    '"I have an idea," said {h}.',
    '"What is wrong?" asked {h}. {n} told {h} everything.',
    '"You are very kind," said {n} to {h}.',
    '"Wait a little," said {h}. "It will be all right."',
    '{n} thought about it. "I will not give up," {s} said.',
)
_AGAIN: Final = ("The next day", "A week later", "Some time later", "In the autumn", "Then one day")


def story(rng: random.Random, words: Words) -> str:
    """A whole story of five to nine sentences."""
    pick = rng.choice
    name = pick(words.names)
    child = "girl" if name in FEMALE else "boy"
    kind = pick((pick(words.animals), child, pick(words.jobs)))
    opening = _opening(rng, name, with_article(f"{pick(KINDS)} {kind}"))
    weather = pick(("", "", f"{pick(WEATHER)}. "))
    parts = [opening + weather + _episode(rng, words, name, f"{pick(TIMES)}, ")]
    if rng.random() < 0.3:
        parts.append(_episode(rng, words, name, f"{pick(_AGAIN)}, "))
    ending = _filled(rng, words, name, pick(_ENDINGS))
    return _capitals(pick((" ", " ", "\n\n")).join(parts) + " " + ending)


def _opening(rng: random.Random, name: str, who: str) -> str:
    pick = rng.choice
    subject = pronouns(name)[0].capitalize()
    return pick(
        (
            f"Once upon a time there was {who} named {name}. {subject} lived {pick(PLACES)}. ",
            f"{name} was {who}. {subject} lived {pick(PLACES)} and liked {pick(HOBBIES)}. ",
            f"There was once {who} whose name was {name}. {name} liked {pick(HOBBIES)}. ",
            f"{name} was {who} who lived {pick(PLACES)}. ",
            f"This is the story of {name}, {who} who liked {pick(HOBBIES)}. ",
            f"{name} lived {pick(PLACES)}. {subject} was {who} and liked {pick(HOBBIES)}. ",
        )
    )


def _episode(rng: random.Random, words: Words, name: str, start: str) -> str:
    problem, middle, solution = (rng.choice(part.split("|")) for part in rng.choice(PLOTS))
    talk = rng.choice(("", "", rng.choice(_TALK) + " "))
    return _filled(rng, words, name, f"{start}{problem} {middle} {talk}{solution}")


def _filled(rng: random.Random, words: Words, name: str, text: str) -> str:
    pick = rng.choice
    adjective, spot = pick(words.adjectives), pick(SPOTS)
    helper = pick((f"the {pick(words.animals)}", pick(words.names), f"the {pick(words.jobs)}"))
    if helper == name:
        helper = "an old man"
    subject, object_, possessive = pronouns(name)
    return text.format(
        n=name, s=subject, S=subject.capitalize(), o=object_, p=possessive, h=helper,
        t=pick(words.things), a=adjective, at=with_article(adjective), x=spot, i=at_spot(spot),
    )  # fmt: skip


def _capitals(text: str) -> str:
    """A capital letter after each end of a sentence ("the dog" as a helper may begin one)."""
    for end in (". ", "! ", "? ", '." ', '!" ', '?" '):
        text = text.replace(end + "the ", end + "The ").replace(end + "an old", end + "An old")
    return text


def sentence(rng: random.Random, words: Words) -> str:
    """One sentence that has no fact that anybody would ask for."""
    pick = rng.choice
    a, b = pick(words.animals), pick(words.animals)
    thing, food = pick(words.things), pick(words.foods)
    return pick(
        (
            f"{pick(WEATHER)}, and nobody was outside.",
            f"The {a} and the {b} played {at_spot(pick(SPOTS))}.",
            f"A {pick(KINDS)} {a} walked to {pick(SPOTS)}.",
            f"People came to {pick(SPOTS)} and talked about the weather.",
            f"Nobody knew who had left the {thing} {at_spot(pick(SPOTS))}.",
            f"It takes some time to make good {food}.",
            f"In the evening everyone ate {food}.",
            f"The children went to {pick(SPOTS)} and came back late.",
            f"A {pick(COLOURS)} {thing} stood {at_spot(pick(SPOTS))} for many years.",
            f"Some people like {pick(HOBBIES)}, and others like {pick(HOBBIES)}.",
            f"The {a} slept all day and woke up in the night.",
            f"The {pick(words.jobs)} opened the door and said good morning.",
            f"Every {thing} has a story, said the old {pick(words.jobs)}.",
            f"There was a small shop near {pick(SPOTS)}.",
            f"The way from {pick(SPOTS)} to {pick(SPOTS)} is not long.",
            f"They waited for a long time, but the {pick(words.jobs)} did not come.",
            f"The {a} was {pick(KINDS)}, and the {b} was {pick(KINDS)}.",
            f"Music came from {pick(SPOTS)}, and everyone listened.",
        )
    )


def description(rng: random.Random, words: Words) -> tuple[str, str]:
    """(what is described, three or four sentences about it)."""
    pick = rng.choice
    thing, adjective, colour = pick(words.things), pick(words.adjectives), pick(COLOURS)
    if rng.random() < 0.5:
        text = (
            f"The {adjective} {thing} is {colour}. "
            f"{pick(('It stands', 'You can see it', 'It is kept'))} {at_spot(pick(SPOTS))}. "
            f"{pick((f'A {pick(words.jobs)} uses it every day', 'Nobody has used it for years', 'Children like to look at it', 'It was a present from a friend'))}. "  # noqa: E501
            f"{pick(('It is not worth much, but people like it', 'It is very useful', 'It makes people smile', 'Be careful with it'))}."  # noqa: E501
        )
        return f"{with_article(adjective)} {thing}", text
    spot = pick(SPOTS)
    animals = joined(
        [f"a {a}" if a[0] not in "aeiou" else f"an {a}" for a in rng.sample(words.animals, 2)]
    )
    text = (
        f"{spot.capitalize()} is a {pick(('quiet', 'busy', 'beautiful', 'pleasant'))} place. "
        f"There is {with_article(adjective)} {thing} in the middle. "
        f"You can often see {animals} there. "
        f"{pick(('In the evening it becomes very quiet', 'In summer many people come', 'The air is fresh and clean', 'Children like to play there'))}."  # noqa: E501
    )
    return spot, text
