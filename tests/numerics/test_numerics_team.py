"""The team runs every chunk exactly once, whoever helps."""

from __future__ import annotations

import time

import numpy as np
import pytest

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics.cpu_team import MAX_CHUNKS, Kernel, Team


def count_kernel(args: int, chunk: int, thread: int) -> None:
    """counts[chunk] += 1, without an atomic: a chunk run twice at once would lose one."""
    counts = hw.load_i64(args, 0)
    hw.store_i64(counts, chunk, hw.load_i64(counts, chunk) + 1)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return Kernel(count_kernel)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_chunk_runs_exactly_once_per_call(kernel: Kernel, num_threads: int) -> None:
    team = Team(num_threads)
    counts = np.zeros(MAX_CHUNKS, np.int64)
    for num_chunks in (0, 1, 2, 3, 17, MAX_CHUNKS):
        counts[:] = 0
        for _ in range(50):
            team.launch(kernel, num_chunks, 0.0, counts.ctypes.data)
        assert counts.sum() == 50 * num_chunks
        assert (counts[:num_chunks] == 50).all()
    team.close()


def test_calls_complete_while_the_helpers_sleep_and_after_they_wake(kernel: Kernel) -> None:
    team = Team(2)
    counts = np.zeros(64, np.int64)
    for parked in (True, False):
        team.park(parked)
        for _ in range(20):
            team.launch(kernel, 64, 0.0, counts.ctypes.data)
            time.sleep(0.001)  # longer than a helper lingers
    assert (counts == 40).all()
    team.close()


def test_close_ends_the_helpers_and_may_be_repeated() -> None:
    team = Team(3)
    team.close()
    team.close()
