"""Requests that wait, a bounded time, to hear what the tiers hold of their tokens.

    device probe --> rows the device lacks? --> tiers.look --> stored prefix, or UNAVAILABLE

Knows choices, the tiers' port and a clock; plans nothing. ``tiering`` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.blocks import CacheIdentity
from headwater.core.cache import MissReason
from headwater.core.ports import Clock, KVTiers, Lookup
from headwater.core.step import SequenceId
from headwater.worker.choice import Choice

# A look takes milliseconds. A store that does not answer in this time is not waited for,
# and nobody else waits for it before it has answered: the device alone must do.
LOOK_LIMIT_S = 0.2


@dataclass(frozen=True, slots=True)
class _Look:
    choice: Choice
    lookup: Lookup
    start_s: float


class Lookups:
    """Lookups in progress, one per choice."""

    def __init__(self, tiers: KVTiers, clock: Clock) -> None:
        self._tiers = tiers
        self._clock = clock
        self._looks: dict[SequenceId, _Look] = {}
        self._late: Lookup | None = None  # the last one that was not waited for

    def __len__(self) -> int:
        return len(self._looks)

    def start(self, choice: Choice, identity: CacheIdentity, first_row: int) -> bool:
        """Ask for what is kept from ``first_row`` on. False: the store does not answer now."""
        if self._late is not None and not self._late.is_done:
            choice.search.give_up(MissReason.UNAVAILABLE)
            return False
        lookup = self._tiers.look(tuple(choice.sequence.tokens), identity, first_row)
        self._looks[choice.sequence_id] = _Look(choice, lookup, self._clock.now_s())
        return True

    def take_done(self) -> list[Choice]:
        """Those that need not wait any more, with ``stored`` or the reason set."""
        if not self._looks:
            return []
        now_s = self._clock.now_s()
        done = []
        for look in list(self._looks.values()):
            if look.lookup.is_done:
                look.choice.search.stored = look.lookup.result()
            elif now_s - look.start_s >= LOOK_LIMIT_S:
                look.choice.search.give_up(MissReason.UNAVAILABLE)
                self._late = look.lookup
            else:
                continue
            del self._looks[look.choice.sequence_id]
            done.append(look.choice)
        return done

    def forget(self, choice: Choice) -> bool:
        """The choice ended; whatever its look finds is not wanted. False if it had none."""
        return self._looks.pop(choice.sequence_id, None) is not None
