"""The pure parts: the cap, the days, who goes first; and the bytes of a record's header."""

from __future__ import annotations

import random

import pytest
from disk_parts import DAY_S, MIB, NOW_S, WEEK, chain, content, pieces
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.blocks import PREFIX_KEY_BYTES, CacheIdentity, PrefixKey
from headwater.core.cache import KVPart, RecordMeta, Retention, RetentionClass
from headwater.core.errors import StoreError
from headwater.disk.capacity_plan import GIB, describe_capacity, plan_capacity, plan_limits
from headwater.disk.eviction import SegmentUse, choose_spared, plan_eviction, worth_s
from headwater.disk.record_format import (
    ALIGN_BYTES,
    BadRecord,
    decode_header,
    encode_header,
    header_block,
    payload_offset,
)
from headwater.disk.retention import StoredPiece, expiry_day, is_clock_back, plan_segment_end

metas = st.builds(
    RecordMeta,
    key=st.binary(min_size=PREFIX_KEY_BYTES, max_size=PREFIX_KEY_BYTES).map(PrefixKey),
    parent=st.binary(min_size=PREFIX_KEY_BYTES, max_size=PREFIX_KEY_BYTES).map(PrefixKey),
    identity=st.builds(CacheIdentity, st.text(max_size=9), st.text(max_size=9), st.text()),
    part=st.sampled_from(KVPart),
    start=st.integers(0, 2**40),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40).map(tuple),
)


@given(
    meta=metas,
    kind=st.sampled_from(RetentionClass),
    keep_s=st.floats(0, 1e9),
    written_s=st.floats(0, 1e12),
    payload=st.binary(max_size=300),
)
def test_a_header_says_all_of_a_record_and_reads_back(
    meta: RecordMeta, kind: RetentionClass, keep_s: float, written_s: float, payload: bytes
) -> None:
    header = encode_header(
        meta, Retention(kind, keep_s), written_s=written_s, payload=pieces(payload)
    )
    block = header_block(header)
    assert len(block) == header.payload_at == payload_offset(meta)
    assert len(block) % ALIGN_BYTES == header.span_bytes % ALIGN_BYTES == 0
    assert decode_header(block) == header
    assert (header.meta, header.payload_bytes) == (meta, len(payload))


