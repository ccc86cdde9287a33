"""Who starts, and which chunk of whose prompt is computed in the next step. Pure.

Takes values and returns a frozen plan: no clock, no kv, no engine. The worker's
scheduler and the simulator call the same function. How long a chunk takes says ``budget``.

    sequence  [ hit | computed |  chunk  | later ... )
              0                ^         ^ start + num_tokens
                             start = what has KV now
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headwater.core.errors import ConfigError
from headwater.core.step import SequenceId
from headwater.prefill.budget import StepTime, chunk_tokens

# Where the second, third and fourth class of what prompts lack begins.
CLASS_TOKENS = (256, 2048, 16384)
# Every so many steps the prompt that came first goes first, however much it lacks.
OLDEST_EVERY = 4


class ServiceOrder(NamedTuple):
    """Smaller goes first: by priority, then preempted before new, then by arrival."""

    priority: int
    is_new: bool  # False after a preemption: its work was started once already
    arrival: int


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A sequence that holds blocks for all its tokens and lacks KV for the last of them,
    from ``start`` on. Late layers leave out those before ``late_start`` (None: none)."""

    sequence_id: SequenceId
    order: ServiceOrder
    num_remaining_tokens: int
    start: int = 0
    late_start: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingCandidate:
    """A sequence without blocks. ``num_remaining_tokens`` is its miss, with what is
    replayed; ``num_needed_blocks`` leave the available ones when it starts. One that
    ``must_load`` starts with a load: it is computed in later steps."""

    sequence_id: SequenceId
    order: ServiceOrder
    num_remaining_tokens: int
    num_needed_blocks: int
    must_load: bool = False
    start: int = 0
    late_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRoom:
    """What this step offers. ``reserve_blocks_per_sequence`` stay available for each
    running sequence to grow into, so that who starts is not preempted at once. ``time``
    bounds the chunks beside ``budget_tokens``. ``turn`` counts the steps that computed
    prompts."""

    budget_tokens: int
    num_available_blocks: int
    num_running: int
    max_running_sequences: int
    reserve_blocks_per_sequence: int
    time: StepTime | None = None
    turn: int = 0

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
    """``admitted`` start in this order; each of them also has a chunk, or must load."""

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


def class_of(num_remaining_tokens: int) -> int:
    """Shorter ones go first, in four classes: within one, who came first.

    >>> [class_of(n) for n in (255, 256, 6000, 100_000)]
    [0, 1, 2, 3]
    """
    return bisect_right(CLASS_TOKENS, num_remaining_tokens)


class _Rank(NamedTuple):
    """Smaller is computed first."""

    is_passed: bool  # False for the oldest one in its turn
    priority: int
    length_class: int
    is_new: bool
    arrival: int


def plan_prefill(
    running: Iterable[PrefillCandidate], waiting: Iterable[WaitingCandidate], room: PrefillRoom
) -> PrefillPlan:
    """Hand out the step's tokens and time, whole remainders first to first.

    Who is first: by priority, then by the class of what is left to compute, so that a short
    prompt does not wait for a long one that runs; then preempted before new, then by arrival.
    In every ``OLDEST_EVERY``-th turn the running one that came first is before all others:
    whatever comes, a prompt that has started goes on within so many steps of being the oldest.

    ``running`` comes in any order; ``waiting`` in service order, and is read
    only as far as needed (looking at a waiting sequence costs a probe). Nobody
    overtakes a waiting sequence that does not fit: it would starve. A sequence
    starts only in a step that computes some of it; one that loads first takes its
    blocks and none of the budget, and those behind it are not held up.

    With 10 tokens, a running remainder of 6 and a later waiting one of 30 that fits:
    chunks of 6 and 4.
    """
    ready = _in_turn(running, room.turn)
    newcomers = iter(waiting)
    newcomer = next(newcomers, None) if room.budget_tokens > 0 else None
    budget_tokens, time = room.budget_tokens, room.time
    num_available = room.num_available_blocks
    num_running = room.num_running
    admitted: list[SequenceId] = []
    chunks: list[PrefillChunk] = []

    while budget_tokens > 0 and (ready or newcomer is not None):
        candidate: PrefillCandidate | WaitingCandidate
        is_newcomer = newcomer is not None and (not ready or _rank(newcomer) < ready[0][0])
        if newcomer is not None and is_newcomer:
            if not may_start(newcomer.num_needed_blocks, num_available, num_running, room):
                newcomer = None  # and nobody behind it
                continue
            candidate = newcomer
        else:
            candidate = ready.popleft()[1]
        must_load = isinstance(candidate, WaitingCandidate) and candidate.must_load
        num_tokens = 0
        if not must_load:
            num_tokens = min(candidate.num_remaining_tokens, budget_tokens)
            if time is not None:
                num_tokens = chunk_tokens(
                    time, candidate.start, num_tokens, candidate.late_start, is_first=not chunks
                )
            if not num_tokens:
                break
        if isinstance(candidate, WaitingCandidate):
            num_available -= candidate.num_needed_blocks
            num_running += 1
            admitted.append(candidate.sequence_id)
            newcomer = next(newcomers, None)
            if must_load:
                continue
        budget_tokens -= num_tokens
        chunks.append(PrefillChunk(candidate.sequence_id, num_tokens))
        if num_tokens < candidate.num_remaining_tokens:
            break  # nothing is left of the step
        if time is not None:
            time = time.with_row(candidate.start, num_tokens, candidate.late_start)
    return PrefillPlan(tuple(admitted), tuple(chunks))


def _rank(candidate: PrefillCandidate | WaitingCandidate, *, is_passed: bool = True) -> _Rank:
    order = candidate.order
    return _Rank(
        is_passed,
        order.priority,
        class_of(candidate.num_remaining_tokens),
        order.is_new,
        order.arrival,
    )


def _in_turn(
    running: Iterable[PrefillCandidate], turn: int
) -> deque[tuple[_Rank, PrefillCandidate]]:
    candidates = list(running)
    oldest = None
    if candidates and turn % OLDEST_EVERY == OLDEST_EVERY - 1:
        oldest = min(candidates, key=lambda candidate: candidate.order.arrival)
    ranked = [(_rank(c, is_passed=c is not oldest), c) for c in candidates]
    return deque(sorted(ranked, key=lambda pair: pair[0]))
