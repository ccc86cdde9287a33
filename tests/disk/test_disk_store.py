"""DiskStore: its cap, its days, its clock, what a restart finds, whom it lets in."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from disk_parts import (
    BLOCK,
    DAY_S,
    DAYS,
    MIB,
    NOW_S,
    SIZE,
    US,
    WEEK,
    FaultyFiles,
    ReadOnlyFiles,
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

from headwater.core.blocks import CacheIdentity
from headwater.core.cache import MissReason, Retention, RetentionClass
from headwater.core.errors import ConfigError, RecordLost, StoreError
from headwater.disk.publishing import NewRecord
from headwater.disk.store import DiskConfig, DiskStore

KV_BYTES = 200_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_c04_a_restart_finds_everything_and_writes_nothing_again(folder: Path) -> None:
    clock = SetClock()
    metas = chain(range(10 * BLOCK + 3))
    with contextlib.closing(open_store(folder, clock)) as store:
        put(store, metas)
    before = disk_bytes(folder)
    with contextlib.closing(open_store(folder, clock)) as store:
        assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]
        put(store, metas)
        assert store.stats().num_refused == len(metas)
        assert store.stats().num_put == 0
    assert disk_bytes(folder) <= before + MIB


def test_c04_ages_go_on_while_nobody_is_running(folder: Path) -> None:
    clock = SetClock()
    days, week = first_blocks([1, 2])
    with contextlib.closing(open_store(folder, clock)) as store:
        put(store, [days], DAYS)
        put(store, [week], WEEK)
    clock.at_s += 4 * DAY_S
    with contextlib.closing(open_store(folder, clock)) as store:
        assert kept(store, [days, week]) == [False, True]
        assert store.absence(days.key) is MissReason.EXPIRED
        assert store.stats().num_records == 1
    assert len(segments(folder)) == 1


def test_c05_the_cap_holds_at_every_moment_measured_on_the_disk(folder: Path) -> None:
    clock = SetClock()
    max_bytes = 16 * MIB
    for restart in range(2):
        store = open_store(folder, clock, max_bytes=max_bytes)
        with contextlib.closing(store):
            for number in range(200):
                clock.at_s += 1
                put(store, first_blocks([1000 * restart + number]), size=KV_BYTES)
                assert disk_bytes(folder) <= max_bytes
            stats = store.stats()
            assert stats.num_put == 200
            assert stats.num_evicted > 100
            assert stats.num_errors == 0
            # The cap is used, too: not a tenth of it.
            assert stats.num_bytes > max_bytes // 2
            assert disk_bytes(folder) <= stats.num_bytes + MIB
        assert disk_bytes(folder) <= max_bytes


def test_c05_a_lower_cap_and_strange_files_take_effect_at_the_start(folder: Path) -> None:
    with contextlib.closing(open_store(folder, max_bytes=64 * MIB)) as store:
        put(store, first_blocks(range(200)), size=KV_BYTES)
    (folder / "strange").write_bytes(bytes(3 * MIB))
    (folder / "sub").mkdir()
    (folder / "sub" / "stranger").write_bytes(bytes(3 * MIB))
    with contextlib.closing(open_store(folder, max_bytes=32 * MIB)) as store:
        assert disk_bytes(folder) <= 32 * MIB
        assert store.stats().num_bytes >= disk_bytes(folder) - MIB
        put(store, first_blocks(range(200, 300)), size=KV_BYTES)
        assert disk_bytes(folder) <= 32 * MIB
        assert store.stats().num_records > 20
        (folder / "late").write_bytes(bytes(4 * MIB))
        store.sweep()
        assert store.stats().num_bytes >= disk_bytes(folder) - MIB


def test_c05_a_record_larger_than_the_cap_allows_is_not_kept(folder: Path) -> None:
    with contextlib.closing(open_store(folder, max_bytes=16 * MIB)) as store:
        old, large = first_blocks([1, 2])
        put(store, [old])
        assert put(store, [large], size=5 * MIB) == [False]
        assert kept(store, [old, large]) == [True, False]
        assert store.stats().num_errors == 1


def test_what_was_used_outlives_what_was_not_and_heads_outlive_tails(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(open_store(folder, clock, max_bytes=16 * MIB)) as store:
        prompt = chain(range(20 * BLOCK))
        used = first_blocks([7])
        put(store, prompt, size=KV_BYTES)
        put(store, used, size=KV_BYTES)
        for number in range(100, 160):
            clock.at_s += 60
            store.touch([used[0].key], WEEK)
            put(store, first_blocks([number]), size=KV_BYTES)
        found = kept(store, prompt)
        assert kept(store, used) == [True]
        assert not all(found)
        assert sorted(found, reverse=True) == found
        gone = prompt[found.index(False)]
        assert store.absence(gone.key) is MissReason.EVICTED
        assert read(store, used[0], KV_BYTES) == content(used[0], KV_BYTES)


def test_the_memory_of_what_is_gone_is_bounded(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(open_store(folder, clock, max_bytes=16 * MIB)) as store:
        metas = first_blocks(range(1500))
        for at in range(0, 1500, 50):
            store.put_many(
                [NewRecord(m, pieces(content(m, 20)), DAYS) for m in metas[at : at + 50]]
            )
        clock.at_s += 5 * DAY_S
        store.sweep()
        reasons = [store.absence(meta.key) for meta in metas]
        assert reasons.count(MissReason.EXPIRED) == 16 * MIB // (16 * 1024)
        assert reasons[-1] is MissReason.EXPIRED


def test_a_whole_file_goes_with_its_day(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(open_store(folder, clock)) as store:
        put(store, first_blocks(range(5)), DAYS)
        put(store, first_blocks(range(5, 10)), WEEK)
        assert len(segments(folder)) == 2
        clock.at_s += 4 * DAY_S
        store.sweep()
        assert len(segments(folder)) == 1
        assert store.stats().num_records == 5
        assert store.stats().num_expired == 5


def test_the_few_that_were_used_move_and_the_file_still_goes(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(open_store(folder, clock)) as store:
        metas = first_blocks(range(20))
        put(store, metas, DAYS)
        (old,) = segments(folder)
        clock.at_s += 2 * DAY_S
        store.touch([metas[3].key], DAYS)
        clock.at_s += 2 * DAY_S
        store.sweep()
        assert not old.exists()
        assert kept(store, metas).index(True) == 3
        assert read(store, metas[3]) == content(metas[3])
    (folder / "index.sqlite").unlink()
    with contextlib.closing(open_store(folder, clock)) as store:
        assert kept(store, [metas[3]]) == [True]  # its last use went with it


def test_a_file_that_is_mostly_used_stays_where_it_is(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(open_store(folder, clock)) as store:
        metas = first_blocks(range(10))
        put(store, metas, DAYS)
        files = segments(folder)
        clock.at_s += 2 * DAY_S
        store.touch([meta.key for meta in metas[:6]], DAYS)
        clock.at_s += 2 * DAY_S
        store.sweep()
        assert segments(folder) == files
        assert kept(store, metas) == [True] * 6 + [False] * 4
        assert store.stats().num_records == 6


def test_a_file_goes_with_its_last_record(folder: Path) -> None:
    with contextlib.closing(open_store(folder)) as store:
        metas = first_blocks(range(3))
        put(store, metas)
    with contextlib.closing(open_store(folder)) as store:
        store.remove([meta.key for meta in metas[:2]])
        assert len(segments(folder)) == 1
        store.remove([metas[2].key])
        assert segments(folder) == []


def test_a_clock_set_back_neither_expires_nor_keeps_for_ever(folder: Path) -> None:
    clock = SetClock(NOW_S + 3650 * DAY_S)
    early, late = first_blocks([1, 2])
    with contextlib.closing(open_store(folder, clock)) as store:
        put(store, [early], DAYS)
        clock.at_s = NOW_S  # ten years back, while it runs
        assert kept(store, [early]) == [True]
        put(store, [late], DAYS)
        assert kept(store, [early, late]) == [True, True]
    clock.at_s += 2 * DAY_S
    with contextlib.closing(open_store(folder, clock)) as store:
        assert kept(store, [early, late]) == [True, True]
        clock.at_s += 2 * DAY_S
        store.sweep()
        assert kept(store, [early, late]) == [False, False]
    assert segments(folder) == []


def test_a_clock_set_back_while_nobody_ran_is_noticed_at_the_start(folder: Path) -> None:
    clock = SetClock(NOW_S + 3650 * DAY_S)
    metas = first_blocks([1])
    with contextlib.closing(open_store(folder, clock)) as store:
        put(store, metas, DAYS)
    clock.at_s = NOW_S
    with contextlib.closing(open_store(folder, clock)) as store:
        assert kept(store, metas) == [True]
        clock.at_s += 4 * DAY_S
        assert kept(store, metas) == [False]


def test_the_free_space_reserve_is_never_used(folder: Path) -> None:
    files = FaultyFiles()
    files.free = 100 * MIB
    with contextlib.closing(open_store(folder, files=files, reserve_bytes=20 * MIB)) as store:
        first, second = first_blocks([1, 2])
        assert put(store, [first]) == [True]
        files.free = 20 * MIB + SIZE
        assert put(store, [second]) == [False]
        assert kept(store, [first, second]) == [True, False]
        assert (store.stats().num_errors, store.stats().is_writable) == (1, True)
        files.free = 100 * MIB
        assert put(store, [second]) == [True]


def test_k07_a_cap_that_the_disk_has_not_to_spare_is_refused(folder: Path) -> None:
    files = FaultyFiles()
    files.free = 100 * MIB
    with pytest.raises(StoreError, match=r"lower cache_max_bytes.*or choose another cache_dir"):
        open_store(folder, files=files, max_bytes=90 * MIB, reserve_bytes=20 * MIB)
    with pytest.raises(StoreError, match="at least 16 MiB"):
        open_store(folder, files=files, max_bytes=MIB)
    with contextlib.closing(
        open_store(folder, files=files, max_bytes=80 * MIB, reserve_bytes=20 * MIB)
    ) as store:
        put(store, first_blocks(range(20)), size=MIB)
    # What is there already is not missing from the free space a second time.
    files.free = 80 * MIB
    with contextlib.closing(
        open_store(folder, files=files, max_bytes=80 * MIB, reserve_bytes=20 * MIB)
    ) as store:
        assert store.stats().num_records == 20


def test_k07_without_a_cap_half_of_what_is_spare_is_taken(folder: Path) -> None:
    files = FaultyFiles()
    files.free = 100 * MIB
    with contextlib.closing(
        open_store(folder, files=files, max_bytes=None, reserve_bytes=20 * MIB)
    ) as store:
        assert store.max_bytes == 40 * MIB
        line = store.describe(bytes_per_token=1000, record_tokens=32, keep_s=7 * DAY_S)
        assert "40 MiB in all" in line
        assert "1,128 bytes per token" in line
        assert "37,183 tokens" in line


def test_a_full_disk_at_the_start_still_serves_what_is_there(folder: Path) -> None:
    metas = first_blocks(range(3))
    with contextlib.closing(open_store(folder)) as store:
        put(store, metas)
    files = FaultyFiles()
    files.free = 0
    files.refused = dict.fromkeys(("commit", "write", "create", "sync"), 28)
    with contextlib.closing(
        open_store(folder, files=files, max_bytes=None, reserve_bytes=MIB)
    ) as store:
        assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]
        assert put(store, first_blocks([9])) == [False]
        files.refused.clear()
        files.free = 1000 * MIB
        assert put(store, first_blocks([9])) == [True]


def test_i08_the_folder_and_its_files_are_the_owners_alone(folder: Path) -> None:
    with contextlib.closing(open_store(folder)) as store:
        put(store, first_blocks([1]))
        assert folder.stat().st_mode & 0o777 == 0o700
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
        assert set(modes.values()) == {0o600}, modes


def test_i08_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(StoreError, match="chmod 700"):
        open_store(folder)
    folder.chmod(0o755)
    open_store(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_i08_crafted_files_are_never_run_nor_taken_for_records(folder: Path) -> None:
    marker = folder / "ran"
    crafted = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    (meta,) = first_blocks([1])
    with contextlib.closing(open_store(folder)) as store:
        put(store, [meta])
    (folder / "20000-0000000000000000.seg").write_bytes(crafted * 500)
    (folder / "index.sqlite").write_bytes(crafted * 500)
    with contextlib.closing(open_store(folder)) as store:
        assert read(store, meta) == content(meta)
        assert store.stats().num_records == 1
    assert not marker.exists()
    assert len(segments(folder)) == 1


def test_a_folder_with_other_things_in_it_is_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "letters.txt").write_text("mine")
    with pytest.raises(StoreError, match="choose another cache_dir"):
        open_store(folder)
    assert [path.name for path in folder.iterdir()] == ["letters.txt"]
    with pytest.raises(StoreError, match="is not a folder"):
        open_store(folder / "letters.txt")


def test_a_folder_of_another_format_version_is_refused_and_left_as_it_is(folder: Path) -> None:
    with contextlib.closing(open_store(folder)) as store:
        put(store, first_blocks([1]))
    (folder / "format").write_text("headwater-kv 2\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StoreError, match=r"headwater-kv 2.*choose another cache_dir"):
        open_store(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_read_only_folder_is_read(folder: Path) -> None:
    metas = first_blocks(range(3))
    with contextlib.closing(open_store(folder)) as store:
        put(store, metas)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with contextlib.closing(open_store(folder, files=ReadOnlyFiles())) as store:
        assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]
        assert not store.stats().is_writable
        assert put(store, first_blocks([9])) == [False]
        store.touch([metas[0].key], WEEK)
        store.remove([metas[0].key])
        store.sweep()
        assert kept(store, metas) == [True] * 3
        assert store.absence(first_blocks([9])[0].key) is MissReason.NEW
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_read_only_folder_without_a_store_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with pytest.raises(StoreError, match="read-only"):
        open_store(folder, files=ReadOnlyFiles())


def test_c08_other_weights_under_the_same_name_miss(folder: Path) -> None:
    ours = chain(range(3 * BLOCK), CacheIdentity("weights-a", "layout", "tenant"))
    theirs = chain(range(3 * BLOCK), CacheIdentity("weights-b", "layout", "tenant"))
    with contextlib.closing(open_store(folder)) as store:
        put(store, ours)
        assert kept(store, theirs) == [False] * 3
        for mine, other in zip(ours, theirs, strict=True):
            # Even if the keys were the same, the record says whose it is.
            with pytest.raises(RecordLost) as lost:
                read(store, replace(other, key=mine.key))
            assert lost.value.is_damaged


def test_c08_it_is_known_under_which_weights_and_tenants_a_first_block_lies(folder: Path) -> None:
    clock = SetClock()
    identities = [US, CacheIdentity("other", "layout", "tenant"), replace(US, tenant="else")]
    with contextlib.closing(open_store(folder, clock)) as store:
        for identity in identities:
            put(store, chain(range(2 * BLOCK), identity), DAYS)
        assert set(store.identities_of_first_block(range(BLOCK))) == set(identities)
        assert store.identities_of_first_block(range(BLOCK, 2 * BLOCK)) == []
        clock.at_s += 4 * DAY_S
        assert store.identities_of_first_block(range(BLOCK)) == []


def test_c07_keys_and_files_are_the_same_for_every_process(folder: Path) -> None:
    """Python hashes strings with another seed in each process."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from disk_parts import BLOCK, chain, content, open_store, put, read
