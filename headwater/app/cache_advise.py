"""``headwater cache advise LOG``: which habits of the clients cost cache hits.

Reads what ``record_requests`` wrote (LOG.1 first, then LOG), line by line, and prints
the advisor's findings with one sentence each on what to change. A line that cannot be
read is counted and left out: a server may be writing, or may have been killed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from headwater.core.errors import ConfigError
from headwater.recipe.advice import Advice, Finding, advise
from headwater.recipe.advice_align import Habit
from headwater.recipe.record import BadRecord, RequestRecord, from_line

# A record of a million tokens is shorter; a longer line is none.
MAX_LINE_BYTES: Final = 16 * 2**20

# What it is, and what the client should do instead.
WORDS: Final[dict[Habit, tuple[str, str]]] = {
    Habit.CHANGING_VALUE: (
        "a value that changes in every request",
        "Put what changes (a clock, a counter, a random id) at the end of the last message, or "
        "leave it out: everything behind it is computed again.",
    ),
    Habit.VALUE_PER_CONVERSATION: (
        "a value that differs between conversations",
        "Put what differs (a user's name, a folder, a document) behind what all conversations "
        "share, best into the first user message.",
    ),
    Habit.TOOLS_REORDERED: (
        "the same tools in another order",
        "Send the tools in one fixed order, sorted by name for instance.",
    ),
    Habit.TOOLS_CHANGED: (
        "tools that change within a conversation",
        "Send all tools from the first turn on, unchanged; limit them with tool_choice.",
    ),
    Habit.REASONING_DROPPED: (
        "reasoning of earlier turns is not sent back",
        "Send the assistant's reasoning back with its message, as it came, to the end of the task.",
    ),
    Habit.REASONING_LEFT_OUT: (
        "the model's format leaves out earlier reasoning",
        "The client sends it and the format drops it at the next question: begin a new "
        "conversation per task, or switch reasoning off where it is not needed.",
    ),
    Habit.REASONING_CHANGED: (
        "reasoning of earlier turns comes back changed",
        "Send the assistant's reasoning back exactly as it came, not shortened or summed up.",
    ),
    Habit.RESPELT: (
        "the same content in another spelling",
        "Keep messages, arguments and definitions as text and send them back byte for byte; "
        "parsing and printing them again changes spaces, escapes or the order of keys.",
    ),
    Habit.IDS_CHANGED: (
        "call ids or names that change",
        "Keep the ids that the calls came with; do not make new ones for the history.",
    ),
    Habit.HISTORY_CUT: (
        "the oldest messages are dropped turn by turn",
        "Cut the history seldom and by much (half of it at once), not a message with each turn.",
    ),
    Habit.HISTORY_EDITED: (
        "earlier messages are changed or taken out",
        "Leave sent messages as they are; where the history must shrink, replace it seldom and "
        "by much.",
    ),
    Habit.RESULTS_REORDERED: (
        "the same messages in another order",
        "Send the results of parallel calls in one fixed order, best that of the calls.",
    ),
}

_KINDS: Final = {
    "tool_result": "tool result",
    "tool": "tools",
    "text": "the prompt",
}


@dataclass(slots=True)
class _Read:
    """What the files held."""

    num_bad_lines: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG", help="the file that record_requests names")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace, *, console: Console | None = None) -> int:
    """Print the advice. Raises ConfigError if the log cannot be read."""
    read = _Read()
    advice = advise(_records(arguments.log, read))
    console = console or Console(highlight=False)
    if arguments.json:
        console.print_json(json.dumps(_as_json(advice, read)))
    else:
        _show(console, advice, read)
    return 0


def _records(path: Path, read: _Read) -> Iterator[RequestRecord]:
    earlier = path.with_name(path.name + ".1")
    try:
        for file in (earlier, path) if earlier.exists() else (path,):
            with file.open("rb") as lines:
                while line := lines.readline(MAX_LINE_BYTES):
                    if not line.strip():
                        continue
                    try:
                        yield from_line(line)
                    except BadRecord:
                        read.num_bad_lines += 1
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; it is the file that "
            "`headwater serve --record-requests FILE` writes"
        ) from None


def _show(console: Console, advice: Advice, read: _Read) -> None:
    console.print(_summary(advice))
    if read.num_bad_lines:
        console.print(f"{read.num_bad_lines} lines could not be read and were left out.")
    if not advice.findings:
        console.print("No habit was found that costs hits.")
        return
    table = Table("habit", "where", "requests", "tokens to save", "of all", "what to change")
    for finding in advice.findings:
        habit, change = WORDS[finding.habit]
        share = finding.num_saved_tokens / advice.num_prompt_tokens
        table.add_row(
            habit,
            _where(finding),
            f"{finding.num_requests:,}",
            f"{finding.num_saved_tokens:,}",
            f"{share:.1%}",
            change,
        )
    console.print(table)
    best = (advice.num_hit_tokens + advice.num_saved_tokens) / advice.num_prompt_tokens
    console.print(f"Without them {best:.1%} of the prompt tokens could be hits.")


def _summary(advice: Advice) -> str:
    if not advice.num_requests:
        return "The log holds no request."
    tenants = f"{advice.num_tenants} tenant" + ("s" if advice.num_tenants != 1 else "")
    return (
        f"{advice.num_requests:,} requests of {tenants}, {advice.num_prompt_tokens:,} prompt "
        f"tokens; {advice.num_hit_tokens / advice.num_prompt_tokens:.1%} could be hits in a "
        "cache that forgets nothing."
    )


def _where(finding: Finding) -> str:
    """Such as "message 0 (system), tokens 17 to 29 of the prompt".

    A habit that moves through the history has no one range; then the range is wide.
    """
    place = finding.place
    kind = _KINDS.get(place.kind, place.kind)
    owner = kind if place.index < 0 else f"message {place.index} ({kind})"
    if place.last > place.first:
        return f"{owner}, tokens {place.first} to {place.last} of the prompt"
    return f"{owner}, before token {place.first} of the prompt"


def _as_json(advice: Advice, read: _Read) -> dict[str, object]:
    return {
        "num_requests": advice.num_requests,
        "num_tenants": advice.num_tenants,
        "num_bad_lines": read.num_bad_lines,
        "num_prompt_tokens": advice.num_prompt_tokens,
        "num_hit_tokens": advice.num_hit_tokens,
        "num_saved_tokens": advice.num_saved_tokens,
        "findings": [
            {
                "habit": finding.habit.value,
                "what": WORDS[finding.habit][0],
                "change": WORDS[finding.habit][1],
                "num_requests": finding.num_requests,
                "num_saved_tokens": finding.num_saved_tokens,
                "kind": finding.place.kind,
                "message": finding.place.index if finding.place.index >= 0 else None,
                "first_token": finding.place.first,
                "last_token": finding.place.last,
            }
            for finding in advice.findings
        ],
    }
