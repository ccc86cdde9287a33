"""A team of threads that share one kernel call at a time, without a parallel library.

A decode step makes some 150 kernel calls of 5 to 50 us each. A parallel region of
OpenMP costs 2 us while its threads spin and 50-80 us once they sleep (140 us with
numba's workqueue), and how long they spin is an environment variable. Here the
threads linger for ``LINGER_US``, then sleep; and a call never waits for a thread
that has not come: chunks are claimed one by one, by the caller too, so a sleeping
or descheduled thread only means less help. Knows nothing of what kernels compute.

    ticket = epoch << 24 | num_chunks << 12 | next_chunk

A claim is one compare-and-swap of ``next_chunk`` to ``next_chunk + 1``. If it
succeeds the epoch was current, and stays so until that chunk is reported done, so
the call's function and arguments are stable while a thread works on it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
from numba import cfunc, njit, types

from headwater.numerics import cpu_intrinsics as hw

MAX_CHUNKS = 1 << 11
NUM_ARGS = 26
LINGER_US = 100.0

# The shared block: 64-byte lines of int64 words, so that no two hot words share a line.
_TICKET, _DONE, _SLEEPERS, _SETTINGS, _CALL = (64 * line for line in range(5))
_STATE_BYTES = _CALL + 8 * (1 + NUM_ARGS) + 64
_PARKED, _STOPPED, _LINGER_SPINS, _SLEEP_FD, _WAKE_FD, _NUM_THREADS = range(6)
_FUNCTION = 0
ARGS = _CALL + 8  # where in the block a call's arguments are

_COUNT_MASK = (1 << 12) - 1
# How long a caller spins for claimed chunks before it lets others run on its core.
_SPINS_BEFORE_YIELD = 2_000

_read = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.intp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.intp, types.intp))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _sources_digest() -> str:
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(Path(__file__).parent.glob("cpu_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_DIGEST = _sources_digest()
_Function = TypeVar("_Function", bound=Callable[..., object])


def versioned(function: _Function) -> _Function:
    """Put the digest of all kernel sources into the name under which numba caches ``function``.

    Numba looks at the function's own file only, and would go on using a kernel whose
    helper in another file has changed.
    """
    assert isinstance(function, FunctionType)
    function.__qualname__ = f"{function.__name__}-{_DIGEST}"
    return function


def compiled(function: _Function) -> _Function:
    """An entry that Python calls: compiled at its first call, or loaded from the cache."""
    return njit(nogil=True, cache=True, error_model="numpy")(versioned(function))


class Kernel:
    """``function(args, chunk, thread)`` for calls through its address: compiled, or loaded
    from the cache, when that is first asked for."""

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        self._function = versioned(function)

    @cached_property
    def address(self) -> int:
        return int(self._code.address)

    @cached_property
    def _code(self) -> Any:
        """What was compiled, which must outlive its address."""
        signature = types.void(types.int64, types.int64, types.int64)
        return cfunc(signature, cache=True, error_model="numpy")(self._function)


@njit(nogil=True, error_model="numpy")
def _work_on(state: int, thread: int) -> int:
    """Claim and run chunks until none is left; returns how many this thread ran."""
    num_run = 0
    while True:
        ticket = hw.atomic_load(state + _TICKET)
        chunk, num_chunks = ticket & _COUNT_MASK, (ticket >> 12) & _COUNT_MASK
        if chunk >= num_chunks:
            return num_run
        if hw.compare_and_swap(state + _TICKET, ticket, ticket + 1):
            hw.call_kernel(hw.load_i64(state + _CALL, _FUNCTION), state + ARGS, chunk, thread)
            hw.atomic_add(state + _DONE, 1)
            num_run += 1


@njit(nogil=True, error_model="numpy")
def run(state: int, function: int, num_chunks: int) -> None:
    """Run chunks [0, num_chunks) of ``function`` over the team; its arguments are in place."""
    if num_chunks <= 1 or hw.load_i64(state + _SETTINGS, _NUM_THREADS) == 1:
        for chunk in range(num_chunks):
            hw.call_kernel(function, state + ARGS, chunk, 0)
        return
    hw.store_i64(state + _CALL, _FUNCTION, function)
    hw.atomic_store(state + _DONE, 0)
    epoch = hw.atomic_load(state + _TICKET) >> 24
    hw.atomic_store(state + _TICKET, (epoch + 1) << 24 | num_chunks << 12)
    # A sleeper counted itself before it read, so it takes exactly one byte, now or soon.
    num_sleepers = hw.atomic_swap(state + _SLEEPERS, 0)
    if num_sleepers > 0:
        wake_fd = np.int32(hw.load_i64(state + _SETTINGS, _WAKE_FD))
        _write(wake_fd, state, num_sleepers)  # the bytes' values mean nothing
    _work_on(state, 0)
    num_spins = 0
    while hw.atomic_load(state + _DONE) != num_chunks:
        hw.pause()
        num_spins += 1
        if num_spins >= _SPINS_BEFORE_YIELD:
            _sched_yield()


@compiled
def _serve(state: int, thread: int) -> None:
    """A helper's life: claim chunks, linger, sleep; until stopped."""
    sleep_fd = np.int32(hw.load_i64(state + _SETTINGS, _SLEEP_FD))
    num_spins = 0
    while hw.atomic_load(state + _SETTINGS + 8 * _STOPPED) == 0:
        if _work_on(state, thread) > 0:
            num_spins = 0
        hw.pause()
        num_spins += 1
        limit = hw.load_i64(state + _SETTINGS, _LINGER_SPINS)
        if num_spins > limit or hw.atomic_load(state + _SETTINGS + 8 * _PARKED) != 0:
            hw.atomic_add(state + _SLEEPERS, 1)
            _read(sleep_fd, state + _STATE_BYTES - 64 + 8 * (thread & 7), 1)
            num_spins = 0


