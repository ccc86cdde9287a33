"""The disk tier against the disk itself: reads, writes, lookups, starts and kills.

    python -m bench.disk [--folder DIR] [--megabytes 1024] [--rows 1000000] [--kills 200]

Records are blocks of SmolLM2-135M (60 pieces of 12 kB), read into torch tensors. Reads are
cold: the files are synced and dropped from the page cache first, then read once in large pieces
(the disk) and once record by record through the store, in turn. The index of ``--rows`` rows
has no segments behind it. With ``--kills`` a writer is killed at random moments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwater.core.blocks import CacheIdentity, PrefixKey, block_keys
from headwater.core.cache import KVPart, RecordMeta, Retention, RetentionClass
from headwater.core.errors import HeadwaterError, RecordLost
from headwater.disk import rows
from headwater.disk.files import SystemFiles
from headwater.disk.folder import open_folder
from headwater.disk.index import Access, Index
from headwater.disk.publishing import NewRecord
from headwater.disk.recovery import open_index
from headwater.disk.store import DiskConfig, DiskStore

MIB = 2**20
BLOCK_TOKENS = 32
NUM_PIECES, PIECE_BYTES = 60, 12_288
RECORD_BYTES = NUM_PIECES * PIECE_BYTES
PROMPT_TOKENS = 6_080  # 190 blocks
READ_BYTES = 8 * MIB
WEEK = Retention(RetentionClass.CHAT, 7 * 86400.0)
IDENTITY = CacheIdentity("fingerprint" * 4, "kv1/bench/bf16/block32/global:30x3x64", "tenant")

KILLED_WRITER = """
import sys
from pathlib import Path
from bench.disk import kill_record, open_store, pattern
from bench.disk import WEEK
store = open_store(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 10**9):
    meta = kill_record(number)
    if store.put(meta, [memoryview(pattern(meta))], WEEK):
        print(number, flush=True)
"""


def chain(seed: int, num_blocks: int) -> list[RecordMeta]:
    rng = random.Random(seed)
    tokens = [rng.randrange(49_152) for _ in range(num_blocks * BLOCK_TOKENS)]
    parent, metas = IDENTITY.root_key(), list[RecordMeta]()
    for key, content in block_keys(parent, tokens, BLOCK_TOKENS):
        metas.append(
            RecordMeta(
                key=key,
                parent=parent,
                identity=IDENTITY,
                part=KVPart.GLOBAL,
                start=len(metas) * BLOCK_TOKENS,
                tokens=content,
            )
        )
        parent = key
    return metas


def open_store(folder: Path, max_bytes: int = 8 * 2**30) -> DiskStore:
    return DiskStore(DiskConfig(folder=folder, max_bytes=max_bytes), time.time)


def block_buffers() -> list[memoryview]:
    """One block's memory, as an engine has it. The views keep the tensor alive."""
    import torch  # not at the top: the writers that are killed start without it

    tensor = torch.randint(256, (NUM_PIECES, PIECE_BYTES), dtype=torch.uint8)
    return [memoryview(layer.numpy()) for layer in tensor]


