"""KVManager's contract, case by case; random sequences are in test_kv_manager_model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from kv_tools import BLOCK_TOKENS, IDENTITY, admitted, look, manager, plan_of, run, start

from headwater.core.blocks import BlockId, CacheIdentity, PrefixKey, chain_key
from headwater.core.errors import ConfigError, InvalidChange
from headwater.core.step import SequenceId
from headwater.kv.manager import KVGroup, KVManager, Lease, StalePlan


def test_a_second_prompt_hits_the_full_blocks_it_shares() -> None:
    kv = manager()
    first = run(kv, 0, range(10))
    second = run(kv, 1, [*range(9), 99, 98])
    assert first.num_hit_tokens == 0
    assert second.num_hit_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]


def test_the_last_token_is_never_a_hit() -> None:
    kv = manager()
    run(kv, 0, range(8))
    assert look(kv, range(8)).num_hit_tokens == 7
    assert look(kv, range(9)).num_hit_tokens == 8
    assert look(kv, []).num_hit_tokens == 0


def test_what_a_sequence_writes_starts_in_a_block_that_only_it_holds() -> None:
    kv = manager(16)
    tokens = list(range(20))
    start(kv, 0, tokens)
    for number in range(1, 4):
        lease = start(kv, number, tokens)
        assert lease.num_hit_tokens == (19 if number else 0)
        own = set(lease.block_table[lease.num_hit_tokens // BLOCK_TOKENS :])
        for other in range(number):
            assert not own & set(kv.block_table(SequenceId(other)))
    kv.check_integrity()


@pytest.mark.parametrize(
    "other",
    [
        CacheIdentity("another model", "layout"),
        CacheIdentity("model", "another layout"),
        CacheIdentity("model", "layout", "tenant"),
    ],
)
def test_c12_another_identity_never_hits(other: CacheIdentity) -> None:
    kv = manager()
    run(kv, 0, range(12), tail=True)
    assert look(kv, range(12), other).num_hit_tokens == 0
    assert look(kv, range(12)).num_hit_tokens == 11


def test_a_forced_hash_collision_gives_no_wrong_hit() -> None:
    def first_token_only(parent: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
        return chain_key(PrefixKey(b""), tokens[:1])

    kv = KVManager(KVGroup(num_blocks=8, block_tokens=BLOCK_TOKENS), hash_block=first_token_only)
    run(kv, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert look(kv, [1, 2, 3, 4, 0]).num_hit_tokens == 4
    assert look(kv, [1, 2, 3, 0, 0]).num_hit_tokens == 0  # other tokens
    assert look(kv, [5, 6, 7, 8, 0]).num_hit_tokens == 0  # other parent
    # A colliding prefix works, but stays private; so does what follows it.
    run(kv, 1, [1, 0, 0, 0, 4, 4, 4, 4, 9])
    assert kv.counters().num_cached_blocks == 2
    assert look(kv, [1, 0, 0, 0, 4, 4, 4, 4, 9]).num_hit_tokens == 0


def test_a_probe_changes_nothing_and_stops_hashing_at_the_first_miss() -> None:
    hashed: list[int] = []

    def counting(parent: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
        hashed.append(tokens[0])
        return chain_key(parent, tokens)

    kv = KVManager(KVGroup(num_blocks=64, block_tokens=BLOCK_TOKENS), hash_block=counting)
    run(kv, 0, range(8))
    before = kv.counters()
    hashed.clear()
    probe = kv.probe(range(200), IDENTITY)
    assert hashed == [0, 4, 8]
    assert kv.probe(range(200), IDENTITY, earlier=probe) is probe  # nothing happened since
    assert kv.counters() == before
    run(kv, 1, range(50, 58))
    hashed.clear()
    again = kv.probe(range(200), IDENTITY, earlier=probe)
    assert hashed == [8]
    assert again.hits == probe.hits


def test_a_hit_can_be_limited() -> None:
    kv = manager()
    run(kv, 0, range(16))
    assert look(kv, range(16), max_hit_tokens=0).num_hit_tokens == 0
    assert look(kv, range(16), max_hit_tokens=11).num_hit_tokens == 11
    assert look(kv, range(16), max_hit_tokens=12).num_hit_tokens == 12
    assert look(kv, range(16), max_hit_tokens=99).num_hit_tokens == 15


def test_admit_takes_all_or_nothing() -> None:
    kv = manager(4)
    start(kv, 0, range(9))  # 3 blocks
    before = kv.counters()
    assert kv.admit(SequenceId(1), look(kv, range(50, 58)), 8) is None
    assert kv.counters() == before
    # Two shared blocks and one fresh do fit.
    assert kv.num_blocks_to_admit(look(kv, range(9)), 9) == 1
    assert start(kv, 1, range(9)).num_hit_tokens == 8
    kv.check_integrity()


def test_cached_hits_are_not_evicted_to_make_room_for_their_own_sequence() -> None:
    kv = manager(4)
    run(kv, 0, range(9))  # 2 cached, 2 free
    plan = look(kv, range(17))
    assert kv.num_blocks_to_admit(plan, 17) == 5
    assert kv.admit(SequenceId(1), plan, 17) is None
    lease = admitted(kv, 1, plan, 16)
    assert lease.num_hit_tokens == 8
    kv.check_integrity()


def test_a_plan_whose_hits_were_evicted_is_stale_and_changes_nothing() -> None:
    kv = manager(4)
    run(kv, 0, range(9))
    probe = kv.probe(range(9), IDENTITY)
    assert probe.num_hit_tokens == 8
    start(kv, 1, range(50, 61))  # takes 3 blocks: one of the two hits goes, the tail
    kv.free(SequenceId(1))
    before = kv.counters()
    assert kv.admit(SequenceId(2), plan_of(kv, probe), 9) == StalePlan()
    assert kv.counters() == before
    again = kv.probe(range(9), IDENTITY, earlier=probe)
    assert admitted(kv, 2, plan_of(kv, again), 9).num_hit_tokens == 4
    kv.check_integrity()


def test_grow_takes_a_block_only_at_a_border_and_all_or_nothing() -> None:
    kv = manager(3)
    sequence = SequenceId(0)
    start(kv, 0, range(3))
    table = kv.block_table(sequence)
    assert kv.grow(sequence, 4)
    assert kv.block_table(sequence) is table
    assert kv.grow(sequence, 5)
    assert len(kv.block_table(sequence)) == 2
    assert not kv.grow(sequence, 100)
    assert len(kv.block_table(sequence)) == 2
    assert kv.grow(sequence, 12)
    kv.check_integrity()


def test_eviction_takes_the_least_recent_prompt_and_its_tail_before_its_head() -> None:
    kv = manager(6)
    run(kv, 0, range(13))  # blocks a0 a1 a2 cached
    run(kv, 1, range(50, 59))  # b0 b1 cached; 1 free
    start(kv, 2, range(90, 97))  # 2 blocks: evicts a2
    assert look(kv, range(13)).num_hit_tokens == 8
    assert look(kv, range(50, 59)).num_hit_tokens == 8
    run(kv, 3, range(5))  # a0 is used again; its fresh block evicts a1
    assert look(kv, range(13)).num_hit_tokens == 4
    start(kv, 4, range(70, 80))  # 3 blocks: b1 and b0 go before a0
    assert look(kv, range(50, 59)).num_hit_tokens == 0
    assert look(kv, range(13)).num_hit_tokens == 4
    kv.check_integrity()


def test_two_that_computed_the_same_prompt_leave_one_entry() -> None:
    kv = manager()
    tokens = list(range(9))
    plans = [look(kv, tokens) for _ in range(2)]
    for number, plan in enumerate(plans):
        admitted(kv, number, plan, 9)
    new = [kv.publish(SequenceId(number), tokens, 9) for number in range(2)]
    assert [len(entries) for entries in new] == [2, 0]
    assert kv.published(SequenceId(1)) == new[0]
    assert kv.block_table(SequenceId(0)) != kv.block_table(SequenceId(1))
    for number in range(2):
        kv.free(SequenceId(number))
        kv.check_integrity()
    assert kv.counters().num_cached_blocks == 2


def test_a_tail_behind_a_private_copy_keeps_its_published_head_young() -> None:
    kv = manager(8)
    head = [1, 2, 3, 4]
    for number in range(2):
        admitted(kv, number, look(kv, [*head, 5]), 5)
    for number in range(2):
        kv.publish(SequenceId(number), head, 4)
    kv.free(SequenceId(0))  # the published head is cached; 1 holds a private copy
    tokens = [*head, 5, 6, 7, 8, 9]
    assert kv.grow(SequenceId(1), 9)
    kv.publish(SequenceId(1), tokens, 8)  # a child of the published head
    run(kv, 2, range(50, 55))
    kv.free(SequenceId(1))
    kv.check_integrity()  # checks that no tail outlives its head
    assert look(kv, tokens).num_hit_tokens == 8


def test_a_published_tail_survives_the_loss_of_anothers_head_by_publishing_its_own() -> None:
    kv = manager(6)
    head = [1, 2, 3, 4]
    for number in range(2):
        admitted(kv, number, look(kv, [*head, 5]), 5)
    for number in range(2):
        kv.publish(SequenceId(number), head, 4)
    tokens = [*head, *range(5, 14)]
    assert kv.grow(SequenceId(1), 13)
    kv.publish(SequenceId(1), tokens, 8)
    kv.free(SequenceId(0))
    start(kv, 2, range(50, 58))  # needs the cached head
    assert look(kv, tokens).num_hit_tokens == 0
    kv.check_integrity()
    kv.publish(SequenceId(1), tokens, 12)
    assert look(kv, tokens).num_hit_tokens == 12
    kv.check_integrity()


def test_prompts_are_counted_when_told_and_only_then() -> None:
    kv = manager()
    run(kv, 0, range(10))
    assert kv.counters().num_hit_tokens == kv.counters().num_miss_tokens == 0
    kv.count_prompt(0, 10)
    kv.count_prompt(8, 2)
    assert kv.counters().num_hit_tokens == 8
    assert kv.counters().num_miss_tokens == 12


def test_private_blocks_are_those_that_freeing_gives_back() -> None:
    kv = manager()
    start(kv, 0, range(9))
    start(kv, 1, range(9))
    before = kv.num_available_blocks
    assert kv.num_private_blocks(SequenceId(1)) == 1
    kv.free(SequenceId(1))
    assert kv.num_available_blocks == before + 1


def test_wrong_use_is_refused_by_name() -> None:
    kv = manager()
    start(kv, 0, range(5))
    with pytest.raises(InvalidChange, match="sequence 0 already holds"):
        kv.admit(SequenceId(0), look(kv, range(5)), 5)
    for wrong in (kv.free, kv.block_table, kv.num_private_blocks):
        with pytest.raises(InvalidChange, match="sequence 7 holds no blocks"):
            wrong(SequenceId(7))
    with pytest.raises(InvalidChange, match="cannot publish 12 tokens"):
        kv.publish(SequenceId(0), range(12), 12)
    kv.publish(SequenceId(0), range(5), 5)
    with pytest.raises(InvalidChange, match="at least one token"):
        kv.admit(SequenceId(1), look(kv, range(5)), 4)
    with pytest.raises(InvalidChange, match="sequence 0 is not loading"):
        kv.loaded(SequenceId(0))
    with pytest.raises(InvalidChange, match="block 7 is not pinned"):
        kv.unpin(BlockId(7))
    with pytest.raises(ConfigError, match=r"kv\.block_tokens must be >= 1, got 0"):
        KVGroup(num_blocks=1, block_tokens=0)
    with pytest.raises(ConfigError, match=r"kv\.block_tokens \(9\) must be a multiple of the 2"):
        KVGroup(num_blocks=1, block_tokens=9, alignment=2)


def test_1000_random_sequences_with_aborts_end_where_they_began() -> None:
    kv = manager(40)
    rng = random.Random(7)
    live: dict[SequenceId, tuple[list[int], int]] = {}
    num_hit_tokens = 0
    for number in range(1000):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
        plan = look(kv, tokens)
        sequence = SequenceId(number)
        lease = kv.admit(sequence, plan, len(tokens))
        must_free = not isinstance(lease, Lease)
        if isinstance(lease, Lease):
            live[sequence] = (tokens, lease.num_hit_tokens)
            num_hit_tokens += lease.num_hit_tokens
        while live and (must_free or rng.random() < 0.5):
            must_free = False
            victim = rng.choice(list(live))
            tokens, num_hit = live.pop(victim)
            # Aborted anywhere: what was computed by then is published, the rest is not.
            num_computed = rng.randrange(num_hit, len(tokens) + 1)
            kv.publish(victim, tokens, num_computed)
            kv.publish_tail(victim, tokens, num_computed)
            kv.free(victim)
        if number % 50 == 0:
            kv.check_integrity()
    for victim in live:
        kv.free(victim)
    kv.check_integrity()
    counters = kv.counters()
    assert counters.num_held_blocks == 0
    assert counters.num_free_blocks + counters.num_cached_blocks == 40
    assert num_hit_tokens > 0
    assert counters.num_evicted_blocks > 0
