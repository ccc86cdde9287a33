"""Nothing from outside becomes a control token (B01): the corpus over all styles and places."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace

import pytest
from recipe_attacks import HARMLESS, PLACES, attacks, num_attempts
from recipe_deepseek import BOTH, deepseek_recipe
from recipe_models import REQUEST_ID, STYLES, TOOL_STYLES, Style
from recipe_talks import ask, plain_ids, talk

from headwater.core.errors import InvalidRequest
from headwater.core.request import SampledToken, SequenceOutput
from headwater.recipe.conversation import Conversation
from headwater.recipe.output import OutputStream
from headwater.recipe.recipe import EncodedPrompt, Recipe

# Text of an assistant that a template takes apart at its own marks, by intent: then it
# places other control tokens, but still only its own.
READ_BY_TEMPLATE = {"assistant text", "text to be continued", "text beside a call"}


DEEPSEEK = {str(version): version for version in BOTH}


def recipe_of(name: str) -> Recipe:
    return deepseek_recipe(DEEPSEEK[name]) if name in DEEPSEEK else STYLES[name]().recipe


def benign_prompt(recipe: Recipe, place: str) -> EncodedPrompt | None:
    """None where this format has no such place, and says so."""
    try:
        return recipe.encode(PLACES[place](HARMLESS))
    except InvalidRequest:
        return None


def controls(recipe: Recipe, prompt: EncodedPrompt) -> list[int]:
    found = [i for i, token in enumerate(prompt.tokens) if recipe.tokenizer.is_control(token)]
    assert prompt.control_positions == tuple(found)
    return [prompt.tokens[i] for i in found]


def is_in(attack: str, text: str) -> bool:
    """Whether the attack is in the text as it was typed, or in its JSON form.

    Spaces do not count: a tokenizer that puts one before every text that follows a
    control token also does so around the noncharacter that our seal is made of.
    """
    text = unicodedata.normalize("NFC", text).replace(" ", "")
    return any(
        unicodedata.normalize("NFC", form.strip()).replace(" ", "") in text
        for form in (
            attack,
            json.dumps(attack, ensure_ascii=False)[1:-1],
            json.dumps(attack)[1:-1],
        )
    )


def test_the_corpus_has_many_attempts_for_every_style() -> None:
    for make in STYLES.values():
        assert num_attempts(make().recipe) >= 300
    for name in (*TOOL_STYLES, *DEEPSEEK):
        recipe = recipe_of(name)
        served = [place for place in PLACES if benign_prompt(recipe, place)]
        assert len(served) * len(attacks(recipe)) >= 240, (name, set(PLACES) - set(served))
    for name in ("chatml", "gemma", "llama3"):
        recipe = STYLES[name]().recipe
        served = [place for place in PLACES if benign_prompt(recipe, place)]
        assert len(served) * len(attacks(recipe)) >= 60, (name, served)


@pytest.mark.parametrize("name", [*STYLES, *DEEPSEEK])
def test_b01_control_ids_are_those_of_the_benign_twin_in_every_place(name: str) -> None:
    recipe = recipe_of(name)
    for place in PLACES:
        if (benign := benign_prompt(recipe, place)) is not None:
            attack_place(recipe, place, benign)


def attack_place(recipe: Recipe, place: str, benign: EncodedPrompt) -> None:
    expected = controls(recipe, benign)
    shown = HARMLESS in recipe.decode(benign.tokens)
    for kind, attack in attacks(recipe).items():
        is_read = place in READ_BY_TEMPLATE and "think>" in attack
        try:
            prompt = recipe.encode(PLACES[place](attack))
        except InvalidRequest as error:
            # A template that keeps only what follows the mark would leave the message out.
            if is_read and error.code == "message_left_out":
                continue
            raise
        found = controls(recipe, prompt)
        if not is_read:
            assert found == expected, (place, kind)
        for span in prompt.spans:
            inside = prompt.tokens[span.start : span.end]
            assert not any(map(recipe.tokenizer.is_control, inside)), (place, kind)
        # Escaped, not deleted: the model reads what was typed.
        if shown and not is_read:
            assert is_in(attack, recipe.decode(prompt.tokens)), (place, kind)


@pytest.mark.parametrize("name", STYLES)
def test_b01_without_the_defence_the_same_corpus_forges_in_every_place_that_is_printed(
    name: str,
) -> None:
    style: Style = STYLES[name]()
    is_control = style.recipe.tokenizer.is_control

    def num_controls(conversation: Conversation) -> int:
        return sum(map(is_control, plain_ids(style, conversation)))

    for place, make in PLACES.items():
        benign = benign_prompt(style.recipe, place)
        if benign is None or HARMLESS not in style.recipe.decode(benign.tokens):
            continue
        conversation = make(HARMLESS)
        if conversation.messages[-1].continues or place == "later system text":
            continue  # not what the naive rendering has a form for
        usual = num_controls(conversation)
        forged = [
            kind
            for kind, attack in attacks(style.recipe).items()
            if num_controls(make(attack)) > usual
        ]
        assert len(forged) >= 6, (place, forged)


@pytest.mark.parametrize("name", DEEPSEEK)
def test_b01_deepseek_read_without_the_defence_is_forged_in_every_place_too(name: str) -> None:
    recipe = recipe_of(name)

    def num_controls(conversation: Conversation) -> int:
        text = recipe.decode(recipe.encode(conversation).tokens, keep_control=True)
        return recipe.encode_completion(text, allow_control=True).num_control_tokens

    for place, make in PLACES.items():
        benign = benign_prompt(recipe, place)
        if benign is None or HARMLESS not in recipe.decode(benign.tokens):
            continue
        usual = num_controls(make(HARMLESS))
        found = attacks(recipe).items()
        forged = [kind for kind, attack in found if num_controls(make(attack)) > usual]
        assert len(forged) >= 6, (place, forged)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama31", "r1"])
def test_b01_stop_strings_are_text_too(name: str) -> None:
    recipe = STYLES[name]().recipe
    tokenizer = recipe.tokenizer
    (end,) = recipe.end_token_ids
    literal = tokenizer.token_literal(end) or ""
    typed = tokenizer.encode_text(f"a{literal}b")
    assert not any(map(tokenizer.is_control, typed))
    stream = OutputStream(tokenizer, stop_strings=[literal])
    tokens = tuple(SampledToken(token_id) for token_id in typed)
    delta = stream.push(SequenceOutput(request_id=REQUEST_ID, index=0, tokens=tokens))
    assert delta.text == "a"
    assert delta.stop_string == literal
    # It says nothing about the prompt, in which the same text stays text.
    prompt = recipe.encode(talk(ask(literal)))
    assert prompt.num_control_tokens == recipe.encode(talk(ask("x"))).num_control_tokens


def test_b01_a_name_that_is_printed_cannot_forge() -> None:
    recipe = STYLES["xml"]().recipe
    benign = recipe.encode(PLACES["result name"](HARMLESS))
    assert HARMLESS in recipe.decode(benign.tokens)


def test_i05_no_template_variable_comes_from_a_conversation() -> None:
    # A conversation has no field for one: what it holds is named in the module, here checked.
    names = {"messages", "tools", "tool_choice", "thinking", "answer"}
    assert set(Conversation.__dataclass_fields__) == names
    conversation = talk(replace(ask("hello"), name="enable_thinking"))
    assert STYLES["qwen3"]().recipe.encode(conversation).tokens == (
        STYLES["qwen3"]().recipe.encode(talk(ask("hello"))).tokens
    )
