"""Row-wise kernels of the CPU path for layers whose rows are keys and values: turning pairs,
the clamped gated SiLU, storing rows, pooling pairs of tokens.

Each takes a chunk of consecutive tokens, reads bfloat16, computes in float32 and rounds
once; a token's bits do not depend on its neighbours. Knows addresses and sizes only, and
of a layer its words:

    int64: address of the rows, address of the open tokens, D, D padded, tokens of a block, ratio
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics.cpu_attention import row_of
from headwater.numerics.cpu_elementwise import exp_f32
from headwater.numerics.cpu_team import MAX_CHUNKS, compiled

LAYER_ROWS, LAYER_OPEN, LAYER_DIM, LAYER_PADDED, LAYER_BLOCK_TOKENS, LAYER_RATIO = range(6)
_REAL = 14  # where ``cpu_team.launch`` puts the real argument
_ZERO, _ONE = hw.f32(0), hw.f32(1)
_CHUNK_ELEMENTS = 8_192


@compiled
def tokens_per_chunk(num_tokens: int, elements_per_token: int) -> int:
    least = (num_tokens + MAX_CHUNKS - 1) // MAX_CHUNKS
    return max(1, least, _CHUNK_ELEMENTS // elements_per_token)


def rotate_pairs_kernel(args: int, chunk: int, thread: int) -> None:
    """args: x, x_stride, num_heads, head_dim, half, cos, sin, positions, num_tokens,
    tokens_per_chunk; real: 1, or -1 to turn back."""
    x, x_stride, num_heads = hw.load_i64(args, 0), hw.load_i64(args, 1), hw.load_i64(args, 2)
    head_dim, half = hw.load_i64(args, 3), hw.load_i64(args, 4)
    cos, sin, positions = hw.load_i64(args, 5), hw.load_i64(args, 6), hw.load_i64(args, 7)
    begin = chunk * hw.load_i64(args, 9)
    end = min(begin + hw.load_i64(args, 9), hw.load_i64(args, 8))
    sign = np.float32(hw.load_f64(args, _REAL))
    for token in range(begin, end):
        angle = hw.load_i32(positions, token) * half
        for head in range(num_heads):
            turned = x + (token * x_stride + (head + 1) * head_dim - 2 * half) * 2
            for i in range(half):
                first, second = hw.load_bf16(turned, 2 * i), hw.load_bf16(turned, 2 * i + 1)
                c, s = hw.load_f32(cos, angle + i), hw.load_f32(sin, angle + i) * sign
                hw.store_bf16(turned, 2 * i, first * c - second * s)
                hw.store_bf16(turned, 2 * i + 1, second * c + first * s)


def silu_mul_clamped_kernel(args: int, chunk: int, thread: int) -> None:
    """args: gate_up [T, 2F], out [T, F], inner (F), num_tokens, tokens_per_chunk; real: limit."""
    gate_up, out, inner = hw.load_i64(args, 0), hw.load_i64(args, 1), hw.load_i64(args, 2)
    begin = chunk * hw.load_i64(args, 4)
    end = min(begin + hw.load_i64(args, 4), hw.load_i64(args, 3))
    limit = np.float32(hw.load_f64(args, _REAL))
    for token in range(begin, end):
        gate = gate_up + token * inner * 4
        up, target = gate + inner * 2, out + token * inner * 2
        for i in range(inner):
            value = min(hw.load_bf16(gate, i), limit)
            factor = max(min(hw.load_bf16(up, i), limit), -limit)
            hw.store_bf16(target, i, value / (_ONE + exp_f32(-value)) * factor)


def store_rows_kernel(args: int, chunk: int, thread: int) -> None:
    """args: rows, row_stride, layer, slots, num_tokens, tokens_per_chunk."""
    rows, stride = hw.load_i64(args, 0), hw.load_i64(args, 1)
    layer, slots = hw.load_i64(args, 2), hw.load_i64(args, 3)
    stored, dim = hw.load_i64(layer, LAYER_ROWS), hw.load_i64(layer, LAYER_DIM)
    padded = hw.load_i64(layer, LAYER_PADDED)
    begin = chunk * hw.load_i64(args, 5)
    end = min(begin + hw.load_i64(args, 5), hw.load_i64(args, 4))
    for token in range(begin, end):
        slot = hw.load_i64(slots, token)
        if slot < 0:
            continue
        source, target = rows + token * stride * 2, stored + slot * padded * 2
        for i in range(dim):
            hw.store_i16(target, i, hw.load_i16(source, i))
        for i in range(dim, padded):
            hw.store_i16(target, i, np.int16(0))


# The arguments of ``compress_kernel``; eps is the real one.
(
    _VALUES, _GATES, _STRIDE, _NORM, _COS, _SIN, _HALF, _LAYER, _POSITIONS, _SLOTS,
    _GLOBAL_SLOTS, _ROW_STARTS, _NUM_ROWS,
) = range(13)  # fmt: skip


@njit(nogil=True, error_model="numpy")
def _pooled(first: int, first_gate: int, second: int, second_gate: int, i: int) -> float:
    """Entry i of both tokens' values, mixed by the softmax of their gates."""
    difference = hw.load_bf16(first_gate, i) - hw.load_bf16(second_gate, i)
    share = _ONE / (_ONE + exp_f32(difference))  # of the second
    return hw.load_bf16(first, i) * (_ONE - share) + hw.load_bf16(second, i) * share


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _sum_of_squares(first: int, first_gate: int, second: int, second_gate: int, dim: int) -> float:
    total = _ZERO
    for i in range(dim):
        value = _pooled(first, first_gate, second, second_gate, i)
        total += value * value
    return total


