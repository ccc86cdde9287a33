"""The door to the device's KV blocks: probe, admit, load, grow, publish, free.

Serves one group of the model's cache plan: layers that share block tables. Knows
sequences and plans of hits; no tensors, no requests, no tiers and no policy.
``worker`` calls it, from one thread. Who may write where, with blocks of 4 tokens:

    a hit of 10 tokens       |0 1 2 3|4 5 6 7|8 9 . .|        a replay of the last 5
    block                     shared  shared  copied    or    shared  copied  copied
    written                                     [10, ...)            [5, ...)

What a sequence writes is in blocks that only it holds. Of a published block the
tokens that were published are never written again; a tail's owner writes on after them.
The KV of late layers is a sequence's own: in a block, it is nothing that others are told of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.blocks import BlockId, CacheIdentity, blocks_for, chain_key
from headwater.core.cache import KVPart, RecordMeta, part_key
from headwater.core.errors import ConfigError, InvalidChange
from headwater.core.fleet import KVEvents
from headwater.core.ports import RecordMove
from headwater.core.step import SequenceId
from headwater.kv.block_cache import BlockCache
from headwater.kv.hit_plan import CopiedRow, HitPlan, LoadedRow, SharedRow
from headwater.kv.holding import Holding, Loading
from headwater.kv.pool import Held
from headwater.kv.prefix_index import HashBlock, PrefixEntry, PrefixRoot
from headwater.kv.probe import Probe, drop_stale, look


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """One group of a cache plan on one device: layers that share block tables.

    ``alignment``: hits end at multiples of so many tokens, where some layers have one row of KV
    for as many."""

    num_blocks: int
    block_tokens: int
    name: str = "global"
    alignment: int = 1

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "alignment"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kv.{name} must be >= 1, got {getattr(self, name)}")
        if self.block_tokens % self.alignment:
            raise ConfigError(
                f"kv.block_tokens ({self.block_tokens}) must be a multiple of the {self.alignment} "
                "tokens that share a row of KV"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the whole pool can hold."""
        return self.num_blocks * self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Blocks that a sequence now holds.

    KV of [0, num_hit_tokens) is in them once every (source, target) of ``copies`` is
    copied and every record of ``loads`` is loaded. The caller copies at once, before
    anything else here is called; it starts the loads, and says ``loaded`` or ``detach``.
    """

    sequence_id: SequenceId
    num_hit_tokens: int
    num_replayed_tokens: int
    window_start: int
    block_table: tuple[BlockId, ...]
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    loads: tuple[RecordMove, ...] = ()  # by row, a row's global part first


@dataclass(frozen=True, slots=True)
class StalePlan:
    """Blocks of the plan were evicted since its probe: probe and plan again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCounters:
    """Blocks now (they add up to the pool) and prompt tokens since start."""

    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_hit_tokens: int
    num_miss_tokens: int
    num_evicted_blocks: int


