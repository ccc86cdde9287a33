"""What a served model can do: asks a running server the fixed sets, prints a table.

    headwater serve &
    python -m tools.mini.evaluate --tokenizer headwater/model/builtin/headwater-mini --out r.json

Greedy, several requests at once, thinking off and on. Perplexity comes from prompt logprobs
and needs the ``--teacher`` file that training used. Once ``--minutes`` are over nothing new is
asked; the table says of how many items each share is. Ends with a few chats for a person to read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from openai import AsyncOpenAI
from tokenizers import Tokenizer

from tools.mini.chat_format import Chat
from tools.mini.evaluate_sets import (
    DISTANCES,
    Item,
    ToolItem,
    chat_prompts,
    is_right,
    question_items,
    recall_items,
    small_items,
    text_rows,
    tool_items,
)
from tools.mini.mixture import Row
from tools.mini.text import Texts

ROW_TOKENS: Final = 512
_THINKING_TOKENS: Final = 160  # more than an answer without thinking gets


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of the server. ``calls``: names and arguments; None where they are no JSON."""

    text: str
    calls: tuple[tuple[str, object], ...]
    has_ended: bool  # by its end token, not by the limit
    num_prompt_tokens: int


@dataclass(slots=True, kw_only=True)
class Share:
    """One line of the table: how many of a set's items were right."""

    what: str
    thinking: bool
    num_asked: int = 0
    num_right: int = 0
    num_ended: int = 0

    def count(self, reply: Reply, *, right: bool) -> None:
        self.num_asked += 1
        self.num_right += right
        self.num_ended += reply.has_ended


@dataclass(slots=True, kw_only=True)
class Results:
    shares: list[Share] = field(default_factory=list)
    perplexity: float | None = None
    num_scored_tokens: int = 0
    num_other_prompts: int = 0  # that the server has made other tokens of than training did
    chats: list[tuple[str, str]] = field(default_factory=list)


class Asker:
    """A server, and how long it is asked."""

    def __init__(self, client: AsyncOpenAI, model: str, at_once: int, minutes: float) -> None:
        self._client, self._model = client, model
        self._places = asyncio.Semaphore(at_once)
        self._end_s = time.monotonic() + 60 * minutes

    async def all_of(self, count: int, ask: Callable[[int], Awaitable[None]]) -> None:
        """``ask(0)`` .. ``ask(count - 1)``, several at once, until time is over."""

        async def one(number: int) -> None:
            async with self._places:
                if time.monotonic() < self._end_s:
                    await ask(number)

        await asyncio.gather(*(one(number) for number in range(count)))

    async def answer(self, chat: Chat, max_tokens: int) -> Reply:
        extra: dict[str, object] = {"thinking": {"type": "disabled"}}
        if chat.thinking:
            extra = {"thinking": {"type": "enabled"}, "reasoning_effort": chat.effort}
        tools: list[Any] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for tool in chat.tools
        ]
        messages: list[Any] = [{"role": turn.role, "content": turn.text} for turn in chat.turns]
        made = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            temperature=0,
            max_tokens=max_tokens + (_THINKING_TOKENS if chat.thinking else 0),
            extra_body=extra | ({"tools": tools} if tools else {}),
        )
        choice = made.choices[0]
        calls = [call for call in choice.message.tool_calls or () if call.type == "function"]
        return Reply(
            text=choice.message.content or "",
            calls=tuple((c.function.name, _json(c.function.arguments)) for c in calls),
            has_ended=choice.finish_reason in ("stop", "tool_calls"),
            num_prompt_tokens=made.usage.prompt_tokens if made.usage else 0,
        )

    async def continuation(self, ids: Sequence[int], max_tokens: int) -> str:
        made = await self._client.completions.create(
            model=self._model, prompt=list(ids), temperature=0, max_tokens=max_tokens
        )
        return made.choices[0].text

    async def logprobs(self, ids: Sequence[int]) -> list[float | None]:
        """Of each token of the prompt; the first follows nothing."""
        made = await self._client.completions.create(
            model=self._model,
            prompt=list(ids),
            max_tokens=1,
            temperature=0,
            echo=True,
            logprobs=0,
        )
        found = made.choices[0].logprobs
        if found is None or found.token_logprobs is None:
            raise RuntimeError("the server gives no prompt logprobs: it must know `echo`")
        values: list[float | None] = list(found.token_logprobs)
        return values[: len(ids)]


