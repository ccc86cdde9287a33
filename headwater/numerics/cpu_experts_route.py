"""Which experts each token goes to, a chunk of tokens at a time, in float32.

A token's scores are computed in an order of their own, so its choice does not depend on its
neighbours. Whatever the numbers are, also what is not a number, a token gets k different
experts. Knows addresses and sizes only; called by ``cpu_experts.py``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics.cpu_elementwise import exp_f32

_ZERO, _ONE, _TWO = (hw.f32(value) for value in (0, 1, 2))
_A3, _A5, _A7, _A9, _A11, _A13 = (hw.f32(1 / n) for n in (3, 5, 7, 9, 11, 13))
_LOWEST = hw.f32(-3.0e38)
_TAKEN = hw.f32(-np.inf)


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _dot_bf16(x: int, row: int, length: int) -> float:
    total = _ZERO
    for i in range(length):
        total += hw.load_bf16(x, i) * hw.load_bf16(row, i)
    return total


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _dot_f32(x: int, row: int, length: int) -> float:
    total = _ZERO
    for i in range(length):
        total += hw.load_bf16(x, i) * hw.load_f32(row, i)
    return total


@njit(nogil=True, error_model="numpy")
def _score(value: float) -> float:
    """sqrt(softplus(value)) in vectorisable arithmetic: with e = exp(-|value|), softplus is
    max(value, 0) + log(1 + e), and log(1 + e) = 2 artanh(s), s = e / (2 + e) <= 1/3, by its
    Taylor series to s^13: relative error below 2e-8."""
    e = exp_f32(-abs(value))
    s = e / (_TWO + e)
    q = s * s
    series = _ONE + q * (_A3 + q * (_A5 + q * (_A7 + q * (_A9 + q * (_A11 + q * _A13)))))
    return np.sqrt(max(value, _ZERO) + _TWO * s * series)


@njit(nogil=True, error_model="numpy")
def _choose(keys: int, num_experts: int, num_chosen: int) -> None:
    """Mark the largest keys as taken, of equal ones the first."""
    for _ in range(num_chosen):
        best, best_key = 0, _TAKEN
        for e in range(num_experts):
            if hw.load_f32(keys, e) > best_key:
                best, best_key = e, hw.load_f32(keys, e)
        hw.store_f32(keys, best, _TAKEN)


def route_kernel(args: int, chunk: int, thread: int) -> None:
    """args: x (bfloat16), x_stride (elements), gate [E, hidden], gate_is_f32, bias (float32
    [E]), ids (int32 [T, k]), shares (float32 [T, k]), hidden, num_experts, num_chosen, num_tokens,
    tokens_per_chunk, scratch (float32 [threads, 2 E]); real: scaling."""
    gate, gate_is_f32 = hw.load_i64(args, 2), hw.load_i64(args, 3)
    bias, ids, shares = hw.load_i64(args, 4), hw.load_i64(args, 5), hw.load_i64(args, 6)
    hidden, num_experts = hw.load_i64(args, 7), hw.load_i64(args, 8)
    num_chosen = hw.load_i64(args, 9)
    scores = hw.load_i64(args, 12) + thread * 2 * num_experts * 4
    keys = scores + num_experts * 4
    scaling = np.float32(hw.load_f64(args, 14))
    begin = chunk * hw.load_i64(args, 11)
    for token in range(begin, min(begin + hw.load_i64(args, 11), hw.load_i64(args, 10))):
        x = hw.load_i64(args, 0) + token * hw.load_i64(args, 1) * 2
        for e in range(num_experts):
            if gate_is_f32 != 0:
                value = _dot_f32(x, gate + e * hidden * 4, hidden)
            else:
                value = _dot_bf16(x, gate + e * hidden * 2, hidden)
            hw.store_f32(scores, e, value)
        for e in range(num_experts):
            score = _score(hw.load_f32(scores, e))
            key = score + hw.load_f32(bias, e)
            hw.store_f32(scores, e, score)
            hw.store_f32(keys, e, key if key >= _LOWEST else _LOWEST)
        _choose(keys, num_experts, num_chosen)
        place, total = token * num_chosen, _ZERO
        for e in range(num_experts):
            if hw.load_f32(keys, e) == _TAKEN:
                hw.store_i32(ids, place, np.int32(e))
                hw.store_f32(shares, place, hw.load_f32(scores, e))
                total += hw.load_f32(scores, e)
                place += 1
        for place in range(token * num_chosen, (token + 1) * num_chosen):
            hw.store_f32(shares, place, hw.load_f32(shares, place) / total * scaling)