def bench_write(folder: Path, metas: Sequence[RecordMeta]) -> None:
    """Single puts and batches of three, half of the records each, beside plain synced writes."""
    buffers = block_buffers()
    half = len(metas) // 2
    rates = []
    with contextlib.closing(open_store(folder)) as store:
        for at_once, some in ((1, metas[:half]), (3, metas[half:])):
            latencies = []
            start_s = time.perf_counter()
            for at in range(0, len(some), at_once):
                put_s = time.perf_counter()
                records = [NewRecord(meta, buffers, WEEK) for meta in some[at : at + at_once]]
                if not all(store.put_many(records)):
                    raise SystemExit(f"put failed: {store.stats().last_error}")
                latencies.append(time.perf_counter() - put_s)
            seconds = time.perf_counter() - start_s
            rates.append((at_once, len(some) * RECORD_BYTES / seconds / 1e6, latencies))
    path = folder.parent / "plain"
    with path.open("wb", buffering=0) as file:
        data = os.urandom(2 * MIB)
        start_s = time.perf_counter()
        for _ in range(half * RECORD_BYTES // len(data)):
            file.write(data)
            os.fdatasync(file.fileno())
        plain = half * RECORD_BYTES / (time.perf_counter() - start_s) / 1e6
    path.unlink()
    print(f"write, plain file, synced every 2 MiB     {plain:7.0f} MB/s")
    for at_once, rate, latencies in rates:
        print(
            f"write, {at_once} record(s) at once                {rate:7.0f} MB/s"
            f"   share {rate / plain:4.2f}   median {statistics.median(latencies) * 1e3:5.2f} ms"
            f"   p99 {sorted(latencies)[int(0.99 * len(latencies))] * 1e3:6.2f} ms"
        )


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.seg"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_plainly(folder: Path) -> float:
    """MB/s of the disk, reading the very same files from start to end."""
    buffer = memoryview(bytearray(READ_BYTES))
    num_bytes = 0
    start_s = time.perf_counter()
    for path in sorted(folder.glob("*.seg")):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        offset = 0
        while now := os.preadv(descriptor, [buffer], offset):
            offset += now
        num_bytes += offset
        os.close(descriptor)
    return num_bytes / (time.perf_counter() - start_s) / 1e6


def read_records(folder: Path, metas: Sequence[RecordMeta]) -> tuple[float, list[float]]:
    """MB/s of KV into tensors, and the seconds of each record."""
    buffers = block_buffers()
    latencies = []
    with contextlib.closing(open_store(folder)) as store:
        start_s = time.perf_counter()
        for meta in metas:
            read_s = time.perf_counter()
            store.read(meta, buffers)
            latencies.append(time.perf_counter() - read_s)
        seconds = time.perf_counter() - start_s
    return len(metas) * RECORD_BYTES / seconds / 1e6, latencies


def bench_read(folder: Path, metas: Sequence[RecordMeta]) -> None:
    plain, stored, latencies = [], [], list[float]()
    for _ in range(3):
        drop_from_cache(folder)
        plain.append(read_plainly(folder))
        drop_from_cache(folder)
        rate, some = read_records(folder, metas)
        stored.append(rate)
        latencies += some
    warm, _ = read_records(folder, metas)
    disk, ours = statistics.median(plain), statistics.median(stored)
    print(f"cold read, whole files                    {disk:7.0f} MB/s")
    print(
        f"cold read, records into tensors           {ours:7.0f} MB/s   share {ours / disk:4.2f}"
        f"   median {statistics.median(latencies) * 1e3:5.2f} ms"
        f"   p99 {sorted(latencies)[int(0.99 * len(latencies))] * 1e3:6.2f} ms"
    )
    print(f"warm read, records into tensors           {warm:7.0f} MB/s")


def new_rows(num_rows: int) -> Iterator[rows.NewRow]:
    num_blocks = PROMPT_TOKENS // BLOCK_TOKENS
    for seed in range(-(-num_rows // num_blocks)):
        for number, meta in enumerate(chain(seed, num_blocks)):
            yield rows.NewRow(
                meta=meta,
                retention=WEEK,
                payload_bytes=RECORD_BYTES,
                span_bytes=RECORD_BYTES + 4096,
                segment_id=1 + seed,
                offset=number * (RECORD_BYTES + 4096),
                last_used_s=time.time(),
            )


def bench_find(folder: Path, num_rows: int) -> None:
    opened = open_folder(SystemFiles(), folder)
    index, _ = open_index(opened, log_bytes=4 * MIB, now_s=time.time())
    start_s = time.perf_counter()
    made = new_rows(num_rows)
    num_made = 0
    while num_made < num_rows:
        with index.write() as db:
            for _, row in zip(range(50_000), made, strict=False):
                rows.insert(db, row)
                num_made += 1
    fill_s = time.perf_counter() - start_s
    index.close()
    num_chains = num_made // (PROMPT_TOKENS // BLOCK_TOKENS)
    open_s, find_s, absent_s = list[float](), list[float](), list[float]()
    rng = random.Random(4)
    for _ in range(20):
        start_s = time.perf_counter()
        index = Index(SystemFiles(), folder, Access.WRITE)
        open_s.append(time.perf_counter() - start_s)
        with contextlib.closing(index):
            for _ in range(5):
                keys = [meta.key for meta in chain(rng.randrange(num_chains), 190)]
                others = [PrefixKey(rng.randbytes(16)) for _ in keys]
                for asked, times in ((keys, find_s), (others, absent_s)):
                    start_s = time.perf_counter()
                    with index.read() as db:
                        found = rows.find(db, rows.Identities(), asked, time.time())
                    times.append(time.perf_counter() - start_s)
                    if len(found) != (len(keys) if asked is keys else 0):
                        raise SystemExit("find is wrong")
    opened.close()
    size = (folder / "index.sqlite").stat().st_size
    print(
        f"index of {num_made:,} rows: {size / MIB:.0f} MiB, filled at {num_made / fill_s:,.0f} "
        f"rows/s, opened in {statistics.median(open_s) * 1e3:.1f} ms"
    )
    for name, times in (("190 keys that are there", find_s), ("190 that are not", absent_s)):
        print(
            f"find, {name:32} median {statistics.median(times) * 1e3:5.2f} ms"
            f"   p99 {sorted(times)[int(0.99 * len(times))] * 1e3:5.2f} ms"
        )


def kill_record(number: int) -> RecordMeta:
    tokens = [number] * BLOCK_TOKENS
    ((key, content),) = block_keys(IDENTITY.root_key(), tokens, BLOCK_TOKENS)
    return RecordMeta(
        key=key,
        parent=IDENTITY.root_key(),
        identity=IDENTITY,
        part=KVPart.GLOBAL,
        start=0,
        tokens=content,
    )


def pattern(meta: RecordMeta) -> bytes:
    """Bytes that no other record has."""
    return random.Random(meta.key).randbytes(60_000)


def bench_kills(folder: Path, num_kills: int) -> None:
    rng = random.Random(4)
    published: list[int] = []
    num_wrong = num_lost = num_failed_starts = 0
    for turn in range(num_kills):
        first = turn * 10_000
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(folder), str(first)],
            stdout=subprocess.PIPE,
            text=True,
        )
        if writer.stdout is None:
            raise SystemExit("no pipe")
        line = writer.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.05))
        writer.kill()
        output, _ = writer.communicate()
        fresh = [int(word) for word in (line + output).split()]
        num_failed_starts += not fresh
        published += fresh
        try:
            store = open_store(folder)
        except HeadwaterError:
            num_failed_starts += 1
            continue
        with contextlib.closing(store):
            # All of this round's, and some of the earlier ones.
            for number in {*fresh, *rng.sample(published, min(50, len(published)))}:
                meta = kill_record(number)
                into = bytearray(60_000)
                try:
                    store.read(meta, [memoryview(into)])
                except RecordLost:
                    num_lost += 1
                else:
                    num_wrong += bytes(into) != pattern(meta)
    print(
        f"{num_kills} kills, {len(published):,} records published: wrong hits {num_wrong}, "
        f"lost published records {num_lost}, failed starts {num_failed_starts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The disk tier against the disk itself.")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--megabytes", type=int, default=1024, help="of records; 0: no reads")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the index; 0: no lookups")
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        if arguments.megabytes:
            num_blocks = max(6, arguments.megabytes * 10**6 // RECORD_BYTES)
            metas = [meta for seed in range(-(-num_blocks // 190)) for meta in chain(seed, 190)]
            bench_write(home / "records", metas[:num_blocks])
            bench_read(home / "records", metas[:num_blocks])
        if arguments.rows:
            bench_find(home / "rows", arguments.rows)
        if arguments.kills:
            bench_kills(home / "kills", arguments.kills)
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
