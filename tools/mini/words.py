"""The words that the generated documents are made of.

Every eighth word of the long lists is kept out of the facts of training: it stands in
stories, talks and lists, but never in a fact that is asked for, so that the evaluation can
ask for words that were never asked for. Knows no task and no format.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import Final

_NAMES: Final = tuple(
    (
        "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olive Paul Rosa "
        "Sam Tina Victor Will Zoe Lily Max Nora Oscar Ruth Simon Tom Ada Alice Bob Carl Diana "
        "Eric Fiona George Helen Ivan Julia Karl Laura Mark Nina Otto Peter Rita Steve Thea Uma "
        "Vera Walter Yara Adam Bella Chris Dora Elias Frank Gina Hugo Iris Jonas Lena Martin Nick "
        "Olga Philip Quinn Robert Sara Tim Ursula Vincent Wendy Arthur Betty Daniel Edith Fred "
        "Gloria Harry Irene James Joan Kevin Linda Lucas Maria Nathan Pam Ralph Susan Theo Amy "
        "Bruno Cora Dean Ella Finn Hanna Jane Kim Lars Marta Nils Omar Petra Rick Stella Toby"
    ).split()
)
_THINGS: Final = tuple(
    (
        "box key bag hat coat book lamp clock chair table door window cup plate bowl spoon knife "
        "bottle basket letter pen ball kite boat car bicycle train truck drum guitar piano phone "
        "camera radio map ring coin stone shell feather candle mirror pillow blanket shoe boot "
        "glove scarf belt umbrella brush comb towel soap bucket ladder hammer nail rope saw shovel "
        "tent wagon wheel bell flag mask crown sword shield robot puzzle doll balloon ticket "
        "notebook pencil ruler magnet battery suitcase wallet jar pot pan kettle oven desk shelf "
        "drawer cabinet chest barrel vase statue painting carpet curtain folder parcel locker gate "
        "safe cart fan bench sofa stool tray jug mug fork whistle trumpet violin flute engine"
    ).split()
)
_ADJECTIVES: Final = tuple(
    (
        "small big old new round square heavy light wooden golden silver broken clean dirty tall "
        "short long wide narrow soft hard smooth rough shiny dusty empty full cheap strange plain "
        "pretty ugly warm cold wet dry thick thin flat deep bright dark quiet loud rare common "
        "fancy simple strong weak fresh rusty striped spotted painted folded hidden open locked "
        "famous lost tiny huge iron copper paper glass stone leather"
    ).split()
)
_ANIMALS: Final = tuple(
    (
        "dog cat horse cow bird fish bear fox rabbit mouse lion tiger elephant duck goose frog "
        "snake owl eagle whale dolphin bee ant spider butterfly sheep goat pig chicken wolf deer "
        "squirrel turtle monkey penguin shark crab snail hedgehog camel parrot swan donkey hamster "
        "beaver otter seal lizard zebra giraffe"
    ).split()
)
_FOODS: Final = tuple(
    (
        "bread cheese soup rice apples oranges bananas cake eggs honey pasta pizza salad fish "
        "chicken potatoes carrots tomatoes beans nuts grapes cherries pears plums berries yogurt "
        "chocolate cookies pancakes noodles mushrooms onions corn peas lemons melons peaches toast "
        "butter jam"
    ).split()
)
_CITIES: Final = tuple(
    (
        "Paris London Rome Berlin Madrid Vienna Oslo Athens Lisbon Dublin Prague Warsaw Cairo "
        "Tokyo Delhi Sydney Toronto Chicago Boston Dallas Denver Miami Seattle Lima Quito Havana "
        "Nairobi Lagos Tunis Dakar Beijing Seoul Bangkok Hanoi Manila Jakarta Moscow Kyiv Riga "
        "Tallinn Helsinki Stockholm Copenhagen Hamburg Munich Zurich Geneva Milan Naples Venice "
        "Lyon Brussels Amsterdam Budapest Belgrade Sofia Ankara Baghdad Tehran Kabul"
    ).split()
)
_JOBS: Final = tuple(
    (
        "teacher doctor farmer baker driver painter singer cook nurse pilot writer builder sailor "
        "dentist judge lawyer waiter plumber gardener fisherman tailor carpenter soldier dancer "
        "actor engineer scientist librarian photographer mechanic"
    ).split()
)
_SECRETS: Final = tuple(
    (
        "lantern harbor meadow thunder pepper velvet marble canyon whisper rocket anchor "
        "blossom cactus dragon ember falcon garlic hazel island jungle kernel ladder magnet "
        "nectar orchid pebble quartz ribbon saddle timber umbrella valley walnut yellow zipper "
        "acorn bamboo cotton desert elbow forest glacier hammer insect jacket kitten lemon "
        "monkey napkin olive pencil quiver river sugar tunnel unicorn violin window amber "
        "button candle dolphin eagle feather ginger helmet iceberg jelly kayak lizard mango "
        "nutmeg oyster pumpkin rabbit silver tiger vanilla wizard basket copper daisy engine "
        "flame guitar honey ivory jewel lotus mirror needle ocean planet raven spider temple "
        "cherry breeze castle comet"
    ).split()
)
_PETS: Final = tuple(
    (
        "Rex Bella Milo Luna Coco Max Daisy Rocky Lucky Ruby Teddy Molly Oscar Rosie Charlie Lola "
        "Buddy Nala Simba Pepper Ginger Smoky Snowy Spot Tiger Shadow Fluffy Biscuit Cookie Bruno "
        "Pablo Felix Minnie Pip Waffle Toffee Maple Hazel Olive Peanut"
    ).split()
)
_LAST_NAMES: Final = tuple(
    (
        "Miller Smith Brown Baker Green Fisher Carter Young King Wright Hill Scott Adams Nelson "
        "Parker Evans Turner Collins Stewart Morris Cook Bell Murphy Cooper Ward Gray Price Wood "
        "Ross Long Foster Hunt Stone Fox Lane Rivers Marsh Bird Field Winter"
    ).split()
)
_SYLLABLES: Final = tuple(
    (
        "ba be bi bo bu da de di do du fa fe fi fo ga go gu ka ke ki ko ku la le li lo lu ma me mi "
        "mo mu na ne ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo "
        "za ze zi zo wa we wo"
    ).split()
)

COLOURS: Final = tuple("red blue green yellow white black brown orange purple pink grey".split())
DAYS: Final = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS: Final = tuple(
    (
        "January February March April May June July August September October November December"
    ).split()
)
NUMBER_WORDS: Final = tuple(
    (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen twenty"
    ).split()
)
PREPOSITIONS: Final = ("under", "behind", "next to", "in front of", "on top of", "near", "below")
FEELINGS: Final = tuple(
    "happy sad tired brave afraid curious lonely proud angry hungry kind shy calm excited".split()
)
EVENTS: Final = (
    "meeting party lesson concert dinner trip match test interview wedding picnic show"
).split()
FEMALE: Final = frozenset(
    (
        "Anna Clara Emma Grace Ida Kate Mia Olive Rosa Tina Zoe Lily Nora Ruth Ada Alice Diana "
        "Fiona Helen Julia Laura Nina Rita Thea Uma Vera Yara Bella Dora Gina Iris Lena Olga Sara "
        "Ursula Wendy Betty Edith Gloria Irene Joan Linda Maria Pam Susan Amy Cora Ella Hanna Jane "
        "Kim Marta Petra Stella"
    ).split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The lists a document draws from."""

    names: tuple[str, ...]
    last_names: tuple[str, ...]
    things: tuple[str, ...]
    adjectives: tuple[str, ...]
    animals: tuple[str, ...]
    foods: tuple[str, ...]
    cities: tuple[str, ...]
    jobs: tuple[str, ...]
    secrets: tuple[str, ...]
    pets: tuple[str, ...]


