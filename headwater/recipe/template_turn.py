"""The grammar of a turn for templates whose model marks reasoning and calls (``MarkedFormat``).

    answer format      (<think> reasoning </think>)? answer
    forced call        (<think> reasoning </think>)? <tool_call> {...} </tool_call>
    both               (<think> reasoning </think>)? (answer | calls)

Which of the reasoning is in the prompt already is the caller's knowledge. Called by
``chat``; the rules themselves are ``turn_grammar``'s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headwater.core.constraint import Constraint
from headwater.recipe.conversation import Conversation, ToolChoice
from headwater.recipe.grammar_terms import term
from headwater.recipe.parser_marked import MarkedFormat
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.turn_grammar import after_reasoning, mark, tool_calls

# no reasoning; the prompt has opened it; the model may open it.
ReasoningPlace = Literal["none", "open", "possible"]


def marked_turn(
    conversation: Conversation,
    marks: MarkedFormat,
    tokenizer: Tokenizer,
    reasoning: ReasoningPlace,
) -> Constraint | None:
    """Everything the model may write, or None for no limit.

    Raises InvalidRequest for a forced tool that is not offered, and for a schema or
    format that cannot be enforced.
    """
    body = _body(conversation, marks, tokenizer)
    if body is None or marks.reasoning_marks is None or reasoning == "none":
        return body
    begin, end = (mark(tokenizer, text) for text in marks.reasoning_marks)
    return after_reasoning(body, begin=begin, end=end, is_open=reasoning == "open")


def _body(
    conversation: Conversation, marks: MarkedFormat, tokenizer: Tokenizer
) -> Constraint | None:
    """What may follow the reasoning."""
    choice, answer = conversation.tool_choice, conversation.answer
    if choice.kind in ("required", "named"):
        return _calls(conversation, choice, marks, tokenizer)
    offered = conversation.tools and choice.kind != "none" and marks.call_marks is not None
    if answer is None or not offered:
        return answer
    calls = _calls(conversation, replace(choice, kind="required"), marks, tokenizer)
    return Constraint("turn", f"start: {term(answer)} | {term(calls)}\n")


def _calls(
    conversation: Conversation, choice: ToolChoice, marks: MarkedFormat, tokenizer: Tokenizer
) -> Constraint:
    assert marks.call_marks is not None  # the recipe forces calls only where there are marks
    begin, end = (mark(tokenizer, text) for text in marks.call_marks)
    return tool_calls(conversation.tools, choice, begin=begin, end=end)
