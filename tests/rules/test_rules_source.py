"""House rules that a parser can check, each with its reason."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headwater"

# The last word of a file's name: plan.py, kv_plan.py.
PURE_NAMES = frozenset({"plan", "policy", "budget", "placement", "eviction", "retention"})
PURE_IMPORTS = frozenset(
    {
        "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "heapq",
        "itertools", "math", "operator", "typing",
    }
)  # fmt: skip
PICKLERS = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})
MAY_TOUCH_ENVIRONMENT = frozenset({"app/settings.py"})
MAX_LINES = 500


PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
ALL_FILES = [
    ROOT / "run.py",
    *(path for folder in ("headwater", "tests", "bench") for path in (ROOT / folder).rglob("*.py")),
]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_pure(stem: str) -> bool:
    return stem.rpartition("_")[2] in PURE_NAMES


def violations(files: list[Path], find: Callable[[ast.Module], Iterator[int]]) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}" for path in files for line in find(tree_of(path))]


def imported_modules(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno


def test_only_settings_touches_the_environment() -> None:
    """A variable read elsewhere has no origin line, no check and no documentation."""

    def find(tree: ast.Module) -> Iterator[int]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                yield node.lineno
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                yield from (
                    node.lineno for alias in node.names if alias.name in ("environ", "getenv")
                )

    files = [
        path
        for path in PACKAGE_FILES
        if path.relative_to(PACKAGE).as_posix() not in MAY_TOUCH_ENVIRONMENT
    ]
    assert not violations(files, find)


def test_i08_nothing_is_pickled() -> None:
    """Unpickling runs what a file or peer says; torch.load unpickles."""

    def find(tree: ast.Module) -> Iterator[int]:
        for name, line in imported_modules(tree):
            if name.partition(".")[0] in PICKLERS:
                yield line
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("load", "save")
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            ):
                yield node.lineno

    assert not violations(PACKAGE_FILES, find)


def test_pure_files_import_only_values() -> None:
    """Plans and policies run in the simulator too: no clock, socket, file, logger or tensor."""

    def find(tree: ast.Module) -> Iterator[int]:
        for name, line in imported_modules(tree):
            is_ours = name.startswith("headwater.core.") or (
                name.startswith("headwater.") and is_pure(name.rpartition(".")[2])
            )
            if not is_ours and name.partition(".")[0] not in PURE_IMPORTS:
                yield line
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("open", "print", "input")
            ):
                yield node.lineno

    files = [path for path in PACKAGE_FILES if is_pure(path.stem)]
    assert files
    assert not violations(files, find)


def test_every_file_can_be_read_in_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ALL_FILES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


def test_every_public_class_and_function_of_a_port_states_its_contract() -> None:
    ports = tree_of(PACKAGE / "core" / "ports.py")
    classes = [node for node in ports.body if isinstance(node, ast.ClassDef)]
    assert classes
    assert not [node.name for node in classes if not ast.get_docstring(node)]


def test_no_module_keeps_state() -> None:
    """Two engines in one process must not meet in a module's variables."""

    def find(tree: ast.Module) -> Iterator[int]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                yield node.lineno
        for statement in tree.body:
            if isinstance(statement, ast.Assign):
                targets, value = statement.targets, statement.value
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                targets, value = [statement.target], statement.value
            else:
                continue
            is_constant = all(
                isinstance(target, ast.Name) and (target.id.isupper() or target.id == "__all__")
                for target in targets
            )
            if isinstance(value, (ast.Dict, ast.List, ast.Set)) and not is_constant:
                yield statement.lineno

    assert not violations(PACKAGE_FILES, find)


def test_errors_are_not_swallowed() -> None:
    """``except Exception: pass`` hides the fault that a person will look for all night."""

    def find(tree: ast.Module) -> Iterator[int]:
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            name = node.type.id if isinstance(node.type, ast.Name) else None
            is_broad = node.type is None or name in ("Exception", "BaseException")
            if is_broad and all(isinstance(item, (ast.Pass, ast.Continue)) for item in node.body):
                yield node.lineno

    assert not violations(PACKAGE_FILES, find)


def test_test_files_have_names_of_their_own() -> None:
    """There are no packages under tests/, so two files of one name would be one module."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert sorted(names) == sorted(set(names))
