"""What a task has to work with: how much room, how hard, which words and texts."""

from __future__ import annotations

from dataclasses import dataclass

from tools.mini.text import Texts
from tools.mini.words import Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """``chars``: how long the document may be; ``stage`` in [0, 1] is how far training is;
    ``words`` are for what is asked for, ``common`` for all other text; ``is_long``: the
    document should fill its room."""

    chars: int
    stage: float
    words: Words
    common: Words
    texts: Texts
    is_long: bool = False
