"""Questions that need a tool, and questions that do not.

A tool is a schema with a varied name and description, a question, the arguments that
stand in the question, a result and a sentence that uses it. Knows no tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tools.mini import facts as world
from tools.mini.chat_format import Call, Chat, ToolDefinition, Turn, render
from tools.mini.document import Document, mark
from tools.mini.room import Room
from tools.mini.words import COLOURS, DAYS, EVENTS, MONTHS, Words, digits, made_up

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a tool: what is asked, with which arguments, what comes back and is said."""

    question: str
    arguments: Json
    result: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """``parameters``: name -> (JSON type, description); the first ``required`` are required."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: Mapping[str, tuple[str, str]]
    required: int
    use: Callable[[random.Random, Words], Use]

    def definition(self, rng: random.Random, name: str) -> ToolDefinition:
        is_described = rng.random() < 0.5
        properties: Json = {
            key: {"type": kind, "description": text} if is_described else {"type": kind}
            for key, (kind, text) in self.parameters.items()
        }
        return ToolDefinition(
            name=name,
            description=rng.choice(self.descriptions),
            parameters={
                "type": "object",
                "properties": properties,
                "required": list(self.parameters)[: self.required],
            },
        )


_SKIES: Final = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")


_UNITS: Final = (
    ("meters", "feet", "miles", "kilometers", "inches", "yards"),
    ("grams", "pounds", "kilograms", "ounces"),
    ("dollars", "euros", "francs", "crowns", "yen"),
    ("hours", "days", "minutes", "weeks", "seconds"),
    ("liters", "gallons", "cups", "pints"),
)


def _place(rng: random.Random, words: Words) -> str:
    return made_up(rng).capitalize() if rng.random() < 0.2 else rng.choice(words.cities)


def _weather(rng: random.Random, words: Words) -> Use:
    city, sky, degrees = _place(rng, words), rng.choice(_SKIES), rng.randrange(-9, 38)
    arguments: Json = {"city": city}
    question = rng.choice(
        (
            f"What is the weather in {city}?", f"How is the weather in {city} today?",
            f"What's the weather like in {city}?", f"Is it warm in {city}?",
            f"Tell me the weather in {city}.", f"Weather in {city}?",
            f"Do I need an umbrella in {city}?", f"How warm is it in {city} now?",
        )
    )  # fmt: skip
    if rng.random() < 0.2:
        unit = rng.choice(("celsius", "fahrenheit"))
        question = f"What is the weather in {city} in {unit}?"
        arguments["unit"] = unit
    return Use(
        question=question,
        arguments=arguments,
        result=rng.choice(
            (
                f'{{"sky": "{sky}", "temperature": {degrees}}}',
                f"{sky}, {degrees} degrees",
                f'{{"temperature": {degrees}, "conditions": "{sky}"}}',
                f"{degrees} degrees and {sky}",
            )
        ),
        answer=f"The weather in {mark(city)} is {mark(sky)} with {mark(str(degrees))} degrees.",
    )


def _time(rng: random.Random, words: Words) -> Use:
    city, clock = _place(rng, words), f"{rng.randrange(24)}:{rng.randrange(60):02d}"
    return Use(
        question=rng.choice(
            (
                f"What time is it in {city}?", f"Tell me the time in {city}.",
                f"How late is it in {city}?", f"What is the time in {city} now?",
            )
        ),
        arguments={"city": city},
        result=rng.choice((clock, f'{{"time": "{clock}"}}')),
        answer=f"It is {mark(clock)} in {mark(city)}.",
    )  # fmt: skip


def _calculate(rng: random.Random, words: Words) -> Use:
    a, b = rng.randrange(2, 1000), rng.randrange(2, 1000)
    sign, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    spoken = {"+": "plus", "-": "minus", "*": "times"}[sign]
    written = f"{a} {sign} {b}"
    return Use(
        question=rng.choice(
            (f"What is {written}?", f"Calculate {written}.", f"What is {a} {spoken} {b}?",
             f"How much is {a} {spoken} {b}?", f"Compute {written}.")
        ),
        arguments={"expression": written},
        result=rng.choice((str(value), f'{{"result": {value}}}')),
        answer=f"{a} {spoken} {b} is {mark(str(value))}.",
    )  # fmt: skip


def _search(rng: random.Random, words: Words) -> Use:
    topic = rng.choice(
        (
            f"{rng.choice(words.adjectives)} {rng.choice(words.things)}",
            f"{rng.choice(words.foods)} recipes",
            f"the history of {rng.choice(words.cities)}",
            f"{made_up(rng)} {rng.choice(words.things)}",
            f"{rng.choice(words.animals)} food",
        )
    )
    count = rng.randrange(2, 90)
    return Use(
        question=rng.choice(
            (f"Search for {topic}.", f"Look up {topic}.", f"Find pages about {topic}.",
             f"Search the web for {topic}.", f"Can you search for {topic}?")
        ),
        arguments={"query": topic},
        result=f'{{"hits": {count}}}',
        answer=f"I found {mark(str(count))} pages about {mark(topic)}.",
    )  # fmt: skip


def _message(rng: random.Random, words: Words) -> Use:
    name = rng.choice(words.names)
    text = rng.choice(
        (
            "I will be late",
            f"the {rng.choice(EVENTS)} is on {rng.choice(DAYS)}",
            f"bring the {rng.choice(words.things)}",
            f"I am in {rng.choice(words.cities)}",
            f"the code is {digits(rng, 4)}",
            "dinner is ready",
            f"please buy {rng.choice(words.foods)}",
        )
    )
    return Use(
        question=rng.choice(
            (f"Send {name} the message: {text}", f"Write to {name}: {text}",
             f"Send a message to {name} that says: {text}", f"Tell {name}: {text}")
        ),
        arguments={"to": name, "text": text},
        result=rng.choice(("sent", "ok", '{"status": "sent"}')),
        answer=f"I have sent the message to {mark(name)}.",
    )  # fmt: skip


def _timer(rng: random.Random, words: Words) -> Use:
    minutes = rng.randrange(1, 90)
    return Use(
        question=rng.choice(
            (f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes.",
             f"Please start a timer of {minutes} minutes.", f"Timer: {minutes} minutes.")
        ),
        arguments={"minutes": minutes},
        result=rng.choice(("ok", "started", '{"status": "running"}')),
        answer=f"The timer is set for {mark(str(minutes))} minutes.",
    )  # fmt: skip


def _convert(rng: random.Random, words: Words) -> Use:
    value, result = rng.randrange(2, 500), rng.randrange(2, 900)
    a, b = rng.sample(rng.choice(_UNITS), 2)
    return Use(
        question=rng.choice(
            (f"Convert {value} {a} to {b}.", f"How many {b} are {value} {a}?",
             f"What is {value} {a} in {b}?")
        ),
        arguments={"value": value, "from": a, "to": b},
        result=rng.choice((str(result), f'{{"value": {result}}}')),
        answer=f"{value} {a} are {mark(str(result))} {mark(b)}.",
    )  # fmt: skip


def _order(rng: random.Random, words: Words) -> Use:
    number = rng.choice(("", "A", "B", "K", "X")) + digits(rng, rng.choice((3, 4, 5)))
    state = rng.choice(("sent", "delivered", "packed", "lost", "on its way", "paid"))
    return Use(
        question=rng.choice(
            (f"Where is my order {number}?", f"What is the state of order {number}?",
             f"Look up order {number}.", f"Has order {number} arrived?")
        ),
        arguments={"id": number},
        result=rng.choice((f'{{"status": "{state}"}}', state)),
        answer=f"Order {mark(number)} is {mark(state)}.",
    )  # fmt: skip


def _translate(rng: random.Random, words: Words) -> Use:
    language = rng.choice(("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Greek"))
    text = rng.choice(
        (rng.choice(words.things), f"the {rng.choice(words.animals)}", "good morning",
         f"{rng.choice(COLOURS)} {rng.choice(words.things)}", "thank you", "I am hungry",
         f"my name is {rng.choice(words.names)}")
    )  # fmt: skip
    result = f"{made_up(rng)} {made_up(rng)}"
    return Use(
        question=rng.choice(
            (f'Translate "{text}" into {language}.', f'How do you say "{text}" in {language}?',
             f'What is "{text}" in {language}?')
        ),
        arguments={"text": text, "language": language},
        result=result,
        answer=f'In {mark(language)} one says "{mark(result)}".',
    )  # fmt: skip


def _music(rng: random.Random, words: Words) -> Use:
    title = rng.choice(
        (f"{rng.choice(words.adjectives)} {rng.choice(words.things)}".title(),
         f"The {rng.choice(words.animals)}".title(), f"{made_up(rng)} {made_up(rng)}".title(),
         f"Song for {rng.choice(words.names)}")
    )  # fmt: skip
    return Use(
        question=rng.choice(
            (f"Play {title}.", f"Please play the song {title}.", f"I want to hear {title}.")
        ),
        arguments={"title": title},
        result=rng.choice(("playing", "ok")),
        answer=f"I am playing {mark(title)}.",
    )


def _event(rng: random.Random, words: Words) -> Use:
    title = f"{rng.choice(EVENTS)} with {rng.choice(words.names)}"
    date = rng.choice((rng.choice(DAYS), f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}"))
    return Use(
        question=rng.choice(
            (f"Create an event on {date}: {title}", f"Put the {title} on {date} into my calendar.",
             f"Add {title} on {date}.")
        ),
        arguments={"title": title, "date": date},
        result=rng.choice(("created", "ok", '{"status": "created"}')),
        answer=f"I have added the {mark(title)} on {mark(date)}.",
    )  # fmt: skip


def _light(rng: random.Random, words: Words) -> Use:
    room = rng.choice(("kitchen", "bedroom", "garden", "hall", "office", "garage", "bathroom"))
    is_on = rng.random() < 0.5
    state = "on" if is_on else "off"
    return Use(
        question=rng.choice(
            (f"Turn {state} the light in the {room}.", f"Switch the {room} light {state}.",
             f"Light {state} in the {room}, please.")
        ),
        arguments={"room": room, "on": is_on},
        result="ok",
        answer=f"The light in the {mark(room)} is {mark(state)} now.",
    )  # fmt: skip


KINDS: Final = (
    Kind(
        names=("get_weather", "weather", "current_weather", "check_weather"),
        descriptions=(
            "Get the weather of a city.",
            "Current weather in a city.",
            "Returns the weather.",
            "Look up the weather for a place.",
        ),
        parameters={
            "city": ("string", "The name of the city."),
            "unit": ("string", "celsius or fahrenheit"),
        },
        required=1,
        use=_weather,
    ),
    Kind(
        names=("get_time", "current_time", "clock", "time_in_city"),
        descriptions=("Get the time in a city.", "Local time of a place.", "Tells the time."),
        parameters={"city": ("string", "The city.")},
        required=1,
        use=_time,
    ),
    Kind(
        names=("calculator", "calculate", "compute", "evaluate"),
        descriptions=("Calculate an expression.", "Evaluates arithmetic.", "A calculator."),
        parameters={"expression": ("string", "What to calculate.")},
        required=1,
        use=_calculate,
    ),
    Kind(
        names=("search", "web_search", "find_pages", "lookup"),
        descriptions=("Search the web.", "Find pages about a topic.", "Look something up."),
        parameters={"query": ("string", "What to search for.")},
        required=1,
        use=_search,
    ),
    Kind(
        names=("send_message", "write_message", "message", "send_text"),
        descriptions=("Send a message to a person.", "Writes to somebody.", "Send a text."),
        parameters={"to": ("string", "Who gets it."), "text": ("string", "The message.")},
        required=2,
        use=_message,
    ),
    Kind(
        names=("set_timer", "start_timer", "timer"),
        descriptions=("Set a timer.", "Start a timer in minutes.", "Wakes after some minutes."),
        parameters={"minutes": ("integer", "How many minutes.")},
        required=1,
        use=_timer,
    ),
    Kind(
        names=("convert", "convert_units", "unit_converter"),
        descriptions=("Convert a value to another unit.", "Converts units."),
        parameters={
            "value": ("number", "The value."),
            "from": ("string", "The unit it has."),
            "to": ("string", "The unit wanted."),
        },
        required=3,
        use=_convert,
    ),
    Kind(
        names=("lookup_order", "get_order", "order_status", "find_order"),
        descriptions=(
            "Get the state of an order.",
            "Looks up an order.",
            "Find an order by its id.",
        ),
        parameters={"id": ("string", "The id of the order.")},
        required=1,
        use=_order,
    ),
    Kind(
        names=("translate", "translate_text", "translator"),
        descriptions=("Translate a text.", "Translates into another language."),
        parameters={"text": ("string", "The text."), "language": ("string", "The language.")},
        required=2,
        use=_translate,
    ),
    Kind(
        names=("play_music", "play_song", "play"),
        descriptions=("Play a song.", "Plays music by title."),
        parameters={"title": ("string", "The title.")},
        required=1,
        use=_music,
    ),
    Kind(
        names=("create_event", "add_event", "calendar_add"),
        descriptions=("Create an event in the calendar.", "Adds an event."),
        parameters={"title": ("string", "The title."), "date": ("string", "The day.")},
        required=2,
        use=_event,
    ),
    Kind(
        names=("set_light", "switch_light", "light"),
        descriptions=("Turn a light on or off.", "Switches a light."),
        parameters={"room": ("string", "The room."), "on": ("boolean", "On or off.")},
        required=2,
        use=_light,
    ),
)


def tool_name(rng: random.Random, kind: Kind) -> str:
    """A usual name, or one that can only be copied from the definition."""
    how = rng.random()
    if how < 0.6:
        return rng.choice(kind.names)
    if how < 0.8:
        return f"{rng.choice(kind.names)}_{made_up(rng)}"
    return f"{made_up(rng)}_{rng.choice(kind.names)}"


def calls(rng: random.Random, room: Room) -> Document:
    """A talk with tools: calls where they are needed, plain answers where not."""
    number = rng.choice((1, 1, 2, 2, 3, 4))
    chosen = rng.sample(KINDS, number)
    names = [tool_name(rng, kind) for kind in chosen]
    definitions = [k.definition(rng, n) for k, n in zip(chosen, names, strict=True)]
    turns: list[Turn] = []
    size = sum(len(d.line) for d in definitions) + 700
    while True:
        before = len(turns)
        if rng.random() < 0.8:
            i = rng.randrange(number)
            turns += _used(rng, chosen[i].use(rng, room.words), names[i])
        else:
            turns += _unneeded(rng)
        size += sum(len(t.text) + 20 + 130 * len(t.calls) for t in turns[before:])
        if size > 0.8 * room.chars or rng.random() < (0.02 if room.is_long else 0.15):
            break
    system = None
    if rng.random() < 0.3:
        system = rng.choice(
            ("You are a helpful assistant.", "Use the tools when you need them.", "Be brief.")
        )
    return render(Chat(turns=turns, system=system, tools=definitions, thinking=rng.random() < 0.5))


def _used(rng: random.Random, use: Use, name: str) -> list[Turn]:
    return [
        Turn(role="user", text=use.question),
        Turn(
            role="assistant",
            thought=rng.choice(
                (f"I need the tool {mark(name)}.", f"I call {mark(name)}.",
                 f"For this I use {mark(name)}.")
            ),
            calls=(Call(name=name, arguments=use.arguments),),
        ),
        Turn(role="tool", text=use.result),
        Turn(role="assistant", text=use.answer, thought="I have the result."),
    ]  # fmt: skip


_PLAIN: Final = (
    ("Hello!", "Hello! How can I help you?"),
    ("Thank you.", "You are welcome."),
    ("Hi", "Hi! What can I do for you?"),
    ("Who are you?", "I am Headwater's small demonstration model."),
    ("Goodbye.", "Goodbye! Have a nice day."),
    ("How are you?", "I am fine, thank you."),
)


def _unneeded(rng: random.Random) -> list[Turn]:
    question, answer = rng.choice(_PLAIN) if rng.random() < 0.4 else world.question(rng)
    return [
        Turn(role="user", text=question),
        Turn(role="assistant", text=answer, thought="I need no tool for this."),
    ]
