"""Memory for the CPU kernels: large pages for what is read every step, reused scratch.

A step streams through all weights. In 4 KiB pages that is one address translation
per 4 KiB, each a walk through two sets of page tables in a virtual machine: one
core then reads a third less than from 2 MiB pages. Used by ``cpu_*``.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

_LARGE_PAGE_BYTES = 2 << 20
_REGION_BYTES = 32 << 20
_LINE_BYTES = 64
_LARGE_RESULT_BYTES = 1 << 20
_SPARE = 5 / 4  # so that a slowly growing need does not allocate at every step


def _map(num_bytes: int) -> memoryview:
    """At least ``num_bytes`` zeroed bytes from the system, in large pages where it grants
    them, starting at a large page's border."""
    size = -(-num_bytes // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    # Private: shared memory, Python's default, gets small pages.
    memory = mmap.mmap(-1, size + _LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _LARGE_PAGE_BYTES
    return memoryview(memory)[skip : skip + size]


def _region(num_bytes: int) -> Tensor:
    """``_map`` as a uint8 tensor."""
    return torch.frombuffer(_map(num_bytes), dtype=torch.uint8)


class Arena:
    """Hands out zeroed tensors side by side, so that small ones share large pages.

    A region goes back to the system when the last tensor in it is gone.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor at a 64-byte border."""
        num_bytes = math.prod(shape) * dtype.itemsize
        taken = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if taken > self._free.numel():
            region = _region(max(taken, _REGION_BYTES))
            if taken >= _REGION_BYTES:
                return region[:num_bytes].view(dtype).view(shape)
            self._free = region
        part, self._free = self._free[:num_bytes], self._free[taken:]
        return part.view(dtype).view(shape)


class Scratch:
    """Buffers by purpose, kept between calls: what is in one lasts until the next call
    with that purpose."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def bytes(self, purpose: str, num_bytes: int) -> Tensor:
        """At least ``num_bytes`` uint8, aligned to 64 bytes, undefined."""
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < num_bytes:
            if buffer is not None:
                # Recorded calls may hold its address. Sizes grow by a quarter each time, so
                # all that were outgrown together are at most four times the one in use.
                self._outgrown.append(buffer)
            buffer = _region(int(num_bytes * _SPARE))
            self._buffers[purpose] = buffer
        return buffer

    def address(self, purpose: str, num_bytes: int) -> int:
        """The address of ``bytes(purpose, num_bytes)``."""
        return self.bytes(purpose, num_bytes).data_ptr()


class Activations:
    """``torch.empty``, with large results in large pages that are used again.

    A prefill step makes and drops the same few megabytes for every layer; from the
    C library they would come in small pages, mapped and zeroed anew each time.
    """

    def __init__(self) -> None:
        self._unused: dict[int, list[memoryview]] = {}  # by size, a power of two
        self._pools_all = False
        self._arena = Arena()

    @contextlib.contextmanager
    def from_pool(self) -> Iterator[None]:
        """Until the end of the block, small results come from the pool as well: their memory
        stays ours when they are gone, so that a recorded call may write there again."""
        self._pools_all = True
        try:
            yield
        finally:
            self._pools_all = False

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LARGE_RESULT_BYTES and not self._pools_all:
            return torch.empty(shape, dtype=dtype)
        size = max(_LINE_BYTES, 1 << (num_bytes - 1).bit_length())
        unused = self._unused.setdefault(size, [])
        memory = unused.pop() if unused else self._new(size)
        # torch holds on to this view until the last tensor that shares the memory is gone.
        view = memory[:]
        weakref.finalize(view, unused.append, memory).atexit = False
        whole = torch.frombuffer(view, dtype=dtype, count=math.prod(shape))
        return whole.view(shape)

    def _new(self, size: int) -> memoryview:
        if size >= _LARGE_PAGE_BYTES:
            return _map(size)
        return self._arena.zeros((size,), torch.uint8).numpy().data
