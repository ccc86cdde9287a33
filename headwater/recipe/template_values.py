"""A conversation as chat templates read it, with every piece of outside text numbered.

Hugging Face templates agree on most names (``messages``, ``tools``,
``reasoning_content``, ``tool_calls[].function``) and differ in two habits, which
``MessageForm`` holds and ``template_probe`` finds out. Roles are the server's own
words and count as placed text, since some formats spell a control token as
``'<|' + message.role + '|>'``; all else is outside text. Used by ``chat``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from headwater.recipe.conversation import Conversation, Message, Tool, ToolCall
from headwater.recipe.messages import parse_object
from headwater.recipe.provenance import Traced, joined, outside, placed
from headwater.recipe.recipe import SpanPart

TemplateMessage = Mapping[str, object]  # strings in it are Traced, or count as outside text

_SYSTEM_SEPARATOR = "\n\n"
# One text under every name that templates have for it, as transformers does.
_REASONING_NAMES: Final = ("reasoning_content", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """How one template wants what templates do not agree on."""

    # JSON arguments of a call as an object that the template prints, or as text.
    arguments: Literal["object", "text"] = "object"
    # The content of an assistant message that has calls and no text.
    no_content: Literal["empty", "null"] = "empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One piece of outside text; an origin (``provenance``) is its number.

    ``name`` is how errors call it. ``exact``: printed as it came, so a place in the
    prompt has a place here. Otherwise (JSON that is printed anew) only the whole is known.
    ``sought`` is text of it that the prompt must hold, empty if the format may drop it.
    """

    name: str
    message_index: int
    part: SpanPart
    num_chars: int
    exact: bool = True
    sought: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateValues:
    """What one rendering is given: the template's two lists, and what their origins mean."""

    messages: Sequence[TemplateMessage]
    tools: Sequence[Mapping[str, object]] | None
    fields: Sequence[Field]


def template_values(
    conversation: Conversation, form: MessageForm, *, one_system: bool = False
) -> TemplateValues:
    """``conversation`` in the form that one template wants.

    ``one_system`` puts all system texts into one first message, in order (A23).
    Raises InvalidRequest for arguments or parameters that are no JSON object.
    """
    builder = _Builder(form, conversation)
    tools = [builder.tool(index, tool) for index, tool in enumerate(conversation.tools)]
    messages = [builder.message(index, m) for index, m in enumerate(conversation.messages)]
    if one_system:
        messages = _with_one_system_message(messages)
    return TemplateValues(messages=messages, tools=tools or None, fields=builder.fields)


class _Builder:
    """Numbers the fields while it builds the values."""

    def __init__(self, form: MessageForm, conversation: Conversation) -> None:
        self.fields: list[Field] = []
        self._form = form
        self._call_names = {
            call.call_id: call.name for m in conversation.messages for call in m.tool_calls
        }

    def message(self, index: int, message: Message) -> TemplateMessage:
        where = f"messages[{index}]"
        content: Traced | None = self._field(
            where, index, "content", message.content, must_print=True
        )
        if not message.content and message.tool_calls and self._form.no_content == "null":
            content = None
        values: dict[str, object] = {"role": placed(message.role), "content": content}
        if message.reasoning is not None:
            # Many formats drop the reasoning of earlier turns by intent.
            reasoning = self._field(f"{where}.reasoning", index, "reasoning", message.reasoning)
            values.update(dict.fromkeys(_REASONING_NAMES, reasoning))
        if message.tool_calls:
            values["tool_calls"] = [
                self._tool_call(f"{where}.tool_calls[{n}]", index, call)
                for n, call in enumerate(message.tool_calls)
            ]
        name = message.name
        if message.tool_call_id is not None:
            values["tool_call_id"] = self._field(
                f"{where}.tool_call_id", index, "name", message.tool_call_id
            )
            # Dialects name a result by its call's id only; some templates print the name.
            name = name or self._call_names.get(message.tool_call_id)
        if name is not None:
            values["name"] = self._field(f"{where}.name", index, "name", name)
        return values

    def tool(self, index: int, tool: Tool) -> Mapping[str, object]:
        where = f"tools[{index}]"
        num_chars = len(tool.name) + len(tool.description) + len(tool.parameters)
        text = self._whole(where, index, "tool", num_chars, tool.name)
        function = {
            "name": text(tool.name),
            "description": text(tool.description),
            "parameters": parse_object(tool.parameters, param=f"{where}.parameters", make=text),
        }
        return {"type": "function", "function": function}

    def _tool_call(self, where: str, index: int, call: ToolCall) -> Mapping[str, object]:
        num_chars = len(call.name) + len(call.arguments)
        text = self._whole(where, index, "tool_call", num_chars, call.name)
        arguments: object = parse_object(call.arguments, param=f"{where}.arguments", make=text)
        if self._form.arguments == "text":
            arguments = text(call.arguments)
        return {
            "id": self._field(f"{where}.id", index, "name", call.call_id),
            "type": "function",
            "function": {"name": text(call.name), "arguments": arguments},
        }

    def _field(
        self, name: str, index: int, part: SpanPart, text: str, *, must_print: bool = False
    ) -> Traced:
        sought = text.strip() if must_print else ""
        self.fields.append(
            Field(name=name, message_index=index, part=part, num_chars=len(text), sought=sought)
        )
        return outside(text, len(self.fields) - 1)

    def _whole(
        self, name: str, index: int, part: SpanPart, num_chars: int, sought: str
    ) -> Callable[[str], Traced]:
        """A field of several strings; gives what marks one of them."""
        number = len(self.fields)
        self.fields.append(
            Field(
                name=name,
                message_index=index,
                part=part,
                num_chars=num_chars,
                exact=False,
                sought=sought,
            )
        )
        return lambda piece: outside(piece, number)


def _with_one_system_message(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    parts: list[Traced] = []
    rest: list[TemplateMessage] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "system" and isinstance(content, Traced):
            parts += [placed(_SYSTEM_SEPARATOR), content] if parts else [content]
        else:
            rest.append(message)
    return [{"role": placed("system"), "content": joined(parts)}, *rest]