def _json(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value


async def ask_items(
    asker: Asker, results: Results, tokenizer: Tokenizer, items: Sequence[Item], what: str,
    max_tokens: int,
) -> None:  # fmt: skip
    share = Share(what=what, thinking=items[0].chat.thinking)
    results.shares.append(share)

    async def ask(number: int) -> None:
        item = items[number]
        reply = await asker.answer(item.chat, max_tokens)
        share.count(reply, right=is_right(item, reply.text))
        results.num_other_prompts += reply.num_prompt_tokens != _size(tokenizer, item.prompt)

    await asker.all_of(len(items), ask)


async def ask_tools(
    asker: Asker, results: Results, tokenizer: Tokenizer, items: Sequence[ToolItem]
) -> None:
    names = ("tool call, name", "tool call, name and arguments", "no call where none is needed")
    shares = [Share(what=name, thinking=items[0].chat.thinking) for name in names]
    results.shares += shares

    async def ask(number: int) -> None:
        item = items[number]
        reply = await asker.answer(item.chat, 140)
        results.num_other_prompts += reply.num_prompt_tokens != _size(tokenizer, item.prompt)
        if item.name is None:
            shares[2].count(reply, right=not reply.calls)
            return
        shares[0].count(reply, right=[name for name, _ in reply.calls] == [item.name])
        wanted = ((item.name, dict(item.arguments)),)
        shares[1].count(reply, right=reply.calls == wanted)

    await asker.all_of(len(items), ask)


async def score_rows(asker: Asker, results: Results, rows: Sequence[Row]) -> None:
    """``perplexity`` over the tokens of the answers."""
    losses: list[float] = []

    async def ask(number: int) -> None:
        row = rows[number]
        # Of the last row only a part is text.
        num_tokens = 2 + max(i for i, weight in enumerate(row.weights) if weight)
        scored = await asker.logprobs(row.ids[:num_tokens].tolist())
        losses.extend(
            -value
            for value, weight in zip(scored[1:], row.weights, strict=False)
            if weight and value is not None
        )

    await asker.all_of(len(rows), ask)
    if losses:
        results.perplexity = math.exp(math.fsum(losses) / len(losses))
        results.num_scored_tokens = len(losses)


async def evaluate(args: argparse.Namespace, client: AsyncOpenAI) -> Results:
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    texts = Texts.load(teacher=args.teacher, prose=args.prose)
    asker = Asker(client, args.model, args.at_once, args.minutes)
    results, count = Results(), args.count
    if args.teacher is not None:
        rows = text_rows(tokenizer, texts, row_tokens=ROW_TOKENS)
        await score_rows(asker, results, [row for row in rows if row.weights.any()][:count])
    for thinking in (False, True):
        for distance in DISTANCES:
            recalled = recall_items(
                tokenizer, texts, distance=distance, count=count, thinking=thinking
            )
            what = f"recall, {distance:,} tokens back"
            await ask_items(asker, results, tokenizer, recalled, what, 40)
        await ask_tools(asker, results, tokenizer, tool_items(count=count, thinking=thinking))
        for name, items in (
            ("counting and copying", small_items(count=count, thinking=thinking)),
            ("questions of training's tables", question_items(count=count, thinking=thinking)),
        ):
            await ask_items(asker, results, tokenizer, items, name, 80)
    prompts = chat_prompts()
    texts_of: dict[int, str] = {}

    async def chat(number: int) -> None:
        texts_of[number] = await asker.continuation(_encoded(tokenizer, prompts[number]), 200)

    await asker.all_of(len(prompts), chat)
    results.chats = [(prompts[number], text) for number, text in sorted(texts_of.items())]
    return results


def table(results: Results) -> Iterator[str]:
    """Lines of markdown."""
    yield "| what | thinking | right | of | ended by itself |"
    yield "|---|---|---|---|---|"
    for share in results.shares:
        if share.num_asked:
            yield (
                f"| {share.what} | {'on' if share.thinking else 'off'} "
                f"| {share.num_right / share.num_asked:.2f} | {share.num_asked} "
                f"| {share.num_ended / share.num_asked:.2f} |"
            )
    yield ""
    if results.perplexity is not None:
        yield (
            f"Perplexity of {results.num_scored_tokens:,} tokens of the teacher's kept-out "
            f"answers: {results.perplexity:.2f}"
        )
    if results.num_other_prompts:
        yield f"{results.num_other_prompts} prompts were other tokens than in training."


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _size(tokenizer: Tokenizer, text: str) -> int:
    return len(_encoded(tokenizer, text))


async def _main(args: argparse.Namespace) -> Results:
    async with AsyncOpenAI(base_url=args.url, api_key="none", timeout=600) as client:
        return await evaluate(args, client)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="headwater-mini")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--teacher", type=Path, default=None)
    parser.add_argument("--prose", type=Path, default=None)
    parser.add_argument("--count", type=int, default=40, help="items of each set [40]")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=6.0, help="ask nothing new after it [6]")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    start_s = time.monotonic()
    results = asyncio.run(_main(args))
    print("\n".join(table(results)))
    print(f"\n{time.monotonic() - start_s:.0f} s\n")
    for prompt, text in results.chats:
        print(f"{prompt}\n    {text}\n")
    if args.out is not None:
        args.out.write_text(json.dumps(asdict(results), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
