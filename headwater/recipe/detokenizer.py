"""Ids to text, a few at a time, never showing half a character.

A token may end in the middle of a UTF-8 character; its bytes wait until the
character is complete. The pieces that ``push`` and ``flush`` return always add
up to the decoding of all ids at once (A12). Knows nothing of stops or requests;
``output`` runs one per choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headwater.recipe.tokenizer import DummyPrefix

if TYPE_CHECKING:
    from headwater.recipe.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoding of one token stream.

    ``previous_id`` is the token before the first one pushed (the prompt's
    last), None at the start of a text: tokenizers that put a space before a
    text's first word have it taken off exactly where encoding puts it on.
    Hidden ids give no text unless ``keep_control``.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, keep_control: bool = False, previous_id: int | None = None
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._is_hidden = tokenizer.is_hidden
        self._is_control = tokenizer.is_control
        self._keep_control = keep_control
        self._decoder = _new_decoder(errors="replace")
        self._per_segment = tokenizer.dummy_prefix is DummyPrefix.SEGMENT
        self._drop_space = tokenizer.dummy_prefix is not DummyPrefix.NEVER and (
            previous_id is None
            or previous_id == tokenizer.bos_token_id
            or (self._per_segment and tokenizer.is_control(previous_id))
        )

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; "" while a character is unfinished."""
        piece = self._token_bytes(token_id)
        if self._is_control(token_id):
            broken = self.push_mark()
            if self._is_hidden(token_id) and not self._keep_control:
                return broken
            return broken + self._decoder.decode(piece)
        if self._drop_space and piece:
            self._drop_space = False
            piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def push_mark(self) -> str:
        """A control token stands here, whose text the caller does not want.

        Bytes left open before it can no longer be completed: one U+FFFD, or "".
        """
        self._drop_space = self._drop_space or self._per_segment
        return self._decoder.decode(b"", True)

    def flush(self) -> str:
        """End of the stream: one U+FFFD if it ended inside a character, else ""."""
        return self._decoder.decode(b"", True)


def decode_ids(tokenizer: Tokenizer, ids: Iterable[int], *, keep_control: bool = False) -> str:
    """The text of a whole id sequence."""
    detokenizer = Detokenizer(tokenizer, keep_control=keep_control)
    parts = [detokenizer.push(token_id) for token_id in ids]
    parts.append(detokenizer.flush())
    return "".join(parts)


def token_text(piece: bytes) -> str:
    """How one token is shown in a list of logprobs.

    Part of a character has no text of its own and is spelt as OpenAI does:

    >>> token_text(b" hi"), token_text(bytes([0xf0, 0x9f]))
    (' hi', 'bytes:\\\\xf0\\\\x9f')
    """
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
