"""The few machine operations that numba lacks, for kernels that work on raw addresses.

Loads and stores by address (bfloat16 as uint16 bits), atomics, a pause hint, a
call through a function pointer, and ``dot_tile``: the vector inner loop under
every matrix kernel of this room. Knows no shapes of models. Used by ``cpu_*`` only.

Kernels take addresses instead of arrays: a call then costs well under a
microsecond, and there is exactly one specialisation of each to compile.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

from llvmlite import binding, ir
from numba import types
from numba.core import base, cgutils, typing
from numba.extending import intrinsic

Type: TypeAlias = types.Type
Typing: TypeAlias = typing.BaseContext
Context: TypeAlias = base.BaseContext
Values: TypeAlias = list[ir.Value]
Lower: TypeAlias = Callable[..., ir.Value]
Typed: TypeAlias = tuple[typing.templates.Signature, Lower]

I8, I16, I32, I64 = (ir.IntType(num_bits) for num_bits in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()

HOST_FEATURES = frozenset(name for name, on in binding.get_host_cpu_features().items() if on)
# Float32 lanes of a vector. Two AVX2 or NEON registers make one 8-lane vector
# well enough; 16 lanes would spill there.
LANES = 16 if "avx512f" in HOST_FEATURES else 8
# How far ahead of its loads a matrix kernel asks for memory. Without it one core
# reads 8 instead of 11.5 GB/s, and several tokens' arithmetic hides nothing.
PREFETCH_BYTES = 6_144


class Kind(IntEnum):
    """Element type behind an address."""

    BF16 = 0
    INT8 = 1
    F32 = 2


# ---- loads and stores: address[index] -----------------------------------------------


def _element(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, of: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, of.as_pointer()), [index])


def _widen_bf16(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """bfloat16 bits, scalar or vector, to float32: they are the upper half of the word."""
    if isinstance(bits.type, ir.VectorType):
        count = bits.type.count
        word, real = ir.VectorType(I32, count), ir.VectorType(F32, count)
        shift = ir.Constant(word, [16] * count)
    else:
        word, real, shift = I32, F32, ir.Constant(I32, 16)
    return builder.bitcast(builder.shl(builder.zext(bits, word), shift), real)


def _round_to_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 to the nearest bfloat16, ties to even. A NaN stays one: its quiet bit survives
    unless the carry runs through an all-ones payload, which no arithmetic produces."""
    word = builder.bitcast(value, I32)
    lowest_kept = builder.and_(builder.lshr(word, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    carried = builder.add(word, builder.add(lowest_kept, ir.Constant(I32, 0x7FFF)))
    return builder.trunc(builder.lshr(carried, ir.Constant(I32, 16)), I16)


def _load(of: ir.Type) -> Lower:
    def lower(_ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.load(_element(builder, args[0], args[1], of))

    return lower


def _store(of: ir.Type) -> Lower:
    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        builder.store(args[2], _element(builder, args[0], args[1], of))
        return ctx.get_dummy_value()

    return lower


@intrinsic
def load_i64(_ctx: Typing, address: Type, index: Type) -> Typed:
    return types.int64(types.int64, types.int64), _load(I64)


@intrinsic
def load_i32(_ctx: Typing, address: Type, index: Type) -> Typed:
    return types.int32(types.int64, types.int64), _load(I32)


@intrinsic
def load_i16(_ctx: Typing, address: Type, index: Type) -> Typed:
    return types.int16(types.int64, types.int64), _load(I16)


@intrinsic
def load_f64(_ctx: Typing, address: Type, index: Type) -> Typed:
    return types.float64(types.int64, types.int64), _load(F64)


@intrinsic
def load_f32(_ctx: Typing, address: Type, index: Type) -> Typed:
    return types.float32(types.int64, types.int64), _load(F32)


@intrinsic
def load_i8(_ctx: Typing, address: Type, index: Type) -> Typed:
    return types.int8(types.int64, types.int64), _load(I8)


@intrinsic
def load_bf16(_ctx: Typing, address: Type, index: Type) -> Typed:
    """The bfloat16 at ``address[index]`` as float32."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return _widen_bf16(builder, builder.load(_element(builder, args[0], args[1], I16)))

    return types.float32(types.int64, types.int64), lower


@intrinsic
def store_i64(_ctx: Typing, address: Type, index: Type, value: Type) -> Typed:
    return types.void(types.int64, types.int64, types.int64), _store(I64)


@intrinsic
def store_i32(_ctx: Typing, address: Type, index: Type, value: Type) -> Typed:
    return types.void(types.int64, types.int64, types.int32), _store(I32)


@intrinsic
def store_i16(_ctx: Typing, address: Type, index: Type, value: Type) -> Typed:
    return types.void(types.int64, types.int64, types.int16), _store(I16)


@intrinsic
def store_f64(_ctx: Typing, address: Type, index: Type, value: Type) -> Typed:
    return types.void(types.int64, types.int64, types.float64), _store(F64)


@intrinsic
def store_f32(_ctx: Typing, address: Type, index: Type, value: Type) -> Typed:
    return types.void(types.int64, types.int64, types.float32), _store(F32)


@intrinsic
def store_bf16(_ctx: Typing, address: Type, index: Type, value: Type) -> Typed:
    """Round the float32 ``value`` to ``address[index]``."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        target = _element(builder, args[0], args[1], I16)
        builder.store(_round_to_bf16(builder, args[2]), target)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), lower


@intrinsic
def f32_from_bits(_ctx: Typing, bits: Type) -> Typed:
    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), lower


# ---- threads ------------------------------------------------------------------------


@intrinsic
def atomic_load(_ctx: Typing, address: Type) -> Typed:
    """int64 at ``address``, acquire."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), lower


@intrinsic
def atomic_store(_ctx: Typing, address: Type, value: Type) -> Typed:
    """int64 to ``address``, release."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        target = builder.inttoptr(args[0], I64.as_pointer())
        builder.store_atomic(args[1], target, "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), lower


def _read_modify_write(operation: str) -> Lower:
    def lower(_ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        target = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw(operation, target, args[1], "acq_rel")

    return lower


@intrinsic
def atomic_add(_ctx: Typing, address: Type, value: Type) -> Typed:
    """Add to the int64 at ``address``; returns what it was."""
    return types.int64(types.int64, types.int64), _read_modify_write("add")


@intrinsic
def atomic_swap(_ctx: Typing, address: Type, value: Type) -> Typed:
    """Replace the int64 at ``address``; returns what it was."""
    return types.int64(types.int64, types.int64), _read_modify_write("xchg")


@intrinsic
def compare_and_swap(_ctx: Typing, address: Type, expected: Type, value: Type) -> Typed:
    """Replace the int64 at ``address`` if it is ``expected``; returns whether it was."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        target = builder.inttoptr(args[0], I64.as_pointer())
        pair = builder.cmpxchg(target, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), lower


@intrinsic
def pause(_ctx: Typing) -> Typed:
    """Tell the core that this is a spin loop."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, _args: Values) -> ir.Value:
        void = ir.VoidType()
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            hint = builder.module.declare_intrinsic(
                "llvm.x86.sse2.pause", fnty=ir.FunctionType(void, [])
            )
            builder.call(hint, [])
        elif machine in ("aarch64", "arm64"):
            hint = builder.module.declare_intrinsic(
                "llvm.aarch64.hint", fnty=ir.FunctionType(void, [I32])
            )
            builder.call(hint, [ir.Constant(I32, 1)])  # YIELD
        return ctx.get_dummy_value()

    return types.void(), lower


@intrinsic
def call_kernel(_ctx: Typing, function: Type, args: Type, chunk: Type, thread: Type) -> Typed:
    """Call the kernel at address ``function`` with (args, chunk, thread)."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        kernel = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(args[0], kernel.as_pointer()), args[1:])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), lower


# ---- the vector inner loop ----------------------------------------------------------


def _load_lanes(builder: ir.IRBuilder, address: ir.Value, kind: Kind) -> ir.Value:
    """LANES consecutive elements as float32."""
    of = {Kind.BF16: I16, Kind.INT8: I8, Kind.F32: F32}[kind]
    pointer = builder.inttoptr(address, ir.VectorType(of, LANES).as_pointer())
    lanes = builder.load(pointer, align={Kind.BF16: 2, Kind.INT8: 1, Kind.F32: 4}[kind])
    if kind is Kind.BF16:
        return _widen_bf16(builder, lanes)
    if kind is Kind.INT8:
        word = builder.sext(lanes, ir.VectorType(I32, LANES))
        return builder.sitofp(word, ir.VectorType(F32, LANES))
    return lanes


def _sums(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The lane sums of up to LANES vectors (a power of two), in the lanes of one vector.

    Vectors are packed as they shrink, but each is always summed by the same
    halving tree (i with i + LANES/2, then LANES/4, ...), so a sum's bits do not
    depend on how many vectors are summed together.
    """
    segment = LANES  # lanes per vector still to be summed
    while segment > 1:
        half = segment // 2
        starts = range(0, LANES, segment)
        low = [start + i for start in starts for i in range(half)]
        high = [lane + half for lane in low]
        if len(vectors) == 1:
            pairs = [(vectors[0], vectors[0])]
        else:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        vectors = []
        for first, second in pairs:
            halves = [
                builder.shuffle_vector(
                    first,
                    second,
                    ir.Constant(
                        ir.VectorType(I32, LANES), lanes + [LANES + lane for lane in lanes]
                    ),
                )
                for lanes in (low, high)
            ]
            vectors.append(builder.fadd(halves[0], halves[1]))
        segment = half
    return vectors[0]


def _multiply_add(builder: ir.IRBuilder) -> ir.Function:
    """a * b + c on vectors, fused where the machine can."""
    vector = ir.VectorType(F32, LANES)
    signature = ir.FunctionType(vector, [vector] * 3)
    return cgutils.get_or_insert_function(builder.module, signature, f"llvm.fmuladd.v{LANES}f32")


def _spread(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """``value`` in every lane."""
    undefined = ir.Constant(ir.VectorType(F32, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    lanes = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at ``address``; an address that is not mapped is harmless."""
    byte = I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    ask = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    # A read, to be kept in all cache levels, of data.
    builder.call(ask, [builder.inttoptr(address, byte), I32(0), I32(3), I32(1)])


@intrinsic
def prefetch(_ctx: Typing, address: Type) -> Typed:
    """Ask for the cache line at ``address``, mapped or not."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        _prefetch(builder, args[0])
        return ctx.get_dummy_value()

    return types.void(types.int64), lower


@intrinsic(prefer_literal=True)
def dot_tile(
    _ctx: Typing,
    kind: Type,
    num_rows: Type,
    num_tokens: Type,
    weights: Type,
    weights_stride: Type,
    x: Type,
    x_stride: Type,
    length: Type,
    out: Type,
    out_stride: Type,
) -> Typed:
    """out[t, r] = sum over i < length of weights[r, i] * x[t, i], for a tile of rows and tokens.

    ``kind``, ``num_rows`` and ``num_tokens`` are literals: the tile's sums live in
    num_rows * num_tokens vector registers. ``weights`` has elements of ``kind``, x and
    out are float32; ``weights_stride`` is in bytes, the other strides in elements;
    ``length`` is a multiple of LANES. Each sum's bits depend on its own row and token
    only, not on the tile.
    """
    kind_value = Kind(kind.literal_value)
    rows, tokens = range(num_rows.literal_value), range(num_tokens.literal_value)
    element_bytes = {Kind.BF16: 2, Kind.INT8: 1, Kind.F32: 4}[kind_value]
    vector = ir.VectorType(F32, LANES)

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        weights, weights_stride, x, x_stride, length, out, out_stride = args[3:]
        fma = _multiply_add(builder)
        x_stride = builder.mul(x_stride, I64(4))
        row_starts = [builder.add(weights, builder.mul(weights_stride, I64(r))) for r in rows]
        token_starts = [builder.add(x, builder.mul(x_stride, I64(t))) for t in tokens]
        zero = ir.Constant(vector, [0.0] * LANES)
        sums = {(t, r): cgutils.alloca_once_value(builder, zero) for t in tokens for r in rows}
        with cgutils.for_range_slice(builder, I64(0), length, I64(LANES), intp=I64) as (i, _):
            offset, x_offset = builder.mul(i, I64(element_bytes)), builder.mul(i, I64(4))
            lanes = [_load_lanes(builder, builder.add(w, offset), kind_value) for w in row_starts]
            # Weight rows follow one another, so a fixed distance ahead is a later row.
            for w in row_starts:
                later = builder.add(builder.add(w, offset), I64(PREFETCH_BYTES))
                _prefetch(builder, later)
            for t in tokens:
                x_lanes = _load_lanes(builder, builder.add(token_starts[t], x_offset), Kind.F32)
                for r in rows:
                    total = builder.call(fma, [lanes[r], x_lanes, builder.load(sums[t, r])])
                    builder.store(total, sums[t, r])
        _store_sums(builder, [builder.load(total) for total in sums.values()], out, out_stride, rows)
        return ctx.get_dummy_value()

    operands = [kind, num_rows, num_tokens] + [types.int64] * 7
    return types.void(*operands), lower


def _store_sums(
    builder: ir.IRBuilder, vectors: Values, out: ir.Value, out_stride: ir.Value, rows: range
) -> None:
    """Store the lane sums of ``vectors`` (token-major) to out[token, row]."""
    num_rows = len(rows)
    for group_start in range(0, len(vectors), LANES):
        group = vectors[group_start : group_start + LANES]
        packed = group + [group[0]] * ((1 << (len(group) - 1).bit_length()) - len(group))
        sums = _sums(builder, packed)
        for first in range(0, len(group), num_rows):
            token = (group_start + first) // num_rows
            index = builder.mul(out_stride, I64(token))
            for r in rows:
                value = builder.extract_element(sums, I32(first + r))
                builder.store(value, _element(builder, out, builder.add(index, I64(r)), F32))


@intrinsic(prefer_literal=True)
def mix_tile(
    _ctx: Typing,
    kind: Type,
    num_mixes: Type,
    shares: Type,
    shares_stride: Type,
    values: Type,
    values_stride: Type,
    length: Type,
    out: Type,
    out_stride: Type,
) -> Typed:
    """out[m, :LANES] += sum over t < length of shares[m, t] * values[t, :LANES].

    ``kind`` and ``num_mixes`` are literals; ``values`` has elements of ``kind``, the rest
    is float32; ``values_stride`` is in bytes, the other strides in elements.
    """
    kind_value, mixes = Kind(kind.literal_value), range(num_mixes.literal_value)
    vector = ir.VectorType(F32, LANES)

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        shares, shares_stride, values, values_stride, length, out, out_stride = args[2:]
        fma = _multiply_add(builder)
        targets = [
            builder.inttoptr(
                builder.add(out, builder.mul(out_stride, I64(4 * m))), vector.as_pointer()
            )
            for m in mixes
        ]
        totals = [
            cgutils.alloca_once_value(builder, builder.load(target, align=4)) for target in targets
        ]
        with cgutils.for_range_slice(builder, I64(0), length, I64(1), intp=I64) as (t, _):
            row = builder.add(values, builder.mul(values_stride, t))
            lanes = _load_lanes(builder, row, kind_value)
            for m in mixes:
                index = builder.add(builder.mul(shares_stride, I64(m)), t)
                share = builder.load(_element(builder, shares, index, F32))
                spread = _spread(builder, share)
                builder.store(builder.call(fma, [spread, lanes, builder.load(totals[m])]), totals[m])
        for target, total in zip(targets, totals, strict=True):
            builder.store(builder.load(total), target, align=4)
        return ctx.get_dummy_value()

    return types.void(kind, num_mixes, *[types.int64] * 7), lower
