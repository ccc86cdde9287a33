"""Fresh KV memory is found before it is needed.

A system gives a page of memory when it is first written, and a virtual machine may have to
ask its host for each: milliseconds for 2 MiB. Low block ids are handed out first, so what
is needed next is known: the pages behind the highest block in use. A thread asks for them
while steps run. Knows a layer's bytes by ``Ops.kv_buffers``; called by ``runner``.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

from headwater.engine.kv_cache import KVCache
from headwater.numerics.ops import Ops

_POPULATE_WRITE = 23  # madvise(2), Linux 5.14: as if written, but nothing changes
_PAGE_BYTES = 4096
_PAUSE_S = 0.003  # between pieces: the cores are the steps'


class PagesAhead:
    """Keeps at least ``num_blocks`` blocks behind the highest used one in memory."""

    def __init__(self, ops: Ops, kv: KVCache, num_blocks: int) -> None:
        self._ops = ops
        self._kv = kv
        self._num_blocks = num_blocks
        self._ready = 0
        self._thread: threading.Thread | None = None
        # Elsewhere pages come when they are first written, as they always did.
        is_linux = sys.platform == "linux" and ops.kv_buffers(kv.layers[0], 0) is not None
        self._libc = ctypes.CDLL(None, use_errno=True) if is_linux else None

    @property
    def num_ready_blocks(self) -> int:
        """Blocks [0, n) were asked for."""
        return self._ready

    def reach(self, block: int) -> None:
        """``block`` is in use; -1: none is yet. Returns at once."""
        wanted = min(block + 1 + self._num_blocks, self._kv.plan.num_blocks)
        if self._libc is None or wanted <= self._ready:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        # A whole stretch at a time: every block lies in as many pages as there are tensors.
        begin, self._ready = self._ready, min(wanted + self._num_blocks, self._kv.plan.num_blocks)
        self._thread = threading.Thread(
            target=self._bring, args=(begin, self._ready), name="headwater-pages", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until what was asked for is there."""
        if self._thread is not None:
            self._thread.join()

    def _bring(self, begin: int, end: int) -> None:
        assert self._libc is not None
        for layer in self._kv.layers:
            first, last = self._ops.kv_buffers(layer, begin), self._ops.kv_buffers(layer, end - 1)
            for head, tail in zip(first or (), last or (), strict=True):
                start = _address(head) // _PAGE_BYTES * _PAGE_BYTES
                length = _address(tail) + len(tail) - start
                # Refused by an older system: then pages come when they are first written.
                if self._libc.madvise(
                    ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE
                ):
                    return
                time.sleep(_PAUSE_S)


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
