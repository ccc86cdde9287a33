"""Which segments go when there is no more room, and which of their records are spared.

Pure. Value is seconds saved per byte times recency; the seconds that a byte of KV saves are
taken as the same for all, so recency decides. A chain's head counts as a little younger than
its tail: it serves more prompts, and a tail without it cannot be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.disk.retention import StoredPiece

# A token deeper in its prompt is so much older: 1,000 tokens count as a minute.
SECONDS_PER_TOKEN = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUse:
    """A segment that may go. ``worth_s``: mean of its records, weighted by bytes."""

    segment_id: int
    file_bytes: int
    live_bytes: int  # of records that are still in the index
    worth_s: float


@dataclass(frozen=True, slots=True)
class Victim:
    """A segment that goes. A record worth more than ``spare_above_s`` would not have gone had
    records gone one by one; such are moved if they are few."""

    segment_id: int
    file_bytes: int
    spare_above_s: float


def worth_s(last_used_s: float, start: int) -> float:
    """A record's place in the order: the least goes first. ``start``: tokens before it."""
    return last_used_s - start * SECONDS_PER_TOKEN


def plan_eviction(
    segments: Sequence[SegmentUse], *, need_bytes: int, max_moved_share: float
) -> tuple[Victim, ...]:
    """Segments whose files make ``need_bytes``, in the order in which they go; all of them if
    that is too few. First those that are mostly empty: moving what is left of them loses nothing.

    >>> a = SegmentUse(segment_id=1, file_bytes=10, live_bytes=10, worth_s=5.0)
    >>> b = SegmentUse(segment_id=2, file_bytes=10, live_bytes=10, worth_s=3.0)
    >>> plan_eviction([a, b], need_bytes=8, max_moved_share=0.25)
    (Victim(segment_id=2, file_bytes=10, spare_above_s=5.0),)
    """
    hollow = [s for s in segments if s.live_bytes <= max_moved_share * s.file_bytes]
    full = [s for s in segments if s.live_bytes > max_moved_share * s.file_bytes]
    full.sort(key=lambda segment: (segment.worth_s, segment.segment_id))
    victims: list[Victim] = []
    freed_bytes = 0
    for segment in hollow:
        if freed_bytes >= need_bytes:
            return tuple(victims)
        victims.append(Victim(segment.segment_id, segment.file_bytes, float("-inf")))
        freed_bytes += segment.file_bytes - segment.live_bytes
    going: list[SegmentUse] = []
    spare_above_s = float("inf")  # nothing stays that a record could be compared with
    for segment in full:
        if freed_bytes >= need_bytes:
            spare_above_s = segment.worth_s
            break
        going.append(segment)
        freed_bytes += segment.file_bytes
    victims += [Victim(s.segment_id, s.file_bytes, spare_above_s) for s in going]
    return tuple(victims)


def choose_spared(
    pieces: Sequence[StoredPiece], victim: Victim, *, max_moved_share: float, now_s: float
) -> tuple[StoredPiece, ...]:
    """The records of a victim that are moved: those worth most, within the share."""
    spared: list[StoredPiece] = []
    left_bytes = int(max_moved_share * victim.file_bytes)
    alive = (piece for piece in pieces if piece.expires_s > now_s)
    for piece in sorted(alive, key=lambda piece: piece.worth_s, reverse=True):
        if piece.worth_s <= victim.spare_above_s or piece.num_bytes > left_bytes:
            break
        spared.append(piece)
        left_bytes -= piece.num_bytes
    return tuple(spared)
