"""Which worker's device holds how much of a prompt, from what the workers say of themselves.

A hint, never a promise: a wrong one costs time and no token. Knows prefix keys and worker
ids; no tokens and no blocks. Memory is bounded: over the limit new keys are not taken up,
so what is known stays whole from its first block on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from headwater.core.blocks import CacheIdentity, PrefixKey, block_keys
from headwater.core.fleet import KVEvents

MAX_KEYS = 4_000_000


class PrefixMap:
    """A lookup is O(blocks of the prompt) and ends at the first key that nobody has."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._holders: dict[PrefixKey, int] = {}  # bit i: the worker at place i
        self._keys: dict[str, set[PrefixKey]] = {}
        self._bits: dict[str, int] = {}
        self.num_refused = 0  # keys that did not fit
        self.version = 0  # of what is known; a lookup of the same version gives the same

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, worker_id: str, events: KVEvents) -> None:
        if events.reset:
            self.drop(worker_id)
        self.version += 1
        bit = self._bit_of(worker_id)
        keys = self._keys[worker_id]
        for key in events.removed:
            self._take(key, bit)
            keys.discard(key)
        for key in events.added:
            held = self._holders.get(key)
            if held is None:
                if len(self._holders) >= self._max_keys:
                    self.num_refused += 1
                    continue
                held = 0
            self._holders[key] = held | bit
            keys.add(key)

    def drop(self, worker_id: str) -> None:
        """Forget the worker: it is gone, or starts anew. O(what it held)."""
        self.version += 1
        bit = self._bits.pop(worker_id, 0)
        for key in self._keys.pop(worker_id, ()):
            self._take(key, bit)

    def lookup(self, keys: Iterable[PrefixKey]) -> dict[str, int]:
        """Full blocks of the prompt from its first on, by worker that has any. ``keys`` is
        read only as far as somebody has them."""
        alive = -1
        num_blocks = 0
        depths: dict[int, int] = {}  # bits of workers: full blocks from the first
        for num_before, key in enumerate(keys):
            still_alive = alive & self._holders.get(key, 0)
            if num_before and still_alive != alive:
                depths[alive & ~still_alive] = num_before
            alive = still_alive
            if not alive:
                break
            num_blocks = num_before + 1
        if alive > 0:
            depths[alive] = num_blocks
        if not depths:
            return {}
        return {
            worker_id: blocks
            for worker_id, bit in self._bits.items()
            for bits, blocks in depths.items()
            if bits & bit
        }

    def _bit_of(self, worker_id: str) -> int:
        bit = self._bits.get(worker_id)
        if bit is None:
            taken = 0
            for other in self._bits.values():
                taken |= other
            bit = ~taken & (taken + 1)  # the lowest place that is free
            self._bits[worker_id] = bit
            self._keys[worker_id] = set()
        return bit

    def _take(self, key: PrefixKey, bit: int) -> None:
        held = self._holders.get(key, 0) & ~bit
        if held:
            self._holders[key] = held
        else:
            self._holders.pop(key, None)


class PromptKeys:
    """The prefix keys of one prompt, computed once and only as far as somebody asked."""

    def __init__(self, identity: CacheIdentity, tokens: Sequence[int], block_tokens: int) -> None:
        # The last token is always computed, so a block that ends with it is no hit.
        num_blocks = max(len(tokens) - 1, 0) // block_tokens
        self._rest = islice(block_keys(identity.root_key(), tokens, block_tokens), num_blocks)
        self._known: list[PrefixKey] = []

    def __iter__(self) -> Iterator[PrefixKey]:
        yield from self._known
        for key, _ in self._rest:
            self._known.append(key)
            yield key
