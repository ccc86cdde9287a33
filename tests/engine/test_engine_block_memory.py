"""The bytes of the device's blocks: which they are, and that moved ones attend as before."""

from __future__ import annotations

import threading

import pytest
import torch

from headwater.core.blocks import BlockId
from headwater.core.cache import KVPart
from headwater.core.errors import ConfigError
from headwater.core.ports import BlockMemory
from headwater.engine.block_memory import (
    StagedBlocks,
    block_memory,
)
from headwater.engine.kv_cache import KVCache, allocate_kv, kv_bytes_per_token
from headwater.engine.kv_plan import KVPlan
from headwater.model.family import CacheGroup, CacheKind
from headwater.numerics.ops import KVFormat, LayerKV, Ops, RaggedBatch
from headwater.numerics.reference import ReferenceOps
from headwater.numerics.select import select_ops

BLOCK_TOKENS = 32
NUM_BLOCKS = 6
HEADS, HEAD_DIM = 2, 32

# Layers as gemma3 has them, and two that are never kept.
MIXED = (
    CacheGroup(
        kind=CacheKind.WINDOW,
        layers=(0, 1, 3),
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        window_tokens=64,
    ),
    CacheGroup(kind=CacheKind.GLOBAL, layers=(5, 2), num_kv_heads=HEADS, head_dim=HEAD_DIM),
    CacheGroup(kind=CacheKind.DRAFT, layers=(6,), num_kv_heads=HEADS, head_dim=HEAD_DIM),
    CacheGroup(
        kind=CacheKind.GLOBAL,
        layers=(4,),
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        persisted=False,
    ),
)
# Layers as ced has them with decoder replay: two windows, of which the late one is never kept,
# and sources with a row for each token and for two.
ROWS = (
    CacheGroup(
        kind=CacheKind.WINDOW,
        layers=(0,),
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        window_tokens=64,
        is_rows=True,
    ),
    CacheGroup(
        kind=CacheKind.WINDOW,
        layers=(1,),
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        window_tokens=64,
        is_rows=True,
        is_late=True,
        persisted=False,
    ),
    CacheGroup(kind=CacheKind.GLOBAL, layers=(3,), num_kv_heads=1, head_dim=HEAD_DIM, is_rows=True),
    CacheGroup(
        kind=CacheKind.GLOBAL,
        layers=(2,),
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        is_rows=True,
        ratio=2,
    ),
)
PLAIN = (CacheGroup(kind=CacheKind.GLOBAL, layers=(0, 1), num_kv_heads=HEADS, head_dim=HEAD_DIM),)


class UnaddressableOps(ReferenceOps):
    """As on a device whose memory the host cannot address."""

    def kv_buffers(self, kv: LayerKV, block: int) -> tuple[memoryview, ...] | None:
        return None


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    scope="module",
    params=[
        "reference",
        "fast",
        "staged",
        pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_CUDA]),
    ],
)
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "staged":
        return UnaddressableOps()
    if request.param == "cuda":
        return ReferenceOps("cuda")
    mode: str = request.param
    return select_ops(device="cpu", mode=mode)


def kv_format(ops: Ops) -> KVFormat:
    return KVFormat.FP32 if isinstance(ops, ReferenceOps) else KVFormat.BF16


def cache(ops: Ops, groups: tuple[CacheGroup, ...]) -> KVCache:
    plan = KVPlan(
        num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, context_tokens=64, kv_bytes=0, reason=""
    )
    return allocate_kv(ops, plan, groups, kv_format(ops))


def write(memory: BlockMemory, block: int, part: KVPart, data: bytes) -> None:
    start = 0
    for buffer in memory.write_buffers(BlockId(block), part):
        assert (buffer.format, buffer.contiguous, buffer.readonly) == ("B", True, False)
        buffer[:] = data[start : start + len(buffer)]
        start += len(buffer)
    assert start == len(data)
    memory.written(BlockId(block), part)


def read(memory: BlockMemory, block: int, part: KVPart) -> bytes:
    return b"".join(memory.read_buffers(BlockId(block), part))


def noise(size: int, seed: int) -> bytes:
    # Every other byte is small, so that as bf16 or fp32 all of it are finite numbers.
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 60, (size,), generator=generator, dtype=torch.uint8).tolist())


