"""Makes request records: a prompt's spans cut into pieces, and everything digested with a key.

Pieces end where their own tokens say so (a keyed rule), not at fixed positions, so
text that moved by a few tokens is cut the same way again:

    old   ...|aaaa|bbbbbb|12:04|cccc|ddddd|...
    new   ...|aaaa|bbbbbb|12:0|5 |cccc|ddddd|...      parts in one piece, meets in the next

Digests are keyed per tenant: equal texts of two tenants look different. Whoever has
the log but not the key can neither reverse nor guess one; equal pieces of one tenant
are seen to be equal, which is what the log is for. Knows no file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from typing import Final

from headwater.core.blocks import token_bytes
from headwater.recipe.conversation import Conversation, Message, Tool
from headwater.recipe.recipe import EncodedPrompt, PromptSpan
from headwater.recipe.record import (
    NO_INDEX,
    PIECE_DIGEST_BYTES,
    Piece,
    RecordedSpan,
    RequestRecord,
    Said,
    SpanKind,
)

KEY_BYTES: Final = 32
MIN_PIECE_TOKENS: Final = 4  # shorter ones would show how often single words occur
MAX_PIECE_TOKENS: Final = 16
_CUT_BITS: Final = 3  # from the minimum on, one token in eight ends a piece
_TEXT_DIGEST_BYTES: Final = 9
_MASK: Final = 2**64 - 1

_KIND_OF_ROLE: Final[dict[str, SpanKind]] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool_result",
}


class RecordMaker:
    """Makes the records of one tenant."""

    def __init__(self, key: bytes, tenant: str) -> None:
        """``key`` is the log's secret, KEY_BYTES long."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a record key has {KEY_BYTES} bytes, got {len(key)}")
        self._key = hmac.digest(key, tenant.encode(), "sha256")
        self._tenant = self._digest(b"tenant", b"", _TEXT_DIGEST_BYTES).hex()
        numbers = hmac.digest(self._key, b"cut", "sha256")
        self._factor = int.from_bytes(numbers[:8], "little") | 1
        self._offset = int.from_bytes(numbers[8:16], "little")

    def record(
        self,
        prompt: EncodedPrompt,
        conversation: Conversation | None,
        *,
        time_s: float,
        model: str,
        dialect: str,
    ) -> RequestRecord:
        """``conversation`` is None for a prompt that came as text or ids."""
        messages = () if conversation is None else conversation.messages
        tools = () if conversation is None else conversation.tools
        return RequestRecord(
            time_s=time_s,
            tenant=self._tenant,
            model=model,
            dialect=dialect,
            spans=tuple(self._spans(prompt, messages, is_text=conversation is None)),
            messages=tuple(self._said(message) for message in messages),
            tools=tuple(self._tool(tool) for tool in tools),
        )

    def _spans(
        self, prompt: EncodedPrompt, messages: Sequence[Message], *, is_text: bool
    ) -> Iterator[RecordedSpan]:
        position = 0
        between: SpanKind = "text" if is_text else "format"
        for span in sorted(prompt.spans, key=lambda span: span.start):
            start = max(span.start, position)
            if start >= span.end:
                continue
            if start > position:
                yield self._span(prompt.tokens, between, NO_INDEX, position, start)
            kind = _kind(span, messages)
            yield self._span(prompt.tokens, kind, span.message_index, start, span.end)
            position = span.end
        if position < len(prompt.tokens):
            yield self._span(prompt.tokens, between, NO_INDEX, position, len(prompt.tokens))

    def _span(
        self, tokens: Sequence[int], kind: SpanKind, index: int, start: int, end: int
    ) -> RecordedSpan:
        pieces = tuple(self._pieces(tokens[start:end]))
        return RecordedSpan(kind=kind, index=index, start=start, end=end, pieces=pieces)

    def _pieces(self, tokens: Sequence[int]) -> Iterator[Piece]:
        begin = 0
        last = len(tokens) - 1
        for position, token in enumerate(tokens):
            num_tokens = position + 1 - begin
            ends = num_tokens >= MIN_PIECE_TOKENS and (
                ((token * self._factor + self._offset) & _MASK) >> (64 - _CUT_BITS) == 0
                or num_tokens == MAX_PIECE_TOKENS
            )
            if ends or position == last:
                data = token_bytes(tokens[begin : position + 1])
                digest = self._digest(b"piece", data, PIECE_DIGEST_BYTES)
                yield Piece(int.from_bytes(digest, "little"), num_tokens)
                begin = position + 1

    def _said(self, message: Message) -> Said:
        calls = [[call.name, _plain_json(call.arguments)] for call in message.tool_calls]
        return Said(
            role=message.role,
            content=self._text(_plain(message.content)),
            reasoning=self._text(_plain(message.reasoning or "")),
            tool_calls=self._text(_dumped(calls)) if calls else "",
        )

    def _tool(self, tool: Tool) -> str:
        parts = [tool.name, _plain(tool.description), _plain_json(tool.parameters)]
        return self._text(_dumped(parts))

    def _text(self, text: str) -> str:
        """A digest as text; that of nothing is empty."""
        if not text:
            return ""
        return self._digest(b"text", text.encode(), _TEXT_DIGEST_BYTES).hex()

    def _digest(self, purpose: bytes, data: bytes, num_bytes: int) -> bytes:
        return hashlib.blake2b(
            data, key=self._key, digest_size=num_bytes, person=purpose.ljust(16, b"\0")
        ).digest()


def _kind(span: PromptSpan, messages: Sequence[Message]) -> SpanKind:
    if span.part == "content":
        return _KIND_OF_ROLE[messages[span.message_index].role]
    return span.part


def _plain(text: str) -> str:
    """``text`` without what a client may change in passing: JSON spelling, white space.

    >>> _plain('{"b": 1,\\n "a": 2}') == _plain('{"a":2,"b":1}'), _plain(" two  words\\n")
    (True, 'two words')
    """
    stripped = text.strip()
    if stripped[:1] in ("{", "["):
        value = _plain_json(stripped)
        if value is not None:
            return _dumped(value)
    return " ".join(stripped.split())


def _plain_json(text: str) -> object:
    """What ``text`` means as JSON; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _dumped(value: object) -> str:
    # Half a surrogate pair may hide in an escape; ASCII spelling keeps it out of the digest's way.
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
