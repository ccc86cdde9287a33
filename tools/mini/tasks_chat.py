"""Talks in simple English: greetings, who it is, plain questions, stories, small wishes.

Knows no tokenizer; the format of the chat is ``chat_format``'s.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from tools.mini import facts as world
from tools.mini.chat_format import BOS, EOS, Chat, Turn, render
from tools.mini.document import ANSWER, PROSE, Document, mark
from tools.mini.grammar import story
from tools.mini.room import Room
from tools.mini.wishes import WISHES
from tools.mini.words import COLOURS, FEELINGS, joined, with_article

_SYSTEMS: Final = (
    "You are a helpful assistant.", "Be brief.", "You are a friendly assistant.",
    "Answer in simple English.", "You are Headwater's small demonstration model.",
    "Answer politely.", "You help people.", "Keep your answers short.",
)  # fmt: skip
_HELLOS: Final = (
    "Hello", "Hi", "Hello!", "Hi there!", "Good morning!", "Good evening!", "Hey", "Good day.",
    "Hello there.",
)  # fmt: skip
_HELLO_ANSWERS: Final = (
    "Hello! How can I help you?", "Hello! What can I do for you?", "Hi! How can I help you today?",
    "Hello! It is nice to meet you.", "Hi there! What would you like to talk about?",
)  # fmt: skip
_TALK: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    (
        (
            "Who are you?",
            "What are you?",
            "Tell me who you are.",
            "What is your name?",
            "Please introduce yourself.",
            "Which model is this?",
            "Are you ChatGPT?",
            "Who am I talking to?",
        ),
        (
            "I am Headwater's small demonstration model. I am very small and often make mistakes.",
            "I am Headwater's small demonstration model. I know little, and I make mistakes.",
            "I am a small language model that comes with Headwater. I can be wrong.",
        ),
    ),
    (
        ("Are you a human?", "Are you a person?", "Are you real?", "Are you a robot?"),
        (
            "No, I am a computer program. I am a small language model.",
            "No, I am a small language model that runs on a computer.",
        ),
    ),
    (
        (
            "What can you do?",
            "What can you help me with?",
            "How can you help me?",
            "What are you good at?",
        ),
        (
            "I answer simple questions, tell short stories, remember what you say and count.",
            "I can chat in simple English, find facts in a text, tell small stories and use tools.",
        ),
    ),
    (
        ("Who made you?", "Who built you?", "Where do you come from?", "Who created you?"),
        (
            "I was made for Headwater, to show how it serves a model.",
            "The people who write Headwater trained me on two processor cores.",
        ),
    ),
    (
        (
            "Do you make mistakes?",
            "Can I trust you?",
            "Are you always right?",
            "Are your answers correct?",
        ),
        (
            "Yes, I make mistakes. I am a very small model, so please check what I say.",
            "I am often wrong, because I am small. Please check important answers.",
        ),
    ),
    (
        ("How big are you?", "How many parameters do you have?", "Are you a large model?"),
        (
            "I am very small. I have about ten million parameters.",
            "I have about ten million parameters. That is very little for a language model.",
        ),
    ),
    (
        ("How are you?", "How are you today?", "Are you well?", "How do you do?"),
        ("I am fine, thank you. How are you?", "I am well, thank you. What can I do for you?"),
    ),
    (
        ("Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot."),
        (
            "You are welcome.",
            "You are welcome! Is there anything else?",
            "I am glad that I could help.",
        ),
    ),
    (
        ("Goodbye.", "Bye!", "See you later.", "Good night.", "I have to go now."),
        ("Goodbye! Have a nice day.", "Goodbye! It was nice to talk to you.", "See you soon!"),
    ),
    (
        ("I am bored.", "What should I do today?", "I do not know what to do."),
        (
            "You could read a book, go for a walk or call a friend.",
            "How about a short walk? Or I can tell you a story.",
        ),
    ),
    (
        ("I am hungry.", "What should I eat?"),
        (
            "You could eat some bread and cheese, or cook a warm soup.",
            "How about an apple or some soup?",
        ),
    ),
    (
        ("I cannot sleep.", "How can I sleep better?"),
        (
            "Try to read a quiet book and drink some warm milk.",
            "A dark and quiet room helps. Good night!",
        ),
    ),
    (
        ("What is your favourite colour?", "Which colour do you like?"),
        ("I am a program, so I have no favourite colour. Many people like blue.",),
    ),
    (("Do you have feelings?", "Can you feel?"), ("No, I am a program and I have no feelings.",)),
    (
        (
            "What is the weather like?",
            "Will it rain tomorrow?",
            "What time is it?",
            "What day is it today?",
            "Who won the game yesterday?",
            "What is in the news?",
            "What is the price of gold today?",
        ),
        (
            "I am sorry, I cannot know that. I have no connection to the world.",
            "I do not know that. I only know what I learned and what you tell me.",
        ),
    ),
    (
        (
            "What am I thinking?",
            "Where do I live?",
            "What did I eat today?",
            "What is in my pocket?",
        ),
        (
            "I cannot know that, because you have not told me.",
            "I do not know. You have not told me that.",
        ),
    ),
    (
        ("Can you open the window?", "Please cook dinner for me.", "Can you drive my car?"),
        ("I am sorry, I cannot do that. I can only write text.",),
    ),
    (
        ("asdf", "...", "blah blah", "qwerty", "???"),
        ("I am sorry, I do not understand. Can you say it in other words?",),
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
        (
            "Why did the book go to the doctor? It had a broken back.",
            "What has four legs and cannot walk? A table.",
            "Why is the sea so friendly? It always waves.",
        ),
    ),
)
_FEELING_ANSWERS: Final = {
    "happy": "That is nice to hear! What makes you happy?",
    "sad": "I am sorry to hear that. Do you want to talk about it?",
    "tired": "Then you should rest a little.",
    "brave": "That is great. It is good to be brave.",
    "afraid": "That is all right. Everyone is afraid sometimes.",
    "curious": "That is good! What would you like to know?",
    "lonely": "I am sorry. Maybe you can call a friend. I can talk with you too.",
    "proud": "You can be proud! What did you do?",
    "angry": "I am sorry. Take a deep breath. What happened?",
    "hungry": "Then you should eat something.",
    "kind": "That is lovely. Kind people make the world better.",
    "shy": "That is all right. You can take your time.",
    "calm": "That is good. It is nice to be calm.",
    "excited": "How nice! What are you excited about?",
}


def _exchange(rng: random.Random, room: Room) -> list[Turn]:
    """One question of any kind and its answer."""
    how = rng.random()
    if how > 0.62:
        return _pair(*rng.choice(WISHES)(rng, room.words))
    how /= 0.62
    if how < 0.42:
        question, answer = world.question(rng)
        thought = rng.choice(
            ("This is a simple question.", "I know this.", "I give a short answer.")
        )
    elif how < 0.65:
        questions, answers = rng.choice(_TALK)
        question, answer = rng.choice(questions), rng.choice(answers)
        thought = "I should answer honestly and briefly."
    elif how < 0.72:
        feeling = rng.choice(FEELINGS)
        question = rng.choice(
            (f"I am {feeling}.", f"I feel {feeling} today.", f"I am so {feeling}!")
        )
        answer, thought = _FEELING_ANSWERS[feeling], "I should be friendly."
    elif how < 0.86:
        question, answer = _list(rng, room)
        thought = "I make a list."
    else:
        question, answer = _rewrite(rng, room)
        thought = "I change the text as asked."
    return _pair(question, answer, thought)


def _pair(question: str, answer: str, thought: str, weight: float = 0.12) -> list[Turn]:
    return [
        Turn(role="user", text=question, weight=weight),
        Turn(role="assistant", text=answer, thought=thought),
    ]


def _list(rng: random.Random, room: Room) -> tuple[str, str]:
    noun, items = rng.choice(
        (
            ("animals", room.words.animals), ("colours", COLOURS), ("foods", room.words.foods),
            ("cities", room.words.cities), ("jobs", room.words.jobs), ("names", room.words.names),
            ("things in a house", room.words.things),
        )
    )  # fmt: skip
    count = rng.randrange(2, min(6, len(items)) + 1)
    number = ("two", "three", "four", "five", "six")[count - 2]
    chosen = rng.sample(items, count)
    asked = rng.choice((f"Name {number} {noun}.", f"Give me a list of {number} {noun}.",
                        f"Can you name {number} {noun}?", f"List {count} {noun}."))  # fmt: skip
    if "ist" in asked:
        return asked, "\n".join(f"{i}. {item}" for i, item in enumerate(chosen, 1))
    return asked, f"{joined(chosen)}.".replace(chosen[0], chosen[0].capitalize(), 1)


def _rewrite(rng: random.Random, room: Room) -> tuple[str, str]:
    words = room.words
    items = rng.sample((*words.secrets, *words.things), rng.randrange(2, 6))
    row = ", ".join(items)
    how = rng.randrange(7)
    if how == 0:
        return f"Write this in upper case: {' '.join(items)}", mark(" ".join(items).upper())
    if how == 1:
        return f"Reverse the order of this list: {row}", mark(", ".join(items[::-1]))
    if how == 2:
        return f"What is the first word of this list? {row}", f"The first word is {mark(items[0])}."
    if how == 3:
        return f"What is the last word of this list? {row}", f"The last word is {mark(items[-1])}."
    if how == 4:
        i = rng.randrange(len(items))
        order = ("first", "second", "third", "fourth", "fifth")[i]
        return f"What is the {order} word? {row}", f"The {order} word is {mark(items[i])}."
    if how == 5:
        return f"Sort these words by the alphabet: {row}", mark(", ".join(sorted(items)))
    count = ("zero", "one", "two", "three", "four", "five")[len(items)]
    return f"How many words are in this list? {row}", f"There are {mark(count)} words."


def _about_me(rng: random.Random, room: Room) -> tuple[list[Turn], list[Turn]]:
    """Something the user says of himself, and the question about it that comes later."""
    words = room.words
    name, food, city = rng.choice(words.names), rng.choice(words.foods), rng.choice(words.cities)
    pet, animal, colour = rng.choice(words.pets), rng.choice(words.animals), rng.choice(COLOURS)
    said, reply, asked, value, answer = rng.choice(
        (
            (
                rng.choice(
                    (
                        f"My name is {name}.",
                        f"I am {name}.",
                        f"Hi, I'm {name}.",
                        f"You can call me {name}.",
                    )
                ),
                f"Nice to meet you, {mark(name)}!",
                rng.choice(("What is my name?", "Who am I?", "Do you remember my name?")),
                name,
                "Your name is @.",
            ),
            (
                f"I live in {city}.",
                f"{mark(city)} is a nice place.",
                "Where do I live?",
                city,
                "You live in @.",
            ),
            (
                f"My favourite food is {food}.",
                f"Yes, many people like {mark(food)}.",
                "What is my favourite food?",
                food,
                "Your favourite food is @.",
            ),
            (
                f"My {animal} is called {pet}.",
                f"{mark(pet)} is a nice name for {with_article(animal)}.",
                f"What is my {animal} called?",
                pet,
                f"Your {animal} is called @.",
            ),
            (
                f"My favourite colour is {colour}.",
                f"{mark(colour.capitalize())} is a beautiful colour.",
                "What is my favourite colour?",
                colour,
                "Your favourite colour is @.",
            ),
            (
                f"I am {rng.randrange(10, 90)} years old.",
                "Thank you for telling me.",
                "How old am I?",
                "",
                "You are @ years old.",
            ),
        )
    )
    if not value:
        value = said.split()[2]
    told = answer.replace("@", mark(value))
    return (
        _pair(said, reply, "I should remember this."),
        _pair(asked, told, f"The user told me: {value}."),
    )


def _story_turns(rng: random.Random, room: Room) -> list[Turn]:
    text = story(rng, room.words)
    name = text.split(" named ")[-1].split(".")[0] if " named " in text else ""
    asked = rng.choice(
        ("Tell me a story.", "Please tell me a short story.", "Tell me a bedtime story.",
         "Can you write a little story?", "Write a short story.", "I would like to hear a story.")
    )  # fmt: skip
    kind = next((a for a in room.words.animals if f" {a} " in text), "")
    if kind and rng.random() < 0.5:
        who = with_article(kind)
        asked = rng.choice((f"Tell me a story about {who}.", f"Write a short story about {who}."))
    turns = _pair(asked, text, "I tell a short story.")
    if name and " " not in name and rng.random() < 0.6:
        turns += _pair(
            rng.choice(("Who is the story about?", "What was the name in the story?")),
            f"The story is about {mark(name)}.",
            f"The story is about {name}.",
        )
    return turns


def talk(rng: random.Random, room: Room) -> Document:
    """A talk of one to a dozen turns, in which things said earlier are asked for."""
    turns: list[Turn] = []
    later: list[list[Turn]] = []
    size = 0
    if rng.random() < 0.3:
        turns += _pair(rng.choice(_HELLOS), rng.choice(_HELLO_ANSWERS), "I say hello.")
    most = rng.choice((1, 1, 2, 3, 4, 6, 8, 12)) if not room.is_long else 200
    limit = room.chars * (0.9 if room.is_long else 0.8)
    for _ in range(most):
        how = rng.random()
        if how < 0.22:
            said, asked = _about_me(rng, room)
            turns += said
            if all(a[0].text != asked[0].text for a in later):
                later.append(asked)
        elif how < 0.34:
            turns += _story_turns(rng, room)
        else:
            turns += _exchange(rng, room)
        if later and rng.random() < 0.35:
            turns += later.pop(rng.randrange(len(later)))
        size = sum(len(t.text) + 16 for t in turns)
        if size > limit:
            break
    for asked in later:
        turns += asked
    system = rng.choice(_SYSTEMS) if rng.random() < 0.25 else None
    return render(Chat(turns=turns, system=system, thinking=rng.random() < 0.45), is_whole=False)


_TAUGHT_THOUGHTS: Final = (
    "I write a short answer in simple words.", "I answer in a few sentences.",
    "The user wants a short text.",
)  # fmt: skip


def taught(rng: random.Random, room: Room) -> Document:
    """One to a few of the teacher's exchanges."""
    turns: list[Turn] = []
    while True:
        exchange = rng.choice(room.texts.exchanges)
        turns += _pair(exchange.user, exchange.assistant, rng.choice(_TAUGHT_THOUGHTS), weight=0.25)
        size = sum(len(t.text) + 16 for t in turns)
        if size > 0.6 * room.chars or (not room.is_long and rng.random() < 0.6):
            break
    system = rng.choice(_SYSTEMS) if rng.random() < 0.15 else None
    return render(Chat(turns=turns, system=system, thinking=rng.random() < 0.4), is_whole=False)


def prose(rng: random.Random, room: Room) -> Document:
    """Running English without a chat: prose of packages, the teacher's and our stories."""
    document = Document(is_whole=False)
    document.add(BOS, 0.0)
    used = 0
    makers: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(room.texts.prose),
        lambda: rng.choice(room.texts.stories),
        lambda: rng.choice(room.texts.stories),
        lambda: story(rng, room.words),
    )
    make = rng.choice(makers)
    while used < 0.7 * room.chars:
        text = make()
        document.add(("\n\n" if used else "") + text, ANSWER)
        used += len(text) + 2
        if not room.is_long and rng.random() < 0.6:
            break
    document.add(EOS, PROSE)
    return document