def test_parts_hold_the_layers_that_are_kept_and_nothing_twice(ops: Ops) -> None:
    memory = block_memory(ops, cache(ops, MIXED), MIXED)
    layer_bytes = BLOCK_TOKENS * ops.kv_bytes_per_token(HEADS, HEAD_DIM, kv_format(ops))
    assert memory.part_bytes(KVPart.WINDOW) == 3 * layer_bytes
    assert memory.part_bytes(KVPart.GLOBAL) == 2 * layer_bytes
    plain = block_memory(ops, cache(ops, PLAIN), PLAIN)
    token_bytes = kv_bytes_per_token(ops, PLAIN, kv_format(ops))
    assert plain.part_bytes(KVPart.GLOBAL) == BLOCK_TOKENS * token_bytes
    assert plain.part_bytes(KVPart.WINDOW) == 0
    assert len(plain.write_buffers(BlockId(0), KVPart.WINDOW)) == 0


def test_every_block_and_part_keeps_its_own_bytes(ops: Ops) -> None:
    memory = block_memory(ops, cache(ops, MIXED), MIXED)
    wanted = {
        (block, part): noise(memory.part_bytes(part), 2 * block + (part is KVPart.WINDOW))
        for block in range(NUM_BLOCKS)
        for part in KVPart
    }
    for (block, part), data in wanted.items():
        write(memory, block, part, data)
    assert {place: read(memory, *place) for place in wanted} == wanted


def test_parts_of_layers_whose_rows_are_keys_and_values(ops: Ops) -> None:
    memory = block_memory(ops, cache(ops, ROWS), ROWS)
    row_bytes = HEAD_DIM * (4 if kv_format(ops) is KVFormat.FP32 else 2)
    assert memory.part_bytes(KVPart.WINDOW) == BLOCK_TOKENS * row_bytes
    # A row for each token and one for two; what a block keeps of an open row stays here.
    assert memory.part_bytes(KVPart.GLOBAL) == BLOCK_TOKENS * row_bytes * 3 // 2


def test_hit_is_miss_for_rows_that_went_out_and_came_back_elsewhere(ops: Ops) -> None:
    source, target = cache(ops, ROWS), cache(ops, ROWS)
    out, back = block_memory(ops, source, ROWS), block_memory(ops, target, ROWS)
    fill_rows(ops, source, 1)
    for part in KVPart:
        write(back, 5, part, read(out, 1, part))
    window, late, pooled, whole = range(4)
    for first, second in ((window, whole), (window, pooled)):
        theirs = attended_rows(ops, source.layers[first], source.layers[second], 1)
        assert torch.equal(
            attended_rows(ops, target.layers[first], target.layers[second], 5), theirs
        )
    assert attended_rows(ops, target.layers[late], None, 5).abs().sum() == 0


def test_copy_takes_every_row_also_of_late_layers(ops: Ops) -> None:
    kv = cache(ops, ROWS)
    fill_rows(ops, kv, 2)
    block_memory(ops, kv, ROWS).copy(BlockId(2), BlockId(4))
    for window in kv.layers[:2]:
        for source in (None, *kv.layers[2:]):
            assert torch.equal(
                attended_rows(ops, window, source, 4), attended_rows(ops, window, source, 2)
            )
        assert attended_rows(ops, window, None, 4).abs().sum() > 0


def test_a_block_changes_only_when_all_its_bytes_are_there_where_buffers_are_staged() -> None:
    ops = UnaddressableOps()
    memory = block_memory(ops, cache(ops, PLAIN), PLAIN)
    assert isinstance(memory, StagedBlocks)
    before = read(memory, 1, KVPart.GLOBAL)
    for buffer in memory.write_buffers(BlockId(1), KVPart.GLOBAL):
        buffer[:] = bytes([7]) * len(buffer)
    assert read(memory, 1, KVPart.GLOBAL) == before
    memory.written(BlockId(1), KVPart.GLOBAL)
    assert set(read(memory, 1, KVPart.GLOBAL)) == {7}


def test_copy_takes_every_layer_even_those_that_are_never_kept(ops: Ops) -> None:
    kv = cache(ops, MIXED)
    memory = block_memory(ops, kv, MIXED)
    for number, layer in enumerate(kv.layers):
        fill(ops, layer, 2, number)
    memory.copy(BlockId(2), BlockId(4))
    for layer in kv.layers:
        torch.testing.assert_close(attended(ops, layer, 4), attended(ops, layer, 2))
        assert attended(ops, layer, 4).abs().sum() > 0
        assert attended(ops, layer, 3).abs().sum() == 0


def test_hit_is_miss_for_blocks_that_went_out_and_came_back_elsewhere(ops: Ops) -> None:
    """Queries attend to moved bytes exactly as to those that the kernels wrote."""
    source, target = cache(ops, MIXED), cache(ops, MIXED)
    out, back = block_memory(ops, source, MIXED), block_memory(ops, target, MIXED)
    for number, layer in enumerate(source.layers):
        fill(ops, layer, 1, number)
    for part in KVPart:
        write(back, 5, part, read(out, 1, part))
    for number, (theirs, ours) in enumerate(zip(source.layers, target.layers, strict=True)):
        want, got = attended(ops, theirs, 1), attended(ops, ours, 5)
        is_kept = number not in (4, 6)
        assert torch.equal(got, want) == is_kept


