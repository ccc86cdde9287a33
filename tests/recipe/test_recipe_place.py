"""Any token of a prompt, as a message, a part and characters: with every style of format."""

from __future__ import annotations

import pytest
from recipe_deepseek import BOTH, deepseek_recipe
from recipe_models import STYLES, TOOL_STYLES, AnyFormat
from recipe_talks import RUN, SYSTEM, answer, ask, call, calling, result, talk

from headwater.recipe.chat import ChatRecipe
from headwater.recipe.conversation import Conversation
from headwater.recipe.deepseek_format import DeepseekVersion
from headwater.recipe.prefix import place_of
from headwater.recipe.recipe import EncodedPrompt, Recipe

TEXTS = ("hello there", "naïve 漢字 😀 words\n\nand more", "  spaces  ", "the fox, again")


def check_every_token(recipe: Recipe, conversation: Conversation, prompt: EncodedPrompt) -> int:
    """The characters of a token's place hold the token's own; the number of exact places."""
    tokenizer = recipe.tokenizer
    num_exact = 0
    for index, token in enumerate(prompt.tokens):
        place = place_of(tokenizer, prompt, index)
        assert place.token_index == index
        covering = [span for span in prompt.spans if span.start <= index < span.end]
        if not covering:
            assert place.part is None
            if place.message_index is not None:
                assert 0 <= place.message_index < len(conversation.messages)
            continue
        (span,) = covering
        assert (place.part, place.message_index) == (span.part, span.message_index)
        assert span.start_char <= place.start_char < place.end_char <= max(span.end_char, 1)
        is_narrowed = (place.start_char, place.end_char) != (span.start_char, span.end_char)
        if place.part == "content" and is_narrowed:
            text = conversation.messages[span.message_index].content
            held = text[place.start_char : place.end_char].encode()
            assert tokenizer.token_bytes(token) in held
            num_exact += 1
    return num_exact


@pytest.mark.parametrize("name", STYLES)
def test_the_place_of_each_token_holds_its_characters(name: str) -> None:
    recipe = STYLES[name]().recipe
    messages = [ask(TEXTS[0]), answer(TEXTS[1]), ask(TEXTS[2]), answer(TEXTS[3]), ask(TEXTS[1])]
    conversation = talk(*messages)
    prompt = recipe.encode(conversation)
    assert check_every_token(recipe, conversation, prompt) > 10


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_the_place_of_a_call_and_of_a_result(name: str) -> None:
    # Some models' own calls cannot be read back; what is printed of them is there all the same.
    recipe = ChatRecipe.from_source(STYLES[name]().source, parser_format=AnyFormat())
    check_tools(recipe)


@pytest.mark.parametrize("version", BOTH)
def test_the_place_of_a_call_and_of_a_result_in_deepseeks_format(version: DeepseekVersion) -> None:
    check_tools(deepseek_recipe(version))


def check_tools(recipe: Recipe) -> None:
    calls = calling(call("run", {"argv": ["naïve"]}))
    conversation = talk(SYSTEM, ask(TEXTS[0]), calls, result(TEXTS[1]), tools=[RUN])
    prompt = recipe.encode(conversation)
    check_every_token(recipe, conversation, prompt)
    parts = {place_of(recipe.tokenizer, prompt, at).part for at in range(len(prompt.tokens))}
    assert {"content", "tool", "tool_call", None} <= parts
