"""Starting and ending worker processes, where something goes wrong half-way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headwater.app.processes import ProcessLauncher
from headwater.app.settings import Settings
from headwater.core.errors import WorkerLost
from headwater.core.fleet import Role


def sockets_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_socket()]


async def test_a_worker_that_cannot_be_started_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = ProcessLauncher(Settings(), tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    with pytest.raises(WorkerLost, match="cannot start a worker process"):
        await launcher.launch(Role.BOTH)
    assert sockets_in(tmp_path) == []


async def test_an_end_in_the_middle_of_a_start_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
    launcher = ProcessLauncher(Settings(), tmp_path)
    starting = asyncio.create_task(launcher.launch(Role.DECODE))
    await asyncio.wait_for(begun.wait(), 5)
    assert sockets_in(tmp_path) == ["decode-0"]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert sockets_in(tmp_path) == []
