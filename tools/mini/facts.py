"""Plain facts about the world, as tables, and the questions that they answer.

``question`` draws one of them, in one of many phrasings. Knows no chat format.
"""

# ruff: noqa: E501  (a table reads best with an entry on a line)

from __future__ import annotations

import random
from typing import Final

from tools.mini.document import mark
from tools.mini.words import DAYS, MONTHS, NUMBER_WORDS, with_article


def _table(text: str) -> tuple[tuple[str, str], ...]:
    rows = [line.split("=") for line in text.replace("\n", "|").split("|") if "=" in line]
    return tuple((key.strip(), value.strip()) for key, value in rows)


CAPITALS: Final = _table(
    "France=Paris|Italy=Rome|Spain=Madrid|Germany=Berlin|Austria=Vienna|Norway=Oslo|Greece=Athens|"
    "Portugal=Lisbon|Ireland=Dublin|Poland=Warsaw|Egypt=Cairo|Japan=Tokyo|China=Beijing|"
    "Russia=Moscow|England=London|Sweden=Stockholm|Finland=Helsinki|Denmark=Copenhagen|"
    "Hungary=Budapest|Turkey=Ankara|Canada=Ottawa|Australia=Canberra|Brazil=Brasilia|Peru=Lima|"
    "Cuba=Havana|Kenya=Nairobi|India=New Delhi|Thailand=Bangkok|Iceland=Reykjavik|Scotland=Edinburgh"
)
OPPOSITES: Final = _table(
    "big=small|hot=cold|old=new|good=bad|fast=slow|high=low|long=short|hard=soft|light=dark|"
    "happy=sad|rich=poor|strong=weak|full=empty|open=closed|early=late|easy=difficult|wet=dry|"
    "near=far|up=down|left=right|day=night|young=old|clean=dirty|loud=quiet|thick=thin|wide=narrow|"
    "heavy=light|first=last|true=false|begin=end|love=hate|win=lose|buy=sell|come=go|inside=outside|"
    "above=below|before=after|always=never|friend=enemy|summer=winter"
)
PLURALS: Final = _table(
    "cat=cats|dog=dogs|box=boxes|child=children|mouse=mice|foot=feet|tooth=teeth|man=men|"
    "woman=women|leaf=leaves|knife=knives|city=cities|baby=babies|bus=buses|sheep=sheep|fish=fish|"
    "goose=geese|wolf=wolves|house=houses|tree=trees|story=stories|dish=dishes|hero=heroes|"
    "potato=potatoes|book=books|wife=wives"
)
YOUNG: Final = _table(
    "dog=puppy|cat=kitten|cow=calf|horse=foal|sheep=lamb|goat=kid|pig=piglet|chicken=chick|"
    "duck=duckling|lion=cub|bear=cub|deer=fawn|frog=tadpole|goose=gosling|swan=cygnet"
)
SOUNDS: Final = _table(
    "dog=barks|cat=meows|cow=moos|horse=neighs|sheep=bleats|duck=quacks|lion=roars|bee=buzzes|"
    "owl=hoots|wolf=howls|snake=hisses|pig=grunts|frog=croaks|bird=sings|mouse=squeaks"
)
COLOURS_OF: Final = _table(
    "grass=green|snow=white|the sky on a clear day=blue|a lemon=yellow|a ripe tomato=red|"
    "an orange=orange|coal=black|milk=white|a carrot=orange|a banana=yellow|blood=red|chocolate=brown|"
    "the sun at noon=yellow|an elephant=grey|a strawberry=red|a leaf in spring=green|the night sky=black|"
    "a flamingo=pink|a cucumber=green"
)
LEGS: Final = _table(
    "dog=four|cat=four|horse=four|spider=eight|bee=six|ant=six|bird=two|chicken=two|snake=no|"
    "fish=no|cow=four|person=two|butterfly=six|crab=ten|frog=four|octopus=no"
)
NUMBERS: Final = _table(
    "days are in a week=seven|months are in a year=twelve|seasons are in a year=four|"
    "hours are in a day=twenty-four|minutes are in an hour=sixty|seconds are in a minute=sixty|"
    "sides does a triangle have=three|sides does a square have=four|letters are in the alphabet=twenty-six|"
    "fingers does a hand have=five|wheels does a bicycle have=two|wheels does a car have=four|"
    "days are in a leap year=366|cents are in a dollar=one hundred|continents are there=seven|"
    "planets go around the sun=eight|eyes does a person have=two|legs does a table have=four"
)
PAST: Final = _table(
    "go=went|see=saw|eat=ate|run=ran|write=wrote|take=took|give=gave|find=found|make=made|come=came|"
    "sing=sang|swim=swam|drink=drank|buy=bought|think=thought|bring=brought|sleep=slept|walk=walked|"
    "play=played|know=knew|fly=flew|break=broke|speak=spoke|begin=began|drive=drove|teach=taught"
)
# "What is a bee?" -> "A bee is a small insect that makes honey."
MEANINGS: Final = _table(
    "bee=a small insect that makes honey|bridge=a road that goes over water|baker=a person who makes bread|"
    "library=a place where you can borrow books|river=a long stream of water that flows to the sea|"
    "mountain=a very high hill|island=land with water all around it|desert=a very dry place with much sand|"
    "teacher=a person who helps others to learn|doctor=a person who helps sick people|"
    "farmer=a person who grows food and keeps animals|clock=a thing that shows the time|"
    "umbrella=a thing that keeps you dry in the rain|key=a thing that opens a lock|"
    "hammer=a tool for hitting nails|owl=a bird that hunts at night|whale=a very large animal that lives in the sea|"
    "spider=a small animal with eight legs|penguin=a bird that cannot fly but swims well|"
    "camel=an animal that can live in the desert|frog=a small green animal that can jump and swim|"
    "snail=a slow animal with a shell|lake=a body of water with land around it|forest=a place with many trees|"
    "village=a place that is smaller than a town|kitchen=a room where people cook|"
    "school=a place where children learn|hospital=a place where sick people get help|"
    "museum=a place where you can see old or beautiful things|market=a place where people buy and sell things|"
    "map=a picture that shows where places are|dictionary=a book that explains words|"
    "calendar=a table of the days of a year|telescope=a tool for looking at things far away|"
    "thermometer=a tool that shows how warm it is|compass=a tool that shows where north is|"
    "computer=a machine that can store and work with data|camera=a machine that takes pictures|"
    "bicycle=a vehicle with two wheels|ship=a large boat|train=a long vehicle that runs on rails|"
    "star=a hot ball of gas that shines in the sky|planet=a large body that goes around a star|"
    "volcano=a mountain that can throw out hot rock|cloud=a mass of tiny drops of water in the sky|"
    "rainbow=an arc of colours that you see when the sun shines in the rain|"
    "seed=a small thing from which a plant grows|leaf=a flat green part of a plant|"
    "root=the part of a plant that is in the ground|flower=the part of a plant that is often colourful|"
    "story=a text that tells what happened to somebody|poem=a short text with rhythm and often with rhymes|"
    "song=a text that is sung|letter=a text that you write to somebody|friend=a person whom you like and trust|"
    "neighbour=a person who lives next to you|brother=a boy or man with the same parents|"
    "grandmother=the mother of your mother or father|king=a man who rules a country|"
    "triangle=a shape with three sides|square=a shape with four equal sides|circle=a round shape"
)
# Single questions; several phrasings stand before the answer, with ; between.
_SINGLE: Final = _table(
    "Why is the sky blue?;Why does the sky look blue?=The sky is blue because the air scatters blue light more than red light.\n"
    "Why do we sleep?;Why do people need sleep?=We sleep because the body and the brain need rest.\n"
    "Why does it rain?;Where does rain come from?=It rains when the small drops of water in the clouds become too heavy and fall down.\n"
    "What is water made of?=Water is made of hydrogen and oxygen.\n"
    "What is ice?=Ice is frozen water.\n"
    "What is steam?=Steam is water that has become a gas.\n"
    "When does water boil?;At what temperature does water boil?=Water boils at 100 degrees Celsius.\n"
    "When does water freeze?;At what temperature does water freeze?=Water freezes at 0 degrees Celsius.\n"
    "Which planet do we live on?;What is our planet called?=We live on the planet Earth.\n"
    "What is the largest animal?;Which animal is the biggest?=The blue whale is the largest animal.\n"
    "What is the tallest animal?;Which animal has the longest neck?=The giraffe is the tallest animal and has the longest neck.\n"
    "Which animal is the fastest on land?=The cheetah is the fastest animal on land.\n"
    "What do cows eat?=Cows eat grass.\n"
    "What do bees make?=Bees make honey.\n"
    "What do plants need?;What does a plant need to grow?=Plants need light, water and air.\n"
    "What is the largest planet?=Jupiter is the largest planet of the solar system.\n"
    "Which season comes after winter?=Spring comes after winter.\n"
    "Which season comes after spring?=Summer comes after spring.\n"
    "Which season comes after summer?=Autumn comes after summer.\n"
    "Which season comes after autumn?=Winter comes after autumn.\n"
    "Which season is the coldest?;When is it coldest?=Winter is the coldest season.\n"
    "Which season is the warmest?=Summer is the warmest season.\n"
    "What are the four seasons?;Name the seasons.=The four seasons are spring, summer, autumn and winter.\n"
    "What are the days of the week?;Name the days of the week.=The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.\n"
    "Name the months.;What are the months of the year?=The months are January, February, March, April, May, June, July, August, September, October, November and December.\n"
    "Where does the sun rise?=The sun rises in the east.\n"
    "Where does the sun set?=The sun sets in the west.\n"
    "What gives us light in the day?=The sun gives us light in the day.\n"
    "What can I see in the sky at night?=At night you can see the moon and the stars.\n"
    "Where do fish live?=Fish live in water.\n"
    "Where do polar bears live?=Polar bears live in the Arctic.\n"
    "What is bread made of?=Bread is made of flour, water and salt.\n"
    "What is cheese made of?=Cheese is made of milk.\n"
    "What is paper made of?=Paper is made of wood.\n"
    "What is glass made of?=Glass is made of sand.\n"
    "What do we use to see?=We use our eyes to see.\n"
    "What do we use to hear?=We use our ears to hear.\n"
    "Which metal is used for coins and jewels and is yellow?=Gold is a yellow metal that is used for coins and jewels.\n"
    "Who wrote Romeo and Juliet?=William Shakespeare wrote Romeo and Juliet.\n"
    "What is the longest river in Africa?=The Nile is the longest river in Africa.\n"
    "What is the highest mountain?=Mount Everest is the highest mountain in the world.\n"
    "What is the biggest ocean?=The Pacific Ocean is the biggest ocean.\n"
    "Is the sun a star?=Yes, the sun is a star.\n"
    "Is a whale a fish?=No, a whale is a mammal that lives in the sea.\n"
    "Can penguins fly?=No, penguins cannot fly, but they swim very well.\n"
    "Is the moon bigger than the Earth?=No, the moon is smaller than the Earth.\n"
    "Can a stone swim?=No, a stone sinks in water.\n"
    "Do plants need water?=Yes, plants need water.\n"
    "Is ice warm?=No, ice is cold.\n"
    "Is a tomato blue?=No, a ripe tomato is red."
)


