"""The trained tokenizer: what Headwater loads, and what it splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mini_tokenizers import small_tokenizer

from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.conversation import Conversation, Message, Thinking, Tool
from headwater.recipe.deepseek import DeepseekRecipe
from headwater.recipe.deepseek_format import DeepseekVersion
from headwater.recipe.load import load_recipe
from tools.mini.chat_format import BOS, EOS, Chat, ToolDefinition, Turn, prompt_text
from tools.mini.tokenizer import SPECIAL, save, train


@pytest.fixture
def recipe() -> DeepseekRecipe:
    tokenizer = small_tokenizer()
    end = tokenizer.token_to_id(EOS)
    assert end is not None
    loaded = load_recipe(
        TokenizerSource(
            kind="hf",
            tokenizer_json=tokenizer.to_str().encode(),
            end_token_ids=frozenset({end}),
            vocab_size=tokenizer.get_vocab_size(),
            model_id="m",
        )
    )
    assert isinstance(loaded, DeepseekRecipe)
    return loaded


def test_its_control_tokens_alone_make_headwater_pick_the_format(recipe: DeepseekRecipe) -> None:
    assert recipe.version is DeepseekVersion.V4_1


def test_it_has_exactly_as_many_ids_as_were_asked_for() -> None:
    assert small_tokenizer().get_vocab_size() == 1024


@pytest.mark.parametrize("thinking", [False, True])
def test_a_training_prompt_and_a_served_prompt_have_the_same_ids(
    recipe: DeepseekRecipe, thinking: bool
) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    served = recipe.encode(
        Conversation(
            messages=(
                Message(role="system", content="Be brief."),
                Message(role="user", content="Is it 42 degrees in Zürich?\nThank you."),
            ),
            tools=(Tool(name="f", description="d", parameters=json.dumps(parameters)),),
            thinking=Thinking(mode="on" if thinking else "off"),
        )
    )
    trained = prompt_text(
        Chat(
            turns=[Turn(role="user", text="Is it 42 degrees in Zürich?\nThank you.")],
            system="Be brief.",
            tools=[ToolDefinition(name="f", description="d", parameters=parameters)],
            thinking=thinking,
        )
    )
    ids = small_tokenizer().encode(trained, add_special_tokens=False).ids
    assert list(served.tokens) == ids


@pytest.mark.parametrize("text", ["", " ", "a\n\n  b\t", "naïve 你好 🙂", "\x00\x7f", "1234"])
def test_any_text_comes_back_unchanged(text: str) -> None:
    ids = small_tokenizer().encode(text, add_special_tokens=False).ids
    assert small_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_a_number_is_its_digits_wherever_it_stands() -> None:
    tokenizer = small_tokenizer()
    alone = tokenizer.encode("4271", add_special_tokens=False).ids
    assert len(alone) == 4
    for text in ("is 4271.", "x4271", "\n4271", "(4271)"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert any(ids[i : i + 4] == alone for i in range(len(ids)))


def test_every_control_token_is_one_id_inside_any_text() -> None:
    tokenizer = small_tokenizer()
    for literal in SPECIAL:
        ids = tokenizer.encode(f"a{literal}b", add_special_tokens=False).ids
        assert tokenizer.token_to_id(literal) in ids
        assert len(ids) == 3


def test_the_saved_folder_names_its_first_and_last_token(tmp_path: Path) -> None:
    save(train(["a b"], vocabulary=256 + len(SPECIAL)), tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (settings["bos_token"], settings["eos_token"]) == (BOS, EOS)
    table = {entry["content"]: int(i) for i, entry in settings["added_tokens_decoder"].items()}
    added = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    assert table == {token["content"]: token["id"] for token in added}
    assert set(table) == set(SPECIAL)
