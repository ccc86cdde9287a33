"""StopRule: when a token id or a count ends a sequence."""

from __future__ import annotations

from headwater.core.request import StopParams
from headwater.decode.stopping import StopRule

END, STOP, WORD = 1, 2, 3


def rule(
    *, maximum: int = 10, minimum: int = 0, ignore_end: bool = False, context_tokens: int = 100
) -> StopRule:
    stop = StopParams(
        max_output_tokens=maximum,
        min_output_tokens=minimum,
        stop_token_ids=frozenset({STOP}),
        end_token_ids=frozenset({END}),
        ignore_end=ignore_end,
    )
    return StopRule.of(stop, num_prompt_tokens=5, context_tokens=context_tokens)


def test_end_and_stop_ids_end_a_sequence_and_words_do_not() -> None:
    assert [rule().is_end(token, 0) for token in (END, STOP, WORD)] == [True, True, False]


def test_ignore_end_goes_past_the_models_own_end_but_not_past_the_callers_stop() -> None:
    ignoring = rule(ignore_end=True, minimum=4)
    assert [ignoring.is_end(token, 4) for token in (END, STOP)] == [False, True]
    assert ignoring.banned_ids(0) == {STOP}


def test_ending_ids_are_banned_until_the_minimum_is_out() -> None:
    patient = rule(minimum=2)
    assert [patient.banned_ids(n) for n in range(4)] == [{END, STOP}, {END, STOP}, set(), set()]
    assert [patient.is_end(STOP, n) for n in range(4)] == [False, False, True, True]


def test_a_sequence_is_full_at_its_maximum_or_at_the_end_of_the_context() -> None:
    assert [rule(maximum=2).is_full(n) for n in (1, 2)] == [False, True]
    assert [rule(context_tokens=8).is_full(n) for n in (2, 3)] == [False, True]
