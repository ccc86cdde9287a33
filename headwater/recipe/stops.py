"""Stop strings, watched for in text that arrives in pieces.

The rule: the stop string that is *complete first* ends the text; if two are
complete at the same character, the longer one (it began earlier) is the one
reported. So the result depends on the text alone, never on how it was cut into
pieces (A09). Text is held back only while it may still become a stop string.
Knows no tokens; ``output`` runs one per choice.
"""

from __future__ import annotations

import re
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
        firsts = "".join(sorted({stop[0] for stop in self._stops}))
        self._find_first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)").search
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
        text = self._held + piece
        index = len(self._held)
        matched = index  # characters of a stop string that the text so far ends with
        while index < len(text):
            if not matched:
                first = self._find_first(text, index)
                if first is None:
                    break
                index = first.start()
            stop = self._advance(text[index])
            index += 1
            if stop is not None:
                self._done = True
                self._held = ""
                return StopResult(text[: index - len(stop)], stop)
            matched = max(self._matched)
        shown = len(text) - matched
        self._held = text[shown:]
        return StopResult(text[:shown])

    def restart(self) -> str:
        """The text is interrupted and another begins: what was held back is no stop string."""
        held, self._held = self._held, ""
        if held:
            self._matched = [0] * len(self._stops)
        return held

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
