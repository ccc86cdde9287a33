"""Records on their way from a peer into our blocks, and the one copy of each.

    Direct   the prefill process's own memory --process_vm_readv--> the block
    Framed   bytes that came in a message     ------------------->  the block

Knows buffers and addresses; what is copied when is ``handoff_sink``'s.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.blocks import BlockId
from headwater.core.cache import KVPart, MissReason
from headwater.core.ports import BlockMemory, RecordMove
from headwater.transfer.handoff_memory import ProcessReader
from headwater.transfer.handoff_wire import HandoffWireError, unpack_addresses

PartPlace = tuple[int, KVPart]  # row, part


class HandoffLoad:
    """``core.ports.Load``. Read by the step's thread at any time; changed under ``lock``."""

    def __init__(
        self, moves: Sequence[RecordMove], block_tokens: int, lock: threading.Lock
    ) -> None:
        self.moves = tuple(moves)
        self.places: tuple[PartPlace, ...] = tuple(
            (move.meta.start // block_tokens, move.meta.part) for move in moves
        )
        self.is_writing = False
        self._numbers = {place: number for number, place in enumerate(self.places)}
        self._lock = lock
        self._num_loaded = 0
        self._end: MissReason | None = None

    @property
    def num_loaded(self) -> int:
        return self._num_loaded

    @property
    def is_done(self) -> bool:
        # In this order: nothing begins to be written once it is over.
        return self.is_over and not self.is_writing

    @property
    def failure(self) -> MissReason | None:
        return self._end if self._num_loaded < len(self.moves) else None

    def cancel(self) -> None:
        """What the handoff is for may still be taken later, by another load."""
        with self._lock:
            self.end(MissReason.SLOW)

    # For the sink, with the lock held

    @property
    def is_over(self) -> bool:
        return self._end is not None or self._num_loaded == len(self.moves)

    def number(self, row: int, part: KVPart) -> int | None:
        """Of the move that fills this part; None: it was not asked for."""
        return self._numbers.get((row, part))

    def end(self, reason: MissReason) -> None:
        if self._end is None:
            self._end = reason

    def complete_one(self) -> None:
        self._num_loaded += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """One part as it lies in process ``pid``, for as long as its ticket does."""

    row: int
    part: KVPart
    key: bytes
    pid: int
    addresses: bytes  # packed
    ticket_address: int
    ticket: bytes

    def copy(self, memory: BlockMemory, reader: ProcessReader, block: BlockId) -> bool:
        """False: the prefill side gave the block up while it was read."""
        buffers = memory.write_buffers(block, self.part)
        addresses = unpack_addresses(self.addresses)
        if len(addresses) != len(buffers):
            raise HandoffWireError(f"{len(addresses)} addresses for {len(buffers)} buffers")
        seen = bytearray(len(self.ticket))
        # The ticket last: if it is there then, all before it was read while it was held.
        pieces = [*zip(addresses, buffers, strict=True), (self.ticket_address, memoryview(seen))]
        reader.read(self.pid, pieces)
        if seen != self.ticket:
            return False
        memory.written(block, self.part)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Framed:
    """Bytes [offset, offset + len(payload)) of one part."""

    row: int
    part: KVPart
    key: bytes
    payload: bytes
    offset: int
    is_last: bool

    def copy(self, buffers: Sequence[memoryview]) -> None:
        """Into the part's buffers, one after the other."""
        place, rest = self.offset, memoryview(self.payload)
        for buffer in buffers:
            some = rest[: max(len(buffer) - place, 0)]
            if some:
                buffer[place : place + len(some)] = some
                rest = rest[len(some) :]
            place = max(place - len(buffer), 0)


Piece = Direct | Framed


class FrameBuffers:
    """The buffers of the part that frames are being written to: a staging device gives new
    ones at each call, so they are kept from the first frame to the last."""

    def __init__(self) -> None:
        self.buffers: Sequence[memoryview] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """One piece for one part of one block. ``run`` needs no lock."""

    handoff_id: str
    load: HandoffLoad
    move: RecordMove
    piece: Piece
    open_part: FrameBuffers

    def run(self, memory: BlockMemory, reader: ProcessReader) -> bool:
        """False: it turned out to be given up by the prefill side meanwhile.

        Raises OSError when it cannot be read, HandoffWireError when it does not fit."""
        block, piece = self.move.block, self.piece
        if isinstance(piece, Direct):
            return piece.copy(memory, reader, block)
        if piece.offset == 0:
            self.open_part.buffers = memory.write_buffers(block, piece.part)
        piece.copy(self.open_part.buffers)
        if piece.is_last:
            self.open_part.buffers = ()
            memory.written(block, piece.part)
        return True
