"""The prefix map against a slow, obvious model of who holds which blocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.fleet import KVEvents
from headwater.router.prefix_map import PrefixMap, PromptKeys

KEYS = [PrefixKey(bytes([n])) for n in range(8)]
CHANGE = st.tuples(
    st.sampled_from("abc"), st.sets(st.sampled_from(KEYS)), st.sets(st.sampled_from(KEYS)),
    st.sampled_from((False, False, False, True)), st.booleans(),
)  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(CHANGE, max_size=20), st.lists(st.sampled_from(KEYS), max_size=6, unique=True))
def test_it_says_what_a_slow_model_says(
    changes: list[tuple[str, set[PrefixKey], set[PrefixKey], bool, bool]], prompt: list[PrefixKey]
) -> None:
    known: dict[str, set[PrefixKey]] = {}
    made = PrefixMap()
    for worker_id, added, removed, reset, is_lost in changes:
        events = KVEvents(added=tuple(added - removed), removed=tuple(removed), reset=reset)
        made.apply(worker_id, events)
        held = set() if reset else known.get(worker_id, set())
        known[worker_id] = held - removed | (added - removed)
        if is_lost:
            made.drop(worker_id)
            del known[worker_id]
    expected = {}
    for worker_id, keys in known.items():
        depth = 0
        while depth < len(prompt) and prompt[depth] in keys:
            depth += 1
        if depth:
            expected[worker_id] = depth
    assert made.lookup(prompt) == expected
    assert len(made) == len(set().union(*known.values()))


def test_e08_a_restarted_workers_old_blocks_are_forgotten() -> None:
    made = PrefixMap()
    made.apply("a", KVEvents(added=tuple(KEYS[:3])))
    made.apply("a", KVEvents(added=(KEYS[0],), reset=True))
    assert made.lookup(KEYS) == {"a": 1}
    made.drop("a")
    assert made.lookup(KEYS) == {}
    assert len(made) == 0


def test_memory_is_bounded_and_what_is_known_stays_whole_from_its_start() -> None:
    made = PrefixMap(max_keys=3)
    made.apply("a", KVEvents(added=tuple(KEYS)))
    assert (len(made), made.num_refused) == (3, 5)
    assert made.lookup(KEYS) == {"a": 3}
    made.apply("b", KVEvents(added=tuple(KEYS[:2])))
    assert made.lookup(KEYS) == {"a": 3, "b": 2}, "a known key takes no more room"


def test_a_lookup_ends_at_the_first_key_that_nobody_has() -> None:
    made = PrefixMap()
    made.apply("a", KVEvents(added=(KEYS[0], KEYS[2])))
    read = []

    def keys() -> list[PrefixKey]:
        return KEYS

    def watched() -> object:
        for key in keys():
            read.append(key)
            yield key

    assert made.lookup(watched()) == {"a": 1}  # type: ignore[arg-type]
    assert read == KEYS[:2]


def test_places_of_lost_workers_are_used_again() -> None:
    made = PrefixMap()
    for number in range(1000):
        made.apply(str(number), KVEvents(added=(KEYS[0],)))
        if number >= 2:
            made.drop(str(number - 2))
    assert made.lookup(KEYS) == {"998": 1, "999": 1}
    assert max(made._bits.values()) <= 1 << 2


def test_a_prompts_keys_are_computed_once_and_leave_out_the_last_token() -> None:
    identity = CacheIdentity("f", "l", "t")
    whole = PromptKeys(identity, range(64), 16)
    assert list(whole) == list(whole)
    assert len(list(whole)) == 3, "the last block ends with the token that is always computed"
    assert len(list(PromptKeys(identity, range(65), 16))) == 4
    assert list(PromptKeys(CacheIdentity("f", "l", "u"), range(64), 16)) != list(whole)
