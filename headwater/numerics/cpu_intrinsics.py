"""The few machine operations that numba lacks, for kernels that work on raw addresses.

Loads and stores by address (bfloat16 as uint16 bits), atomics, a pause hint, a
call through a function pointer, a hint for memory ahead. Knows no shapes of models.
Used by ``cpu_*`` only.

Kernels take addresses instead of arrays: a call then costs well under a
microsecond, and there is exactly one specialisation of each to compile.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

import numpy as np
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


class Kind(IntEnum):
    """Element type behind an address."""

    BF16 = 0
    INT8 = 1
    F32 = 2


def f32(value: float) -> float:
    """A float32 constant for kernels: a plain float would widen their arithmetic to float64."""
    constant: float = np.float32(value)  # type: ignore[assignment]  # kernels see it as a float
    return constant


# ---- loads and stores: address[index] -----------------------------------------------


def element(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, of: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(address, of.as_pointer()), [index])


def widen_bf16(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
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
        return builder.load(element(builder, args[0], args[1], of))

    return lower


def _store(of: ir.Type) -> Lower:
    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        builder.store(args[2], element(builder, args[0], args[1], of))
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
        return widen_bf16(builder, builder.load(element(builder, args[0], args[1], I16)))

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
        target = element(builder, args[0], args[1], I16)
        builder.store(_round_to_bf16(builder, args[2]), target)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), lower


@intrinsic
def store_exact_bf16(_ctx: Typing, address: Type, index: Type, value: Type) -> Typed:
    """The float32 ``value``, which bfloat16 can hold exactly, to ``address[index]``."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        word = builder.lshr(builder.bitcast(args[2], I32), I32(16))
        builder.store(builder.trunc(word, I16), element(builder, args[0], args[1], I16))
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), lower


@intrinsic
def f32_from_bits(_ctx: Typing, bits: Type) -> Typed:
    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), lower


# ---- memory ahead --------------------------------------------------------------------


def lower_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
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
        lower_prefetch(builder, args[0])
        return ctx.get_dummy_value()

    return types.void(types.int64), lower


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