from pathlib import Path
store = open_store(Path(sys.argv[2]))
metas = chain(range(3 * BLOCK))
found = [record is not None for record in store.find([meta.key for meta in metas])]
if not any(found):
    put(store, metas)
else:
    assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]
print(found)
store.close()
"""
    arguments = [sys.executable, "-c", program, str(Path(__file__).parent), str(folder)]
    answers = [
        subprocess.run(
            arguments, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
        for _ in range(2)
    ]
    assert answers == ["[False, False, False]", "[True, True, True]"]


def test_a_batch_is_published_at_once(folder: Path) -> None:
    files = FaultyFiles()
    with contextlib.closing(open_store(folder, files=files)) as store:
        metas = first_blocks(range(6))
        put(store, metas[:1])
        before = dict(files.calls)
        records = [NewRecord(meta, pieces(content(meta)), WEEK) for meta in metas]
        assert store.put_many([*records, records[-1]]) == [True] * 7
        assert files.calls["sync"] - before["sync"] == 1
        assert files.calls["commit"] - before["commit"] == 3  # a use, the room, the rows
        assert [read(store, meta) for meta in metas] == [content(meta) for meta in metas]
        assert store.stats().num_put == 6


def test_bad_settings_are_named(tmp_path: Path) -> None:
    for wrong in (
        {"max_bytes": 0},
        {"reserve_bytes": -1},
        {"segment_bytes": 100},
        {"max_open_files": 0},
        {"sweep_s": 0.0},
    ):
        (name,) = wrong
        with pytest.raises(ConfigError, match=f"disk.{name}"):
            DiskConfig(folder=tmp_path, **wrong)


def test_few_files_stay_open_whatever_is_read(folder: Path) -> None:
    config = DiskConfig(
        folder=folder, max_bytes=64 * MIB, reserve_bytes=0, segment_bytes=8192, max_open_files=2
    )
    with contextlib.closing(DiskStore(config, SetClock())) as store:
        metas = first_blocks(range(12))
        put(store, metas)
        assert len(segments(folder)) == 12
        num_before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc").exists() else 0
        for meta in metas * 2:
            assert read(store, meta) == content(meta)
        if Path("/proc").exists():
            assert len(list(Path("/proc/self/fd").iterdir())) <= num_before + 2


def test_nothing_stays_open_after_closing(folder: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("this system does not list open files")
    open_store(folder).close()
    num_before = len(list(descriptors.iterdir()))
    for _ in range(3):
        store = open_store(folder)
        put(store, first_blocks([1]), Retention(RetentionClass.CHAT, DAY_S))
        read(store, first_blocks([1])[0])
        store.close()
        with contextlib.suppress(StoreError):
            open_store(folder, max_bytes=1)
    assert len(list(descriptors.iterdir())) == num_before
