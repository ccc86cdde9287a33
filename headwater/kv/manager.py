"""The door to the device's KV blocks: probe, admit, grow, publish, free.

Serves one group of the model's cache plan (for full-attention models there is
only ``global``); a model with more groups has one manager per group. Knows no
tensors, no requests and no policy. ``worker`` calls it, from one thread.

Who may write where, for a sequence that hit 2 blocks of 4 tokens:

    tokens   |0 1 2 3|4 5 6 7|8 9 . .|
    block     shared  shared  own
    written                  [8, ...)   a hit is whole blocks, so the first written
                                        token starts a block that only we hold

A block is published when all its KV is written, and never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.blocks import BlockId, CacheIdentity, blocks_for, chain_key
from headwater.core.errors import AuditError, ConfigError, InvalidChange
from headwater.core.step import SequenceId
from headwater.kv.audit import check_integrity
from headwater.kv.eviction import EvictionOrder
from headwater.kv.pool import BlockPool, Cached, Held
from headwater.kv.prefix_index import HashBlock, PrefixEntry, PrefixIndex, PrefixParent, PrefixRoot


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """One group of a cache plan on one device: layers that share block tables."""

    num_blocks: int
    block_tokens: int
    name: str = "global"

    def __post_init__(self) -> None:
        for field in ("num_blocks", "block_tokens"):
            if getattr(self, field) < 1:
                raise ConfigError(f"kv.{field} must be >= 1, got {getattr(self, field)}")

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the whole pool can hold."""
        return self.num_blocks * self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a look found: ``hits`` are the prefix's published blocks, first to last.

    A promise of nothing: until ``admit`` any of them may be evicted.
    """

    root: PrefixRoot
    num_tokens: int
    hits: tuple[PrefixEntry, ...]
    num_hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Blocks that a sequence now holds; KV of [0, num_hit_tokens) is already in them."""

    sequence_id: SequenceId
    num_hit_tokens: int
    block_table: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCounters:
    """Blocks now (they add up to the pool) and prompt tokens since start."""

    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_hit_tokens: int
    num_miss_tokens: int
    num_evicted_blocks: int


@dataclass(slots=True)
class _Holding:
    """One sequence's blocks. ``chain[i]`` is the entry of row i's prefix; its block is
    ``table[i]``, or another sequence's where that one published the same prefix first."""

    root: PrefixRoot
    table: tuple[BlockId, ...]  # a tuple, so that a step's rows can share it as it is
    chain: list[PrefixEntry]


