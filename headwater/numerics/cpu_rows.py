"""Rows that are keys and values on a CPU: how they lie in memory, which kernel attends to them.

    queries of a sequence   kernel
    few                     spans of rows for all heads, one query at a time (decode, drafts)
    more                    the vector kernel of prefill chunks, heads as further queries

A layer's rows are [num_blocks, block_tokens / ratio, D padded], bfloat16. Rows that are kept
as float32, or whose blocks no tile divides, are those of ``reference_rows``, in plain torch.
Used by ``cpu.py`` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.numerics import (
    cpu_chunk_attention,
    cpu_rows_attention,
    cpu_rows_kernels,
    reference_rows,
)
from headwater.numerics.cpu_attention import SPLIT_TOKENS, most_splits
from headwater.numerics.cpu_chunk_attention import ChunkRow, MoreKeys, plan_chunks
from headwater.numerics.cpu_kv import FEW_QUERIES, chunk_rows
from headwater.numerics.cpu_matmul import padded
from headwater.numerics.cpu_memory import Activations, Arena, Scratch
from headwater.numerics.cpu_rows_kernels import tokens_per_chunk
from headwater.numerics.cpu_team import ATTEND_ROWS, MAX_CHUNKS, Kernel, Team
from headwater.numerics.ops import KVFormat, LayerKV, RaggedBatch
from headwater.numerics.reference import KV_DTYPES, bytes_of
from headwater.numerics.reference_rows import PlainRows

_PAD_DIM = 32
_OPEN_DTYPE = torch.bfloat16  # activations are


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRows:
    """Rows [num_blocks, block_rows, dim_padded]; with ratio 2 what is open of each block, a
    token's values and gates [num_blocks, 2, dim]."""

    rows: Tensor
    open: Tensor | None
    words: np.ndarray[tuple[int], np.dtype[np.int64]]  # as ``cpu_rows_kernels`` wants them
    num_blocks: int
    block_tokens: int
    ratio: int
    dim: int
    dim_padded: int
    address: int
    row_bytes: memoryview  # of rows

    def block_bytes(self, block: int) -> memoryview:
        """The rows of one block, in place."""
        size = self.row_bytes.nbytes // self.num_blocks
        return self.row_bytes[block * size : (block + 1) * size]

    def copy_block(self, source: int, target: int) -> None:
        self.block_bytes(target)[:] = self.block_bytes(source)
        if self.open is not None:
            self.open[target] = self.open[source]


def _tile_rows() -> int:
    """Rows that the kernels read as one, so that they must be of one block."""
    return max(cpu_chunk_attention.ROWS, cpu_rows_attention.TILE_ROWS)


def _has_kernels(block_tokens: int, dim: int, kv_format: KVFormat, ratio: int) -> bool:
    has_whole_tiles = block_tokens // ratio % _tile_rows() == 0
    return kv_format is KVFormat.BF16 and dim % 2 == 0 and has_whole_tiles


def row_bytes_per_token(dim: int, kv_format: KVFormat, ratio: int) -> int:
    columns = padded(dim, _PAD_DIM) if kv_format is KVFormat.BF16 else dim
    return reference_rows.row_bytes_per_token(
        columns * KV_DTYPES[kv_format].itemsize, 2 * dim * _OPEN_DTYPE.itemsize, ratio
    )


