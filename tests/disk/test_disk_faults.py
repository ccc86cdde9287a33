"""What the store does when the system refuses, and when bytes are not what they were."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_parts import (
    BLOCK,
    DAY_S,
    DAYS,
    MIB,
    SIZE,
    US,
    WEEK,
    FaultyFiles,
    SetClock,
    chain,
    content,
    disk_bytes,
    first_blocks,
    kept,
    open_store,
    pieces,
    put,
    read,
    segments,
)

from headwater.core.blocks import PrefixKey
from headwater.core.cache import MissReason, RecordMeta
from headwater.core.errors import RecordLost, StoreError
from headwater.disk.files import SystemFiles
from headwater.disk.publishing import NewRecord
from headwater.disk.store import DiskStore

WRITES = ("write", "sync", "commit", "create")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def must_be_true(store: DiskStore, metas: list[RecordMeta]) -> set[PrefixKey]:
    """Every record that is found reads as it was written, or is lost; gives those that read."""
    true = set()
    for meta, found in zip(metas, store.find([meta.key for meta in metas]), strict=True):
        if found is None or found.meta != meta:
            continue
        with contextlib.suppress(RecordLost):
            assert read(store, meta) == content(meta)
            true.add(meta.key)
    return true


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", WRITES)
def test_c02_a_put_that_fails_leaves_nothing_and_the_next_one_works(
    folder: Path, call: str, code: int
) -> None:
    files = FaultyFiles()
    metas = chain(range(4 * BLOCK))
    with contextlib.closing(open_store(folder, files=files)) as store:
        put(store, metas[:2], DAYS)
        files.refused = {call: code}
        # Another retention: a segment must be made.
        assert put(store, [metas[2]], WEEK) == [False]
        assert put(store, [metas[3]], WEEK) == [False]
        assert store.stats().num_errors >= 2
        assert store.stats().last_error
        assert kept(store, metas) == [True, True, False, False]
        with pytest.raises(RecordLost) as lost:
            read(store, metas[2])
        assert not lost.value.is_damaged
        assert store.absence(metas[2].key) is MissReason.NEW
        files.refused = {}
        assert put(store, metas[2:], WEEK) == [True, True]
        assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]
    with contextlib.closing(open_store(folder)) as store:
        assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]
        assert store.repairs.num_lost_records == 0
    used = sum(path.stat().st_size for path in segments(folder))
    assert used == 4 * 3 * 4096  # nothing of the failed ones is left: a header page, two of KV


def test_c02_in_a_batch_only_what_could_not_be_written_is_missing(folder: Path) -> None:
    files = FaultyFiles()
    days, week = first_blocks([1, 2])
    with contextlib.closing(open_store(folder, files=files)) as store:
        put(store, first_blocks([8]), DAYS)
        files.refuse_call = files.num_calls + 5  # room, file, first write, then the second
        files.refuse_errno = errno.EIO
        records = [
            NewRecord(meta, pieces(content(meta)), retention)
            for meta, retention in ((days, DAYS), (week, WEEK))
        ]
        done = store.put_many(records)
        assert files.num_refused == 1
        assert sorted(done) == [False, True]
        assert kept(store, [days, week]) == done
        assert must_be_true(store, [days, week]) == {
            meta.key for meta, is_there in zip((days, week), done, strict=True) if is_there
        }


def a_day_of_work(store: DiskStore, clock: SetClock, metas: list[RecordMeta]) -> set[PrefixKey]:
    """Everything that a store does; gives the keys that it said are there and never took back."""
    there: set[PrefixKey] = set()
    for number, meta in enumerate(metas):
        clock.at_s += 0.5 * DAY_S
        if put(store, [meta], DAYS if number % 2 else WEEK) == [True]:
            there.add(meta.key)
        if number == 3:
            store.touch([metas[0].key], WEEK)
        if number == 4:
            store.remove([metas[1].key])
            there.discard(metas[1].key)
    store.sweep()
    return there


def test_c02_whichever_call_fails_nothing_wrong_is_ever_served(folder: Path) -> None:
    """Calls all over a store's life, each refused in turn, the first opening included."""
    metas = chain(range(8 * BLOCK))
    num_opened, call = 0, -4
    while True:
        call += 5
        files = FaultyFiles()
        files.refuse_call = call
        files.refuse_errno = errno.EIO if call % 2 else errno.ENOSPC
        clock = SetClock()
        there: set[PrefixKey] = set()
        with (
            contextlib.suppress(StoreError),
            contextlib.closing(
                open_store(folder, clock, files=files, max_bytes=16 * MIB, segment_bytes=3 * 4096)
            ) as store,
        ):
            num_opened += 1
            there = a_day_of_work(store, clock, metas)
            must_be_true(store, metas)
        with contextlib.closing(open_store(folder, clock, max_bytes=16 * MIB)) as store:
            now_there = must_be_true(store, metas)
            expired = {m.key for m in metas if store.absence(m.key) is MissReason.EXPIRED}
            damaged = {m.key for m in metas if store.absence(m.key) is MissReason.DAMAGED}
            assert there <= now_there | expired | damaged
            assert not damaged or files.refuse_errno == errno.EIO
            assert put(store, metas) == [True] * 8
            assert must_be_true(store, metas) == {meta.key for meta in metas}
            assert store.stats().num_bytes >= disk_bytes(folder) - MIB
        shutil.rmtree(folder)
        if not files.num_refused:
            break
    assert call > 60
    assert num_opened > 8


