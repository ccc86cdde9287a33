"""Gemma 3's own vocabulary, of 262,144 tokens: SentencePiece's ids, and no control id from text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_sentencepiece import SlowSentencePiece

from headwater.core.errors import InvalidRequest
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.catalogue import resolve
from headwater.model.joined_file import PartsLocation, joined_file
from headwater.model.load import open_model
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.conversation import Conversation, Message

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock!",
    "def f(x):\n    return {\n        'a': x,\n\n\n    }\n",
    "a  b   c" + " " * 40 + "d\t\t\te\r\n",
    "na\u00efve caf\u00e9 \u4e2d\u6587 \u65e5\u672c\u8a9e \u0633\u0644\u0627\u0645 e\u0301",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f642 \x00\x01\x7f\ufeff\u00a0\u200b",
    "<h1>title</h1><table><tr><td>1</td></tr></table>",
    "load \u2581\u2581\u2582\u2583 \u2581 \u2581",
    "Donaudampfschifffahrtsgesellschaftskapit\u00e4n hahahahahahaha aaaaaaaaaaaaa",
    "",
    " ",
]


class NoHub:
    def download(self, repository: str, patterns: Sequence[str]) -> Path:
        pytest.skip("the packages with the Gemma 3 weights are not installed")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = resolve("gemma3", NoHub(), tmp_path_factory.mktemp("models"))
    assert isinstance(found, PartsLocation)
    yield joined_file(found)
    (found.folder / found.file_name).unlink()  # a quarter of a gigabyte


@pytest.fixture(scope="module")
def source(file: Path) -> TokenizerSource:
    opened = open_model(resolve(str(file)))
    opened.source.close()
    return opened.tokenizer_source


@pytest.fixture(scope="module")
def recipe(source: TokenizerSource) -> ChatRecipe:
    return ChatRecipe.from_source(source)


@pytest.fixture(scope="module")
def slow(source: TokenizerSource) -> SlowSentencePiece:
    return SlowSentencePiece.of(source)


@pytest.mark.parametrize("text", TEXTS)
def test_text_gets_sentencepieces_ids_and_comes_back(
    recipe: ChatRecipe, slow: SlowSentencePiece, text: str
) -> None:
    ids = recipe.tokenizer.encode_text(text)
    assert ids == slow.encode(text)
    assert recipe.tokenizer.decode(ids) == text.replace("\u2581", " ")  # which spells a space


def test_any_text_gets_sentencepieces_ids(recipe: ChatRecipe, slow: SlowSentencePiece) -> None:
    some = st.sampled_from(
        ["the ", "ing", " ", "  ", "\n", "\t", "ha", "a", "e", "o", ".", "1", "<td>", "\u00e9"]
    )
    any_text = st.lists(st.one_of(some, st.text(max_size=3)), max_size=15).map("".join)

    @settings(max_examples=150, deadline=None, database=None)
    @given(any_text)
    def check(text: str) -> None:
        assert recipe.tokenizer.encode_text(text) == slow.encode(text)

    check()


def test_no_spelling_of_a_control_token_becomes_one(recipe: ChatRecipe) -> None:
    tokenizer = recipe.tokenizer
    for literal in ("<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>",
                    "<unused7>", "<start_of_image>", "<end_of_image>"):  # fmt: skip
        number = tokenizer.control_id(literal)
        assert number is not None
        ids = tokenizer.encode_text(f"a{literal}b")
        assert number not in ids
        assert tokenizer.decode(ids) == f"a{literal}b"
        assert tokenizer.encode_rendered(literal, [(0, len(literal))]) == [number]


def test_a_completion_begins_with_the_begin_token(recipe: ChatRecipe) -> None:
    assert list(recipe.encode_completion("Hello").tokens) == [2, 9259]


def test_a_base_model_refuses_messages_and_says_why(recipe: ChatRecipe) -> None:
    assert not recipe.has_chat_template
    assert not recipe.capabilities.chat
    with pytest.raises(InvalidRequest, match="no chat template"):
        recipe.encode(Conversation(messages=(Message(role="user", content="hi"),)))
