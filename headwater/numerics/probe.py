"""What this machine can do at most: memory read rate and GEMM rates, in under 3 s.

The limits that ``bench`` and ``doctor`` print beside our own numbers, so that a
number is always a share of something. Knows nothing of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headwater.numerics.cpu_memory import Arena

_READ_BYTES = 256 << 20
_GEMM_SIZE = 2_048
# Each rate is the best of the tries that fit this time: other processes only slow one down.
_TRY_S = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Best rates seen. Bytes are 1e9 to the GB; GEMM counts 2 n^3 operations, n = 2048."""

    num_threads: int
    read_gb_per_s: float
    gemm_fp32_gflop_per_s: float
    gemm_bf16_gflop_per_s: float
    gemm_int8_gop_per_s: float


def best_time_s(work: Callable[[], object], limit_s: float = _TRY_S) -> float:
    """The shortest of as many runs as fit ``limit_s``, at least two, after one to warm up."""
    work()
    best, begun, num_runs = float("inf"), time.perf_counter(), 0
    while num_runs < 2 or time.perf_counter() - begun < limit_s:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
        num_runs += 1
    return best


def read_gb_per_s(num_threads: int) -> float:
    """Streaming read of 256 MB, far more than a share of any cache that is ours.

    From large pages, like our weights: in small ones a virtual machine may read at half
    the rate, which would be a bound that is easy to beat.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    words = Arena().zeros((_READ_BYTES // 4,), torch.float32).fill_(1)
    best_s = best_time_s(words.sum)
    torch.set_num_threads(before)
    return _READ_BYTES / best_s / 1e9


def _gemm_gflop_per_s(a: torch.Tensor, b: torch.Tensor) -> float:
    multiply = torch._int_mm if a.dtype == torch.int8 else torch.mm
    return 2 * _GEMM_SIZE**3 / best_time_s(lambda: multiply(a, b)) / 1e9


def machine_limits(num_threads: int) -> MachineLimits:
    """Measure with ``num_threads`` threads; torch's own count is put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    a = torch.ones(_GEMM_SIZE, _GEMM_SIZE)
    rates = {
        dtype: _gemm_gflop_per_s(a.to(dtype), a.to(dtype).t().contiguous().t())
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    torch.set_num_threads(before)
    return MachineLimits(
        num_threads=num_threads,
        read_gb_per_s=read_gb_per_s(num_threads),
        gemm_fp32_gflop_per_s=rates[torch.float32],
        gemm_bf16_gflop_per_s=rates[torch.bfloat16],
        gemm_int8_gop_per_s=rates[torch.int8],
    )