def test_evictions_go_on_when_moving_and_unlinking_fail(folder: Path) -> None:
    clock, files = SetClock(), FaultyFiles()
    max_bytes = 16 * MIB
    with contextlib.closing(open_store(folder, clock, files=files, max_bytes=max_bytes)) as store:
        for number in range(200):
            clock.at_s += 1
            files.refused = {"unlink": errno.EIO, "read": errno.EIO} if number % 3 else {}
            put(store, first_blocks([number]), size=200_000)
            assert disk_bytes(folder) <= max_bytes
        files.refused = {}
        assert store.stats().num_evicted > 50
        store.sweep()
        assert put(store, first_blocks([1000])) == [True]


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ (1 << bit)]))


def test_c01_a_flipped_bit_in_data_or_header_is_a_miss_and_a_count(folder: Path) -> None:
    """Every field of the header and places all over the payload."""
    (meta,) = first_blocks([1])
    header_bytes = 106 + len("model") + len("layout") + len("tenant") + 4 * BLOCK
    places = [*range(0, header_bytes, 3), *range(4096, 4096 + SIZE, 499)]
    with contextlib.closing(open_store(folder)) as store:
        for number, position in enumerate(places):
            assert put(store, [meta]) == [True]
            path = max(segments(folder), key=lambda path: path.stat().st_mtime_ns)
            at = path.stat().st_size - 3 * 4096
            flip(path, at + position, number % 8)
            with pytest.raises(RecordLost) as lost:
                read(store, meta)
            assert lost.value.is_damaged, position
            assert kept(store, [meta]) == [False]
            assert store.absence(meta.key) is MissReason.DAMAGED
            assert store.stats().num_damaged == number + 1
        put(store, [meta])
        assert read(store, meta) == content(meta)


def test_a_flipped_bit_in_the_padding_is_nobodys_loss(folder: Path) -> None:
    (meta,) = first_blocks([1])
    with contextlib.closing(open_store(folder)) as store:
        put(store, [meta])
        flip(segments(folder)[0], 4000, 1)
        assert read(store, meta) == content(meta)


def test_c01_flipped_bits_in_the_index_never_give_wrong_bytes_nor_a_failed_start(
    folder: Path, tmp_path: Path
) -> None:
    metas = chain(range(30 * BLOCK + 1))
    with contextlib.closing(open_store(tmp_path / "whole")) as store:
        put(store, metas)
    size = (tmp_path / "whole" / "index.sqlite").stat().st_size
    rng = random.Random(4)
    num_whole = 0
    for _ in range(20):
        shutil.copytree(tmp_path / "whole", folder)
        for _ in range(8):
            # Pages near the beginning hold the schema; most flips hit rows and inner nodes.
            flip(folder / "index.sqlite", rng.randrange(size), rng.randrange(8))
        for _ in range(2):  # what is found out at run time is put right at the next start
            with contextlib.closing(open_store(folder)) as store:
                must_be_true(store, metas)
                put(store, metas)
                must_be_true(store, metas)
        with contextlib.closing(open_store(folder)) as store:
            put(store, metas)
            num_whole += must_be_true(store, metas) == {meta.key for meta in metas}
        shutil.rmtree(folder)
    assert num_whole >= 17


