"""One tool call written as a JSON object, taken as it comes: name first, then the arguments.

    {"name": "read", "arguments": {"path": "a.txt"}}
                                  ^ from here on the arguments are passed on as they come

In any other form (arguments first, arguments as a string) the object is held until
it is whole. Whether it is a call never depends on how it was cut into pieces.
Knows no marks around the object; used by the ``parser_*`` formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, Literal

from headwater.recipe.parts import Part, ToolCallArguments, ToolCallEnd, ToolCallStart

_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_HEAD: Final = re.compile(
    rf'\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*(?P<name>{_STRING})\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*\{',
    re.DOTALL,
)
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_CALL_KEYS: Final = frozenset({"name", "type", "id", *_ARGUMENT_KEYS})
# JSON has no "<" outside strings: there the object is broken, or its closing mark stands.
_OUTSIDE: Final = re.compile(r'["{}\[\]<:]')
_INSIDE: Final = re.compile(r'["\\]')

CallState = Literal["open", "complete", "broken"]


class JsonCall:
    """Begins at the object's opening brace."""

    def __init__(self, index: int, new_call_id: Callable[[], str]) -> None:
        self._index = index
        self._new_call_id = new_call_id
        self._state: CallState = "open"
        self._held: list[str] = []  # everything, until the call has begun
        self._arguments: list[str] = []
        self._has_begun = False
        self._in_arguments = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._knows_key = False

    @property
    def state(self) -> CallState:
        return self._state

    @property
    def has_begun(self) -> bool:
        """Whether a ToolCallStart was given; if not, ``held`` is all there was."""
        return self._has_begun

    @property
    def held(self) -> str:
        return "".join(self._held)

    @property
    def in_string(self) -> bool:
        return self._in_string

    def push(self, text: str) -> tuple[list[Part], int]:
        """Parts, and how many characters of ``text`` belong to the object."""
        parts: list[Part] = []
        position = taken = 0  # [taken, position) is looked at and not passed on yet
        while position < len(text) and self._state == "open":
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, position)
            if match is None:
                position = len(text)
                break
            char = match[0]
            position = match.start() if char == "<" else match.end()
            if self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = self._is_escaped  # a quote ends the string
            elif char == '"':
                self._in_string = True
            elif char == "<":
                self._state = "broken"
            elif char == ":":
                if not self._is_call_key(text[taken:position]):
                    self._state = "broken"
            elif char in "{[":
                self._depth += 1
                if self._depth == 2 and not self._has_begun:
                    taken = self._try_begin(text, taken, position, parts)
            else:
                self._depth -= 1
                if self._depth == 1 and self._in_arguments:
                    self._pass_on(text[taken:position], parts)
                    taken = position
                    self._end_arguments(parts)
                if self._depth == 0:
                    self._state = "complete"
        self._pass_on(text[taken:position], parts)
        if self._state == "complete" and not self._has_begun:
            self._take_whole(parts)
        return parts, position

    def _is_call_key(self, recent: str) -> bool:
        """A first key that no call has: the object is an answer, and need not be held."""
        if self._knows_key or self._depth != 1:
            return True
        self._knows_key = True
        key = (self.held + recent).strip().removeprefix("{").removesuffix(":").strip()
        return key.strip('"') in _CALL_KEYS

    def _try_begin(self, text: str, taken: int, position: int, parts: list[Part]) -> int:
        """Begin the call if this brace opens its arguments; the new ``taken``."""
        match = _HEAD.fullmatch(self.held + text[taken:position])
        if match is None:
            return taken
        try:
            name = json.loads(match["name"])
        except ValueError:
            return taken
        self._begin(name, parts)
        self._in_arguments = True
        return position - 1

    def _begin(self, name: str, parts: list[Part]) -> None:
        self._has_begun = True
        self._held.clear()
        parts.append(ToolCallStart(self._index, self._new_call_id(), name))

    def _pass_on(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if not self._has_begun:
            self._held.append(text)
        elif self._in_arguments:
            self._arguments.append(text)
            parts.append(ToolCallArguments(self._index, text))

    def _end_arguments(self, parts: list[Part]) -> None:
        self._in_arguments = False
        if is_json_object("".join(self._arguments)):
            parts.append(ToolCallEnd(self._index))

    def _take_whole(self, parts: list[Part]) -> None:
        """The object is whole and did not begin as most calls do; perhaps it is one."""
        whole = _loaded(self.held)
        call: dict[str, object] = whole if isinstance(whole, dict) else {}
        name = call.get("name")
        given = [call[key] for key in _ARGUMENT_KEYS if key in call]
        if not isinstance(name, str) or len(given) != 1:
            self._state = "broken"
            return
        arguments = given[0]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        if not is_json_object(text):
            self._state = "broken"
            return
        self._begin(name, parts)
        parts += [ToolCallArguments(self._index, text), ToolCallEnd(self._index)]


def is_json_object(text: str) -> bool:
    """Whether a call's arguments are complete."""
    return isinstance(_loaded(text), dict)


def _loaded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
