"""Hits to the token: tails, forks inside a block, and the copies that they take."""

from __future__ import annotations

from kv_tools import BLOCK_TOKENS, IDENTITY, admitted, look, manager, plan_of, run, start

from headwater.core.blocks import CacheIdentity
from headwater.core.cache import MissReason
from headwater.core.step import SequenceId
from headwater.kv.hit_plan import CopiedRow
from headwater.kv.manager import Lease, StalePlan
from headwater.kv.probe import MAX_COMPARED_CHILDREN


def test_the_next_turn_hits_to_the_last_token_of_the_answer() -> None:
    kv = manager(16)
    turn = list(range(10))
    run(kv, 0, turn, tail=True)
    following = [*turn, 50, 51, 52]
    lease = start(kv, 1, following)
    assert lease.num_hit_tokens == 10
    [(source, target)] = lease.copies
    assert lease.block_table[2] == target != source
    kv.check_integrity()


def test_the_same_prompt_again_computes_one_token() -> None:
    kv = manager(16)
    for prompt in (range(10), range(50, 58)):  # with a tail, and without
        run(kv, 0, prompt, tail=True)
        plan = look(kv, prompt)
        assert plan.num_hit_tokens == len(prompt) - 1
        assert plan.reason is MissReason.NONE


def test_a_fork_inside_a_block_shares_the_tokens_before_it() -> None:
    kv = manager(16)
    run(kv, 0, range(12))
    plan = look(kv, [*range(7), 99, 98, 97])
    assert plan.num_hit_tokens == 7
    assert plan.reason is MissReason.DIFFERS
    assert isinstance(plan.sources[1], CopiedRow)
    lease = admitted(kv, 1, plan, 10)
    kv.publish(SequenceId(1), [*range(7), 99, 98, 97], 10)
    assert lease.copies[0][0] != lease.block_table[1]
    # Both branches are there now.
    assert look(kv, [*range(7), 99, 98]).num_hit_tokens == 8
    assert look(kv, range(12)).num_hit_tokens == 11


def test_a_fork_in_the_first_block_is_no_hit_worth_a_copy() -> None:
    kv = manager(16)
    run(kv, 0, range(12))
    plan = look(kv, [0, 1, 2, 99, 98, 97])
    assert plan.num_hit_tokens == 0
    assert plan.reason is MissReason.TOO_SHORT
    assert look(kv, [99, 1, 2, 3, 4, 5]).reason is MissReason.NEW


def test_of_two_branches_the_one_that_shares_more_is_copied() -> None:
    kv = manager(16)
    head = [1, 2, 3, 4]
    run(kv, 0, [*head, 5, 6, 7, 8])
    run(kv, 1, [*head, 5, 9, 9, 9])
    assert look(kv, [*head, 5, 6, 0, 0, 0]).num_hit_tokens == 6
    assert look(kv, [*head, 5, 9, 9, 0, 0]).num_hit_tokens == 7


def test_a_tail_becomes_the_full_block_in_the_same_place() -> None:
    kv = manager(16)
    tokens = list(range(6))
    start(kv, 0, tokens, tail=True)
    sequence = SequenceId(0)
    [tail] = [entry for entry in kv._index if len(entry.tokens) < BLOCK_TOKENS]
    assert look(kv, [*tokens, 9]).num_hit_tokens == 6
    tokens += [6, 7, 8]
    assert kv.grow(sequence, 9)
    [full] = kv.publish(sequence, tokens, 9)
    assert full.block == tail.block
    assert not kv.pin(tail)
    assert kv.publish_tail(sequence, tokens, 9) is not None
    kv.free(sequence)
    kv.check_integrity()
    assert kv.counters().num_cached_blocks == 3


def test_a_tail_that_a_longer_one_begins_with_goes() -> None:
    kv = manager(16)
    run(kv, 0, range(6), tail=True)
    assert kv.counters().num_cached_blocks == 2
    run(kv, 1, range(7), tail=True)  # hits the old tail, and is longer
    assert kv.counters().num_cached_blocks == 2
    assert look(kv, range(9)).num_hit_tokens == 7
    run(kv, 2, range(9))
    assert kv.counters().num_cached_blocks == 2
    assert kv.counters().num_evicted_blocks == 0


def test_two_with_the_same_prompt_publish_one_tail() -> None:
    kv = manager(16)
    plans = [look(kv, range(6)) for _ in range(2)]
    for number, plan in enumerate(plans):
        admitted(kv, number, plan, 6)
        kv.publish(SequenceId(number), range(6), 6)
    assert kv.publish_tail(SequenceId(0), range(6), 6) is not None
    assert kv.publish_tail(SequenceId(0), range(6), 6) is None  # again
    assert kv.publish_tail(SequenceId(1), range(6), 6) is None
    for number in range(2):
        kv.free(SequenceId(number))
    kv.check_integrity()
    assert kv.counters().num_cached_blocks == 2


def test_a_tail_needs_its_full_blocks_published_first() -> None:
    kv = manager(16)
    admitted(kv, 0, look(kv, range(6)), 6)
    assert kv.publish_tail(SequenceId(0), range(6), 6) is None
    kv.publish(SequenceId(0), range(6), 6)
    assert kv.publish_tail(SequenceId(0), range(6), 4) is None  # there is none
    assert kv.publish_tail(SequenceId(0), range(6), 6) is not None