@pytest.mark.parametrize("harm", ["no index", "no database", "cut", "an empty file", "no tables"])
def test_a_lost_index_is_built_anew_from_the_segments(folder: Path, harm: str) -> None:
    clock = SetClock()
    metas = chain(range(20 * BLOCK + 3))
    with contextlib.closing(open_store(folder, clock, segment_bytes=64 * 1024)) as store:
        put(store, metas[:10], DAYS)
        clock.at_s += 2 * DAY_S
        put(store, metas[10:], WEEK)
        store.remove([metas[12].key])
    index = folder / "index.sqlite"
    whole = index.read_bytes()
    match harm:
        case "no index":
            index.unlink()
        case "no database":
            index.write_bytes(b"these are no pages" * 1000)
        case "cut":
            index.write_bytes(whole[: len(whole) // 2])
        case "an empty file":
            index.write_bytes(b"")
        case _:
            index.write_bytes(whole[:100] + bytes(len(whole) - 100))
    clock.at_s += 2 * DAY_S
    with contextlib.closing(open_store(folder, clock)) as store:
        put(store, metas[-1:])  # where the start did not notice, this does
        store.find([meta.key for meta in metas])
    with contextlib.closing(open_store(folder, clock)) as store:
        # The first ten expired meanwhile, the removed one does not come back.
        there = [meta for number, meta in enumerate(metas) if number > 9 and number != 12]
        assert kept(store, metas) == [meta in there for meta in metas]
        assert [read(store, meta) for meta in there] == [content(meta) for meta in there]


def test_a_damaged_index_is_not_repaired_under_another_server(folder: Path) -> None:
    metas = first_blocks(range(3))
    with contextlib.closing(open_store(folder)) as first:
        put(first, metas)
        for name in ("index.sqlite", "index.sqlite-wal"):
            (folder / name).write_bytes(b"these are no pages" * 1000)
        with pytest.raises(StoreError, match="stop the other servers"):
            open_store(folder)
    with contextlib.closing(open_store(folder)) as store:
        put(store, metas)
        assert must_be_true(store, metas) == {meta.key for meta in metas}


def test_a_store_that_finds_its_index_damaged_serves_nothing_and_lets_others_repair_it(
    folder: Path,
) -> None:
    metas = chain(range(40 * BLOCK))
    with contextlib.closing(open_store(folder)) as store:
        put(store, metas)
    with contextlib.closing(open_store(folder)) as broken:
        index = folder / "index.sqlite"
        size = index.stat().st_size
        with index.open("r+b") as file:  # the schema stays whole
            file.seek(4096 * 3)
            file.write(b"\xff" * (size - 4096 * 3))
        assert kept(broken, metas) == [False] * 40
        assert broken.absence(metas[0].key) is MissReason.UNAVAILABLE
        assert put(broken, metas[:1]) == [False]
        assert broken.children(metas[0].key, 3) == []
        with pytest.raises(RecordLost):
            read(broken, metas[0])
        assert (broken.stats().is_writable, broken.stats().num_records) == (False, 0)
        with contextlib.closing(open_store(folder)) as store:
            assert store.repairs.num_rebuilt_records == 40
            assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]
            assert (folder / "index.damaged").exists()
            assert not (folder / "rebuild").exists()


def test_c04_what_a_dead_process_left_is_cut_off_or_dropped(folder: Path) -> None:
    metas = first_blocks(range(3))
    with contextlib.closing(open_store(folder)) as store:
        put(store, metas)
    (path,) = segments(folder)
    (folder / "20001-00000000deadbeef.seg").write_bytes(bytes(100_000))
    with contextlib.closing(open_store(folder)) as store:
        assert segments(folder) == [path]
        assert store.repairs.num_files == 1
        assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]


def test_rows_never_point_past_the_end_of_a_file(folder: Path) -> None:
    metas = first_blocks(range(4))
    with contextlib.closing(open_store(folder)) as store:
        put(store, metas)
    (path,) = segments(folder)
    with path.open("r+b") as file:
        file.truncate(2 * 3 * 4096 + 5000)  # in the middle of the third
    with contextlib.closing(open_store(folder)) as store:
        assert kept(store, metas) == [True, True, False, False]
        assert store.repairs.num_lost_records == 2
        assert put(store, metas) == [True] * 4
        assert must_be_true(store, metas) == {meta.key for meta in metas}


