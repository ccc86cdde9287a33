"""Toy memory with right and wrong bytes, and what handoff tests are made of."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence

from headwater.core.blocks import BlockId, CacheIdentity
from headwater.core.cache import KVPart
from headwater.core.fleet import HandoffRef
from headwater.core.ports import RecordMove
from headwater.transfer.handoff_plan import HandoffPlan, plan_handoff
from headwater.transfer.handoff_states import HandoffLimits
from headwater.transfer.peer import FleetKeys, PeerContract

IDENTITY = CacheIdentity("model", "layout", "tenant")
KEYS = FleetKeys.of(b"the secret of this very fleet")
BLOCK_TOKENS = 4
# Of one layer's buffers; the frame's border must fall inside some of them.
GLOBAL_PIECES = (48, 20, 48, 20)
WINDOW_PIECES = (16, 16)
QUICK = HandoffLimits(lease_s=0.4, offer_s=0.8, stall_s=3.0)


class ToyMemory:
    """``core.ports.BlockMemory``. ``is_staged``: buffers are copies, as on an accelerator."""

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        pieces: Sequence[int] = GLOBAL_PIECES,
        window_pieces: Sequence[int] = (),
        is_staged: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.is_staged = is_staged
        self.fails: Callable[[BlockId], bool] = lambda block: False
        self._sizes = {KVPart.GLOBAL: tuple(pieces), KVPart.WINDOW: tuple(window_pieces)}
        self._bytes = {
            part: [memoryview(bytearray(num_blocks * size)) for size in sizes]
            for part, sizes in self._sizes.items()
        }
        self._staging: dict[tuple[BlockId, KVPart], list[memoryview]] = {}

    def part_bytes(self, part: KVPart) -> int:
        return sum(self._sizes[part])

    def write_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        if self.fails(block):
            raise RuntimeError("the device is on fire")
        if not self.is_staged:
            return self._views(block, part)
        staging = [memoryview(bytearray(b"?" * size)) for size in self._sizes[part]]
        self._staging[block, part] = staging
        return staging

    def written(self, block: BlockId, part: KVPart) -> None:
        if self.is_staged:
            staging = self._staging.pop((block, part))
            for view, buffer in zip(self._views(block, part), staging, strict=True):
                view[:] = buffer

    def read_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        if self.fails(block):
            raise RuntimeError("the device is on fire")
        views = self._views(block, part)
        return [memoryview(bytearray(v)) for v in views] if self.is_staged else views

    def copy(self, source: BlockId, target: BlockId) -> None:
        raise AssertionError("a handoff copies nothing on the device")

    def get(self, block: BlockId, part: KVPart) -> bytes:
        return b"".join(self._views(block, part))

    def put(self, block: BlockId, part: KVPart, content: bytes) -> None:
        place = 0
        for view in self._views(block, part):
            view[:] = content[place : place + len(view)]
            place += len(view)

    def scribble(self, block: BlockId, rng: random.Random) -> None:
        for part in KVPart:
            self.put(block, part, rng.randbytes(self.part_bytes(part)))

    def _views(self, block: BlockId, part: KVPart) -> list[memoryview]:
        return [
            whole[block * size : (block + 1) * size]
            for whole, size in zip(self._bytes[part], self._sizes[part], strict=True)
        ]


def contract_of(memory: ToyMemory, window_tokens: int | None = None) -> PeerContract:
    return PeerContract(
        model_fingerprint="model",
        layout="layout",
        block_tokens=BLOCK_TOKENS,
        window_tokens=window_tokens,
        global_bytes=memory.part_bytes(KVPart.GLOBAL),
        window_bytes=memory.part_bytes(KVPart.WINDOW),
    )


def plan_of(num_tokens: int, seed: int = 0, window_tokens: int | None = None) -> HandoffPlan:
    """Of a prompt of its own that needs KV of ``num_tokens``."""
    tokens = random.Random(seed).choices(range(1000), k=num_tokens + 1)
    return plan_handoff(tokens, IDENTITY, block_tokens=BLOCK_TOKENS, window_tokens=window_tokens)


def right_bytes(key: bytes, num_bytes: int) -> bytes:
    """What a record of this key holds, on whatever side."""
    return hashlib.shake_128(key).digest(num_bytes)


def compute(memory: ToyMemory, plan: HandoffPlan, blocks: Sequence[BlockId]) -> None:
    """The KV of all rows, as an engine would."""
    for row, block in zip(plan.rows, blocks, strict=True):
        for part in KVPart:
            meta = row.part(part)
            if meta is not None:
                memory.put(block, part, right_bytes(meta.key, memory.part_bytes(part)))


def moves_of(plan: HandoffPlan, blocks: Sequence[BlockId], first_row: int = 0) -> list[RecordMove]:
    """All parts from ``first_row`` on, in kv's order."""
    return [
        RecordMove(meta, block)
        for row, block in zip(plan.rows[first_row:], blocks, strict=True)
        for part in KVPart
        if (meta := row.part(part)) is not None
    ]


def assert_right(memory: ToyMemory, moves: Sequence[RecordMove]) -> None:
    for move in moves:
        part = move.meta.part
        assert memory.get(move.block, part) == right_bytes(move.meta.key, memory.part_bytes(part))


def blocks(first: int, num: int) -> list[BlockId]:
    return [BlockId(first + i) for i in range(num)]


def ref_to(address: str, handoff_id: str = "h", peer_id: str = "peer") -> HandoffRef:
    return HandoffRef(handoff_id=handoff_id, peer_id=peer_id, address=address)


class RealClock:
    def now_s(self) -> float:
        return time.monotonic()


def wait_until(fact: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.002)