def test_threads_move_different_blocks_at_once(ops: Ops) -> None:
    memory = block_memory(ops, cache(ops, PLAIN), PLAIN)
    size = memory.part_bytes(KVPart.GLOBAL)
    wrong: list[int] = []

    def work(block: int) -> None:
        for turn in range(30):
            data = noise(size, 100 * block + turn % 3)
            write(memory, block, KVPart.GLOBAL, data)
            if read(memory, block, KVPart.GLOBAL) != data:
                wrong.append(block)

    threads = [threading.Thread(target=work, args=(block,)) for block in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kernels_that_show_no_bytes_are_refused_with_what_to_do() -> None:
    class SealedKV:
        num_blocks = NUM_BLOCKS

    ops = UnaddressableOps()
    plan = KVPlan(
        num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, context_tokens=64, kv_bytes=0, reason=""
    )
    layers = (SealedKV(), SealedKV())
    kv = KVCache(layers=layers, groups=PLAIN, plan=plan, bytes_per_token=1, layout="sealed")
    with pytest.raises(ConfigError, match="cache_dir"):
        block_memory(ops, kv, PLAIN)


def fill(ops: Ops, layer: LayerKV, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v = (
        torch.randn(BLOCK_TOKENS, HEADS, HEAD_DIM, generator=generator).to(
            ops.device, ops.act_dtype
        )
        for _ in range(2)
    )
    slots = block * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=ops.device)
    ops.store_kv(k, v, layer, slots)


def attended(ops: Ops, layer: LayerKV, block: int) -> torch.Tensor:
    """What one query at the block's last token sees."""
    query = torch.randn(1, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(99))
    batch = RaggedBatch(
        row_starts=torch.tensor([0, 1], dtype=torch.int32, device=ops.device),
        context_lens=torch.tensor([BLOCK_TOKENS], dtype=torch.int32, device=ops.device),
        block_tables=torch.tensor([[block]], dtype=torch.int32, device=ops.device),
        positions=torch.tensor([BLOCK_TOKENS - 1], dtype=torch.int32, device=ops.device),
        slots=torch.tensor([block * BLOCK_TOKENS + BLOCK_TOKENS - 1], device=ops.device),
        max_row_tokens=1,
        max_context=BLOCK_TOKENS,
    )
    return ops.attend(query.to(ops.device, ops.act_dtype), layer, batch, 0.3).clone()


def rows_batch(ops: Ops, block: int, num_tokens: int) -> RaggedBatch:
    """The last ``num_tokens`` of one whole block, as a sequence of their own."""
    positions = torch.arange(BLOCK_TOKENS - num_tokens, BLOCK_TOKENS, device=ops.device)
    return RaggedBatch(
        row_starts=torch.tensor([0, num_tokens], dtype=torch.int32, device=ops.device),
        context_lens=torch.tensor([BLOCK_TOKENS], dtype=torch.int32, device=ops.device),
        block_tables=torch.tensor([[block]], dtype=torch.int32, device=ops.device),
        positions=positions.int(),
        slots=block * BLOCK_TOKENS + positions,
        max_row_tokens=num_tokens,
        max_context=BLOCK_TOKENS,
    )


def fill_rows(ops: Ops, kv: KVCache, block: int) -> None:
    """Something else in each layer of ``ROWS``."""
    batch = rows_batch(ops, block, BLOCK_TOKENS)
    generator = torch.Generator().manual_seed(7)
    angles = torch.zeros(BLOCK_TOKENS, 2, device=ops.device)

    def noise() -> torch.Tensor:
        rows = torch.randn(BLOCK_TOKENS, HEAD_DIM, generator=generator)
        return rows.to(ops.device, ops.act_dtype)

    for number, layer in enumerate(kv.layers):
        if number == 2:
            norm = torch.ones(HEAD_DIM, device=ops.device)
            ops.compress(noise(), noise(), norm, angles.cos(), angles.sin(), layer, batch, 1e-6)
        else:
            ops.store_rows(noise(), layer, batch.slots)


def attended_rows(ops: Ops, window: LayerKV, source: LayerKV | None, block: int) -> torch.Tensor:
    """What one query at the block's last token sees."""
    query = torch.randn(1, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(99))
    sinks = torch.zeros(HEADS, device=ops.device)
    batch = rows_batch(ops, block, 1)
    query = query.to(ops.device, ops.act_dtype)
    return ops.attend_rows(query, window, source, sinks, batch, 0.3, 64).clone()
