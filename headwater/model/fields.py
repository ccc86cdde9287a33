"""Typed reading of a foreign mapping: a model's config.json or a GGUF file's metadata.

Every getter either returns a value of its type or raises ModelError naming the
file, the field, the value found and what was expected. Knows no model family.
Called by the config readers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headwater.core.errors import ModelError


class Fields:
    """Read-only view of ``values``, which came from ``where`` (a file, for messages).

    ``None`` counts as absent: both formats write null for "not set".
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refuse(self, name: str, supported: str) -> ModelError:
        """The error for a value that is well formed but cannot be run."""
        return ModelError(
            f"{self.where}: {name} = {self.values.get(name)!r} is not supported; "
            f"supported: {supported}"
        )

    def _wrong(self, name: str, expected: str) -> ModelError:
        if not self.has(name):
            return ModelError(f"{self.where}: {name} is missing; expected {expected}")
        return ModelError(f"{self.where}: {name} must be {expected}, got {self.values.get(name)!r}")

    def positive_int(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, "a positive integer")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a positive number")
        if not (math.isfinite(value) and value > 0):
            raise self._wrong(name, "a positive number")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, "an integer of at least 0")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or any(
            isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value
        ):
            raise self._wrong(name, "a list of integers of at least 0")
        return tuple(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        """An id, a list of ids, or nothing."""
        value = self.values.get(name)
        found = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in found):
            raise self._wrong(name, "a token id or a list of token ids")
        return frozenset(found)

    def token_id(self, name: str) -> int | None:
        """An id or nothing; of a list, the first."""
        value = self.values.get(name)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, "a token id")
        return value

    def nested(self, name: str) -> Fields | None:
        """The mapping under ``name``; None when absent or empty."""
        value = self.values.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self.where}: {name}")
