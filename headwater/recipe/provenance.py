"""Strings that remember where each of their characters came from.

A chat template mixes its own literals with text from outside. Only literals of
the template may become control tokens, so what must be tracked through slicing,
trimming, joining and splitting is *which characters the template placed*:

    Traced("<|im_start|>", placed) + Traced("user", placed) + "hi <|im_end|>"
    "<|im_start|>userhi <|im_end|>"    spans: ((0, 16, PLACED, 0),)

It fails closed. An operation that is not tracked here gives a plain ``str``,
and plain text counts as text from outside: a template that formats its literals
in some unusual way loses a control token (which ``template`` detects when the
model is loaded), but nothing that a user typed can gain one.

Outside text carries the number of the field it came from and its place in that
field, so that tokens can later be explained by the text they hold. Knows
nothing of jinja or tokenizers.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, SupportsIndex

PLACED: Final = -1  # the origin of the template's own literals; fields count from 0

# [start, end) in characters, origin, and the character of the origin that stands at
# start: the others follow one by one. Placed text has no place of origin: always 0.
Span = tuple[int, int, int, int]

_CONVERSION = re.compile(r"%(?:%|[-#0 +]*\d{0,4}(?:\.\d{1,4})?[a-zA-Z])")


class Traced(str):
    """A string with the origins of (some of) its characters; equal to its plain text.

    ``_spans`` ascend, do not overlap, and leave out characters of unknown
    (outside) origin. The name begins with an underscore because the template
    sandbox lets no template read such names.
    """

    __slots__ = ("_spans",)
    _spans: tuple[Span, ...]

    def __new__(cls, text: object = "", spans: tuple[Span, ...] = ()) -> Traced:
        traced = super().__new__(cls, text)
        traced._spans = spans
        return traced

    def __str__(self) -> str:
        # str(x) must keep the origins: jinja calls it on everything it prints.
        return self

    def __add__(self, other: str) -> Traced:
        if not isinstance(other, str):
            return NotImplemented
        return joined((self, other))

    def __radd__(self, other: str) -> Traced:
        if not isinstance(other, str):
            return NotImplemented
        return joined((other, self))

    def __mul__(self, times: SupportsIndex) -> Traced:
        return joined([self] * times.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: object) -> str:
        """``%`` formatting that keeps the format's literals and ``%s`` values traced."""
        if isinstance(values, dict):
            return str.__mod__(str.__str__(self), values)
        args = iter(values if isinstance(values, tuple) else (values,))
        parts: list[str] = []
        position = 0
        for match in _CONVERSION.finditer(self):
            parts.append(self[position : match.start()])
            position = match.end()
            spec = match.group()
            if spec == "%%":
                parts.append(self[match.start() : match.start() + 1])
                continue
            value = next(args, _MISSING)
            if value is _MISSING:
                raise TypeError("not enough arguments for format string")
            parts.append(str(value) if spec == "%s" else str.__mod__(spec, (value,)))
        parts.append(self[position:])
        if "%" in self[position:] or next(args, _MISSING) is not _MISSING:
            raise TypeError("format string and arguments do not match")
        return joined(parts)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return super().__getitem__(key)
            return self._cut(start, max(start, stop))
        index = key.__index__()
        plain = super().__getitem__(index)  # raises IndexError
        start = index if index >= 0 else index + len(self)
        return Traced(plain, clipped(self._spans, start, start + 1))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def _cut(self, start: int, stop: int) -> Traced:
        return Traced(str.__getitem__(self, slice(start, stop)), clipped(self._spans, start, stop))

    def join(self, parts: Iterable[str], /) -> Traced:
        pieces: list[str] = []
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"sequence item: expected str, {type(part).__name__} found")
            if pieces:
                pieces.append(self)
            pieces.append(part)
        return joined(pieces)

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(super().lstrip(chars))
        return self._cut(start, start + len(super().strip(chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        # An empty suffix would make the slice below end at 0.
        return self._cut(0, len(self) - len(suffix)) if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines: list[str] = []
        start = 0
        for whole, shown in zip(
            super().splitlines(True), super().splitlines(keepends), strict=True
        ):
            lines.append(self._cut(start, start + len(shown)))
            start += len(whole)
        return lines

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, _ = super().partition(sep)
        return self._three(len(head), len(middle))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, _ = super().rpartition(sep)
        return self._three(len(head), len(middle))

    def _three(self, head: int, middle: int) -> tuple[str, str, str]:
        end = head + middle
        return self._cut(0, head), self._cut(head, end), self._cut(end, len(self))

    def _located(self, pieces: list[str], sep: str | None) -> list[str]:
        """``pieces`` of a split, with the origins of where they stood."""
        found: list[str] = []
        position = 0
        for piece in pieces:
            if sep is None:
                # Only whitespace lies between, and a piece does not begin with any
                # (but for the first one of rsplit, which is found at once).
                position = self.find(piece, position)
            found.append(self._cut(position, position + len(piece)))
            position += len(piece) + (len(sep) if sep is not None else 0)
        return found

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return super().replace(old, new, count)
        pieces = self.split(old, count)
        return joined([p for piece in pieces for p in (new, piece)][1:])

    def lower(self) -> str:
        return self._recased(super().lower())

    def upper(self) -> str:
        return self._recased(super().upper())

    def title(self) -> str:
        return self._recased(super().title())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def _recased(self, text: str) -> str:
        # Case mapping never makes a character shorter, so equal lengths mean
        # that each character stayed in its place.
        return Traced(text, self._spans) if len(text) == len(self) else text


_MISSING = object()


def placed(text: str) -> Traced:
    """``text`` as a literal of the template (or a value that the server made)."""
    return Traced(text, ((0, len(text), PLACED, 0),) if text else ())


def outside(text: str, field: int, first: int = 0) -> Traced:
    """``text`` that stands at character ``first`` of field number ``field``."""
    return Traced(text, ((0, len(text), field, first),) if text else ())


def spans_of(text: str) -> tuple[Span, ...]:
    """Spans of known origin; none for a plain string."""
    return text._spans if isinstance(text, Traced) else ()


def joined(parts: Iterable[str]) -> Traced:
    """The parts one after the other; spans that continue each other become one."""
    texts: list[str] = []
    spans: list[Span] = []
    length = 0
    for part in parts:
        texts.append(part)
        for start, end, origin, first in spans_of(part):
            start, end = start + length, end + length
            if spans and _continues(spans[-1], start, origin, first):
                start, _, _, first = spans.pop()
            spans.append((start, end, origin, first))
        length += len(part)
    return Traced("".join(texts), tuple(spans))


def shifted(spans: Iterable[Span], distance: int) -> Iterator[Span]:
    """``spans`` of a string that stands ``distance`` characters into another one."""
    for start, end, origin, first in spans:
        yield start + distance, end + distance, origin, first


def clipped(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """``spans`` inside [start, stop), counted from ``start``."""
    found: list[Span] = []
    for index in range(bisect_right(spans, start, key=_end), len(spans)):
        begin, end, origin, first = spans[index]
        if begin >= stop:
            break
        cut = max(start - begin, 0)
        if begin + cut < min(end, stop):
            if origin != PLACED:
                first += cut
            found.append((begin + cut - start, min(end, stop) - start, origin, first))
    return tuple(found)


def _continues(last: Span, start: int, origin: int, first: int) -> bool:
    if last[1] != start or last[2] != origin:
        return False
    return origin == PLACED or last[3] + start - last[0] == first


def _end(span: Span) -> int:
    return span[1]
