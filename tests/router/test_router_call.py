"""What a caller is told of one request, whoever works on it; and what goes on from there."""

from __future__ import annotations

from router_workers import ask

from headwater.core.fleet import Resume
from headwater.core.request import (
    FinishReason,
    PromptReport,
    RequestId,
    SampledToken,
    SequenceOutput,
)
from headwater.router.call import Call

REPORT = PromptReport(num_hit_tokens=0, num_miss_tokens=20)


def said(
    index: int, *ids: int, name: str = "a", prompt: PromptReport | None = None,
    finish: FinishReason | None = None,
) -> SequenceOutput:  # fmt: skip
    return SequenceOutput(
        request_id=RequestId(name), index=index, tokens=tuple(map(SampledToken, ids)),
        prompt=prompt, finish=finish,
    )  # fmt: skip


def test_a_second_report_of_the_prompt_is_dropped_and_its_tokens_are_kept() -> None:
    call = Call(ask("a"))
    call.take(said(0, prompt=REPORT))
    call.take(said(0, 5, name="a#2", prompt=REPORT))
    assert call.arrived == [said(0, prompt=REPORT), said(0, 5)]
    assert call.take(said(0, name="a#3", prompt=REPORT)) is None, "nothing new is no output"
    assert len(call.arrived) == 2


def test_nothing_is_heard_of_a_choice_after_its_end_or_of_one_that_is_not_there() -> None:
    call = Call(ask("a", num_choices=2))
    call.take(said(0, 5, finish=FinishReason.STOP))
    for output in (said(0, 6), said(0, finish=FinishReason.ABORTED), said(7, 1), said(-1, 1)):
        assert call.take(output) is None
    assert (len(call.arrived), call.num_open) == (1, 1)


def test_only_open_choices_are_resumed_each_from_where_it_was() -> None:
    call = Call(ask("a", num_choices=3))
    assert call.resume() == (), "nothing was committed: all of them from the prompt"
    call.take(said(0, 5, 6))
    call.take(said(1, 5, finish=FinishReason.STOP))
    assert call.resume() == (Resume(index=0, tokens=(5, 6)), Resume(index=2, tokens=()))
    assert call.num_resumed_tokens == 2


def test_a_choice_that_ended_without_a_token_is_not_started_again() -> None:
    call = Call(ask("a", num_choices=2))
    call.end_choice(0)
    assert call.resume() == (Resume(index=1, tokens=()),)
    assert call.arrived == [said(0, finish=FinishReason.ABORTED)]


def test_attempts_have_names_of_their_own_and_the_first_has_the_requests() -> None:
    call = Call(ask("a"))
    assert [call.next_key() for _ in range(3)] == ["a", "a#2", "a#3"]