def test_a_file_that_somebody_deleted_is_a_miss(folder: Path) -> None:
    metas = first_blocks(range(3))
    with contextlib.closing(open_store(folder)) as store:
        put(store, metas)
    segments(folder)[0].unlink()
    with contextlib.closing(open_store(folder)) as store:
        assert kept(store, metas) == [False] * 3
        put(store, metas)
        segments(folder)[0].unlink()  # and while it runs
        with pytest.raises(RecordLost):
            read(store, metas[1])
        assert kept(store, metas) == [True, False, True]


def test_removals_and_evictions_during_reads_are_losses_and_never_wrong_bytes(
    folder: Path,
) -> None:
    clock = SetClock()
    metas = first_blocks(range(30))
    faults: list[BaseException] = []
    is_over = threading.Event()
    num_read = [0]

    def read_on(store: DiskStore, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not is_over.is_set():
                meta = rng.choice(metas)
                try:
                    assert read(store, meta, 100_000) == content(meta, 100_000)
                    num_read[0] += 1
                except RecordLost as lost:
                    if lost.is_damaged:
                        faults.append(lost)
        except BaseException as fault:
            faults.append(fault)

    with contextlib.closing(
        open_store(folder, clock, max_bytes=16 * MIB, segment_bytes=400_000)
    ) as store:
        threads = [threading.Thread(target=read_on, args=(store, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(40):
            clock.at_s += 0.3 * DAY_S
            put(store, metas[turn % 20 : turn % 20 + 10], DAYS, size=100_000)
            store.touch([meta.key for meta in metas[::7]], DAYS)
            store.remove([metas[turn % 30].key])
            store.sweep()
        is_over.set()
        for thread in threads:
            thread.join()
        assert not faults
        assert num_read[0] > 0
        assert store.stats().num_damaged == 0


def test_a_record_that_moves_while_it_is_read_is_read_at_its_new_place(folder: Path) -> None:
    clock = SetClock()
    metas = first_blocks(range(20))

    class MovingFiles(SystemFiles):
        other: DiskStore | None = None

        def read(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
            other, self.other = self.other, None
            if other is not None:
                other.sweep()
            return super().read(descriptor, pieces, offset)

    files = MovingFiles()
    with (
        contextlib.closing(open_store(folder, clock)) as other,
        contextlib.closing(open_store(folder, clock, files=files)) as store,
    ):
        put(other, metas, DAYS)
        (path,) = segments(folder)
        clock.at_s += 2 * DAY_S
        store.touch([metas[3].key], DAYS)
        clock.at_s += 2 * DAY_S
        files.other = other
        assert read(store, metas[3]) == content(metas[3])
        assert not path.exists()
        assert store.stats().num_damaged == 0


def test_a_damaged_record_is_not_carried_along_when_others_move(folder: Path) -> None:
    clock = SetClock()
    metas = first_blocks(range(20))
    with contextlib.closing(open_store(folder, clock)) as store:
        put(store, metas, DAYS)
        (path,) = segments(folder)
        flip(path, 3 * 3 * 4096 + 4096 + 77, 1)
        clock.at_s += 2 * DAY_S
        store.touch([metas[3].key, metas[4].key], DAYS)
        clock.at_s += 2 * DAY_S
        store.sweep()
        assert not path.exists()
        assert kept(store, metas[3:5]) == [False, True]
        assert read(store, metas[4]) == content(metas[4])
        assert store.stats().num_damaged == 1


def test_errors_do_not_say_what_is_kept(folder: Path) -> None:
    files = FaultyFiles()
    (meta,) = first_blocks([1])
    with contextlib.closing(open_store(folder, files=files)) as store:
        put(store, [meta])
        flip(segments(folder)[0], 5000, 1)
        with pytest.raises(RecordLost) as lost:
            read(store, meta)
        files.refused = {"write": errno.EIO}
        put(store, [meta])
        for text in (str(lost.value), store.stats().last_error):
            assert meta.key.hex() not in text
            assert US.tenant not in text
            assert str(folder) not in text
