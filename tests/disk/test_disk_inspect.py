"""The operator's view: true beside a running server, and no content in it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
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
    SetClock,
    chain,
    content,
    first_blocks,
    kept,
    open_store,
    put,
    read,
    segments,
)

from headwater.core.cache import KVPart, MissReason, RetentionClass
from headwater.core.errors import RecordLost, StoreError
from headwater.disk import inspect
from headwater.disk.store import DiskStore

OTHER_TENANT = replace(US, tenant="else")
OTHER_MODEL = replace(US, model_fingerprint="other")
SPAN = 3 * 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def filled(folder: Path, clock: SetClock) -> DiskStore:
    store = open_store(folder, clock)
    put(store, chain(range(4 * BLOCK)), WEEK)
    put(store, chain(range(2 * BLOCK + 1), OTHER_TENANT), DAYS)
    put(store, chain(range(BLOCK), OTHER_MODEL), DAYS)
    return store


def test_a_summary_adds_up_beside_a_running_server(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(filled(folder, clock)) as store:
        found = inspect.summarise(folder, now_s=clock.at_s)
        assert (found.num_records, found.num_tokens) == (8, 4 * BLOCK + 2 * BLOCK + 1 + BLOCK)
        assert found.max_bytes == 64 * MIB
        assert [(use.identity, use.num_records) for use in found.by_identity] == [
            (US, 4),
            (OTHER_TENANT, 3),
            (OTHER_MODEL, 1),
        ]
        assert {use.kind: use.num_records for use in found.by_class} == {
            RetentionClass.AGENT: 4,
            RetentionClass.CHAT: 4,
        }
        assert [(use.day, use.num_records, use.num_bytes) for use in found.by_day] == [
            ("2024-10-07", 4, 4 * SPAN),
            ("2024-10-11", 4, 4 * SPAN),
        ]
        assert found.num_bytes == sum(file.num_bytes for file in found.files)
        assert {"index.sqlite", "format", "lock"} < {file.name for file in found.files}
        clock.at_s += 4 * DAY_S
        later = inspect.summarise(folder, now_s=clock.at_s)
        assert later.num_records == 4
        store.sweep()
        assert inspect.summarise(folder, now_s=clock.at_s).num_tombstones == 4


def test_verify_reads_everything_and_drops_what_is_damaged_if_asked(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(filled(folder, clock)) as store:
        whole = inspect.verify(folder, drop_damaged=True, now_s=clock.at_s)
        assert (whole.num_records, whole.num_bytes) == (8, 8 * SIZE)
        assert (whole.num_damaged, whole.num_dropped, whole.num_orphaned) == (0, 0, 0)
        (path,) = [path for path in segments(folder) if path.stat().st_size == 4 * SPAN and (
            b"else" not in path.read_bytes()
        )]  # fmt: skip
        with path.open("r+b") as file:
            file.seek(SPAN + 4096 + 77)
            file.write(b"?!")
        (folder / "20001-0000000000000000.seg").write_bytes(b"")
        found = inspect.verify(folder, drop_damaged=False, now_s=clock.at_s)
        assert (found.num_records, found.num_damaged, found.num_dropped) == (8, 1, 0)
        assert found.num_orphaned == 1
        found = inspect.verify(folder, drop_damaged=True, now_s=clock.at_s)
        assert (found.num_damaged, found.num_dropped) == (1, 1)
        assert kept(store, chain(range(4 * BLOCK))) == [True, False, True, True]
        assert store.absence(chain(range(4 * BLOCK))[1].key) is MissReason.DAMAGED


@pytest.mark.parametrize(
    ("what", "num_records"),
    [
        ({"tenant": "else"}, 3),
        ({"fingerprint": "other"}, 1),
        ({"fingerprint": "model"}, 7),
        ({"fingerprint": "model", "tenant": "tenant"}, 4),
        ({"tenant": "nobody"}, 0),
        ({"unused_for_s": 3600.0}, 7),
        ({"unused_for_s": 86400.0}, 0),
        ({"everything": True}, 8),
    ],
)
def test_purge_takes_what_fits_and_its_bytes(
    folder: Path, what: dict[str, object], num_records: int
) -> None:
    clock = SetClock()
    with contextlib.closing(filled(folder, clock)) as store:
        clock.at_s += 7200
        store.touch([chain(range(BLOCK), OTHER_MODEL)[0].key], DAYS)
        counts = inspect.purge(folder, now_s=clock.at_s, **what)  # type: ignore[arg-type]
        assert (counts.num_records, counts.num_bytes) == (num_records, num_records * SPAN)
        assert store.stats().num_records == 8 - num_records
        groups = {
            identity: chain(tokens, identity)
            for identity, tokens in (
                (US, range(4 * BLOCK)),
                (OTHER_TENANT, range(2 * BLOCK + 1)),
                (OTHER_MODEL, range(BLOCK)),
            )
        }
        on_disk = b"".join(path.read_bytes() for path in segments(folder))
        for metas in groups.values():
            for meta, is_there in zip(metas, kept(store, metas), strict=True):
                assert (content(meta)[:100] in on_disk) == is_there
                assert (bytes(meta.key) in on_disk) == is_there
                if is_there:
                    assert read(store, meta) == content(meta)
                assert put(store, [meta]) == [True]
    (folder / "index.sqlite").unlink()
    with contextlib.closing(open_store(folder, clock)) as store:
        assert all(all(kept(store, metas)) for metas in groups.values())


def test_what_was_purged_does_not_come_back_with_a_rebuilt_index(folder: Path) -> None:
    clock = SetClock()
    filled(folder, clock).close()
    inspect.purge(folder, now_s=clock.at_s, tenant="else")
    (folder / "index.sqlite").unlink()
    with contextlib.closing(open_store(folder, clock)) as store:
        assert store.stats().num_records == 5
        assert inspect.purge(folder, now_s=clock.at_s, everything=True).num_records == 5
        found = inspect.summarise(folder, now_s=clock.at_s)
        assert (found.num_records, found.by_identity, found.num_tombstones) == (0, (), 0)
    assert segments(folder) == []


def test_purge_wants_to_be_told_what(folder: Path) -> None:
    open_store(folder).close()
    with pytest.raises(StoreError, match="say what to purge"):
        inspect.purge(folder, now_s=0.0)


def test_purges_during_reads_are_losses_and_never_wrong_bytes(folder: Path) -> None:
    clock = SetClock()
    metas = first_blocks(range(20))
    faults: list[BaseException] = []
    is_over = threading.Event()

    with contextlib.closing(open_store(folder, clock)) as store:

        def read_on() -> None:
            number = 0
            while not is_over.is_set():
                number += 1
                try:
                    meta = metas[number % 20]
                    assert read(store, meta, 100_000) == content(meta, 100_000)
                except RecordLost as lost:
                    if lost.is_damaged:
                        faults.append(lost)
                except BaseException as fault:
                    faults.append(fault)

        thread = threading.Thread(target=read_on)
        thread.start()
        for turn in range(20):
            put(store, metas, size=100_000)
            inspect.purge(folder, now_s=clock.at_s, everything=bool(turn % 2), tenant="tenant")
        is_over.set()
        thread.join()
        assert not faults
        assert store.stats().num_damaged == 0


def test_top_lists_by_use_without_content(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(filled(folder, clock)) as store:
        metas = chain(range(4 * BLOCK))
        for times, meta in ((3, metas[2]), (5, metas[1])):
            for _ in range(times):
                clock.at_s += 1
                store.touch([meta.key], WEEK)
        found = inspect.top(folder, 3, now_s=clock.at_s)
        assert [(record.end, record.num_uses) for record in found[:2]] == [
            (2 * BLOCK, 5),
            (3 * BLOCK, 3),
        ]
        first = found[0]
        assert first.name == metas[1].key.hex()[:12]
        assert (first.identity, first.part, first.kind) == (US, KVPart.GLOBAL, RetentionClass.CHAT)
        assert (first.num_tokens, first.num_bytes) == (BLOCK, SPAN)
        assert first.expires_s == clock.at_s + 7 * DAY_S
        assert len(inspect.top(folder, 100, now_s=clock.at_s)) == 8


def test_match_says_how_far_each_identity_goes_and_why_it_ends(folder: Path) -> None:
    clock = SetClock()
    with contextlib.closing(filled(folder, clock)) as store:

        def matches(tokens: list[int]) -> dict[object, tuple[int, int, MissReason]]:
            return {
                found.identity: (found.num_tokens, found.num_tail_tokens, found.reason)
                for found in inspect.match(folder, tokens, BLOCK, now_s=clock.at_s)
            }

        assert matches([*range(2 * BLOCK + 1), 99, 98, 97]) == {
            US: (2 * BLOCK + 1, 1, MissReason.DIFFERS),
            OTHER_TENANT: (2 * BLOCK + 1, 1, MissReason.NEW),
            OTHER_MODEL: (BLOCK, 0, MissReason.NEW),
        }
        assert matches([*range(4 * BLOCK)])[US] == (4 * BLOCK, 0, MissReason.NONE)
        assert matches([0, 1, 99, 98, 97])[US] == (2, 2, MissReason.TOO_SHORT)
        assert matches([99] * 10)[US] == (0, 0, MissReason.NEW)
        clock.at_s += 4 * DAY_S
        store.touch([chain(range(BLOCK), OTHER_TENANT)[0].key], WEEK)
        assert matches([*range(4 * BLOCK)])[OTHER_TENANT] == (0, 0, MissReason.EXPIRED)


def test_a_folder_that_is_no_store_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no cache"):
        inspect.summarise(tmp_path / "nothing", now_s=0.0)
    assert not (tmp_path / "nothing").exists()
