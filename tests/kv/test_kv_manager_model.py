"""KVManager against a slow, obvious model, over random sequences of calls.

The model knows no hashes, refcounts or free lists: it keeps, per block, the
whole prefix whose KV the block contains (as if the KV could be read back), and
checks that every hit is the truth, that no call writes where another reads, and
that all-or-nothing answers agree with plain counting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from headwater.core.blocks import BlockId, CacheIdentity, blocks_for
from headwater.core.step import SequenceId
from headwater.kv.manager import KVGroup, KVManager, Probe

BLOCK_TOKENS = 2
TENANTS = ("", "a")

Content = tuple[str, tuple[int, ...]]  # tenant, all tokens up to the block's end

# Two token values and short prompts: prefixes are shared, repeated and evicted all the time.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=13)


@dataclass
class Live:
    tenant: str
    tokens: list[int]
    num_computed: int
    table: list[BlockId] = field(default_factory=list)


class KVMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    probes = Bundle("probes")

    @initialize(num_blocks=st.integers(3, 12))
    def build(self, num_blocks: int) -> None:
        self.kv = KVManager(KVGroup(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS))
        self.num_blocks = num_blocks
        self.live: dict[SequenceId, Live] = {}
        self.content: dict[BlockId, Content] = {}  # what each block's KV is, once written
        self.next_id = 0
        self.num_prompt_tokens = 0

    @rule(target=probes, tokens=prompts, tenant=st.sampled_from(TENANTS))
    def probe(self, tokens: list[int], tenant: str) -> tuple[Probe, list[int], str]:
        before = self.kv.counters()
        probe = self.kv.probe(tokens, CacheIdentity("m", "l", tenant))
        assert self.kv.counters() == before
        assert probe.num_hit_tokens < len(tokens)
        assert probe.num_hit_tokens == len(probe.hits) * BLOCK_TOKENS
        self.must_contain([e.block for e in probe.hits], tokens, tenant)
        return probe, tokens, tenant

    @rule(target=probes, probed=probes)
    def probe_again(self, probed: tuple[Probe, list[int], str]) -> tuple[Probe, list[int], str]:
        probe, tokens, tenant = probed
        identity = CacheIdentity("m", "l", tenant)
        again = self.kv.probe(tokens, identity, earlier=probe)
        assert again == self.kv.probe(tokens, identity)
        return again, tokens, tenant

    @rule(target=sequences, probed=probes)
    def admit(self, probed: tuple[Probe, list[int], str]) -> object:
        probe, tokens, tenant = probed  # perhaps long ago: its hits may be gone
        sequence = SequenceId(self.next_id)
        self.next_id += 1
        before = self.kv.counters()
        lease = self.kv.admit(sequence, probe, len(tokens))
        if lease is None:
            assert self.kv.counters() == before
            # With no sharing at all it would need this much; refused means it is not there.
            assert blocks_for(len(tokens), BLOCK_TOKENS) > self.num_available()
            return multiple()
        self.num_prompt_tokens += len(tokens)
        table = list(lease.block_table)
        num_hits = lease.num_hit_tokens // BLOCK_TOKENS
        assert num_hits <= len(probe.hits)
        assert len(table) == blocks_for(len(tokens), BLOCK_TOKENS)
        self.must_contain(table[:num_hits], tokens, tenant)
        self.must_be_unused(table[num_hits:])
        self.live[sequence] = Live(tenant, list(tokens), lease.num_hit_tokens, table)
        return sequence

    @rule(sequence=sequences, num_tokens=st.integers(1, 5), publish=st.booleans())
    def compute(self, sequence: SequenceId, num_tokens: int, publish: bool) -> None:
        """A chunk runs: KV is written, then published (or the step was not applied yet)."""
        live = self.live.get(sequence)
        if live is None:
            return
        start = live.num_computed
        end = min(start + num_tokens, len(live.tokens))
        for position in range(start, end):
            block = live.table[position // BLOCK_TOKENS]
            readers = [s for s, other in self.live.items() if block in other.table]
            assert readers == [sequence], "wrote to a block that another sequence holds"
            if (position + 1) % BLOCK_TOKENS == 0:
                self.content[block] = (live.tenant, tuple(live.tokens[: position + 1]))
            else:
                self.content.pop(block, None)
        live.num_computed = end
        if publish:
            self.kv.publish(sequence, live.tokens, end)

    @rule(sequence=sequences, token=st.integers(0, 1))
    def decode(self, sequence: SequenceId, token: int) -> None:
        live = self.live.get(sequence)
        if live is None or live.num_computed < len(live.tokens):
            return
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

    @rule(sequence=consumes(sequences))
    def free(self, sequence: SequenceId) -> None:
        if sequence in self.live:
            self.kv.free(sequence)
            del self.live[sequence]

    @rule(sequence=sequences)
    def fresh_copy_of_a_running_prompt(self, sequence: SequenceId) -> None:
        """Private duplicates: the same tokens again, computed without any hit."""
        live = self.live.get(sequence)
        if live is None:
            return
        identity = CacheIdentity("m", "l", live.tenant)
        twin = SequenceId(self.next_id)
        self.next_id += 1
        probe = self.kv.probe(live.tokens, identity, max_hit_tokens=0)
        lease = self.kv.admit(twin, probe, len(live.tokens))
        if lease is None:
            return
        self.num_prompt_tokens += len(live.tokens)
        table = list(lease.block_table)
        self.must_be_unused(table)
        self.live[twin] = Live(live.tenant, list(live.tokens), 0, table)
        self.compute(twin, len(live.tokens), True)
        if len(self.live) % 2:
            self.free(twin)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        counters = self.kv.counters()
        held = {block for live in self.live.values() for block in live.table}
        assert counters.num_held_blocks == len(held)
        assert self.kv.num_available_blocks == self.num_available()
        assert counters.num_hit_tokens + counters.num_miss_tokens == self.num_prompt_tokens

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for sequence in self.live:
            self.kv.free(sequence)
        self.kv.check_integrity()
        assert self.kv.num_available_blocks == self.num_blocks

    # The model

    def num_available(self) -> int:
        return self.num_blocks - len({b for live in self.live.values() for b in live.table})

    def must_contain(self, blocks: list[BlockId], tokens: list[int], tenant: str) -> None:
        for row, block in enumerate(blocks):
            end = (row + 1) * BLOCK_TOKENS
            assert self.content.get(block) == (tenant, tuple(tokens[:end])), "a wrong hit"

    def must_be_unused(self, blocks: list[BlockId]) -> None:
        held = {block for live in self.live.values() for block in live.table}
        assert not held & set(blocks), "a block was given to two sequences"
        for block in blocks:
            self.content.pop(block, None)


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
