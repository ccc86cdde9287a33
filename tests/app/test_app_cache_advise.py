"""``headwater cache advise``: a log in, a table or JSON out, and exit codes."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headwater.app import cache_advise
from headwater.core.errors import ConfigError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.advice_align import Habit
from headwater.recipe.conversation import Conversation, Message
from headwater.recipe.load import load_recipe
from headwater.recipe.record import to_line
from headwater.recipe.record_maker import RecordMaker

RULES = "Answer in one short sentence and name the page where you found it. " * 5


def talk(turn: int, opening: str) -> Conversation:
    messages = [Message(role="system", content=f"{opening} {RULES}")]
    for number in range(turn + 1):
        messages.append(Message(role="user", content=f"question {number}: what is on it?"))
        if number < turn:
            messages.append(Message(role="assistant", content=f"answer {number}, page {number}"))
    return Conversation(messages=tuple(messages))


def lines(openings: Sequence[str]) -> list[bytes]:
    recipe = load_recipe(TokenizerSource(kind="byte", vocab_size=320, bos_token_id=256))
    maker = RecordMaker(b"k" * 32, "t")
    return [
        to_line(
            maker.record(
                recipe.encode(talk(turn, opening)),
                talk(turn, opening),
                time_s=float(turn),
                model="m",
                dialect="chat",
            )
        )
        for turn, opening in enumerate(openings)
    ]


CLOCKS = [f"It is 16:{minute:02}." for minute in range(12)]


def advise(log: Path, *flags: str) -> str:
    parser = argparse.ArgumentParser()
    cache_advise.add_arguments(parser)
    out = io.StringIO()
    console = Console(file=out, width=150, color_system=None, highlight=False)
    assert cache_advise.run(parser.parse_args([str(log), *flags]), console=console) == 0
    return out.getvalue()


def advise_json(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(advise(log, "--json"))
    return found


def test_a_clock_in_the_system_message_is_named_with_place_price_and_cure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(lines(CLOCKS)))
    text = " ".join(advise(log).split())
    assert "12 requests of 1 tenant" in text
    assert "a value that changes" in text
    assert "message 0 (system)" in text
    found = advise_json(log)
    (finding,) = found["findings"]
    assert finding["habit"] == Habit.CHANGING_VALUE
    assert (finding["kind"], finding["message"], finding["num_requests"]) == ("system", 0, 11)
    assert 0 < finding["first_token"] < finding["last_token"] < 60
    hits = found["num_hit_tokens"] + found["num_saved_tokens"]
    assert 0.7 < hits / found["num_prompt_tokens"] < 1


def test_a_clean_log_gets_no_advice(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(lines(["It is noon."] * 12)))
    assert "No habit was found that costs hits." in advise(log)
    assert advise_json(log)["findings"] == []


def test_the_older_file_is_read_first_and_bad_lines_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    every = lines(CLOCKS)
    (tmp_path / "log.1").write_bytes(b"".join(every[:6]) + b"\n")
    log.write_bytes(b"".join(every[6:]) + b"\xff\x00 nonsense\n{}\n" + every[0][:50])
    found = advise_json(log)
    assert found["num_requests"] == 12
    assert found["num_bad_lines"] == 3
    assert len(found["findings"]) == 1
    assert "3 lines could not be read" in advise(log)


def test_an_empty_log_is_said_to_be_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"")
    assert "The log holds no request." in advise(log)


def test_a_log_that_is_not_there_is_a_refusal_that_says_what_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record-requests"):
        advise(tmp_path / "none")


def test_every_habit_has_its_words() -> None:
    assert set(cache_advise.WORDS) == set(Habit)
    for what, change in cache_advise.WORDS.values():
        assert not what.endswith(".")
        assert change.endswith(".")
