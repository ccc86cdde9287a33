"""Origins through JSON: outside text keeps its place, and nothing becomes placed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.recipe.provenance import PLACED, outside, placed, spans_of
from headwater.recipe.provenance_json import traced_json

TEXT = st.text(st.one_of(st.sampled_from('ab"\\\n\x7f é中🙂{}[],:'), st.characters(codec="utf-8")))
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)


def marked(value: object, sources: list[str]) -> object:
    """``value`` with each string marked as field number len(sources)."""
    if isinstance(value, str):
        sources.append(value)
        return outside(value, len(sources) - 1)
    if isinstance(value, dict):
        return {marked(key, sources): marked(item, sources) for key, item in value.items()}
    if isinstance(value, list):
        return [marked(item, sources) for item in value]
    return value


@given(value=PLAIN, ensure_ascii=st.booleans(), sort_keys=st.booleans())
@pytest.mark.parametrize("indent", [None, 3])
def test_every_character_that_is_not_escaped_is_traced_to_its_place(
    indent: int | None, value: object, ensure_ascii: bool, sort_keys: bool
) -> None:
    sources: list[str] = []
    traced = marked(value, sources)
    text = json.dumps(traced, ensure_ascii=ensure_ascii, sort_keys=sort_keys, indent=indent)
    assert text == json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, indent=indent)
    result = traced_json(text, traced, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
    found = [set[int]() for _ in sources]
    previous = 0
    for start, end, field, first in spans_of(result):
        assert previous <= start < end
        previous = end
        assert text[start:end] == sources[field][first : first + end - start]
        found[field] |= set(range(first, first + end - start))
    for source, places in zip(sources, found, strict=True):
        escaped = {
            i for i, c in enumerate(source) if json.dumps(c, ensure_ascii=ensure_ascii)[1:-1] != c
        }
        assert places == set(range(len(source))) - escaped


def test_what_a_template_placed_is_outside_text_once_it_is_json() -> None:
    value = {"a": placed("<e>") + outside("x", 0)}
    text = json.dumps(value)
    assert spans_of(traced_json(text, value, ensure_ascii=False, sort_keys=False)) == (
        (10, 11, 0, 0),
    )
    assert all(origin != PLACED for _, _, origin, _ in spans_of(text))


def test_keys_that_are_numbers_do_not_shift_what_follows() -> None:
    value = {1: "1", "b": outside("1", 4)}
    text = traced_json(json.dumps(value), value, ensure_ascii=False, sort_keys=False)
    assert text == '{"1": "1", "b": "1"}'
    assert spans_of(text)[-1][2] == 4
