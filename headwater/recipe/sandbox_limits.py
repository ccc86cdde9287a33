"""What one rendering of a chat template may cost, and the meter that counts it.

A template comes from a model's files: code from a stranger. jinja's sandbox
keeps it away from Python's insides but lets it loop and multiply at will. Here
every loop turn, call, filter and operator is a *step*, and every string is
charged before it exists. Used by ``sandbox``; knows nothing of jinja's insides.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from jinja2.exceptions import TemplateError

from headwater.recipe.provenance import spans_of

_STEPS_PER_CLOCK_READ = 64
_SPANS_PER_STEP = 16


class LimitExceeded(TemplateError):
    """A rendering needs more than its limits allow; the message names the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Bounds of one rendering. They grow with the input, so long conversations pass.

    ``max_s`` is wall time, read every few steps: it ends a rendering whose
    single steps are slow, and is not meant to be reached.
    """

    max_source_chars: int = 512 * 1024
    base_steps: int = 1_000_000
    steps_per_message: int = 1_000
    base_chars: int = 8 * 1024 * 1024
    chars_per_input_char: int = 64
    max_s: float = 20.0

    def meter(self, num_messages: int, num_input_chars: int) -> Meter:
        return Meter(
            max_steps=self.base_steps + self.steps_per_message * num_messages,
            max_chars=self.base_chars + self.chars_per_input_char * num_input_chars,
            max_s=self.max_s,
        )


class Meter:
    """What one rendering has used; raises LimitExceeded as soon as it is too much."""

    __slots__ = ("_chars_left", "_deadline_s", "_steps_left", "_steps_to_clock")

    def __init__(self, *, max_steps: int, max_chars: int, max_s: float) -> None:
        self._steps_left = max_steps
        self._chars_left = max_chars
        self._deadline_s = time.monotonic() + max_s
        self._steps_to_clock = _STEPS_PER_CLOCK_READ

    def step(self, num_steps: int = 1) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise LimitExceeded("the chat template takes too many steps")
        self._steps_to_clock -= num_steps
        if self._steps_to_clock <= 0:
            self._steps_to_clock = _STEPS_PER_CLOCK_READ
            if time.monotonic() > self._deadline_s:
                raise LimitExceeded("the chat template takes too much time")

    def text(self, num_chars: int) -> None:
        """Charge for characters that are about to exist."""
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise LimitExceeded("the chat template makes too much text")

    def string(self, text: str) -> None:
        """Charge for copying ``text`` and its origins."""
        self.step(1 + len(spans_of(text)) // _SPANS_PER_STEP)
        self.text(len(text))

    def value(self, value: object) -> None:
        """Charge for everything in ``value``, counting shared parts as often as they appear.

        A template can nest a list into itself twice, forty times over, and then
        print it. Charging when a container is made stops that at the twentieth.
        """
        pending = [value]
        while pending:
            item = pending.pop()
            self.step()
            if isinstance(item, str):
                self.text(len(item))
            elif isinstance(item, Mapping):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                pending.extend(item)
