"""The memory of another process on this machine, read straight into ours.

``process_vm_readv`` copies once, page to page, and leaves nothing behind: no file, no
mapping, nothing to remove after a kill. The kernel lets a user's processes do that to each
other; where Yama is set to its scope 1 the read one must have named its reader. Where the
kernel refuses, or has no such call, OSError says so and KV goes in frames instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAX_PIECES = 1000  # of one call; the kernel takes 1024
PR_SET_PTRACER = 0x59616D61
YAMA_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
ONLY_DECLARED = "1"


class _Piece(ctypes.Structure):
    """The system's ``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class ProcessReader:
    """Any thread may use it; the call runs without the interpreter's lock."""

    def __init__(self) -> None:
        self._call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
        if self._call is not None:
            self._call.restype = ctypes.c_ssize_t
            self._call.argtypes = (
                ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong,
                ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
            )  # fmt: skip

    def read(self, pid: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each writable buffer from its address in process ``pid``, in order.

        Raises OSError: ESRCH when the process is gone, EPERM or ENOSYS when this machine
        does not allow it, EFAULT when an address is not there. Buffers are then undefined.
        """
        if self._call is None:
            raise OSError(errno.ENOSYS, "this system cannot read another process")
        for start in range(0, len(pieces), MAX_PIECES):
            some = pieces[start : start + MAX_PIECES]
            here = (_Piece * len(some))(*(_Piece(address_of(v), v.nbytes) for _, v in some))
            there = (_Piece * len(some))(*(_Piece(address, v.nbytes) for address, v in some))
            num_bytes = sum(view.nbytes for _, view in some)
            num_read = self._call(pid, here, len(some), there, len(some), 0)
            if num_read < 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            if num_read != num_bytes:
                raise OSError(errno.EFAULT, f"{num_read} of {num_bytes} bytes could be read")


def address_of(view: memoryview) -> int:
    """Where a contiguous buffer begins in this process."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def allow_siblings() -> None:
    """Let what our parent started read this process, where that has to be said (Yama)."""
    try:
        scope = YAMA_SCOPE.read_text(encoding="ascii").strip()
    except OSError:
        return  # no Yama: the kernel compares users, and that is all
    if scope == ONLY_DECLARED:
        # The parent and all that descend from it. A refusal means frames, nothing worse.
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
