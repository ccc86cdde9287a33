"""Tiers for scheduler tests: everything takes ticks, and what goes wrong is the test's choice.

Records hold what the scripted engine's blocks held when the copy *ended*, and a load
writes garbage first: whoever reads a block too early, writes one that is being copied,
or gets one that a dead load still owns, has other ids than a cold run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from worker_late_engine import LateEngine, late_ids
from worker_scripted_engine import (
    GARBAGE,
    Content,
    Driver,
    ScriptedEngine,
    expected_ids,
    make_scheduler,
)

from headwater.core.blocks import CacheIdentity, PrefixKey, chain_key
from headwater.core.cache import (
    KVPart,
    MissReason,
    RecordMeta,
    Retention,
    StoredRecord,
    StoreStats,
    Tier,
    WindowKV,
    part_key,
)
from headwater.core.fleet import Holding
from headwater.core.ports import Load, Lookup, RecordMove, Store, StoredPrefix, StoredRow
from headwater.core.request import PromptReport, Request, late_start
from headwater.worker.tiering import TierParts

TICK_S = 0.001


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 0.0
        self.tick: Callable[[], None] = lambda: None  # for who waits by the clock alone

    def now_s(self) -> float:
        self.tick()
        return self.time_s


@dataclass
class Record:
    meta: RecordMeta
    content: Content
    retention: Retention


@dataclass
class Habits:
    """How the tiers behave; a test may change it at any time."""

    look_ticks: int = 1
    load_ticks: int = 1  # per record
    store_ticks: int = 2  # per call
    load_s: float = 0.0  # what ``predicted_load_s`` says of each record
    fails_load: Callable[[RecordMeta], bool] = lambda meta: False
    loses_store: Callable[[RecordMeta], bool] = lambda meta: False
    reason: MissReason = MissReason.NEW  # why a look ends where it ends
    has_host: bool = False
    has_disk: bool = True


@dataclass
class FakeLookup:
    answer: Callable[[], StoredPrefix]
    ticks: int
    found: StoredPrefix | None = None

    @property
    def is_done(self) -> bool:
        return self.found is not None

    def result(self) -> StoredPrefix:
        assert self.found is not None
        return self.found

    def tick(self) -> bool:
        self.ticks -= 1
        if self.ticks <= 0:
            self.found = self.answer()
        return self.is_done


@dataclass
class FakeLoad:
    tiers: FakeTiers
    moves: Sequence[RecordMove]
    num_loaded: int = 0
    is_done: bool = False
    failure: MissReason | None = None
    is_cancelled: bool = False
    ticks: int = 0

    def cancel(self) -> None:
        self.is_cancelled = True

    def tick(self) -> bool:
        if self.is_cancelled and self.ticks == 0:  # between two records
            self.is_done, self.failure = True, self.failure or MissReason.SLOW
            return True
        self.ticks += 1
        if self.ticks < self.tiers.habits.load_ticks:
            return False
        self.ticks = 0
        move = self.moves[self.num_loaded]
        record = self.tiers.record(move.meta.key)
        if record is None or record.meta != move.meta or self.tiers.habits.fails_load(move.meta):
            self.is_done, self.failure = True, MissReason.DAMAGED
            return True
        self.tiers.engine.fill(move.block, move.meta.part, record.content)
        self.num_loaded += 1
        self.is_done = self.num_loaded == len(self.moves)
        return self.is_done


@dataclass
class FakeStore:
    tiers: FakeTiers
    tier: Tier
    moves: Sequence[RecordMove]
    retention: Retention
    ticks: int
    is_done: bool = False
    failed: list[RecordMove] = field(default_factory=list)
    before: list[Content] = field(default_factory=list)

    def tick(self) -> bool:
        self.ticks -= 1
        if self.ticks > 0:
            return False
        self.is_done = True
        for move, before in zip(self.moves, self.before, strict=True):
            content = self.tiers.content(move)
            assert content == before, "a block was written while it was copied out"
            if self.tiers.habits.loses_store(move.meta):
                self.failed.append(move)
            else:
                kept = self.tiers.kept[self.tier]
                kept.setdefault(move.meta.key, Record(move.meta, content, self.retention))
                self.tiers.num_puts += 1
        return True


class FakeTiers:
    """``core.ports.KVTiers`` over two dicts that outlive it: a restart is a new one."""

    def __init__(
        self,
        engine: ScriptedEngine,
        clock: ManualClock,
        habits: Habits | None = None,
        kept: dict[Tier, dict[PrefixKey, Record]] | None = None,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.habits = habits or Habits()
        self.kept: dict[Tier, dict[PrefixKey, Record]] = (
            {Tier.HOST: {}, Tier.DISK: {}} if kept is None else kept
        )
        self.running: list[FakeLookup | FakeLoad | FakeStore] = []
        self.touched: list[PrefixKey] = []
        self.num_looks = self.num_loads = self.num_puts = 0
        self.is_closed = False

    def tick(self) -> None:
        self.clock.time_s += TICK_S
        self.running = [work for work in self.running if not work.tick()]

    def record(self, key: PrefixKey) -> Record | None:
        return self.kept[Tier.HOST].get(key) or self.kept[Tier.DISK].get(key)

    def content(self, move: RecordMove) -> Content:
        """Of the tokens that the record is of: what lies behind them may change."""
        whole = self.engine.content(move.block, move.meta.part)[: len(move.meta.tokens)]
        assert None not in whole
        assert GARBAGE not in whole, "KV that was never computed is stored"
        return whole

    # KVTiers

    def look(self, tokens: Sequence[int], identity: CacheIdentity, first_row: int) -> Lookup:
        self.num_looks += 1
        lookup = FakeLookup(
            lambda: self.answer(tokens, identity, first_row), self.habits.look_ticks
        )
        self.running.append(lookup)
        return lookup

    def answer(
        self, tokens: Sequence[int], identity: CacheIdentity, first_row: int
    ) -> StoredPrefix:
        """The slow and obvious way: compare the tokens with every record."""
        size = self.engine.block_tokens
        parent = identity.root_key()
        rows: list[StoredRow] = []
        start = 0
        while start + size <= len(tokens):
            content = tuple(tokens[start : start + size])
            key = chain_key(parent, content)
            if start >= first_row * size:
                row = self._row(key, parent, identity, start, content)
                if row is None:
                    break
                rows.append(row)
            parent, start = key, start + size
        tail, num_tail_tokens = self._tail(tokens[start:], parent, identity, start)
        return StoredPrefix(
            first_row=first_row,
            rows=tuple(rows),
            tail=tail,
            num_tail_tokens=num_tail_tokens,
            reason=self.habits.reason,
        )

    def _row(
        self,
        key: PrefixKey,
        parent: PrefixKey,
        identity: CacheIdentity,
        start: int,
        tokens: tuple[int, ...],
    ) -> StoredRow | None:
        stored = self._stored(key)
        if stored is None:
            return None
        meta = stored.meta
        assert (meta.parent, meta.identity, meta.start, meta.tokens) == (
            parent, identity, start, tokens,
        )  # fmt: skip
        return StoredRow(record=stored, window=self._stored(part_key(key, KVPart.WINDOW)))

    def _tail(
        self, rest: Sequence[int], parent: PrefixKey, identity: CacheIdentity, start: int
    ) -> tuple[StoredRow | None, int]:
        best: StoredRow | None = None
        most = 0
        for tier in (Tier.HOST, Tier.DISK):
            for record in self.kept[tier].values():
                meta = record.meta
                if meta.part is not KVPart.GLOBAL or meta.parent != parent:
                    continue
                shared = 0
                for ours, theirs in zip(rest, meta.tokens, strict=False):
                    if ours != theirs:
                        break
                    shared += 1
                if shared > most:
                    best, most = self._row(meta.key, parent, identity, start, meta.tokens), shared
        return best, most

    def _stored(self, key: PrefixKey) -> StoredRecord | None:
        for tier in (Tier.HOST, Tier.DISK):
            record = self.kept[tier].get(key)
            if record is not None:
                return StoredRecord(record.meta, tier, 1000)
        return None

    def load(self, moves: Sequence[RecordMove]) -> Load:
        self.num_loads += 1
        for move in moves:
            self.engine.fill(move.block, move.meta.part, (GARBAGE,) * self.engine.block_tokens)
        load = FakeLoad(self, moves)
        self.running.append(load)
        return load

    def predicted_load_s(self, records: Sequence[StoredRecord]) -> float:
        return self.habits.load_s * len(records)

    def demote(self, moves: Sequence[RecordMove], retention: Retention) -> Store:
        return self._put(Tier.HOST, moves, retention)

    def store(self, moves: Sequence[RecordMove], retention: Retention) -> Store:
        return self._put(Tier.DISK, moves, retention)

    def _put(self, tier: Tier, moves: Sequence[RecordMove], retention: Retention) -> Store:
        assert retention.keep_s > 0, "what nobody asked to keep is kept"
        store = FakeStore(self, tier, moves, retention, self.habits.store_ticks)
        store.before = [self.content(move) for move in moves]
        self.running.append(store)
        return store

    @property
    def num_queued_writes(self) -> int:
        return sum(len(work.moves) for work in self.running if isinstance(work, FakeStore))

    @property
    def has_host(self) -> bool:
        return self.habits.has_host

    @property
    def has_disk(self) -> bool:
        return self.habits.has_disk

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None:
        self.touched += keys

    def stats(self) -> tuple[StoreStats, ...]:
        return tuple(
            StoreStats(tier=tier, num_records=len(kept), num_bytes=0, max_bytes=1)
            for tier, kept in self.kept.items()
        )

    def close(self) -> None:
        self.is_closed = True
        while self.running:
            self.tick()


def sometimes(rng: random.Random, share: float) -> Callable[[RecordMeta], bool]:
    return lambda meta: rng.random() < share


class Stack:
    """A scheduler over a scripted engine and fake tiers; ``restart`` keeps what is stored."""

    def __init__(
        self,
        habits: Habits | None = None,
        *,
        num_blocks: int = 64,
        block_tokens: int = 4,
        window_tokens: int | None = None,
        window_kv: WindowKV = WindowKV.CHECKPOINT,
        max_step_tokens: int = 64,
        max_mixed_prefill_tokens: int = 16,
        reserve_blocks_per_sequence: int = 1,
        context_tokens: int = 256,
        alignment: int = 1,
        decoder_replay_tokens: int | None = None,
    ) -> None:
        self.habits = habits or Habits()
        self.clock = ManualClock()
        self.kept: dict[Tier, dict[PrefixKey, Record]] = {Tier.HOST: {}, Tier.DISK: {}}
        self._window_kv = window_kv
        self._block_tokens = block_tokens
        self._window_tokens = window_tokens
        self._replay_tokens = decoder_replay_tokens
        self._make_scheduler = partial(
            make_scheduler,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            max_step_tokens=max_step_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            reserve_blocks_per_sequence=reserve_blocks_per_sequence,
            window_tokens=window_tokens,
            alignment=alignment,
            decoder_replay_tokens=decoder_replay_tokens,
        )
        self._start()

    def _start(self) -> None:
        self.engine: ScriptedEngine
        if self._replay_tokens is None:
            self.engine = ScriptedEngine(self._block_tokens, self._window_tokens)
        else:
            self.engine = LateEngine(self._block_tokens, self._window_tokens, Holding.ALL)
        self.tiers = FakeTiers(self.engine, self.clock, self.habits, self.kept)
        self.scheduler = self._make_scheduler(
            tier_parts=TierParts(
                memory=self.engine,
                clock=self.clock,
                tiers=self.tiers,
                window_kv=self._window_kv,
            )
        )
        self.driver = Driver(self.scheduler, engine=self.engine, tick=self.tiers.tick)

    def restart(self, *, orderly: bool = True) -> None:
        """A new process: empty device and host. Not ``orderly``: what was on its way is lost."""
        if orderly:
            self.driver.run()
        self.kept[Tier.HOST].clear()
        self._start()

    def ask(self, request: Request) -> PromptReport:
        """Run one request to its end, check its ids, and give its report."""
        self.driver.submit(request)
        self.driver.run()
        self.check(request)
        return self.driver.prompts[str(request.request_id), 0]

    def check(self, request: Request) -> None:
        for index in range(request.num_choices):
            ids = self.driver.ids[str(request.request_id), index]
            assert ids == self._expected(request, len(ids)), "not a cold run's ids"

    def _expected(self, request: Request, num_tokens: int) -> list[int]:
        start = late_start(request, self._replay_tokens)
        if start is None:
            return expected_ids(request.prompt_tokens, num_tokens)
        return late_ids(request.prompt_tokens, num_tokens, start)
