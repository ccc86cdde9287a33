"""The fast path on a CPU: bfloat16 activations, bf16 or int8 weights, paged KV.

Chooses per call between this room's kernels (few rows: memory-bound) and the
libraries under torch (many rows: GEMM and flash attention). Knows shapes and
which kernel wins where; the kernels themselves are in the ``cpu_*`` files.
Built by ``select.py``, called by ``model`` from one thread.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.numerics import cpu_attention, cpu_elementwise, cpu_linear
from headwater.numerics.cpu_attention import PAD_HEAD, SPLIT_TOKENS
from headwater.numerics.cpu_intrinsics import HOST_FEATURES, LANES, Kind
from headwater.numerics.cpu_linear import PAD_IN, PAD_OUT
from headwater.numerics.cpu_prefill import attend_chunk
from headwater.numerics.cpu_team import MAX_CHUNKS, Kernel, Team
from headwater.numerics.ops import KVFormat, LayerKV, PackedLinear, RaggedBatch, WeightFormat
from headwater.numerics.reference import KV_DTYPES, quantise_int8

# Most rows for which the hand-written kernel beats the GEMM library (bench/kernels.py).
FEW_ROWS = {Kind.BF16: 16, Kind.INT8: 32}
# Rows with at most this many queries go through the paged kernel, one query at a time.
FEW_QUERIES = 8
# A chunk of a matrix kernel reads about this much: long enough to hide the claim,
# short enough that no thread waits long for the last one.
_CHUNK_BYTES = 65_536
# Elements per chunk of a row-wise kernel: about 10 us.
_CHUNK_ELEMENTS = 8_192
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLinear:
    """A weight [out_padded, in_padded] of bfloat16, or of int8 with float32 scales [out].

    Addresses and sizes are kept as plain integers: a decode step asks for them
    hundreds of times.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None  # float32 [out]
    out_features: int
    in_features: int
    in_padded: int
    chunk_rows: int
    num_chunks: int
    kind: Kind
    few_rows: int  # most rows for the hand-written kernel
    addresses: tuple[int, int, int]  # of weight, scales, bias; 0: none

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.scales, self.bias) if t is not None)


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


