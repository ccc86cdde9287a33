"""The load policy, the pace it is asked with, and the states that a load adds to a sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.blocks import BlockId
from headwater.core.errors import InvalidChange
from headwater.core.request import FinishReason, Request, RequestId, SamplingParams, StopParams
from headwater.core.sequence import (
    Admitted,
    Change,
    Computed,
    Ended,
    Finished,
    LoadEnded,
    Loading,
    Preempted,
    Prefilling,
    Reserved,
    Sequence,
    State,
    Waiting,
)
from headwater.core.step import SequenceId, StepPlan, StepResult, StepRow
from headwater.worker.load_policy import (
    LONGEST_LOAD_S,
    NOISE_S,
    is_worth_loading,
    is_worth_waiting,
)
from headwater.worker.pace import PrefillPace


def test_a_load_is_chosen_while_it_is_no_slower_than_computing() -> None:
    assert is_worth_loading(0.9, 1000, 1000.0)
    assert not is_worth_loading(1.1, 1000, 1000.0)
    assert is_worth_loading(NOISE_S, 1, 1e9), "below the noise there is nothing to gain"
    assert is_worth_loading(10.0, 1, None), "nothing is known yet"
    assert not is_worth_loading(0.0, 0, None), "it saves nothing"


@given(load_s=st.floats(0, 100), num_tokens=st.integers(1, 10**6), tokens_per_s=st.floats(1, 10**6))
def test_a_chosen_load_never_costs_more_than_the_noise(
    load_s: float, num_tokens: int, tokens_per_s: float
) -> None:
    if is_worth_loading(load_s, num_tokens, tokens_per_s):
        assert load_s <= num_tokens / tokens_per_s + NOISE_S


def test_a_running_load_is_waited_for_as_long_as_its_rest_is_the_quicker_way() -> None:
    assert is_worth_waiting(0.0, 0, 10, 1000, 1000.0)
    assert is_worth_waiting(0.9, 0, 10, 1000, 1000.0)
    assert not is_worth_waiting(1.1, 0, 10, 1000, 1000.0), "nothing came in all that time"
    # 9 of 10 came late: the last one is still quicker than computing it.
    assert is_worth_waiting(0.8, 9, 10, 1000, 1000.0)
    assert not is_worth_waiting(0.3, 1, 10, 1000, 1000.0)
    assert is_worth_waiting(20.0, 0, 10, 1000, None)
    assert not is_worth_waiting(LONGEST_LOAD_S + 1, 9, 10, 1000, None), "it hangs"


def step(*lengths: int) -> StepPlan:
    return StepPlan(
        tuple(
            StepRow(sequence_id=SequenceId(i), start=0, tokens=(1,) * n, block_table=(BlockId(0),))
            for i, n in enumerate(lengths)
        )
    )


def test_the_pace_follows_recent_prefill_steps_and_ignores_decode_steps() -> None:
    pace = PrefillPace()
    assert pace.tokens_per_s is None
    pace.note(step(*[1] * 64), StepResult((), forward_s=0.1))
    pace.note(step(20), StepResult((), forward_s=0.1))
    assert pace.tokens_per_s is None, "only decode rows and a tiny chunk"
    pace.note(step(500), StepResult((), forward_s=0.5))
    assert pace.tokens_per_s == pytest.approx(1000)
    for _ in range(60):
        pace.note(step(200, 1, 1), StepResult((), forward_s=0.1))
    assert pace.tokens_per_s == pytest.approx(2000, rel=0.01)


def sequence() -> Sequence:
    request = Request(
        request_id=RequestId("a"),
        prompt_tokens=tuple(range(10)),
        sampling=SamplingParams(),
        stop=StopParams(max_output_tokens=1),
    )
    return Sequence(
        sequence_id=SequenceId(1), request=request, index=0, seed=0, arrival=0,
        tokens=list(range(10)),
    )  # fmt: skip


def test_a_load_leads_to_prefill_or_back_to_the_queue_and_counts_as_no_preemption() -> None:
    made = sequence()
    states: list[State] = []
    for change in (
        Reserved(), LoadEnded(), Reserved(), Preempted(), Reserved(), Admitted(8, 3),
    ):  # fmt: skip
        made.advance(change)
        states.append(made.state)
    # The last: what is replayed is computed.
    assert states == [
        Loading(0), Waiting(0), Loading(0), Waiting(1), Loading(1), Prefilling(5, 1),
    ]  # fmt: skip
    assert made.num_prompt_hit_tokens == 8
    made.advance(Computed(10))


@pytest.mark.parametrize(
    "change", [Computed(5), LoadEnded(), Preempted(), Admitted(10), Admitted(3, 4)]
)
def test_a_change_that_a_waiting_sequence_does_not_have_names_both(change: Change) -> None:
    with pytest.raises(InvalidChange, match=r"Waiting.*" + type(change).__name__):
        sequence().advance(change)


def test_a_loading_sequence_can_end() -> None:
    made = sequence()
    made.advance(Reserved())
    with pytest.raises(InvalidChange, match=r"Loading.*Reserved"):
        made.advance(Reserved())
    made.advance(Ended(FinishReason.ABORTED))
    assert made.state == Finished(FinishReason.ABORTED)
