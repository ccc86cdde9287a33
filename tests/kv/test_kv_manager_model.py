"""KVManager against a slow, obvious model, over random sequences of calls.

The model (``kv_slow_model``) keeps what is truly in each block. It checks that every
hit is the truth, global and window KV, that no call writes where another reads, that
every published block is what it says, and that all-or-nothing answers agree with plain
counting: with forks, tails, replays, late layers, loads that end early, pins, tenants, eviction and
hashes that collide.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_slow_model import Live, Memory, Tiers, prefix_of

from headwater.core.blocks import BlockId, CacheIdentity, PrefixKey, blocks_for, chain_key
from headwater.core.cache import KVPart, Tier, WindowKV
from headwater.core.ports import StoredPrefix
from headwater.core.step import SequenceId
from headwater.kv.hit_plan import CopiedRow, HitPlan, LoadedRow, SharedRow, plan_hit
from headwater.kv.manager import KVGroup, KVManager, Lease, StalePlan
from headwater.kv.prefix_index import PrefixEntry
from headwater.kv.probe import Probe, num_common

BLOCK_TOKENS = 4
NUM_WALKS = 6
WALK_CALLS = 150
TENANTS = ("", "a")


def colliding(parent: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
    """A hash with 16 values."""
    return PrefixKey(bytes([chain_key(parent, tokens)[0] % 16]))


Planned = tuple[HitPlan, list[int], str]

prompts = st.fixed_dictionaries(
    {
        "past": st.integers(0, 20),  # which earlier sequence it begins like
        "keep": st.integers(0, 24),  # for so many tokens
        # Two token values: prefixes are shared, repeated and evicted all the time.
        "more": st.lists(st.integers(0, 1), min_size=1, max_size=6),
        "tenant": st.sampled_from(TENANTS),
        "max_hit": st.sampled_from([None, None, None, None, 0, 5, 9]),
        "asks": st.sampled_from(["nobody", "for the rest", "for all"]),  # the tiers
    }
)
which_one = st.integers(0, 10)


class KVMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 14),
        window=st.sampled_from([None, 4, 6]),
        window_kv=st.sampled_from(WindowKV),
        collides=st.sampled_from([False, False, True]),
        alignment=st.sampled_from([1, 2]),
        replay=st.sampled_from([None, 3, 7]),
    )
    def build(
        self, num_blocks: int, window: int | None, window_kv: WindowKV, collides: bool,
        alignment: int = 1, replay: int | None = None,
    ) -> None:  # fmt: skip
        """``replay``: how many of a prompt's last tokens late layers compute."""
        self.window_kv = window_kv
        self.replay = None if window is None else replay
        self.num_blocks = num_blocks
        self.kv = KVManager(
            KVGroup(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, alignment=alignment),
            window_tokens=window,
            hash_block=colliding if collides else chain_key,
        )
        self.memory = Memory(num_blocks, BLOCK_TOKENS, window, alignment)
        self.tiers = Tiers(BLOCK_TOKENS)
        self.live: dict[SequenceId, Live] = {}
        self.holders: dict[SequenceId, list[BlockId]] = {}
        self.pinned: list[tuple[BlockId, PrefixEntry]] = []
        self.known: list[PrefixEntry] = []  # entries that publish gave, perhaps long ago
        self.past: list[list[int]] = [[0, 1, 0, 1, 0, 0, 1, 1, 0, 0], [1, 0, 0, 1, 0, 1, 1, 1]]
        self.late: list[tuple[Probe, Planned]] = []  # looks that were not followed by an admission
        self.next_id = 0

    # What a worker does

    @rule(prompt=prompts, num_output=st.integers(0, 5), num_moves=st.integers(0, 9))
    def whole_turn(self, prompt: dict[str, Any], num_output: int, num_moves: int) -> None:
        """From the prompt to the last token of the output; a load may end early."""
        sequence = self.admit(self.look(prompt)[1], 1)
        if sequence is None:
            return
        self.load(sequence, num_moves)
        if self.live[sequence].is_loading:
            self.free(sequence)
            return
        self.compute(sequence, 99, publish_tail=True)
        for token in range(num_output):
            self.decode(sequence, token % 2)
            self.compute(sequence, 99, publish_tail=False)
        self.compute(sequence, 99, publish_tail=True)
        self.free(sequence)

    @rule(prompt=prompts, room=st.integers(1, 4))
    def begin(self, prompt: dict[str, Any], room: int) -> None:
        self.admit(self.look(prompt)[1], room)

    @rule(prompt=prompts)
    def look_only(self, prompt: dict[str, Any]) -> None:
        self.late.append(self.look(prompt))

    @rule(which=which_one)
    def begin_late(self, which: int) -> None:
        """With a plan of long ago: what it hits may be gone."""
        if self.late:
            self.admit(self.late.pop(which % len(self.late))[1], 1)

    @rule(which=which_one)
    def look_again(self, which: int) -> None:
        if self.late:
            probe, (_, tokens, tenant) = self.late[which % len(self.late)]
            limit = probe.limit_tokens
            again = self.kv.probe(tokens, identity(tenant), max_hit_tokens=limit, earlier=probe)
            assert again == self.kv.probe(tokens, identity(tenant), max_hit_tokens=limit)
            self.check_probe(again, tokens, tenant)

    @rule(which=which_one, num=st.integers(1, 7), publishes=st.sampled_from(["", "full", "tail"]))
    def go_on(self, which: int, num: int, publishes: str) -> None:
        """Load some, or compute a chunk, or produce a token."""
        sequence = self.some(which)
        if sequence is None:
            return
        live = self.live[sequence]
        if live.is_loading:
            self.load(sequence, num)
        elif live.num_computed == len(live.tokens):
            self.decode(sequence, num % 2)
        elif publishes:
            self.compute(sequence, num, publish_tail=publishes == "tail")
        else:  # the step failed: some of it was written
            self.write(sequence, num)

    @rule(which=which_one)
    def end(self, which: int) -> None:
        sequence = self.some(which)
        if sequence is not None:
            self.free(sequence)

    @rule(which=which_one)
    def end_load(self, which: int) -> None:
        if self.holders:
            holder = sorted(self.holders)[which % len(self.holders)]
            del self.holders[holder]
            self.kv.free(holder)

    @rule(which=which_one)
    def twin(self, which: int) -> None:
        """Private duplicates: the same tokens again, computed without any hit."""
        original = self.some(which)
        if original is None:
            return
        live = self.live[original]
        probe = self.kv.probe(live.tokens, identity(live.tenant), max_hit_tokens=0)
        sequence = self.admit(
            (self.plan(probe, None, live.tokens), list(live.tokens), live.tenant), 1
        )
        if sequence is not None:
            self.compute(sequence, 99, publish_tail=which % 2 == 0)
            if which % 3:
                self.free(sequence)

    # Beyond the device

    @rule(which=st.integers(0, 40))
    def pin(self, which: int) -> None:
        if self.known and len(self.pinned) < 3:
            entry = self.known[-1 - which % len(self.known)]
            is_there = entry in self.kv._index
            assert self.kv.pin(entry) == is_there
            if is_there:
                self.pinned.append((entry.block, entry))

    @rule(which=which_one)
    def unpin(self, which: int) -> None:
        """The block was copied out all the while: it must still hold what was published."""
        if self.pinned:
            block, entry = self.pinned.pop(which % len(self.pinned))
            if entry.block == block:
                self.memory.check_entry(entry)
            self.kv.unpin(block)

    @rule(num_windows=st.integers(0, 40), tier=st.sampled_from([Tier.HOST, Tier.DISK]))
    def store(self, num_windows: int, tier: Tier) -> None:
        """All that is published, some of it with its window part."""
        for i, entry in enumerate(self.kv._index):
            prefix = entry.root.identity.tenant, prefix_of(entry)
            self.tiers.keep(self.kv.meta_of(entry, KVPart.GLOBAL), prefix, tier)
            if i < num_windows and self.kv.window_tokens is not None and entry.has_window:
                self.tiers.keep(self.kv.meta_of(entry, KVPart.WINDOW), prefix, tier)

    @rule(num_blocks=st.integers(1, 20))
    def name_victims(self, num_blocks: int) -> None:
        victims = self.kv.victims(num_blocks)
        place = {entry: i for i, entry in enumerate(victims)}
        assert len(place) == len(victims)
        for entry, i in place.items():
            assert entry.block not in self.held_blocks()
            parent = entry.parent
            assert not isinstance(parent, PrefixEntry) or place.get(parent, i + 1) > i

    # The steps, each compared with the model

    def look(self, prompt: dict[str, Any]) -> tuple[Probe, Planned]:
        tokens = [*self.past[prompt["past"] % len(self.past)][: prompt["keep"]], *prompt["more"]]
        tenant = prompt["tenant"]
        before = self.kv.counters()
        probe = self.kv.probe(tokens, identity(tenant), max_hit_tokens=prompt["max_hit"])
        assert self.kv.counters() == before
        self.check_probe(probe, tokens, tenant)
        stored = None
        if prompt["asks"] != "nobody":
            first_row = 0 if prompt["asks"] == "for all" else len(probe.hits)
            stored = self.tiers.look(tenant, tokens, first_row)
        return probe, (self.plan(probe, stored, tokens), tokens, tenant)

    def late_start(self, tokens: list[int]) -> int | None:
        """Some tokens at the end may be output that is computed again."""
        if self.replay is None:
            return None
        return max(0, len(tokens) - len(tokens) % 3 - self.replay)

    def plan(self, probe: Probe, stored: StoredPrefix | None, tokens: list[int]) -> HitPlan:
        return plan_hit(
            probe,
            stored,
            block_tokens=BLOCK_TOKENS,
            window_tokens=self.kv.window_tokens,
            window_kv=self.window_kv,
            limit_tokens=probe.limit_tokens,
            alignment=self.kv.group.alignment,
            restart_tokens=self.late_start(tokens),
        )

    def admit(self, planned: Planned, room: int) -> SequenceId | None:
        plan, tokens, tenant = planned
        sequence = self.new_id()
        num_tokens = len(tokens) - 1 + room
        before, available = self.kv.counters(), self.num_available()
        needed = self.kv.num_blocks_to_admit(plan, num_tokens)
        entries = [s.entry for s in plan.sources if not isinstance(s, LoadedRow)]
        is_stale = any(self.kv._index.get(entry.key) is not entry for entry in entries)
        lease = self.kv.admit(sequence, plan, num_tokens)
        if not isinstance(lease, Lease):
            assert self.kv.counters() == before
            assert (lease == StalePlan()) if is_stale else (lease is None and needed > available)
            return None
        assert not is_stale
        assert needed <= available
        assert lease.num_hit_tokens == plan.num_hit_tokens < len(tokens)
        assert len(lease.block_table) == blocks_for(num_tokens, BLOCK_TOKENS)
        self.take_blocks(lease, plan)
        live = Live(
            tenant=tenant, tokens=list(tokens), lease=lease, num_computed=plan.computed_from,
            table=list(lease.block_table), late_start=self.late_start(tokens),
            is_loading=bool(lease.loads),
        )  # fmt: skip
        self.live[sequence] = live
        if not live.is_loading:
            self.memory.check_hit(live)
        return sequence

    def load(self, sequence: SequenceId, num_moves: int) -> None:
        live = self.live[sequence]
        if not live.is_loading:
            return
        for move in live.lease.loads[live.num_loaded :][:num_moves]:
            self.tiers.load(move, self.memory)
            live.num_loaded += 1
        if live.num_loaded == len(live.lease.loads):
            self.memory.check_hit(live)
            self.kv.loaded(sequence)
            live.is_loading = False

    def detach(self, sequence: SequenceId) -> None:
        live = self.live.pop(sequence)
        holder = SequenceId(-1 - self.new_id())
        self.kv.detach(sequence, live.num_loaded, holder)
        pending = live.lease.loads[live.num_loaded :]
        self.holders[holder] = list({move.block for move in pending})
        for move in pending:  # a loader that is still at it, and fails
            slots = self.memory.blocks[move.block]
            lane = slots.of_global if move.meta.part is KVPart.GLOBAL else slots.of_window
            lane[:] = [None] * BLOCK_TOKENS

    def write(self, sequence: SequenceId, num_tokens: int) -> int:
        """A chunk runs; where it ends."""
        live = self.live[sequence]
        end = min(live.num_computed + num_tokens, len(live.tokens))
        for position in range(live.num_computed, end):
            self.memory.compute(live, position, may_write=self.may_write(sequence, position))
        return end

    def compute(self, sequence: SequenceId, num_tokens: int, *, publish_tail: bool) -> None:
        """A chunk runs and is published."""
        live = self.live[sequence]
        if live.is_loading:
            return
        live.num_computed = self.write(sequence, num_tokens)
        entries = list(self.kv.publish(sequence, live.tokens, live.num_computed))
        if publish_tail:
            tail = self.kv.publish_tail(sequence, live.tokens, live.num_computed)
            if tail is not None:
                assert prefix_of(tail) == tuple(live.tokens[: live.num_computed])
                entries.append(tail)
        for entry in entries:
            assert entry in self.kv._index
            assert prefix_of(entry) == tuple(live.tokens[: len(prefix_of(entry))])
        self.known += entries

    def decode(self, sequence: SequenceId, token: int) -> None:
        live = self.live[sequence]
        needed = blocks_for(len(live.tokens) + 1, BLOCK_TOKENS) - len(live.table)
        available = self.num_available()
        if self.kv.grow(sequence, len(live.tokens) + 1):
            assert needed <= available
            table = list(self.kv.block_table(sequence))
            assert table[: len(live.table)] == live.table
            self.must_be_unused(table[len(live.table) :])
            live.table = table
            live.tokens.append(token)
        else:
            assert needed > available

    def free(self, sequence: SequenceId) -> None:
        live = self.live[sequence]
        if live.is_loading:
            self.detach(sequence)
            return
        del self.live[sequence]
        self.past.append(live.tokens)
        self.kv.free(sequence)

    @invariant()
    def the_books_agree_and_tell_the_truth(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        assert self.kv.counters().num_held_blocks == len(self.held_blocks())
        assert self.kv.num_available_blocks == self.num_available()
        for entry in self.kv._index:
            self.memory.check_entry(entry)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for block, _ in self.pinned:
            self.kv.unpin(block)
        self.pinned.clear()
        for sequence in list(self.live):
            self.free(sequence)
        for holder in self.holders:
            self.kv.free(holder)
        self.kv.check_integrity()
        assert self.kv.num_available_blocks == self.num_blocks

    # Helpers

    def some(self, which: int) -> SequenceId | None:
        return list(self.live)[which % len(self.live)] if self.live else None

    def new_id(self) -> SequenceId:
        self.next_id += 1
        return SequenceId(self.next_id - 1)

    def held_blocks(self) -> set[BlockId]:
        return {
            *(block for live in self.live.values() for block in live.table),
            *(block for blocks in self.holders.values() for block in blocks),
            *(block for block, _ in self.pinned),
        }

    def num_available(self) -> int:
        return self.num_blocks - len(self.held_blocks())

    def check_probe(self, probe: Probe, tokens: list[int], tenant: str) -> None:
        """The longest that any published block gives, to the token."""
        limit = min(len(tokens) - 1, probe.limit_tokens)
        longest = max(
            (
                num_common(prefix_of(entry), tokens[:limit])
                for entry in self.kv._index
                if entry.root.identity.tenant == tenant
            ),
            default=0,
        )
        assert probe.num_hit_tokens == len(probe.hits) * BLOCK_TOKENS
        assert probe.num_hit_tokens + probe.num_tail_tokens == longest
        assert probe.num_tail_tokens < BLOCK_TOKENS

    def take_blocks(self, lease: Lease, plan: HitPlan) -> None:
        """Copies first; then nothing but shared rows may be in use by others."""
        table = list(lease.block_table)
        assert len(set(table)) == len(table)
        targets = {target for _, target in lease.copies}
        self.memory.copy(lease.copies)
        for row, block in enumerate(table):
            source = plan.sources[row] if row < len(plan.sources) else None
            if isinstance(source, SharedRow):
                continue
            assert block not in self.held_blocks(), "a block was given to two"
            is_adopted = isinstance(source, CopiedRow) and block not in targets
            if not is_adopted and block not in targets:
                self.memory.spoil(block)

    def must_be_unused(self, blocks: list[BlockId]) -> None:
        assert not self.held_blocks() & set(blocks), "a block was given to two"
        for block in blocks:
            self.memory.spoil(block)

    def may_write(self, sequence: SequenceId, position: int) -> bool:
        """Nobody else has the block in a table, and no published token of it is overwritten."""
        live = self.live[sequence]
        block = live.table[position // BLOCK_TOKENS]
        readers = [s for s, other in self.live.items() if block in other.table]
        readers += [h for h, blocks in self.holders.items() if block in blocks]
        entry = self.kv._index.entry_of(block)
        num_published = len(entry.tokens) if entry is not None else 0
        return readers == [sequence] and position % BLOCK_TOKENS >= num_published


def identity(tenant: str) -> CacheIdentity:
    return CacheIdentity("m", "l", tenant)


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.mark.parametrize("window_kv", WindowKV)
@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize("collides", [False, True])
@pytest.mark.parametrize("replay", [None, 5])
def test_long_random_walks(
    replay: int | None, collides: bool, window: int | None, window_kv: WindowKV
) -> None:
    """The same rules, many calls deep: what is rare in short sequences is common here."""
    for seed in range(NUM_WALKS):
        rng = random.Random(seed)
        machine = KVMachine()
        alignment = 1 + (seed % 2 if replay else 0)
        machine.build(rng.randrange(6, 26), window, window_kv, collides, alignment, replay)
        for _ in range(WALK_CALLS):
            which, num = rng.randrange(11), rng.randrange(1, 8)
            if len(machine.live) > 3:
                machine.end(which)
            prompt = {
                "past": rng.randrange(21),
                "keep": rng.choice([rng.randrange(25), 25]),
                "more": [rng.randrange(2) for _ in range(rng.randrange(1, 7))],
                "tenant": rng.choice(["", "", "", "a"]),
                "max_hit": rng.choice([None, None, None, None, None, 0, 9]),
                "asks": rng.choice(["nobody", "for the rest", "for all"]),
            }
            tier = rng.choice([Tier.HOST, Tier.DISK])
            match rng.choices(range(12), weights=[9, 6, 2, 2, 1, 12, 4, 2, 2, 2, 2, 1])[0]:
                case 0:
                    machine.whole_turn(prompt, rng.randrange(6), rng.randrange(12))
                case 1:
                    machine.begin(prompt, rng.randrange(1, 5))
                case 2:
                    machine.look_only(prompt)
                case 3:
                    machine.begin_late(which)
                case 4:
                    machine.look_again(which)
                case 5:
                    machine.go_on(which, num, rng.choice(["", "full", "tail"]))
                case 6:
                    machine.end(which)
                case 7:
                    machine.end_load(which)
                case 8:
                    machine.pin(rng.randrange(40))
                case 9:
                    machine.unpin(which)
                case 10:
                    machine.store(rng.choice([0, 0, rng.randrange(30)]), tier)
                case _:
                    machine.twin(which)
            machine.the_books_agree_and_tell_the_truth()
            del machine.past[2:-18]
        machine.teardown()
