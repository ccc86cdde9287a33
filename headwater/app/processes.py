"""Starts workers of a role: as local processes for ``serve``, as threads for tests.

Both are ``router``'s WorkerLauncher. A worker process holds the read end of a
pipe whose write end is the front's; when the front goes, however it goes, the
pipe closes and the worker ends: no orphan, no pid file, no polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headwater.app.secret_file import make_secret
from headwater.app.settings import (
    Settings,
    as_flags,
    worker_environment,
    worker_settings,
    worker_threads,
)
from headwater.core.errors import HeadwaterError, WorkerLost
from headwater.core.fleet import Role
from headwater.core.ports import WorkerChannel
from headwater.transfer.channels import (
    SocketWorkerChannel,
    ThreadWorkerChannel,
    ThreadWorkerPort,
)

# From end-of-pipe to SIGKILL; a worker ends itself at once unless it is stuck in a kernel.
KILL_AFTER_S = 5.0


class ProcessLauncher:
    """Each launch is a fresh ``headwater worker`` with an address of its own in ``folder``.

    KV between workers needs a secret that they share; where nobody named one, it is made here.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        fleet = settings.fleet
        if fleet.secret_file is None:
            fleet = replace(fleet, secret_file=make_secret(folder / "secret"))
        self._settings = worker_settings(replace(settings, fleet=fleet))
        self._folder = folder
        self._numbers = itertools.count()
        self._running: set[asyncio.subprocess.Process] = set()

    async def launch(self, role: Role = Role.BOTH) -> WorkerChannel:
        worker_id = f"{role}-{next(self._numbers)}"
        socket = self._folder / worker_id
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        started: list[tuple[asyncio.subprocess.Process, asyncio.Task[None]]] = []

        async def end_worker() -> None:
            for process, watcher in started:
                await _end(process)
                await watcher
                self._running.discard(process)
            socket.unlink(missing_ok=True)

        # Bound before the worker starts, so that its first word cannot be missed.
        channel = SocketWorkerChannel(f"ipc://{socket}", lost, end_worker)
        command = [
            sys.executable, "-m", "headwater.app.cli", "worker",
            f"--connect=ipc://{socket}", f"--worker-id={worker_id}", f"--role={role}",
            *as_flags(self._settings),
        ]  # fmt: skip
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                env=worker_environment(worker_threads(self._settings)),
            )
        except BaseException as error:  # the server may end just now
            await channel.close()
            if isinstance(error, OSError):
                raise WorkerLost(f"cannot start a worker process: {error}") from error
            raise
        self._running.add(process)
        watcher = asyncio.create_task(_watch(process, lost))
        started.append((process, watcher))
        return channel

    def kill(self) -> None:
        """End all workers at once; what they have not stored is lost."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _watch(process: asyncio.subprocess.Process, lost: asyncio.Future[str]) -> None:
    code = await process.wait()
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if not lost.done():
        lost.set_result(f"worker process {process.pid} ended with {how}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), KILL_AFTER_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class ThreadLauncher:
    """Each launch runs ``work(port, stopping)`` in a thread: the worker program, no process.
    ``work`` says itself which role it has."""

    def __init__(self, work: Callable[[ThreadWorkerPort, Callable[[], bool]], None]) -> None:
        self._work = work

    async def launch(self, role: Role = Role.BOTH) -> WorkerChannel:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[str] = loop.create_future()
        port = ThreadWorkerPort()
        stop = threading.Event()

        async def end_worker() -> None:
            stop.set()
            port.wake()
            await asyncio.to_thread(thread.join)

        channel = ThreadWorkerChannel(port, lost, end_worker)

        def declare_lost(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        def run() -> None:
            reason = "worker thread ended"
            try:
                self._work(port, stop.is_set)
            except HeadwaterError as error:
                reason = str(error)
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(declare_lost, reason)

        thread = threading.Thread(target=run, name="headwater-worker", daemon=True)
        thread.start()
        return channel
