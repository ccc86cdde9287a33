"""What a chat template can carry, found out by rendering a few short conversations.

Reading a template's source would be guessing; its output is not. About twenty
renderings of a few words, once when a model is loaded. Knows no tokenizer and
no output format: whether a model's tool calls can be read back is not asked here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headwater.core.errors import InvalidRequest, ModelError
from headwater.recipe.conversation import Conversation, Message, Thinking, Tool, ToolCall
from headwater.recipe.recipe import ThinkingSupport
from headwater.recipe.template import ChatTemplate
from headwater.recipe.template_conversation import render_conversation
from headwater.recipe.template_values import MessageForm

DROPS_REASONING: Final = (
    "drops the reasoning of earlier turns, so turn n+1 does not extend turn n after reasoning"
)
CHANGES_HISTORY: Final = (
    "prints a finished turn in another way than the prompt that asked for it "
    "(an empty reasoning block, for instance), so turn n+1 does not extend turn n"
)
NO_EFFORT: Final = "has no levels of reasoning effort, so effort changes nothing"

_FORMS: Final = (
    MessageForm(),
    MessageForm(no_content="null"),
    MessageForm(arguments="text"),
    MessageForm(arguments="text", no_content="null"),
)
_MODES: Final = (Thinking(), Thinking(mode="on"), Thinking(mode="off"))
_THINK, _END_THINK = "<think>", "</think>"

# Words that no template holds. The quotation mark shows whether JSON is encoded once.
_ASK = Message(role="user", content="qask")
_AGAIN = Message(role="user", content="qagain")
_SYSTEM = Message(role="system", content="qsystem")
_TOOL = Tool(
    name="qtool",
    description="qtext",
    parameters='{"type":"object","properties":{"qkey":{"type":"string"}}}',
)
_VALUES = ('q"value', 'q"second')
_CALLS = tuple(
    ToolCall(call_id=f"qcall000{n}", name=f"qtool{n}", arguments=f'{{"qkey": {json.dumps(value)}}}')
    for n, value in enumerate(_VALUES)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFormat:
    """What one template can carry. ``opens_reasoning`` tells, for each thinking mode,
    whether the generation prompt ends inside a reasoning block."""

    form: MessageForm
    tools: bool
    calls: bool
    parallel_calls: bool
    thinking: ThinkingSupport
    opens_reasoning: Mapping[str, bool]
    notes: tuple[str, ...]


def probe_template(template: ChatTemplate, source: str) -> TemplateFormat:
    """``source`` is the template's text: models that only ever split reasoning out of
    what they wrote show no sign of it in the prompts they are given."""
    probe = _Probe(template)
    form = next((form for form in _FORMS if probe.prints_calls(form, 1)), None)
    asked = {mode.mode: probe.text([_ASK], thinking=mode) for mode in _MODES}
    prints_reasoning = probe.prints_reasoning([_ASK, _reasoned()])
    thinking: ThinkingSupport = "none"
    if asked["on"] != asked["off"]:
        thinking = "optional"
    elif prints_reasoning or _END_THINK in source:
        thinking = "always"
    notes: list[str] = []
    if thinking != "none" and not probe.prints_reasoning([_ASK, _reasoned(), _AGAIN]):
        notes.append(DROPS_REASONING)
    if not all(probe.extends(mode) for mode in _plain_modes(thinking)):
        notes.append(CHANGES_HISTORY)
    if thinking != "none" and not probe.reads_effort():
        notes.append(NO_EFFORT)
    return TemplateFormat(
        form=form or MessageForm(),
        tools=probe.prints_tool(),
        calls=form is not None,
        parallel_calls=form is not None and probe.prints_calls(form, 2),
        thinking=thinking,
        opens_reasoning={mode: _ends_in_reasoning(text) for mode, text in asked.items()},
        notes=tuple(notes),
    )


def probe_conversations() -> Sequence[Conversation]:
    """Plain conversations of every kind; a format may refuse some of them."""
    answer = Message(role="assistant", content="qanswer")
    call = Message(role="assistant", tool_calls=_CALLS[:1])
    result = Message(role="tool", content="qresult", tool_call_id=_CALLS[0].call_id)
    return [
        Conversation(messages=(_ASK,)),
        Conversation(messages=(_ASK, answer, _AGAIN)),
        Conversation(messages=(_SYSTEM, _ASK, answer, _AGAIN)),
        Conversation(messages=(_ASK, _reasoned()), thinking=Thinking(mode="on")),
        Conversation(messages=(_ASK,), thinking=Thinking(mode="off")),
        Conversation(messages=(_SYSTEM, _ASK, call, result, answer), tools=(_TOOL,)),
    ]


def _plain_modes(thinking: ThinkingSupport) -> Sequence[Thinking]:
    """Modes in which a turn without reasoning is usual."""
    if thinking == "optional":
        return [Thinking(mode="off")]
    return [Thinking()] if thinking == "none" else []


def _reasoned() -> Message:
    return Message(role="assistant", content="qanswer", reasoning="qreasoning")


def _ends_in_reasoning(text: str | None) -> bool:
    return text is not None and text.rfind(_THINK) > text.rfind(_END_THINK)


class _Probe:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        thinking: Thinking | None = None,
        form: MessageForm | None = None,
        add_generation_prompt: bool = True,
    ) -> str | None:
        """The prompt, or None if the template cannot print it."""
        conversation = Conversation(
            messages=tuple(messages), tools=tuple(tools), thinking=thinking or Thinking()
        )
        try:
            return render_conversation(
                self._template,
                conversation,
                form or MessageForm(),
                add_generation_prompt=add_generation_prompt,
            ).rendered.text
        except (InvalidRequest, ModelError):
            # What the sandbox forbids in one branch (of tools, say) takes only that from it.
            return None

    def prints_tool(self) -> bool:
        texts = [
            self.text(messages, tools=[_TOOL])
            # Some formats print tools in the system message that they make themselves.
            for messages in ([_ASK], [_SYSTEM, _ASK])
        ]
        return all(
            text is not None and all(word in text for word in ("qtool", "qtext", "qkey"))
            for text in texts
        )

    def prints_calls(self, form: MessageForm, num_calls: int) -> bool:
        calls, values = _CALLS[:num_calls], _VALUES[:num_calls]
        results = [
            Message(role="tool", content=f"qresult {n}", tool_call_id=call.call_id)
            for n, call in enumerate(calls)
        ]
        messages = [_ASK, Message(role="assistant", tool_calls=calls), *results]
        text = self.text(messages, tools=[_TOOL], form=form)
        if text is None or not all(message.content in text for message in results):
            return False
        return all(call.name in text for call in calls) and all(
            # As JSON, encoded once; or the bare value, but not Python's form of it.
            json.dumps(value) in text or (value in text and repr(value) not in text)
            for value in values
        )

    def prints_reasoning(self, messages: Sequence[Message]) -> bool:
        text = self.text(messages, thinking=Thinking(mode="on"), add_generation_prompt=False)
        return text is not None and "qreasoning" in text

    def reads_effort(self) -> bool:
        low, high = (
            self.text([_ASK], thinking=Thinking(mode="on", effort=effort))
            for effort in ("low", "high")
        )
        return low != high

    def extends(self, thinking: Thinking) -> bool:
        """Whether the second turn's prompt begins with the first one's and its plain answer."""
        answer = Message(role="assistant", content="qanswer")
        first = self.text([_ASK], thinking=thinking)
        done = self.text([_ASK, answer], thinking=thinking, add_generation_prompt=False)
        second = self.text([_ASK, answer, _AGAIN], thinking=thinking)
        if first is None or done is None or second is None:
            return True  # a format that cannot print a dialogue has no second turn
        # The answer's text and what ends the turn; whitespace after that is the template's.
        return done.startswith(first) and second.startswith(done.rstrip())
