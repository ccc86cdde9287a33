"""What every dialect wants of a turn's parts: no blank text beside calls, one call if so asked.

Wraps the recipe's output parser, so stop strings, logprobs and all dialects see
the same parts, streamed or not. Knows no dialect and no model format.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.recipe.parsers import OutputParser, Stage
from headwater.recipe.parts import AnswerText, Part, ToolCallEnd, ToolCallStart


class TidyParser:
    """An ``OutputParser`` around another one, for conversations that offer tools.

    Models write line breaks before, between and after calls. Text that holds
    nothing but whitespace is dropped when a call stands beside it (A02): it
    would become an empty-looking block of its own. Whitespace at the start of
    real text stays, and an answer of nothing but whitespace, without any call,
    stays too. Without ``parallel`` the turn ends with its first call.
    """

    def __init__(self, parser: OutputParser, *, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self._held = ""  # whitespace that may yet begin a text
        self._in_text = False
        self._had_call = False
        self._is_over = False

    @property
    def control_literals(self) -> frozenset[str]:
        return self._parser.control_literals

    @property
    def stage(self) -> Stage:
        return "tool_call" if self._is_over else self._parser.stage

    def push(self, text: str) -> list[Part]:
        return self._tidied(self._parser.push(text))

    def push_control(self, literal: str) -> list[Part]:
        return self._tidied(self._parser.push_control(literal))

    def finish(self) -> list[Part]:
        parts = self._tidied(self._parser.finish())
        if self._held and not self._had_call:
            parts.append(AnswerText(self._held))
        self._held = ""
        return parts

    def _tidied(self, parts: Iterable[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if self._is_over:
                break
            match part:
                case AnswerText(text=text) if not self._in_text:
                    self._held += text
                    if self._held.isspace() or not self._held:
                        continue
                    kept.append(AnswerText(self._held))
                    self._held, self._in_text = "", True
                    continue
                case ToolCallStart():
                    self._held, self._in_text, self._had_call = "", False, True
                case ToolCallEnd():
                    self._is_over = not self._parallel
                case _:
                    pass
            kept.append(part)
        return kept
