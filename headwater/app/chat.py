"""``headwater chat``: talk to any OpenAI-compatible server in the terminal.

One question from the arguments or a pipe, or a dialogue. The answer is printed
as it comes, as the plain text it is, so that it can be copied and piped; what
is not the answer goes to stderr. Ctrl-C ends the answer, not the program.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console

from headwater.app.completions import (
    ReportedUsage,
    StreamFailed,
    first_model,
    open_client,
    stream_answer,
)
from headwater.app.target import Target
from headwater.core.errors import ConfigError

EXIT_OK = 0
EXIT_INTERRUPTED = 130

HELP = """\
/reset          forget the dialogue
/system TEXT    set the system message and forget the dialogue; without TEXT: none
/exit           leave (so does Ctrl-D)
Ctrl-C          ends an answer that is being written"""

# A model's output must not move the cursor, retitle the window or reach the clipboard.
_UNSAFE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Sampling fields are sent only when given: the server's defaults are its own."""

    target: Target
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(slots=True)
class Dialogue:
    """What has been said; what the next request sends."""

    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self.turns.append({"role": "user", "content": question})
        self.turns.append({"role": "assistant", "content": answer})


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come; kept by the caller when it is broken off."""

    text: str = ""
    start_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0
    usage: ReportedUsage | None = None
    finish_reason: str | None = None


def run(options: ChatOptions, question: str | None, *, stdin: TextIO | None = None) -> int:
    """One answer if there is a question or stdin is not a terminal; else a dialogue."""
    source = stdin or sys.stdin
    if question is None and not source.isatty():
        question = source.read().strip()
        if not question:
            raise ConfigError('stdin holds no question; give one: headwater chat "question"')
    model = options.target.model or asyncio.run(_ask_model(options.target))
    chat = _Chat(options, model, Console(stderr=True, highlight=False))
    if question is not None:
        return chat.once(question)
    return chat.dialogue()


async def _ask_model(target: Target) -> str:
    async with open_client(target) as client:
        return await first_model(client, target)


class _Chat:
    def __init__(self, options: ChatOptions, model: str, console: Console) -> None:
        self._options = options
        self._model = model
        self._console = console
        self._dialogue = Dialogue(options.system)

    def once(self, question: str) -> int:
        answer = Answer()
        try:
            asyncio.run(self._answer(question, answer))
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            print(flush=True)
        return EXIT_OK

    def dialogue(self) -> int:
        self._console.print(
            f"[bold]{self._model}[/bold] at {self._options.target.base_url}  "
            "[dim]/help for commands[/dim]"
        )
        while True:
            try:
                line = self._console.input("[bold green]you>[/bold green] ").strip()
            except EOFError:
                self._console.print()
                return EXIT_OK
            except KeyboardInterrupt:
                self._console.print("\n[dim]/exit or Ctrl-D leaves[/dim]")
                continue
            if line in ("/exit", "/quit"):
                return EXIT_OK
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        match word:
            case "/reset":
                self._dialogue = Dialogue(self._dialogue.system)
                self._console.print("[dim]forgotten[/dim]")
            case "/system":
                self._dialogue = Dialogue(rest.strip() or None)
                self._console.print("[dim]system message set; dialogue forgotten[/dim]")
            case "/help":
                self._console.print(HELP, markup=False)
            case _:
                self._console.print(f"no command {word}\n{HELP}", markup=False)

    def _turn(self, question: str) -> None:
        answer = Answer()
        try:
            asyncio.run(self._answer(question, answer))
        except KeyboardInterrupt:
            answer.end_s = time.perf_counter()
            answer.finish_reason = "ended by Ctrl-C"
        except StreamFailed as error:
            print(flush=True)
            self._console.print(str(error), style="red", markup=False)
            return
        print(flush=True)
        self._console.print(_describe(answer), style="dim", markup=False)
        # What was said stays said, also when broken off: the next question may refer to it.
        if answer.text:
            self._dialogue.add(question, answer.text)

    async def _answer(self, question: str, answer: Answer) -> None:
        options = self._options
        body: dict[str, object] = {
            "model": self._model,
            "messages": self._dialogue.messages(question),
        }
        for name in ("temperature", "max_tokens", "seed"):
            if getattr(options, name) is not None:
                body[name] = getattr(options, name)
        answer.start_s = time.perf_counter()
        async with open_client(options.target) as client:
            deltas = stream_answer(client, options.target, "/chat/completions", body)
            async with aclosing(deltas):
                async for delta in deltas:
                    if delta.reasoning:
                        self._show_reasoning(delta.reasoning)
                    if delta.text:
                        answer.first_s = answer.first_s or time.perf_counter()
                        answer.text += delta.text
                        print(delta.text.translate(_UNSAFE), end="", flush=True)
                    answer.usage = delta.usage or answer.usage
                    answer.finish_reason = delta.finish_reason or answer.finish_reason
        answer.end_s = time.perf_counter()

    def _show_reasoning(self, text: str) -> None:
        self._console.print(text.translate(_UNSAFE), style="dim italic", markup=False, end="")


def _describe(answer: Answer) -> str:
    """``41 tokens, first after 120 ms, 80.3 tokens/s`` as far as it is known."""
    parts = []
    num_tokens = answer.usage.num_output_tokens if answer.usage else None
    if num_tokens is not None:
        parts.append(f"{num_tokens} tokens")
    if answer.first_s is not None:
        parts.append(f"first after {(answer.first_s - answer.start_s) * 1000:.0f} ms")
        if num_tokens is not None and num_tokens > 1 and answer.end_s > answer.first_s:
            parts.append(f"{(num_tokens - 1) / (answer.end_s - answer.first_s):.1f} tokens/s")
    if answer.finish_reason not in (None, "stop"):
        parts.append(f"finish: {answer.finish_reason}")
    return ", ".join(parts)
