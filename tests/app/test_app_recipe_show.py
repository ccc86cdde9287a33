"""``headwater recipe show``: two tokenisations side by side, from a tokenizer alone."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from headwater.app import recipe_show
from headwater.app.cli import main
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.load import load_recipe
from headwater.recipe.recipe import Recipe

TOY = "toy"


@pytest.fixture(name="recipe", scope="module")
def byte_recipe() -> Recipe:
    return load_recipe(TokenizerSource(kind="byte", vocab_size=320, bos_token_id=256))


def show(model: str, file: str | None, *, naive: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=160, color_system=None, highlight=False)
    assert recipe_show.run(model, file, naive=naive, console=console) == 0
    return out.getvalue()


def test_b01_the_demonstration_has_one_assistant_turn_and_the_naive_one_two(
    recipe: Recipe,
) -> None:
    conversation = recipe_show.demonstration(recipe)
    ours = recipe_show.ours(recipe, conversation)
    naive = recipe_show.undefended(recipe, conversation)
    assert (ours.num_assistant_turns, naive.num_assistant_turns) == (1, 2)
    assert naive.num_control_tokens == ours.num_control_tokens + 4
    # It is the same text: only what its parts are taken for differs.
    assert len(ours.lines) == len(naive.lines)
    texts = [
        ["".join(c for c in line.text.plain if c not in "⟦⟧") for line in one.lines]
        for one in (ours, naive)
    ]
    assert texts[0] == texts[1]


def test_control_tokens_are_marked_and_counted_by_line(recipe: Recipe) -> None:
    shown = recipe_show.ours(recipe, recipe_show.demonstration(recipe))
    for line in shown.lines:
        assert line.text.plain.count("⟦") == line.num_control_tokens
    assert sum(line.num_control_tokens for line in shown.lines) == shown.num_control_tokens


def test_the_command_prints_both_and_a_summary_of_each() -> None:
    text = show(TOY, None, naive=True)
    assert "headwater: " in text
    assert "1 assistant turn\n" in text
    assert "2 assistant turns" in text
    assert "⟦<|im_start|>⟧assistant" in text
    alone = show(TOY, None, naive=False)
    assert "naive" not in alone


@pytest.mark.parametrize("as_list", [True, False])
def test_a_file_is_read_as_the_chat_route_reads_a_body(tmp_path: Path, as_list: bool) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "naïve\u0007 中文"}]},
    ]
    body = messages if as_list else {"model": "x", "messages": messages, "temperature": 0}
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(body), encoding="utf-8")
    text = show(TOY, str(file), naive=False)
    assert "⟦<|im_start|>⟧system" in text
    assert "naïve\ufffd 中文" in text  # what would ring the bell is not printed


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON"),
        ('{"messages": []}', "must not be empty"),
        ('[{"role": "robot", "content": ""}]', "messages[0].role"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_on_stderr(
    tmp_path: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content, encoding="utf-8")
    assert main(["recipe", "show", "--model", TOY, str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", "--model", TOY, "/nowhere/talk.json"]) == 2
    assert "cannot read /nowhere/talk.json" in capsys.readouterr().err


def test_the_help_names_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["recipe", "show", "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert "--naive" in text
    assert "--model" in text
