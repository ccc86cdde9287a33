"""plan_decode: everybody goes while blocks last, then the newest give way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.step import SequenceId
from headwater.decode.plan import RunningCandidate, plan_decode


def candidate(
    number: int, *, missing: int = 0, priority: int = 0, decoding: bool = True
) -> RunningCandidate:
    return RunningCandidate(SequenceId(number), priority, number, missing, decoding)


def never_asked(sequence_id: SequenceId) -> int:
    raise AssertionError("private blocks are counted only when blocks lack")


def three_each(sequence_id: SequenceId) -> int:
    return 3


def test_all_decode_while_blocks_last() -> None:
    running = [candidate(2, missing=1), candidate(0), candidate(1, missing=1)]
    plan = plan_decode(running, 2, never_asked)
    assert plan.rows == (2, 0, 1)
    assert plan.preempted == ()


def test_the_newest_gives_way_and_its_blocks_serve_the_others() -> None:
    running = [candidate(number, missing=1) for number in range(4)]
    plan = plan_decode(running, 0, three_each)
    assert plan.preempted == (3,)
    assert plan.rows == (0, 1, 2)


def test_less_important_work_gives_way_before_newer() -> None:
    running = [candidate(0, priority=1), candidate(1), candidate(2, missing=1)]
    assert plan_decode(running, 0, three_each).preempted == (0,)


def test_a_sequence_in_prefill_gives_way_like_any_other_but_has_no_row() -> None:
    running = [candidate(0, missing=1), candidate(1, decoding=False), candidate(2, decoding=False)]
    plan = plan_decode(running, 0, three_each)
    assert plan.rows == (0,)
    assert plan.preempted == (2,)


def test_one_that_needs_a_block_may_be_the_one_that_gives_way() -> None:
    running = [candidate(0), candidate(1, missing=1)]
    plan = plan_decode(running, 0, lambda _: 0)
    assert plan.preempted == (1,)
    assert plan.rows == (0,)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    running=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=10,
    ),
    available=st.integers(0, 5),
)
def test_e03_the_oldest_is_never_preempted_and_no_more_than_needed_are(
    running: list[tuple[int, int, int, bool]], available: int
) -> None:
    candidates = [
        candidate(i, missing=m if d else 0, priority=p, decoding=d)
        for i, (p, m, _, d) in enumerate(running)
    ]
    private = {SequenceId(i): b for i, (_, _, b, _) in enumerate(running)}
    plan = plan_decode(candidates, available, private.__getitem__)

    def age(c: RunningCandidate) -> tuple[int, int]:
        return c.priority, c.arrival

    oldest = min(candidates, key=age)
    assert oldest.sequence_id not in plan.preempted
    kept = [c for c in candidates if c.sequence_id not in plan.preempted]
    assert plan.rows == tuple(c.sequence_id for c in kept if c.is_decoding)
    # Everybody who gave way is newer than everybody who stays, newest first.
    gone = [next(c for c in candidates if c.sequence_id == i) for i in plan.preempted]
    assert [age(c) for c in gone] == sorted((age(c) for c in gone), reverse=True)
    assert all(age(k) < age(g) for k in kept for g in gone)
    # What is there now is enough, and was not before the last one gave way.
    freed = sum(private[i] for i in plan.preempted)
    need = sum(c.num_missing_blocks for c in kept)
    assert need <= available + freed or kept == [oldest]
    if gone:
        last = gone[-1]
        before = available + freed - private[last.sequence_id]
        assert need + last.num_missing_blocks > before
