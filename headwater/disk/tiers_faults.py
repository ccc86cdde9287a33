"""What went wrong in the tiers' threads: counted by tier, each kind logged once.

A tier that fails for an hour is one line in the log and a number in the statistics, never
an exception on a step's thread. Says the kind of error and where it came from; what the
system said, but no other message, since those may carry content.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter

from headwater.core.cache import Tier
from headwater.core.errors import HeadwaterError

log = logging.getLogger("headwater.disk")


class Faults:
    """Shared by the threads of one ``Tiers``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Tier] = Counter()
        self._last: dict[Tier, str] = {}
        self._said: set[tuple[Tier, str, str]] = set()

    def count(self, tier: Tier, doing: str, error: Exception | str, num: int = 1) -> None:
        """``doing`` completes "could not"; ``error`` is caught or, in words, our own."""
        what = error if isinstance(error, str) else _described(error)
        with self._lock:
            self._counts[tier] += num
            self._last[tier] = what
            kind = (tier, doing, what if isinstance(error, str) else type(error).__name__)
            is_new = kind not in self._said
            self._said.add(kind)
        if is_new:
            log.warning("%s tier: could not %s: %s (said once)", tier, doing, what)

    def num_errors(self, tier: Tier) -> int:
        return self._counts[tier]

    def last_error(self, tier: Tier) -> str:
        """Empty when there was none."""
        return self._last.get(tier, "")


def _described(error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error, OSError):
        return f"{name}: {error.strerror or error.errno}"
    if isinstance(error, HeadwaterError):
        return f"{name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{name} at {frames[-1].name}:{frames[-1].lineno}" if frames else name
