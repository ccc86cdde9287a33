"""Who starts, and which chunk of whose prompt is computed in the next step. Pure.

Takes values and returns a frozen plan: no clock, no kv, no engine. The worker's
scheduler and the simulator call the same function.

    sequence  [ hit | computed |  chunk  | later ... )
              0                ^         ^ start + num_tokens
                             start = what has KV now
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headwater.core.errors import ConfigError
from headwater.core.step import SequenceId


class ServiceOrder(NamedTuple):
    """Smaller goes first: by priority, then preempted before new, then by arrival."""

    priority: int
    is_new: bool  # False after a preemption: its work was started once already
    arrival: int


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A sequence that holds blocks for all its tokens and lacks KV for the last of them."""

    sequence_id: SequenceId
    order: ServiceOrder
    num_remaining_tokens: int


@dataclass(frozen=True, slots=True)
class WaitingCandidate:
    """A sequence without blocks. ``num_remaining_tokens`` is its miss;
    ``num_needed_blocks`` leave the available ones when it starts."""

    sequence_id: SequenceId
    order: ServiceOrder
    num_remaining_tokens: int
    num_needed_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRoom:
    """What this step offers. ``reserve_blocks_per_sequence`` stay available for each
    running sequence to grow into, so that who starts is not preempted at once."""

    budget_tokens: int
    num_available_blocks: int
    num_running: int
    max_running_sequences: int
    reserve_blocks_per_sequence: int

    def __post_init__(self) -> None:
        if self.budget_tokens < 0:
            raise ConfigError(f"prefill budget_tokens must be >= 0, got {self.budget_tokens}")


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The sequence's next ``num_tokens`` tokens without KV."""

    sequence_id: SequenceId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """``admitted`` start in this order; each of them also has a chunk."""

    admitted: tuple[SequenceId, ...]
    chunks: tuple[PrefillChunk, ...]


def may_start(
    num_needed_blocks: int, num_available_blocks: int, num_running: int, room: PrefillRoom
) -> bool:
    """Whether one more sequence fits beside ``num_running`` others.

    With nothing running there is nobody to keep a reserve for, and refusing
    would stop the worker for ever: then bare fit is enough.
    """
    if num_running >= room.max_running_sequences:
        return False
    reserve = room.reserve_blocks_per_sequence * (num_running + 1) if num_running else 0
    return num_needed_blocks + reserve <= num_available_blocks


def plan_prefill(
    running: Iterable[PrefillCandidate], waiting: Iterable[WaitingCandidate], room: PrefillRoom
) -> PrefillPlan:
    """Hand out ``room.budget_tokens`` in service order, whole remainders first to first.

    ``running`` comes in any order; ``waiting`` in service order, and is read
    only as far as needed (looking at a waiting sequence costs a probe). Nobody
    overtakes a waiting sequence that does not fit: it would starve. A sequence
    starts only in a step that computes some of it.

    With 10 tokens, a running remainder of 6 and a later waiting one of 30 that fits:
    chunks of 6 and 4.
    """
    ready = deque(sorted(running, key=lambda candidate: candidate.order))
    newcomers = iter(waiting)
    newcomer = next(newcomers, None) if room.budget_tokens > 0 else None
    budget_tokens = room.budget_tokens
    num_available = room.num_available_blocks
    num_running = room.num_running
    admitted: list[SequenceId] = []
    chunks: list[PrefillChunk] = []

    while budget_tokens > 0 and (ready or newcomer is not None):
        candidate: PrefillCandidate | WaitingCandidate
        if newcomer is not None and (not ready or newcomer.order < ready[0].order):
            if not may_start(newcomer.num_needed_blocks, num_available, num_running, room):
                newcomer = None  # and nobody behind it
                continue
            num_available -= newcomer.num_needed_blocks
            num_running += 1
            admitted.append(newcomer.sequence_id)
            candidate, newcomer = newcomer, next(newcomers, None)
        else:
            candidate = ready.popleft()
        num_tokens = min(candidate.num_remaining_tokens, budget_tokens)
        budget_tokens -= num_tokens
        chunks.append(PrefillChunk(candidate.sequence_id, num_tokens))
    return PrefillPlan(tuple(admitted), tuple(chunks))
