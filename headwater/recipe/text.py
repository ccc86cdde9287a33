"""Checks on text from outside, and the one rule that joins text parts.

Knows no tokenizer and no template. Called by ``chat`` before anything is
rendered, and by ``api`` when it turns a dialect's content into a string.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.core.errors import InvalidRequest

# Parts of one message become paragraphs: a client that sends two blocks means
# two blocks, and gluing them would join the last word to the next first word.
PART_SEPARATOR = "\n"


def join_text_parts(parts: Iterable[str]) -> str:
    """The text of a message whose content is a list of text parts.

    The parts are joined by one newline, so a list of one part gives the same
    tokens as the plain string, and no part gives the empty string.

    >>> join_text_parts(["first", "second"])
    'first\\nsecond'
    """
    return PART_SEPARATOR.join(parts)


def require_encodable(text: str, *, param: str) -> None:
    """Raise InvalidRequest naming ``param`` if ``text`` is not Unicode text.

    JSON can spell half of a surrogate pair (``"\\ud83d"``); no tokenizer can encode it.
    """
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} holds an unpaired surrogate at character {error.start}; "
            "send valid Unicode text",
            param=param,
            code="invalid_text",
        ) from None
