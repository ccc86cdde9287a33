"""From origins in a prompt's text to origins of its tokens. Used by ``chat`` alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from headwater.recipe.provenance import PLACED, Span
from headwater.recipe.recipe import PromptSpan
from headwater.recipe.template_conversation import RenderedConversation
from headwater.recipe.template_values import Field


def token_spans(
    prompt: RenderedConversation, starts: Sequence[int], shift: int
) -> Iterator[PromptSpan]:
    """One span for each run of text of one field; escapes of JSON do not interrupt it.

    ``starts`` are the characters at which the tokens begin, ``shift`` the tokens
    that were put before them.
    """
    fields = prompt.fields
    run: list[Span] = []
    for span in prompt.rendered.spans:
        if run and not _goes_on(run[-1], span, fields):
            yield from _token_span(run, fields, starts, shift)
            run.clear()
        if span[2] != PLACED:
            run.append(span)
    if run:
        yield from _token_span(run, fields, starts, shift)


def _goes_on(last: Span, span: Span, fields: Sequence[Field]) -> bool:
    if span[2] != last[2]:
        return False
    return not fields[span[2]].exact or span[3] >= last[3] + last[1] - last[0]


def _token_span(
    run: Sequence[Span], fields: Sequence[Field], starts: Sequence[int], shift: int
) -> Iterator[PromptSpan]:
    (begin, _, number, first), (last_begin, end, _, last_first) = run[0], run[-1]
    start, stop = bisect_left(starts, begin), bisect_left(starts, end)
    if start == stop:
        return  # all of it became part of the format's own tokens
    field = fields[number]
    yield PromptSpan(
        start=start + shift,
        end=stop + shift,
        message_index=field.message_index,
        part=field.part,
        start_char=first if field.exact else 0,
        end_char=last_first + end - last_begin if field.exact else field.num_chars,
    )
