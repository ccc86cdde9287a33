"""run.py: what it installs, when it does nothing, and what it says when it cannot."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py as a module, with its .venv in a folder of the test and pip replaced."""
    spec = importlib.util.spec_from_file_location("run_under_test", ROOT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "PYTHON", venv / "python")
    monkeypatch.setattr(module, "STAMP", venv / "stamp")
    return module


@pytest.fixture
def installed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have been done, in order."""
    done: list[str] = []

    def make_venv() -> None:
        done.append("venv")
        script.PYTHON.parent.mkdir(exist_ok=True)
        script.PYTHON.touch()

    monkeypatch.setattr(script, "make_venv", make_venv)
    monkeypatch.setattr(script, "complete_torch", lambda: done.append("torch"))
    monkeypatch.setattr(script, "pip", lambda *words: done.append(Path(words[-1]).name))
    return done


def test_the_first_run_installs_and_the_second_does_nothing(
    script: ModuleType, installed: list[str]
) -> None:
    script.install([script.RUNTIME_LOCK])
    assert installed == ["venv", "cpu.lock", "torch", ROOT.name]
    installed.clear()
    script.install([script.RUNTIME_LOCK])
    assert installed == []


def test_tests_add_their_lock_to_what_is_there(script: ModuleType, installed: list[str]) -> None:
    script.install([script.RUNTIME_LOCK])
    installed.clear()
    script.install([script.RUNTIME_LOCK, script.TEST_LOCK])
    assert installed == ["test.lock"]


def test_a_changed_lock_is_installed_again(
    script: ModuleType, installed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    lock = tmp_path / "some.lock"
    lock.write_text("a==1\n")
    script.install([lock])
    installed.clear()
    lock.write_text("a==2\n")
    script.install([lock])
    assert installed == ["some.lock"]


def test_another_python_makes_the_venv_anew(
    script: ModuleType, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script.install([script.RUNTIME_LOCK])
    installed.clear()
    monkeypatch.setattr(sys, "base_prefix", "/elsewhere")
    script.install([script.RUNTIME_LOCK])
    assert installed[0] == "venv"


def test_a_broken_off_installation_is_taken_up_again(
    script: ModuleType, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_pip(*words: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "pip", broken_pip)
        with pytest.raises(KeyboardInterrupt):
            script.install([script.RUNTIME_LOCK])
    installed.clear()
    script.install([script.RUNTIME_LOCK])
    assert installed == ["cpu.lock", "torch", ROOT.name]


def test_a_cuda_build_of_torch_gets_its_libraries_and_a_word_about_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "pip", lambda *words: asked.append(words))
    for unmet, expected in (("", []), ("nvidia-nccl\n", [("torch==2.13.0",)])):
        asked.clear()
        done = subprocess.CompletedProcess([], 0, stdout=unmet)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        script.complete_torch()
        assert asked == expected
    assert "CUDA build" in capsys.readouterr().err


def test_what_torch_misses_is_found_by_its_own_metadata(script: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script.FIND_UNMET], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""  # the suite runs with a torch that is complete


def test_an_old_python_is_told_what_to_do(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "MIN_PYTHON", (99, 0))
    with pytest.raises(SystemExit) as leaving:
        script.main(["serve"])
    assert leaving.value.code == 1
    assert "needs Python 99.0" in capsys.readouterr().err


def test_an_old_python_can_read_the_script_far_enough_to_be_told() -> None:
    ast.parse((ROOT / "run.py").read_text(encoding="utf-8"), feature_version=(3, 7))


def test_a_python_without_venv_is_told_what_to_do(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit):
        script.make_venv()
    assert "python3-venv" in capsys.readouterr().err


def test_an_unknown_command_shows_the_two_commands(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["start"]) == 2
    assert "run.py serve" in capsys.readouterr().err
    assert script.main(["--help"]) == 0
    assert "run.py test" in capsys.readouterr().out


def pins(lock: Path) -> dict[str, str]:
    lines = [line.partition(";")[0].strip() for line in lock.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_locks_pin_every_package_once() -> None:
    names = [name for lock in LOCKS for name in pins(lock)]
    assert len(names) == len(set(names))
    assert pins(ROOT / "requirements" / "cpu.lock")["torch"] == "2.13.0"


def test_locks_and_the_packages_own_requirements_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for lock, wanted in (
        ("cpu.lock", project["dependencies"]),
        ("test.lock", project["optional-dependencies"]["test"]),
        ("oracle.lock", project["optional-dependencies"]["oracle"]),
    ):
        pinned = pins(ROOT / "requirements" / lock)
        for requirement in wanted:
            match = re.match(r"[\w-]+", requirement)
            assert match is not None
            assert match[0] in pinned, f"{requirement} is not in {lock}"


def test_what_is_installed_here_is_what_the_locks_say() -> None:
    """Otherwise the suite would test another set than users get."""
    from importlib.metadata import version

    wrong = {
        name: (pinned, version(name))
        for name, pinned in pins(ROOT / "requirements" / "cpu.lock").items()
        if version(name).partition("+")[0] != pinned
    }
    assert not wrong
