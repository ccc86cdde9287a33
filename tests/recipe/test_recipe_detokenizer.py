"""Ids to text in pieces: the same text as at once, and no half characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_models import STYLES

from headwater.recipe.detokenizer import Detokenizer, token_text
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_byte import ByteTokenizer

BYTES = ByteTokenizer()


def stream(tokenizer: Tokenizer, ids: list[int], *, keep_control: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, keep_control=keep_control)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize(
    "text", ["🙂", "👩‍👩‍👧‍👦", "中文 日本語", "naïve é e\u0301", "\u200d\ufe0f"]
)
@pytest.mark.parametrize("name", ["bytes", "chatml", "gemma"])
def test_a12_characters_come_whole_one_id_per_push(text: str, name: str) -> None:
    tokenizer = BYTES if name == "bytes" else STYLES[name]().recipe.tokenizer
    ids = tokenizer.encode_text(text)
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == text == tokenizer.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[-1] == ""


def test_a12_a_character_that_never_ends_is_flushed_once_at_the_end() -> None:
    deltas = stream(BYTES, [*b"hi ", *"🙂".encode()[:3]])
    assert deltas == ["h", "i", " ", "", "", "", "\ufffd"]


def test_a_model_that_breaks_a_character_off_shows_it_where_it_broke() -> None:
    assert "".join(stream(BYTES, [*"🙂".encode()[:2], *b"ok"])) == "\ufffdok"
    assert "".join(stream(BYTES, [*"🙂".encode()[:2], 258, *b"ok"])) == "\ufffdok"


def test_hidden_ids_give_no_text_unless_asked_for() -> None:
    ids = [256, *b"a", 257, *b"b", 258]
    assert "".join(stream(BYTES, ids)) == "ab"
    assert "".join(stream(BYTES, ids, keep_control=True)) == "<|bos|>a<|im_start|>b<|im_end|>"


@pytest.mark.parametrize("name", ["bytes", *STYLES])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_deltas_add_up_to_the_decoding_of_all_ids_for_any_ids(
    name: str, data: st.DataObject
) -> None:
    tokenizer = BYTES if name == "bytes" else STYLES[name]().recipe.tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    for keep_control in (False, True):
        deltas = stream(tokenizer, ids, keep_control=keep_control)
        assert "".join(deltas) == tokenizer.decode(ids, keep_control=keep_control)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "inst", "metaspace"])
@pytest.mark.parametrize("text", ["hello world", "the 🙂 café\n\nx", "a"])
def test_decoding_agrees_with_the_models_own_tokenizer(name: str, text: str) -> None:
    style = STYLES[name]()
    ids = style.recipe.tokenizer.encode_text(text)
    assert style.recipe.decode(ids) == style.plain.decode(ids).removeprefix(
        " " if name == "metaspace" else ""
    )


def test_a_space_that_the_tokenizer_puts_before_text_is_taken_off_only_there() -> None:
    tokenizer = STYLES["inst"]().recipe.tokenizer
    hello = tokenizer.encode_text("hello")
    end = tokenizer.control_id("</s>")
    assert tokenizer.token_bytes(hello[0]) == b" hello"
    # Right after a control token a text begins; after a word it goes on.
    assert Detokenizer(tokenizer).push(hello[0]) == "hello"
    assert Detokenizer(tokenizer, previous_id=end).push(hello[0]) == "hello"
    assert Detokenizer(tokenizer, previous_id=hello[0]).push(hello[0]) == " hello"
    assert tokenizer.decode([*hello, *hello]) == "hello hello"
    assert end is not None
    assert tokenizer.decode([*hello, end, *hello]) == "hellohello"


def test_a_space_before_the_first_text_only_is_not_taken_off_later() -> None:
    tokenizer = STYLES["metaspace"]().recipe.tokenizer
    (hello,) = tokenizer.encode_text("hello")
    end = tokenizer.control_id("<|end|>")
    assert Detokenizer(tokenizer, previous_id=tokenizer.bos_token_id).push(hello) == "hello"
    assert Detokenizer(tokenizer, previous_id=end).push(hello) == " hello"


def test_a_token_that_is_part_of_a_character_is_spelt_in_bytes() -> None:
    assert token_text(b"ok") == "ok"
    assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
