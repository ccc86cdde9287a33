"""The tiers over the real stores: host memory and a folder, restarts, damage, purge."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from disk_parts import BLOCK, US, WEEK, chain
from disk_tiers_harness import (
    SIZES,
    ArrayMemory,
    RealClock,
    moves,
    num_threads,
    payload,
    wait_until,
    windows,
)

from headwater.core.blocks import BlockId, CacheIdentity
from headwater.core.cache import KVPart, MissReason, RecordMeta, Tier
from headwater.core.ports import RecordMove, StoredPrefix
from headwater.disk.host import RECORD_OVERHEAD_BYTES, HostStore
from headwater.disk.store import DiskConfig, DiskStore
from headwater.disk.tiers import Tiers

NUM_BLOCKS = 64


class Worker:
    """One process's life: device memory, a small host tier, the shared folder."""

    def __init__(self, folder: Path, *, host_records: int = 8) -> None:
        self.memory = ArrayMemory(NUM_BLOCKS, has_window=True)
        span = SIZES[KVPart.GLOBAL] + RECORD_OVERHEAD_BYTES
        self.disk = DiskStore(
            DiskConfig(folder=folder, max_bytes=2**26, reserve_bytes=0), time.time
        )
        self.host = HostStore(max_bytes=host_records * span, clock=RealClock())
        self.tiers = Tiers(
            self.memory, block_tokens=BLOCK, clock=RealClock(), host=self.host, disk=self.disk
        )

    def look(self, tokens: Sequence[int], identity: CacheIdentity = US) -> StoredPrefix:
        lookup = self.tiers.look(tokens, identity, 0)
        wait_until(lambda: lookup.is_done)
        return lookup.result()

    def keep(self, metas: Sequence[RecordMeta], *, demote: bool = False) -> None:
        parts = windows(metas)
        wanted = moves(metas) + moves(parts)
        for move in wanted:
            self.memory.fill(move)
        do = self.tiers.demote if demote else self.tiers.store
        kept = do(wanted, WEEK)
        wait_until(lambda: kept.is_done)

    def assert_loads(self, prefix: StoredPrefix) -> None:
        """Every record of it gives exactly the bytes that were computed for it."""
        rows = [*prefix.rows, *([prefix.tail] if prefix.tail else [])]
        found = [
            RecordMove(record.meta, BlockId(20 + i))
            for i, row in enumerate(rows)
            for record in (row.record, row.window)
            if record is not None
        ]
        load = self.tiers.load(found)
        wait_until(lambda: load.is_done)
        assert (load.num_loaded, load.failure) == (len(found), None)
        for move in found:
            assert self.memory.bytes_of(move.block, move.meta.part) == payload(move.meta)


def test_c04_prefixes_are_found_and_loaded_after_a_restart(tmp_path: Path) -> None:
    metas = chain(range(6 * BLOCK + 3))
    first = Worker(tmp_path)
    first.keep(metas)
    first.tiers.close()
    second = Worker(tmp_path)
    prefix = second.look(range(7 * BLOCK))
    assert [row.record.meta for row in prefix.rows] == metas[:6]
    assert prefix.num_tail_tokens == 3
    assert {row.record.tier for row in prefix.rows} == {Tier.DISK}
    assert all(row.window is not None for row in prefix.rows)
    second.assert_loads(prefix)
    assert second.look(range(50, 70)).reason is MissReason.NEW
    second.tiers.close()
    assert num_threads() == 0


