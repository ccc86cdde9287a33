"""A vector of LANES float32 as a value that numba kernels can hold in a variable.

For the loops that the compiler does not vectorise by itself as wanted. Knows
addresses and lanes only. Used by the ``cpu_*`` kernels.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from headwater.numerics.cpu_intrinsics import (
    F32,
    I16,
    I32,
    LANES,
    Context,
    Lower,
    Type,
    Typed,
    Typing,
    Values,
    f32,
)

_REALS = ir.VectorType(F32, LANES)
_WORDS = ir.VectorType(I32, LANES)


class Vector(types.Type):
    """The numba type of a vector."""

    def __init__(self) -> None:
        super().__init__(name=f"f32x{LANES}")


vector = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: object, fe_type: Type) -> None:
        super().__init__(manager, fe_type, _REALS)


def _words(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * LANES)


@intrinsic
def load(_ctx: Typing, address: Type) -> Typed:
    """LANES float32 at ``address``."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.load(builder.inttoptr(args[0], _REALS.as_pointer()), align=4)

    return vector(types.int64), lower


@intrinsic
def store(_ctx: Typing, address: Type, value: Type) -> Typed:
    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        builder.store(args[1], builder.inttoptr(args[0], _REALS.as_pointer()), align=4)
        return ctx.get_dummy_value()

    return types.void(types.int64, vector), lower


@intrinsic
def spread(_ctx: Typing, value: Type) -> Typed:
    """A float32 in every lane."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        undefined = ir.Constant(_REALS, ir.Undefined)
        first = builder.insert_element(undefined, args[0], I32(0))
        return builder.shuffle_vector(first, undefined, _words(0))

    return vector(types.float32), lower


def _call(name: str, num_operands: int) -> Lower:
    def lower(_ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        signature = ir.FunctionType(_REALS, [_REALS] * num_operands)
        function = cgutils.get_or_insert_function(
            builder.module, signature, f"llvm.{name}.v{LANES}f32"
        )
        return builder.call(function, args)

    return lower


@intrinsic
def add(_ctx: Typing, a: Type, b: Type) -> Typed:
    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.fadd(*args)

    return vector(vector, vector), lower


@intrinsic
def sub(_ctx: Typing, a: Type, b: Type) -> Typed:
    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.fsub(*args)

    return vector(vector, vector), lower


@intrinsic
def mul(_ctx: Typing, a: Type, b: Type) -> Typed:
    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.fmul(*args)

    return vector(vector, vector), lower


@intrinsic
def div(_ctx: Typing, a: Type, b: Type) -> Typed:
    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.fdiv(*args)

    return vector(vector, vector), lower


@intrinsic
def fma(_ctx: Typing, a: Type, b: Type, c: Type) -> Typed:
    """a * b + c."""
    return vector(vector, vector, vector), _call("fmuladd", 3)


@intrinsic
def larger(_ctx: Typing, a: Type, b: Type) -> Typed:
    """The larger of each pair of lanes; b where either is NaN."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return vector(vector, vector), lower


@intrinsic
def smaller(_ctx: Typing, a: Type, b: Type) -> Typed:
    """The smaller of each pair of lanes; b where either is NaN."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return vector(vector, vector), lower


@intrinsic
def keep_ordered(_ctx: Typing, value: Type, a: Type, b: Type, other: Type) -> Typed:
    """The lanes of ``value`` where a <= b, else those of ``other``."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        value, a, b, other = args
        return builder.select(builder.fcmp_ordered("<=", a, b), value, other)

    return vector(vector, vector, vector, vector), lower


@intrinsic
def add_to_exponent(_ctx: Typing, a: Type, n: Type) -> Typed:
    """a * 2**k, where the last bits of n's significand are the whole number k."""

    def lower(_context: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        exponent = builder.shl(builder.bitcast(args[1], _WORDS), _words(23))
        return builder.bitcast(builder.add(builder.bitcast(args[0], _WORDS), exponent), _REALS)

    return vector(vector, vector), lower


@intrinsic
def store_bf16_pairs(_ctx: Typing, address: Type, low: Type, high: Type) -> Typed:
    """For each lane, low then high as bfloat16: 2 LANES of them. Rounded to nearest, ties
    away from zero, which takes half the instructions of ties to even."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        low, high = (
            builder.add(builder.bitcast(value, _WORDS), _words(0x8000)) for value in args[1:]
        )
        kept = builder.and_(high, _words(-0x10000))
        pairs = builder.or_(builder.lshr(low, _words(16)), kept)
        builder.store(pairs, builder.inttoptr(args[0], _WORDS.as_pointer()), align=4)
        return ctx.get_dummy_value()

    return types.void(types.int64, vector, vector), lower


@intrinsic
def pair_bf16(_ctx: Typing, target: Type, low: Type, high: Type) -> Typed:
    """LANES bfloat16 at ``low`` and at ``high`` to ``target``, neighbours as pairs."""

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        halves = ir.VectorType(I16, LANES)
        low, high = (
            builder.zext(
                builder.load(builder.inttoptr(address, halves.as_pointer()), align=2), _WORDS
            )
            for address in args[1:]
        )
        pairs = builder.or_(low, builder.shl(high, _words(16)))
        builder.store(pairs, builder.inttoptr(args[0], _WORDS.as_pointer()), align=4)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), lower


_EXP2_MIN = f32(-126.0)
# Added to x, it leaves x rounded to a whole number in the last bits of the significand.
_ROUNDER = f32(1.5 * 2**23)
# 2**f on [-1/2, 1/2], least largest relative error (2.6e-6) of degree 4: far under
# bfloat16's 2e-3, which is what the results become.
_E0, _E1, _E2, _E3, _E4 = (
    f32(c) for c in (0.999999285, 0.693121791, 0.240247443, 0.0559178591, 0.00957009848)
)


@njit(nogil=True, error_model="numpy")
def exp2(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  (numba infers the vector)
    """2**x for x <= 0; below -126 as for -126."""
    x = larger(x, spread(_EXP2_MIN))
    rounded = add(x, spread(_ROUNDER))
    f = sub(x, sub(rounded, spread(_ROUNDER)))
    poly = fma(f, spread(_E4), spread(_E3))
    poly = fma(f, poly, spread(_E2))
    poly = fma(f, poly, spread(_E1))
    poly = fma(f, poly, spread(_E0))
    return add_to_exponent(poly, rounded)
