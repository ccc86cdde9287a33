"""Chat messages, and how they are handed to a template.

Roles are mapped here (A23), outside text is marked with its message's number
here, and a message that a template would drop in silence is found here. Knows no
tokenizer; used by ``chat``, filled in by ``api``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headwater.core.errors import InvalidRequest
from headwater.recipe.provenance import Traced, joined, outside, placed
from headwater.recipe.template import Rendered, TemplateMessage
from headwater.recipe.text import require_encodable

# The role as the caller says it -> the role as templates know it (A23).
ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_SYSTEM_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message. ``content`` is text already: see ``text.join_text_parts`` for lists."""

    role: str
    content: str
    name: str | None = None


class MessageLeftOut(InvalidRequest):
    """The template would drop a message in silence."""


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequest naming the message whose role or text cannot be used."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role must be one of {', '.join(ROLES)}",
                param=f"messages[{index}].role",
            )
        require_encodable(message.content, param=f"messages[{index}].content")
        if message.name is not None:
            require_encodable(message.name, param=f"messages[{index}].name")


def num_chars(messages: Sequence[ChatMessage]) -> int:
    return sum(len(m.content) + len(m.name or "") for m in messages)


def has_later_system(messages: Sequence[ChatMessage]) -> bool:
    """Whether a system-class message stands anywhere but first."""
    return any(ROLES[m.role] == "system" for m in messages[1:])


def template_messages(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """Each message as a template reads it.

    Roles are the server's own words, so they count as placed text: some formats
    spell a control token as ``'<|' + message.role + '|>'``.
    """
    return [
        _template_message(ROLES[m.role], outside(m.content, index), m.name, index)
        for index, m in enumerate(messages)
    ]


def with_one_system_message(messages: Sequence[ChatMessage]) -> list[TemplateMessage]:
    """As ``template_messages``, with all system-class texts in one first message, in order."""
    parts: list[Traced] = []
    rest: list[TemplateMessage] = []
    for index, message in enumerate(messages):
        content = outside(message.content, index)
        if ROLES[message.role] == "system":
            parts += [placed(_SYSTEM_SEPARATOR), content] if parts else [content]
        else:
            rest.append(_template_message(ROLES[message.role], content, message.name, index))
    return [_template_message("system", joined(parts), None, 0), *rest]


def require_all_printed(messages: Sequence[ChatMessage], rendered: Rendered) -> None:
    """Raise MessageLeftOut if some message's text is not in the prompt at all."""
    printed = {message_index for _, _, message_index in rendered.origins}
    for index, message in enumerate(messages):
        text = message.content.strip()
        # A template may print a message through a filter that loses its origin.
        if text and index not in printed and text not in rendered.text:
            raise MessageLeftOut(
                f"the model's chat template leaves messages[{index}] (role {message.role}) out "
                "of the prompt; this model cannot take such a message",
                param=f"messages[{index}]",
                code="message_left_out",
            )


def _template_message(role: str, content: Traced, name: str | None, index: int) -> TemplateMessage:
    message: dict[str, object] = {"role": placed(role), "content": content}
    if name is not None:
        message["name"] = outside(name, index)
    return message
