"""The command line as a person meets it: exit codes, one-line errors, a quick start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from app_fakes import FakeServer, Script

from headwater import __version__
from headwater.app.cli import main

PYTHON_CLI = [sys.executable, "-m", "headwater.app.cli"]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.strip() == f"headwater {__version__}"


COMMANDS = (
    "serve", "chat", "doctor", "bench", "worker", "pools", "recipe show", "cache stats",
    "cache explain", "cache verify", "cache purge", "cache top", "cache advise", "eval replay",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_its_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([*command.split(), "--help"])
    assert leaving.value.code == 0
    assert f"headwater {command}" in capsys.readouterr().out


def test_help_loads_no_heavy_package() -> None:
    code = (
        "import sys; from headwater.app import cli\n"
        "for words in (['serve'], ['cache'], ['cache', 'stats'], ['cache', 'explain'], ['eval']):\n"
        "    try: cli.main([*words, '--help'])\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'numba', 'httpx', 'rich', 'starlette'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--port", "x"], "server.port must be a whole number"),
        (["serve", "--host", "0.0.0.0"], "no API key is set"),
        (["serve", "--kv-byte", "1"], "did you mean --kv-bytes?"),
        (["cache", "purge", "--tenat", "x"], "did you mean --tenant?"),
        (["cache", "advise", "log", "--jso"], "did you mean --json?"),
        (["serve", "--config", "/nowhere/x.toml"], "cannot read settings file"),
        (["chat", "--url", "nonsense", "Hi"], "--url must be like"),
        (["bench", "--requests", "0"], "num_requests must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("headwater: ")
    assert message in shown.err


def test_chat_to_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        url = server.url
    assert main(["chat", "--url", url, "Hi"]) == 2
    assert "no server answers" in capsys.readouterr().err


def test_ctrl_c_ends_a_running_answer_and_its_connection() -> None:
    script = Script(chunks=("one", *(" more",) * 100), pauses_s=(0.0, *(0.1,) * 100))
    with FakeServer(script) as server:
        client = subprocess.Popen(
            [*PYTHON_CLI, "chat", "--url", server.url, "Hi"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert client.stdout is not None
        assert client.stdout.read(3) == b"one"
        client.send_signal(signal.SIGINT)
        _, errors = client.communicate(timeout=20)
        assert client.returncode == 130
        assert b"Traceback" not in errors
        # The server sees the closed connection at one of its next writes.
        give_up_s = time.monotonic() + 5
        while server.num_in_flight and time.monotonic() < give_up_s:
            time.sleep(0.05)
        assert server.num_in_flight == 0
