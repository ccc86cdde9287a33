"""What every tokenizer of the recipe does.

The one promise that matters (B01): a *control* id comes only from a range that
the caller marked. Text outside those ranges is encoded as ordinary text, however
it is spelt, and benign text gets exactly the ids of the model's own tokenizer.
Knows no chat template beyond its source text; called by ``chat`` and ``output``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

CharRange = tuple[int, int]  # half-open [start, end) in characters


class DummyPrefix(StrEnum):
    """Where the tokenizer puts a space before text, so that decoding takes it off again."""

    NEVER = "never"
    FIRST = "first"  # before the first text of a prompt
    SEGMENT = "segment"  # and before each text that follows a control token


class Tokenizer(Protocol):
    """Text to ids and ids to bytes of one model.

    *Control* ids (``is_control``) never come from text. *Hidden* ids are the
    control ids that decoding leaves out: a role marker is hidden, while a
    marker of the output format such as ``<tool_call>`` is control but visible.
    """

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size); some may be unused padding of the weights."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def adds_bos(self) -> bool:
        """Whether a prompt of this model begins with ``bos_token_id``."""
        ...

    @property
    def dummy_prefix(self) -> DummyPrefix: ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of ``text`` as ordinary text: no control id, no begin id."""
        ...

    def encode_rendered(self, text: str, special_ranges: Sequence[CharRange]) -> list[int]:
        """Ids of ``text`` in which exactly ``special_ranges`` become control ids.

        The ranges ascend and do not overlap; each holds one control literal,
        else ValueError.
        """
        ...

    def encode_with_starts(
        self, text: str, special_ranges: Sequence[CharRange]
    ) -> tuple[list[int], list[int]]:
        """As ``encode_rendered``, and for each id the character where it starts."""
        ...

    def control_ranges(self, text: str, placed: Sequence[CharRange]) -> list[CharRange]:
        """Ranges of control literals that lie wholly inside one of the ``placed`` ranges.

        Leftmost first, longest at one place, as the model's own tokenizer matches them.
        """
        ...

    def control_id(self, literal: str) -> int | None: ...

    def token_literal(self, token_id: int) -> str | None:
        """How a chat template spells ``token_id``; None for an id without a name."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's UTF-8 bytes, which may be part of a character; b"" for an unused id."""
        ...

    def is_control(self, token_id: int) -> bool: ...

    def is_hidden(self, token_id: int) -> bool: ...

    def decode(self, ids: Sequence[int], *, keep_control: bool = False) -> str:
        """The text of ``ids``; bytes that form no character become U+FFFD."""
        ...
