"""Row-wise kernels of the CPU path: norms, rotary embedding, gated SiLU and GELU, storing KV.

Each takes a chunk of consecutive tokens, reads bfloat16, computes in float32 and
rounds once. Knows addresses and sizes only; ``cpu.py`` cuts the chunks.

Plain scalar loops: the compiler vectorises them. Sums may be reassociated
(fastmath "reassoc"), in the same way for every row, so a row's bits do not
depend on its neighbours.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headwater.numerics import cpu_intrinsics as hw

_ONE = hw.f32(1)
_LOG2_E = hw.f32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = hw.f32(0.693359375), hw.f32(-2.12194440e-4)
_EXP_MIN, _EXP_MAX = hw.f32(-87.0), hw.f32(88.0)
_HALF = hw.f32(0.5)
# exp(r) on |r| <= ln(2) / 2 by its Taylor series to r^6: relative error below 2e-7.
_C2, _C3, _C4, _C5, _C6 = (hw.f32(1 / n) for n in (2, 6, 24, 120, 720))

# Two times sqrt(2 / pi), and that times 0.044715.
_GELU_LINEAR, _GELU_CUBIC = hw.f32(1.5957691216057308), hw.f32(0.07135481282052653)


@njit(nogil=True, error_model="numpy")
def exp_f32(x: float) -> float:
    """exp of a float32 in vectorisable arithmetic; saturates outside [-87, 88]."""
    clamped = min(max(x, _EXP_MIN), _EXP_MAX)
    whole = np.floor(clamped * _LOG2_E + _HALF)
    r = clamped - whole * _LN2_HIGH - whole * _LN2_LOW
    poly = _ONE + r * (_ONE + r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * _C6)))))
    return poly * hw.f32_from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _inverse_rms(row: int, length: int, eps: float) -> float:
    total = np.float32(0)
    for i in range(length):
        value = hw.load_bf16(row, i)
        total += value * value
    return _ONE / np.sqrt(total / np.float32(length) + eps)


@njit(nogil=True, error_model="numpy")
def _scale_row(
    row: int, factor: float, weight: int, weight_is_f32: int, out: int, length: int
) -> None:
    if weight_is_f32 != 0:
        for i in range(length):
            hw.store_bf16(out, i, hw.load_bf16(row, i) * factor * hw.load_f32(weight, i))
    else:
        for i in range(length):
            hw.store_bf16(out, i, hw.load_bf16(row, i) * factor * hw.load_bf16(weight, i))


@njit(nogil=True, error_model="numpy")
def _add_scaled_row(
    row: int, factor: float, weight: int, weight_is_f32: int, total: int, length: int
) -> None:
    if weight_is_f32 != 0:
        for i in range(length):
            scaled = hw.load_bf16(row, i) * factor * hw.load_f32(weight, i)
            hw.store_bf16(total, i, hw.load_bf16(total, i) + scaled)
    else:
        for i in range(length):
            scaled = hw.load_bf16(row, i) * factor * hw.load_bf16(weight, i)
            hw.store_bf16(total, i, hw.load_bf16(total, i) + scaled)


def rms_norm_kernel(args: int, chunk: int, thread: int) -> None:
    """args: x, x_stride (elements between tokens), rows_per_token, weight, weight_is_f32,
    out (contiguous), length, num_tokens, tokens_per_chunk; real: eps."""
    x, x_stride, num_rows = hw.load_i64(args, 0), hw.load_i64(args, 1), hw.load_i64(args, 2)
    weight, weight_is_f32 = hw.load_i64(args, 3), hw.load_i64(args, 4)
    out, length = hw.load_i64(args, 5), hw.load_i64(args, 6)
    begin = chunk * hw.load_i64(args, 8)
    end = min(begin + hw.load_i64(args, 8), hw.load_i64(args, 7))
    eps = np.float32(hw.load_f64(args, 14))
    for token in range(begin, end):
        for r in range(num_rows):
            row = x + (token * x_stride + r * length) * 2
            target = out + (token * num_rows + r) * length * 2
            factor = _inverse_rms(row, length, eps)
            _scale_row(row, factor, weight, weight_is_f32, target, length)


def add_rms_norm_kernel(args: int, chunk: int, thread: int) -> None:
    """residual += x, then x = rms_norm(residual), both in place.

    args: x, residual, weight, weight_is_f32, length, num_tokens, tokens_per_chunk; real: eps.
    """
    x, residual = hw.load_i64(args, 0), hw.load_i64(args, 1)
    weight, weight_is_f32 = hw.load_i64(args, 2), hw.load_i64(args, 3)
    length = hw.load_i64(args, 4)
    begin = chunk * hw.load_i64(args, 6)
    end = min(begin + hw.load_i64(args, 6), hw.load_i64(args, 5))
    eps = np.float32(hw.load_f64(args, 14))
    for token in range(begin, end):
        row, target = residual + token * length * 2, x + token * length * 2
        for i in range(length):
            hw.store_bf16(row, i, hw.load_bf16(row, i) + hw.load_bf16(target, i))
        factor = _inverse_rms(row, length, eps)
        _scale_row(row, factor, weight, weight_is_f32, target, length)


def norm_add_norm_kernel(args: int, chunk: int, thread: int) -> None:
    """residual += rms_norm(x), then x = rms_norm(residual), both in place; the first norm
    is not rounded.

    args: x, residual, post_weight, next_weight, weights_are_f32, length, num_tokens,
    tokens_per_chunk; real: eps.
    """
    x, residual = hw.load_i64(args, 0), hw.load_i64(args, 1)
    post_weight, next_weight = hw.load_i64(args, 2), hw.load_i64(args, 3)
    weights_are_f32, length = hw.load_i64(args, 4), hw.load_i64(args, 5)
    begin = chunk * hw.load_i64(args, 7)
    end = min(begin + hw.load_i64(args, 7), hw.load_i64(args, 6))
    eps = np.float32(hw.load_f64(args, 14))
    for token in range(begin, end):
        row, target = residual + token * length * 2, x + token * length * 2
        _add_scaled_row(
            target, _inverse_rms(target, length, eps), post_weight, weights_are_f32, row, length
        )
        factor = _inverse_rms(row, length, eps)
        _scale_row(row, factor, next_weight, weights_are_f32, target, length)


def scale_kernel(args: int, chunk: int, thread: int) -> None:
    """x *= factor in place. args: x, num_elements, elements_per_chunk; real: factor."""
    x = hw.load_i64(args, 0)
    begin = chunk * hw.load_i64(args, 2)
    end = min(begin + hw.load_i64(args, 2), hw.load_i64(args, 1))
    factor = np.float32(hw.load_f64(args, 14))
    for i in range(begin, end):
        hw.store_bf16(x, i, hw.load_bf16(x, i) * factor)


def silu_mul_kernel(args: int, chunk: int, thread: int) -> None:
    """args: gate_up [T, 2F], out [T, F], inner (F), num_tokens, tokens_per_chunk."""
    gate_up, out, inner = hw.load_i64(args, 0), hw.load_i64(args, 1), hw.load_i64(args, 2)
    begin = chunk * hw.load_i64(args, 4)
    end = min(begin + hw.load_i64(args, 4), hw.load_i64(args, 3))
    for token in range(begin, end):
        gate = gate_up + token * inner * 4
        up, target = gate + inner * 2, out + token * inner * 2
        for i in range(inner):
            value = hw.load_bf16(gate, i)
            hw.store_bf16(target, i, value / (_ONE + exp_f32(-value)) * hw.load_bf16(up, i))


def gelu_mul_kernel(args: int, chunk: int, thread: int) -> None:
    """args: as of ``silu_mul_kernel``.

    value * (1 + tanh(z)) / 2 = value / (1 + exp(-2 z)), z = sqrt(2 / pi) (value + 0.044715 value^3)
    """
    gate_up, out, inner = hw.load_i64(args, 0), hw.load_i64(args, 1), hw.load_i64(args, 2)
    begin = chunk * hw.load_i64(args, 4)
    end = min(begin + hw.load_i64(args, 4), hw.load_i64(args, 3))
    for token in range(begin, end):
        gate = gate_up + token * inner * 4
        up, target = gate + inner * 2, out + token * inner * 2
        for i in range(inner):
            value = hw.load_bf16(gate, i)
            twice = value * (_GELU_LINEAR + _GELU_CUBIC * value * value)
            hw.store_bf16(target, i, value / (_ONE + exp_f32(-twice)) * hw.load_bf16(up, i))


@njit(nogil=True, error_model="numpy")
def _rotate_head(head: int, cos: int, sin: int, half: int) -> None:
    for i in range(half):
        first, second = hw.load_bf16(head, i), hw.load_bf16(head, half + i)
        c, s = hw.load_f32(cos, i), hw.load_f32(sin, i)
        hw.store_bf16(head, i, first * c - second * s)
        hw.store_bf16(head, half + i, second * c + first * s)


def rotate_kernel(args: int, chunk: int, thread: int) -> None:
    """args: q, q_stride, num_heads, k, k_stride, num_kv_heads, head_dim, half, cos, sin,
    positions, num_tokens, tokens_per_chunk."""
    q, q_stride, num_heads = hw.load_i64(args, 0), hw.load_i64(args, 1), hw.load_i64(args, 2)
    k, k_stride, num_kv_heads = hw.load_i64(args, 3), hw.load_i64(args, 4), hw.load_i64(args, 5)
    head_dim, half = hw.load_i64(args, 6), hw.load_i64(args, 7)
    cos, sin, positions = hw.load_i64(args, 8), hw.load_i64(args, 9), hw.load_i64(args, 10)
    begin = chunk * hw.load_i64(args, 12)
    end = min(begin + hw.load_i64(args, 12), hw.load_i64(args, 11))
    for token in range(begin, end):
        angle = hw.load_i32(positions, token) * half * 4
        for head in range(num_heads):
            _rotate_head(
                q + (token * q_stride + head * head_dim) * 2, cos + angle, sin + angle, half
            )
        for head in range(num_kv_heads):
            _rotate_head(
                k + (token * k_stride + head * head_dim) * 2, cos + angle, sin + angle, half
            )


def store_kv_kernel(args: int, chunk: int, thread: int) -> None:
    """Copy k and v of a chunk of tokens to their slots: blocks [K, block_tokens, head_padded].

    args: k, k_stride, v, v_stride, k_blocks, v_blocks, slots, num_kv_heads, head_dim,
    head_padded, block_tokens, kv_is_f32, num_tokens, tokens_per_chunk.
    """
    k, k_stride = hw.load_i64(args, 0), hw.load_i64(args, 1)
    v, v_stride = hw.load_i64(args, 2), hw.load_i64(args, 3)
    k_blocks, v_blocks, slots = hw.load_i64(args, 4), hw.load_i64(args, 5), hw.load_i64(args, 6)
    num_kv_heads, head_dim = hw.load_i64(args, 7), hw.load_i64(args, 8)
    head_padded, block_tokens = hw.load_i64(args, 9), hw.load_i64(args, 10)
    kv_is_f32 = hw.load_i64(args, 11)
    begin = chunk * hw.load_i64(args, 13)
    end = min(begin + hw.load_i64(args, 13), hw.load_i64(args, 12))
    for token in range(begin, end):
        slot = hw.load_i64(slots, token)
        if slot < 0:
            continue
        block, offset = slot // block_tokens, slot % block_tokens
        for head in range(num_kv_heads):
            place = ((block * num_kv_heads + head) * block_tokens + offset) * head_padded
            k_head = k + (token * k_stride + head * head_dim) * 2
            v_head = v + (token * v_stride + head * head_dim) * 2
            if kv_is_f32 != 0:
                for i in range(head_dim):
                    hw.store_f32(k_blocks, place + i, hw.load_bf16(k_head, i))
                    hw.store_f32(v_blocks, place + i, hw.load_bf16(v_head, i))
            else:
                for i in range(head_dim):
                    hw.store_bf16(k_blocks, place + i, hw.load_bf16(k_head, i))
                    hw.store_bf16(v_blocks, place + i, hw.load_bf16(v_head, i))
