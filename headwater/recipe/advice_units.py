"""A recorded prompt as units that an alignment can move: messages, all tools, pieces of text.

    spans   [format)[system)[format)[tool)[format)[tool)[format)[user)[format)
    units   [      message 0       )[        tools             )[message 1)[ end )

A unit holds the format's tokens before it, so units add up to the prompt. Equal units
of different prompts are one object. Pure values; used by ``advice`` and its parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, TypeAlias
from weakref import WeakValueDictionary

from headwater.recipe.record import (
    NO_INDEX,
    PIECE_DIGEST_BYTES,
    Piece,
    RecordedSpan,
    RequestRecord,
    Said,
    SpanKind,
)

UnitKind: TypeAlias = Literal["message", "tools", "text", "end"]
NO_SAYING: Final = Said(role="")
# Reasoning, calls and names stand beside these, or are all that an assistant's turn has.
_OWNERS: Final[tuple[SpanKind, ...]] = ("system", "user", "tool_result", "tool", "text")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Unit:
    """``parts`` are the kinds of its spans and their pieces, in order, and ``pieces`` all of
    these; ``key`` is equal for equal tokens and kinds, ``body`` for equal ones that are not
    the format's."""

    key: bytes
    body: bytes
    kind: UnitKind
    parts: tuple[tuple[SpanKind, tuple[Piece, ...]], ...]
    pieces: tuple[Piece, ...]
    num_tokens: int

    def has(self, kind: SpanKind) -> bool:
        return any(found == kind for found, _ in self.parts)

    def without(self, *kinds: SpanKind) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of the parts that are of none of ``kinds``."""
        return tuple(pieces for found, pieces in self.parts if found not in kinds)

    @property
    def subject(self) -> SpanKind:
        """Whose it is: a role's, the tools', or text without a role."""
        kinds = {kind for kind, _ in self.parts}
        return next((kind for kind in _OWNERS if kind in kinds), "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One record. ``units[i]`` belongs to message ``indexes[i]`` and begins at token
    ``starts[i]``; ``end`` are the format's tokens after the last one, if there are any."""

    number: int
    units: tuple[Unit, ...]
    indexes: tuple[int, ...]
    starts: tuple[int, ...]
    end: Unit | None
    num_tokens: int
    messages: tuple[Said, ...]
    tools: tuple[str, ...]

    def said(self, position: int) -> Said:
        """What the message of unit ``position`` said."""
        index = self.indexes[position]
        known = self.units[position].kind == "message" and 0 <= index < len(self.messages)
        return self.messages[index] if known else NO_SAYING

    @property
    def all_units(self) -> tuple[Unit, ...]:
        return self.units if self.end is None else (*self.units, self.end)


class UnitMaker:
    """Turns records into prompts. Keeps one object of each unit that is still in use."""

    def __init__(self) -> None:
        self._units: WeakValueDictionary[bytes, Unit] = WeakValueDictionary()
        self._num_prompts = 0

    def prompt(self, record: RequestRecord) -> Prompt:
        units: list[Unit] = []
        indexes: list[int] = []
        end: Unit | None = None
        for kind, index, spans in _grouped(record.spans):
            if kind == "text":
                pieces = [piece for span in spans for piece in span.pieces]
                units += [self._unit(kind, [("text", (piece,))]) for piece in pieces]
                indexes += [NO_INDEX] * len(pieces)
                continue
            unit = self._unit(kind, [(span.kind, span.pieces) for span in spans])
            if kind == "end":
                end = unit
            else:
                units.append(unit)
                indexes.append(index)
        self._num_prompts += 1
        return Prompt(
            number=self._num_prompts - 1,
            units=tuple(units),
            indexes=tuple(indexes),
            starts=tuple(accumulate((unit.num_tokens for unit in units[:-1]), initial=0))
            if units
            else (),
            end=end,
            num_tokens=record.num_tokens,
            messages=record.messages,
            tools=record.tools,
        )

    def _unit(self, kind: UnitKind, parts: Sequence[tuple[SpanKind, tuple[Piece, ...]]]) -> Unit:
        key = _digest(kind, parts)
        unit = self._units.get(key)
        if unit is None:
            pieces = tuple(piece for _, some in parts for piece in some)
            body = _digest(kind, [part for part in parts if part[0] != "format"])
            unit = Unit(key, body, kind, tuple(parts), pieces, num_tokens_of(pieces))
            self._units[key] = unit
        return unit


def _digest(kind: UnitKind, parts: Iterable[tuple[SpanKind, Iterable[Piece]]]) -> bytes:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for part, pieces in parts:
        digest.update(b"|" + part.encode())
        for piece in pieces:
            digest.update(piece.digest.to_bytes(PIECE_DIGEST_BYTES, "little"))
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs of pieces differ: the tokens that both begin with, those that both end
    with, and how many lie between in each."""

    num_before: int
    num_after: int
    num_left: int
    num_right: int

    @property
    def likeness(self) -> float:
        """Common tokens over those of the longer run."""
        common = self.num_before + self.num_after
        return common / max(1, common + max(self.num_left, self.num_right))


def parting(left: Sequence[Piece], right: Sequence[Piece]) -> Parting:
    """
    >>> a, b, c, d = (Piece(digest, 10) for digest in range(4))
    >>> parting((a, b, c), (a, d, d, c))
    Parting(num_before=10, num_after=10, num_left=10, num_right=20)
    """
    before = common_pieces(left, right)
    rest = min(len(left), len(right)) - before
    after = common_pieces(left[len(left) - rest :][::-1], right[len(right) - rest :][::-1])
    return Parting(
        num_tokens_of(left[:before]),
        num_tokens_of(left[len(left) - after :]),
        num_tokens_of(left[before : len(left) - after]),
        num_tokens_of(right[before : len(right) - after]),
    )


def common_pieces(left: Iterable[Piece], right: Iterable[Piece]) -> int:
    """How many pieces both begin with."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def num_tokens_of(pieces: Iterable[Piece]) -> int:
    return sum(piece.num_tokens for piece in pieces)


def _grouped(
    spans: Iterable[RecordedSpan],
) -> Iterator[tuple[UnitKind, int, list[RecordedSpan]]]:
    """Runs of spans of one message (all tools count as one), format spans with the next."""
    run: list[RecordedSpan] = []
    place: tuple[UnitKind, int] | None = None
    waiting: list[RecordedSpan] = []
    for span in spans:
        if span.kind == "format":
            waiting.append(span)
            continue
        here = _place(span)
        if place is not None and here != place:
            yield (*place, run)
            run = []
        run += [*waiting, span]
        waiting = []
        place = here
    if place is not None:
        yield (*place, run)
    if waiting:
        yield "end", NO_INDEX, waiting


def _place(span: RecordedSpan) -> tuple[UnitKind, int]:
    match span.kind:
        case "tool":
            return "tools", NO_INDEX
        case "text":
            return "text", NO_INDEX
        case _:
            return "message", span.index
