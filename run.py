#!/usr/bin/env python3
"""Install Headwater into .venv beside this file, then serve with it or test it.

    python3 run.py serve [headwater serve flags]
    python3 run.py test [--oracle] [pytest arguments]

Needs nothing but Python 3.11 or newer with its standard library. A second run
installs nothing unless a lock file, pyproject.toml or the interpreter changed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
STAMP = VENV / "headwater-installed"
MIN_PYTHON = (3, 11)

RUNTIME_LOCK = ROOT / "requirements" / "cpu.lock"
TEST_LOCK = ROOT / "requirements" / "test.lock"
ORACLE_LOCK = ROOT / "requirements" / "oracle.lock"

# Prints what the installed torch asks for and does not find. A CUDA build, for
# one, needs NVIDIA's libraries as packages, which the CPU lock does not list.
FIND_UNMET = """
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
for text in requires("torch") or []:
    need = Requirement(text)
    if need.marker is not None and not need.marker.evaluate({"extra": ""}):
        continue
    try:
        version(need.name)
    except PackageNotFoundError:
        print(need.name)
"""


def main(argv: Sequence[str]) -> int:
    if sys.version_info < MIN_PYTHON:
        fail(
            f"Headwater needs Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer; this is "
            f"{sys.version.split()[0]}. Start run.py with a newer one, such as python3.12 run.py"
        )
    # No `match` in this file: an old Python must get as far as the message above.
    command, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if command == "serve":
        install([RUNTIME_LOCK])
        return serve(rest)
    if command == "test":
        oracle = [ORACLE_LOCK] if rest[:1] == ["--oracle"] else []
        install([RUNTIME_LOCK, TEST_LOCK, *oracle])
        return test(rest[len(oracle) :])
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    say(__doc__ or "")
    return 2


def serve(flags: Sequence[str]) -> int:
    """Become ``headwater serve``, so that signals reach the server itself."""
    command = [str(PYTHON), "-m", "headwater.app.cli", "serve", *flags]
    if os.name == "posix":
        os.execv(command[0], command)  # noqa: S606 - no shell is the point
    return subprocess.call(command)


def test(pytest_arguments: Sequence[str]) -> int:
    """Lint, format, types, then pytest, which also checks the import contracts."""
    # Spinning OpenMP threads slow a shared machine down many times.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    for command in (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["pytest", *pytest_arguments],
    ):
        say("$ " + " ".join(command))
        tool, *arguments = command
        code = subprocess.call([str(PYTHON), "-m", tool, *arguments], cwd=ROOT, env=environment)
        if code != 0:
            return code
    return 0


def install(locks: Sequence[Path]) -> None:
    """Bring .venv to what ``locks`` and pyproject.toml say; quick when it is there already."""
    installed = read_stamp()
    interpreter = " ".join(f"{sys.version} {sys.base_prefix}".split())
    if not PYTHON.exists() or installed.get("python") != interpreter:
        say(f"making {VENV} with Python {sys.version.split()[0]}")
        make_venv()
        installed = {"python": interpreter}
        write_stamp(installed)
    for lock in locks:
        if installed.get(lock.name) == digest(lock):
            continue
        say(f"installing {lock.relative_to(ROOT)}")
        pip("--no-deps", "-r", str(lock))
        if lock == RUNTIME_LOCK:
            complete_torch()
        installed[lock.name] = digest(lock)
        write_stamp(installed)
    project = ROOT / "pyproject.toml"
    if installed.get(project.name) != digest(project):
        say("installing headwater itself, editable")
        # setuptools is in the lock, so building needs nothing from outside.
        pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))
        installed[project.name] = digest(project)
        write_stamp(installed)


def make_venv() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        fail(
            f"cannot make a virtual environment in {VENV}:\n{made.stdout.strip()}\n"
            "On Debian and Ubuntu, `apt-get install python3-venv` provides what is missing."
        )


def complete_torch() -> None:
    """Give a CUDA build of torch the libraries it asks for; the CPU build asks for none."""
    found = subprocess.run(
        [str(PYTHON), "-c", FIND_UNMET], stdout=subprocess.PIPE, text=True, check=True
    )
    unmet = found.stdout.split()
    if not unmet:
        return
    pinned = next(
        line for line in RUNTIME_LOCK.read_text().splitlines() if line.startswith("torch==")
    )
    say(
        f"pip chose a CUDA build of torch; installing the {len(unmet)} packages it needs, several "
        f"gigabytes. For the CPU build read the head of {RUNTIME_LOCK.relative_to(ROOT)}."
    )
    pip(pinned)


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if subprocess.call(command) != 0:
        fail("pip could not install; its message is above. Nothing was started.")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_stamp() -> dict[str, str]:
    """What .venv holds: name -> digest or version; empty if it was never finished."""
    try:
        lines = STAMP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def write_stamp(installed: Mapping[str, str]) -> None:
    STAMP.write_text(
        "".join(f"{name} {value}\n" for name, value in installed.items()), encoding="utf-8"
    )


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    say(f"run.py: {message}")
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
