"""The blocks of one device as a table of states, and the free list.

    Free --take--> Held(1) --share--> Held(n) --release--> Held(n-1)
     ^                ^                                        |
     |                +--------share------- Cached <-----------+  last release, keep=True
     +------------------------evict----------+ |
     +-----------------------------------------+ last release, keep=False

Knows no sequences, tokens or keys: ``manager`` decides, this file counts. A
change that a block's state does not have is an error that names both.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.blocks import BlockId
from headwater.core.errors import ConfigError, InvalidChange


@dataclass(frozen=True, slots=True)
class Free:
    """Content is worthless; the block is on the free list."""


@dataclass(frozen=True, slots=True)
class Held:
    """Used ``refcount`` times, by block tables, loads and pins; never evicted."""

    refcount: int


@dataclass(frozen=True, slots=True)
class Cached:
    """Used by nobody, but holds a reusable prefix: free for who needs the space."""


BlockState = Free | Held | Cached

_FREE = Free()
_CACHED = Cached()
_HELD_ONCE = Held(1)


class BlockPool:
    """``num_blocks`` blocks, all free at first. Every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"kv.num_blocks must be >= 1, got {num_blocks}")
        self._states: list[BlockState] = [_FREE] * num_blocks
        # A stack, low ids on top: recently freed blocks are reused while warm in the CPU cache.
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._num_cached = 0

    @property
    def num_blocks(self) -> int:
        return len(self._states)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_held(self) -> int:
        return len(self._states) - len(self._free) - self._num_cached

    @property
    def free_blocks(self) -> tuple[BlockId, ...]:
        """The free list, a copy; for the audit."""
        return tuple(self._free)

    def state(self, block: BlockId) -> BlockState:
        return self._states[block]

    def is_cached(self, block: BlockId) -> bool:
        return self._states[block] is _CACHED

    def take(self) -> BlockId:
        """Free -> Held(1). Raises InvalidChange when no block is free."""
        if not self._free:
            raise InvalidChange("take: no block is free; evict first")
        block = self._free.pop()
        self._states[block] = _HELD_ONCE
        return block

    def share(self, block: BlockId) -> None:
        """Held(n) -> Held(n + 1), or Cached -> Held(1)."""
        match self._states[block]:
            case Held(refcount=count):
                self._states[block] = Held(count + 1)
            case Cached():
                self._states[block] = _HELD_ONCE
                self._num_cached -= 1
            case state:
                raise InvalidChange(f"block {block}: {state} cannot be shared")

    def release(self, block: BlockId, *, keep: bool) -> BlockState:
        """Held(n) -> Held(n - 1); Held(1) -> Cached if ``keep`` else Free. Gives the new state."""
        match self._states[block]:
            case Held(refcount=1) if keep:
                self._states[block] = _CACHED
                self._num_cached += 1
            case Held(refcount=1):
                self._states[block] = _FREE
                self._free.append(block)
            case Held(refcount=count):
                self._states[block] = Held(count - 1)
            case state:
                raise InvalidChange(f"block {block}: {state} cannot be released")
        return self._states[block]

    def evict(self, block: BlockId) -> None:
        """Cached -> Free."""
        if not self.is_cached(block):
            raise InvalidChange(f"block {block}: {self._states[block]} cannot be evicted")
        self._states[block] = _FREE
        self._num_cached -= 1
        self._free.append(block)
