"""The vector inner loops under the matrix and attention kernels of this room.

    dot_tile   out[t, r] = weights[r] . x[t]                  (linear, scores)
    mix_tile   out[m] += sum over t of shares[m, t] * values[t]   (attention's values)
    pair_tile  out[r, :] = sum over p of a[r, p] . b[p, :], pairs of bfloat16   (chunks)

Each keeps a tile of sums in vector registers; the tile's size is a literal of the
call, so the loop over it is unrolled where the code is generated. Knows
addresses and sizes only.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headwater.numerics.cpu_intrinsics import (
    F32,
    HOST_FEATURES,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Context,
    Kind,
    Type,
    Typed,
    Typing,
    Values,
    element,
    lower_prefetch,
    widen_bf16,
)

# How far ahead of its loads a matrix kernel asks for memory. Without it one core
# reads 8 instead of 11.5 GB/s, and several tokens' arithmetic hides nothing.
PREFETCH_BYTES = 12_288


def _load_lanes(builder: ir.IRBuilder, address: ir.Value, kind: Kind) -> ir.Value:
    """LANES consecutive elements as float32."""
    of = {Kind.BF16: I16, Kind.INT8: I8, Kind.F32: F32}[kind]
    pointer = builder.inttoptr(address, ir.VectorType(of, LANES).as_pointer())
    lanes = builder.load(pointer, align={Kind.BF16: 2, Kind.INT8: 1, Kind.F32: 4}[kind])
    if kind is Kind.BF16:
        return widen_bf16(builder, lanes)
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
    """``value``, of 32 bits, in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    lanes = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


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
                lower_prefetch(builder, later)
            for t in tokens:
                x_lanes = _load_lanes(builder, builder.add(token_starts[t], x_offset), Kind.F32)
                for r in rows:
                    total = builder.call(fma, [lanes[r], x_lanes, builder.load(sums[t, r])])
                    builder.store(total, sums[t, r])
        _store_sums(
            builder, [builder.load(total) for total in sums.values()], out, out_stride, rows
        )
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
                builder.store(value, element(builder, out, builder.add(index, I64(r)), F32))


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
                share = builder.load(element(builder, shares, index, F32))
                spread = _spread(builder, share)
                builder.store(
                    builder.call(fma, [spread, lanes, builder.load(totals[m])]), totals[m]
                )
        for target, total in zip(targets, totals, strict=True):
            builder.store(builder.load(total), target, align=4)
        return ctx.get_dummy_value()

    return types.void(kind, num_mixes, *[types.int64] * 7), lower


# Whether the machine multiplies pairs of bfloat16 and adds both products to a float32.
HAS_PAIR_DOT = LANES == 16 and "avx512bf16" in HOST_FEATURES
_WORDS = ir.VectorType(I32, LANES)
_REALS = ir.VectorType(F32, LANES)


def _add_pair_dot(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """total + a.low * b.low + a.high * b.high; a and b are LANES pairs of bfloat16."""
    if HAS_PAIR_DOT:
        signature = ir.FunctionType(_REALS, [_REALS, _WORDS, _WORDS])
        dot = cgutils.get_or_insert_function(
            builder.module, signature, "llvm.x86.avx512bf16.dpbf16ps.512"
        )
        return builder.call(dot, [total, a, b])
    fma = _multiply_add(builder)
    sixteen = ir.Constant(_WORDS, [16] * LANES)
    upper = ir.Constant(_WORDS, [-0x10000] * LANES)
    low = [builder.bitcast(builder.shl(pair, sixteen), _REALS) for pair in (a, b)]
    high = [builder.bitcast(builder.and_(pair, upper), _REALS) for pair in (a, b)]
    return builder.call(fma, [*high, builder.call(fma, [*low, total])])


@intrinsic(prefer_literal=True)
def pair_tile(
    _ctx: Typing,
    num_rows: Type,
    num_vectors: Type,
    a: Type,
    row_bytes: Type,
    step_bytes: Type,
    b: Type,
    num_steps: Type,
    out: Type,
    shrink: Type,
) -> Typed:
    """out[r, :] = out[r, :] * shrink + sum over p < num_steps of a[r, p] . b[p, :].

    ``num_rows`` and ``num_vectors`` are literals. A line has num_vectors * LANES lanes:
    b is lines of pairs of bfloat16, out lines of float32 and ``shrink`` the address of
    one, or 0 where out is to begin at 0. The pair a[r, p] is at r * row_bytes +
    p * step_bytes.
    """
    rows, vectors = range(num_rows.literal_value), range(num_vectors.literal_value)
    line_bytes = len(vectors) * LANES * 4

    def lower(ctx: Context, builder: ir.IRBuilder, _sig: object, args: Values) -> ir.Value:
        a, row_bytes, step_bytes, b, num_steps, out, shrink = args[2:]

        def lanes(of: ir.VectorType, address: ir.Value, number: int) -> ir.Value:
            place = builder.add(address, I64(number * LANES * 4))
            return builder.inttoptr(place, of.as_pointer())

        zero = ir.Constant(_REALS, [0.0] * LANES)
        sums = {(r, n): cgutils.alloca_once_value(builder, zero) for r in rows for n in vectors}
        with builder.if_then(builder.icmp_signed("!=", shrink, I64(0))):
            factors = [builder.load(lanes(_REALS, shrink, n), align=4) for n in vectors]
            for (r, n), total in sums.items():
                line = builder.add(out, I64(r * line_bytes))
                before = builder.load(lanes(_REALS, line, n), align=4)
                builder.store(builder.fmul(before, factors[n]), total)
        starts = [builder.add(a, builder.mul(row_bytes, I64(r))) for r in rows]
        with cgutils.for_range_slice(builder, I64(0), num_steps, I64(1), intp=I64) as (p, _):
            line = builder.add(b, builder.mul(p, I64(line_bytes)))
            right = [builder.load(lanes(_WORDS, line, n), align=4) for n in vectors]
            offset = builder.mul(p, step_bytes)
            for r in rows:
                word = builder.inttoptr(builder.add(starts[r], offset), I32.as_pointer())
                left = _spread(builder, builder.load(word, align=4))
                for n in vectors:
                    total = sums[r, n]
                    builder.store(
                        _add_pair_dot(builder, builder.load(total), left, right[n]), total
                    )
        for (r, n), total in sums.items():
            line = builder.add(out, I64(r * line_bytes))
            builder.store(builder.load(total), lanes(_REALS, line, n), align=4)
        return ctx.get_dummy_value()

    return types.void(num_rows, num_vectors, *[types.int64] * 7), lower
