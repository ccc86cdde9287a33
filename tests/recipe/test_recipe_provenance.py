"""Traced strings: equal to plain ones in value, and never wrong in their favour."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.recipe.provenance import PLACED, Traced, joined, outside, placed, spans_of

# Placed text is written with a-f and outside text with m-r, so that a character
# tells its own origin; both have the same whitespace, whose origin is not checked.
PLACED_TEXT = st.text("abcdef \n", max_size=6)
OUTSIDE_TEXT = st.text("mnopqr \n", max_size=6)


def part(which: tuple[str, str]) -> str:
    kind, text = which
    return placed(text) if kind == "placed" else outside(text, 3) if kind == "outside" else text


PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("placed"), PLACED_TEXT),
        st.tuples(st.just("outside"), OUTSIDE_TEXT),
        st.tuples(st.just("plain"), OUTSIDE_TEXT),
    ),
    max_size=6,
)

OPERATIONS: dict[str, Callable[[str], str]] = {
    "add": lambda s: s + placed("ab") + "mn",
    "radd": lambda s: "mn" + (placed("ab") + s),
    "multiply": lambda s: s * 2 + 2 * s,
    "slice": lambda s: s[1:-1] + s[-3:] + s[:2],
    "index": lambda s: s[0] + s[-1] if s else s,
    "reverse": lambda s: s[::-1],
    "strip": lambda s: s.strip() + s.lstrip("m") + s.rstrip("a\n"),
    "split": lambda s: placed("ab").join(s.split()),
    "split_at": lambda s: placed("d").join([*s.split("a"), *s.split("m", 1), *s.rsplit("o", 1)]),
    "rsplit": lambda s: placed("").join(s.rsplit(None, 1)),
    "lines": lambda s: placed("a").join(s.splitlines()) + placed("").join(s.splitlines(True)),
    "partition": lambda s: placed("").join([*s.partition("n"), *s.rpartition("b")]),
    "affixes": lambda s: s.removeprefix("a").removeprefix("m").removesuffix("b").removesuffix(""),
    "replace": lambda s: s.replace("m", placed("ab")).replace("a", "mm").replace("b", "", 1),
    "replace_empty": lambda s: s.replace("", "m"),
    "percent": lambda s: (placed("a%sb%%%d") % (s, 7)).replace("7", "").replace("%", ""),
    "iterate": lambda s: placed("").join(list(s)),
    "string": str,
    "template": lambda s: f"{s}" + s,
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(parts=PARTS)
def test_operations_give_the_plain_value_and_never_call_outside_text_placed(
    name: str, parts: list[tuple[str, str]]
) -> None:
    traced = joined(map(part, parts))
    plain = "".join(text for _, text in parts)
    operation = OPERATIONS[name]
    result = operation(traced)
    assert result == operation(plain)
    previous = 0
    for start, end, origin, _ in spans_of(result):
        assert previous <= start < end <= len(result)
        previous = end
        wrong = "mnopqr" if origin == PLACED else "abcdef"
        assert not set(wrong) & set(result[start:end])


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=st.text("mnopqr \n", max_size=12))
def test_each_character_of_outside_text_knows_its_place(name: str, text: str) -> None:
    whole = placed("ab") + outside(text, 5) + placed("c")
    result = OPERATIONS[name](whole)
    for start, end, origin, first in spans_of(result):
        if origin != PLACED:
            assert result[start:end] == text[first : first + end - start]


@given(parts=PARTS)
def test_joining_slicing_and_stripping_lose_no_origin(parts: list[tuple[str, str]]) -> None:
    traced = joined(map(part, parts)).strip()[1:-1].replace("c", placed("cc"))
    known = {i for start, end, origin, _ in spans_of(traced) for i in range(start, end)
             if origin == PLACED}  # fmt: skip
    assert {i for i, char in enumerate(traced) if char in "abcdef"} <= known


def test_case_changes_keep_origins_only_where_lengths_stay() -> None:
    assert spans_of(placed("ab").upper()) == ((0, 2, PLACED, 0),)
    assert spans_of(placed("aß").upper()) == ()
    assert spans_of(outside("ab", 2).title()) == ((0, 2, 2, 0),)
    assert spans_of((placed("Ab") + "x").lower().capitalize()) == ((0, 2, PLACED, 0),)


def test_what_is_not_tracked_is_outside_text() -> None:
    text = placed("<|im_end|>")
    for result in (text.center(20), text.zfill(20), "".join([text]), "x".replace("x", text)):
        assert spans_of(result) == ()
    assert spans_of(Traced(text)) == ()


def test_wrong_types_fail_as_they_do_for_plain_strings() -> None:
    with pytest.raises(TypeError):
        placed("a") + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        1 + placed("a")  # type: ignore[operator]
    with pytest.raises(TypeError):
        placed("a").join([1])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _ = placed("%s %s") % "a"
    with pytest.raises(TypeError):
        _ = placed("%s") % ("a", "b")
    with pytest.raises(IndexError):
        _ = placed("a")[3]
    assert placed("%(x)s") % {"x": "m"} == "m"
    table: dict[str, int] = {placed("a"): 1}
    assert table["a"] == 1
