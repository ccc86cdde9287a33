"""What a task hands over: text in pieces, each with the weight of its loss.

A task marks the few characters that matter most (the value that was asked for, an
argument) with ``mark``; ``weigh`` takes the marks out again. Knows no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

OPEN: Final = "\x01"
CLOSE: Final = "\x02"

ANSWER: Final = 1.0
KEY: Final = 3.0  # of marked characters in an answer
GIVEN: Final = 0.12  # what others write, and what nobody can predict
PROSE: Final = 0.4  # running English in a place where others write


@dataclass(slots=True)
class Document:
    """``is_whole``: useless once cut. ``pieces`` are (text, weight), in order."""

    pieces: list[tuple[str, float]] = field(default_factory=list)
    is_whole: bool = True

    def add(self, text: str, weight: float, key_weight: float | None = None) -> None:
        """Append ``text``; its marked characters weigh ``key_weight`` (or the same)."""
        if OPEN not in text:
            self.pieces.append((text, weight))
            return
        head, *rest = text.split(OPEN)
        self.pieces.append((head, weight))
        for part in rest:
            marked, _, after = part.partition(CLOSE)
            self.pieces.append((marked, weight if key_weight is None else key_weight))
            self.pieces.append((after, weight))

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


def mark(value: str) -> str:
    """``value`` as something that weighs more where an answer has it."""
    return f"{OPEN}{value}{CLOSE}"


def unmarked(text: str) -> str:
    """
    >>> unmarked("It is " + mark("blue") + ".")
    'It is blue.'
    """
    return text.replace(OPEN, "").replace(CLOSE, "")
