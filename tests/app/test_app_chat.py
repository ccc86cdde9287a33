"""The terminal client: one-shot, dialogue, aborted and failed answers."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from app_fakes import FakeServer, Script
from rich.console import Console

from headwater.app import chat
from headwater.app.chat import ChatOptions
from headwater.app.completions import StreamFailed
from headwater.app.target import Target
from headwater.core.errors import ConfigError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def options_for(server: FakeServer, system: str | None = None) -> ChatOptions:
    return ChatOptions(target=Target(base_url=server.url, timeout_s=10), system=system)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What the person at the keyboard does: each item a line, or an exception to raise."""
    waiting: Iterator[str | type[BaseException]] = iter((*lines, EOFError))

    def answer(self: Console, prompt: str = "") -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(Console, "input", answer)


def test_a_question_is_answered_on_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert chat.run(options_for(server, system="Be brief."), "Hi?", stdin=Terminal()) == 0
        (_, body) = server.requests[0]
    assert capsys.readouterr().out == "Hello\n"
    assert body["model"] == "fake-model"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi?"},
    ]
    assert "temperature" not in body


def test_a_pipe_is_the_question(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert chat.run(options_for(server), None, stdin=io.StringIO("from a pipe\n")) == 0
        (_, body) = server.requests[0]
    assert body["messages"] == [{"role": "user", "content": "from a pipe"}]


def test_an_empty_pipe_is_an_error_not_an_empty_question() -> None:
    with FakeServer() as server, pytest.raises(ConfigError, match="no question"):
        chat.run(options_for(server), None, stdin=io.StringIO(""))


def test_a_dialogue_sends_what_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "one", "two", "/reset", "three", "/system Rhyme.", "four", "/exit")
    with FakeServer() as server:
        assert chat.run(options_for(server), None, stdin=Terminal()) == 0
        sent = [body["messages"] for _, body in server.requests]
    said = {"role": "assistant", "content": "Hello"}
    assert sent == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "one"}, said, {"role": "user", "content": "two"}],
        [{"role": "user", "content": "three"}],
        [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "four"}],
    ]


def test_a_failed_answer_is_said_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one", "two")
    with FakeServer(Script(status=429, error="queue is full"), Script()) as server:
        assert chat.run(options_for(server), None, stdin=Terminal()) == 0
        assert server.requests[1][1]["messages"] == [{"role": "user", "content": "two"}]
    assert "queue is full" in capsys.readouterr().err


def test_ctrl_c_ends_the_answer_and_keeps_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    real_print = print

    def interrupting_print(*values: object, **options: object) -> None:
        real_print(*values)
        if values == ("stop here",):
            raise KeyboardInterrupt

    type_lines(monkeypatch, "one", KeyboardInterrupt, "two")
    monkeypatch.setattr("builtins.print", interrupting_print)
    scripts = (Script(chunks=("stop here", "never"), pauses_s=(0, 0.2)), Script())
    with FakeServer(*scripts) as server:
        assert chat.run(options_for(server), None, stdin=Terminal()) == 0
        assert server.requests[1][1]["messages"] == [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "stop here"},
            {"role": "user", "content": "two"},
        ]


def test_output_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(chunks=("a\x1b]0;title\x07", "\x9b2J b\n\tc"))) as server:
        chat.run(options_for(server), "Hi?", stdin=Terminal())
    assert capsys.readouterr().out == "a]0;title2J b\n\tc\n"


def test_no_server_says_how_to_start_one() -> None:
    with FakeServer() as server:
        options = options_for(server)
    with pytest.raises(StreamFailed, match="headwater serve"):
        chat.run(options, "Hi?", stdin=Terminal())
