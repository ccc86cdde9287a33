"""Stop strings: found wherever the text was cut, and nothing held back for longer than needed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import InvalidRequest
from headwater.recipe.stops import StopMatcher, StopResult


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        result = matcher.push(piece)
        shown += result.text
        if result.stop is not None:
            assert matcher.push("more") == StopResult("")
            return shown + matcher.flush(), result.stop
    return shown + matcher.flush(), None


def by_hand(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a09_a_stop_string_across_tokens_neither_leaks_nor_is_missed() -> None:
    assert run(["beta gamma"], ["alpha be", "ta gam", "ma delta"]) == ("alpha ", "beta gamma")


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["STOP"], ["a STOP b"], ("a ", "STOP")),
        (["STOP"], ["a ST", "AY ST", "OP"], ("a STAY ", "STOP")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),  # the match overlaps its own false start
        (["ab", "abc"], ["xab", "c"], ("x", "ab")),  # complete first
        (["b", "abc"], ["xab", "c"], ("xa", "b")),
        (["bc", "abc"], ["xabc"], ("x", "abc")),  # both complete here: the longer
        (["abcd", "bce"], ["ab", "ce"], ("a", "bce")),
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", "\n\n")),
        (["🙂🙂"], ["🙂", "x🙂", "🙂"], ("🙂x", "🙂🙂")),
        (["nope"], ["no", "no", "nop"], ("nononop", None)),
        (["a"], [""], ("", None)),
        (["a", "a"], ["ba"], ("b", "a")),
    ],
)
def test_the_string_that_is_complete_first_ends_the_text(
    stops: list[str], pieces: list[str], expected: tuple[str, str | None]
) -> None:
    assert run(stops, pieces) == expected


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
)
def test_however_the_text_is_cut_the_result_is_that_of_the_whole_text(
    stops: list[str], pieces: list[str]
) -> None:
    expected = by_hand(stops, "".join(pieces))
    assert run(stops, pieces) == expected
    assert run(stops, list("".join(pieces))) == expected


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
)
def test_only_what_may_still_become_a_stop_string_is_held_back(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        result = matcher.push(piece)
        shown += result.text
        if result.stop is not None:
            return
        held = max(n for s in stops for n in range(len(s)) if text.endswith(s[:n]))
        assert text == shown + text[len(text) - held :]
        assert matcher.held_chars == held


def test_an_empty_stop_string_is_refused_with_its_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopMatcher(["a", ""], param="stop_sequences")
    assert caught.value.param == "stop_sequences"


def test_a_long_repetitive_stop_string_does_not_slow_the_stream_down() -> None:
    matcher = StopMatcher(["a" * 20_000 + "b"])
    started_s = time.perf_counter()
    shown = sum(len(matcher.push("aaaa").text) for _ in range(10_000))
    assert shown == 20_000
    assert time.perf_counter() - started_s < 10  # 0.1 s; a quadratic search takes minutes