def test_random_conversations_through_both_tiers_and_restarts_give_their_own_bytes(
    tmp_path: Path,
) -> None:
    """What the folder was given is found again whatever the host tier still has."""
    draw = random.Random(7)
    worker = Worker(tmp_path)
    kept: dict[bytes, RecordMeta] = {}
    for _ in range(40):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 5 * BLOCK))]
        match draw.randrange(4):
            case 0:
                worker.tiers.close()
                worker = Worker(tmp_path)
            case 1:
                metas = chain(tokens)
                worker.keep(metas)
                kept |= {meta.key: meta for meta in metas if len(meta.tokens) == BLOCK}
            case 2:
                worker.keep(chain(tokens), demote=True)
            case _:
                prefix = worker.look(tokens)
                worker.assert_loads(prefix)
                whole = chain(tokens)[: len(tokens) // BLOCK]
                num_kept = next(
                    (i for i, meta in enumerate(whole) if meta.key not in kept), len(whole)
                )
                assert len(prefix.rows) >= num_kept
    assert all(stats.num_damaged == stats.num_errors == 0 for stats in worker.tiers.stats())
    worker.tiers.close()


def test_c01_bytes_that_changed_on_disk_end_the_load_and_the_next_look_says_damaged(
    tmp_path: Path,
) -> None:
    metas = chain(range(4 * BLOCK))
    worker = Worker(tmp_path)
    worker.keep(metas)
    worker.tiers.close()
    (segment,) = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and payload(metas[2]) in path.read_bytes()
    ]
    content = bytearray(segment.read_bytes())
    content[content.index(payload(metas[2])) + 50] ^= 1
    segment.write_bytes(content)

    worker = Worker(tmp_path)
    prefix = worker.look(range(4 * BLOCK))
    assert len(prefix.rows) == 4, "only reading shows it"
    load = worker.tiers.load(
        [RecordMove(row.record.meta, BlockId(i)) for i, row in enumerate(prefix.rows)]
    )
    wait_until(lambda: load.is_done)
    assert (load.num_loaded, load.failure) == (2, MissReason.DAMAGED)
    assert worker.memory.bytes_of(3) == bytes(SIZES[KVPart.GLOBAL])
    again = worker.look(range(4 * BLOCK))
    assert (len(again.rows), again.reason) == (2, MissReason.DAMAGED)
    worker.keep(metas)  # computed again, kept again
    worker.assert_loads(worker.look(range(4 * BLOCK)))
    worker.tiers.close()


def test_c08_c12_other_models_and_tenants_are_told_and_never_hit(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    tokens = range(2 * BLOCK)
    worker.keep(chain(tokens, CacheIdentity("model-2", "layout", "tenant")))
    assert worker.look(tokens) == StoredPrefix(first_row=0, reason=MissReason.OTHER_MODEL)
    worker.keep(chain(range(40, 60), CacheIdentity("model", "layout", "them")))
    assert worker.look(range(40, 60)) == StoredPrefix(first_row=0, reason=MissReason.OTHER_TENANT)
    worker.tiers.close()


def test_purge_by_another_process_during_loads_ends_them_with_whole_records(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    other = DiskStore(DiskConfig(folder=tmp_path, max_bytes=2**26, reserve_bytes=0), time.time)
    metas = chain(range(16 * BLOCK))
    keys = [meta.key for meta in metas]
    for _ in range(6):
        worker.keep(metas)
        load = worker.tiers.load(moves(metas, 30))
        purge = threading.Thread(target=other.remove, args=(keys,))
        purge.start()
        wait_until(lambda load=load: load.is_done)  # type: ignore[misc]
        purge.join()
        assert load.failure in (None, MissReason.EVICTED)
        for block in range(load.num_loaded):
            assert worker.memory.bytes_of(30 + block) == payload(metas[block])
        assert worker.look(range(16 * BLOCK)).rows == ()
    other.close()
    worker.tiers.close()


def test_c06_workers_that_share_a_folder_keep_the_same_prompts_at_once(tmp_path: Path) -> None:
    workers = [Worker(tmp_path) for _ in range(2)]
    prompts = [range(start, start + 5 * BLOCK) for start in range(0, 80, 10)]
    threads = [
        threading.Thread(target=lambda w=w: [w.keep(chain(prompt)) for prompt in prompts])
        for w in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        for worker in workers:
            prefix = worker.look(prompt)
            assert len(prefix.rows) == 5
            worker.assert_loads(prefix)
    for worker in workers:
        worker.tiers.close()
