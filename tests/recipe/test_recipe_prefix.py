"""Does turn n+1 begin with the ids of turn n and its answer (B04)? Ten turns on every style."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from recipe_deepseek import BOTH, deepseek_recipe
from recipe_models import STYLES, TOOL_STYLES, AnyFormat
from recipe_talks import RUN, SYSTEM, answer, ask, call, calling, result, talk

from headwater.recipe.chat import ChatRecipe
from headwater.recipe.conversation import Conversation, Message
from headwater.recipe.deepseek_format import DeepseekVersion
from headwater.recipe.prefix import PrefixReport, prefix_report, shared_tokens, turn_ids
from headwater.recipe.recipe import Recipe
from headwater.recipe.template_probe import CHANGES_HISTORY, DROPS_REASONING

NUM_TURNS = 10


def reports(recipe: Recipe, start: Conversation, answers: Sequence[Message]) -> list[PrefixReport]:
    """One report for each turn; after an answer comes a result for each call, or a question."""
    conversation = start
    found: list[PrefixReport] = []
    for index, given in enumerate(answers):
        following = [result(f"done {index}", made.call_id) for made in given.tool_calls]
        following = following or [ask(f"the fox, turn {index}?")]
        found.append(prefix_report(recipe, conversation, given, *following))
        conversation = replace(conversation, messages=(*conversation.messages, given, *following))
    return found


@pytest.mark.parametrize("name", STYLES)
def test_b04_ten_plain_turns_extend_each_other_or_a_note_says_why_not(name: str) -> None:
    recipe = STYLES[name]().recipe
    can = recipe.capabilities
    mode = "off" if can.thinking == "optional" else "default"
    answers = [answer(f"hello world {turn}\nnaïve") for turn in range(NUM_TURNS)]
    found = reports(recipe, talk(ask("hello"), mode=mode), answers)
    assert len(found) == NUM_TURNS
    excused = CHANGES_HISTORY in can.notes or DROPS_REASONING in can.notes
    assert all(report.extends for report in found) or excused, name
    # What a note excuses is only the end of the turn, never what stood before it.
    for earlier, later in itertools.pairwise(found):
        assert later.num_shared_tokens >= earlier.num_shared_tokens
        assert later.num_turn_tokens > earlier.num_turn_tokens


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "metaspace", "llama31", "xml"])
def test_b04_these_styles_have_no_note_and_extend(name: str) -> None:
    recipe = STYLES[name]().recipe
    assert recipe.capabilities.notes == ()
    answers = [answer(f"turn {turn}") for turn in range(NUM_TURNS)]
    assert all(report.extends for report in reports(recipe, talk(ask("hello")), answers))


@pytest.mark.parametrize("name", TOOL_STYLES)
def test_b04_ten_calls_after_one_question_extend_each_other(name: str) -> None:
    recipe = STYLES[name]().recipe
    reasoning = "hm" if name in ("qwen3", "xml") else None
    answers = [
        calling(call("run", {"argv": ["ls", str(turn)]}, f"call{turn:05}"), reasoning=reasoning)
        for turn in range(NUM_TURNS)
    ]
    mode = "on" if name == "xml" else "default"
    start = talk(SYSTEM, ask("hello"), tools=[RUN], mode=mode)
    found = reports(recipe, start, answers)
    if name == "r1":  # the prompt opens a reasoning block that no finished turn holds
        assert DROPS_REASONING in recipe.capabilities.notes
        assert not any(report.extends for report in found)
    else:
        assert all(report.extends for report in found)


def test_b04_kept_reasoning_extends_and_dropped_reasoning_parts_at_the_answer() -> None:
    answers = [answer(f"so {turn}", "hm") for turn in range(NUM_TURNS)]
    kept = reports(STYLES["xml"]().recipe, talk(ask("hello"), mode="on"), answers)
    assert all(report.extends for report in kept)
    recipe = STYLES["qwen3"]().recipe
    conversation = talk(ask("hello"), mode="on")
    report = prefix_report(recipe, conversation, answers[0], ask("so?"))
    assert not report.extends
    # Everything up to the answer is shared: the earlier turns' hits still count.
    assert report.num_shared_tokens == len(recipe.encode(conversation).tokens)
    assert report.parted_in is not None
    assert report.parted_in.message_index == 1
    assert report.num_turn_tokens == len(turn_ids(recipe, conversation, answers[0]))


@pytest.mark.parametrize("version", BOTH)
def test_b04_deepseek_extends_without_reasoning_and_with_tools(version: DeepseekVersion) -> None:
    recipe = deepseek_recipe(version)
    plain = [answer(f"so {turn}") for turn in range(NUM_TURNS)]
    reasoned = [answer(f"so {turn}", "hm") for turn in range(NUM_TURNS)]
    start = talk(SYSTEM, ask("hello"))
    quiet = reports(recipe, replace(start, thinking=talk(mode="off").thinking), plain)
    with_tools = reports(recipe, replace(start, tools=(RUN,)), reasoned)
    assert all(report.extends for report in [*quiet, *with_tools])
    # Without tools the format drops earlier reasoning, and its notes say so.
    assert not any(report.extends for report in reports(recipe, start, reasoned))
    assert any("drops the reasoning" in note for note in recipe.capabilities.notes)


def test_b04_a_turn_ends_with_the_token_that_the_model_ends_it_with() -> None:
    recipe = STYLES["chatml"]().recipe
    ids = turn_ids(recipe, talk(ask("hello")), answer("hello world"))
    assert ids[-1] in recipe.end_token_ids
    text = recipe.decode(ids, keep_control=True)
    assert text.endswith("<|im_start|>assistant\nhello world<|im_end|>")


def test_b04_an_empty_reasoning_block_that_history_does_not_keep_is_noted() -> None:
    recipe = STYLES["qwen3"]().recipe
    assert CHANGES_HISTORY in recipe.capabilities.notes
    conversation = talk(ask("hello"), mode="off")
    report = prefix_report(recipe, conversation, answer("hello"), ask("so?"))
    assert not report.extends
    assert report.num_shared_tokens < len(recipe.encode(conversation).tokens)


def test_b04_the_notes_are_written_to_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        recipe = ChatRecipe.from_source(STYLES["qwen3"]().source, parser_format=AnyFormat())
        recipe.encode(talk(ask("hello")))
        recipe.encode(talk(ask("hello"), answer("x", "y"), ask("z")))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(recipe.capabilities.notes)
    for note, line in zip(recipe.capabilities.notes, lines, strict=True):
        assert note in line


def test_shared_tokens_counts_equal_ids_from_the_start() -> None:
    assert shared_tokens([1, 2, 3], [1, 2, 4, 5]) == 2
    assert shared_tokens([], [1]) == 0
    assert shared_tokens([1, 2], [1, 2, 3]) == 2
