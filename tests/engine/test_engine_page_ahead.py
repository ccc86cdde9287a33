"""KV memory is there before it is needed, and bringing it changes nothing."""

from __future__ import annotations

import ctypes
import sys

import pytest

from headwater.engine.kv_cache import KVCache, allocate_kv
from headwater.engine.kv_plan import KVLimits, plan_kv
from headwater.engine.page_ahead import PagesAhead
from headwater.model.family import CacheGroup, CacheKind
from headwater.numerics.ops import KVFormat, Ops, WeightFormat
from headwater.numerics.select import select_ops

NUM_BLOCKS = 2048
BLOCK_BYTES = 2 * 32 * 4 * 64 * 2  # keys and values of 32 tokens, 4 heads of 64, bf16
PLAN = (CacheGroup(kind=CacheKind.GLOBAL, layers=(0, 1), num_kv_heads=4, head_dim=64),)
LARGE_PAGE_BYTES = 2 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")


@pytest.fixture
def ops() -> Ops:
    return select_ops("cpu", "fast", WeightFormat.BF16, 1)


@pytest.fixture
def kv(ops: Ops) -> KVCache:
    plan = plan_kv(
        KVLimits(block_tokens=32, num_blocks=NUM_BLOCKS),
        bytes_per_token=2 * BLOCK_BYTES // 32,
        model_context_tokens=4096,
        available_bytes=2**40,
    )
    return allocate_kv(ops, plan, PLAN, KVFormat.BF16)


def resident_share(ops: Ops, kv: KVCache, begin: int, end: int) -> float:
    """Of the pages of blocks [begin, end) of the first layer's keys."""
    first, last = ops.kv_buffers(kv.layers[0], begin), ops.kv_buffers(kv.layers[0], end - 1)
    assert first is not None
    assert last is not None
    start = ctypes.addressof(ctypes.c_char.from_buffer(first[0])) // 4096 * 4096
    length = ctypes.addressof(ctypes.c_char.from_buffer(last[0])) + len(last[0]) - start
    pages = (ctypes.c_ubyte * -(-length // 4096))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def test_memory_for_the_first_blocks_comes_at_once_and_no_more_than_that(
    ops: Ops, kv: KVCache
) -> None:
    pages = PagesAhead(ops, kv, NUM_BLOCKS // 8)
    pages.reach(-1)
    pages.wait()
    assert pages.num_ready_blocks == NUM_BLOCKS // 4
    assert resident_share(ops, kv, 0, pages.num_ready_blocks) == 1.0
    behind = pages.num_ready_blocks + LARGE_PAGE_BYTES // (BLOCK_BYTES // 2)
    assert resident_share(ops, kv, behind, NUM_BLOCKS) < 0.1


def test_it_stays_ahead_of_what_is_used_to_the_end(ops: Ops, kv: KVCache) -> None:
    ahead = NUM_BLOCKS // 8
    pages = PagesAhead(ops, kv, ahead)
    for block in range(NUM_BLOCKS):
        pages.reach(block)
        pages.wait()
        assert pages.num_ready_blocks >= min(block + ahead, NUM_BLOCKS)
    assert resident_share(ops, kv, 0, NUM_BLOCKS) == 1.0


def test_it_changes_nothing_that_was_written(ops: Ops, kv: KVCache) -> None:
    for block in range(0, NUM_BLOCKS, 97):
        for buffer in ops.kv_buffers(kv.layers[1], block) or ():
            buffer[:] = bytes([block % 251]) * len(buffer)
    pages = PagesAhead(ops, kv, NUM_BLOCKS)
    pages.reach(-1)
    pages.wait()
    for block in range(0, NUM_BLOCKS, 97):
        for buffer in ops.kv_buffers(kv.layers[1], block) or ():
            assert bytes(buffer) == bytes([block % 251]) * len(buffer)
