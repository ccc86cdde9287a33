"""DiskStore: KV records in a folder, for days, shared by processes, under one hard cap.

The door of the disk tier; implements ``core.ports.RecordStore``. What it does lies in the files
beside it: ``publishing`` puts, ``reading`` reads, ``upkeep`` makes room and lets go, ``recovery``
opens. Knows nothing of tensors, models or requests. Calls block; any thread may make them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.cache import (
    MissReason,
    RecordMeta,
    Retention,
    StoredRecord,
    StoreStats,
    Tier,
)
from headwater.core.errors import ConfigError, RecordLost, StoreError
from headwater.disk import rows
from headwater.disk.capacity_plan import (
    GIB,
    MIB,
    describe_capacity,
    plan_capacity,
    plan_limits,
)
from headwater.disk.counters import Counters
from headwater.disk.files import Files, SystemFiles
from headwater.disk.folder import REBUILD_NAME, OpenFolder, open_folder, segment_files
from headwater.disk.index import IndexFault
from headwater.disk.publishing import NewRecord, NoRoom, Publisher
from headwater.disk.reading import DamagedRecord, RecordReader
from headwater.disk.record_format import ALIGN_BYTES
from headwater.disk.recovery import open_index
from headwater.disk.segments import SegmentReaders, SegmentWriters, drop_files, wipe
from headwater.disk.upkeep import Upkeep

log = logging.getLogger("headwater.disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """``max_bytes``: hard cap on all files in ``folder``, of all processes that share it; None:
    planned from the free space. ``reserve_bytes`` of free space on that disk are never used."""

    folder: Path
    max_bytes: int | None = None
    reserve_bytes: int = GIB
    segment_bytes: int = 64 * MIB
    max_open_files: int = 64  # to read with
    sweep_s: float = 60.0  # between looks for what expired or was left behind

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise ConfigError(f"disk.max_bytes must be > 0, got {self.max_bytes}")
        if self.reserve_bytes < 0:
            raise ConfigError(f"disk.reserve_bytes must be >= 0, got {self.reserve_bytes}")
        if self.segment_bytes < ALIGN_BYTES:
            raise ConfigError(
                f"disk.segment_bytes must be >= {ALIGN_BYTES}, got {self.segment_bytes}"
            )
        if self.max_open_files < 1:
            raise ConfigError(f"disk.max_open_files must be >= 1, got {self.max_open_files}")
        if self.sweep_s <= 0:
            raise ConfigError(f"disk.sweep_s must be > 0, got {self.sweep_s}")


class DiskStore:
    """One process's hold on a folder. ``repairs`` says what the start put right."""

    def __init__(
        self, config: DiskConfig, now_s: Callable[[], float], files: Files | None = None
    ) -> None:
        """``now_s``: unix seconds, because ages outlive processes. Raises StoreError, which says
        what to change."""
        self._config = config
        self._now_s = now_s
        self._files: Files = SystemFiles() if files is None else files
        self._counters = Counters()
        self._write_lock = threading.Lock()
        self._break_lock = threading.Lock()
        self._is_closed = False
        self._is_broken = False
        self._identities = rows.Identities()
        with contextlib.ExitStack() as undo:
            folder = open_folder(self._files, config.folder)
            undo.callback(folder.close)
            self._open(folder, undo)
            undo.pop_all()

    def _open(self, folder: OpenFolder, undo: contextlib.ExitStack) -> None:
        files, path, config = self._files, folder.path, self._config
        self._folder = folder
        self.max_bytes = self._plan_max_bytes()
        limits = plan_limits(
            max_bytes=self.max_bytes,
            reserve_bytes=config.reserve_bytes,
            segment_bytes=config.segment_bytes,
        )
        now_s = self._now_s()
        self._index, self.repairs = open_index(folder, log_bytes=limits.log_bytes, now_s=now_s)
        undo.callback(self._index.close)
        self._readers = SegmentReaders(files, path, config.max_open_files)
        self._writers = SegmentWriters(files, path, limits.segment_bytes)
        self._reader = RecordReader(index=self._index, readers=self._readers)
        self._upkeep = Upkeep(
            index=self._index, files=files, folder=path, writers=self._writers, limits=limits
        )
        self._upkeep.other_bytes = self.repairs.other_bytes
        self._publisher = Publisher(
            index=self._index,
            files=files,
            folder=path,
            writers=self._writers,
            upkeep=self._upkeep,
            limits=limits,
            counters=self._counters,
        )
        self._limits = limits
        self._next_sweep_s = (now_s, now_s)
        folder.share()
        if folder.is_writable:
            self.sweep()
            self._enforce_cap(now_s)

    @property
    def is_writable(self) -> bool:
        return self._folder.is_writable and not self._is_broken and not self._is_closed

    def find(self, keys: Sequence[PrefixKey]) -> list[StoredRecord | None]:
        if not keys or self._is_broken:
            return [None] * len(keys)
        try:
            with self._index.read() as db:
                found = rows.find(db, self._identities, keys, self._now_s())
        except IndexFault as fault:
            self._failed(fault)
            return [None] * len(keys)
        self._counters.found(len(found))
        return [
            StoredRecord(found[key][0], Tier.DISK, found[key][1]) if key in found else None
            for key in keys
        ]

    def children(self, parent: PrefixKey, limit: int) -> list[StoredRecord]:
        if self._is_broken:
            return []
        try:
            with self._index.read() as db:
                found = rows.children(db, self._identities, parent, limit, self._now_s())
        except IndexFault as fault:
            self._failed(fault)
            return []
        return [StoredRecord(meta, Tier.DISK, num_bytes) for meta, num_bytes in found]

    def identities_of_first_block(self, tokens: Sequence[int]) -> list[CacheIdentity]:
        """Under which identities a first block of exactly these tokens is kept."""
        if self._is_broken:
            return []
        try:
            with self._index.read() as db:
                return rows.identities_of_first_block(db, self._identities, tokens, self._now_s())
        except IndexFault as fault:
            self._failed(fault)
            return []

    def put(self, meta: RecordMeta, data: Sequence[memoryview], retention: Retention) -> bool:
        return self.put_many([NewRecord(meta, data, retention)])[0]

    def put_many(self, records: Sequence[NewRecord]) -> list[bool]:
        """As ``put`` for each, with one sync and one commit: for a few records at once."""
        with self._write_lock:
            present: set[bytes] = set()
            if self.is_writable:
                now_s = self._now_s()
                try:
                    self._sweep_if_due(now_s)
                    present = self._publisher.publish(records, now_s)
                except (NoRoom, OSError, IndexFault) as error:
                    self._failed(error)
            return [record.meta.key in present for record in records]

    def read(self, meta: RecordMeta, into: Sequence[memoryview]) -> None:
        if self._is_broken:
            raise RecordLost("the store's index is damaged", is_damaged=False)
        try:
            self._reader.read(meta, into, self._now_s())
        except DamagedRecord as damage:
            self._counters.damaged(str(damage))
            self._drop_damaged(meta.key, damage.place)
            raise RecordLost(f"a check failed: {damage}", is_damaged=True) from damage
        except (OSError, IndexFault) as error:
            self._failed(error)
            raise RecordLost("the system refused to read it", is_damaged=False) from error
        self._counters.loaded(sum(piece.nbytes for piece in into))

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None:
        if not self.is_writable or retention.keep_s <= 0:
            return
        try:
            with self._index.write() as db:
                rows.touch(db, keys, retention, self._now_s())
        except IndexFault as fault:
            self._failed(fault)

    def remove(self, keys: Sequence[PrefixKey]) -> None:
        if not self.is_writable:
            return
        try:
            with self._index.write() as db:
                gone = rows.delete(db, keys)
                empty = rows.delete_empty(db, (place.segment_id for _, place in gone))
        except IndexFault as fault:
            self._failed(fault)
            return
        self._drop_files(empty)
        for _, place in gone:
            wipe(self._files, self._folder.path, place.name, place.offset, ALIGN_BYTES)

    def absence(self, key: PrefixKey) -> MissReason:
        if self._is_broken:
            return MissReason.UNAVAILABLE
        try:
            with self._index.read() as db:
                return rows.absence(db, key, self._now_s())
        except IndexFault as fault:
            self._failed(fault)
            return MissReason.UNAVAILABLE

    def sweep(self) -> None:
        """Let go of what expired or was left behind. ``put`` does it now and then; a process
        that only reads may call it."""
        with self._write_lock:
            if self.is_writable:
                try:
                    self._sweep_if_due(self._now_s(), is_forced=True)
                except (OSError, IndexFault) as error:
                    self._failed(error)

    def stats(self) -> StoreStats:
        num_records = num_bytes = 0
        if not (self._is_broken or self._is_closed):
            try:
                with self._index.read() as db:
                    num_records, _ = rows.counts(db)
                    num_bytes = self._upkeep.used_bytes(db)
            except IndexFault as fault:
                self._failed(fault)
        counters, gone = self._counters, self._upkeep.gone
        return StoreStats(
            tier=Tier.DISK,
            num_records=num_records,
            num_bytes=num_bytes,
            max_bytes=self.max_bytes,
            num_found=counters.num_found,
            num_loaded=counters.num_loaded,
            num_loaded_bytes=counters.num_loaded_bytes,
            num_put=counters.num_put,
            num_put_bytes=counters.num_put_bytes,
            num_refused=counters.num_refused,
            num_evicted=gone.num_evicted,
            num_expired=gone.num_expired,
            num_damaged=counters.num_damaged + gone.num_damaged,
            num_errors=counters.num_errors + gone.num_errors,
            is_writable=self.is_writable,
            last_error=counters.last_error,
        )

    def describe(self, *, bytes_per_token: int, record_tokens: int, keep_s: float) -> str:
        """One line for the start-up log; ``record_tokens``: tokens of a block."""
        stats = self.stats()
        return describe_capacity(
            max_bytes=self.max_bytes,
            used_bytes=stats.num_bytes,
            bytes_per_token=bytes_per_token,
            record_tokens=record_tokens,
            overhead_bytes=ALIGN_BYTES,
            keep_s=keep_s,
        )

    def close(self) -> None:
        with self._write_lock:
            if self._is_closed:
                return
            if self.is_writable:
                try:
                    self._upkeep.retire_all()
                except (OSError, IndexFault) as error:
                    self._failed(error)
            self._is_closed = True
            self._writers.close()
            self._readers.close()
            self._index.close()
            self._folder.close()

    def _plan_max_bytes(self) -> int:
        path = self._folder.path
        try:
            free_bytes = self._files.free_bytes(path)
            used_bytes = sum(segment_files(path).values())
        except OSError as error:
            raise StoreError(f"the cache folder {path}: {error.strerror}") from error
        if not self._folder.is_writable:
            return max(used_bytes, MIB)
        return plan_capacity(
            max_bytes=self._config.max_bytes,
            free_bytes=free_bytes,
            reserve_bytes=self._config.reserve_bytes,
            used_bytes=used_bytes,
        )

    def _enforce_cap(self, now_s: float) -> None:
        """A lower cap than last time, or files found at start, take effect at once."""
        with self._write_lock:
            try:
                with self._index.write() as db:
                    rows.set_fact(db, rows.MAX_BYTES_FACT, self.max_bytes)
                self._upkeep.evict(0, now_s)
            except (OSError, IndexFault) as error:
                self._failed(error)

    def _sweep_if_due(self, now_s: float, *, is_forced: bool = False) -> None:
        earliest_s, latest_s = self._next_sweep_s
        if not is_forced and earliest_s <= now_s < latest_s:
            return
        # A clock that was set back makes the next sweep due as well.
        self._next_sweep_s = (now_s, now_s + self._config.sweep_s)
        self._upkeep.sweep(now_s)

    def _drop_damaged(self, key: PrefixKey, place: rows.Place) -> None:
        if not self.is_writable:
            return
        try:
            with self._index.write() as db:
                if not rows.delete_at(db, key, place):
                    return
                rows.bury(db, [key], MissReason.DAMAGED, self._limits.max_tombstones)
                empty = rows.delete_empty(db, [place.segment_id])
        except IndexFault as fault:
            self._failed(fault)
            return
        self._drop_files(empty)

    def _drop_files(self, names: Sequence[str]) -> None:
        self._readers.forget(names)
        for error in drop_files(self._files, self._folder.path, names):
            self._failed(error)

    def _failed(self, error: OSError | IndexFault | NoRoom) -> None:
        message = str(error)
        if isinstance(error, OSError):
            message = errno.errorcode.get(error.errno or 0, "OSError")  # without the path
        self._counters.failed(message)
        if isinstance(error, IndexFault) and error.is_corrupt:
            self._give_up()

    def _give_up(self) -> None:
        """The index is damaged: nothing that it says can be trusted. This store serves nothing
        more, and lets go of the folder, so that the next that starts may build it anew."""
        with self._break_lock:
            if self._is_broken or not self._folder.is_writable:
                return
            self._is_broken = True
            try:
                self._files.close(self._files.create(self._folder.path / REBUILD_NAME))
            except FileExistsError:
                pass  # another process found it as well
            except OSError:
                self._counters.failed("the index is damaged, and a mark of it cannot be written")
            self._folder.close()
        log.error("the index of the disk tier is damaged; it is built anew at the next start")
