"""DiskStore against a slow, obvious model: a dictionary of what was put and until when.

The model knows no files. The store may forget what the cap has no room for (and must then say
so), but what it finds must be in the model with these very bytes, and while nothing had to be
evicted it must find all of the model.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from disk_parts import (
    DAY_S,
    MIB,
    SetClock,
    chain,
    content,
    disk_bytes,
    first_blocks,
    open_store,
    pieces,
    put,
    read,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.cache import MissReason, RecordMeta, Retention, RetentionClass
from headwater.disk.publishing import NewRecord

MAX_BYTES = 16 * MIB
LARGE = 900_000
# Two token values: prompts share beginnings, and tails are covered all the time.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=10)
retentions = st.sampled_from(
    [
        Retention(RetentionClass.AGENT, 3 * DAY_S),
        Retention(RetentionClass.CHAT, 7 * DAY_S),
        Retention(RetentionClass.CHAT, 3600.0),
        Retention(RetentionClass.CHAT, 0.0),
    ]
)
tenants = st.sampled_from(["", "a"])


@dataclass
class Kept:
    meta: RecordMeta
    expires_s: float


class DiskMachine(RuleBasedStateMachine):
    @initialize(segment_bytes=st.sampled_from([4096, 40_000, 64 * MIB]))
    def build(self, segment_bytes: int) -> None:
        self.home = Path(tempfile.mkdtemp())
        self.segment_bytes = segment_bytes
        self.clock = SetClock()
        self.kept: dict[PrefixKey, Kept] = {}
        self.known: dict[PrefixKey, RecordMeta] = {}
        self.num_large = 0
        self.large: dict[PrefixKey, RecordMeta] = {}
        self.open()

    def open(self) -> None:
        self.store = open_store(
            self.home / "kv", self.clock, max_bytes=MAX_BYTES, segment_bytes=self.segment_bytes
        )

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.home)

    def is_there(self, key: PrefixKey) -> bool:
        return key in self.kept and self.kept[key].expires_s > self.clock.at_s

    @rule(tokens=prompts, tenant=tenants, retention=retentions, at_once=st.booleans())
    def put(self, tokens: list[int], tenant: str, retention: Retention, at_once: bool) -> None:
        metas = chain(tokens, CacheIdentity("model", "layout", tenant))
        expected = [self.is_there(meta.key) or retention.keep_s > 0 for meta in metas]
        if at_once:
            records = [NewRecord(meta, pieces(content(meta)), retention) for meta in metas]
            assert self.store.put_many(records) == expected
        else:
            assert put(self.store, metas, retention) == expected
        for meta, is_kept in zip(metas, expected, strict=True):
            self.known[meta.key] = meta
            if not is_kept:
                continue
            until_s = self.clock.at_s + retention.keep_s
            if self.is_there(meta.key):
                self.kept[meta.key].expires_s = max(self.kept[meta.key].expires_s, until_s)
                continue
            self.kept[meta.key] = Kept(meta, until_s)
            for key, other in list(self.kept.items()):
                ours = other.meta.tokens
                if (
                    other.meta.parent == meta.parent
                    and len(ours) < len(meta.tokens)
                    and ours == meta.tokens[: len(ours)]
                ):
                    del self.kept[key]

    @rule(tokens=prompts, tenant=tenants, retention=retentions)
    def touch(self, tokens: list[int], tenant: str, retention: Retention) -> None:
        keys = [meta.key for meta in chain(tokens, CacheIdentity("model", "layout", tenant))]
        self.store.touch(keys, retention)
        for key in keys:
            if self.is_there(key):
                until_s = self.clock.at_s + retention.keep_s
                self.kept[key].expires_s = max(self.kept[key].expires_s, until_s)

    @rule(tokens=prompts, tenant=tenants)
    def remove(self, tokens: list[int], tenant: str) -> None:
        keys = [meta.key for meta in chain(tokens, CacheIdentity("model", "layout", tenant))]
        self.store.remove(keys)
        for key in keys:
            self.kept.pop(key, None)

    @rule(hours=st.sampled_from([0.5, 2.0, 20.0, 75.0]), does_sweep=st.booleans())
    def wait(self, hours: float, does_sweep: bool) -> None:
        self.clock.at_s += hours * 3600
        if does_sweep:
            self.store.sweep()

    @rule(num_records=st.integers(1, 8), retention=retentions)
    def fill(self, num_records: int, retention: Retention) -> None:
        """Records that together do not fit: some of all must go."""
        metas = first_blocks(range(1000 + self.num_large, 1000 + self.num_large + num_records))
        self.num_large += num_records
        assert all(put(self.store, metas, retention, LARGE)) == (retention.keep_s > 0)
        self.large |= {meta.key: meta for meta in metas}

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule()
    def rebuild(self) -> None:
        """Uses were only in the index: records may be gone earlier, none comes back."""
        self.store.close()
        (self.home / "kv" / "index.sqlite").unlink()
        self.open()
        found = self.store.find(list(self.known))
        there = {record.meta.key for record in found if record}
        # A tail that was covered may come back: its bytes are right, it is only superfluous.
        for key in self.known:
            if key not in there:
                self.kept.pop(key, None)
            elif key not in self.kept:
                self.store.remove([key])

    @invariant()
    def what_is_found_is_true(self) -> None:
        if not hasattr(self, "store"):
            return
        keys = list(self.known)
        has_evicted = False
        for key, found in zip(keys, self.store.find(keys), strict=True):
            if found is None:
                if self.is_there(key):
                    has_evicted = True
                    assert self.store.absence(key) is MissReason.EVICTED
                    del self.kept[key]
                continue
            assert self.is_there(key)
            assert found.meta == self.known[key]
            assert read(self.store, found.meta) == content(found.meta)
        assert not has_evicted or self.num_large > 5
        assert disk_bytes(self.home / "kv") <= MAX_BYTES

    @invariant()
    def large_ones_are_whole(self) -> None:
        if not hasattr(self, "store"):
            return
        for key in list(self.large)[-2:]:
            (found,) = self.store.find([key])
            if found:
                assert read(self.store, found.meta, LARGE) == content(found.meta, LARGE)


DiskMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestDiskStore = DiskMachine.TestCase
