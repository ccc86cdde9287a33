"""Which decoding sequences go in the next step, and who is preempted for them. Pure.

Takes values and returns a frozen plan: no clock, no kv, no engine. The worker's
scheduler and the simulator call the same function.

A decode row writes the KV of its newest token, so it needs a block only when
that token crosses a block border:

    block_tokens = 4    num_tokens 8, 2 blocks -> none    num_tokens 9, 2 blocks -> one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.core.step import SequenceId


class RunningCandidate(NamedTuple):
    """A sequence that holds blocks. One that is still in prefill or loads KV has all the
    blocks it needs (``num_missing_blocks == 0``) and no decode row, but can be preempted."""

    sequence_id: SequenceId
    priority: int  # smaller is more important
    arrival: int
    num_missing_blocks: int
    is_decoding: bool


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """``rows`` decode in this order; ``preempted`` give their blocks back first. Then all
    rows have blocks, as soon as every block is there that was counted as available."""

    rows: tuple[SequenceId, ...]
    preempted: tuple[SequenceId, ...]


def plan_decode(
    running: Sequence[RunningCandidate],
    num_available_blocks: int,
    num_private_blocks: Callable[[SequenceId], int],
) -> DecodePlan:
    """All decoding sequences, less those that give way where blocks lack.

    The newest goes first: least important priority, then latest arrival. The
    oldest of the most important is never preempted, so it finishes whatever
    the others do (its full need was checked against the pool when it was
    submitted), and after it the next: progress is guaranteed.

    ``num_available_blocks`` counts those too that are about to be given back (a copy
    of them is under way): nobody gives way for want of a moment. ``num_private_blocks``
    tells what freeing a sequence gives; it is only asked when blocks lack. Two victims
    that share blocks only with each other give more than it says, so at worst one
    sequence too many gives way.
    """
    num_missing = sum(candidate.num_missing_blocks for candidate in running)
    if num_missing <= num_available_blocks:
        return DecodePlan(tuple(c.sequence_id for c in running if c.is_decoding), ())

    oldest_first = sorted(running, key=lambda c: (c.priority, c.arrival))
    preempted: list[SequenceId] = []
    while num_missing > num_available_blocks and len(oldest_first) > 1:
        victim = oldest_first.pop()
        num_missing -= victim.num_missing_blocks
        num_available_blocks += num_private_blocks(victim.sequence_id)
        preempted.append(victim.sequence_id)
    gone = set(preempted)
    rows = (c.sequence_id for c in running if c.is_decoding and c.sequence_id not in gone)
    return DecodePlan(tuple(rows), tuple(preempted))
