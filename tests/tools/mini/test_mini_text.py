"""The texts of a teacher and of packages: what is kept, and what never reaches training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.mini.prose import verses
from tools.mini.text import Texts, is_good

GOOD = "The sun is warm in summer, and the days are long and bright."


def _file(path: Path, answers: list[str]) -> Path:
    lines = [
        json.dumps({"user": f"Write about {i}.", "assistant": a}) for i, a in enumerate(answers)
    ]
    path.write_text("\n".join(lines) + '\n{"user": "half a li', encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "answer",
    [
        "Short.",
        GOOD.removesuffix("."),  # cut in the middle
        f"{GOOD} {GOOD}",
        "As an AI language model I cannot say what the weather will be tomorrow.",
        "A map of a map of a map of a map of a map of a map of a map is a map.",
        "See http://x.org for more about the weather in the summer.",
        "Es ist schön, daß die Sonne im Sommer so lange scheint.",
        "The damn sun is warm in summer, and the days are long and bright.",
        'He said "it is warm and left the house in the evening.',
    ],
)
def test_a_broken_answer_is_not_learned(answer: str) -> None:
    assert is_good(GOOD)
    assert not is_good(answer)


def test_one_answer_in_twenty_is_kept_out_and_stays_out_when_lines_are_added(
    tmp_path: Path,
) -> None:
    nouns = [a + b for a in ("sun", "wind", "sea", "rain", "moon") for b in ("", "s", "ny", "set")]
    answers = [
        f"The {n} is warm today, and the {m} is cold in the evening." for n in nouns for m in nouns
    ]
    fewer = Texts.load(teacher=_file(tmp_path / "a.jsonl", answers[:300]))
    more = Texts.load(teacher=_file(tmp_path / "b.jsonl", answers))
    assert 0.02 < len(fewer.held_out) / (len(fewer.held_out) + len(fewer.exchanges)) < 0.1
    assert set(fewer.held_out) <= set(more.held_out)
    assert not set(more.held_out) & set(more.exchanges)


def test_what_the_teacher_says_of_the_world_is_not_learned(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    asked = ("Explain in simple words what a sun is.", "Tell me a story about the sun.")
    answers = (GOOD, GOOD.replace("summer", "spring"))
    lines = [
        json.dumps({"user": u, "assistant": a}) for u, a in zip(asked, answers, strict=True)
    ] * 9
    path.write_text("\n".join(lines), encoding="utf-8")
    texts = Texts.load(teacher=path)
    users = {e.user for e in (*texts.exchanges, *texts.held_out)}
    assert "Explain in simple words what a sun is." not in users


def test_without_files_there_is_still_something_of_everything(tmp_path: Path) -> None:
    texts = Texts.load(teacher=tmp_path / "none.jsonl", prose=tmp_path / "none.txt")
    assert texts == Texts.builtin()
    assert texts.exchanges
    assert texts.held_out
    assert texts.stories
    assert texts.prose
    assert not set(texts.held_out) & set(texts.exchanges)


def test_prose_is_read_by_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text(f"{GOOD}\n{GOOD}\n\nshort\n\n{GOOD} It ends.\n", encoding="utf-8")
    texts = Texts.load(prose=path)
    assert texts.prose == (f"{GOOD} {GOOD}", f"{GOOD} It ends.")


def test_verses_come_without_their_marks_and_with_their_spaces() -> None:
    printed = (
        'Genesis 1:1: <w a="H1">In</w> <w a="H2">the</w> <w>beginning</w>, <w>God</w><w>made</w> '
        "it .\n I Kings\nII Samuel 2:10: He said,\n \u201cGo!\u201d <note>leave</note>\n(module)\n"
    )
    assert list(verses(printed)) == ["In the beginning, God made it. I Kings", 'He said, "Go!"']
