"""What the small model is measured with: fixed items, made of words that training left out.

Recall by distance, tool calls, counting and copying, plain questions, and the teacher's
kept-out answers as rows for perplexity. Pure data: says what to ask and what is right,
knows no model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from tools.mini import facts as world
from tools.mini import tasks_small
from tools.mini.chat_format import Chat, Turn, prompt_text, render
from tools.mini.document import unmarked
from tools.mini.grammar import sentence, story
from tools.mini.mixture import Row, encode
from tools.mini.tasks_recall import Fact, facts
from tools.mini.tasks_tools import KINDS, tool_name
from tools.mini.text import Texts
from tools.mini.words import Part, Words, words

DISTANCES: Final = (128, 256, 512, 1024, 2048, 3500)
_SEED: Final = 20_000_003  # training's seeds are small


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """``prompt`` ends where the answer begins; right is an answer that holds ``expected``
    (``is_right``). ``distance``: tokens from the value in the prompt to its end."""

    chat: Chat
    prompt: str
    expected: str
    distance: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolItem:
    """``name`` is None where the right answer calls nothing."""

    chat: Chat
    prompt: str
    name: str | None
    arguments: Mapping[str, object]


def is_right(item: Item, answer: str) -> bool:
    """Whether ``answer`` (without reasoning) says the expected value as whole words."""
    spoken = f" {_plain(answer)} "
    return f" {_plain(item.expected)} " in spoken


def _plain(text: str) -> str:
    kept = "".join(c.lower() if c.isalnum() else " " for c in text)
    return " ".join(kept.split())


def recall_items(
    tokenizer: Tokenizer,
    texts: Texts,
    *,
    distance: int,
    count: int = 40,
    thinking: bool = False,
) -> tuple[Item, ...]:
    """Prompts with one fact about ``distance`` tokens before the end, among other facts."""
    rng = random.Random(f"recall {_SEED} {distance}")
    kept_out, usual = words(Part.HELD_OUT), words(Part.ALL)
    return tuple(
        _recall_item(rng, tokenizer, texts, kept_out, usual, distance, thinking)
        for _ in range(count)
    )


def _recall_item(
    rng: random.Random,
    tokenizer: Tokenizer,
    texts: Texts,
    kept_out: Words,
    usual: Words,
    distance: int,
    thinking: bool,
) -> Item:
    num_facts = max(3, min(12, distance // 80))
    fact, *others = _facts(rng, kept_out, num_facts)
    before = [sentence(rng, usual) for _ in range(rng.randrange(3))]
    size = _size(tokenizer, f"\n{fact.question}") + 4
    after = [other.statement for other in others]
    size += sum(_size(tokenizer, " " + text) for text in after)
    while size < distance:
        left = distance - size
        text = sentence(rng, usual)
        if left > 250:
            text = rng.choice((story(rng, usual).replace("\n\n", " "), rng.choice(texts.prose)))
        length = _size(tokenizer, " " + text)
        if length > left + 12:
            text = sentence(rng, usual)
            length = _size(tokenizer, " " + text)
        after.append(text)
        size += length
    rng.shuffle(after)
    told = " ".join([*before, fact.statement, *after])
    chat = Chat(
        turns=[Turn(role="user", text=f"Read this text. {told}\n{fact.question}")],
        thinking=thinking,
    )
    prompt = prompt_text(chat)
    _, _, rest = prompt.partition(fact.statement)
    return Item(chat=chat, prompt=prompt, expected=fact.short, distance=_size(tokenizer, rest))


def _facts(rng: random.Random, kept_out: Words, count: int) -> list[Fact]:
    """The first is asked for; no other shares its value, so that only it is right."""
    while True:
        found = facts(rng, kept_out, count)
        if all(found[0].short not in other.statement for other in found[1:]):
            return found


def _size(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def tool_items(*, count: int = 60, thinking: bool = False) -> tuple[ToolItem, ...]:
    """Four of five need a call; the others are answered without."""
    rng = random.Random(f"tools {_SEED}")
    kept_out = words(Part.HELD_OUT)
    items: list[ToolItem] = []
    for i in range(count):
        chosen = rng.sample(KINDS, rng.choice((1, 2, 3)))
        names = [tool_name(rng, kind) for kind in chosen]
        tools = [k.definition(rng, n) for k, n in zip(chosen, names, strict=True)]
        at = rng.randrange(len(chosen))
        use = chosen[at].use(rng, kept_out)
        is_needed = i % 5 != 4
        question = use.question if is_needed else world.question(rng)[0]
        chat = Chat(turns=[Turn(role="user", text=question)], tools=tools, thinking=thinking)
        items.append(
            ToolItem(
                chat=chat,
                prompt=prompt_text(chat),
                name=names[at] if is_needed else None,
                arguments=use.arguments if is_needed else {},
            )
        )
    return tuple(items)


def small_items(*, count: int = 40, thinking: bool = False) -> tuple[Item, ...]:
    """Half counting, half copying; the whole answer is expected."""
    rng = random.Random(f"small {_SEED}")
    kept_out = words(Part.HELD_OUT)
    items: list[Item] = []
    for i in range(count):
        make = tasks_small.count if i % 2 else tasks_small.copy
        question, answer, _ = make(rng, kept_out)
        items.append(_asked(question, unmarked(answer), thinking))
    return tuple(items)


def question_items(*, count: int = 40, thinking: bool = False) -> tuple[Item, ...]:
    """Plain questions of training's own tables, whose whole answer is expected: what the
    model has learned by heart, not what it can find out."""
    rng = random.Random(f"questions {_SEED}")
    asked = [world.question(rng) for _ in range(count)]
    return tuple(_asked(question, unmarked(answer), thinking) for question, answer in asked)


def chat_prompts(*, thinking: bool = False) -> tuple[str, ...]:
    """Prompts whose answers a person reads: no answer is the right one."""
    return tuple(
        prompt_text(Chat(turns=[Turn(role="user", text=text)], thinking=thinking))
        for text in _CHATS
    )


def _asked(question: str, expected: str, thinking: bool) -> Item:
    chat = Chat(turns=[Turn(role="user", text=question)], thinking=thinking)
    return Item(chat=chat, prompt=prompt_text(chat), expected=expected)


def text_rows(tokenizer: Tokenizer, texts: Texts, *, row_tokens: int) -> tuple[Row, ...]:
    """The teacher's kept-out answers, one after another; only the answers weigh (1.0)."""
    encoded = [
        encode(
            tokenizer,
            render(
                Chat(
                    turns=[
                        Turn(role="user", text=exchange.user, weight=0.0),
                        Turn(role="assistant", text=exchange.assistant),
                    ]
                )
            ),
        )
        for exchange in texts.held_out
    ]
    ids = np.concatenate([e.ids for e in encoded])
    weights = (np.concatenate([e.weights for e in encoded]) >= 0.9).astype(np.float32)
    length = row_tokens + 1
    found: list[Row] = []
    for start in range(0, len(ids), length):
        row_ids = np.zeros(length, dtype=np.int32)
        row_weights = np.zeros(length, dtype=np.float32)
        part = ids[start : start + length]
        row_ids[: len(part)] = part
        row_weights[: len(part)] = weights[start : start + length]
        found.append(Row(row_ids, row_weights[1:].copy()))
    return tuple(found)


_CHATS: Final = (
    "Hello!",
    "Who are you?",
    "How are you today?",
    "Tell me a story about a rabbit.",
    "Tell me a short story.",
    "What is the capital of France?",
    "What is a bee?",
    "Why do people like music?",
    "Write a short letter to Anna about the party.",
    "Describe an old house in a few simple sentences.",
    "My name is Anna. Please say hello to me.",
    "Name three animals.",
    "Count from 1 to 12.",
    "Repeat exactly: lantern harbor 42 meadow",
    "What will the weather be tomorrow?",
    "Can you help me to learn to swim?",
)
