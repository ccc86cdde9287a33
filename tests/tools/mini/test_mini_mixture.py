"""Rows for training: shapes, repeatability, what weighs, what is never cut."""

from __future__ import annotations

import random
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from mini_tokenizers import small_tokenizer

from tools.mini.chat_format import BOS
from tools.mini.document import CLOSE, KEY, OPEN, Document, mark
from tools.mini.mixture import Row, Task, encode, rows, shares
from tools.mini.room import Room
from tools.mini.tasks_chat import prose, talk, taught
from tools.mini.tasks_raw import copied, listed, paired
from tools.mini.tasks_recall import facts, plain_facts, recall, step_by_step
from tools.mini.tasks_small import small
from tools.mini.tasks_tools import calls
from tools.mini.text import Texts
from tools.mini.words import Part, words

TASKS: list[Task] = [
    prose, talk, taught, copied, listed, paired, plain_facts, recall, step_by_step, small, calls,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def _some(folder: Path, row_tokens: int, *, stage: float = 0.5, seed: int = 0) -> list[Row]:
    stream = rows(folder, Texts.builtin(), row_tokens=row_tokens, stage=stage, seed=seed)
    return list(islice(stream, 12))


def _room(**changes: object) -> Room:
    values: dict[str, object] = {
        "chars": 900,
        "stage": 0.5,
        "words": words(Part.TRAINED),
        "common": words(Part.ALL),
        "texts": Texts.builtin(),
        **changes,
    }
    return Room(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("row_tokens", [256, 512, 1024, 2048])
@pytest.mark.parametrize("stage", [0.0, 0.5, 1.0])
def test_rows_have_their_shape_and_are_nearly_full(
    folder: Path, row_tokens: int, stage: float
) -> None:
    for row in _some(folder, row_tokens, stage=stage):
        assert row.ids.shape == (row_tokens + 1,)
        assert row.weights.shape == (row_tokens,)
        assert [row.ids.dtype.name, row.weights.dtype.name] == ["int32", "float32"]
        assert row.ids.min() >= 0
        assert row.ids.max() < small_tokenizer().get_vocab_size()
        assert row.weights.min() >= 0.0
        assert row.weights.max() <= KEY
        assert row.weights.mean() > 0.1
        assert np.flatnonzero(row.ids).max() > 0.8 * row_tokens


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(folder: Path) -> None:
    first, second, third = (_some(folder, 512, seed=seed) for seed in (3, 3, 4))
    same = [np.array_equal(a.ids, b.ids) for a, b in zip(first, second, strict=True)]
    other = [np.array_equal(a.ids, b.ids) for a, b in zip(first, third, strict=True)]
    assert all(same)
    assert not any(other)
    assert all(np.array_equal(a.weights, b.weights) for a, b in zip(first, second, strict=True))


def test_no_token_has_to_predict_the_beginning_of_the_next_document(folder: Path) -> None:
    bos = small_tokenizer().token_to_id(BOS)
    for row in _some(folder, 1024):
        assert (row.weights[row.ids[1:] == bos] == 0.0).all()


def test_tool_calls_come_only_where_their_preamble_fits(folder: Path) -> None:
    def has_tools(row_tokens: int) -> bool:
        stream = rows(folder, Texts.builtin(), row_tokens=row_tokens, stage=0.5, seed=1)
        return any(
            "Available Tool Schemas" in small_tokenizer().decode(row.ids.tolist())
            for row in islice(stream, 20_000 // row_tokens)
        )

    assert not has_tools(256)
    assert has_tools(2048)


def test_shares_are_of_a_whole_at_every_stage() -> None:
    for stage in np.linspace(0.0, 1.0, 21):
        parts = [share for _, share in shares(float(stage))]
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) > 0.0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("stage", [0.0, 1.0])
def test_documents_of_every_kind_are_clean_at_any_size(task: Task, stage: float) -> None:
    for seed in range(15):
        rng = random.Random(seed)
        room = _room(
            chars=rng.choice((60, 300, 2000, 12000)), stage=stage, is_long=rng.random() < 0.5
        )
        text = task(rng, room).text
        assert text.startswith(BOS)
        assert OPEN not in text
        assert CLOSE not in text
        assert "@" not in text
        assert not re.search(r"\ba [aeio][a-z]+ ", text.split("Available")[0].split("\nDear")[0])
        assert "  " not in text.replace("\n\n\n\n", "")


@pytest.mark.parametrize("task", [recall, step_by_step, plain_facts])
def test_every_answer_of_recall_stands_in_the_text_before_it(task: Task) -> None:
    found = 0
    for seed in range(20):
        document = task(random.Random(seed), _room())
        seen = ""
        for text, weight in document.pieces:
            if weight == KEY:
                assert text in seen
                found += 1
            seen += text
    assert found > 40


@pytest.mark.parametrize("task", [recall, step_by_step, plain_facts, calls])
def test_a_document_whose_end_needs_its_beginning_is_never_cut(task: Task) -> None:
    assert task(random.Random(0), _room()).is_whole


def test_questions_of_one_document_have_one_answer_each() -> None:
    for seed in range(30):
        found = facts(random.Random(seed), words(Part.TRAINED), 40)
        assert len({fact.key for fact in found}) == len(found) >= 30


def test_a_longer_room_makes_longer_recall() -> None:
    def size(chars: int) -> float:
        room = _room(chars=chars, stage=1.0, is_long=True)
        return sum(len(recall(random.Random(s), room).text) for s in range(20)) / 20

    assert size(12000) == pytest.approx(12000, rel=0.25)
    assert size(1200) == pytest.approx(1200, rel=0.45)


def test_a_token_weighs_what_its_last_character_weighs() -> None:
    document = Document()
    document.add("The code is ", 0.5)
    document.add(f"x{mark('4271')}y", 1.0, KEY)
    encoded = encode(small_tokenizer(), document)
    texts = [small_tokenizer().decode([i]) for i in encoded.ids.tolist()]
    by_digit = [w for t, w in zip(texts, encoded.weights, strict=True) if t in "4271" and t]
    assert by_digit == [KEY] * 4
    assert encoded.weights[0] == 0.5
    assert encoded.weights[-1] == 1.0
