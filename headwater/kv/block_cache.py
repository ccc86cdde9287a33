"""The device's blocks and what is published in them: pool, index and eviction order as one.

    in a table (or with a holder)      Held, in no order
    idle: published, in no table       Cached, or Held by pins alone; has its place in the order
    neither                            Free

Knows no sequences and no plans: ``manager`` does. Eviction drops a chain's tail before its
head. All is O(1) per block, besides the path to the root that ``renew`` walks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.core.blocks import BlockId
from headwater.core.errors import AuditError, InvalidChange
from headwater.kv.audit import check_integrity
from headwater.kv.eviction import EvictionOrder
from headwater.kv.pool import BlockPool, Held
from headwater.kv.prefix_index import HashBlock, PrefixEntry, PrefixIndex, PrefixParent
from headwater.kv.probe import MAX_COMPARED_CHILDREN


class BlockCache:
    """Blocks in use, idle blocks that can be used again, and free ones."""

    def __init__(self, num_blocks: int, hash_block: HashBlock) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(hash_block)
        self.num_evicted = 0
        self._order = EvictionOrder()
        self._pins: dict[BlockId, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that ``take`` can give: free or evictable."""
        return self.pool.num_free + self.pool.num_cached

    # Holding

    def take(self, num_blocks: int) -> list[BlockId]:
        """Free blocks, after evicting as many as that needs. Needs ``num_available`` of them."""
        while (num_lacking := num_blocks - self.pool.num_free) > 0:
            victims = self._order.choose(num_lacking, self._pins)
            if not victims:
                raise AuditError(f"kv: {num_lacking} blocks are lacking, and none can be evicted")
            for block in victims:
                if self.pool.is_cached(block):
                    self.num_evicted += self.forget(self._entry_of(block))
        return [self.pool.take() for _ in range(num_blocks)]

    def hold(self, block: BlockId) -> None:
        """One more user of a published block."""
        self.pool.share(block)
        self._order.discard((block,))

    def adopt(self, entry: PrefixEntry) -> None:
        """The only user of ``entry``'s block goes on to write it: it is not published any
        more, nor what hangs on it."""
        self.num_evicted += 1 + self.forget(entry)

    def let_go(self, blocks: Iterable[BlockId], last: PrefixEntry | None = None) -> None:
        """One user less of blocks of one prefix. The published ones stay findable until they
        are evicted; the prefix was used just now, down to ``last`` and the deepest of them."""
        deepest = last if last is not None and last in self.index else None
        for block in blocks:
            entry = self.index.entry_of(block)
            self.pool.release(block, keep=entry is not None)
            if entry is not None and (deepest is None or entry.row >= deepest.row):
                deepest = entry
        if deepest is not None:
            self.renew(deepest)

    def renew(self, entry: PrefixEntry) -> None:
        """``entry`` and its ancestors were used just now. A published block of somebody else
        that a chain goes through is among them: it must outlive what hangs on it."""
        path: list[BlockId] = []
        parent: PrefixParent = entry
        while isinstance(parent, PrefixEntry):
            if self._is_idle(parent.block):
                path.append(parent.block)
            parent = parent.parent
        self._order.retire(path[::-1])

    # Publishing

    def publish(
        self,
        parent: PrefixParent,
        tokens: tuple[int, ...],
        block: BlockId,
        *,
        has_window: bool,
    ) -> tuple[PrefixEntry | None, bool]:
        """The entry of ``tokens`` after ``parent``, and whether it is new.

        Where the same prefix is published already, that block stays the one that is found,
        unless only ``block`` has the window part. Shorter tails that ``tokens`` begin with
        go. No entry: a hash collision, or ``parent`` is gone; ``block`` stays private.
        """
        own = self.index.entry_of(block)
        entry = self.index.add(parent, tokens, block, has_window=has_window)
        if entry is None:
            return None, False
        is_new = entry.block == block and entry is not own
        is_better = entry.block != block and has_window and not entry.has_window
        if is_better:
            self._abandon(self.index.move(entry, block))
        if is_new or is_better:
            self._drop_shorter(entry)
        return entry, is_new

    def is_covered(
        self, parent: PrefixParent, tokens: tuple[int, ...], *, has_window: bool
    ) -> bool:
        """Whether a published block after ``parent`` begins with ``tokens``."""
        return any(
            entry.tokens[: len(tokens)] == tokens and entry.has_window >= has_window
            for entry in self.index.children(parent, MAX_COMPARED_CHILDREN)
        )

    def forget(self, entry: PrefixEntry) -> int:
        """Unpublish ``entry`` and what hangs on it; how many blocks that made free. Those in
        use only lose their key."""
        num_free = self.pool.num_free
        for gone in self.index.remove(entry):
            self._abandon(gone.block)
        return self.pool.num_free - num_free

    def _drop_shorter(self, entry: PrefixEntry) -> None:
        shorter = [
            tail
            for tail in self.index.children(entry.parent, MAX_COMPARED_CHILDREN)
            if len(tail.tokens) < len(entry.tokens)
            and entry.tokens[: len(tail.tokens)] == tail.tokens
            and entry.has_window >= tail.has_window
        ]
        for tail in shorter:
            self.forget(tail)

    def _abandon(self, block: BlockId) -> None:
        """``block`` is not published any more."""
        self._order.discard((block,))
        if self.pool.is_cached(block):
            self.pool.evict(block)

    # Pins

    def pin(self, entry: PrefixEntry) -> bool:
        """Keep the bytes of a published block; False when it is not published any more."""
        if entry not in self.index:
            return False
        # It is not used by that, so it keeps its place in the order.
        self.pool.share(entry.block)
        self._pins[entry.block] = self._pins.get(entry.block, 0) + 1
        return True

    def unpin(self, block: BlockId) -> None:
        num_left = self._pins.get(block, 0) - 1
        if num_left < 0:
            raise InvalidChange(f"block {block} is not pinned")
        if num_left:
            self._pins[block] = num_left
        else:
            del self._pins[block]
        self.pool.release(block, keep=self.index.entry_of(block) is not None)

    def victims(self, num_blocks: int) -> tuple[PrefixEntry, ...]:
        """Who is evicted next, first to go first."""
        return tuple(self._entry_of(b) for b in self._order.choose(num_blocks, self._pins))

    # Inside

    def _is_idle(self, block: BlockId) -> bool:
        if self.pool.is_cached(block):
            return True
        num_pins = self._pins.get(block, 0)
        return num_pins > 0 and self.pool.state(block) == Held(num_pins)

    def _entry_of(self, block: BlockId) -> PrefixEntry:
        entry = self.index.entry_of(block)
        if entry is None:
            raise AuditError(f"kv: cached block {block} has no key")
        return entry

    def check_integrity(
        self, tables: Sequence[tuple[BlockId, ...]], *, block_tokens: int, has_windows: bool
    ) -> None:
        """Raises AuditError if any count, refcount, key or order is wrong. O(pool)."""
        check_integrity(
            self.pool,
            self.index,
            self._order,
            tables,
            self._pins,
            block_tokens=block_tokens,
            has_windows=has_windows,
        )
