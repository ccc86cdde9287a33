"""When a record's time is over, whatever the clock does, and what becomes of a segment then.

Pure. Times are unix seconds, because ages outlive processes (C04). A record is kept for
``keep_s`` from its last use. Segment files are made per day of expiry: when the day is over,
most of a file is, and the file goes as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DAY_S = 86400
# A clock that is set right by less is not worth noticing.
CLOCK_SLACK_S = 60.0


def expiry_day(expires_s: float) -> int:
    """Days since 1970 of the day within which it expires."""
    return int(expires_s // DAY_S)


def is_clock_back(latest_s: float, now_s: float) -> bool:
    """Whether the clock was set back since the store saw ``latest_s``.

    Then records last used "in the future" count as used now: they live for ``keep_s`` from
    now, neither for ever nor shorter than promised.
    """
    return now_s < latest_s - CLOCK_SLACK_S


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A record as its place in a segment: ``num_bytes`` with header and padding, ``worth_s``
    its place in the order of eviction."""

    key: bytes
    offset: int
    num_bytes: int
    worth_s: float
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEnd:
    """What becomes of a segment whose day is over.

    ``expired`` leave the index. ``move`` are copied to segments of their new days, and the file
    goes; None: too much of it was used since, so it stays, to be looked at again after ``day``.
    """

    expired: tuple[StoredPiece, ...]
    move: tuple[StoredPiece, ...] | None
    day: int


def plan_segment_end(
    pieces: Sequence[StoredPiece], *, segment_bytes: int, now_s: float, max_moved_share: float
) -> SegmentEnd:
    """``segment_bytes``: the file's size.

    >>> old = StoredPiece(b"a", 0, 90, 0.0, 1.0)
    >>> used = StoredPiece(b"b", 90, 10, 5.0, 99.0)
    >>> end = plan_segment_end([old, used], segment_bytes=100, now_s=9.0, max_moved_share=0.25)
    >>> [p.key for p in end.expired], [p.key for p in end.move or ()]
    ([b'a'], [b'b'])
    """
    expired = tuple(piece for piece in pieces if piece.expires_s <= now_s)
    alive = tuple(piece for piece in pieces if piece.expires_s > now_s)
    is_movable = sum(piece.num_bytes for piece in alive) <= max_moved_share * segment_bytes
    return SegmentEnd(
        expired=expired,
        move=alive if is_movable else None,
        day=min((expiry_day(piece.expires_s) for piece in alive), default=expiry_day(now_s)),
    )
