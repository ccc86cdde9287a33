"""Usable cores: affinity and the quota of the control group, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.app.machine import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("", 8)],
)
def test_a_quota_of_version_2_counts(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_a_quota_of_version_1_counts(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(tmp_path) == cores


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
