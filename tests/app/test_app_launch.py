"""What the front opens before it listens and before a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headwater.app.groups import ServerSettings
from headwater.app.launch import open_recorder
from headwater.app.settings import Settings


def test_prompts_are_recorded_only_where_a_file_is_named(tmp_path: Path) -> None:
    with open_recorder(Settings()) as recorder:
        assert recorder is None
    path = tmp_path / "requests.log"
    with open_recorder(Settings(server=ServerSettings(record_requests=path))) as recorder:
        assert recorder is not None
        assert path.exists()


@pytest.mark.parametrize("flag", ["--record-requests", "--api-key-file"])
def test_a_file_that_cannot_be_used_ends_the_start_at_once(tmp_path: Path, flag: str) -> None:
    command = [sys.executable, "-m", "headwater.app.cli", "serve", "--port", "0"]
    done = subprocess.run(
        [*command, flag, str(tmp_path / "nowhere" / "file")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("headwater: ")
    assert flag.removeprefix("--").replace("-", "_") in last
    assert "listening" not in done.stderr
    assert "Traceback" not in done.stderr
