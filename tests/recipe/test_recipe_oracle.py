"""Against transformers: ids of every style with tools, reasoning and open ends, and of SmolLM2."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest
from recipe_models import STYLES, TOOL_STYLES, Style, smollm2_path, smollm2_source
from recipe_talks import (
    CALL_WITH_TEXT,
    FORMS,
    PARALLEL,
    REASONED,
    SYSTEM,
    TOOL_TALKS,
    answer,
    ask,
    hf_messages,
    hf_switches,
    hf_tools,
    talk,
    with_mode,
)

from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.conversation import Conversation, Message

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

PLAIN = talk(
    ask("  hello <h1> café 中文\n\n\n"),
    answer("it's 12345 🙂 x < 3\t"),
    ask("and\n  then? "),
)


@cache
def oracle(name: str) -> Any:
    """transformers' own tokenizer for one style."""
    transformers = pytest.importorskip("transformers")
    style: Style = STYLES[name]()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=style.plain, chat_template=style.source.chat_template, **style.variables
    )


def oracle_ids(name: str, conversation: Conversation, **options: bool) -> list[int]:
    arguments, no_content = FORMS.get(name, ("object", ""))
    ids = oracle(name).apply_chat_template(
        hf_messages(conversation, arguments=arguments, no_content=no_content),
        tools=hf_tools(conversation),
        tokenize=True,
        return_dict=False,
        **{"add_generation_prompt": True, **options},
        **hf_switches(conversation),
    )
    return list(cast(list[int], ids))


@pytest.mark.parametrize("name", STYLES)
def test_ids_equal_apply_chat_template(name: str) -> None:
    recipe = STYLES[name]().recipe
    assert list(recipe.encode(PLAIN).tokens) == oracle_ids(name, PLAIN)
    done = recipe.encode(PLAIN, add_generation_prompt=False)
    assert list(done.tokens) == oracle_ids(name, PLAIN, add_generation_prompt=False)


@pytest.mark.parametrize("name", sorted(set(STYLES) - {"inst"}))
def test_ids_with_a_system_message_equal_apply_chat_template(name: str) -> None:
    conversation = talk(SYSTEM, *PLAIN.messages)
    assert list(STYLES[name]().recipe.encode(conversation).tokens) == oracle_ids(name, conversation)


@pytest.mark.parametrize("talk_name", TOOL_TALKS)
@pytest.mark.parametrize("name", TOOL_STYLES)
def test_ids_with_tools_equal_apply_chat_template(name: str, talk_name: str) -> None:
    conversation = TOOL_TALKS[talk_name]
    assert list(STYLES[name]().recipe.encode(conversation).tokens) == oracle_ids(name, conversation)


@pytest.mark.parametrize("mode", ["default", "on", "off"])
@pytest.mark.parametrize("conversation", [PLAIN, REASONED, PARALLEL, CALL_WITH_TEXT])
@pytest.mark.parametrize("name", ["qwen3", "xml"])
def test_ids_with_reasoning_equal_apply_chat_template(
    name: str, conversation: Conversation, mode: str
) -> None:
    conversation = with_mode(conversation, mode)
    assert list(STYLES[name]().recipe.encode(conversation).tokens) == oracle_ids(name, conversation)


@pytest.mark.parametrize("text", ["hello wor", " the fox \n", "a\n\nb\t"])
@pytest.mark.parametrize("name", STYLES)
def test_ids_of_a_message_that_continues_equal_apply_chat_template(name: str, text: str) -> None:
    closed = talk(*PLAIN.messages, answer(text))
    last = Message(role="assistant", content=text, continues=True)
    ids = STYLES[name]().recipe.encode(talk(*PLAIN.messages, last)).tokens
    assert list(ids) == oracle_ids(
        name, closed, continue_final_message=True, add_generation_prompt=False
    )


def test_smollm2_ids_equal_those_of_transformers_own_reading_of_the_file() -> None:
    transformers = pytest.importorskip("transformers")
    source: TokenizerSource = smollm2_source()
    path = smollm2_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    recipe = ChatRecipe.from_source(source)
    for message in PLAIN.messages:
        text = message.content
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert recipe.tokenizer.encode_text(text) == list(ids)
    ids = tokenizer.apply_chat_template(
        hf_messages(PLAIN),
        chat_template=source.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert list(recipe.encode(PLAIN).tokens) == list(ids)