class RowsAttention:
    """Allocates a layer's rows, writes to them and attends over them."""

    def __init__(self, team: Team, scratch: Scratch, activations: Activations) -> None:
        self._team, self._scratch, self._activations = team, scratch, activations
        self._arena = Arena()
        self._rotate_kernel = Kernel(cpu_rows_kernels.rotate_pairs_kernel)
        self._store_kernel = Kernel(cpu_rows_kernels.store_rows_kernel)
        self._compress_kernel = Kernel(cpu_rows_kernels.compress_kernel)
        self._span_kernel = Kernel(cpu_rows_attention.attend_rows_span_kernel)
        self._join_kernel = Kernel(cpu_rows_attention.attend_rows_join_kernel)
        self._chunk_kernel = Kernel(cpu_chunk_attention.attend_chunks_kernel)

    def kernels(self) -> dict[str, str]:
        tile_rows = _tile_rows()
        other = f"bf16 KV, blocks of a multiple of {tile_rows} rows; else the reference"
        return {
            "attention over rows, decode": f"all heads at once up to {FEW_QUERIES} queries of a "
            f"row ({other})",
            "attention over rows, prefill": f"{cpu_chunk_attention.NAME} ({other})",
        }

    def allocate(
        self, num_blocks: int, block_tokens: int, dim: int, kv_format: KVFormat, ratio: int
    ) -> CpuRows | PlainRows:
        if not _has_kernels(block_tokens, dim, kv_format, ratio):
            return reference_rows.allocate_rows(
                num_blocks, block_tokens, dim, ratio, KV_DTYPES[kv_format], _OPEN_DTYPE,
                torch.device("cpu"),
            )  # fmt: skip
        dim_padded = padded(dim, _PAD_DIM)
        shape = (num_blocks, block_tokens // ratio, dim_padded)
        rows = self._arena.zeros(shape, torch.bfloat16)
        opened = self._arena.zeros((num_blocks, 2, dim), _OPEN_DTYPE) if ratio == 2 else None
        open_address = 0 if opened is None else opened.data_ptr()
        words = (rows.data_ptr(), open_address, dim, dim_padded, block_tokens, ratio)
        return CpuRows(
            rows=rows,
            open=opened,
            words=np.array(words, np.int64),
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            ratio=ratio,
            dim=dim,
            dim_padded=dim_padded,
            address=rows.data_ptr(),
            row_bytes=bytes_of(rows),
        )

    def rotate(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, inverse: bool
    ) -> None:
        num_tokens, num_heads, head_dim = x.shape
        if x.stride(2) != 1 or (num_heads > 1 and x.stride(1) != head_dim):
            self._team.spoil()
            reference_rows.rotate_pairs(x, cos, sin, positions, inverse=inverse)
            return
        chunk = tokens_per_chunk(num_tokens, num_heads * 2 * cos.shape[1])
        self._team.launch(
            self._rotate_kernel,
            -(-num_tokens // chunk),
            -1.0 if inverse else 1.0,
            x.data_ptr(),
            x.stride(0),
            num_heads,
            head_dim,
            cos.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            num_tokens,
            chunk,
        )

    def store(self, rows: Tensor, kv: LayerKV, slots: Tensor) -> None:
        if isinstance(kv, PlainRows):
            self._team.spoil()
            reference_rows.store_rows(rows, kv, slots)
            return
        assert isinstance(kv, CpuRows)
        assert kv.ratio == 1
        rows = self._with_whole_rows(rows)
        num_tokens, dim = rows.shape
        chunk = tokens_per_chunk(num_tokens, dim)
        self._team.launch(
            self._store_kernel,
            -(-num_tokens // chunk),
            0.0,
            rows.data_ptr(),
            rows.stride(0),
            kv.words.ctypes.data,
            slots.data_ptr(),
            num_tokens,
            chunk,
        )

    def _with_whole_rows(self, x: Tensor) -> Tensor:
        if x.stride(1) == 1:
            return x
        self._team.spoil()
        return x.contiguous()

    def compress(
        self, values: Tensor, gates: Tensor, norm: Tensor, cos: Tensor, sin: Tensor,
        kv: LayerKV, batch: RaggedBatch, eps: float,
    ) -> None:  # fmt: skip
        if isinstance(kv, PlainRows):
            self._team.spoil()
            reference_rows.compress(values, gates, norm, cos, sin, kv, batch, eps)
            return
        assert isinstance(kv, CpuRows)
        assert kv.ratio == 2
        if norm.dtype != torch.float32:
            self._team.spoil()
            norm = norm.float()
        if values.stride() != gates.stride() or values.stride(1) != 1:
            self._team.spoil()
            values, gates = values.contiguous(), gates.contiguous()
        num_tokens, dim = values.shape
        self._team.launch(
            self._compress_kernel,
            -(-num_tokens // tokens_per_chunk(num_tokens, dim)),
            eps,
            values.data_ptr(),
            gates.data_ptr(),
            values.stride(0),
            norm.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            kv.words.ctypes.data,
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            0 if batch.global_slots is None else batch.global_slots.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.context_lens.shape[0],
        )

    def attend(
        self, q: Tensor, window: LayerKV, source: LayerKV | None, sinks: Tensor,
        batch: RaggedBatch, scale: float, window_tokens: int,
    ) -> Tensor:  # fmt: skip
        if not isinstance(window, CpuRows) or not isinstance(source, CpuRows | None):
            self._team.spoil()
            window, source = _as_plain(window), None if source is None else _as_plain(source)
            return reference_rows.attend_rows(q, window, source, sinks, batch, scale, window_tokens)
        assert sinks.dtype == torch.float32
        out = self._activations.empty(q.shape, torch.bfloat16)
        if batch.max_row_tokens <= FEW_QUERIES:
            self._attend_few(
                q, window, source, sinks, batch, scale, window_tokens, out, 0, q.shape[0]
            )
            return out
        self._team.spoil()
        rows = chunk_rows(batch, window_tokens)
        self._attend_chunks(q, window, source, sinks, rows, scale, window_tokens, out)
        done = 0  # tokens [done, first_token) are of sequences with few queries
        for first, end in [*((r.first_token, r.end_token) for r in rows), (q.shape[0], 0)]:
            if done < first:
                self._attend_few(
                    q, window, source, sinks, batch, scale, window_tokens, out, done, first
                )
            done = end
        return out

    def _attend_few(
        self, q: Tensor, window: CpuRows, source: CpuRows | None, sinks: Tensor,
        batch: RaggedBatch, scale: float, window_tokens: int, out: Tensor, begin: int, end: int,
    ) -> None:  # fmt: skip
        """Attention of tokens [begin, end) by the kernels of decode."""
        num_heads, num_tokens = q.shape[1], end - begin
        window_spans = num_spans = most_splits(batch.max_context, window_tokens)
        if source is not None:
            num_spans += -(-(batch.max_context // source.ratio) // SPLIT_TOKENS)
        num_items = num_tokens * num_spans
        per_chunk = -(-num_items // MAX_CHUNKS)
        thread_bytes = cpu_rows_attention.few_scratch_bytes(window.dim_padded)
        item_floats = cpu_rows_attention.partial_floats(num_heads, window.dim_padded)
        arguments = (
            self._span_kernel.address,
            self._join_kernel.address,
            -(-num_items // per_chunk),
            scale,
            q.data_ptr(),
            q.stride(0),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.positions.data_ptr(),
            batch.row_starts.data_ptr(),
            0 if batch.window_starts is None else batch.window_starts.data_ptr(),
            batch.context_lens.shape[0],
            self._scratch.address("attend", self._team.num_threads * thread_bytes),
            self._scratch.address("partials", num_items * item_floats * 4),
            out.data_ptr(),
            sinks.data_ptr(),
            num_heads,
            window.dim,
            window.dim_padded,
            window.block_tokens,
            window.address,
            0 if source is None else source.address,
            1 if source is None else source.ratio,
            window_spans,
            num_spans,
            begin,
            num_tokens,
            per_chunk,
            window_tokens,
        )
        self._team.record(ATTEND_ROWS, *arguments)
        cpu_rows_attention.attend_few_rows(self._team.state, *arguments)

    def _attend_chunks(
        self, q: Tensor, window: CpuRows, source: CpuRows | None, sinks: Tensor,
        rows: list[ChunkRow], scale: float, window_tokens: int, out: Tensor,
    ) -> None:  # fmt: skip
        """Attention of all chunks by the vector kernel."""
        num_heads, num_threads = q.shape[1], self._team.num_threads
        more = MoreKeys(
            rows_address=0 if source is None else source.address,
            ratio=1 if source is None else source.ratio,
            sinks_address=sinks.data_ptr(),
        )
        plan = plan_chunks(rows, num_heads, 1, window_tokens, num_threads, more)
        thread_bytes = cpu_chunk_attention.chunk_scratch_bytes(window.dim_padded)
        partials = 0
        if plan.num_partials:
            partial_bytes = cpu_chunk_attention.partial_bytes(window.dim_padded)
            partials = self._scratch.address("partials", plan.num_partials * partial_bytes)
        self._team.launch(
            self._chunk_kernel,
            plan.num_chunks,
            scale,
            q.data_ptr(),
            q.stride(0),
            window.address,
            window.address,
            out.data_ptr(),
            plan.words.ctypes.data,
            self._scratch.address("attend", num_threads * thread_bytes),
            num_heads,
            1,
            window.dim,
            window.dim_padded,
            window.block_tokens,
            partials,
        )


def _as_plain(kv: LayerKV) -> PlainRows:
    """The same rows as ``reference_rows`` knows them; what nobody keeps goes to the last one."""
    if isinstance(kv, PlainRows):
        return kv
    assert isinstance(kv, CpuRows)
    return PlainRows(
        rows=kv.rows.flatten(0, 1)[:, : kv.dim],
        open=kv.open,
        num_blocks=kv.num_blocks,
        block_tokens=kv.block_tokens,
        ratio=kv.ratio,
    )
