"""Documentation that a machine can check: links, commands, settings, errors, words, pages."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import re
import shlex
from pathlib import Path

import pytest

from headwater.app.cli import build_parser, parse_arguments
from headwater.app.settings_page import settings_page
from headwater.core import errors
from headwater.core.errors import HeadwaterError

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
HEADWATER_COMMAND = re.compile(
    r"(?:\.venv/bin/headwater|headwater|python3 run\.py) "
    r"(?P<rest>(?:serve|chat|doctor|bench|recipe|cache|eval|pools|worker)\b.*)"
)


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell_commands(text: str) -> list[str]:
    """Commands of the ``sh`` blocks, continued lines joined, comments left out."""
    blocks = [match["body"] for match in FENCE.finditer(text) if match["language"] == "sh"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = [
        target
        for match in LINK.finditer(text)
        if not (target := match["target"]).startswith(("http://", "https://", "#", "mailto:"))
        and not (page.parent / target.partition("#")[0]).exists()
    ]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_headwater_command_in_the_docs_is_accepted(page: Path) -> None:
    for command in shell_commands(page.read_text(encoding="utf-8")):
        for match in HEADWATER_COMMAND.finditer(command):
            words = shlex.split(match["rest"].partition(" | ")[0].removesuffix("&").strip())
            # Raises SystemExit or ConfigError for a flag that is not there.
            parse_arguments(build_parser(), words)


def test_the_readme_has_the_two_commands() -> None:
    commands = shell_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "python3 run.py serve" in commands
    assert "python3 run.py test" in commands


def test_every_setting_is_documented() -> None:
    written = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert written == settings_page(), (
        "run: python -m headwater.app.settings_page > docs/settings.md"
    )


def test_every_error_is_documented() -> None:
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    names = [
        name
        for name, found in inspect.getmembers(errors, inspect.isclass)
        if issubclass(found, HeadwaterError)
    ]
    assert names
    assert not [name for name in names if f"`{name}`" not in page]


def test_every_room_has_a_page_and_every_page_a_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "headwater").glob("*/__init__.py")}
    pages = {path.stem for path in (DOCS / "rooms").glob("*.md")}
    assert pages <= rooms
    assert rooms - pages <= {"core"}  # core is the glossary in code


@pytest.mark.parametrize("page", sorted((DOCS / "rooms").glob("*.md")), ids=page_id)
def test_files_named_in_a_rooms_page_exist(page: Path) -> None:
    room = ROOT / "headwater" / page.stem
    files = re.findall(r"^\| `([\w/]+\.py)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert not [name for name in files if not (room / name).exists()]


@pytest.mark.parametrize("page", sorted((DOCS / "rooms").glob("*.md")), ids=page_id)
def test_every_file_of_a_room_stands_on_its_page(page: Path) -> None:
    """By name or by a pattern such as `parser_*.py`, in the table of files."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    named = re.findall(r"`([\w/*]+\.py)`", "\n".join(rows))
    files = [path.name for path in (ROOT / "headwater" / page.stem).glob("*.py")]
    missing = [
        name
        for name in files
        if name != "__init__.py" and not any(fnmatch.fnmatch(name, known) for known in named)
    ]
    assert not missing


def test_a_decision_says_context_choice_price_and_when_to_revisit() -> None:
    decisions = sorted((DOCS / "decisions").glob("*.md"))
    assert decisions
    for page in decisions:
        assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", page.name)
        headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Context", "Choice", "Price", "Revisit when"], page.name


def glossary() -> list[tuple[str, str]]:
    """(word, its name in code) of each row; a name may be empty."""
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| ([^|]*) \| [^|]* \|$",
        (DOCS / "glossary.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return [(word.strip(), name.strip()) for word, name in rows if word.strip("- ") != "say"]


def test_the_glossary_has_the_words_that_the_code_stands_on() -> None:
    words = {word for word, _ in glossary()}
    needed = {
        "request", "sequence", "step", "block", "block table", "prefix key", "prefill", "decode",
        "hit tokens / miss tokens", "preempt", "evict / expire", "worker / pool", "batch-invariant",
        "TTFT, ITL",
    }  # fmt: skip
    assert needed <= words


def test_names_that_the_glossary_gives_exist_in_the_code() -> None:
    defined = set()
    for path in (ROOT / "headwater").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.AnnAssign, ast.Assign)):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    named = {name for _, cell in glossary() for name in re.findall(r"`(\w+)`", cell)}
    assert named
    assert not named - defined
