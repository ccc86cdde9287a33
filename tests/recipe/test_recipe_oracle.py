"""Against transformers: rendered prompts and ids of every style, and of SmolLM2."""

from __future__ import annotations

import pytest
from recipe_models import STYLES, Style, smollm2_path, smollm2_source

from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.messages import ChatMessage

pytestmark = pytest.mark.oracle

CONVERSATION = [
    {"role": "user", "content": "  hello <h1> café 中文\n\n\n"},
    {"role": "assistant", "content": "it's 12345 🙂 x < 3\t"},
    {"role": "user", "content": "and\n  then? "},
]
MESSAGES = [ChatMessage(role=m["role"], content=m["content"]) for m in CONVERSATION]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STYLES)
def test_ids_equal_apply_chat_template(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    style: Style = STYLES[name]()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=style.plain, chat_template=style.source.chat_template, **style.variables
    )
    ids = tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(style.recipe.encode_chat(MESSAGES).tokens) == list(ids)


@pytest.mark.filterwarnings("ignore")
def test_smollm2_ids_equal_those_of_transformers_own_reading_of_the_file() -> None:
    transformers = pytest.importorskip("transformers")
    source: TokenizerSource = smollm2_source()
    path = smollm2_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    recipe = ChatRecipe.from_source(source)
    for message in CONVERSATION:
        text = message["content"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert recipe.tokenizer.encode_text(text) == list(ids)