def test_a_tail_can_be_hit_while_its_owner_writes_on() -> None:
    kv = manager(16)
    start(kv, 0, range(6), tail=True)
    assert kv.grow(SequenceId(0), 8)
    lease = start(kv, 1, [*range(6), 70, 71], tail=False)
    assert lease.num_hit_tokens == 6
    assert lease.copies == ((kv.block_table(SequenceId(0))[1], lease.block_table[1]),)
    kv.publish(SequenceId(0), [*range(6), 60, 61], 8)
    kv.check_integrity()
    assert look(kv, [*range(6), 60, 61, 0]).num_hit_tokens == 8
    assert look(kv, [*range(6), 70, 71, 0]).num_hit_tokens == 8


def test_a_copys_source_is_not_evicted_for_its_own_admission() -> None:
    kv = manager(5)
    run(kv, 0, range(6), tail=True)  # 2 cached, the tail would be the first to go
    run(kv, 1, range(50, 58))  # 2 cached
    prompt = [*range(6), 70, 71, 72]
    lease = admitted(kv, 2, look(kv, prompt), 9)
    [(source, target)] = lease.copies
    assert source not in lease.block_table
    assert target in lease.block_table
    assert look(kv, range(50, 58)).num_hit_tokens == 4  # this one had to give way
    assert look(kv, [*range(6), 0]).num_hit_tokens == 6
    kv.check_integrity()


def test_a_source_becomes_the_sequences_own_where_there_is_no_room_for_both() -> None:
    """A prompt that fills the pool could never start if its copy needed one block more."""
    kv = manager(3)
    run(kv, 0, range(10), tail=True)
    prompt = [*range(10), 10, 11]
    plan = look(kv, prompt)
    assert kv.num_blocks_to_admit(plan, 12) == 3 == kv.num_available_blocks
    lease = admitted(kv, 1, plan, 12)
    assert (lease.num_hit_tokens, lease.copies) == (10, ())
    assert look(kv, [*range(10), 0]).num_hit_tokens == 8
    kv.publish(SequenceId(1), prompt, 12)
    kv.free(SequenceId(1))
    kv.check_integrity()
    assert look(kv, [*range(10), 0]).num_hit_tokens == 10


def test_what_hangs_on_a_source_goes_when_that_is_written() -> None:
    kv = manager(4)
    run(kv, 0, range(16))
    prompt = [*range(6), *range(90, 100)]
    lease = admitted(kv, 1, look(kv, prompt), 16)
    assert (lease.num_hit_tokens, lease.copies) == (6, ())
    assert kv.counters().num_cached_blocks == 0
    assert look(kv, range(16)).num_hit_tokens == 4
    kv.check_integrity()


def test_a_tail_that_was_superseded_makes_the_plan_stale() -> None:
    kv = manager(16)
    run(kv, 0, range(6), tail=True)
    plan = look(kv, [*range(6), 9])
    run(kv, 1, range(7), tail=True)
    assert kv.admit(SequenceId(2), plan, 7) == StalePlan()


def test_a_shared_system_prompt_is_found_among_many_that_begin_with_it() -> None:
    """Only so many are compared, the last used first; the very same prompt is found by key."""
    kv = manager(1000)
    head = [1, 2, 3, 4]
    for number in range(MAX_COMPARED_CHILDREN + 20):
        run(kv, number, [*head, 5, number + 10, 0], tail=True)
    assert look(kv, [*head, 5, 10 + 70, 7, 7]).num_hit_tokens == 6
    assert look(kv, [*head, 5, 10 + 3, 7, 7]).num_hit_tokens == 5  # not compared any more
    assert look(kv, [*head, 5, 10 + 3, 0]).num_hit_tokens == 6
    assert look(kv, [*head, 5, 10 + 3, 0, 9]).num_hit_tokens == 5
    run(kv, 5000, [*head, 5, 10 + 3, 0])  # it is used again
    assert look(kv, [*head, 5, 10 + 3, 7, 7]).num_hit_tokens == 6


def test_an_unchanged_index_is_not_looked_at_again() -> None:
    kv = manager(16)
    run(kv, 0, range(6), tail=True)
    probe = kv.probe(range(9), IDENTITY)
    assert kv.probe(range(9), IDENTITY, earlier=probe) is probe
    longer = kv.probe(range(10), IDENTITY, earlier=probe)
    assert (longer.num_tokens, longer.num_tail_tokens) == (10, 2)
    shorter = kv.probe(range(9), IDENTITY, max_hit_tokens=5, earlier=probe)
    assert plan_of(kv, shorter).num_hit_tokens == 5


def test_c12_tails_and_forks_stay_within_the_tenant() -> None:
    kv = manager(32)
    run(kv, 0, range(10), tail=True)
    other = CacheIdentity("model", "layout", "tenant")
    plan = look(kv, [*range(7), 99], other)
    assert plan.num_hit_tokens == 0
    assert plan.reason is MissReason.NEW  # not even that something differs is told
    assert look(kv, range(10), other).reason is MissReason.NEW
    lease = kv.admit(SequenceId(1), look(kv, range(10), other), 10)
    assert isinstance(lease, Lease)
    kv.publish(SequenceId(1), range(10), 10)
    kv.publish_tail(SequenceId(1), range(10), 10)
    kv.free(SequenceId(1))
    assert look(kv, range(12), other).num_hit_tokens == 10
    assert look(kv, range(12)).num_hit_tokens == 10
    assert kv.counters().num_cached_blocks == 6
    kv.check_integrity()
