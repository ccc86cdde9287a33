"""One setting: its help, bounds and how its text becomes a value.

A settings group is a frozen dataclass whose fields carry an ``Option`` in
``Annotated``; flags, environment names, file keys and ``docs/settings.md`` are
all read off those fields, so they cannot disagree. Knows nothing of Headwater's
own settings, the environment or files; ``settings`` calls it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from headwater.core.errors import ConfigError

ENV_PREFIX = "HEADWATER_"
_BYTE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTES = re.compile(r"(?P<number>[0-9]+)\s*(?P<unit>[a-z]*)")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_MASK = "***"

Value = str | int | float | bool | Path | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a setting means beyond its type. ``low`` and ``high`` are inclusive."""

    help: str
    low: float | None = None
    high: float | None = None
    secret: bool = False  # never printed, never passed to a child as a flag
    none_means: str = "not set"  # how None reads in the documentation


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row of the table: a field of a settings group with all its names."""

    group: str
    field: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    default: Value
    option: Option

    @property
    def name(self) -> str:
        """Key in a file and in messages: ``server.port``."""
        return f"{self.group}.{self.field}"

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.field.upper()

    @property
    def is_bytes(self) -> bool:
        return self.kind is int and self.field.endswith("_bytes")

    def show(self, value: Value) -> str:
        """``value`` as a person reads it; a secret is masked."""
        if value is None:
            return self.option.none_means
        if isinstance(value, tuple):
            return ", ".join(_MASK if self.option.secret else item for item in value) or "none"
        if self.option.secret:
            return _MASK
        if isinstance(value, bool):
            return "true" if value else "false"
        if self.is_bytes and isinstance(value, int):
            return format_bytes(value)
        if isinstance(value, float):
            return f"{value:g}"
        return str(value)


def format_bytes(num_bytes: int) -> str:
    """Exact, in the largest unit that divides it: 33554432 -> ``32MiB``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def settings_of(group: str, group_type: type) -> tuple[Setting, ...]:
    """The table rows of one settings group, in the order of its fields."""
    hints = get_type_hints(group_type, include_extras=True)
    return tuple(
        _setting(
            group, item.name, hints[item.name], None if item.default is MISSING else item.default
        )
        for item in fields(group_type)
    )


def _setting(group: str, field: str, hint: object, default: Value) -> Setting:
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{group}.{field} carries no Option")
    inner, option = get_args(hint)
    optional = get_origin(inner) in (Union, UnionType)
    if optional:
        (inner,) = (arg for arg in get_args(inner) if arg is not type(None))
    choices: tuple[str, ...] = get_args(inner) if get_origin(inner) is Literal else ()
    kind = str if choices else (get_origin(inner) or inner)
    return Setting(
        group=group, field=field, kind=kind, choices=choices, optional=optional,
        default=default, option=option,
    )  # fmt: skip


def parse_value(setting: Setting, raw: object, where: str) -> Value:
    """``raw`` (text from a flag or the environment, or a value from a file) as the setting's type.

    Raises ConfigError naming the setting, where the value came from, and what is allowed.
    """
    try:
        value = _convert(setting, raw)
    except ValueError as error:
        shown = _MASK if setting.option.secret else repr(raw)
        raise ConfigError(f"{setting.name} {error}, got {shown} (from {where})") from None
    _check_bounds(setting, value, where)
    return value


def _convert(setting: Setting, raw: object) -> Value:
    if setting.optional and isinstance(raw, str) and raw.lower() in ("", "none"):
        return None
    if setting.choices:
        if raw not in setting.choices:
            raise ValueError("must be one of " + ", ".join(setting.choices))
        return str(raw)
    if setting.kind is bool:
        return _to_bool(raw)
    if setting.kind is int:
        return _to_bytes(raw) if setting.is_bytes else _to_int(raw)
    if setting.kind is float:
        return _to_float(raw)
    if setting.kind is tuple:
        return _to_tuple(raw)
    if not isinstance(raw, str) or not raw:
        raise ValueError("must be text that is not empty")
    return Path(raw).expanduser() if setting.kind is Path else raw


def _to_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise ValueError("must be true or false")


def _to_int(raw: object) -> int:
    # bool is an int in Python, but `port = true` in a file is a mistake.
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        try:
            return int(raw)
        except ValueError:
            pass
    raise ValueError("must be a whole number")


def _to_float(raw: object) -> float:
    if isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        if math.isfinite(value):
            return value
    raise ValueError("must be a number")


def _to_bytes(raw: object) -> int:
    if isinstance(raw, str):
        match = _BYTES.fullmatch(raw.strip().lower())
        if match is not None and match["unit"] in _BYTE_UNITS:
            return int(match["number"]) * _BYTE_UNITS[match["unit"]]
        raise ValueError("must be bytes such as 1048576, 512MiB or 4GiB")
    return _to_int(raw)


def _to_tuple(raw: object) -> tuple[str, ...]:
    items: Iterable[object]
    if isinstance(raw, str):
        items = [item.strip() for item in raw.split(",")]
    elif isinstance(raw, (list, tuple)):
        items = raw
    else:
        raise ValueError("must be text or a list of texts")
    texts = tuple(item for item in items if isinstance(item, str) and item)
    if len(texts) != len(list(items)):
        raise ValueError("must hold only texts that are not empty")
    return texts


def _check_bounds(setting: Setting, value: Value, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    low, high = setting.option.low, setting.option.high
    if (low is not None and value < low) or (high is not None and value > high):
        allowed = (
            f"from {low:g} to {high:g}"
            if low is not None and high is not None
            else (f"at least {low:g}" if low is not None else f"at most {high:g}")
        )
        raise ConfigError(f"{setting.name} must be {allowed}, got {value} (from {where})")


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` or nothing, to end a message about an unknown name."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""
