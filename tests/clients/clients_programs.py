"""The three coding agents: how each is configured, what it is asked, and what counts as trouble.

Only documented settings are used: base URL, key, model, context length, no
updates, no telemetry. Used by ``run_clients``; knows neither server nor model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from clients_model import CONTEXT_TOKENS, MODEL_ID, Call, Script, Turn
from clients_server import KEY

FILE: Final = "greet.py"
WRONG: Final = 'def greeting():\n    return "helo"\n'
RIGHT: Final = WRONG.replace("helo", "hello")
RUN: Final = "python3 -c 'import greet; print(greet.greeting())'"
ANSWER: Final = "Done: the greeting says hello."
SUBTASK: Final = "Report the number of files"
SUB_ANSWER: Final = "There is one file."


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run: what the client is asked, and what the model will play."""

    name: str
    prompt: str
    scripts: tuple[Script, ...] = ()
    answer: str = ANSWER  # must be in what the client prints
    fixes_file: bool = True
    # Words that some later prompt must hold: results that the client sent back.
    results: tuple[str, ...] = ()


class Client(Protocol):
    """One agent, unmodified."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str: ...

    @property
    def version(self) -> str:
        """The version that the documentation speaks about."""
        ...

    def binary(self, modules: Path) -> Path:
        """The native program inside ``modules``, a node_modules folder."""
        ...

    def configure(self, home: Path, port: int) -> Mapping[str, str]:
        """Write settings under ``home``; returns environment variables."""
        ...

    def arguments(self, prompt: str) -> list[str]: ...

    def scenarios(self, work: Path) -> tuple[Scenario, ...]:
        """Tasks in the folder ``work``, which holds ``FILE``."""
        ...

    def complaints(self, out: str, err: str) -> Iterator[str]:
        """Lines that tell of a retry, an error, or a warning about the server."""
        ...


TASK: Final = f"Read {FILE}, fix the typo in it, run it, then say what you did."
ODD: Final = "Try a few odd things, then say so."


def _task(read: Call, edit: Call, run: Call, look: Call) -> Scenario:
    turns = (
        Turn(thinking="The file first.", text="I will read the file.", calls=(read,)),
        Turn(calls=(edit,)),
        Turn(text="Now I run it.", calls=(run, look)),  # two calls at once
        Turn(text=ANSWER),
    )
    return Scenario(
        name="task",
        prompt=TASK,
        scripts=(Script(opening=TASK, turns=turns),),
        results=('return "helo"', "hello", FILE),
    )


def _odd(turns: tuple[Turn, ...], results: tuple[str, ...]) -> Scenario:
    return Scenario(
        name="odd",
        prompt=ODD,
        scripts=(
            Script(opening=ODD, turns=(*turns, Turn(text=ANSWER))),
            Script(opening=SUBTASK, turns=(Turn(text=SUB_ANSWER),)),
        ),
        fixes_file=False,
        results=results,
    )


@dataclass(frozen=True, slots=True)
class ClaudeCode:
    """Speaks Messages."""

    name: str = "claude"
    package: str = "@anthropic-ai/claude-code"
    version: str = "2.1.332"

    def binary(self, modules: Path) -> Path:
        return _only(modules, "@anthropic-ai/claude-code-linux-*/claude")

    def configure(self, home: Path, port: int) -> Mapping[str, str]:
        roles = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{m}_MODEL" for m in _CLAUDE_TIERS))
        return {
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
            "ANTHROPIC_AUTH_TOKEN": KEY,
            **dict.fromkeys(roles, MODEL_ID),
            # It takes a model that it does not know for one with a million tokens.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_TOKENS),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }

    def arguments(self, prompt: str) -> list[str]:
        form = ["--output-format", "stream-json", "--include-partial-messages", "--verbose"]
        return ["-p", prompt, *form, "--allowedTools", "Read,Edit,Bash,Agent,ToolSearch"]

    def scenarios(self, work: Path) -> tuple[Scenario, ...]:
        file = str(work / FILE)
        old_new = {"old_string": "helo", "new_string": "hello"}
        subtask = {
            "description": "Count files",
            "prompt": SUBTASK,
            "subagent_type": "general-purpose",
        }
        return (
            _task(
                Call("Read", {"file_path": file}),
                Call("Edit", {"file_path": file, **old_new}),
                Call("Bash", {"command": RUN, "description": "Run it"}),
                Call("Bash", {"command": "ls", "description": "List"}),
            ),
            _odd(
                (
                    # Its result holds tool_reference blocks, and the tool list grows.
                    Turn(calls=(Call("ToolSearch", {"query": "select:WebFetch"}),)),
                    Turn(
                        thinking="Both fail.",
                        calls=(
                            Call("Bash", {"command": "echo out; exit 3", "description": "Fail"}),
                            Call("Read", {"file_path": str(work / "none.txt")}),
                        ),
                    ),
                    Turn(calls=(Call("Agent", {**subtask, "run_in_background": False}),)),
                ),
                ("Exit code 3", "does not exist", SUB_ANSWER),
            ),
            # About 25 counts at the same moment, and no generation.
            Scenario(name="context", prompt="/context", answer="/ 200k", fixes_file=False),
        )

    def complaints(self, out: str, err: str) -> Iterator[str]:
        for event in _json_lines(out):
            if str(event.get("subtype", "")).startswith("api_") or event.get("is_error"):
                yield json.dumps(event)[:400]
        # It does not know the model's name, which is no fault of the server.
        yield from (line for line in err.splitlines() if line and "unrecognized_model" not in line)


@dataclass(frozen=True, slots=True)
class Codex:
    """Speaks Responses."""

    name: str = "codex"
    package: str = "@openai/codex"
    version: str = "0.171.0"

    def binary(self, modules: Path) -> Path:
        return _only(modules, "@openai/codex-linux-*/vendor/*/bin/codex")

    def configure(self, home: Path, port: int) -> Mapping[str, str]:
        folder = home / ".codex"
        folder.mkdir()
        (folder / "config.toml").write_text(
            f'model = "{MODEL_ID}"\n'
            'model_provider = "headwater"\n'
            f"model_context_window = {CONTEXT_TOKENS}\n"
            "check_for_update_on_startup = false\n"
            "[analytics]\nenabled = false\n"
            "[model_providers.headwater]\n"
            'name = "Headwater"\n'
            f'base_url = "http://127.0.0.1:{port}/v1"\n'
            'env_key = "HEADWATER_API_KEY"\n'
            'wire_api = "responses"\n',
            encoding="utf-8",
        )
        return {"HEADWATER_API_KEY": KEY}

    def arguments(self, prompt: str) -> list[str]:
        # Its own sandbox is off: the namespace is the sandbox here.
        sandbox = ["--sandbox", "danger-full-access"]
        return ["exec", "--json", "--skip-git-repo-check", *sandbox, prompt]

    def scenarios(self, work: Path) -> tuple[Scenario, ...]:
        patch = (
            "apply_patch <<'P'\n*** Begin Patch\n*** Update File: greet.py\n@@\n"
            '-    return "helo"\n+    return "hello"\n*** End Patch\nP'
        )
        return (
            _task(
                Call("exec_command", {"cmd": f"cat {FILE}"}),
                Call("exec_command", {"cmd": patch}),
                Call("exec_command", {"cmd": RUN}),
                Call("exec_command", {"cmd": "ls"}),
            ),
            _odd(
                (
                    Turn(
                        thinking="This fails.",
                        calls=(Call("exec_command", {"cmd": "echo out; exit 3"}),),
                    ),
                    # A tool of a namespace, and one that is not there.
                    Turn(
                        calls=(
                            Call("multi_agent_v1__spawn_agent", {"message": SUBTASK}),
                            Call("nosuch", {}),
                        )
                    ),
                ),
                ("exited with code 3", "agent_id", "unsupported call: nosuch"),
            ),
        )

    def complaints(self, out: str, err: str) -> Iterator[str]:
        for event in _json_lines(out):
            item = event.get("item")
            is_error = isinstance(item, dict) and item.get("type") == "error"
            # It has no catalogue entry for the model, which is no fault of the server.
            if is_error and "Model metadata for" not in json.dumps(item):
                yield json.dumps(event)[:400]
            if event.get("type") in ("error", "turn.failed"):
                yield json.dumps(event)[:400]
        yield from (
            line
            for line in err.splitlines()
            if line and not any(expected in line for expected in _CODEX_SAYS)
        )


@dataclass(frozen=True, slots=True)
class OpenCode:
    """Speaks Chat Completions."""

    name: str = "opencode"
    package: str = "opencode-ai"
    version: str = "1.18.33"

    def binary(self, modules: Path) -> Path:
        # The baseline build runs on every x64 processor.
        return _only(modules, "opencode-linux-*/bin/opencode")

    def configure(self, home: Path, port: int) -> Mapping[str, str]:
        folder = home / ".config" / "opencode"
        folder.mkdir(parents=True)
        limit = {"context": CONTEXT_TOKENS, "output": 8192}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Headwater",
            "options": {"baseURL": f"http://127.0.0.1:{port}/v1", "apiKey": KEY},
            "models": {MODEL_ID: {"name": "Scripted", "limit": limit}},
        }
        document = {
            "model": f"headwater/{MODEL_ID}",
            "provider": {"headwater": provider},
            "permission": {"edit": "allow", "bash": "allow"},
            "autoupdate": False,
            "share": "disabled",
        }
        (folder / "opencode.json").write_text(json.dumps(document), encoding="utf-8")
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}

    def arguments(self, prompt: str) -> list[str]:
        return ["run", "--format", "json", "--print-logs", prompt]

    def scenarios(self, work: Path) -> tuple[Scenario, ...]:
        file = str(work / FILE)
        subtask = {"description": "Count files", "prompt": SUBTASK, "subagent_type": "general"}
        return (
            _task(
                Call("read", {"filePath": file}),
                Call("edit", {"filePath": file, "oldString": "helo", "newString": "hello"}),
                Call("bash", {"command": RUN, "description": "Run it"}),
                Call("bash", {"command": "ls", "description": "List"}),
            ),
            _odd(
                (
                    Turn(
                        thinking="This fails.",
                        calls=(
                            Call("bash", {"command": "echo out; exit 3", "description": "Fail"}),
                            Call("nosuch", {"a": 1}),
                        ),
                    ),
                    Turn(calls=(Call("task", subtask),)),
                ),
                ("unavailable tool", SUB_ANSWER),
            ),
        )

    def complaints(self, out: str, err: str) -> Iterator[str]:
        for event in _json_lines(out):
            if event.get("type") == "error":
                yield json.dumps(event)[:400]
        yield from (
            line[:400] for line in err.splitlines() if re.search(r"\blevel=(WARN|ERROR)\b", line)
        )


CLIENTS: Final[tuple[Client, ...]] = (ClaudeCode(), Codex(), OpenCode())

_CLAUDE_TIERS: Final = ("HAIKU", "SONNET", "OPUS")
_CODEX_SAYS: Final = ("Reading additional input from stdin", "unsupported call: nosuch")


def _only(modules: Path, pattern: str) -> Path:
    found = sorted(modules.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{modules / pattern}: not there; is this platform supported?")
    return found[-1]


def _json_lines(text: str) -> Iterator[Mapping[str, object]]:
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
