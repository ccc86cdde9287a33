"""Parsers of template formats: the same parts however the output is cut, nothing lost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_models import REQUEST_ID, STYLES

from headwater.core.request import FinishReason, SampledToken, SequenceOutput
from headwater.recipe.output import OutputDelta, OutputStream, joined_deltas
from headwater.recipe.parser_choice import choose_parser
from headwater.recipe.parser_harmony import CHANNEL, CONSTRAIN, END, HARMONY, MESSAGE, START
from headwater.recipe.parser_json_call import JsonCall
from headwater.recipe.parser_llama import LLAMA, PYTHON_TAG
from headwater.recipe.parser_marked import MarkedFormat
from headwater.recipe.parser_plain import PLAIN
from headwater.recipe.parsers import OutputParser, ParserFormat, PlainParser, merged_parts
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_byte import ByteTokenizer

THINK, CALL = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
TEXT_MARKS = MarkedFormat(reasoning_marks=THINK, call_marks=CALL)
CONTROL_MARKS = replace(TEXT_MARKS, controls=frozenset(THINK + CALL))
BYTES = ByteTokenizer()


def controls() -> Tokenizer:
    """Has all four marks as control tokens."""
    return STYLES["qwen3"]().recipe.tokenizer


def opened(form: ParserFormat, *, in_reasoning: bool = False, tools: bool = True) -> OutputParser:
    numbers = itertools.count()
    return form.open(in_reasoning=in_reasoning, tools=tools, new_call_id=lambda: str(next(numbers)))


def read(
    tokenizer: Tokenizer,
    parser: OutputParser,
    pieces: Sequence[Sequence[int]],
    *,
    stop_strings: Sequence[str] = (),
) -> OutputDelta:
    stream = OutputStream(tokenizer, parser=parser, stop_strings=stop_strings)
    outputs = [
        SequenceOutput(
            request_id=REQUEST_ID,
            index=0,
            tokens=tuple(SampledToken(token_id) for token_id in piece),
            finish=FinishReason.STOP if number == len(pieces) - 1 else None,
        )
        for number, piece in enumerate(pieces)
    ]
    return joined_deltas(stream.push(output) for output in outputs)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_rendered(text, tokenizer.control_ranges(text, [(0, len(text))]))


def parse(
    text: str, *, as_control: bool = False, in_reasoning: bool = False, tools: bool = True
) -> tuple[Part, ...]:
    tokenizer = controls() if as_control else BYTES
    form = CONTROL_MARKS if as_control else TEXT_MARKS
    parser = opened(form, in_reasoning=in_reasoning, tools=tools)
    return read(tokenizer, parser, [ids_of(tokenizer, text)]).parts


def called(index: int, name: str, arguments: str) -> list[Part]:
    return [
        ToolCallStart(index, str(index), name),
        ToolCallArguments(index, arguments),
        ToolCallEnd(index),
    ]


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.mark.parametrize("as_control", [False, True])
def test_reasoning_answer_and_calls_are_told_apart(as_control: bool) -> None:
    quoting = '{"text": "a </tool_call> \\" { <think>"}'
    text = (
        "<think>\nlet me\n\nsee\n</think>\n\nSure.\n"
        + block('{"name": "f", "arguments": {"x": 1}}')
        + "\n"
        + block(f'{{"name": "g", "arguments": {quoting}}}')
        + "\nthere"
    )
    assert parse(text, as_control=as_control) == (
        ReasoningText("let me\n\nsee"),
        AnswerText("Sure."),
        *called(0, "f", '{"x": 1}'),
        *called(1, "g", quoting),
        AnswerText("there"),
    )


@pytest.mark.parametrize("as_control", [False, True])
def test_the_prompt_may_have_opened_the_reasoning(as_control: bool) -> None:
    assert parse("\nhm\n</think>\n\nso", as_control=as_control, in_reasoning=True) == (
        ReasoningText("hm"),
        AnswerText("so"),
    )


@pytest.mark.parametrize("as_control", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "a " + block('{"nam": 1}') + " b",
        "a " + block("<function=f>") + " b",
        "a " + block('{"name": "f"}') + " b",
        "a " + block('{"name": "f", "arguments": 3}') + " b",
        "a " + block('{"name": 3, "arguments": {}}') + " b",
        "a <tool_call></tool_call> b",
        "a <tool_call>",
        'a <tool_call>\n{"name": "f", "argum',
        "a </tool_call> </think> b",
        "a <tool_call><tool_call>\n{",
    ],
)
def test_what_is_not_a_call_becomes_answer_text(text: str, as_control: bool) -> None:
    assert parse(text, as_control=as_control) == (AnswerText(text),)


@pytest.mark.parametrize("as_control", [False, True])
@pytest.mark.parametrize(
    ("arguments", "rest"),
    [('{"x": oops}', "}\n</tool_call> b"), ('{"x": ', "</tool_call> b"), ('{"x": "b', "")],
)
def test_a_call_that_has_begun_and_is_no_json_stays_incomplete(
    arguments: str, rest: str, as_control: bool
) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}{rest}'
    assert parse(text, as_control=as_control) == (
        ToolCallStart(0, "0", "f"),
        ToolCallArguments(0, arguments),
        *([AnswerText("b")] if rest else []),
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"a": {"b": 1}}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": {\\"b\\": 1}}"}',
        '{"id": "x", "name": "f", "parameters": {"a": {"b": 1}}}',
    ],
)
def test_other_spellings_of_a_call_are_read_when_they_are_whole(text: str) -> None:
    assert parse(block(text)) == tuple(called(0, "f", '{"a": {"b": 1}}'))


def test_a_call_that_is_not_closed_ends_with_its_object() -> None:
    one, two = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {}}'
    for as_control in (False, True):
        assert parse(f"<tool_call>{one}\n<tool_call>{two} so", as_control=as_control) == (
            *called(0, "f", "{}"),
            *called(1, "g", "{}"),
            AnswerText("so"),
        )


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = opened(TEXT_MARKS)
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "a long')
    assert parser.push(" story") == [ToolCallArguments(0, " story")]
    assert parser.stage == "tool_call"


def test_only_the_beginning_of_a_mark_is_held_back() -> None:
    parser = opened(TEXT_MARKS)
    assert parser.push("x < y <too") == [AnswerText("x < y ")]
    assert parser.push("th") == [AnswerText("<tooth")]


def test_marks_in_mere_text_open_no_reasoning_after_the_answer_began() -> None:
    text = "the tag <think> opens, </think> closes"
    assert parse(text) == (AnswerText(text),)
    assert parse("a <think> b </think> c", as_control=True) == (
        AnswerText("a "),
        ReasoningText(" b "),
        AnswerText(" c"),
    )


def test_text_that_is_spelt_like_a_control_token_stays_text() -> None:
    tokenizer = controls()
    text = "<think>a</think>" + block('{"name": "f", "arguments": {}}')
    parts = read(tokenizer, opened(CONTROL_MARKS), [tokenizer.encode_text(text)]).parts
    assert parts == (AnswerText(text),)


@pytest.mark.parametrize("as_control", [False, True])
def test_a_call_that_is_only_thought_of_is_not_made(as_control: bool) -> None:
    thought = "maybe " + block('{"name": "f", "arguments": {}}') + " no"
    assert parse(f"<think>{thought}</think>so", as_control=as_control) == (
        ReasoningText(thought),
        AnswerText("so"),
    )


def test_without_tools_a_call_is_text() -> None:
    text = "a\n" + block('{"name": "f", "arguments": {}}') + "\n"
    assert parse(text, tools=False) == (AnswerText(text),)


# -- Llama --------------------------------------------------------------------------------


def parse_llama(text: str) -> tuple[Part, ...]:
    parser = opened(LLAMA)
    parts: list[Part] = []
    for number, piece in enumerate(text.split(PYTHON_TAG)):
        if number:
            parts += parser.push_control(PYTHON_TAG)
        parts += parser.push(piece)
    return merged_parts([*parts, *parser.finish()])


@pytest.mark.parametrize("before", ["", "\n", PYTHON_TAG])
def test_llama_calls_are_objects_at_the_beginning_of_the_turn(before: str) -> None:
    one = '{"name": "f", "parameters": {"x": "}"}}'
    two = '{"type": "function", "name": "g", "parameters": {}}'
    assert parse_llama(f"{before}{one}; {two}\nbye") == (
        *called(0, "f", '{"x": "}"}'),
        *called(1, "g", "{}"),
        AnswerText("bye"),
    )


@pytest.mark.parametrize(
    "text",
    [
        'hello {"name": "f", "parameters": {}}',
        '{"answer": 42} so',
        '{"name": "Bob", "age": 3}',
        '{"na',
        "  ",
        " hi",
    ],
)
def test_llama_text_and_other_objects_are_the_answer(text: str) -> None:
    assert parse_llama(text) == (AnswerText(text),)


def test_an_object_that_is_no_call_is_not_held_back() -> None:
    parser = opened(LLAMA)
    assert parser.push('{"answer": "a lo') == [AnswerText('{"answer":'), AnswerText(' "a lo')]
    call = JsonCall(0, lambda: "0")
    call.push('{"answer":')
    assert call.state == "broken"


def test_llama_without_tools_is_plain() -> None:
    assert isinstance(opened(LLAMA, tools=False), PlainParser)


# -- Harmony ------------------------------------------------------------------------------

MARKS = (CHANNEL, MESSAGE, START, END, CONSTRAIN)


def parse_harmony(text: str, *, tools: bool = True, size: int | None = None) -> tuple[Part, ...]:
    """Marks in ``text`` are control tokens; the text between them comes in pieces of ``size``."""
    parser = opened(HARMONY, tools=tools)
    parts: list[Part] = []
    for piece in re.split(f"({'|'.join(map(re.escape, MARKS))})", text):
        if piece in MARKS:
            parts += parser.push_control(piece)
        else:
            step = size or max(len(piece), 1)
            for start in range(0, len(piece), step):
                parts += parser.push(piece[start : start + step])
    return merged_parts([*parts, *parser.finish()])


@pytest.mark.parametrize("size", [None, 1, 3])
def test_harmony_headings_say_what_a_message_is(size: int | None) -> None:
    text = (
        f"{CHANNEL}analysis{MESSAGE}let me see{END}"
        f"{START}assistant{CHANNEL}commentary{MESSAGE}I look.{END}"
        f"{START}assistant to=functions.f{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}"
        f'{{"x": 1}}{END}'
        f"{START}assistant{CHANNEL}commentary to=functions.g {CONSTRAIN}json{MESSAGE}{{}}"
    )
    assert parse_harmony(text, size=size) == (
        ReasoningText("let me see"),
        AnswerText("I look."),
        *called(0, "f", '{"x": 1}'),
        *called(1, "g", "{}"),
    )
    text = f"{CHANNEL}analysis{MESSAGE}hm{END}{START}assistant{CHANNEL}final{MESSAGE}so"
    assert parse_harmony(text, size=size) == (ReasoningText("hm"), AnswerText("so"))


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *MARKS,
                "analysis",
                "final",
                "commentary",
                " to=functions.f",
                "assistant",
                "hm 🙂",
                "{}",
            ]
        ),
        max_size=16,
    ),
    tools=st.booleans(),
)
def test_harmony_gives_the_same_message_however_it_is_cut(pieces: list[str], tools: bool) -> None:
    whole = parse_harmony("".join(pieces), tools=tools)
    for size in (1, 2, 5):
        assert parse_harmony("".join(pieces), tools=tools, size=size) == whole


def test_harmony_messages_to_other_tools_are_reasoning_or_answer() -> None:
    text = f"{CHANNEL}analysis to=python{MESSAGE}1 + 1{END}"
    assert parse_harmony(text) == (ReasoningText("1 + 1"),)
    call = f"{CHANNEL}commentary to=functions.f{MESSAGE}{{}}"
    assert parse_harmony(call, tools=False) == (AnswerText("{}"),)


def test_a_harmony_call_that_is_cut_off_stays_incomplete() -> None:
    assert parse_harmony(f'{CHANNEL}commentary to=functions.f{MESSAGE}{{"x') == (
        ToolCallStart(0, "0", "f"),
        ToolCallArguments(0, '{"x'),
    )
    assert parse_harmony("no heading at all") == (AnswerText("no heading at all"),)
    assert parse_harmony(f"{CHANNEL}anal") == ()


# -- the choice ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reasoning", "tools"),
    [
        ("chatml", False, False),
        ("gemma", False, False),
        ("qwen3", True, True),
        ("llama31", False, True),
        ("r1", True, False),
    ],
)
def test_the_template_says_which_parser_is_needed(name: str, reasoning: bool, tools: bool) -> None:
    style = STYLES[name]()
    form = choose_parser(style.source.chat_template or "", style.recipe.tokenizer)
    assert (form.reasoning, form.tools) == (reasoning, tools)


def test_marks_are_control_tokens_where_the_tokenizer_has_them() -> None:
    template = "{{ '<think>' }}{{ '</think>' }}{{ '<tool_call>' }}"
    assert choose_parser(template, controls()) == CONTROL_MARKS
    assert choose_parser(template, BYTES) == TEXT_MARKS
    assert choose_parser("{{ '<tool_call>' }}{{ '<function=' }}", BYTES) == PLAIN


def test_harmony_is_chosen_where_its_marks_are_control_tokens() -> None:
    class WithMarks(ByteTokenizer):
        def control_id(self, literal: str) -> int | None:
            return 300 if literal in MARKS else super().control_id(literal)

    template = f"{{{{ '{CHANNEL}final{MESSAGE}' }}}}"
    assert choose_parser(template, WithMarks()) == HARMONY
    assert choose_parser(template, BYTES) == PLAIN


# -- every way of cutting -------------------------------------------------------------------

PIECES = [
    "hm", "\n", " ", "<", "</", "🙂", "é", "stop", "}", "{", '"', "\\", ";", ":", ",",
    *THINK, *CALL, '{"name": "f", "arguments": {', '{"name": "f", "parameters": {}}',
    '"x": [1, {"y": 2}]', "}}", '{"arguments": {"a": 1}, "name": "g"}', "<tool", "_call>",
    '{"answer": 1}',
]  # fmt: skip


@pytest.mark.parametrize("form", [TEXT_MARKS, CONTROL_MARKS, LLAMA, PLAIN])
@settings(max_examples=120, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=16),
    in_reasoning=st.booleans(),
    tools=st.booleans(),
    stops=st.lists(st.sampled_from(["stop", "hmhm", " <", "}\n"]), max_size=2),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_a09_a12_every_way_of_cutting_the_same_ids_gives_the_same_message(
    form: ParserFormat,
    pieces: list[str],
    in_reasoning: bool,
    tools: bool,
    stops: list[str],
    cuts: list[int],
) -> None:
    tokenizer = controls() if form is CONTROL_MARKS else BYTES
    ids = ids_of(tokenizer, "".join(pieces))
    bounds = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]

    def message(chunks: list[list[int]]) -> OutputDelta:
        parser = opened(form, in_reasoning=in_reasoning, tools=tools)
        delta = read(tokenizer, parser, chunks, stop_strings=stops)
        return replace(delta, stopped_early=False)  # whether the engine had ended by then

    whole = message([ids])
    assert message([[token] for token in ids] + [[]]) == whole
    assert message([ids[start:end] for start, end in pairwise(bounds)]) == whole
    for number, part in enumerate(whole.parts):
        if isinstance(part, ToolCallEnd):
            assert any(
                isinstance(p, ToolCallStart) and p.index == part.index for p in whole.parts[:number]
            )
    if not stops:
        shown = "".join(
            part.name if isinstance(part, ToolCallStart) else getattr(part, "text", "")
            for part in whole.parts
        )
        for piece in ("hm", "🙂", "é", "stop"):
            # What stands between a call's object and its mark is dropped with the broken call.
            assert shown.count(piece) >= pieces.count(piece) or ToolCallStart in map(
                type, whole.parts
            )


def test_a11_stop_strings_do_not_fire_in_reasoning_or_calls_or_across_them() -> None:
    text = (
        "<think>STOP</think>\n\nST"
        + block('{"name": "f", "arguments": {"a": "STOP"}}')
        + "OP and STOP it"
    )
    delta = read(BYTES, opened(TEXT_MARKS), [BYTES.encode_text(text)], stop_strings=["STOP"])
    assert delta.text == "STOP and "
    assert delta.stop_string == "STOP"
    assert delta.parts[-1] == AnswerText("OP and ")
