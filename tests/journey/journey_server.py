"""A real `headwater serve` in processes of its own, for the journey tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers, its process, and where its log goes."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.root + path, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def post(self, path: str, body: object) -> tuple[int, dict[str, object]]:
        request = urllib.request.Request(
            self.root + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def metric(self, name: str) -> float:
        """The value of one series, spelt as on the page: ``name`` or ``name{label="x"}``."""
        _, text = self.get("/metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found[1])

    @property
    def num_held_blocks(self) -> float:
        return self.metric('headwater_blocks{use="held"}')

    def wait_until(self, what: str, true: object, limit_s: float = LIMIT_S) -> None:
        """Poll ``true()`` until it holds."""
        assert callable(true)
        deadline_s = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < deadline_s, f"{what} did not happen within {limit_s} s"
            time.sleep(0.02)

    def worker_pids(self) -> list[int]:
        return children_of(self.process.pid)


def _processes() -> list[tuple[int, int, str]]:
    """(pid, parent, state) of every process: from /proc, or from ps where there is none."""
    if Path("/proc/self/stat").exists():
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # The command's name, in brackets, may hold anything.
                pid, rest = stat.parent.name, stat.read_text().rpartition(")")[2].split()
                found.append((int(pid), int(rest[1]), rest[0]))
        return found
    listing = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listing.splitlines()]
    return [(int(row[0]), int(row[1]), row[2]) for row in rows]


def children_of(parent: int) -> list[int]:
    return [pid for pid, of, state in _processes() if of == parent and state[0] != "Z"]


def is_alive(pid: int) -> bool:
    return any(pid == found and state[0] != "Z" for found, _, state in _processes())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(folder: Path, *flags: str) -> Served:
    """Start without waiting; the log is ``folder/serve.log``."""
    port = free_port()
    log = folder / "serve.log"
    command = [sys.executable, "-m", "headwater.app.cli", "serve", f"--port={port}", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            start_new_session=True,  # a group of its own, as a terminal or service manager makes
            # The hub is out of reach in every test, also where there is a network. The disk
            # tier is the folder's own: a server started in it again finds what was kept.
            env=os.environ
            | {
                "TMPDIR": str(folder),
                "HF_HUB_OFFLINE": "1",
                "XDG_CACHE_HOME": str(folder / "cache"),
            },
        )
    return Served(port, process, log)


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """A ready server; ended with SIGTERM, and by force if that does not do."""
    served = start(folder, *flags)
    try:
        served.wait_until("readiness", lambda: is_ready(served))
        yield served
    finally:
        if served.process.poll() is None:
            served.process.send_signal(signal.SIGTERM)
        try:
            served.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            served.process.kill()
            served.process.wait()
            raise


def is_ready(served: Served) -> bool:
    assert served.process.poll() is None, served.log.read_text()
    try:
        return served.get("/health/ready")[0] == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
