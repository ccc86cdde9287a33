"""How much of a prompt is a hit, and from where each row of it comes. Pure.

Takes what the device has (``DevicePrefix``, a probe) and what the tiers beyond it have
(``StoredPrefix``), and returns a frozen plan: no blocks are taken, nothing is loaded.
``KVManager.admit`` carries it out; the simulator calls the same function.

KV is causal: the first k tokens of a block are right for every prompt that shares those k
tokens and all before. So a hit may end inside a block, which is then copied (or loaded)
into a block of the sequence's own. Where one row of KV stands for several tokens, hits end
where such a row does (``alignment``). b = block_tokens, L = the hit, W = the window, C = where
computation begins; what is computed of the hit ("replayed") keeps its global KV:

    no window     |shared|shared|shared|copy .|      L is anywhere in the copy
                  0                        L = C

    exact hit     |shared|shared|shared|copy .|      window KV is needed for [L-W+1, L) and
    with window     no     yes    yes    yes  L = C  there from window_start on: the start
                         ^window_start               of the unbroken run of rows that have it

    exact hit     |shared|shared|copy .|copied|      late layers have no KV of the hit and
    with late       yes    yes    yes C .......L     begin at C <= R, the restart: window KV is
    layers        ^window_start      = R             needed for [C-W+1, C), written from C on

    replay        |shared|copied|copied|copy .|      C = min(L - W, R): rows that touch [C, L)
                    no        ^ C ............ L     are the sequence's own, the replay writes
                              window_start           their window KV

A row that the device has without its window part, where a window is needed, is loaded from
a tier that has both. A hit that saves less than one block in all is not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headwater.core.blocks import CacheIdentity, PrefixKey, blocks_for
from headwater.core.cache import MissReason, Tier, WindowKV
from headwater.core.errors import AuditError
from headwater.core.ports import StoredPrefix, StoredRow

T = TypeVar("T")


class DeviceRow(Protocol):
    """A published block of the device, as a plan sees it (``prefix_index.PrefixEntry``)."""

    @property
    def key(self) -> PrefixKey: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def has_window(self) -> bool:
        """Whether its window layers' KV is valid too; True for models without any."""
        ...


class DevicePrefix(Protocol):
    """What the device has of a prompt (``probe.Probe``)."""

    @property
    def identity(self) -> CacheIdentity: ...
    @property
    def num_tokens(self) -> int:
        """Of the prompt."""
        ...

    @property
    def hits(self) -> Sequence[DeviceRow]:
        """The prompt's full blocks, first to last, without a gap."""
        ...

    @property
    def tail(self) -> DeviceRow | None:
        """A block of which the first ``num_tail_tokens`` continue the hits."""
        ...

    @property
    def num_tail_tokens(self) -> int: ...
    @property
    def differs(self) -> bool:
        """Whether what is published goes on with another token where hits and tail end."""
        ...


@dataclass(frozen=True, slots=True)
class SharedRow:
    """The device's block itself, whole, never written by the sequence."""

    entry: DeviceRow


@dataclass(frozen=True, slots=True)
class CopiedRow:
    """A copy of the device's block; its first ``num_tokens`` are the hit's."""

    entry: DeviceRow
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LoadedRow:
    """A block filled from a tier; its first ``num_tokens`` are the hit's."""

    row: StoredRow
    num_tokens: int
    loads_window: bool


RowSource = SharedRow | CopiedRow | LoadedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class HitPlan:
    """``sources[i]`` covers tokens [i*b, (i+1)*b) of the hit. Tiers add up to the hit tokens,
    less what comes from a peer.

    Computation starts at ``computed_from``. The sequence has window KV from ``window_start`` on
    and must never look before it.
    """

    identity: CacheIdentity
    num_tokens: int  # of the prompt
    num_hit_tokens: int
    num_replayed_tokens: int = 0
    window_start: int = 0
    sources: tuple[RowSource, ...] = ()
    reason: MissReason = MissReason.NEW
    num_device_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_load_bytes: int = 0

    @property
    def computed_from(self) -> int:
        """The tokens before it need not be computed."""
        return self.num_hit_tokens - self.num_replayed_tokens


