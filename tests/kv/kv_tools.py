"""What the tests of kv share: a small manager, and a prompt's way through it."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.blocks import CacheIdentity
from headwater.core.cache import KVPart, RecordMeta, StoredRecord, Tier, WindowKV
from headwater.core.ports import StoredPrefix, StoredRow
from headwater.core.step import SequenceId
from headwater.kv.hit_plan import HitPlan, plan_hit
from headwater.kv.manager import KVGroup, KVManager, Lease
from headwater.kv.probe import Probe

BLOCK_TOKENS = 4
IDENTITY = CacheIdentity("model", "layout")


def manager(
    num_blocks: int = 8, *, window_tokens: int | None = None, alignment: int = 1
) -> KVManager:
    group = KVGroup(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, alignment=alignment)
    return KVManager(group, window_tokens=window_tokens)


def plan_of(
    kv: KVManager,
    probe: Probe,
    stored: StoredPrefix | None = None,
    *,
    window_kv: WindowKV = WindowKV.CHECKPOINT,
    limit_tokens: int | None = None,
    restart_tokens: int | None = None,
) -> HitPlan:
    return plan_hit(
        probe,
        stored,
        block_tokens=kv.group.block_tokens,
        window_tokens=kv.window_tokens,
        window_kv=window_kv,
        limit_tokens=probe.limit_tokens if limit_tokens is None else limit_tokens,
        alignment=kv.group.alignment,
        restart_tokens=restart_tokens,
    )


def look(
    kv: KVManager,
    tokens: Sequence[int],
    identity: CacheIdentity = IDENTITY,
    *,
    max_hit_tokens: int | None = None,
) -> HitPlan:
    """Probe and plan with what the device has."""
    return plan_of(kv, kv.probe(tokens, identity, max_hit_tokens=max_hit_tokens))


def admitted(kv: KVManager, number: int, plan: HitPlan, num_tokens: int) -> Lease:
    lease = kv.admit(SequenceId(number), plan, num_tokens)
    assert isinstance(lease, Lease)
    return lease


def start(
    kv: KVManager, number: int, tokens: Sequence[int], *, tail: bool = False, plan: bool = True
) -> Lease:
    """Admit with a look (or without) and compute everything at once."""
    found = look(kv, tokens, max_hit_tokens=None if plan else 0)
    lease = admitted(kv, number, found, len(tokens))
    kv.publish(SequenceId(number), tokens, len(tokens))
    if tail:
        kv.publish_tail(SequenceId(number), tokens, len(tokens))
    return lease


def run(kv: KVManager, number: int, tokens: Sequence[int], *, tail: bool = False) -> Lease:
    lease = start(kv, number, tokens, tail=tail)
    kv.free(SequenceId(number))
    kv.check_integrity()
    return lease


def stored_rows(
    kv: KVManager,
    tokens: Sequence[int],
    *,
    first_row: int = 0,
    windows: frozenset[int] = frozenset(),
    tier: Tier = Tier.DISK,
) -> StoredPrefix:
    """All full rows of ``tokens`` and what is left as a tail, as a tier would have them after
    a cold run; the rows in ``windows`` with their window part."""
    block_tokens = kv.group.block_tokens
    writer = KVManager(
        KVGroup(num_blocks=len(tokens), block_tokens=block_tokens), window_tokens=kv.window_tokens
    )
    cold = plan_of(writer, writer.probe(tokens, IDENTITY, max_hit_tokens=0))
    admitted(writer, 0, cold, len(tokens) + 1)
    entries = [*writer.publish(SequenceId(0), tokens, len(tokens))]
    tail = writer.publish_tail(SequenceId(0), tokens, len(tokens))
    if tail is not None:
        entries.append(tail)

    def record(meta: RecordMeta) -> StoredRecord:
        return StoredRecord(meta, tier, 100 if meta.part is KVPart.GLOBAL else 10)

    rows = tuple(
        StoredRow(
            record=record(writer.meta_of(entry, KVPart.GLOBAL)),
            window=(record(writer.meta_of(entry, KVPart.WINDOW)) if entry.row in windows else None),
        )
        for entry in entries
    )
    num_full = len(tokens) // block_tokens
    return StoredPrefix(
        first_row=first_row,
        rows=rows[first_row:num_full],
        tail=rows[num_full] if tail is not None else None,
        num_tail_tokens=len(tokens) % block_tokens,
    )
