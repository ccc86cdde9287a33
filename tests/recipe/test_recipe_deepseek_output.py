"""DeepSeek's output: the same parts however it is cut, nothing lost, nothing confused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_deepseek import (
    BOTH,
    V4_1,
    deepseek_recipe,
    dsml_calls,
    in_old_spelling,
    output_ids,
    read_output,
)
from recipe_talks import RUN, answer, ask, call, calling, talk

from headwater.core.request import FinishReason
from headwater.recipe.conversation import Conversation, ToolChoice
from headwater.recipe.deepseek_format import ASSISTANT, DSML, END_THINK, THINK, DeepseekVersion
from headwater.recipe.output import OutputDelta
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

ASKED = talk(ask("q"), tools=[RUN])
FORCED = replace(ASKED, tool_choice=ToolChoice(kind="required"))


def with_fixed_ids(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(
        replace(part, call_id=str(part.index)) if isinstance(part, ToolCallStart) else part
        for part in parts
    )


def parse(
    text: str,
    *,
    version: DeepseekVersion = V4_1,
    conversation: Conversation = ASKED,
    as_text: bool = False,
) -> tuple[Part, ...]:
    recipe = deepseek_recipe(version)
    ids = output_ids(recipe, text, as_text=as_text)
    return with_fixed_ids(read_output(recipe, conversation, [ids]).parts)


def called(index: int, name: str, arguments: str) -> list[Part]:
    return [
        ToolCallStart(index, str(index), name),
        ToolCallArguments(index, arguments),
        ToolCallEnd(index),
    ]


@pytest.mark.parametrize("version", BOTH)
def test_reasoning_answer_and_calls_are_told_apart(version: DeepseekVersion) -> None:
    block = dsml_calls(
        version,
        ("run", [("argv", "false", '["ls", 1.50]'), ("note", "true", 'say "hi"\n<b> \\')]),
        ("stop", []),
    )
    assert parse(f"\nlet me see{END_THINK}Sure.{block}", version=version) == (
        ReasoningText("let me see"),
        AnswerText("Sure."),
        *called(0, "run", '{"argv": ["ls", 1.50], "note": "say \\"hi\\"\\n<b> \\\\"}'),
        *called(1, "stop", "{}"),
    )


def test_a02_what_follows_a_block_is_kept_and_blanks_between_blocks_are_not() -> None:
    first = dsml_calls(V4_1, ("run", [("a", "true", "1")]))
    second = dsml_calls(V4_1, ("run", [("a", "true", "2")]))
    assert parse(f"{END_THINK}a{first}\n\n{second}\n\nand so on") == (
        AnswerText("a"),
        *called(0, "run", '{"a": "1"}'),
        *called(1, "run", '{"a": "2"}'),
        AnswerText("and so on"),
    )


def test_text_that_is_spelt_like_a_mark_stays_text() -> None:
    block = dsml_calls(V4_1, ("run", [("a", "true", "1")]))
    text = f"so {END_THINK} it {THINK} is {block}"
    assert parse(text, as_text=True) == (ReasoningText(text),)


def test_control_tokens_inside_a_value_are_its_text() -> None:
    value = f"{END_THINK} {THINK} {DSML} <b> </b> {ASSISTANT}"
    block = dsml_calls(V4_1, ("run", [("a", "true", value)]))
    assert parse(f"{END_THINK}{block}") == tuple(
        called(0, "run", json.dumps({"a": value}, ensure_ascii=False))
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        # Tags that are no block of calls.
        (f"a\n\n<{DSML} foo>hi", [AnswerText(f"a\n\n<{DSML} foo>hi")]),
        (f"a {DSML} b", [AnswerText(f"a {DSML} b")]),
        (f"a\n\n<{DSML} ca", [AnswerText(f"a\n\n<{DSML} ca")]),
        (f"a </{DSML} calls> b", [AnswerText(f"a </{DSML} calls> b")]),
        # A block without any call.
        (f"<{DSML} calls>hm</{DSML} calls> b", [AnswerText(f"<{DSML} calls>hm</{DSML} calls> b")]),
        (f"a<{DSML} calls>\n<{DSML} inv", [AnswerText(f"a<{DSML} calls>\n<{DSML} inv")]),
        # A mark in the wrong place.
        (f"a{END_THINK}b", [AnswerText("ab")]),
        # The end inside a call, and a value that is not JSON: begun, and never complete.
        (
            f'<{DSML} calls>\n<{DSML} invoke name="f">\n<{DSML} parameter name="x" string="true">1',
            [ToolCallStart(0, "0", "f"), ToolCallArguments(0, '{"x": "1')],
        ),
        (
            f'<{DSML} calls>\n<{DSML} invoke name="f">\n'
            f'<{DSML} parameter name="x" string="false">oops</{DSML} parameter>\n'
            f"</{DSML} invoke>\n</{DSML} calls>",
            [ToolCallStart(0, "0", "f"), ToolCallArguments(0, '{"x": oops}')],
        ),
    ],
)  # fmt: skip
def test_nothing_that_a_model_writes_is_lost(text: str, parts: list[Part]) -> None:
    assert parse(f"{END_THINK}{text}") == tuple(parts)


def test_without_tools_a_block_is_text() -> None:
    text = "a" + dsml_calls(V4_1, ("run", [("a", "true", "1")]))
    assert parse(f"{END_THINK}{text}", conversation=talk(ask("q"))) == (AnswerText(text),)
    forbidden = replace(ASKED, tool_choice=ToolChoice(kind="none"))
    assert parse(f"{END_THINK}{text}", conversation=forbidden) == (AnswerText(text),)


def test_a_forced_call_goes_on_inside_the_block_that_the_prompt_opened() -> None:
    block = dsml_calls(V4_1, ("run", [("a", "true", "1")]))
    opening = f"\n\n<{DSML} calls>\n"
    assert block.startswith(opening)
    written = block.removeprefix(opening)
    assert parse(written, conversation=FORCED) == tuple(called(0, "run", '{"a": "1"}'))


def test_where_the_output_begins_follows_from_the_prompt() -> None:
    off = talk(ask("q"), mode="off")
    assert parse("hi", conversation=off) == (AnswerText("hi"),)
    assert parse("hi") == (ReasoningText("hi"),)
    on_answer = talk(ask("q"), replace(answer("so", "r"), continues=True))
    assert parse("\nhi", conversation=on_answer) == (AnswerText("\nhi"),)
    on_reasoning = talk(ask("q"), replace(answer("", "so"), continues=True))
    assert parse(f"\nhi{END_THINK}x", conversation=on_reasoning) == (
        ReasoningText("\nhi"),
        AnswerText("x"),
    )


@pytest.mark.parametrize("version", BOTH)
def test_what_a_turn_is_written_as_is_read_back_as_that_turn(version: DeepseekVersion) -> None:
    recipe = deepseek_recipe(version)
    arguments: dict[str, object] = {
        "path": "a <b>\n</b>.txt", "n": 3, "list": [1, {"k": "é\n\""}], "none": None, "": "x",
    }  # fmt: skip
    turn = calling(call("run", arguments), call("run", {}), content="ok", reasoning="why not")
    before = recipe.encode(ASKED).tokens
    after = recipe.encode(
        replace(ASKED, messages=(*ASKED.messages, turn)), add_generation_prompt=False
    ).tokens
    assert after[: len(before)] == before
    (end,) = recipe.end_token_ids
    assert after[-1] == end
    parts = with_fixed_ids(read_output(recipe, ASKED, [after[len(before) : -1]]).parts)
    assert parts[:2] == (ReasoningText("why not"), AnswerText("ok"))
    calls = [json.loads(part.text) for part in parts if isinstance(part, ToolCallArguments)]
    assert calls == [arguments, {}]
    assert sum(isinstance(part, ToolCallEnd) for part in parts) == 2


def test_a11_stop_strings_are_looked_for_in_the_answer_only() -> None:
    recipe = deepseek_recipe(V4_1)
    block = dsml_calls(V4_1, ("run", [("a", "true", "STOP")]))
    ids = output_ids(recipe, f"I must STOP soon{END_THINK}so{block}well STOP it")
    delta = read_output(recipe, ASKED, [ids], stop_strings=["STOP"])
    assert delta.text == "sowell "
    assert delta.stop_string == "STOP"
    assert ReasoningText("I must STOP soon") in delta.parts
    assert any(isinstance(p, ToolCallArguments) and "STOP" in p.text for p in delta.parts)


def test_reasoning_tokens_are_counted_and_only_the_answers_are_listed() -> None:
    recipe = deepseek_recipe(V4_1)
    reasoning, said = output_ids(recipe, f"hm hm{END_THINK}"), output_ids(recipe, "hello")
    block = output_ids(recipe, dsml_calls(V4_1, ("run", [("a", "true", "1")])))
    delta = read_output(recipe, ASKED, [[*reasoning, *said, *block]])
    assert delta.num_reasoning_tokens == len(reasoning)
    assert delta.num_tokens == len(reasoning) + len(said) + len(block)
    assert [token.token_id for token in delta.tokens] == said


PIECES = [
    "hm", "\n\n", " ", "<", "</", "🙂", "é", "stop", ">", '"', "\\",
    END_THINK, THINK, DSML, f"<{DSML} calls>\n", f"</{DSML} calls>", f"\n\n<{DSML} calls>\n",
    f'<{DSML} invoke name="f">\n', f"</{DSML} invoke>\n",
    f'<{DSML} parameter name="x" string="true">', f'<{DSML} parameter name="y" string="false">',
    f"</{DSML} parameter>\n", "[1, 2]", " calls>", " cal", "ls>", ASSISTANT,
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    version=st.sampled_from(BOTH),
    pieces=st.lists(st.sampled_from(PIECES), max_size=24),
    as_text=st.lists(st.booleans(), min_size=24, max_size=24),
    stops=st.lists(st.sampled_from(["stop", "hmhm", " <"]), max_size=2),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    conversation=st.sampled_from(
        [ASKED, FORCED, talk(ask("q")), talk(ask("q"), tools=[RUN], mode="off")]
    ),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_a09_a12_every_way_of_cutting_the_same_ids_gives_the_same_message(
    version: DeepseekVersion,
    pieces: list[str],
    as_text: list[bool],
    stops: list[str],
    cuts: list[int],
    conversation: Conversation,
    finish: FinishReason,
) -> None:
    recipe = deepseek_recipe(version)
    ids: list[int] = []
    for piece, is_text in zip(pieces, as_text, strict=False):
        # Each piece twice as likely as the model means it, else spelt out in text.
        ids += output_ids(recipe, in_old_spelling(version, piece), as_text=is_text)

    def read(chunks: list[list[int]]) -> OutputDelta:
        delta = read_output(recipe, conversation, chunks, stop_strings=stops, finish=finish)
        # Whether the engine had ended by then is no part of the message.
        return replace(delta, parts=with_fixed_ids(delta.parts), stopped_early=False)

    bounds = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    whole = read([ids])
    assert read([[token] for token in ids] + [[]]) == whole
    assert read([ids[start:end] for start, end in pairwise(bounds)]) == whole
    if not stops and DSML not in "".join(pieces):
        shown = "".join(getattr(part, "text", "") for part in whole.parts)
        for piece in ("hm", "🙂", "é", "stop", "[1, 2]"):
            assert shown.count(piece) >= pieces.count(piece)  # nothing is lost
