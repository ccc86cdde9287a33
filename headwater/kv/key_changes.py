"""Which full blocks' prefix keys came and went since they were asked for last.

What comes and goes in between is nothing: the list is as long as what differs, and never
longer than the keys that were there then and are there now. ``prefix_index`` tells it.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.core.blocks import PrefixKey
from headwater.core.fleet import KVEvents


class KeyChanges:
    """Begins with all ``keys`` that are there, as a reset."""

    def __init__(self, keys: Iterable[PrefixKey]) -> None:
        self._is_there = dict.fromkeys(keys, True)  # what differs from the last time
        self._is_reset = True

    def note(self, key: PrefixKey, *, is_there: bool) -> None:
        """``key`` came or went just now."""
        if self._is_there.pop(key, None) is None:
            self._is_there[key] = is_there

    def take(self) -> KVEvents | None:
        """What differs from the last call; None when nothing does."""
        changes, is_reset = self._is_there, self._is_reset
        if not changes and not is_reset:
            return None
        self._is_there, self._is_reset = {}, False
        return KVEvents(
            added=tuple(key for key, is_there in changes.items() if is_there),
            removed=tuple(key for key, is_there in changes.items() if not is_there),
            reset=is_reset,
        )
