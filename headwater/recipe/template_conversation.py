"""A conversation through one model's chat template: text, origins, nothing lost in silence.

Joins the values (``template_values``) with the template: thinking switches by
allow-list, system messages merged where the format has one slot (A23), a last
assistant message left open, and a refusal for whatever the template would drop.
Knows no tokenizer. Used by ``chat``, and by ``template_probe`` with several forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Conversation, Thinking
from headwater.recipe.messages import has_later_system, num_chars
from headwater.recipe.template import ChatTemplate, Rendered, TemplateRefused
from headwater.recipe.template_values import Field, MessageForm, template_values

# The variables that templates read to switch reasoning; no other comes from a request (I05).
_SWITCHES: Final = ("enable_thinking", "thinking")
_EFFORT: Final = "reasoning_effort"
_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "max": "high"}


class MessageLeftOut(InvalidRequest):
    """The template would drop a message, a call or a tool in silence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedConversation:
    """A prompt as text; the origins in ``rendered`` are positions in ``fields``."""

    rendered: Rendered
    fields: Sequence[Field]


def thinking_switches(thinking: Thinking) -> Mapping[str, bool | str]:
    """Template variables for ``thinking``; none at all for the model's own habit."""
    switches: dict[str, bool | str] = {}
    if thinking.mode != "default":
        switches.update(dict.fromkeys(_SWITCHES, thinking.mode == "on"))
    if thinking.effort is not None:
        switches[_EFFORT] = _EFFORTS[thinking.effort]
    return switches


def render_conversation(
    template: ChatTemplate,
    conversation: Conversation,
    form: MessageForm,
    *,
    add_generation_prompt: bool = True,
) -> RenderedConversation:
    """The prompt; ends inside the last message if that message ``continues``.

    Raises InvalidRequest naming what is refused, cannot be printed, or is left out.
    """
    try:
        return _render(template, conversation, form, add_generation_prompt, one_system=False)
    except (TemplateRefused, MessageLeftOut):
        if not has_later_system(conversation):
            raise
    return _render(template, conversation, form, add_generation_prompt, one_system=True)


def _render(
    template: ChatTemplate,
    conversation: Conversation,
    form: MessageForm,
    add_generation_prompt: bool,
    *,
    one_system: bool,
) -> RenderedConversation:
    values = template_values(conversation, form, one_system=one_system)
    continues = conversation.messages[-1].continues
    rendered = template.render(
        values.messages,
        tools=values.tools,
        switches=thinking_switches(conversation.thinking),
        num_input_chars=num_chars(conversation),
        add_generation_prompt=add_generation_prompt and not continues,
    )
    _require_all_printed(rendered, values.fields)
    if continues:
        rendered = rendered.before(_end_of_last_message(conversation, rendered, values.fields))
    return RenderedConversation(rendered=rendered, fields=values.fields)


def _require_all_printed(rendered: Rendered, fields: Sequence[Field]) -> None:
    """Raise MessageLeftOut if the text of some field is not in the prompt at all."""
    printed = {number for _, _, number, _ in rendered.spans}
    for number, field in enumerate(fields):
        # A template may print a text through a filter that loses its origin.
        if field.sought and number not in printed and field.sought not in rendered.text:
            raise MessageLeftOut(
                f"the model's chat template leaves {field.name} out of the prompt; "
                "this model cannot take it",
                param=field.name,
                code="message_left_out",
            )


def _end_of_last_message(
    conversation: Conversation, rendered: Rendered, fields: Sequence[Field]
) -> int:
    """Where the text of a last message that continues ends, as the template trimmed it."""
    index = len(conversation.messages) - 1
    part = "content" if conversation.messages[-1].content.strip() else "reasoning"
    ends = [
        end
        for _, end, number, _ in rendered.origins
        if fields[number].message_index == index and fields[number].part == part
    ]
    if not ends:
        where = f"messages[{index}]"
        raise InvalidRequest(
            f"{where} cannot be continued: the model's chat template does not print its text",
            param=where,
            code="cannot_continue",
        )
    return ends[-1]
