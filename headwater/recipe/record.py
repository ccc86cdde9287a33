"""Request records: what one prompt was made of, as keyed digests, one JSON line each.

    prompt   [format)[ system )[format)[   user    )[format)      spans, end to end
    span              [piece)[piece)[piece)                       4 to 16 tokens each

A record answers *where* two prompts part and where they meet again, and nothing
about what they say: no text, no token id, and every digest is made with a key that
the record does not hold (``record_maker``). Only values and their line form; knows
no file and no conversation. Read by ``advice``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

LINE_VERSION: Final = 1

# What a span holds: a role's text, another part of a message, a tool's definition, the
# format's own tokens, or ("text") a prompt that came as text or ids.
SpanKind: TypeAlias = Literal[
    "format", "system", "user", "assistant", "tool_result", "reasoning", "tool_call", "name",
    "tool", "text",
]  # fmt: skip
SPAN_KINDS: Final[frozenset[str]] = frozenset(get_args(SpanKind))
NO_INDEX: Final = -1  # of the format's own tokens, and of a prompt without messages

PIECE_DIGEST_BYTES: Final = 6
_PIECE_BYTES: Final = PIECE_DIGEST_BYTES + 1


class BadRecord(ValueError):
    """A line is no record: torn, of another version, or not made by Headwater."""


class Piece(NamedTuple):
    """A few tokens in a row. Equal digests of one tenant mean equal tokens."""

    digest: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpan:
    """Tokens [start, end) of the prompt. ``index`` counts messages, or tools for ``tool``."""

    kind: SpanKind
    index: int
    start: int
    end: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one message said, whatever the format printed of it: digests that do not change
    with white space or JSON spelling. Empty where the message has no such part."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One prompt. ``spans`` cover [0, num_tokens) without a gap; ``tools`` are digests like
    those of ``Said``, in the request's order."""

    time_s: float  # Unix time
    tenant: str  # a keyed digest
    model: str
    dialect: str
    spans: tuple[RecordedSpan, ...]
    messages: tuple[Said, ...] = ()
    tools: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0


class _Line(msgspec.Struct):
    """The JSON form. A span is [kind, index, tokens, pieces]; a message its four digests."""

    v: int
    t: float
    tenant: str
    model: str
    dialect: str
    spans: list[tuple[str, int, int, str]]
    messages: list[tuple[str, str, str, str]] = []
    tools: list[str] = []


def to_line(record: RequestRecord) -> bytes:
    """``record`` as one line of JSON, its end included."""
    line = _Line(
        v=LINE_VERSION,
        t=round(record.time_s, 3),
        tenant=record.tenant,
        model=record.model,
        dialect=record.dialect,
        spans=[(s.kind, s.index, s.end - s.start, _packed(s.pieces)) for s in record.spans],
        messages=[(m.role, m.content, m.reasoning, m.tool_calls) for m in record.messages],
        tools=list(record.tools),
    )
    return msgspec.json.encode(line) + b"\n"


def from_line(line: bytes) -> RequestRecord:
    """The record of one line. Raises BadRecord for anything that does not add up."""
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord("not a record's JSON") from error
    if found.v != LINE_VERSION:
        raise BadRecord(f"a record of version {found.v}; this reads version {LINE_VERSION}")
    return RequestRecord(
        time_s=found.t,
        tenant=found.tenant,
        model=found.model,
        dialect=found.dialect,
        spans=tuple(_spans(found.spans)),
        messages=tuple(
            Said(role=role, content=content, reasoning=reasoning, tool_calls=calls)
            for role, content, reasoning, calls in found.messages
        ),
        tools=tuple(found.tools),
    )


def _spans(found: Iterable[tuple[str, int, int, str]]) -> Iterator[RecordedSpan]:
    start = 0
    for kind, index, num_tokens, packed in found:
        pieces = tuple(_unpacked(packed))
        if kind not in SPAN_KINDS or index < NO_INDEX or num_tokens < 1:
            raise BadRecord("a span of an unknown kind or size")
        if sum(piece.num_tokens for piece in pieces) != num_tokens:
            raise BadRecord("a span's pieces do not add up to it")
        end = start + num_tokens
        # The kind was looked up above; the checker cannot see it.
        yield RecordedSpan(kind=kind, index=index, start=start, end=end, pieces=pieces)  # type: ignore[arg-type]
        start = end


def _packed(pieces: Iterable[Piece]) -> str:
    raw = b"".join(
        piece.digest.to_bytes(PIECE_DIGEST_BYTES, "little") + bytes((piece.num_tokens,))
        for piece in pieces
    )
    return base64.b64encode(raw).decode("ascii")


def _unpacked(text: str) -> Iterator[Piece]:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRecord("pieces are not base64") from error
    if len(raw) % _PIECE_BYTES:
        raise BadRecord("a piece is cut off")
    for offset in range(0, len(raw), _PIECE_BYTES):
        digest = int.from_bytes(raw[offset : offset + PIECE_DIGEST_BYTES], "little")
        num_tokens = raw[offset + PIECE_DIGEST_BYTES]
        if num_tokens == 0:
            raise BadRecord("a piece without tokens")
        yield Piece(digest, num_tokens)
