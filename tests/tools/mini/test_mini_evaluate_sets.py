"""The evaluation's items: they ask for what training never had, and have one right answer."""

from __future__ import annotations

from dataclasses import fields

import pytest
from mini_tokenizers import small_tokenizer

from tools.mini.evaluate_sets import (
    Item,
    chat_prompts,
    is_right,
    question_items,
    recall_items,
    small_items,
    text_rows,
    tool_items,
)
from tools.mini.text import Texts
from tools.mini.words import Part, Words, words


@pytest.mark.parametrize("distance", [128, 512, 2048])
def test_the_value_stands_as_far_from_the_end_as_asked(distance: int) -> None:
    items = recall_items(small_tokenizer(), Texts.builtin(), distance=distance, count=10)
    for item in items:
        assert item.distance == pytest.approx(distance, rel=0.05, abs=30)


def test_a_recall_item_is_answered_by_its_text_and_by_nothing_else() -> None:
    for item in recall_items(small_tokenizer(), Texts.builtin(), distance=512, count=20):
        assert item.expected in item.prompt
        assert is_right(item, f"It is {item.expected}.")
        assert not is_right(item, "It is something else.")


def test_items_are_the_same_at_every_call() -> None:
    texts = Texts.builtin()
    first = recall_items(small_tokenizer(), texts, distance=256, count=5)
    assert first == recall_items(small_tokenizer(), texts, distance=256, count=5)
    assert tool_items(count=10) == tool_items(count=10)
    assert small_items(count=10) == small_items(count=10)


def test_thinking_changes_the_prompt_and_not_the_question() -> None:
    for plain, thinking in zip(tool_items(), tool_items(thinking=True), strict=True):
        assert plain.chat.turns == thinking.chat.turns
        assert plain.prompt.endswith("</think>")
        assert thinking.prompt.endswith("<think>")


def test_a_tool_item_names_a_tool_it_was_given_with_arguments_from_the_question() -> None:
    items = tool_items()
    needed = [item for item in items if item.name is not None]
    assert 0.7 < len(needed) / len(items) < 0.9
    for item in needed:
        assert item.name in {tool.name for tool in item.chat.tools}
        tool = next(tool for tool in item.chat.tools if tool.name == item.name)
        required = tool.parameters["required"]
        assert isinstance(required, list)
        assert set(required) <= set(item.arguments)


@pytest.mark.parametrize("answer", ["red", "It is red.", "RED!", "the colour: red"])
def test_an_answer_with_the_word_is_right(answer: str) -> None:
    assert is_right(Item(chat=tool_items(count=1)[0].chat, prompt="", expected="red"), answer)


@pytest.mark.parametrize("answer", ["", "reddish", "It is blue."])
def test_an_answer_without_the_word_is_wrong(answer: str) -> None:
    assert not is_right(Item(chat=tool_items(count=1)[0].chat, prompt="", expected="red"), answer)


def test_the_words_of_the_evaluation_are_not_those_of_training() -> None:
    training, kept_out = words(Part.TRAINED), words(Part.HELD_OUT)
    for field in fields(Words):
        ours, theirs = getattr(training, field.name), getattr(kept_out, field.name)
        assert theirs
        assert not set(ours) & set(theirs), field.name


def test_only_answers_weigh_in_the_held_out_rows() -> None:
    texts = Texts.builtin()
    rows = text_rows(small_tokenizer(), texts, row_tokens=128)
    total = sum(float(row.weights.sum()) for row in rows)
    answers = sum(
        len(small_tokenizer().encode(e.assistant, add_special_tokens=False).ids) + 1
        for e in texts.held_out
    )
    assert total == pytest.approx(answers, abs=2 * len(rows))


def test_there_are_questions_and_prompts_to_read() -> None:
    assert len(question_items(count=7)) == 7
    assert all(prompt.endswith("</think>") for prompt in chat_prompts())
