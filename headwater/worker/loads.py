"""KV on its way from a tier or a peer into blocks, and blocks that a dead load still owns.

    begin --> running --all there--> WHOLE: kv.loaded, the sequence has its hit
                 |------too slow, failed--> what came is published, the rest is computed
                 +------aborted, preempted--> nobody waits, but the loader may still write:
                                              a *holder* keeps the blocks until it is done

Knows kv's door, loads and a clock; which choice gets what from where is ``tiering``'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.cache import MissReason
from headwater.core.ports import Clock, Load
from headwater.core.step import SequenceId
from headwater.kv.hit_plan import HitPlan
from headwater.kv.manager import KVManager, Lease
from headwater.worker.choice import Choice
from headwater.worker.load_policy import is_worth_waiting
from headwater.worker.pace import PrefillPace


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """``failure`` is None when every byte is there; else the sequence holds no blocks now."""

    choice: Choice
    lease: Lease
    hit: HitPlan
    load_s: float
    failure: MissReason | None
    num_loaded: int  # of the lease's loads


@dataclass(frozen=True, slots=True)
class _Running:
    choice: Choice
    lease: Lease
    hit: HitPlan
    load: Load
    num_saved_tokens: int | None  # computing; None: whatever it takes, its own end decides
    start_s: float


@dataclass(frozen=True, slots=True)
class _Holder:
    load: Load
    num_blocks: int
    start_s: float


class Loads:
    """Loads in progress, at most one per choice."""

    def __init__(self, kv: KVManager, pace: PrefillPace, clock: Clock) -> None:
        self._kv = kv
        self._pace = pace
        self._clock = clock
        self._running: dict[SequenceId, _Running] = {}
        self._holders: dict[SequenceId, _Holder] = {}  # ids below zero: no choice has them
        self._num_holders = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_holders(self) -> bool:
        return bool(self._holders)

    def num_held_since(self, start_s: float) -> int:
        """Blocks of loads that died at ``start_s`` or later and are not done."""
        return sum(h.num_blocks for h in self._holders.values() if h.start_s >= start_s)

    def begin(
        self, choice: Choice, lease: Lease, hit: HitPlan, load: Load, num_saved_tokens: int | None
    ) -> None:
        self._running[choice.sequence_id] = _Running(
            choice, lease, hit, load, num_saved_tokens, self._clock.now_s()
        )

    def take_ended(self) -> list[EndedLoad]:
        """Loads that need not be waited for any more. Frees what dead ones gave back."""
        self._free_holders()
        if not self._running:
            return []
        now_s = self._clock.now_s()
        ended = []
        for running in list(self._running.values()):
            load, elapsed_s = running.load, now_s - running.start_s
            if load.is_done:
                failure = load.failure
            elif running.num_saved_tokens is not None and not is_worth_waiting(
                elapsed_s,
                load.num_loaded,
                len(running.lease.loads),
                running.num_saved_tokens,
                self._pace.tokens_per_s,
            ):
                failure = MissReason.SLOW
                self.num_dropped += 1
            else:
                continue
            del self._running[running.choice.sequence_id]
            num_loaded = len(running.lease.loads)
            if failure is None:
                self._kv.loaded(running.choice.sequence_id)
            else:
                num_loaded = self._detach(running)
            ended.append(
                EndedLoad(
                    running.choice, running.lease, running.hit, elapsed_s, failure, num_loaded
                )
            )
        return ended

    def give_up(self, choice: Choice) -> None:
        """The choice ended or gave way: its blocks come back once nobody writes them."""
        self._detach(self._running.pop(choice.sequence_id))

    def _detach(self, running: _Running) -> int:
        """Returns how many moves were complete: they count, whatever else the load still does."""
        running.load.cancel()
        num_loaded = running.load.num_loaded
        self._num_holders += 1
        holder = SequenceId(-self._num_holders)
        self._kv.detach(running.choice.sequence_id, num_loaded, holder)
        blocks = {move.block for move in running.lease.loads[num_loaded:]}
        self._holders[holder] = _Holder(running.load, len(blocks), self._clock.now_s())
        self._free_holders()
        return num_loaded

    def _free_holders(self) -> None:
        for sequence_id, holder in list(self._holders.items()):
            if holder.load.is_done:
                del self._holders[sequence_id]
                self._kv.free(sequence_id)