class KVManager:
    """Blocks of one group. Costs: O(blocks of the prompt) to probe, admit and free,
    O(new blocks) to grow and publish; nothing walks the pool but ``check_integrity``."""

    def __init__(self, group: KVGroup, *, hash_block: HashBlock = chain_key) -> None:
        self.group = group
        self._block_tokens = group.block_tokens
        self._pool = BlockPool(group.num_blocks)
        self._index = PrefixIndex(hash_block)
        self._order = EvictionOrder()
        self._holdings: dict[SequenceId, _Holding] = {}
        self._num_hit_tokens = 0
        self._num_miss_tokens = 0
        self._num_evicted_blocks = 0

    # Look

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``admit`` and ``grow`` can hand out: free or evictable."""
        return self._pool.num_free + self._pool.num_cached

    def counters(self) -> KVCounters:
        return KVCounters(
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
            num_held_blocks=self._pool.num_held,
            num_hit_tokens=self._num_hit_tokens,
            num_miss_tokens=self._num_miss_tokens,
            num_evicted_blocks=self._num_evicted_blocks,
        )

    def block_table(self, sequence_id: SequenceId) -> tuple[BlockId, ...]:
        """The sequence's blocks; the same object until it grows."""
        return self._holding(sequence_id).table

    def num_private_blocks(self, sequence_id: SequenceId) -> int:
        """Blocks that become available when this sequence is freed. O(its blocks)."""
        table = self._holding(sequence_id).table
        return sum(self._pool.state(block) == Held(1) for block in table)

    def probe(
        self,
        tokens: Sequence[int],
        identity: CacheIdentity,
        *,
        max_hit_tokens: int | None = None,
        earlier: Probe | None = None,
    ) -> Probe:
        """Find the longest published prefix of ``tokens``; changes nothing.

        Hashing stops at the first miss. ``max_hit_tokens`` limits the hit (0:
        compute everything). ``earlier`` is an older probe of the same tokens:
        what it found and is still there is not hashed again.
        """
        # The last token is always a miss: its logits choose the next token.
        limit_tokens = len(tokens) - 1
        if max_hit_tokens is not None:
            limit_tokens = min(limit_tokens, max_hit_tokens)
        limit_blocks = max(limit_tokens, 0) // self._block_tokens

        root = earlier.root if earlier is not None else PrefixRoot.of(identity)
        hits = list(earlier.hits[:limit_blocks]) if earlier is not None else []
        self._drop_stale(hits)
        parent: PrefixParent = hits[-1] if hits else root
        while len(hits) < limit_blocks:
            entry = self._index.find(parent, self._row_tokens(tokens, len(hits)))
            if entry is None:
                break
            hits.append(entry)
            parent = entry
        return Probe(
            root=root,
            num_tokens=len(tokens),
            hits=tuple(hits),
            num_hit_tokens=len(hits) * self._block_tokens,
        )

    def num_blocks_to_admit(self, probe: Probe, num_tokens: int) -> int:
        """Available blocks that ``admit`` would use up: all but those that others hold."""
        shared = sum(not self._pool.is_cached(entry.block) for entry in probe.hits)
        return blocks_for(num_tokens, self._block_tokens) - shared

    # Take and give back

    def admit(
        self, sequence_id: SequenceId, probe: Probe, num_tokens: int, *, count_prompt: bool = True
    ) -> Lease | None:
        """Take the hit blocks and fresh ones to cover ``num_tokens``: all, or None and nothing.

        ``count_prompt`` is False when the prompt was counted before: after a
        preemption, and for a request's further choices. The lease's hit may be
        shorter than the probe's, if blocks were evicted in between.
        """
        if sequence_id in self._holdings:
            raise InvalidChange(f"sequence {sequence_id} already holds blocks")
        hits = list(probe.hits)
        self._drop_stale(hits)
        num_fresh = blocks_for(num_tokens, self._block_tokens) - len(hits)
        if num_fresh < 1:
            raise InvalidChange(
                f"sequence {sequence_id}: {num_tokens} tokens are all in the {len(hits)} hit "
                "blocks; at least one token must be computed"
            )
        num_cached_hits = sum(self._pool.is_cached(entry.block) for entry in hits)
        if num_fresh > self.num_available_blocks - num_cached_hits:
            return None

        # Hits first: once held, making room for the rest cannot evict them.
        hit_blocks = tuple(entry.block for entry in hits)
        for block in hit_blocks:
            self._pool.share(block)
        self._order.discard(hit_blocks)
        table = hit_blocks + self._take_fresh(num_fresh)
        self._holdings[sequence_id] = _Holding(probe.root, table, hits)

        num_hit_tokens = len(hits) * self._block_tokens
        if count_prompt:
            self._num_hit_tokens += num_hit_tokens
            self._num_miss_tokens += probe.num_tokens - num_hit_tokens
        return Lease(sequence_id=sequence_id, num_hit_tokens=num_hit_tokens, block_table=table)

    def grow(self, sequence_id: SequenceId, num_tokens: int) -> bool:
        """Hold blocks for ``num_tokens`` tokens: True, or False and nothing changed."""
        holding = self._holding(sequence_id)
        num_fresh = blocks_for(num_tokens, self._block_tokens) - len(holding.table)
        if num_fresh <= 0:
            return True
        if num_fresh > self.num_available_blocks:
            return False
        holding.table += self._take_fresh(num_fresh)
        return True

    def publish(self, sequence_id: SequenceId, tokens: Sequence[int], num_computed: int) -> None:
        """Make the full blocks of ``tokens[:num_computed]`` reusable; their KV is written.

        Where the same prefix is published already, that block stays the one
        that others find, and ours stays private to this sequence.
        """
        holding = self._holding(sequence_id)
        num_full = num_computed // self._block_tokens
        if num_full > len(holding.table) or num_computed > len(tokens):
            raise InvalidChange(
                f"sequence {sequence_id}: cannot publish {num_computed} tokens of {len(tokens)} "
                f"in {len(holding.table)} blocks"
            )
        # Another's block that our chain went through may be gone: publish ours in its place.
        self._drop_stale(holding.chain)
        while len(holding.chain) < num_full:
            row = len(holding.chain)
            parent: PrefixParent = holding.chain[-1] if row else holding.root
            entry = self._index.add(parent, self._row_tokens(tokens, row), holding.table[row])
            if entry is None:  # a hash collision: this block and what follows stay private
                return
            holding.chain.append(entry)

    def free(self, sequence_id: SequenceId) -> None:
        """Give back all blocks; the published ones stay findable until evicted."""
        holding = self._holding(sequence_id)
        del self._holdings[sequence_id]
        retired: list[BlockId] = []
        for row, block in enumerate(holding.table):
            published = self._index.entry_of(block)
            state = self._pool.release(block, keep=published is not None)
            if isinstance(state, Cached):
                retired.append(block)
            elif row < len(holding.chain) and holding.chain[row] is not published:
                # Ours was private; the published block of this prefix was used through its
                # tail just now, so it must outlive the tail.
                entry = holding.chain[row]
                if entry in self._index and self._pool.is_cached(entry.block):
                    retired.append(entry.block)
        self._order.retire(retired)

    def check_integrity(self) -> None:
        """Raises AuditError if any count, refcount, key or order is wrong. O(pool)."""
        check_integrity(
            self._pool, self._index, self._order, (h.table for h in self._holdings.values())
        )

    # Inside

    def _holding(self, sequence_id: SequenceId) -> _Holding:
        try:
            return self._holdings[sequence_id]
        except KeyError:
            raise InvalidChange(f"sequence {sequence_id} holds no blocks") from None

    def _row_tokens(self, tokens: Sequence[int], row: int) -> tuple[int, ...]:
        start = row * self._block_tokens
        return tuple(tokens[start : start + self._block_tokens])

    def _drop_stale(self, chain: list[PrefixEntry]) -> None:
        """Cut ``chain`` to what is still indexed. The index keeps every ancestor of
        an entry, so only the tail can be stale."""
        while chain and chain[-1] not in self._index:
            chain.pop()

    def _take_fresh(self, num_blocks: int) -> tuple[BlockId, ...]:
        """Needs ``num_blocks <= num_available_blocks``."""
        while self._pool.num_free < num_blocks:
            (victim,) = self._order.choose(1)
            entry = self._index.entry_of(victim)
            if entry is None:
                raise AuditError(f"kv: cached block {victim} has no key")
            # Cached descendants went before (tail first). One that is left is held by a
            # sequence with its own copy of the head; it only loses its key.
            self._index.remove(entry)
            self._order.discard((victim,))
            self._pool.evict(victim)
            self._num_evicted_blocks += 1
        return tuple(self._pool.take() for _ in range(num_blocks))
