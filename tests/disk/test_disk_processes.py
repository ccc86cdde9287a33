"""Processes that share a folder, and processes that are killed in the middle of a write."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disk_parts import (
    MIB,
    FaultyFiles,
    SetClock,
    content,
    disk_bytes,
    first_blocks,
    kept,
    open_store,
    put,
    read,
    segments,
)

SIZE = 50_000
# Puts records from a number on, and says which are there; "go" lets several begin at once.
WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from disk_parts import first_blocks, open_store, put
folder, first, count, max_bytes = Path(sys.argv[2]), *map(int, sys.argv[3:6])
store = open_store(folder, max_bytes=max_bytes, segment_bytes=400_000)
print("open", flush=True)
sys.stdin.readline()
for number in range(first, first + count):
    (is_there,) = put(store, first_blocks([number]), size=50_000)
    print(number if is_there else -1, flush=True)
store.close()
print("closed", flush=True)
"""


def start_writer(
    folder: Path, first: int, count: int, max_bytes: int = 64 * MIB
) -> subprocess.Popen[str]:
    arguments = map(str, (Path(__file__).parent, folder, first, count, max_bytes))
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def let_go(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin
    assert writer.stdout
    assert writer.stdout.readline() == "open\n"
    writer.stdin.write("go\n")
    writer.stdin.flush()


def end(writer: subprocess.Popen[str]) -> list[int]:
    """What it said is there."""
    output, _ = writer.communicate(timeout=60)
    return [int(line) for line in output.splitlines() if line.lstrip("-").isdigit()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_c04_a_process_killed_while_it_writes_loses_nothing_that_it_published(
    folder: Path,
) -> None:
    rng = random.Random(4)
    published: set[int] = set()
    for turn in range(10):
        writer = start_writer(folder, turn * 1000, 1000)
        let_go(writer)
        assert writer.stdout
        published.add(int(writer.stdout.readline()))
        time.sleep(rng.uniform(0.0, 0.03))
        writer.kill()
        published |= set(end(writer))
        with contextlib.closing(open_store(folder)) as store:
            metas = first_blocks(sorted(published))
            assert all(kept(store, metas))
            assert all(read(store, meta, SIZE) == content(meta, SIZE) for meta in metas)
            assert store.stats().num_damaged == 0
            # What it had not published is nowhere: the files hold what the rows say.
            used = sum(path.stat().st_size for path in segments(folder))
            assert used == store.stats().num_records * (4096 + 53_248)
    assert len(published) > 10


def test_c06_processes_share_one_folder_and_one_of_them_is_killed(folder: Path) -> None:
    """All write the same 40 records and some of their own."""
    writers = [start_writer(folder, first, 40) for first in (0, 0, 20)]
    for writer in writers:
        let_go(writer)
    assert writers[0].stdout
    first = int(writers[0].stdout.readline())
    writers[0].kill()
    published = {first} | {number for writer in writers for number in end(writer)}
    assert published == set(range(60))
    with contextlib.closing(open_store(folder)) as store:
        metas = first_blocks(range(60))
        assert all(read(store, meta, SIZE) == content(meta, SIZE) for meta in metas)
        assert store.stats().num_records == 60
        assert disk_bytes(folder) < 70 * (SIZE + 3 * 4096) + MIB


def test_c06_the_cap_is_of_all_processes_together(folder: Path) -> None:
    max_bytes = 16 * MIB
    writers = [start_writer(folder, first, 300, max_bytes) for first in (0, 1000)]
    for writer in writers:
        let_go(writer)
    until_s = time.monotonic() + 60
    while any(writer.poll() is None for writer in writers):
        assert time.monotonic() < until_s
        assert disk_bytes(folder) <= max_bytes
        time.sleep(0.005)
    answers = [end(writer) for writer in writers]
    assert [len(answer) for answer in answers] == [300, 300]
    assert -1 not in [*answers[0], *answers[1]]
    with contextlib.closing(open_store(folder, max_bytes=max_bytes)) as store:
        metas = first_blocks([*range(300), *range(1000, 1300)])
        there = [meta for meta, is_there in zip(metas, kept(store, metas), strict=True) if is_there]
        assert all(read(store, meta, SIZE) == content(meta, SIZE) for meta in there)
        assert len(there) > 100


def test_c06_servers_with_different_caps_each_keep_their_own(folder: Path) -> None:
    with (
        contextlib.closing(open_store(folder, max_bytes=64 * MIB)) as large,
        contextlib.closing(open_store(folder, max_bytes=16 * MIB)) as small,
    ):
        put(large, first_blocks(range(100)), size=300_000)
        assert disk_bytes(folder) > 16 * MIB
        # The large one still writes to its last segment; all the rest must go.
        assert put(small, first_blocks([1000]), size=300_000) == [True]
        assert disk_bytes(folder) <= 16 * MIB
        assert put(large, first_blocks([1001]), size=300_000) == [True]
        assert small.stats().num_bytes == large.stats().num_bytes


def test_c06_what_one_publishes_the_others_see_at_once(folder: Path) -> None:
    with (
        contextlib.closing(open_store(folder)) as first,
        contextlib.closing(open_store(folder)) as second,
    ):
        for meta in first_blocks(range(20)):
            put(first, [meta])
            assert read(second, meta) == content(meta)
            assert put(second, [meta]) == [True]
        assert second.stats().num_refused == 20
        assert len(segments(folder)) == 1


def test_c06_a_living_processes_segment_is_left_alone_by_a_start(folder: Path) -> None:
    clock = SetClock()
    metas = first_blocks(range(4))
    with contextlib.closing(open_store(folder, clock)) as writer:
        put(writer, metas[:2])
        with contextlib.closing(open_store(folder, clock)) as other:
            other.sweep()
            assert put(writer, metas[2:]) == [True, True]
            assert len(segments(folder)) == 1
            assert [read(other, meta) for meta in metas] == [content(meta) for meta in metas]


def test_c06_space_is_free_at_once_though_others_have_the_file_open(folder: Path) -> None:
    metas = first_blocks(range(10))
    with contextlib.closing(open_store(folder)) as store:
        put(store, metas, size=100_000)
    with (
        contextlib.closing(open_store(folder)) as reader,
        contextlib.closing(open_store(folder)) as other,
    ):
        for meta in metas:
            read(reader, meta, 100_000)
        (path,) = segments(folder)
        with path.open("rb") as still_open:
            other.remove([meta.key for meta in metas])
            assert not path.exists()
            assert still_open.seek(0, 2) == 0


def test_c06_a_store_that_cannot_get_the_index_in_time_says_so(folder: Path) -> None:
    """Another process that hangs inside a commit costs a bounded wait and no record."""
    files = FaultyFiles()
    with contextlib.closing(open_store(folder, files=files)) as store:
        (meta,) = first_blocks([1])
        hung = files.connect(f"{(folder / 'index.sqlite').as_uri()}?mode=rw", 1.0)
        hung.execute("BEGIN IMMEDIATE")
        assert put(store, [meta]) == [False]
        assert "locked" in store.stats().last_error
        assert kept(store, [meta]) == [False]
        hung.execute("ROLLBACK")
        hung.close()
        assert put(store, [meta]) == [True]
