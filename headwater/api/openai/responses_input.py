"""A Responses body as a Conversation: the same one that Chat Completions would give.

One turn of the model comes back as several items; they are put together again:

    reasoning, message, function_call, function_call  ->  one assistant message
    function_call_output                              ->  a tool message

Raises InvalidRequest naming the place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.api import ranges
from headwater.api.config import ApiConfig
from headwater.api.conversing import FieldNames, Spoken
from headwater.api.decode import unsupported
from headwater.api.history import (
    call_arguments,
    check_choice,
    effort_thinking,
    missing,
    required,
    schema_constraint,
)
from headwater.api.openai.responses_bodies import (
    InputItem,
    InputPart,
    ResponsesBody,
)
from headwater.api.openai.responses_tools import OfferedTools, model_name
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Conversation, Message, Role, ToolCall, ToolChoice
from headwater.recipe.text import join_text_parts

_OUTSIDE_ROLES: dict[str, Role] = {"user": "user", "system": "system", "developer": "system"}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def responses_conversation(body: ResponsesBody, offered: OfferedTools, config: ApiConfig) -> Spoken:
    """Everything in ``body`` that decides the prompt and the form of the answer."""
    tools = offered.tools
    choice = _tool_choice(body)
    check_choice(choice, tools, "tool_choice")
    history = _History()
    if body.instructions:
        history.add(Message(role="system", content=body.instructions), "instructions")
    if isinstance(body.input, str):
        history.add(Message(role="user", content=body.input), "input")
    else:
        ranges.count("input", len(body.input), config.max_messages, "items")
        for index, item in enumerate(body.input):
            _take(item, f"input[{index}]", history)
    history.close_turn()
    effort = body.reasoning.effort if body.reasoning is not None else None
    return Spoken(
        conversation=Conversation(
            messages=tuple(history.messages),
            tools=tools,
            tool_choice=choice,
            thinking=effort_thinking(effort, "reasoning.effort"),
            answer=_answer(body),
        ),
        names=FieldNames(messages="input", thinking="reasoning.effort", answer="text.format"),
        places=tuple(history.places),
    )


@dataclass(slots=True)
class _Turn:
    """Items of one turn of the model, as far as they have come."""

    place: str
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    last_is_text: bool = False


@dataclass(slots=True)
class _History:
    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    turn: _Turn | None = None

    def add(self, message: Message, place: str) -> None:
        self.close_turn()
        self.messages.append(message)
        self.places.append(place)

    def open_turn(self, place: str) -> _Turn:
        if self.turn is None:
            self.turn = _Turn(place)
        return self.turn

    def close_turn(self) -> None:
        turn, self.turn = self.turn, None
        if turn is None:
            return
        self.messages.append(
            Message(
                role="assistant",
                # Texts that calls divide were one text when the model wrote them.
                content="".join(turn.texts),
                reasoning="".join(turn.reasoning) or None,
                tool_calls=tuple(turn.calls),
            )
        )
        self.places.append(turn.place)


def _take(item: InputItem, place: str, history: _History) -> None:
    match item.type or "message":
        case "message":
            _take_message(item, place, history)
        case "reasoning":
            text = _reasoning(item, place)
            if history.turn is not None and (history.turn.texts or history.turn.calls):
                history.close_turn()
            if text:
                history.open_turn(place).reasoning.append(text)
        case "function_call":
            call = ToolCall(
                call_id=required(item.call_id, f"{place}.call_id"),
                name=model_name(required(item.name, f"{place}.name"), item.namespace),
                arguments=call_arguments(item.arguments or "", f"{place}.arguments"),
            )
            turn = history.open_turn(place)
            turn.calls.append(call)
            turn.last_is_text = False
        case "function_call_output":
            result = Message(
                role="tool",
                content=_text_of(item.output or "", f"{place}.output"),
                tool_call_id=required(item.call_id, f"{place}.call_id"),
            )
            history.add(result, place)
        case "item_reference":
            raise unsupported(place, f"{place}: a reference to a stored item (nothing is stored)")
        case _:
            raise unsupported(f"{place}.type", f"{place}: this type of item")


def _take_message(item: InputItem, place: str, history: _History) -> None:
    content = f"{place}.content"
    if item.content is None:
        raise missing(content)
    text = _text_of(item.content, content)
    role = item.role or ""
    if role == "assistant":
        if history.turn is not None and history.turn.last_is_text:
            history.close_turn()  # two messages in a row are two turns
        turn = history.open_turn(place)
        turn.texts.append(text)
        turn.last_is_text = True
    elif role in _OUTSIDE_ROLES:
        history.add(Message(role=_OUTSIDE_ROLES[role], content=text), place)
    else:
        raise InvalidRequest(
            f"{place}.role must be one of user, assistant, system, developer",
            param=f"{place}.role",
            code="invalid_value",
        )


def _reasoning(item: InputItem, place: str) -> str:
    """The reasoning in the clear; what another server encrypted cannot be read here."""
    if item.content:
        return _text_of(item.content, f"{place}.content")
    return _text_of(item.summary or "", f"{place}.summary")


def _text_of(content: str | Sequence[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    return join_text_parts(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: InputPart, where: str) -> str:
    if part.type == "refusal":
        return required(part.refusal, f"{where}.refusal")
    if part.type not in _TEXT_PARTS:
        what = {"input_image": "an image", "input_file": "a file"}.get(part.type, "this part")
        raise unsupported(f"{where}.type", f"{where}: {what}")
    return required(part.text, f"{where}.text")


def _tool_choice(body: ResponsesBody) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case None:
            return ToolChoice(parallel=parallel)
        case "auto" | "none" | "required" as kind:
            return ToolChoice(kind=kind, parallel=parallel)
        case str():
            raise InvalidRequest(
                "tool_choice must be auto, none, required or a function",
                param="tool_choice",
                code="invalid_value",
            )
        case chosen:
            if chosen.type != "function":
                raise unsupported("tool_choice.type", "a tool_choice other than a function")
            name = required(chosen.name, "tool_choice.name")
            return ToolChoice(kind="named", name=name, parallel=parallel)


def _answer(body: ResponsesBody) -> Constraint | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint("json_object")
    if wanted.type == "json_schema":
        return schema_constraint(wanted.schema, "text.format.schema")
    raise InvalidRequest(
        "text.format.type must be text, json_object or json_schema",
        param="text.format.type",
        code="invalid_value",
    )