@njit(nogil=True, error_model="numpy")
def _store_pair(args: int, token: int, first: int, first_gate: int) -> None:
    """The row of the pair whose second token is ``token``."""
    layer, slots = hw.load_i64(args, _LAYER), hw.load_i64(args, _GLOBAL_SLOTS)
    if slots == 0:
        slots = hw.load_i64(args, _SLOTS)
    slot = hw.load_i64(slots, token)
    if slot < 0:
        return
    dim, padded = hw.load_i64(layer, LAYER_DIM), hw.load_i64(layer, LAYER_PADDED)
    half, offset = hw.load_i64(args, _HALF), token * hw.load_i64(args, _STRIDE) * 2
    second, second_gate = hw.load_i64(args, _VALUES) + offset, hw.load_i64(args, _GATES) + offset
    target = hw.load_i64(layer, LAYER_ROWS) + slot // 2 * padded * 2
    total = _sum_of_squares(first, first_gate, second, second_gate, dim)
    eps, norm = np.float32(hw.load_f64(args, _REAL)), hw.load_i64(args, _NORM)
    factor = _ONE / np.sqrt(total / np.float32(dim) + eps)
    angle = np.int64(hw.load_i32(hw.load_i64(args, _POSITIONS), token) - 1) * half * 4
    cos, sin = hw.load_i64(args, _COS) + angle, hw.load_i64(args, _SIN) + angle
    still = dim - 2 * half
    for i in range(still):
        value = _pooled(first, first_gate, second, second_gate, i)
        hw.store_bf16(target, i, value * factor * hw.load_f32(norm, i))
    for pair in range(half):
        i = still + 2 * pair
        a = _pooled(first, first_gate, second, second_gate, i) * factor * hw.load_f32(norm, i)
        b = (
            _pooled(first, first_gate, second, second_gate, i + 1)
            * factor
            * hw.load_f32(norm, i + 1)
        )
        c, s = hw.load_f32(cos, pair), hw.load_f32(sin, pair)
        hw.store_bf16(target, i, a * c - b * s)
        hw.store_bf16(target, i + 1, b * c + a * s)
    for i in range(dim, padded):
        hw.store_i16(target, i, np.int16(0))


@njit(nogil=True, error_model="numpy")
def _open_place(args: int, token: int) -> int:
    """Where the open token of the block of ``token`` is: its values, then its gates."""
    layer, slot = hw.load_i64(args, _LAYER), hw.load_i64(hw.load_i64(args, _SLOTS), token)
    block = slot // hw.load_i64(layer, LAYER_BLOCK_TOKENS)
    return hw.load_i64(layer, LAYER_OPEN) + block * 2 * hw.load_i64(layer, LAYER_DIM) * 2


def compress_kernel(args: int, chunk: int, thread: int) -> None:
    """Rows of the pairs that a chunk of tokens completes, and the token that stays open."""
    layer, row_starts = hw.load_i64(args, _LAYER), hw.load_i64(args, _ROW_STARTS)
    values, gates = hw.load_i64(args, _VALUES), hw.load_i64(args, _GATES)
    positions, stride = hw.load_i64(args, _POSITIONS), hw.load_i64(args, _STRIDE) * 2
    num_rows, dim = hw.load_i64(args, _NUM_ROWS), hw.load_i64(layer, LAYER_DIM)
    num_tokens = 0 + hw.load_i32(row_starts, num_rows)
    per_chunk = tokens_per_chunk(num_tokens, dim)
    for token in range(chunk * per_chunk, min((chunk + 1) * per_chunk, num_tokens)):
        row = row_of(token, row_starts, num_rows)
        first_of_row = hw.load_i32(row_starts, row)
        is_last = token + 1 == hw.load_i32(row_starts, row + 1)
        # Who has the row's last token also has the pair that an earlier step opened, which
        # the row's first token closes: it is read before another token takes its place.
        for opened in range(2 if is_last else 1):
            second, before = token, (token - 1) * stride
            first, first_gate = values + before, gates + before
            if opened == 1:
                second = first_of_row
                first = _open_place(args, second)
                first_gate = first + dim * 2
            is_pair = hw.load_i32(positions, second) % 2 == 1
            if is_pair and (opened == 1 or token > first_of_row):
                _store_pair(args, second, first, first_gate)
        if is_last and hw.load_i32(positions, token) % 2 == 0:
            target = _open_place(args, token)
            for i in range(dim):
                hw.store_i16(target, i, hw.load_i16(values + token * stride, i))
                hw.store_i16(target, dim + i, hw.load_i16(gates + token * stride, i))
