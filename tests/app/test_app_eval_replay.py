"""``headwater eval replay`` from the command line, on a toy window model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.app.cli import main

MODEL = "toy:family=gemma3,window=16,layers=4,global_every=2"
SMALL = ["--texts", "2", "--hits", "64,32", "--scored", "8", "--greedy", "4"]
RUN = ["eval", "replay", "--model", MODEL, "--numerics", "reference", *SMALL]


def test_it_prints_both_kinds_of_hit_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["num_hit_tokens"], row["kind"]) for row in rows] == [
        (32, "exact"), (32, "replay"), (64, "exact"), (64, "replay"),
    ]  # fmt: skip
    assert all(0 <= row["top_agreement"] <= 1 for row in rows)
    assert rows[2]["divergence_mean"] < rows[3]["divergence_mean"]


def test_it_prints_every_mode_of_a_model_with_late_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = [
        "eval",
        "replay",
        "--model",
        "toy:family=ced",
        "--numerics",
        "reference",
        "--threads",
        "1",
        *SMALL,
    ]
    assert main([*run, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    kinds = ["exact", "encoder", "decoder", "both"]
    assert [(row["num_hit_tokens"], row["kind"]) for row in rows] == [
        (num_hit, kind) for num_hit in (32, 64) for kind in kinds
    ]
    assert main(run) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "16 tokens replayed, 28 by late layers" in table


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    assert "16 tokens replayed" in " ".join(capsys.readouterr().out.split())


def test_a_text_that_is_too_short_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert main([*RUN, "--text", str(short)]) == 2
    assert "give a longer one" in capsys.readouterr().err


def test_a_model_without_windows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "replay", "--model", "toy", *SMALL]) == 2
    assert "no window layers" in capsys.readouterr().err