def test_i08_no_bytes_make_the_header_reader_do_anything_but_refuse() -> None:
    (meta,) = chain(range(4))
    block = header_block(encode_header(meta, WEEK, written_s=NOW_S, payload=pieces(content(meta))))
    rng = random.Random(8)
    for _ in range(2000):
        crafted = bytearray(block)
        for _ in range(rng.randint(1, 12)):
            crafted[rng.randrange(130)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        if bytes(crafted) != block:
            with pytest.raises(BadRecord):
                decode_header(memoryview(crafted))
    for length in (0, 7, 8, 50, 105, 106, 130):
        with pytest.raises(BadRecord):
            decode_header(block[:length])


def test_k07_no_cap_is_lowered_in_silence() -> None:
    free = {"free_bytes": 10 * GIB, "reserve_bytes": GIB, "used_bytes": 0}
    assert plan_capacity(max_bytes=9 * GIB, **free) == 9 * GIB
    with pytest.raises(StoreError, match="9 GiB to spare"):
        plan_capacity(max_bytes=9 * GIB + 1, **free)
    assert plan_capacity(max_bytes=None, **free) == 4.5 * GIB
    assert plan_capacity(max_bytes=None, **{**free, "free_bytes": 900 * GIB}) == 16 * GIB
    assert plan_capacity(max_bytes=None, **{**free, "free_bytes": 0}) == 16 * MIB


def test_k07_the_plan_says_bytes_tokens_and_days() -> None:
    line = describe_capacity(
        max_bytes=16 * GIB,
        used_bytes=GIB,
        bytes_per_token=23_040,
        record_tokens=32,
        overhead_bytes=4096,
        keep_s=7 * DAY_S,
    )
    assert line == (
        "16 GiB in all, 1 GiB used; 23,168 bytes per token, room for 741,534 tokens; "
        "above 1.23 new tokens/s they go before their 7 days"
    )


@given(st.integers(16 * MIB, 2**50))
def test_what_a_cap_keeps_free_leaves_most_of_it_to_use(max_bytes: int) -> None:
    limits = plan_limits(max_bytes=max_bytes, reserve_bytes=0, segment_bytes=64 * MIB)
    kept_free = limits.headroom_bytes + limits.working_bytes + limits.spare_bytes
    assert kept_free < max_bytes // 8
    assert limits.log_bytes * 2 < limits.headroom_bytes
    assert limits.segment_bytes <= max_bytes // 32


def test_a_day_is_over_when_all_of_it_is() -> None:
    assert expiry_day(0.0) == 0
    assert expiry_day(DAY_S - 1) == 0
    assert expiry_day(DAY_S) == 1
    assert not is_clock_back(NOW_S, NOW_S - 30)
    assert is_clock_back(NOW_S, NOW_S - 3600)


def piece(name: str, num_bytes: int, worth: float, expires_s: float = NOW_S + 1) -> StoredPiece:
    return StoredPiece(name.encode(), 0, num_bytes, worth, expires_s)


def test_a_segment_at_its_end_moves_few_and_waits_for_many() -> None:
    pieces = [piece("a", 60, 0, NOW_S - 1), piece("b", 20, 0, NOW_S + 5 * DAY_S)]
    few = plan_segment_end(pieces, segment_bytes=100, now_s=NOW_S, max_moved_share=0.25)
    assert ([p.key for p in few.expired], few.move) == ([b"a"], (pieces[1],))
    many = plan_segment_end(pieces, segment_bytes=79, now_s=NOW_S, max_moved_share=0.25)
    assert many.move is None
    assert many.day == expiry_day(NOW_S) + 5
    none = plan_segment_end(pieces[:1], segment_bytes=60, now_s=NOW_S, max_moved_share=0.0)
    assert none.move == ()


def use(number: int, worth: float, live_bytes: int = 100) -> SegmentUse:
    return SegmentUse(segment_id=number, file_bytes=100, live_bytes=live_bytes, worth_s=worth)


def test_hollow_segments_go_first_then_the_least_used() -> None:
    segments = [use(1, 30.0), use(2, 10.0), use(3, 20.0), use(4, 90.0, live_bytes=20)]
    plan = plan_eviction(segments, need_bytes=181, max_moved_share=0.25)
    assert [victim.segment_id for victim in plan] == [4, 2, 3]
    assert plan[0].spare_above_s == float("-inf")
    assert plan[1].spare_above_s == 30.0
    assert plan_eviction(segments, need_bytes=0, max_moved_share=0.25) == ()
    all_of_them = plan_eviction(segments, need_bytes=10_000, max_moved_share=0.25)
    assert len(all_of_them) == 4
    assert all_of_them[-1].spare_above_s == float("inf")


def test_a_victims_best_records_are_spared_within_the_share() -> None:
    (victim,) = plan_eviction([use(1, 10.0), use(2, 30.0)], need_bytes=50, max_moved_share=0.25)
    pieces = [
        piece("old", 10, 5.0),
        piece("best", 15, 90.0),
        piece("good", 10, 40.0),
        piece("fair", 10, 35.0),
        piece("expired", 1, 99.0, NOW_S),
    ]
    spared = choose_spared(pieces, victim, max_moved_share=0.25, now_s=NOW_S)
    assert [p.key for p in spared] == [b"best", b"good"]


def test_heads_outlive_tails_of_the_same_age() -> None:
    assert worth_s(NOW_S, 0) > worth_s(NOW_S, 32) > worth_s(NOW_S - 60, 0) - 60
