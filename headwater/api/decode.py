"""JSON bytes into a typed body, with an error that names the field.

Every field a caller sends is one of four kinds: *known* (the body type has it),
*refused* (it would change the output and is not supported: said by name),
*ignored* (it changes nothing here), or *unknown* (tolerated and logged once per
name, refused in strict mode). Runs in a thread; knows no dialect.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from headwater.core.errors import InvalidRequest

log = logging.getLogger("headwater.api")

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

# An absent raw field: msgspec has no union of Raw and None.
NULL = msgspec.Raw(b"null")

MAX_NAMES_REMEMBERED = 256

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
# msgspec's other messages may quote the caller's value.
_SAFE_START = ("Expected ", "Number out of range", "Integer value out of range")

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of one route that its body type does not have.

    ``refused`` maps a name to the values that change nothing and are let pass
    (null always is); ``ignored`` names need no check at all.
    """

    refused: Mapping[str, tuple[object, ...]]
    ignored: frozenset[str]


class UnknownNames:
    """Remembers which unknown fields were logged; bounded, one per app."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def note(self, name: str) -> None:
        shown = shown_name(name)
        with self._lock:
            if shown in self._seen or len(self._seen) >= MAX_NAMES_REMEMBERED:
                return
            self._seen.add(shown)
        log.debug("ignoring a request field that is not known here: %s", shown)


class BodyDecoder(Generic[BodyT]):
    """Decodes one route's bodies."""

    def __init__(
        self, body_type: type[BodyT], table: FieldTable, *, strict: bool, unknown: UnknownNames
    ) -> None:
        self._decoder = msgspec.json.Decoder(body_type)
        self._known = frozenset(body_type.__struct_encode_fields__)
        self._table = table
        self._strict = strict
        self._unknown = unknown

    def decode(self, body: bytes) -> BodyT:
        """Raises InvalidRequest naming the field, or saying that the JSON is malformed."""
        try:
            fields = _RAW_FIELDS.decode(body)
            for name, raw in fields.items():
                if name not in self._known:
                    self._check_other(name, raw)
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise InvalidRequest("the body is not valid JSON", code="invalid_json") from None
        except RecursionError:
            raise InvalidRequest("the JSON is nested too deeply", code="invalid_json") from None

    def _check_other(self, name: str, raw: msgspec.Raw) -> None:
        if name in self._table.refused:
            value: object = msgspec.json.decode(raw)
            if value is not None and value not in self._table.refused[name]:
                raise unsupported(name)
        elif name not in self._table.ignored:
            if self._strict:
                raise InvalidRequest(
                    f"unknown field '{shown_name(name)}'",
                    param=shown_name(name),
                    code="unknown_parameter",
                )
            self._unknown.note(name)


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a raw field is there and not null."""
    return bytes(raw) != b"null"


def unsupported(param: str, what: str | None = None) -> InvalidRequest:
    """The error for something that is understood but not served."""
    return InvalidRequest(
        f"{what or repr(param)} is not supported by this server",
        param=param,
        code="unsupported_parameter",
    )


def shown_name(name: str) -> str:
    """``name`` if it can be shown as it is; a caller may put anything there."""
    return name if _PLAIN_NAME.fullmatch(name) else "(an unusual name)"


def _wrong_field(text: str) -> InvalidRequest:
    """
    >>> error = _wrong_field("Expected `float | null`, got `str` - at `$.temperature`")
    >>> error.param, str(error)
    ('temperature', 'temperature: expected float | null, got str')
    """
    match = _WHERE.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    if missing := _MISSING.match(what):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(
            f"missing required field '{param}'", param=param, code="missing_required_parameter"
        )
    if unknown := _UNKNOWN.match(what):
        # Only allow-lists forbid names inside a field: what is not on them is not served.
        return unsupported(path, f"{path}: '{shown_name(unknown['name'])}'")
    said = what.replace("`", "") if what.startswith(_SAFE_START) else "wrong value"
    said = said[0].lower() + said[1:]
    return InvalidRequest(f"{path or 'the body'}: {said}", param=path or None, code="invalid_type")