class KVManager:
    """Blocks of one group. Costs: O(blocks of the prompt) to probe, admit and free,
    O(new blocks) to grow and publish; nothing walks the pool but ``check_integrity``."""

    def __init__(
        self,
        group: KVGroup,
        *,
        window_tokens: int | None = None,
        hash_block: HashBlock = chain_key,
    ) -> None:
        """``window_tokens`` of the layers with a window, if the model has any."""
        self.group = group
        self.window_tokens = window_tokens
        self._block_tokens = group.block_tokens
        self._cache = BlockCache(group.num_blocks, hash_block)
        self._pool = self._cache.pool
        self._index = self._cache.index
        self._holdings: dict[SequenceId, Holding] = {}
        self._holders: dict[SequenceId, tuple[BlockId, ...]] = {}  # blocks that are loaded into
        self._num_hit_tokens = 0
        self._num_miss_tokens = 0

    # Look

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``admit`` and ``grow`` can hand out: free or evictable."""
        return self._cache.num_available

    def counters(self) -> KVCounters:
        return KVCounters(
            num_free_blocks=self._pool.num_free,
            num_cached_blocks=self._pool.num_cached,
            num_held_blocks=self._pool.num_held,
            num_hit_tokens=self._num_hit_tokens,
            num_miss_tokens=self._num_miss_tokens,
            num_evicted_blocks=self._cache.num_evicted,
        )

    def take_events(self) -> KVEvents | None:
        """Which full blocks' keys can be hit now and could not at the last call, and the other
        way round; None: no change. The first time: all of them."""
        return self._index.take_changes(self._block_tokens)

    def block_table(self, sequence_id: SequenceId) -> tuple[BlockId, ...]:
        """The sequence's blocks; the same object until it grows."""
        return self._holding(sequence_id).table

    def published(self, sequence_id: SequenceId) -> tuple[PrefixEntry, ...]:
        """The entries of the sequence's full rows, as far as they are published now."""
        holding = self._holding(sequence_id)
        drop_stale(self._index, holding.chain)
        return tuple(holding.chain)

    def num_private_blocks(self, sequence_id: SequenceId) -> int:
        """Blocks that become available when this sequence is freed. O(its blocks)."""
        return sum(self._pool.state(block) == Held(1) for block in self.block_table(sequence_id))

    def probe(
        self,
        tokens: Sequence[int],
        identity: CacheIdentity,
        *,
        max_hit_tokens: int | None = None,
        earlier: Probe | None = None,
    ) -> Probe:
        """Find the longest published prefix of ``tokens``, to the token; changes nothing.

        Hashing stops at the first miss. ``max_hit_tokens`` limits the hit (0:
        compute everything). ``earlier`` is an older probe of the same tokens:
        what it found and is still there is not hashed again.
        """
        # The last token is always a miss: its logits choose the next token.
        limit_tokens = max(0, len(tokens) - 1)
        if max_hit_tokens is not None:
            limit_tokens = min(limit_tokens, max_hit_tokens)
        return look(
            self._index,
            tokens,
            earlier.root if earlier is not None else PrefixRoot.of(identity),
            block_tokens=self._block_tokens,
            limit_tokens=limit_tokens,
            earlier=earlier,
        )

    def num_blocks_to_admit(self, plan: HitPlan, num_tokens: int) -> int:
        """Available blocks that ``admit`` would use up: all but those that others hold.
        While they are available, ``admit`` does not answer None."""
        shared = 0
        for source in plan.sources:
            if isinstance(source, SharedRow):
                entry = self._index.get(source.entry.key)
                shared += entry is source.entry and not self._pool.is_cached(entry.block)
        return blocks_for(num_tokens, self._block_tokens) - shared

    # Take and give back

    def admit(
        self, sequence_id: SequenceId, plan: HitPlan, num_tokens: int
    ) -> Lease | StalePlan | None:
        """Take the plan's blocks and fresh ones to cover ``num_tokens``.

        All, or nothing: None when there is no room, StalePlan when the hit is not there any
        more. A copy's source is not evicted for its own copy: where there is no room for
        both, the source becomes the sequence's block, and its prefix is found no more.
        """
        self._check_new(sequence_id)
        if num_tokens <= plan.num_hit_tokens:
            raise InvalidChange(
                f"sequence {sequence_id}: {num_tokens} tokens are all in the hit of "
                f"{plan.num_hit_tokens}; at least one token must be computed"
            )
        entries = self._resolve(plan)
        if entries is None:
            return StalePlan()
        shared = [e for row, e in entries.items() if isinstance(plan.sources[row], SharedRow)]
        copied = [e for row, e in entries.items() if isinstance(plan.sources[row], CopiedRow)]
        idle = [entry for entry in copied if self._pool.is_cached(entry.block)]
        num_fresh = blocks_for(num_tokens, self._block_tokens) - len(shared)
        room = self.num_available_blocks - sum(self._pool.is_cached(e.block) for e in shared)
        if num_fresh > room:
            return None

        # Hits first: once held, making room for the rest cannot evict them.
        for entry in (*shared, *idle):
            self._cache.hold(entry.block)
        num_kept = min(len(idle), room - num_fresh)
        kept, adopted = idle[:num_kept], idle[num_kept:]
        for entry in reversed(adopted):  # from the end: what hangs on it is not in the plan
            self._cache.adopt(entry)
        fresh = self._cache.take(num_fresh - len(adopted))[::-1]
        table: list[BlockId] = []
        copies: list[tuple[BlockId, BlockId]] = []
        loads: list[RecordMove] = []
        windows: list[bool] = []
        for row, source in enumerate(plan.sources):
            match source:
                case SharedRow():
                    table.append(entries[row].block)
                    windows.append(entries[row].has_window)
                case CopiedRow():
                    block = entries[row].block
                    if entries[row] not in adopted:
                        block = fresh.pop()
                        copies.append((entries[row].block, block))
                    table.append(block)
                    windows.append(self.window_tokens is None)
                case LoadedRow():
                    table.append(fresh.pop())
                    windows.append(self.window_tokens is None or source.loads_window)
                    loads += _moves(source, table[-1])
        table += reversed(fresh)
        self._cache.let_go(entry.block for entry in kept)
        for entry in entries.values():
            if entry in self._index:
                self._index.use(entry)

        self._holdings[sequence_id] = Holding(
            root=PrefixRoot.of(plan.identity),
            table=tuple(table),
            chain=_leading(entries, plan),
            block_tokens=self._block_tokens,
            window_start=plan.window_start,
            windows=tuple(windows),
            loading=Loading(plan, tuple(loads)) if loads else None,
        )
        return Lease(
            sequence_id=sequence_id,
            num_hit_tokens=plan.num_hit_tokens,
            num_replayed_tokens=plan.num_replayed_tokens,
            window_start=plan.window_start,
            block_table=tuple(table),
            copies=tuple(copies),
            loads=tuple(loads),
        )

    def loaded(self, sequence_id: SequenceId) -> None:
        """All of the lease's loads are there: others may hit their full rows. Those that are
        replayed are published when that is computed."""
        holding, loading = self._loading(sequence_id)
        plan = loading.plan
        num_rows = (plan.num_hit_tokens - plan.num_replayed_tokens) // self._block_tokens
        holding.publish_hit(self._cache, plan, holding.windows[:num_rows])
        holding.loading = None

    def detach(self, sequence_id: SequenceId, num_loaded_moves: int, holder: SequenceId) -> None:
        """The load ended early, or is of no use any more: the sequence holds nothing now.

        What the first ``num_loaded_moves`` moves made whole is published. The blocks of the
        others may still be written: they are ``holder``'s until ``free(holder)``.
        """
        self._check_new(holder)
        holding, loading = self._loading(sequence_id)
        windows = holding.whole_rows(loading.plan, num_loaded_moves)
        holding.publish_hit(self._cache, loading.plan, windows)
        pending = dict.fromkeys(move.block for move in loading.moves[num_loaded_moves:])
        del self._holdings[sequence_id]
        self._holders[holder] = tuple(pending)
        self._cache.let_go(
            (block for block in holding.table if block not in pending),
            holding.chain[-1] if holding.chain else None,
        )

    def count_prompt(self, num_hit_tokens: int, num_miss_tokens: int) -> None:
        """Once per request, when its hit is settled: this is where prompts are counted."""
        self._num_hit_tokens += num_hit_tokens
        self._num_miss_tokens += num_miss_tokens

    def grow(self, sequence_id: SequenceId, num_tokens: int) -> bool:
        """Hold blocks for ``num_tokens`` tokens: True, or False and nothing changed."""
        holding = self._running(sequence_id)
        num_fresh = blocks_for(num_tokens, self._block_tokens) - len(holding.table)
        if num_fresh <= 0:
            return True
        if num_fresh > self.num_available_blocks:
            return False
        holding.table += tuple(self._cache.take(num_fresh))
        return True

    def publish(
        self, sequence_id: SequenceId, tokens: Sequence[int], num_computed: int
    ) -> tuple[PrefixEntry, ...]:
        """Make the full blocks of ``tokens[:num_computed]`` reusable; their KV is written.
        Gives the entries that are new by that.

        Where the same prefix is published already, that block stays the one
        that others find, and ours stays private to this sequence; unless only ours has
        window KV, then others find ours from now on.
        """
        holding = self._running(sequence_id)
        self._check_computed(sequence_id, holding, tokens, num_computed)
        new: list[PrefixEntry] = []
        # Another's block that our chain went through may be gone: publish ours in its place.
        drop_stale(self._index, holding.chain)
        while len(holding.chain) < num_computed // self._block_tokens:
            row = len(holding.chain)
            start = row * self._block_tokens
            content = tuple(tokens[start : start + self._block_tokens])
            entry, is_new = holding.publish_row(
                self._cache, content, has_window=holding.has_window(row)
            )
            if entry is None:  # a hash collision: this block and what follows stay private
                break
            if is_new:
                new.append(entry)
        return tuple(new)

    def publish_tail(
        self, sequence_id: SequenceId, tokens: Sequence[int], num_computed: int
    ) -> PrefixEntry | None:
        """Make the last tokens of ``tokens[:num_computed]``, less than a block, reusable too:
        where a later prompt is likely to go on. The sequence writes on behind them.

        The new entry, or None: there are none, a published block begins with them, or the
        full blocks before them are not published (``publish`` first).
        """
        holding = self._running(sequence_id)
        self._check_computed(sequence_id, holding, tokens, num_computed)
        row, num_tail = divmod(num_computed, self._block_tokens)
        drop_stale(self._index, holding.chain)
        if not num_tail or len(holding.chain) != row:
            return None
        content = tuple(tokens[num_computed - num_tail : num_computed])
        has_window = holding.has_window(row)
        if self._cache.is_covered(holding.parent, content, has_window=has_window):
            return None
        entry, is_new = self._cache.publish(
            holding.parent, content, holding.table[row], has_window=has_window
        )
        return entry if is_new else None

    def free(self, sequence_id: SequenceId) -> None:
        """Give back all blocks; the published ones stay findable until evicted. A sequence
        that loads is detached instead, and then its holder is freed."""
        pending = self._holders.pop(sequence_id, None)
        if pending is not None:
            self._cache.let_go(pending)
            return
        holding = self._running(sequence_id)
        del self._holdings[sequence_id]
        drop_stale(self._index, holding.chain)
        self._cache.let_go(holding.table, holding.chain[-1] if holding.chain else None)

    # Beyond the device

    def pin(self, entry: PrefixEntry) -> bool:
        """Keep ``entry.block``, which is being copied out, until ``unpin`` of that block. False
        when it is not published any more. Its key may still go, if its head is evicted."""
        return self._cache.pin(entry)

    def unpin(self, block: BlockId) -> None:
        """Once for each ``pin``."""
        self._cache.unpin(block)

    def victims(self, num_blocks: int) -> tuple[PrefixEntry, ...]:
        """The published blocks that would be evicted next, first to go first."""
        return self._cache.victims(num_blocks)

    def meta_of(self, entry: PrefixEntry, part: KVPart) -> RecordMeta:
        """What a record of ``entry``'s ``part`` is. O(its row)."""
        if part is KVPart.WINDOW and (self.window_tokens is None or not entry.has_window):
            raise InvalidChange(f"block {entry.block} has no KV of window layers to keep")
        return RecordMeta(
            key=part_key(entry.key, part),
            parent=part_key(entry.parent.key, part),
            identity=entry.root.identity,
            part=part,
            start=entry.row * self._block_tokens,
            tokens=entry.tokens,
        )

    def check_integrity(self) -> None:
        """Raises AuditError if any count, refcount, key or order is wrong. O(pool)."""
        self._cache.check_integrity(
            [*(holding.table for holding in self._holdings.values()), *self._holders.values()],
            block_tokens=self._block_tokens,
            has_windows=self.window_tokens is not None,
        )

    # Inside

    def _check_new(self, sequence_id: SequenceId) -> None:
        if sequence_id in self._holdings or sequence_id in self._holders:
            raise InvalidChange(f"sequence {sequence_id} already holds blocks")

    def _holding(self, sequence_id: SequenceId) -> Holding:
        try:
            return self._holdings[sequence_id]
        except KeyError:
            raise InvalidChange(f"sequence {sequence_id} holds no blocks") from None

    def _running(self, sequence_id: SequenceId) -> Holding:
        holding = self._holding(sequence_id)
        if holding.loading is not None:
            raise InvalidChange(f"sequence {sequence_id} is loading: loaded or detach comes first")
        return holding

    def _loading(self, sequence_id: SequenceId) -> tuple[Holding, Loading]:
        holding = self._holding(sequence_id)
        if holding.loading is None:
            raise InvalidChange(f"sequence {sequence_id} is not loading")
        return holding, holding.loading

    def _check_computed(
        self,
        sequence_id: SequenceId,
        holding: Holding,
        tokens: Sequence[int],
        num_computed: int,
    ) -> None:
        num_blocks = blocks_for(num_computed, self._block_tokens)
        if num_blocks > len(holding.table) or num_computed > len(tokens):
            raise InvalidChange(
                f"sequence {sequence_id}: cannot publish {num_computed} tokens of {len(tokens)} "
                f"in {len(holding.table)} blocks"
            )

    def _resolve(self, plan: HitPlan) -> dict[int, PrefixEntry] | None:
        """The device's entries of the plan by row; None if one is not published any more."""
        entries: dict[int, PrefixEntry] = {}
        for row, source in enumerate(plan.sources):
            if not isinstance(source, LoadedRow):
                entry = self._index.get(source.entry.key)
                if entry is None or entry is not source.entry:
                    return None
                entries[row] = entry
        return entries


def _leading(entries: dict[int, PrefixEntry], plan: HitPlan) -> list[PrefixEntry]:
    """The entries of the shared rows that the plan begins with."""
    chain: list[PrefixEntry] = []
    for source in plan.sources:
        if not isinstance(source, SharedRow):
            break
        chain.append(entries[len(chain)])
    return chain


def _moves(source: LoadedRow, block: BlockId) -> list[RecordMove]:
    moves = [RecordMove(source.row.record.meta, block)]
    if source.loads_window and source.row.window is not None:
        moves.append(RecordMove(source.row.window.meta, block))
    return moves