def plan_hit(
    probe: DevicePrefix,
    stored: StoredPrefix | None,
    *,
    block_tokens: int,
    window_tokens: int | None,
    window_kv: WindowKV,
    limit_tokens: int,
    alignment: int = 1,
    restart_tokens: int | None = None,
) -> HitPlan:
    """The best hit of at most ``limit_tokens`` (and one less than the prompt). O(its blocks).

    Without window layers the longest chain wins. With them the longest exact hit, or in
    ``REPLAY`` the longest chain where that leaves less to compute. Hits end at multiples of
    ``alignment``, which divides ``block_tokens``. Computation begins at ``restart_tokens`` or
    before: from there on late layers are computed (None: there are none, or their KV is kept
    like all other). ``stored`` may be from before the probe: rows that do not connect are left
    out.
    """
    limit = aligned_down(max(0, min(limit_tokens, probe.num_tokens - 1)), alignment)
    restart = limit if restart_tokens is None else min(restart_tokens, limit)
    rows = _connect(probe, stored, block_tokens, limit)
    num_chain = aligned_down(sum(max(row.num_device, row.num_stored) for row in rows), alignment)
    num_hit, has_windows = num_chain, True
    if window_tokens is not None:
        num_hit = _longest_exact(rows, num_chain, block_tokens, window_tokens, alignment, restart)
        if window_kv is WindowKV.REPLAY:
            has_windows = min(num_chain - window_tokens, restart) <= min(num_hit, restart)
    start = min(num_hit, restart)
    if not has_windows and window_tokens is not None:
        num_hit, start = num_chain, min(num_chain - window_tokens, restart)
    if start < block_tokens:
        num_hit = start = 0

    # Window KV is needed in rows [first_window, end_window), and in others if it is there anyhow.
    first_window = end_window = blocks_for(start, block_tokens)
    if has_windows and window_tokens is not None:
        first_window = max(0, start - window_tokens + 1) // block_tokens
    sources: list[RowSource] = []
    for i, row in enumerate(rows[: blocks_for(num_hit, block_tokens)]):
        num_tokens = min(block_tokens, num_hit - i * block_tokens)
        may_share = (i + 1) * block_tokens <= start
        sources.append(row.source(num_tokens, first_window <= i < end_window, may_share))
    window_start = 0
    if not has_windows:
        window_start = start
    elif window_tokens is not None:
        window_start = _first_of_run(sources, first_window) * block_tokens
    num_by_tier = _count_tiers(sources, block_tokens)
    return HitPlan(
        identity=probe.identity,
        num_tokens=probe.num_tokens,
        num_hit_tokens=num_hit,
        num_replayed_tokens=num_hit - start,
        window_start=window_start,
        sources=tuple(sources),
        reason=_reason(probe, stored, block_tokens, limit, restart, num_hit, num_chain, alignment),
        num_device_tokens=num_by_tier[Tier.DEVICE],
        num_host_tokens=num_by_tier[Tier.HOST],
        num_disk_tokens=num_by_tier[Tier.DISK],
        num_load_bytes=sum(_load_bytes(source) for source in sources),
    )


@dataclass(slots=True)  # not frozen: a plan makes hundreds, and freezing costs most of it
class _Row:
    """One row of the prompt: who has how many of its first tokens. At least one of them does."""

    device: DeviceRow | None
    num_device: int
    stored: StoredRow | None
    num_stored: int

    @property
    def num_window(self) -> int:
        """How many of its tokens can be had with window KV."""
        device = self.num_device if self.device is not None and self.device.has_window else 0
        has_stored = self.stored is not None and self.stored.window is not None
        return max(device, self.num_stored if has_stored else 0)

    def source(self, num_tokens: int, needs_window: bool, may_share: bool) -> RowSource:
        """The device where it has them, else the fastest tier."""
        device = self.device
        if (
            device is not None
            and self.num_device >= num_tokens
            and (device.has_window or not needs_window)
        ):
            return SharedRow(device) if may_share else CopiedRow(device, num_tokens)
        if self.stored is None:
            raise AuditError(f"kv: nothing has {num_tokens} tokens of a row that is in the plan")
        return LoadedRow(self.stored, num_tokens, needs_window)