@compiled
def _spin(count: int) -> None:
    for _ in range(count):
        hw.pause()


@compiled
def launch(
    state: int, function: int, num_chunks: int, real: float,
    a0: int, a1: int, a2: int, a3: int, a4: int, a5: int, a6: int, a7: int,
    a8: int, a9: int, a10: int, a11: int, a12: int, a13: int,
) -> None:  # fmt: skip
    """Put the arguments in place (``real`` is argument 14) and run."""
    args = state + ARGS
    hw.store_i64(args, 0, a0)
    hw.store_i64(args, 1, a1)
    hw.store_i64(args, 2, a2)
    hw.store_i64(args, 3, a3)
    hw.store_i64(args, 4, a4)
    hw.store_i64(args, 5, a5)
    hw.store_i64(args, 6, a6)
    hw.store_i64(args, 7, a7)
    hw.store_i64(args, 8, a8)
    hw.store_i64(args, 9, a9)
    hw.store_i64(args, 10, a10)
    hw.store_i64(args, 11, a11)
    hw.store_i64(args, 12, a12)
    hw.store_i64(args, 13, a13)
    hw.store_f64(args, 14, real)
    run(state, function, num_chunks)


# Kinds of recorded calls.
LAUNCH, LINEAR_FEW, LINEAR_TILES, ATTEND_FEW, ATTEND_ROWS = range(5)


class Tape:
    """The kernel calls of a body while it is being recorded (``cpu_program``)."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int | float, ...]]] = []
        self.is_spoilt = False  # something was computed that no recorded call repeats


class Team:
    """``num_threads`` threads, the caller's included. Calls come from one thread at a time."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._tape: Tape | None = None
        self._block = np.zeros(_STATE_BYTES + 64, np.uint8)
        skip = -self._block.ctypes.data % 64
        self._words = self._block[skip : skip + _STATE_BYTES].view(np.int64)
        self.state = int(self._words.ctypes.data)
        self._sleep_fd, self._wake_fd = os.pipe()
        self._set(_SLEEP_FD, self._sleep_fd)
        self._set(_WAKE_FD, self._wake_fd)
        self._set(_NUM_THREADS, num_threads)
        self._set(_LINGER_SPINS, _spins_per_us() * LINGER_US)
        self._helpers = [
            threading.Thread(
                target=_serve, args=(self.state, i), name=f"headwater-team-{i}", daemon=True
            )
            for i in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def _set(self, setting: int, value: float) -> None:
        self._words[_SETTINGS // 8 + setting] = int(value)

    def launch(self, kernel: Kernel, num_chunks: int, real: float, *args: int) -> None:
        """Run ``kernel`` over chunks [0, num_chunks), at most MAX_CHUNKS, and wait for all."""
        self.record(LAUNCH, kernel.address, num_chunks, real, *args)
        launch(self.state, kernel.address, num_chunks, real, *args, *_ZEROS[len(args) :])

    @contextlib.contextmanager
    def recording(self) -> Iterator[Tape]:
        """Until the end of the block, calls are written down as well as made."""
        self._tape = Tape()
        try:
            yield self._tape
        finally:
            self._tape = None

    def record(self, kind: int, *arguments: int | float) -> None:
        """Note a call that the caller makes itself."""
        if self._tape is not None:
            self._tape.calls.append((kind, arguments))

    def spoil(self) -> None:
        """Note that something is about to be computed outside the recorded calls."""
        if self._tape is not None:
            self._tape.is_spoilt = True

    def park(self, parked: bool) -> None:
        """While parked, helpers without work sleep at once: another library wants the cores."""
        self._words[_SETTINGS // 8 + _PARKED] = parked

    def close(self) -> None:
        """End the helpers. The team cannot be used afterwards."""
        if self._helpers:
            self._set(_STOPPED, 1)
            os.write(self._wake_fd, b"." * len(self._helpers))
            for helper in self._helpers:
                helper.join()
            self._helpers = []
            os.close(self._wake_fd)
            os.close(self._sleep_fd)


_ZEROS = (0,) * 14


def _spins_per_us() -> float:
    count = 2_000
    _spin(count)
    start = time.perf_counter()
    _spin(count)
    return count / (1e6 * (time.perf_counter() - start))
