"""Simple English from a larger model: asks a running server for short answers, keeps them.

    headwater serve --model smollm2 &
    python -m tools.mini.teacher --out build/mini/teacher.jsonl --minutes 20

Each line is one exchange, ``{"user": ..., "assistant": ...}``. The requests are made of
words and shapes of sentences, by a seed, so that no two are the same; what is answered is
the teacher's. Stops after ``--minutes``, can be run again to add lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

from openai import AsyncOpenAI

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olive Paul Rosa Sam "
    "Tina Victor Will Zoe Lily Max Nora Oscar Ruth Simon Tom Ada"
).split()
ANIMALS = (
    "dog cat horse cow bird fish bear fox rabbit mouse lion tiger elephant duck goose frog snake "
    "owl eagle whale dolphin bee ant spider butterfly sheep goat pig chicken wolf deer squirrel "
    "turtle monkey penguin shark crab snail hedgehog camel"
).split()
THINGS = (
    "bread milk tea coffee apple orange banana soup rice cheese cake egg salt sugar honey water "
    "rain snow wind sun moon star cloud river lake sea mountain forest garden tree flower grass "
    "house door window table chair bed lamp clock book letter pen paper school teacher doctor "
    "farmer baker driver painter singer friend family mother father brother sister child city "
    "village street bridge train bus car bicycle boat airplane computer phone radio camera music "
    "song story game ball kite box bag key shoe hat coat umbrella money market shop library "
    "museum hospital kitchen farm winter summer spring autumn morning night birthday holiday "
    "weather fire ice stone sand gold iron wood glass color number word language map"
).split()
JOBS = "teacher doctor farmer baker driver painter singer cook nurse pilot writer builder".split()
PLACES = (
    "a small village|a big city|the forest|the beach|an old house|a farm|the school|the market|"
    "a train station|the mountains|a quiet lake|the library|an island|a garden|the kitchen"
).split("|")
FEELINGS = "happy sad tired brave afraid curious lonely proud angry hungry kind shy".split()
DEEDS = (
    "finds a key|loses a hat|learns to swim|bakes a cake|meets a new friend|helps an old man|"
    "wants to fly|is afraid of the dark|plants a tree|gets lost|finds a map|writes a letter|"
    "goes to the market|sees snow for the first time|builds a boat|hears a strange sound|"
    "shares the last apple|wins a race|cannot sleep|fixes a clock"
).split("|")


def requests(seed: int) -> Iterator[tuple[str, int]]:
    """Endless (request, most tokens of the answer)."""
    chosen = random.Random(seed)
    while True:
        pick = chosen.choice
        animal, thing, other = pick(ANIMALS), pick(THINGS), pick(THINGS)
        name, job, place, feeling, deed = (
            pick(NAMES), pick(JOBS), pick(PLACES), pick(FEELINGS), pick(DEEDS),
        )  # fmt: skip
        yield pick(
            (
                (f"Write a short story for children about a {animal} that {deed}.", 220),
                (f"Write a short story about {name}, a {feeling} {job} who {deed}.", 220),
                (f"Tell me a very short story that happens in {place} with a {thing}.", 200),
                (f"Explain in simple words what a {thing} is.", 120),
                (f"What do you know about {thing}? Answer in two or three short sentences.", 90),
                (f"Why do people like {thing}? Answer briefly.", 90),
                (f"Describe a {animal} in three short sentences.", 90),
                (f"What does a {job} do all day? Use simple words.", 110),
                (f"Write three short sentences with the words {thing} and {other}.", 90),
                (f"What is the difference between {thing} and {other}? Be brief.", 110),
                (f"{name} feels {feeling} today. What would you say to {name}?", 90),
                (f"Give me three tips about {thing}, each in one sentence.", 120),
                (f"Describe {place} in a few simple sentences.", 100),
                (f"Write a friendly message to {name} about {thing}.", 100),
                (f"Write a short dialogue between {name} and a {job} about {thing}.", 160),
                (f"How can I learn more about {thing}? Keep it short.", 90),
                (f"Write one paragraph about a day in {place}.", 140),
                (f"What would a {animal} say if it could talk? Write a few sentences.", 110),
            )
        )


async def ask(args: argparse.Namespace) -> None:
    end = time.monotonic() + 60 * args.minutes
    stream = requests(args.seed)
    with args.out.open("a") as lines:

        async def one(client: AsyncOpenAI) -> None:
            while time.monotonic() < end:
                request, most = next(stream)
                answer = await client.chat.completions.create(
                    model=args.model,
                    messages=[{"role": "user", "content": request}],
                    max_tokens=most,
                    temperature=0.8,
                    top_p=0.95,
                )
                choice = answer.choices[0]
                text = (choice.message.content or "").strip()
                if choice.finish_reason == "length":  # keep whole sentences
                    text = text[: max(text.rfind(mark) for mark in ".!?") + 1]
                if len(text) > 20:
                    lines.write(json.dumps({"user": request, "assistant": text}) + "\n")
                    lines.flush()

        async with AsyncOpenAI(base_url=args.url, api_key="none", timeout=600) as client:
            await asyncio.gather(*(one(client) for _ in range(args.at_once)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(ask(args))


if __name__ == "__main__":
    main()