def _connect(
    probe: DevicePrefix, stored: StoredPrefix | None, block_tokens: int, limit: int
) -> list[_Row]:
    """The chain of rows that device and tiers have together, cut at ``limit`` tokens."""
    rows: list[_Row] = []
    while (start := len(rows) * block_tokens) < limit:
        room = min(block_tokens, limit - start)
        device, num_device = _at(probe.hits, probe.tail, probe.num_tail_tokens, len(rows), room)
        row, num_stored = None, 0
        if stored is not None:
            place = len(rows) - stored.first_row
            row, num_stored = _at(stored.rows, stored.tail, stored.num_tail_tokens, place, room)
        if not num_device and not num_stored:
            break
        rows.append(_Row(device, num_device, row, num_stored))
        if max(num_device, num_stored) < block_tokens:
            break
    return rows


def _at(
    rows: Sequence[T], tail: T | None, num_tail_tokens: int, place: int, room: int
) -> tuple[T | None, int]:
    """What is at ``place`` of ``rows`` and the tail behind them, and how many tokens of it."""
    if 0 <= place < len(rows):
        return rows[place], room
    if place == len(rows) and tail is not None:
        return tail, min(num_tail_tokens, room)
    return None, 0


def _longest_exact(
    rows: Sequence[_Row],
    num_chain: int,
    block_tokens: int,
    window_tokens: int,
    alignment: int,
    restart: int,
) -> int:
    """The largest L for which all rows that touch [C-W+1, C) have window KV, C = min(L, restart).

    Within a run of such rows a longer L is the easier one, so only the ends of runs count:
    the last run that begins at 0 or is at least W-1 tokens long. The run that C is in goes on
    to the end of the chain, if one source has all that is needed of C's own row.
    """
    last = blocks_for(min(num_chain, restart), block_tokens) - 1  # the row that ends at C
    end: int | None = None  # of the run that row i is in
    for i in reversed(range(last + 1)):
        num_window = aligned_down(rows[i].num_window, alignment)
        if not num_window:
            end = None
            continue
        if i == last and num_window >= min(block_tokens, num_chain - i * block_tokens):
            end = num_chain
        elif end is None or num_window < block_tokens:
            end = i * block_tokens + num_window
        if i * block_tokens <= max(0, min(end, restart) - window_tokens + 1):
            return end
    return 0


def aligned_down(num_tokens: int, alignment: int) -> int:
    """The largest multiple of ``alignment`` up to ``num_tokens``."""
    return num_tokens - num_tokens % alignment


def _first_of_run(sources: Sequence[RowSource], first_window: int) -> int:
    """The first of the rows with window KV that lead to row ``first_window`` without a gap."""
    row = first_window
    while row > 0:
        source = sources[row - 1]
        if isinstance(source, LoadedRow) or not source.entry.has_window:
            break
        row -= 1
    return row


def _reason(
    probe: DevicePrefix,
    stored: StoredPrefix | None,
    block_tokens: int,
    limit: int,
    restart: int,
    num_hit: int,
    num_chain: int,
    alignment: int,
) -> MissReason:
    """Why the hit is not longer; of several reasons the one that says most."""
    longest = aligned_down(probe.num_tokens - 1, alignment)
    if 0 < num_hit == longest:
        return MissReason.NONE
    if num_chain == limit < longest:
        return MissReason.ASKED
    if min(num_chain, restart) < block_tokens and (num_chain or restart < block_tokens):
        return MissReason.TOO_SHORT
    if num_hit < num_chain:
        return MissReason.NO_WINDOW
    if stored is not None and stored.reason not in (MissReason.NONE, MissReason.NEW):
        num_stored_rows = stored.first_row + len(stored.rows)
        if num_stored_rows >= num_hit // block_tokens:  # it speaks of this very place
            return stored.reason
    return MissReason.DIFFERS if probe.differs else MissReason.NEW


def _count_tiers(sources: Sequence[RowSource], block_tokens: int) -> dict[Tier, int]:
    counts = dict.fromkeys(Tier, 0)
    for source in sources:
        match source:
            case SharedRow():
                counts[Tier.DEVICE] += block_tokens
            case CopiedRow(num_tokens=num_tokens):
                counts[Tier.DEVICE] += num_tokens
            case LoadedRow(row=row, num_tokens=num_tokens):
                counts[row.record.tier] += num_tokens
    return counts


def _load_bytes(source: RowSource) -> int:
    if not isinstance(source, LoadedRow):
        return 0
    window = source.row.window if source.loads_window else None
    return source.row.record.num_bytes + (window.num_bytes if window is not None else 0)