def _pad(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _rows_per_chunk(num_rows: int, elements_per_row: int) -> int:
    """Rows of one chunk of a row-wise kernel."""
    return max(1, _CHUNK_ELEMENTS // elements_per_row, -(-num_rows // MAX_CHUNKS))


def _keep_freed_memory() -> None:
    """Let the C library keep what is freed instead of giving it back to the system.

    A prefill step allocates and frees the same few buffers of megabytes for every
    layer; mapped anew each time, their page faults cost a sixth of the step.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc; others lack it
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 32 << 20)
            mallopt(_M_TRIM_THRESHOLD, 1 << 30)


class CpuOps:
    """``Ops`` on a CPU. One instance per process: it sets torch's thread count."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        torch.set_num_threads(num_threads)
        _keep_freed_memory()
        self._team = Team(num_threads)
        self._linear = Kernel(cpu_linear.linear_kernel)
        self._dequantise = Kernel(cpu_linear.dequantise_kernel)
        self._rms_norm = Kernel(cpu_elementwise.rms_norm_kernel)
        self._add_rms_norm = Kernel(cpu_elementwise.add_rms_norm_kernel)
        self._silu_mul = Kernel(cpu_elementwise.silu_mul_kernel)
        self._rotate = Kernel(cpu_elementwise.rotate_kernel)
        self._store_kv = Kernel(cpu_elementwise.store_kv_kernel)
        self._attend_split = Kernel(cpu_attention.attend_split_kernel)
        self._attend_join = Kernel(cpu_attention.attend_join_kernel)
        self._buffers: dict[str, Tensor] = {}

    @property
    def name(self) -> str:
        return "cpu-bfloat16"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def act_dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def num_threads(self) -> int:
        return self._team.num_threads

    def kernels(self) -> dict[str, str]:
        rows = f"{LANES}-lane"
        onednn = "oneDNN" if torch.backends.mkldnn.is_available() else "torch"
        bf16 = next(
            (name for name in ("amx-bf16", "avx512bf16", "bf16") if name in HOST_FEATURES),
            "no bf16 instructions",
        )
        return {
            "linear bf16": f"{rows} numba kernel up to {FEW_ROWS[Kind.BF16]} rows, "
            f"then {onednn} GEMM ({bf16})",
            "linear int8": f"{rows} numba kernel up to {FEW_ROWS[Kind.INT8]} rows, "
            f"then dequantised to bf16 for {onednn} GEMM ({bf16})",
            "attention": f"paged numba kernel up to {FEW_QUERIES} queries of a row, "
            "then gather and torch flash attention",
            "elementwise": f"numba, {self.num_threads} threads",
        }

    def warm_up(self) -> None:
        """Call every kernel and library once, so that the first request does not wait for them."""
        weight, tokens = torch.zeros(64, 64), 2 * FEW_ROWS[Kind.INT8]
        x = torch.zeros(tokens, 64, dtype=torch.bfloat16)
        for weight_format in (WeightFormat.BF16, WeightFormat.INT8):
            packed = self.pack_linear(weight, None, weight_format)
            for num_rows in (1, tokens):
                self.linear(x[:num_rows], packed)
        ones = torch.ones(64)
        self.rms_norm(x, ones, 1e-5)
        self.add_rms_norm(x.clone(), x.clone(), ones, 1e-5)
        self.silu_mul(x)
        kv = self.allocate_kv(-(-tokens // 16) + 1, 16, 1, 64, KVFormat.BF16)
        index = torch.arange(tokens)
        heads = x.view(tokens, 1, 64)
        self.rotate(heads, heads.clone(), weight[:, :32], weight[:, :32], index.int())
        self.store_kv(heads, heads, kv, index)
        for first in (0, tokens - 1):  # a chunk, then one query
            batch = RaggedBatch(
                row_starts=torch.tensor([0, tokens - first], dtype=torch.int32),
                context_lens=torch.tensor([tokens], dtype=torch.int32),
                block_tables=torch.arange(-(-tokens // 16), dtype=torch.int32)[None],
                positions=index[first:].int(),
                slots=index[first:],
                max_row_tokens=tokens - first,
                max_context=tokens,
            )
            self.attend(heads[first:], kv, batch, 1.0)

    def close(self) -> None:
        """End the helper threads; the instance cannot be used afterwards."""
        self._team.close()

    def _scratch(self, purpose: str, num_floats: int) -> int:
        """The address of at least ``num_floats`` float32, kept between calls."""
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < num_floats:
            buffer = torch.empty(max(num_floats, 4_096) * 5 // 4, dtype=torch.float32)
            self._buffers[purpose] = buffer
        return buffer.data_ptr()

    # ---- linear ---------------------------------------------------------------------

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat
    ) -> CpuLinear:
        out_features, in_features = weight.shape
        shape = (_pad(out_features, PAD_OUT), _pad(in_features, PAD_IN))
        scales: Tensor | None = None
        match weight_format:
            case WeightFormat.BF16:
                rows = weight.to(torch.bfloat16)
            case WeightFormat.INT8:
                rows, scales = quantise_int8(weight)
            case WeightFormat.FP32:
                raise ConfigError(
                    "the fast CPU path keeps weights as bf16 or int8; use reference mode for fp32"
                )
        if rows.shape == shape:
            packed = rows.contiguous()
        else:
            packed = torch.zeros(shape, dtype=rows.dtype)
            packed[:out_features, :in_features] = rows
        bias = None if bias is None else bias.float().contiguous()
        row_bytes = packed.stride(0) * packed.element_size()
        chunk_bytes = max(_CHUNK_BYTES, 2 * packed.nbytes // MAX_CHUNKS)
        chunk_rows = _pad(max(1, chunk_bytes // row_bytes), PAD_OUT)
        kind = Kind.BF16 if scales is None else Kind.INT8
        return CpuLinear(
            weight=packed,
            scales=scales,
            bias=bias,
            out_features=out_features,
            in_features=in_features,
            in_padded=shape[1],
            chunk_rows=chunk_rows,
            num_chunks=-(-out_features // chunk_rows),
            kind=kind,
            few_rows=FEW_ROWS[kind],
            addresses=(
                packed.data_ptr(),
                0 if scales is None else scales.data_ptr(),
                0 if bias is None else bias.data_ptr(),
            ),
        )

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, CpuLinear)
        if x.shape[0] > packed.few_rows:
            return self._linear_many_rows(x, packed)
        out = torch.empty((x.shape[0], packed.out_features), dtype=torch.bfloat16)
        self._linear_few_rows(x, packed, out, out_is_f32=0)
        return out

    def logits(self, x: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, CpuLinear)
        if x.shape[0] > packed.few_rows:
            return self._linear_many_rows(x, packed).float()
        out = torch.empty((x.shape[0], packed.out_features), dtype=torch.float32)
        self._linear_few_rows(x, packed, out, out_is_f32=1)
        return out

    def _linear_few_rows(
        self, x: Tensor, packed: CpuLinear, out: Tensor, *, out_is_f32: int
    ) -> None:
        if x.stride(1) != 1:
            x = x.contiguous()
        num_tokens = x.shape[0]
        cpu_linear.linear_few_rows(
            self._team.state,
            self._linear.address,
            packed.num_chunks,
            x.data_ptr(),
            x.stride(0),
            self._scratch("x", num_tokens * packed.in_padded),
            packed.in_features,
            packed.in_padded,
            *packed.addresses,
            self._scratch("sums", self.num_threads * num_tokens * packed.chunk_rows),
            out.data_ptr(),
            out_is_f32,
            num_tokens,
            packed.out_features,
            packed.chunk_rows,
            packed.kind.value,
        )

    def _linear_many_rows(self, x: Tensor, packed: CpuLinear) -> Tensor:
        weight = packed.weight if packed.scales is None else self._dequantised(packed)
        weight = weight[: packed.out_features, : packed.in_features]
        bias = None if packed.bias is None else packed.bias.to(torch.bfloat16)
        self._team.park(True)
        out = F.linear(x, weight, bias)
        self._team.park(False)
        return out

    def _dequantised(self, packed: CpuLinear) -> Tensor:
        """The int8 weight as bfloat16, in a buffer that the next call overwrites."""
        assert packed.scales is not None
        num_rows, length = packed.weight.shape
        address = self._scratch("weight", num_rows * length // 2)
        rows = _rows_per_chunk(packed.out_features, length)
        self._team.launch(
            self._dequantise,
            -(-packed.out_features // rows),
            0.0,
            packed.weight.data_ptr(),
            packed.scales.data_ptr(),
            address,
            length,
            packed.out_features,
            rows,
        )
        buffer = self._buffers["weight"].view(torch.bfloat16)
        return buffer[: num_rows * length].view(num_rows, length)

    def embed(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        assert isinstance(packed, CpuLinear)
        rows = packed.weight[ids, : packed.in_features]
        if packed.scales is None:
            return rows
        return (rows.float() * packed.scales[ids, None]).to(torch.bfloat16)

    # ---- row-wise -------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = x.shape[-1]
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        rows = 1 if x.dim() == 2 else x.shape[1]
        if x.dim() not in (2, 3) or x.stride(-1) != 1 or (rows > 1 and x.stride(1) != length):
            x = x.reshape(-1, length).contiguous()
            rows = 1
        chunk = _rows_per_chunk(x.shape[0], rows * length)
        self._team.launch(
            self._rms_norm,
            -(-x.shape[0] // chunk),
            eps,
            x.data_ptr(),
            x.stride(0),
            rows,
            weight.data_ptr(),
            int(weight.dtype == torch.float32),
            out.data_ptr(),
            length,
            x.shape[0],
            chunk,
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        length = x.shape[-1]
        num_rows = x.numel() // length
        chunk = _rows_per_chunk(num_rows, length)
        self._team.launch(
            self._add_rms_norm,
            -(-num_rows // chunk),
            eps,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            int(weight.dtype == torch.float32),
            length,
            num_rows,
            chunk,
        )
        return x, residual

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        num_tokens, num_heads, head_dim = q.shape
        chunk = _rows_per_chunk(num_tokens, (num_heads + k.shape[1]) * head_dim)
        self._team.launch(
            self._rotate,
            -(-num_tokens // chunk),
            0.0,
            q.data_ptr(),
            q.stride(0),
            num_heads,
            k.data_ptr(),
            k.stride(0),
            k.shape[1],
            head_dim,
            cos.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            num_tokens,
            chunk,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, inner), dtype=torch.bfloat16)
        chunk = _rows_per_chunk(num_tokens, inner)
        self._team.launch(
            self._silu_mul,
            -(-num_tokens // chunk),
            0.0,
            gate_up.data_ptr(),
            out.data_ptr(),
            inner,
            num_tokens,
            chunk,
        )
        return out

    # ---- KV and attention -----------------------------------------------------------

    def allocate_kv(
        self, num_blocks: int, block_tokens: int, num_kv_heads: int, head_dim: int,
        kv_format: KVFormat,
    ) -> CpuKV:  # fmt: skip
        shape = (num_blocks, num_kv_heads, block_tokens, _pad(head_dim, PAD_HEAD))
        size = num_blocks * num_kv_heads * block_tokens * shape[3]
        # A tile of 4 keys may read past the last block's last token.
        slack = 4 * shape[3]
        k, v = (torch.zeros(size + slack, dtype=KV_DTYPES[kv_format]) for _ in range(2))
        return CpuKV(
            k=k[:size].view(shape),
            v=v[:size].view(shape),
            k_address=k.data_ptr(),
            v_address=v.data_ptr(),
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_tokens=block_tokens,
            head_dim=head_dim,
            head_padded=shape[3],
            is_f32=int(kv_format is KVFormat.FP32),
        )

    def kv_bytes_per_token(self, num_kv_heads: int, head_dim: int, kv_format: KVFormat) -> int:
        return 2 * num_kv_heads * _pad(head_dim, PAD_HEAD) * KV_DTYPES[kv_format].itemsize

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        assert isinstance(kv, CpuKV)
        num_tokens, num_kv_heads, head_dim = k.shape
        chunk = _rows_per_chunk(num_tokens, 2 * num_kv_heads * head_dim)
        self._team.launch(
            self._store_kv,
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

    def attend(self, q: Tensor, kv: LayerKV, batch: RaggedBatch, scale: float) -> Tensor:
        assert isinstance(kv, CpuKV)
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        if batch.max_row_tokens <= FEW_QUERIES:
            self._attend_few(q, kv, batch, scale, out, 0, q.shape[0])
            return out
        starts, contexts = batch.row_starts.tolist(), batch.context_lens.tolist()
        few_from = 0  # tokens [few_from, start) belong to rows with few queries, not yet done
        for row, context in enumerate(contexts):
            start, end = starts[row], starts[row + 1]
            if end - start <= FEW_QUERIES:
                continue
            if few_from < start:
                self._attend_few(q, kv, batch, scale, out, few_from, start)
            blocks = batch.block_tables[row, : -(-context // kv.block_tokens)]
            out[start:end] = attend_chunk(
                q[start:end], kv.k, kv.v, blocks, context, scale
            )
            few_from = end
        if few_from < q.shape[0]:
            self._attend_few(q, kv, batch, scale, out, few_from, q.shape[0])
        return out

    def _attend_few(
        self, q: Tensor, kv: CpuKV, batch: RaggedBatch, scale: float, out: Tensor,
        begin: int, end: int,
    ) -> None:  # fmt: skip
        """Attention of tokens [begin, end) by the paged kernel."""
        num_tokens = end - begin
        group = q.shape[1] // kv.num_kv_heads
        num_splits = -(-batch.max_context // SPLIT_TOKENS)
        num_items = num_tokens * kv.num_kv_heads * num_splits
        per_chunk = -(-num_items // MAX_CHUNKS)
        scratch_floats = cpu_attention.scratch_floats(group, kv.head_padded)
        partials = self._scratch(
            "partials", num_items * cpu_attention.partial_floats(group, kv.head_padded)
        )
        cpu_attention.attend_few(
            self._team.state,
            self._attend_split.address,
            self._attend_join.address,
            -(-num_items // per_chunk),
            scale,
            q.data_ptr(),
            q.stride(0),
            kv.k_address,
            kv.v_address,
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.positions.data_ptr(),
            batch.row_starts.data_ptr(),
            batch.context_lens.shape[0],
            self._scratch("attend", self.num_threads * scratch_floats),
            scratch_floats,
            partials,
            out.data_ptr(),
            group,
            kv.num_kv_heads,
            kv.head_dim,
            kv.head_padded,
            kv.block_tokens,
            kv.is_f32,
            num_splits,
            begin,
            num_tokens,
            per_chunk,
        )
