"""What reading a record from one tier costs: seconds = fixed + bytes x seconds per byte.

Fitted to the reads as they come, the newest counting most; before the first read, and
again after minutes without one, a cautious guess decides. So a tier that was slow once
is tried again. Knows no tier and no clock; the reader feeds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MIB = 2**20
# A read weighs half after this many further ones, and after this time.
HALF_READS = 16
HALF_S = 20.0
_GUESS_WEIGHT = 0.001  # of each of the guess's two points, in reads
_GUESS_MIB = 4.0  # the second point's size


@dataclass(frozen=True, slots=True)
class CostGuess:
    """What is believed before anything was measured."""

    fixed_s: float
    bytes_per_s: float


class LoadCost:
    """A line through (size, seconds), least squares with forgetting. Every call is O(1).

    >>> cost = LoadCost(CostGuess(fixed_s=0.001, bytes_per_s=2**20))
    >>> round(cost.predict_s(2**20, now_s=0.0), 3)
    1.001
    >>> for _ in range(200):
    ...     cost.observe(2**20, 0.25, now_s=1.0)
    >>> round(cost.predict_s(2**20, now_s=1.0), 2)
    0.25
    """

    def __init__(self, guess: CostGuess) -> None:
        self._guess = guess
        self._weight = self._size = self._size2 = self._time = self._size_time = 0.0
        self._last_s = 0.0

    def observe(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """One record was read in ``seconds``, ending at ``now_s``."""
        self._forget(math.pow(0.5, 1 / HALF_READS) * self._faded(now_s))
        self._last_s = now_s
        size = num_bytes / _MIB
        self._weight += 1
        self._size += size
        self._size2 += size * size
        self._time += seconds
        self._size_time += size * seconds

    def predict_s(self, num_bytes: int, now_s: float) -> float:
        """Seconds for one record of this size."""
        faded = self._faded(now_s)
        guess, per_mib_s = self._guess, _MIB / self._guess.bytes_per_s
        # The guess as two measured points, of no bytes and of _GUESS_MIB.
        large_s = guess.fixed_s + _GUESS_MIB * per_mib_s
        weight = faded * self._weight + 2 * _GUESS_WEIGHT
        size = faded * self._size + _GUESS_WEIGHT * _GUESS_MIB
        size2 = faded * self._size2 + _GUESS_WEIGHT * _GUESS_MIB**2
        time = faded * self._time + _GUESS_WEIGHT * (guess.fixed_s + large_s)
        size_time = faded * self._size_time + _GUESS_WEIGHT * _GUESS_MIB * large_s
        slope = (weight * size_time - size * time) / (weight * size2 - size * size)
        # Noise may tilt the line so far that nothing costs less than nothing.
        slope = min(max(slope, 0.0), time / size)
        fixed_s = max(0.0, (time - slope * size) / weight)
        return fixed_s + slope * num_bytes / _MIB

    def _faded(self, now_s: float) -> float:
        return math.pow(0.5, max(0.0, now_s - self._last_s) / HALF_S)

    def _forget(self, factor: float) -> None:
        self._weight *= factor
        self._size *= factor
        self._size2 *= factor
        self._time *= factor
        self._size_time *= factor