def question(rng: random.Random) -> tuple[str, str]:
    """A question and its answer in one sentence."""
    return rng.choice(_MAKERS)(rng)


def _capital(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(CAPITALS)
    if rng.random() < 0.2:
        return (
            f"Of which country is {city} the capital?",
            f"{city} is the capital of {mark(country)}.",
        )
    asked = rng.choice(
        (
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Tell me the capital of {country}.",
            f"What's the capital city of {country}?",
        )
    )
    return asked, f"The capital of {country} is {mark(city)}."


def _opposite(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(OPPOSITES)
    asked = rng.choice(
        (f"What is the opposite of {a}?", f"Tell me the opposite of {a}.", f"Opposite of {a}?")
    )
    return asked, f"The opposite of {a} is {mark(b)}."


def _plural(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(PLURALS)
    asked = rng.choice((f"What is the plural of {a}?", f"One {a}, two what?", f"Plural of {a}?"))
    return asked, f"The plural of {a} is {mark(b)}."


def _young(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(YOUNG)
    asked = rng.choice((f"What is a young {a} called?", f"How do you call a baby {a}?"))
    return asked, f"A young {a} is called a {mark(b)}."


def _sound(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(SOUNDS)
    asked = rng.choice(
        (
            f"What sound does {with_article(a)} make?",
            f"What does {with_article(a)} do to make a sound?",
        )
    )
    return asked, f"{with_article(a).capitalize()} {mark(b)}."


def _colour(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(COLOURS_OF)
    asked = rng.choice(
        (f"What colour is {a}?", f"Which colour is {a}?", f"What is the color of {a}?")
    )
    return asked, f"{a[0].upper()}{a[1:]} is {mark(b)}."


def _legs(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(LEGS)
    return (
        f"How many legs does {with_article(a)} have?",
        f"{with_article(a).capitalize()} has {mark(b)} legs.",
    )


def _number(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(NUMBERS)
    if " does " in a:
        noun, _, owner = a.partition(" does ")
        owner = owner.removesuffix(" have")
        return f"How many {a}?", f"{owner[0].upper()}{owner[1:]} has {mark(b)} {noun}."
    noun, _, rest = a.partition(" ")
    if a.startswith("planets"):
        return f"How many {a}?", f"{mark(b.capitalize())} planets go around the sun."
    rest = rest.removeprefix("are ")
    if rest == "there":
        return f"How many {a}?", f"There are {mark(b)} {noun}."
    return f"How many {a}?", f"There are {mark(b)} {noun} {rest}."


def _past(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(PAST)
    asked = rng.choice((f'What is the past form of "{a}"?', f"What is the past tense of {a}?"))
    return asked, f"The past tense of {a} is {mark(b)}."


def _meaning(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(MEANINGS)
    thing = with_article(a)
    asked = rng.choice(
        (
            f"What is {thing}?", f"Can you tell me what {thing} is?", f"Explain what {thing} is.",
            f"What does the word {a} mean?", f"What's {thing}?",
        )
    )  # fmt: skip
    return asked, f"{thing[0].upper()}{thing[1:]} is {b}."


def _reverse_meaning(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(MEANINGS)
    return f"What do you call {b}?", f"That is {mark(with_article(a))}."


def _next_in_row(rng: random.Random) -> tuple[str, str]:
    row = rng.choice((DAYS, MONTHS))
    i = rng.randrange(len(row))
    noun = "day" if row is DAYS else "month"
    if rng.random() < 0.5:
        b = row[(i + 1) % len(row)]
        return f"Which {noun} comes after {row[i]}?", f"{mark(b)} comes after {row[i]}."
    b = row[(i - 1) % len(row)]
    return f"Which {noun} comes before {row[i]}?", f"{mark(b)} comes before {row[i]}."


def _number_word(rng: random.Random) -> tuple[str, str]:
    i = rng.randrange(len(NUMBER_WORDS))
    if rng.random() < 0.5:
        return f"How do you write {i} as a word?", f"{i} is written {mark(NUMBER_WORDS[i])}."
    return (
        f"Which number is {NUMBER_WORDS[i]}?",
        f"{NUMBER_WORDS[i].capitalize()} is {mark(str(i))}.",
    )


def _single(rng: random.Random) -> tuple[str, str]:
    questions, answer = rng.choice(_SINGLE)
    return rng.choice(questions.split(";")), answer


_MAKERS: Final = (
    _capital, _opposite, _plural, _young, _sound, _colour, _legs, _number, _past, _meaning,
    _meaning, _meaning, _reverse_meaning, _next_in_row, _number_word, _single, _single, _single,
)  # fmt: skip
