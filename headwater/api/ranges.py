"""Range checks for numbers that callers send; every refusal names the field.

Absent and null both mean the default. NaN and infinities fail every check.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.api.config import ApiConfig
from headwater.core.errors import InvalidRequest

MAX_TEMPERATURE = 2.0
# Larger asks mean "as much as fits" and are clamped to the room; a bound keeps sums sane.
MAX_TOKENS_ASKED = 2**53


def number(
    name: str, value: float | None, default: float, low: float, high: float, *, above: bool = False
) -> float:
    """``value`` if it lies in [low, high], or in (low, high] with ``above``.

    >>> number("top_p", None, 1.0, 0.0, 1.0, above=True)
    1.0
    """
    if value is None:
        return default
    if not low <= value <= high or (above and value == low):
        asked = f"greater than {low:g} and at most {high:g}" if above else f"{low:g} to {high:g}"
        raise out_of_range(name, asked, f"{value:g}")
    return float(value)


def integer(name: str, value: int | None, default: int, low: int, high: int) -> int:
    """``value`` if it lies in [low, high]."""
    if value is None:
        return default
    if not low <= value <= high:
        raise out_of_range(name, f"{low} to {high}", _short(value))
    return value


def count(name: str, num_items: int, high: int, what: str) -> None:
    """At most ``high`` items."""
    if num_items > high:
        raise out_of_range(name, f"at most {high} {what}", str(num_items))


def token_id(name: str, value: int, vocab_size: int) -> int:
    """``value`` if it is an id of the model's vocabulary."""
    if not 0 <= value < vocab_size:
        raise out_of_range(name, f"token ids 0 to {vocab_size - 1}", _short(value))
    return value


def stop_strings(name: str, strings: Sequence[str], config: ApiConfig) -> tuple[str, ...]:
    """A few non-empty, not too long strings."""
    count(name, len(strings), config.max_stop_strings, "strings")
    if any(not text for text in strings):
        raise InvalidRequest(f"{name}: a string is empty", param=name, code="invalid_value")
    longest = max((len(text) for text in strings), default=0)
    count(name, longest, config.max_stop_chars, "characters in a string")
    return tuple(strings)


def out_of_range(name: str, asked: str, got: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {asked}, got {got}", param=name, code="invalid_value")


def _short(value: int) -> str:
    """Python refuses to print integers of thousands of digits."""
    return str(value) if abs(value) < 10**20 else "a number beyond 20 digits"
