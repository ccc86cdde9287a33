"""Linear layers on a CPU: how weights are kept, and which kernel multiplies how many rows.

    rows of x        bf16 weights               int8 weights
    few              vector kernel              vector kernel
    some (AMX only)  tile kernel                tile kernel, dequantising as it goes
    many             GEMM of oneDNN             dequantised to a buffer, then the same GEMM

One copy of the weight, row-major, serves all of them: a GEMM library prefers its own
layout, but for many rows re-ordering costs it little, and two copies are too dear.
The borders are measured by ``bench/kernels.py``. Used by ``cpu.py`` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.core.errors import ConfigError
from headwater.numerics import cpu_amx, cpu_linear
from headwater.numerics.cpu_intrinsics import HOST_FEATURES, LANES, Kind
from headwater.numerics.cpu_memory import Activations, Arena, Scratch
from headwater.numerics.cpu_team import LINEAR_FEW, LINEAR_TILES, MAX_CHUNKS, Kernel, Team
from headwater.numerics.ops import WeightFormat
from headwater.numerics.reference import quantise_int8

# Most rows for the vector kernel, beside tiles and without them; most rows for tiles.
# A core converts int8 more slowly than it reads it, so there tiles start later.
VECTOR_ROWS_BESIDE_TILES = {Kind.BF16: 5, Kind.INT8: 12}
VECTOR_ROWS = {Kind.BF16: 32, Kind.INT8: 64}
TILE_ROWS = {Kind.BF16: 128, Kind.INT8: 256}
# A chunk of a matrix kernel reads between these: long enough to hide the claim and to get
# the prefetcher going, short enough that no thread waits long for the last one.
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 16_384, 262_144
_CHUNKS_PER_THREAD = 4
_DEQUANTISE_ELEMENTS = 32_768


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
    kind: int
    vector_rows: int  # most rows for the vector kernel
    tile_rows: int  # most rows for the tile kernel; 0: never
    addresses: tuple[int, int, int]  # of weight, scales, bias; 0: none

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.scales, self.bias) if t is not None)


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class MatMul:
    """Packs weights and multiplies by them."""

    def __init__(
        self, team: Team, scratch: Scratch, activations: Activations, *, tiles: bool
    ) -> None:
        """``tiles``: the process may use AMX tiles (``cpu_amx.tiles_available``)."""
        self._team, self._scratch, self._activations = team, scratch, activations
        self._arena = Arena()
        self._vector_kernel = Kernel(cpu_linear.linear_kernel)
        self._dequantise_kernel = Kernel(cpu_linear.dequantise_kernel)
        self._tile_kernel = Kernel(cpu_amx.linear_tiles_kernel) if tiles else None
        self._tile_config = cpu_amx.tile_config()
        # Without instructions for it, bfloat16 GEMM is many times slower than float32.
        has_bf16 = HOST_FEATURES & {"amx-bf16", "avx512bf16", "bf16"}
        self._gemm_dtype = torch.bfloat16 if has_bf16 else torch.float32

    def kernels(self) -> dict[str, str]:
        library = "oneDNN" if torch.backends.mkldnn.is_available() else "torch"
        gemm = f"{library} GEMM in {str(self._gemm_dtype).removeprefix('torch.')}"
        chosen = {}
        for name, kind, last in (
            ("linear bf16", Kind.BF16, gemm),
            ("linear int8", Kind.INT8, f"dequantised for {gemm}"),
        ):
            parts = [f"{LANES}-lane kernel up to {self._vector_rows(kind)} rows"]
            if self._tile_kernel is not None:
                parts.append(f"AMX tile kernel up to {TILE_ROWS[kind]}")
            chosen[name] = ", ".join([*parts, last])
        return chosen

    def _vector_rows(self, kind: Kind) -> int:
        return (VECTOR_ROWS if self._tile_kernel is None else VECTOR_ROWS_BESIDE_TILES)[kind]

    def pack(self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> CpuLinear:
        out_features, in_features = weight.shape
        pad_out = cpu_linear.PAD_OUT if self._tile_kernel is None else 2 * cpu_amx.TILE_ROWS
        shape = (padded(out_features, pad_out), padded(in_features, cpu_linear.PAD_IN))
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
        packed = self._arena.zeros(shape, rows.dtype)
        packed[:out_features, :in_features] = rows
        bias = None if bias is None else bias.float().contiguous()
        row_bytes = packed.stride(0) * packed.element_size()
        share_bytes = packed.nbytes // (_CHUNKS_PER_THREAD * self._team.num_threads)
        chunk_bytes = min(max(share_bytes, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
        chunk_bytes = max(chunk_bytes, 2 * packed.nbytes // MAX_CHUNKS)
        chunk_rows = padded(max(1, chunk_bytes // row_bytes), pad_out)
        kind = Kind.BF16 if scales is None else Kind.INT8
        has_tiles = self._tile_kernel is not None and in_features == shape[1]
        return CpuLinear(
            weight=packed,
            scales=scales,
            bias=bias,
            out_features=out_features,
            in_features=in_features,
            in_padded=shape[1],
            chunk_rows=chunk_rows,
            num_chunks=-(-out_features // chunk_rows),
            kind=int(kind),
            vector_rows=self._vector_rows(kind),
            tile_rows=TILE_ROWS[kind] if has_tiles else 0,
            addresses=(
                packed.data_ptr(),
                0 if scales is None else scales.data_ptr(),
                0 if bias is None else bias.data_ptr(),
            ),
        )

    def multiply(self, x: Tensor, packed: CpuLinear, out_dtype: torch.dtype) -> Tensor:
        """bfloat16 [T, in] to ``out_dtype`` (bfloat16 or float32) [T, out]."""
        num_tokens = x.shape[0]
        few = num_tokens <= packed.vector_rows
        if not few and num_tokens > packed.tile_rows:
            return self._gemm(x, packed).to(out_dtype)
        if x.stride(1) != 1:
            self._team.spoil()
            x = x.contiguous()
        out = self._activations.empty((num_tokens, packed.out_features), out_dtype)
        if few:
            self._by_vectors(x, packed, out)
        else:
            self._by_tiles(x, packed, out)
        return out

    def _by_vectors(self, x: Tensor, packed: CpuLinear, out: Tensor) -> None:
        num_tokens = x.shape[0]
        arguments = (
            self._vector_kernel.address,
            packed.num_chunks,
            x.data_ptr(),
            x.stride(0),
            self._scratch.address("x", num_tokens * packed.in_padded * 4),
            packed.in_features,
            packed.in_padded,
            *packed.addresses,
            self._scratch.address(
                "sums", self._team.num_threads * num_tokens * packed.chunk_rows * 4
            ),
            out.data_ptr(),
            int(out.dtype == torch.float32),
            num_tokens,
            packed.out_features,
            packed.chunk_rows,
            packed.kind,
        )
        self._team.record(LINEAR_FEW, *arguments)
        cpu_linear.linear_few_rows(self._team.state, *arguments)

    def _by_tiles(self, x: Tensor, packed: CpuLinear, out: Tensor) -> None:
        assert self._tile_kernel is not None
        num_tokens, in_features = x.shape
        thread_bytes = cpu_amx.linear_scratch_bytes(in_features)
        arguments = (
            self._tile_kernel.address,
            packed.num_chunks,
            self._tile_config.ctypes.data,
            x.data_ptr(),
            x.stride(0),
            self._scratch.address("x", padded(num_tokens, cpu_amx.TILE_ROWS) * in_features * 2),
            *packed.addresses,
            self._scratch.address("tiles", self._team.num_threads * thread_bytes),
            out.data_ptr(),
            int(out.dtype == torch.float32),
            num_tokens,
            in_features,
            packed.out_features,
            packed.chunk_rows,
            packed.kind,
        )
        self._team.record(LINEAR_TILES, *arguments)
        cpu_amx.linear_tiles(self._team.state, *arguments)

    def _gemm(self, x: Tensor, packed: CpuLinear) -> Tensor:
        self._team.spoil()
        dtype = self._gemm_dtype
        weight = packed.weight if packed.scales is None else self._dequantised(packed)
        weight = weight[: packed.out_features, : packed.in_features].to(dtype)
        out = self._activations.empty((x.shape[0], packed.out_features), dtype)
        self._team.park(True)
        if packed.bias is None:
            torch.mm(x.to(dtype), weight.t(), out=out)
        else:
            torch.addmm(packed.bias.to(dtype), x.to(dtype), weight.t(), out=out)
        self._team.park(False)
        return out

    def _dequantised(self, packed: CpuLinear) -> Tensor:
        """The int8 weight as bfloat16, in a buffer that the next call overwrites."""
        num_rows, length = packed.weight.shape
        num_bytes = num_rows * length * 2
        buffer = self._scratch.bytes("weight", num_bytes)
        rows = max(1, _DEQUANTISE_ELEMENTS // length, -(-num_rows // MAX_CHUNKS))
        self._team.launch(
            self._dequantise_kernel,
            -(-packed.out_features // rows),
            0.0,
            packed.addresses[0],
            packed.addresses[1],
            buffer.data_ptr(),
            length,
            packed.out_features,
            rows,
        )
        return buffer[:num_bytes].view(torch.bfloat16).view(num_rows, length)

    def rows_of(self, ids: Tensor, packed: CpuLinear) -> Tensor:
        """int64 [T] to bfloat16 [T, in]: rows of the weight."""
        rows = packed.weight[ids, : packed.in_features]
        if packed.scales is None:
            return rows
        return (rows.float() * packed.scales[ids, None]).to(torch.bfloat16)
