"""Which output format a chat template's model writes.

Reads the template's text and the tokenizer's control tokens, nothing else; called
when a template recipe is built. A format that is not known here is plain: then the
recipe offers no tools, because calls could not be read back.
"""

from __future__ import annotations

from typing import Final

from headwater.recipe.parser_harmony import CHANNEL, HARMONY, MESSAGE
from headwater.recipe.parser_llama import LLAMA
from headwater.recipe.parser_marked import MarkedFormat
from headwater.recipe.parser_plain import PLAIN
from headwater.recipe.parsers import ParserFormat
from headwater.recipe.tokenizer import Tokenizer

_REASONING: Final = ("<think>", "</think>")
_CALLS: Final = ("<tool_call>", "</tool_call>")
# Other families put these between the same marks, where JSON is expected.
_NOT_JSON: Final = ("<function=", "<arg_key>")


def choose_parser(template_text: str, tokenizer: Tokenizer) -> ParserFormat:
    """The format whose marks the template prints.

    Some templates only take reasoning off (``content.split("</think>")``): that
    is how their model marks it, so a template that mentions a mark prints it.
    """
    if CHANNEL in template_text and tokenizer.control_id(MESSAGE) is not None:
        return HARMONY
    reasoning_marks = _REASONING if _REASONING[1] in template_text else None
    call_marks = None
    if _CALLS[0] in template_text and not any(mark in template_text for mark in _NOT_JSON):
        call_marks = _CALLS
    if reasoning_marks or call_marks:
        marks = (*(reasoning_marks or ()), *(call_marks or ()))
        return MarkedFormat(
            reasoning_marks=reasoning_marks,
            call_marks=call_marks,
            controls=frozenset(m for m in marks if tokenizer.control_id(m) is not None),
        )
    if "<|start_header_id|>" in template_text and '"parameters"' in template_text:
        return LLAMA
    return PLAIN
