"""How much a store may use: from the setting, the free space and what is there already.

Pure: values in, a number or a refusal out. ``store`` enforces the number, ``app`` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.errors import StoreError

MIB = 2**20
GIB = 2**30

MIN_STORE_BYTES = 16 * MIB  # below it the index and its log would be most of the store
DEFAULT_STORE_BYTES = 16 * GIB
DAY_S = 86400
MAX_TOMBSTONES = 200_000
MAX_MOVED_SHARE = 0.25  # of a segment, when the rest of it goes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What follows from the cap. ``headroom_bytes`` stay free under it for the growth of the
    index and its log; ``working_bytes`` for records that are moved before their file goes."""

    max_bytes: int
    reserve_bytes: int  # of the disk's free space, never used
    segment_bytes: int
    headroom_bytes: int
    working_bytes: int
    log_bytes: int  # the index's log is written back when it is so long
    spare_bytes: int  # an eviction frees so much more than needed, so that it is rare
    max_record_bytes: int
    max_tombstones: int
    max_moved_share: float = MAX_MOVED_SHARE


def plan_limits(*, max_bytes: int, reserve_bytes: int, segment_bytes: int) -> Limits:
    """``segment_bytes``: the largest wanted; a small cap has smaller segments."""
    segment_bytes = min(segment_bytes, max_bytes // 32)
    return Limits(
        max_bytes=max_bytes,
        reserve_bytes=reserve_bytes,
        segment_bytes=segment_bytes,
        headroom_bytes=min(16 * MIB, max_bytes // 16),
        working_bytes=int(segment_bytes * MAX_MOVED_SHARE),
        log_bytes=min(4 * MIB, max_bytes // 64),
        spare_bytes=max_bytes // 32,
        max_record_bytes=max_bytes // 4,
        max_tombstones=min(MAX_TOMBSTONES, max_bytes // (16 * 1024)),
    )


def plan_capacity(
    *, max_bytes: int | None, free_bytes: int, reserve_bytes: int, used_bytes: int
) -> int:
    """The hard cap on all files of the store.

    ``max_bytes`` None: 16 GiB, or half of what the disk has to spare where that is less. A cap
    that was asked for is taken whole or refused with StoreError, never lowered in silence (K07).
    ``used_bytes`` is what the store's folder holds already. Where the disk is full by now, a
    store without a cap of its own still opens: what is there can be read, and ``reserve_bytes``
    stops the writing.

    >>> plan_capacity(max_bytes=None, free_bytes=9 * GIB, reserve_bytes=GIB, used_bytes=0) // GIB
    4
    """
    spare_bytes = max(0, free_bytes + used_bytes - reserve_bytes)
    if max_bytes is None:
        return max(MIN_STORE_BYTES, min(DEFAULT_STORE_BYTES, spare_bytes // 2))
    if max_bytes < MIN_STORE_BYTES:
        raise StoreError(
            f"cache_max_bytes is {format_bytes(max_bytes)}, but a disk store needs at least "
            f"{format_bytes(MIN_STORE_BYTES)}; raise it, or switch the disk tier off"
        )
    if max_bytes > spare_bytes:
        raise StoreError(
            f"cache_max_bytes is {format_bytes(max_bytes)}, but the disk has "
            f"{format_bytes(spare_bytes)} to spare beyond cache_reserve_bytes "
            f"({format_bytes(reserve_bytes)}); lower cache_max_bytes, free space, or choose "
            "another cache_dir"
        )
    return max_bytes


def describe_capacity(
    *,
    max_bytes: int,
    used_bytes: int,
    bytes_per_token: int,
    record_tokens: int,
    overhead_bytes: int,
    keep_s: float,
) -> str:
    """One line for the start-up log. ``overhead_bytes``: of each record of ``record_tokens``."""
    real_bytes_per_token = bytes_per_token + overhead_bytes / record_tokens
    num_tokens = int(max_bytes / real_bytes_per_token)
    days = keep_s / DAY_S
    line = (
        f"{format_bytes(max_bytes)} in all, {format_bytes(used_bytes)} used; "
        f"{real_bytes_per_token:,.0f} bytes per token, room for {num_tokens:,} tokens"
    )
    if keep_s <= 0:
        return line
    return (
        f"{line}; above {num_tokens / keep_s:.3g} new tokens/s they go before their {days:g} days"
    )


def format_bytes(num_bytes: int) -> str:
    """``1.5 GiB``: for messages."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} bytes"
