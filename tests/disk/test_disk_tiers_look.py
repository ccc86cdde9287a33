"""What a look finds in the tiers, and why it says that it ends there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from disk_parts import BLOCK, US, WEEK, chain
from disk_tiers_harness import (
    SIZES,
    ArrayMemory,
    DoorStore,
    RealClock,
    keep,
    metas_of,
    payload,
    wait_until,
    windows,
)

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.cache import KVPart, MissReason, RecordMeta, Retention, RetentionClass, Tier
from headwater.core.errors import InvalidChange
from headwater.core.ports import StoredPrefix
from headwater.disk.host import RECORD_OVERHEAD_BYTES, HostStore
from headwater.disk.tiers import Tiers
from headwater.disk.tiers_look import BATCH_ROWS


class Both:
    """A host tier and a disk tier over ``HostStore``s; any test may put records into either."""

    def __init__(self, *, has_window: bool = False, close_s: float = 5.0) -> None:
        self.host, self.disk = DoorStore(Tier.HOST), DoorStore(Tier.DISK)
        self.memory = ArrayMemory(has_window=has_window)
        self.tiers = Tiers(
            self.memory,
            block_tokens=BLOCK,
            clock=RealClock(),
            host=self.host,
            disk=self.disk,
            close_s=close_s,
        )

    def look(
        self, tokens: Sequence[int], first_row: int = 0, identity: CacheIdentity = US
    ) -> StoredPrefix:
        lookup = self.tiers.look(tokens, identity, first_row)
        wait_until(lambda: lookup.is_done)
        return lookup.result()


@pytest.fixture
def both() -> Iterator[Both]:
    both = Both()
    yield both
    both.tiers.close()


@pytest.fixture
def windowed() -> Iterator[Both]:
    both = Both(has_window=True)
    yield both
    both.tiers.close()


def test_rows_come_from_the_fastest_tier_that_has_them_without_a_gap(both: Both) -> None:
    metas = chain(range(6 * BLOCK))
    keep(both.host, [metas[0], metas[2], metas[5]])
    keep(both.disk, metas[:4])
    prefix = both.look(range(7 * BLOCK))
    assert metas_of(prefix.rows) == metas[:4]
    tiers = [row.record.tier for row in prefix.rows]
    assert tiers == [Tier.HOST, Tier.DISK, Tier.HOST, Tier.DISK]
    assert prefix.tail is None
    assert prefix.reason is MissReason.NEW


def test_rows_that_the_device_has_are_not_looked_for(both: Both) -> None:
    metas = chain(range(5 * BLOCK))
    keep(both.disk, metas[2:])
    prefix = both.look(range(5 * BLOCK), first_row=2)
    assert prefix.first_row == 2
    assert metas_of(prefix.rows) == metas[2:]
    assert prefix.reason is MissReason.NONE
    assert both.look(range(5 * BLOCK)).rows == ()
    beyond = both.look(range(2 * BLOCK), first_row=2)
    assert (beyond.rows, beyond.reason) == ((), MissReason.NONE)


def test_prompts_longer_than_a_batch_of_keys_are_found_whole(both: Both) -> None:
    metas = chain(range((2 * BATCH_ROWS + 5) * BLOCK))
    keep(both.disk, metas)
    assert len(both.look(range(len(metas) * BLOCK)).rows) == len(metas)
    late = both.look(range(len(metas) * BLOCK), first_row=BATCH_ROWS + 1)
    assert metas_of(late.rows) == metas[BATCH_ROWS + 1 :]


def test_all_but_the_last_token_is_a_whole_hit(both: Both) -> None:
    keep(both.disk, chain(range(2 * BLOCK)))
    assert both.look(range(2 * BLOCK + 1)).reason is MissReason.NONE
    assert both.look(range(2 * BLOCK + 2)).reason is MissReason.NEW


def test_the_tail_is_what_shares_most_tokens_whether_longer_or_shorter(both: Both) -> None:
    common = list(range(BLOCK))
    keep(both.disk, chain([*common, 10, 11, 12, 13]))
    keep(both.disk, chain([*common, 20, 21])[1:])
    keep(both.host, chain([*common, 20, 99])[1:])

    whole = both.look([*common, 20, 21, 22, 23, 24])
    assert whole.tail is not None
    assert (whole.tail.record.meta.tokens, whole.num_tail_tokens) == ((20, 21), 2)
    assert whole.tail.record.tier is Tier.DISK
    assert whole.reason is MissReason.NEW, "nothing that was kept goes further"

    within = both.look([*common, 10, 11, 77])
    assert within.tail is not None
    assert (within.tail.record.meta.tokens, within.num_tail_tokens) == ((10, 11, 12, 13), 2)
    assert within.reason is MissReason.NONE

    apart = both.look([*common, 10, 11, 77, 78])
    assert (apart.num_tail_tokens, apart.reason) == (2, MissReason.DIFFERS)


def test_at_equal_length_the_faster_tier_has_the_tail(both: Both) -> None:
    metas = chain(range(BLOCK + 2))
    keep(both.disk, metas)
    keep(both.host, metas[1:])
    tail = both.look(range(2 * BLOCK)).tail
    assert tail is not None
    assert tail.record.tier is Tier.HOST


def test_a_difference_at_a_blocks_border_is_one_and_at_the_very_start_is_none(both: Both) -> None:
    keep(both.disk, chain(range(2 * BLOCK)))
    assert both.look([*range(BLOCK), 91, 92, 93, 94, 95]).reason is MissReason.DIFFERS
    assert both.look([91, 92, 93, 94, 95]).reason is MissReason.NEW
    first = both.look([0, 1, 93, 94, 95])
    assert (first.num_tail_tokens, first.reason) == (2, MissReason.DIFFERS)


def test_a_tail_that_does_not_belong_there_is_not_taken(both: Both) -> None:
    """C01: whatever a store's index says, a hit has the prompt's own tokens, place and names."""
    (row, tail) = chain(range(BLOCK + 2))
    wrong = [
        replace(tail, identity=CacheIdentity("model-2", "layout", "tenant")),
        replace(tail, key=PrefixKey(row.key[::-1])),
        replace(tail, start=0),
        replace(tail, part=KVPart.WINDOW, key=PrefixKey(b"w" * 16)),
    ]
    keep(both.disk, [row])
    for number, meta in enumerate(wrong):
        size = SIZES[KVPart.GLOBAL]
        assert both.disk.inner.put(meta, [memoryview(bytes(size))], WEEK), number
        assert both.look(range(2 * BLOCK)).tail is None, number
        both.disk.inner.remove([meta.key])


def test_a_record_that_is_not_what_its_key_says_is_a_miss_and_goes(both: Both) -> None:
    metas = chain(range(3 * BLOCK))
    forged = replace(metas[1], tokens=(7, 7, 7, 7))
    short = metas[2]
    keep(both.disk, [metas[0]])
    assert both.disk.inner.put(forged, [memoryview(payload(metas[1]))], WEEK)
    assert both.host.inner.put(short, [memoryview(bytes(10))], WEEK)
    assert metas_of(both.look(range(3 * BLOCK)).rows) == metas[:1]
    wait_until(lambda: both.disk.inner.find([forged.key]) == [None])
    wait_until(lambda: both.host.inner.find([short.key]) == [None])
    keep(both.disk, metas[1:])
    assert metas_of(both.look(range(3 * BLOCK)).rows) == metas
    assert [stats.num_errors for stats in both.tiers.stats()] == [1, 1]


def test_window_parts_are_found_by_their_own_names_in_either_tier(windowed: Both) -> None:
    metas = chain(range(4 * BLOCK + 2))
    parts = windows(metas)
    keep(windowed.disk, metas)
    keep(windowed.disk, [parts[2], parts[3]])
    keep(windowed.host, [parts[3], parts[4]])
    prefix = windowed.look(range(5 * BLOCK))
    found = [row.window for row in prefix.rows]
    assert [window and (window.meta, window.tier) for window in found] == [
        None, None, (parts[2], Tier.DISK), (parts[3], Tier.HOST),
    ]  # fmt: skip
    assert prefix.tail is not None
    assert prefix.tail.window is not None
    assert prefix.tail.window.meta == parts[4]


def test_models_without_windows_ask_for_none(both: Both) -> None:
    keep(both.disk, chain(range(4 * BLOCK)))
    both.look(range(4 * BLOCK))
    assert both.disk.names("find") == ["find"]


def test_what_expired_or_was_evicted_is_the_reason_even_beside_a_difference() -> None:
    """Our own next block was there; that another prompt goes on differently is no reason."""
    host = HostStore(
        max_bytes=3 * (SIZES[KVPart.GLOBAL] + RECORD_OVERHEAD_BYTES), clock=RealClock()
    )
    disk = DoorStore(Tier.DISK)
    tiers = Tiers(ArrayMemory(), block_tokens=BLOCK, clock=RealClock(), host=host, disk=disk)
    try:
        metas = chain(range(3 * BLOCK))
        keep(host, [metas[1]])
        keep(disk, [metas[0], *chain([*range(BLOCK), 8, 8, 8, 8])[1:]])
        keep(host, chain(range(100, 100 + 3 * BLOCK)))
        evicted = tiers.look(range(3 * BLOCK), US, 0)
        wait_until(lambda: evicted.is_done)
        assert (len(evicted.result().rows), evicted.result().reason) == (1, MissReason.EVICTED)
        keep(disk, [metas[1]], Retention(RetentionClass.AGENT, 1e-6))
        expired = tiers.look(range(3 * BLOCK), US, 0)
        wait_until(lambda: expired.is_done)
        assert expired.result().reason is MissReason.EXPIRED, "the disk keeps longer: it knows"
    finally:
        tiers.close()


def test_c08_c12_other_weights_and_other_tenants_are_told_apart_and_never_hit(both: Both) -> None:
    tokens = range(3 * BLOCK)
    keep(both.disk, chain(tokens, CacheIdentity("model-2", "layout", "tenant")))
    keep(both.disk, chain(range(50, 50 + BLOCK), CacheIdentity("model", "layout-2", "tenant")))
    keep(both.disk, chain(range(90, 90 + BLOCK), CacheIdentity("model", "layout", "them")))
    # A store that cannot say who else has it leaves it at NEW.
    assert both.look(tokens).reason is MissReason.NEW
    inner = both.disk.inner
    assert isinstance(inner, HostStore)
    tiers = Tiers(ArrayMemory(), block_tokens=BLOCK, clock=RealClock(), disk=inner)
    try:
        for first, reason in (
            (0, MissReason.OTHER_MODEL),
            (50, MissReason.OTHER_MODEL),
            (90, MissReason.OTHER_TENANT),
            (70, MissReason.NEW),
        ):
            lookup = tiers.look(range(first, first + 2 * BLOCK), US, 0)
            wait_until(lambda lookup=lookup: lookup.is_done)  # type: ignore[misc]
            assert lookup.result() == StoredPrefix(first_row=0, reason=reason)
    finally:
        tiers.close()


@pytest.mark.parametrize("call", ["find", "children", "absence"])
def test_a_store_that_fails_leaves_what_the_other_has(both: Both, call: str) -> None:
    metas = chain(range(3 * BLOCK))
    keep(both.host, metas[:2])
    keep(both.disk, metas[2:])
    both.disk.doors[call].error = OSError(5, "Input/output error")
    prefix = both.look([*range(3 * BLOCK), 1, 2, 3, 4, 5])
    assert metas_of(prefix.rows) == (metas[:2] if call == "find" else metas)
    assert prefix.reason is MissReason.UNAVAILABLE
    host, disk = both.tiers.stats()
    assert (host.num_errors, disk.num_errors) == (0, 1)
    assert disk.last_error == "OSError: Input/output error"
    both.disk.doors[call].error = None
    assert both.look([*range(3 * BLOCK), 1, 2, 3, 4, 5]).reason is MissReason.NEW


def test_a_store_that_hangs_leaves_the_look_open_and_the_caller_free(both: Both) -> None:
    both.disk.doors["find"].shut()
    lookup = both.tiers.look(range(2 * BLOCK), US, 0)
    wait_until(lambda: both.disk.doors["find"].num_waiting == 1)
    assert not lookup.is_done
    with pytest.raises(InvalidChange):
        lookup.result()
    second = both.tiers.look(range(2 * BLOCK), US, 0)
    assert not second.is_done
    both.disk.doors["find"].open()
    wait_until(lambda: lookup.is_done and second.is_done)


def test_looks_that_wait_at_the_end_are_unavailable() -> None:
    both = Both(close_s=0.05)
    both.disk.doors["find"].shut()
    lookups = [both.tiers.look(range(2 * BLOCK), US, 1) for _ in range(3)]
    wait_until(lambda: both.disk.doors["find"].num_waiting == 1)
    both.tiers.close()
    for lookup in lookups[1:]:
        assert lookup.result() == StoredPrefix(first_row=1, reason=MissReason.UNAVAILABLE)
    assert both.tiers.look(range(9), US, 0).result().reason is MissReason.UNAVAILABLE
    both.disk.doors["find"].open()
    wait_until(lambda: lookups[0].is_done)


def test_the_same_prefix_is_found_wherever_its_records_lie() -> None:
    """Random trees of prompts, their records spread over two tiers, against the obvious search."""
    draw = random.Random(5)
    both = Both(has_window=True)
    try:
        kept: dict[bytes, RecordMeta] = {}
        for _ in range(60):
            tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 6 * BLOCK))]
            for meta in chain(tokens):
                for record in (meta, *windows([meta])):
                    kept[record.key] = record
        # A tail that a longer record replaces depends on the order: leave those out.
        every = sorted(kept.values(), key=lambda meta: -len(meta.tokens))
        sides = {meta.key: draw.choice((0, 0, 1, 2, 3)) for meta in every}
        for meta in every:
            if sides[meta.key] & 1:
                keep(both.host, [meta])
            if sides[meta.key] & 2:
                keep(both.disk, [meta])
        there = {key: meta for key, meta in kept.items() if sides[meta.key]}
        for _ in range(150):
            tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 6 * BLOCK))]
            prefix = both.look(tokens)
            assert_as_obvious(prefix, tokens, there)
            for row in (*prefix.rows, *([prefix.tail] if prefix.tail else [])):
                for found in (row.record, row.window):
                    if found is not None:
                        in_host = sides[found.meta.key] & 1
                        assert found.tier is (Tier.HOST if in_host else Tier.DISK)
    finally:
        both.tiers.close()


def assert_as_obvious(
    prefix: StoredPrefix, tokens: Sequence[int], there: dict[bytes, RecordMeta]
) -> None:
    rows = []
    for meta in chain(tokens[: len(tokens) // BLOCK * BLOCK]):
        if meta.key not in there:
            break
        rows.append(meta)
    assert metas_of(prefix.rows) == rows
    end = len(rows) * BLOCK
    parent = rows[-1].key if rows else US.root_key()
    rest = tuple(tokens[end:])
    shares = {
        meta.tokens: next(
            (i for i, (a, b) in enumerate(zip(meta.tokens, rest, strict=False)) if a != b),
            min(len(meta.tokens), len(rest)),
        )
        for meta in there.values()
        if meta.parent == parent
    }
    if len(rest) <= 1:
        assert (prefix.tail, prefix.reason) == (None, MissReason.NONE)
        return
    most = max(shares.values(), default=0)
    assert prefix.num_tail_tokens == most
    if most:
        assert prefix.tail is not None
        assert shares[prefix.tail.record.meta.tokens] == most
    for row in (*prefix.rows, *([prefix.tail] if prefix.tail else [])):
        (name,) = windows([row.record.meta])
        assert (row.window and row.window.meta) == there.get(name.key)
    goes_on = any(share == most and len(content) > most for content, share in shares.items())
    if most >= len(rest) - 1:
        reason = MissReason.NONE
    elif goes_on and end + most:
        reason = MissReason.DIFFERS
    else:
        reason = MissReason.NEW
    assert prefix.reason is reason
