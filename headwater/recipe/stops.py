"""Stop strings, watched for in text that arrives in pieces.

The rule: the stop string that is *complete first* ends the text; if two are
complete at the same character, the longer one (it began earlier) is the one
reported. So the result depends on the text alone, never on how it was cut into
pieces (A09). Text is held back only while it may still become a stop string.
Knows no tokens; ``output`` runs one per choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be shown now, and the stop string that was completed, if one was."""

    text: str
    stop: str | None = None


class StopMatcher:
    """One text's watcher.

    Keeps, for each stop string, how many of its characters the text ends with
    (the state of a Knuth-Morris-Pratt search), so a step costs O(its characters)
    whatever the strings are.

    >>> matcher = StopMatcher(["beta gamma"])
    >>> [matcher.push(piece) for piece in ("alpha be", "ta gam", "ma delta")]
    [StopResult(text='alpha ', stop=None), StopResult(text='', stop=None), \
StopResult(text='', stop='beta gamma')]
    """

    def __init__(self, stops: Sequence[str], *, param: str = "stop") -> None:
        if not all(stops):
            raise InvalidRequest(f"{param} must not hold an empty string", param=param)
        # Longest first: of two that end at one character, it is met first.
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop matched so far
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self._done = False

    @property
    def held_chars(self) -> int:
        """Characters received and not yet shown."""
        return len(self._held)

    def push(self, piece: str) -> StopResult:
        """Take more text. After a stop string was found, everything else is ignored."""
        if self._done:
            return StopResult("")
        if not self._held and self._first_chars.isdisjoint(piece):
            return StopResult(piece)
        text = self._held + piece
        for index in range(len(self._held), len(text)):
            stop = self._advance(text[index])
            if stop is not None:
                self._done = True
                self._held = ""
                return StopResult(text[: index + 1 - len(stop)], stop)
        shown = len(text) - max(self._matched)
        self._held = text[shown:]
        return StopResult(text[:shown])

    def flush(self) -> str:
        """End of the text: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        self._done = True
        return held

    def _advance(self, char: str) -> str | None:
        """Take one character; the longest stop string that it completes."""
        found = None
        for number, stop in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != char:
                matched = self._fallbacks[number][matched]
            if stop[matched] == char:
                matched += 1
            self._matched[number] = matched
            if found is None and matched == len(stop):
                found = stop
        return found


def _fallbacks(stop: str) -> tuple[int, ...]:
    """Entry n: length of the longest proper prefix of ``stop`` that also ends ``stop[:n]``."""
    table = [0, 0]
    for index in range(1, len(stop)):
        length = table[index]
        while length and stop[length] != stop[index]:
            length = table[length]
        table.append(length + 1 if stop[length] == stop[index] else 0)
    return tuple(table)
