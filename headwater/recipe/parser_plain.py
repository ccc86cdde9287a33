"""The format without marks: every text is the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.recipe.parsers import OutputParser, PlainParser


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Implements :class:`headwater.recipe.parsers.ParserFormat`."""

    reasoning: bool = False
    tools: bool = False

    def open(
        self, *, in_reasoning: bool, tools: bool, new_call_id: Callable[[], str]
    ) -> OutputParser:
        return PlainParser()


PLAIN = PlainFormat()