class Part(Enum):
    """Which words of the lists."""

    TRAINED = "trained"  # may be asked for in training
    HELD_OUT = "held out"
    ALL = "all"


def words(part: Part) -> Words:
    """The lists, or their part that facts of training are made of, or the rest of them."""

    def chosen(row: tuple[str, ...]) -> tuple[str, ...]:
        if part is Part.ALL:
            return row
        return tuple(w for i, w in enumerate(row) if (i % 8 == 7) is (part is Part.HELD_OUT))

    return Words(
        names=chosen(_NAMES),
        last_names=chosen(_LAST_NAMES),
        things=chosen(_THINGS),
        adjectives=chosen(_ADJECTIVES),
        animals=chosen(_ANIMALS),
        foods=chosen(_FOODS),
        cities=chosen(_CITIES),
        jobs=chosen(_JOBS),
        secrets=chosen(_SECRETS),
        pets=chosen(_PETS),
    )


def made_up(rng: random.Random) -> str:
    """A word that nobody has seen, of two or three syllables."""
    return "".join(rng.choices(_SYLLABLES, k=rng.choice((2, 2, 3))))


def digits(rng: random.Random, count: int) -> str:
    """A number of ``count`` digits without a zero in front."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def with_article(text: str, noun: str = "") -> str:
    """``text`` after "a" or "an", as ``noun`` (or the text itself) needs it.

    >>> with_article("apple"), with_article("box"), with_article("unicorn")
    ('an apple', 'a box', 'a unicorn')
    """
    spoken = noun or text
    is_vowel = spoken[0] in "aeiou" and not spoken.startswith(("uni", "use"))
    return ("an " if is_vowel else "a ") + text


def pronouns(name: str) -> tuple[str, str, str]:
    """Subject, object and possessive form."""
    return ("she", "her", "her") if name in FEMALE else ("he", "him", "his")


def joined(items: list[str]) -> str:
    """
    >>> joined(["red", "blue", "green"]), joined(["red"])
    ('red, blue and green', 'red')
    """
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]
