"""Grammars of a whole turn: what a model may write before, around and after an answer."""

from __future__ import annotations

import pytest
from recipe_grammars import AB, VOCAB, byte_compiler, matches

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.constraints import GrammarCompiler
from headwater.recipe.conversation import Tool, ToolChoice
from headwater.recipe.tokenizer_byte import BOS_ID, IM_END_ID, IM_START_ID
from headwater.recipe.tokenizer_load import load_tokenizer
from headwater.recipe.turn_grammar import after_reasoning, mark, tool_calls


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return byte_compiler()


TOOLS = (
    Tool(
        name="read",
        parameters='{"type":"object","properties":{"path":{"type":"string"}},'
        '"required":["path"],"additionalProperties":false}',
        strict=True,
    ),
    Tool(name='say "é"', parameters='{"properties":{"n":{"type":"integer"}},"required":["n"]}'),
)
BEGIN, END = "<tool_call>", "</tool_call>"


def call(name: str, arguments: str) -> str:
    return f'{BEGIN}\n{{"name": {name}, "arguments": {arguments}}}\n{END}'


READ = call('"read"', '{"path": "a/b"}')
SAY = call('"say \\"é\\""', '{"n": 3}')


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        (
            ToolChoice(kind="required"),
            [READ, SAY, READ + "\n" + SAY],
            ["hi", READ + "hi", "hi" + READ],
        ),
        (ToolChoice(kind="required", parallel=False), [READ, SAY], [READ + "\n" + SAY]),
        (ToolChoice(kind="named", name="read"), [READ, READ + "\n" + READ], [SAY, ""]),
        (
            ToolChoice(kind="auto"),
            ["hi", "", READ, "hi " + READ + SAY + "bye", "<tool_cal", "a < b"],
            [call('"read"', "{}"), call('"write"', "{}"), BEGIN],
        ),
        (ToolChoice(kind="auto", parallel=False), ["hi" + READ], [READ + SAY]),
    ],
)  # fmt: skip
def test_forced_and_free_calls_follow_their_schemas(
    compiler: GrammarCompiler, choice: ToolChoice, good: list[str], bad: list[str]
) -> None:
    constraint = tool_calls(TOOLS, choice, begin=BEGIN, end=END)
    for text in good:
        assert matches(compiler, constraint, text), text
    for text in bad:
        assert not matches(compiler, constraint, text), text


def test_marks_that_are_control_ids_cannot_be_spelt(compiler: GrammarCompiler) -> None:
    choice = ToolChoice(kind="required")
    constraint = tool_calls(TOOLS, choice, begin=IM_START_ID, end=BOS_ID)
    inner = list(READ.removeprefix(BEGIN).removesuffix(END).encode())
    assert matches(compiler, constraint, [IM_START_ID, *inner, BOS_ID])
    assert not matches(compiler, constraint, READ)


def test_a_mark_is_an_id_where_the_vocabulary_has_one() -> None:
    tokenizer = load_tokenizer(TokenizerSource(kind="byte", vocab_size=VOCAB))
    assert mark(tokenizer, "<|im_start|>") == IM_START_ID
    assert mark(tokenizer, "</think>") == "</think>"


def test_a_loose_tool_with_a_schema_of_no_use_takes_any_object(compiler: GrammarCompiler) -> None:
    loose = Tool(name="f", parameters='{"properties":{"a":{"pattern":"(?=x)"}}}')
    choice = ToolChoice(kind="required")
    constraint = tool_calls([loose], choice, begin=BEGIN, end=END)
    assert matches(compiler, constraint, call('"f"', '{"a": 1}'))
    assert not matches(compiler, constraint, call('"f"', "3"))
    strict = Tool(name="f", parameters=loose.parameters, strict=True)
    with pytest.raises(InvalidRequest):
        compiler.check(tool_calls([strict], choice, begin=BEGIN, end=END))


def test_a_refusal_of_a_tools_schema_names_the_tool() -> None:
    broken = Tool(name="broken", parameters="[]")
    with pytest.raises(InvalidRequest, match="'broken'"):
        tool_calls([*TOOLS, broken], ToolChoice(kind="required"), begin=BEGIN, end=END)
    with pytest.raises(InvalidRequest, match="not among the tools"):
        tool_calls(TOOLS, ToolChoice(kind="named", name="gone"), begin=BEGIN, end=END)


@pytest.mark.parametrize("end", ["</think>", "</a/b\n*>", IM_START_ID])
@pytest.mark.parametrize(
    "answer",
    [
        Constraint("json_schema", AB),
        Constraint("lark", 'start: answer\nanswer: "{" /[^}]+/ gap "}"\ngap: "\\n"?'),
        Constraint("regex", r"\{.*\}"),
    ],
)
def test_reasoning_is_free_and_the_answer_after_it_is_not(
    compiler: GrammarCompiler, answer: Constraint, end: int | str
) -> None:
    constraint = after_reasoning(answer, end=end)
    closing = [end] if isinstance(end, int) else list(end.encode())
    thoughts = list('{"a": </thin {} é\n'.encode())
    good = list(b'{"a": "q", "b": "x"}')
    assert matches(compiler, constraint, [*thoughts, *closing, *good])
    assert matches(compiler, constraint, [*closing, *b"\n\n", *good])
    assert not matches(compiler, constraint, good), "no answer without the end of reasoning"
    assert not matches(compiler, constraint, [*thoughts, *closing, *b"then", *good])
    assert not matches(compiler, constraint, [*thoughts, IM_END_ID])


def test_a_model_may_begin_to_reason_or_answer_at_once(compiler: GrammarCompiler) -> None:
    constraint = after_reasoning(
        Constraint("regex", "yes|no"), begin="<think>", end="</think>", is_open=False
    )
    assert matches(compiler, constraint, "yes")
    assert matches(compiler, constraint, "<think>well</think>\n\nno")
    assert not matches(compiler, constraint, "<think>yes")
    assert not matches(compiler, constraint, "well</think>no")


def test_calls_can_follow_reasoning(compiler: GrammarCompiler) -> None:
    calls = tool_calls(TOOLS, ToolChoice(kind="required"), begin=BEGIN, end=END)
    constraint = after_reasoning(calls, end="</think>")
    assert matches(compiler, constraint, f"hm</think>\n\n{READ}")
    assert not matches(compiler, constraint, f"hm</think>\n\n{READ}hm")
