"""Paged KV on a CPU: how a layer's blocks lie in memory, and which kernel attends to them.

    queries of a row   kernel
    few                paged vector kernel, one query at a time (decode, drafts)
    more               AMX tiles straight from the blocks, where the machine and shape allow
                       else vectors straight from the blocks, where the KV is bfloat16
                       else gathered for torch's flash attention

With a window all of them touch only the blocks that it reaches. A block is
[K, block_tokens, head_padded] for keys and the same for values, so that a head's keys
of a block are one run of memory. Used by ``cpu.py`` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from headwater.numerics import (
    cpu_amx,
    cpu_amx_attention,
    cpu_attention,
    cpu_chunk_attention,
    cpu_elementwise,
)
from headwater.numerics.cpu_attention import NO_WINDOW, PAD_HEAD, most_splits
from headwater.numerics.cpu_chunk_attention import ChunkRow, plan_chunks
from headwater.numerics.cpu_matmul import padded
from headwater.numerics.cpu_memory import Activations, Arena, Scratch
from headwater.numerics.cpu_prefill import attend_chunk
from headwater.numerics.cpu_team import ATTEND_FEW, MAX_CHUNKS, Kernel, Team
from headwater.numerics.ops import KVFormat, RaggedBatch
from headwater.numerics.reference import KV_DTYPES, bytes_of

# Rows with at most this many queries go through the paged kernel.
FEW_QUERIES = 8
_STORE_ELEMENTS = 8_192
MAX_TILE_CHUNKS = MAX_CHUNKS  # of one launch of a tile kernel


class ChunkKernel(Enum):
    """What attends to the chunks of a layer, best first."""

    TILES = auto()
    VECTORS = auto()
    GATHER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKV:
    """Keys and values [num_blocks, K, block_tokens, head_padded]."""

    k: Tensor
    v: Tensor
    k_address: int
    v_address: int
    num_blocks: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int
    head_padded: int
    is_f32: int
    chunk_kernel: ChunkKernel
    k_bytes: memoryview  # of k; a slice of it costs a hundredth of a slice of the tensor
    v_bytes: memoryview

    # What the paged kernel wants to know, in its order.
    arguments: tuple[int, int, int, int, int, int, int]

    def block_bytes(self, block: int) -> tuple[memoryview, memoryview]:
        """The keys and the values of one block, in place."""
        size = self.k_bytes.nbytes // self.num_blocks
        start = block * size
        return self.k_bytes[start : start + size], self.v_bytes[start : start + size]


def kv_bytes_per_token(num_kv_heads: int, head_dim: int, kv_format: KVFormat) -> int:
    return 2 * num_kv_heads * padded(head_dim, PAD_HEAD) * KV_DTYPES[kv_format].itemsize


def chunk_rows(batch: RaggedBatch, window: int) -> list[ChunkRow]:
    """The rows with many queries."""
    starts, contexts = batch.row_starts.tolist(), batch.context_lens.tolist()
    window_starts = [0] * len(contexts)
    if window != NO_WINDOW and batch.window_starts is not None:
        window_starts = batch.window_starts.tolist()
    tables, stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
    return [
        ChunkRow(
            number=i,
            first_token=starts[i],
            end_token=starts[i + 1],
            context=context,
            # No query of the row sees further back than its first one.
            first_seen=max(window_starts[i], context - starts[i + 1] + starts[i] - window + 1),
            table_address=tables + i * stride * 4,
        )
        for i, context in enumerate(contexts)
        if starts[i + 1] - starts[i] > FEW_QUERIES
    ]


def _is_for_tiles(row: ChunkRow, kv: CpuKV) -> bool:
    """Whether the tile kernels' work fits into one launch each: a piece for every tile row of
    keys, and one for every tile row of queries and key head."""
    num_tiles = -(-(row.end_token - row.first_token) // cpu_amx.TILE_ROWS) + 1
    return (
        row.context <= MAX_TILE_CHUNKS * cpu_amx.TILE_DEPTH
        and num_tiles * kv.num_kv_heads <= MAX_TILE_CHUNKS
    )


class PagedAttention:
    """Allocates a layer's KV, writes to it and attends over it."""

    def __init__(
        self, team: Team, scratch: Scratch, activations: Activations, *, tiles: bool
    ) -> None:
        """``tiles``: the process may use AMX tiles (``cpu_amx.tiles_available``)."""
        self._team, self._scratch, self._activations = team, scratch, activations
        self._arena = Arena()
        self._store_kernel = Kernel(cpu_elementwise.store_kv_kernel)
        self._split_kernel = Kernel(cpu_attention.attend_split_kernel)
        self._join_kernel = Kernel(cpu_attention.attend_join_kernel)
        self._tile_kernels = (
            (
                Kernel(cpu_amx_attention.transpose_values_kernel),
                Kernel(cpu_amx_attention.attend_chunk_kernel),
            )
            if tiles
            else None
        )
        self._chunk_kernel = Kernel(cpu_chunk_attention.attend_chunks_kernel)
        self._tile_config = cpu_amx.tile_config()
        self._future_keys = cpu_amx_attention.future_keys()
        self._old_keys = cpu_amx_attention.old_keys()
        self._last_batch: RaggedBatch | None = None
        self._last_arguments = (0, 0, 0, 0, 0, 0)

    def kernels(self) -> dict[str, str]:
        chunk = f"{cpu_chunk_attention.NAME} (bf16 KV; else gather and torch flash attention)"
        if self._tile_kernels is not None:
            chunk = f"AMX tile kernel (bf16 KV, head size a multiple of 32), {chunk}"
        return {
            "attention, decode": f"paged kernel up to {FEW_QUERIES} queries of a row",
            "attention, prefill": chunk,
        }

    def allocate(
        self, num_blocks: int, block_tokens: int, num_kv_heads: int, head_dim: int,
        kv_format: KVFormat,
    ) -> CpuKV:  # fmt: skip
        shape = (num_blocks, num_kv_heads, block_tokens, padded(head_dim, PAD_HEAD))
        size = num_blocks * num_kv_heads * block_tokens * shape[3]
        # A tile of 4 keys may read past the last block's last token.
        slack = 4 * shape[3]
        k, v = (self._arena.zeros((size + slack,), KV_DTYPES[kv_format]) for _ in range(2))
        is_f32 = int(kv_format is KVFormat.FP32)
        return CpuKV(
            arguments=(
                k.data_ptr(),
                v.data_ptr(),
                num_kv_heads,
                head_dim,
                shape[3],
                block_tokens,
                is_f32,
            ),
            k=k[:size].view(shape),
            v=v[:size].view(shape),
            k_bytes=bytes_of(k[:size]),
            v_bytes=bytes_of(v[:size]),
            k_address=k.data_ptr(),
            v_address=v.data_ptr(),
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_tokens=block_tokens,
            head_dim=head_dim,
            head_padded=shape[3],
            is_f32=is_f32,
            chunk_kernel=self._chunk_kernel_for(block_tokens, head_dim, kv_format),
        )

    def _chunk_kernel_for(
        self, block_tokens: int, head_dim: int, kv_format: KVFormat
    ) -> ChunkKernel:
        if kv_format is not KVFormat.BF16:
            return ChunkKernel.GATHER
        if (
            self._tile_kernels is not None
            and head_dim % cpu_amx.TILE_DEPTH == 0
            and head_dim <= cpu_amx_attention.MAX_HEAD_DIM
            and block_tokens % cpu_amx.TILE_ROWS == 0
        ):
            return ChunkKernel.TILES
        if head_dim % 2 == 0 and block_tokens % cpu_chunk_attention.ROWS == 0:
            return ChunkKernel.VECTORS
        return ChunkKernel.GATHER

    def store(self, k: Tensor, v: Tensor, kv: CpuKV, slots: Tensor) -> None:
        num_tokens, num_kv_heads, head_dim = k.shape
        chunk = max(1, _STORE_ELEMENTS // (num_kv_heads * head_dim), -(-num_tokens // MAX_CHUNKS))
        self._team.launch(
            self._store_kernel,
            -(-num_tokens // chunk),
            0.0,
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            kv.k_address,
            kv.v_address,
            slots.data_ptr(),
            num_kv_heads,
            head_dim,
            kv.head_padded,
            kv.block_tokens,
            kv.is_f32,
            num_tokens,
            chunk,
        )

    def attend(
        self,
        q: Tensor,
        kv: CpuKV,
        batch: RaggedBatch,
        scale: float,
        window_tokens: int | None,
    ) -> Tensor:
        out = self._activations.empty(q.shape, torch.bfloat16)
        window = NO_WINDOW if window_tokens is None else window_tokens
        if batch.max_row_tokens <= FEW_QUERIES:
            self._attend_few(q, kv, batch, scale, window, out, 0, q.shape[0])
            return out
        self._team.spoil()
        rows = chunk_rows(batch, window)
        match kv.chunk_kernel:
            case ChunkKernel.TILES:
                for row in rows:
                    if _is_for_tiles(row, kv):
                        self._attend_tiles(q, kv, row, window, scale, out)
                    else:
                        self._attend_vectors(q, kv, [row], window, scale, out)
            case ChunkKernel.VECTORS:
                self._attend_vectors(q, kv, rows, window, scale, out)
            case ChunkKernel.GATHER:
                for row in rows:
                    self._attend_gathered(q, kv, batch, row, window, scale, out)
        done = 0  # tokens [done, first_token) are of rows with few queries
        for row in rows:
            if done < row.first_token:
                self._attend_few(q, kv, batch, scale, window, out, done, row.first_token)
            done = row.end_token
        if done < q.shape[0]:
            self._attend_few(q, kv, batch, scale, window, out, done, q.shape[0])
        return out

    def _attend_few(
        self, q: Tensor, kv: CpuKV, batch: RaggedBatch, scale: float, window: int,
        out: Tensor, begin: int, end: int,
    ) -> None:  # fmt: skip
        """Attention of tokens [begin, end) by the paged kernel."""
        num_tokens = end - begin
        group = q.shape[1] // kv.num_kv_heads
        num_splits = most_splits(batch.max_context, window)
        num_items = num_tokens * kv.num_kv_heads * num_splits
        per_chunk = -(-num_items // MAX_CHUNKS)
        thread_floats = group * (kv.head_padded + cpu_attention.SCORES_STRIDE) + 16
        item_floats = group * (kv.head_padded + 2)
        arguments = (
            self._split_kernel.address,
            self._join_kernel.address,
            -(-num_items // per_chunk),
            scale,
            q.data_ptr(),
            q.stride(0),
            *self._batch_arguments(batch),
            self._scratch.address("attend", self._team.num_threads * thread_floats * 4),
            thread_floats,
            self._scratch.address("partials", num_items * item_floats * 4),
            out.data_ptr(),
            group,
            *kv.arguments,
            num_splits,
            begin,
            num_tokens,
            per_chunk,
            window,
        )
        self._team.record(ATTEND_FEW, *arguments)
        cpu_attention.attend_few(self._team.state, *arguments)

    def _batch_arguments(self, batch: RaggedBatch) -> tuple[int, int, int, int, int, int]:
        """Addresses in the batch: asked for once per step, though every layer needs them."""
        if self._last_batch is not batch:
            self._last_batch = batch
            self._last_arguments = (
                batch.block_tables.data_ptr(),
                batch.block_tables.stride(0),
                batch.positions.data_ptr(),
                batch.row_starts.data_ptr(),
                0 if batch.window_starts is None else batch.window_starts.data_ptr(),
                batch.context_lens.shape[0],
            )
        return self._last_arguments

    def _attend_gathered(
        self, q: Tensor, kv: CpuKV, batch: RaggedBatch, row: ChunkRow, window: int,
        scale: float, out: Tensor,
    ) -> None:  # fmt: skip
        """Attention of one row's chunk by torch."""
        tokens = slice(row.first_token, row.end_token)
        table = batch.block_tables[row.number]
        self._team.park(True)
        out[tokens] = attend_chunk(
            q[tokens], kv.k, kv.v, table, row.first_seen, row.context, window, scale
        )
        self._team.park(False)

    def _attend_vectors(
        self, q: Tensor, kv: CpuKV, rows: list[ChunkRow], window: int, scale: float, out: Tensor
    ) -> None:
        """Attention of all chunks by the vector kernel."""
        group, num_threads = q.shape[1] // kv.num_kv_heads, self._team.num_threads
        plan = plan_chunks(rows, group, kv.num_kv_heads, window, num_threads)
        thread_bytes = cpu_chunk_attention.chunk_scratch_bytes(kv.head_padded)
        partials = 0
        if plan.num_partials:
            partial_bytes = cpu_chunk_attention.partial_bytes(kv.head_padded)
            partials = self._scratch.address("partials", plan.num_partials * partial_bytes)
        self._team.launch(
            self._chunk_kernel,
            plan.num_chunks,
            scale,
            q.data_ptr(),
            q.stride(0),
            kv.k_address,
            kv.v_address,
            out.data_ptr(),
            plan.words.ctypes.data,
            self._scratch.address("attend", num_threads * thread_bytes),
            group,
            kv.num_kv_heads,
            kv.head_dim,
            kv.head_padded,
            kv.block_tokens,
            partials,
        )

    def _attend_tiles(
        self, q: Tensor, kv: CpuKV, row: ChunkRow, window: int, scale: float, out: Tensor
    ) -> None:
        """Attention of one row's chunk by the tile kernels."""
        assert self._tile_kernels is not None
        q, out = (part[row.first_token : row.end_token] for part in (q, out))
        transpose, attend = self._tile_kernels
        group = q.shape[1] // kv.num_kv_heads
        values_bytes = cpu_amx_attention.values_bytes(
            kv.num_kv_heads, kv.head_dim, row.first_seen, row.context
        )
        thread_bytes = cpu_amx_attention.chunk_scratch_bytes(group, kv.head_dim)
        cpu_amx_attention.attend_chunk_tiles(
            self._team.state,
            transpose.address,
            attend.address,
            self._tile_config.ctypes.data,
            scale,
            q.data_ptr(),
            q.stride(0),
            kv.k_address,
            kv.v_address,
            row.table_address,
            out.data_ptr(),
            self._scratch.address("values", values_bytes),
            self._scratch.address("attend", self._team.num_threads * thread_bytes),
            group,
            kv.num_kv_heads,
            kv.head_dim,
            kv.block_tokens,
            row.context - q.shape[0],
            row.context,
            row.first_seen,
            window,
            self._future_keys.ctypes.data,
            self._old_keys.ctypes.data,
        )
