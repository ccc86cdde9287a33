"""``core.ports.KVTiers``: the host and disk tiers behind one door that never waits.

    look, load -------------> reader: one thread over both stores, fastest first
    demote, touch ----------> writer of the host tier: one thread
    store, touch -----------> writer of the disk tier: one thread, gives way to the reader

Reads go first, then removals and touches, then writes. A store that hangs holds up its
own thread and whoever cares to wait; the worker's step goes on. ``app`` builds one per
worker process and hands it in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.cache import Retention, StoredRecord, StoreStats, Tier
from headwater.core.errors import ConfigError
from headwater.core.ports import (
    BlockMemory,
    Clock,
    Load,
    Lookup,
    RecordMove,
    RecordStore,
    Store,
)
from headwater.disk.tiers_faults import Faults
from headwater.disk.tiers_look import Distrusted, PrefixLook
from headwater.disk.tiers_reader import TierReader
from headwater.disk.tiers_writer import PendingStore, TierWriter

log = logging.getLogger("headwater.disk")

CLOSE_S = 5.0


class Tiers:
    """Owns its stores from here on: ``close`` closes them."""

    def __init__(
        self,
        memory: BlockMemory,
        *,
        block_tokens: int,
        clock: Clock,
        host: RecordStore | None = None,
        disk: RecordStore | None = None,
        close_s: float = CLOSE_S,
    ) -> None:
        """``clock`` must be real time: threads wait by it. ``close_s`` is what ``close``
        may take. Raises ConfigError without any store."""
        stores = [
            (tier, store)
            for tier, store in ((Tier.HOST, host), (Tier.DISK, disk))
            if store is not None
        ]
        if not stores:
            raise ConfigError("KV tiers need a host or a disk store; without any, leave them out")
        self._close_s = close_s
        self._clock = clock
        faults = Faults()
        self._reader = TierReader(
            stores,
            memory,
            look=PrefixLook(
                stores, block_tokens=block_tokens, part_bytes=memory.part_bytes, faults=faults
            ),
            clock=clock,
            faults=faults,
            distrust=self._distrust,
        )
        self._writers = {
            tier: TierWriter(
                tier,
                store,
                memory,
                clock=clock,
                faults=faults,
                # Host memory has no queue of its own in which reads would have to wait.
                wait_to_write=self._reader.wait_idle if tier is Tier.DISK else None,
            )
            for tier, store in stores
        }
        self._is_closed = False

    def look(self, tokens: Sequence[int], identity: CacheIdentity, first_row: int) -> Lookup:
        return self._reader.look(tokens, identity, first_row)

    def load(self, moves: Sequence[RecordMove]) -> Load:
        return self._reader.load(moves)

    def predicted_load_s(self, records: Sequence[StoredRecord]) -> float:
        return self._reader.predicted_load_s(records)

    def demote(self, moves: Sequence[RecordMove], retention: Retention) -> Store:
        return self._write(Tier.HOST, moves, retention)

    def store(self, moves: Sequence[RecordMove], retention: Retention) -> Store:
        return self._write(Tier.DISK, moves, retention)

    def _write(self, tier: Tier, moves: Sequence[RecordMove], retention: Retention) -> Store:
        writer = self._writers.get(tier)
        return PendingStore(0) if writer is None else writer.write(moves, retention)

    @property
    def num_queued_writes(self) -> int:
        return sum(writer.num_queued for writer in self._writers.values())

    @property
    def has_host(self) -> bool:
        return Tier.HOST in self._writers

    @property
    def has_disk(self) -> bool:
        return Tier.DISK in self._writers

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None:
        for writer in self._writers.values():
            writer.touch(keys, retention)

    def stats(self) -> tuple[StoreStats, ...]:
        return tuple(writer.stats for writer in self._writers.values())

    def close(self) -> None:
        """Takes at most about ``close_s``. A thread that hangs in a store is left behind, and
        said so; it ends with the process."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = self._clock.now_s() + self._close_s
        is_reader_gone = self._reader.close(self._close_s / 2)
        for writer in self._writers.values():
            left_s = max(0.0, until_s - self._clock.now_s())
            writer.begin_close(left_s, closes_store=is_reader_gone)
        are_writers_gone = [
            # Some more, for the batch that is being written when the time is over.
            writer.join(max(0.0, until_s - self._clock.now_s()) + self._close_s / 10)
            for writer in self._writers.values()
        ]
        if not (is_reader_gone and all(are_writers_gone)):
            log.error(
                "KV tiers: a store did not answer within %g s and is left open", self._close_s
            )

    def _distrust(self, records: Sequence[Distrusted]) -> None:
        for record in records:
            self._writers[record.tier].remove([record.key])
