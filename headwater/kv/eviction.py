"""Which cached block goes first: the least recently used, a chain's tail before its head.

Pure bookkeeping of an order: no clock (use order is the time), no block states.
``manager`` tells it what became evictable and asks it for victims; the order
is only looked at by ``choose``, never changed by it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

from headwater.core.blocks import BlockId


class EvictionOrder:
    """Idle blocks, first to go first. Every operation is O(1) per block.

    >>> order = EvictionOrder()
    >>> order.retire([BlockId(1), BlockId(2), BlockId(3)])  # a chain, head to tail
    >>> order.retire([BlockId(7)])
    >>> order.choose(4)
    (3, 2, 1, 7)
    >>> order.retire([BlockId(1)])  # the head was used again
    >>> order.choose(4)
    (3, 2, 7, 1)
    >>> order.choose(2, skipped={BlockId(3)})  # it is pinned: it keeps its place
    (2, 7)
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._blocks)

    def retire(self, chain: Sequence[BlockId]) -> None:
        """Blocks of one sequence, head to tail, were used just now and may be evicted.

        A block that is here already moves to its new place.
        """
        # A tail is useless without its head, so the head must outlive it: head is youngest.
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def discard(self, blocks: Iterable[BlockId]) -> None:
        """Blocks that are held again or gone; unknown ones are ignored."""
        for block in blocks:
            self._blocks.pop(block, None)

    def choose(
        self, num_blocks: int, skipped: Container[BlockId] = frozenset()
    ) -> tuple[BlockId, ...]:
        """The next ``num_blocks`` victims (fewer if there are fewer), first to go first.
        O(num_blocks + skipped)."""
        return tuple(islice((b for b in self._blocks if b not in skipped), num_blocks))
