"""A Messages body as a Conversation: the same one that Chat Completions would give.

One Messages turn may be several messages here: results of tools are messages of
their own. Raises InvalidRequest naming the place.

    user [tool_result a, tool_result b, text]  ->  tool a, tool b, user

Tools that are to be loaded later stay out of the prompt's list of tools; the
result that refers to one holds its definition. So what came before stays a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.api import ranges
from headwater.api.anthropic.bodies import AnswerFormat, Block, CountBody, MessageBody, ToolBody
from headwater.api.config import ApiConfig
from headwater.api.conversing import FieldNames, Spoken
from headwater.api.decode import unsupported
from headwater.api.history import (
    Effort,
    call_arguments,
    check_choice,
    check_tools,
    effort_thinking,
    make_tool,
    required,
    schema_constraint,
)
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import (
    Conversation,
    Message,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
)
from headwater.recipe.normalise import without_agent_noise
from headwater.recipe.recipe import ThinkingSupport
from headwater.recipe.text import join_text_parts

# A budget in tokens becomes an effort: models are asked for one, none counts its thoughts.
LOW_BUDGET_TOKENS = 4_096
MEDIUM_BUDGET_TOKENS = 16_384

# What a result begins with when the tool failed: the model must see it, and formats
# have no mark for it.
ERROR_MARK = "Error: "


def messages_conversation(body: CountBody, config: ApiConfig, support: ThinkingSupport) -> Spoken:
    """Everything in ``body`` that decides the prompt and the form of the answer."""
    ranges.count("messages", len(body.messages), config.max_messages, "messages")
    all_tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    check_tools(all_tools, "tools")
    deferred = {tool.name for tool in body.tools or () if tool.defer_loading}
    tools = tuple(tool for tool in all_tools if tool.name not in deferred)
    reader = _Reader({tool.name: tool for tool in all_tools}, config.normalise_agent_noise)
    choice = _tool_choice(body)
    check_choice(choice, tools, "tool_choice")
    messages: list[Message] = []
    places: list[str] = []
    if body.system:
        messages.append(Message(role="system", content=reader.system(body.system, "system")))
        places.append("system")
    last = len(body.messages) - 1
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        made = _messages(message, where, reader, is_last=index == last)
        messages += made
        places += [where] * len(made)
    answer, answer_name = _answer(body)
    return Spoken(
        conversation=Conversation(
            messages=tuple(messages),
            tools=tools,
            tool_choice=choice,
            thinking=_thinking(body, support),
            answer=answer,
        ),
        names=FieldNames(thinking="thinking", answer=answer_name),
        places=tuple(places),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads content that came from outside the model."""

    tools: dict[str, Tool]
    drops_noise: bool

    def system(self, content: str | Sequence[Block], where: str) -> str:
        if isinstance(content, str):
            return content
        texts = [_text(block, f"{where}[{i}]") for i, block in enumerate(content)]
        return join_text_parts(without_agent_noise(texts) if self.drops_noise else texts)

    def result(self, block: Block, where: str) -> Message:
        content = block.content or ""
        if not isinstance(content, str):
            content = join_text_parts(
                self._result_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)
            )
        if block.is_error and not content.startswith(ERROR_MARK):
            content = ERROR_MARK + content
        call_id = required(block.tool_use_id, f"{where}.tool_use_id")
        return Message(role="tool", content=content, tool_call_id=call_id)

    def _result_part(self, part: Block, where: str) -> str:
        if part.type != "tool_reference":
            return _text(part, where)
        name = required(part.tool_name, f"{where}.tool_name")
        tool = self.tools.get(name)
        return name if tool is None else _definition(tool)


def _messages(message: MessageBody, where: str, reader: _Reader, *, is_last: bool) -> list[Message]:
    content = message.content
    blocks = [Block("text", text=content)] if isinstance(content, str) else content
    match message.role:
        case "assistant":
            return [_assistant(blocks, where, is_last=is_last)]
        case "user":
            return _user(blocks, where, reader)
        case "system" | "developer":
            text = reader.system(blocks, f"{where}.content")
            return [Message(role="system", content=text)]
        case _:
            raise InvalidRequest(
                f"{where}.role must be one of user, assistant, system",
                param=f"{where}.role",
                code="invalid_value",
            )


def _user(blocks: Sequence[Block], where: str, reader: _Reader) -> list[Message]:
    """What a person and tools said, in order."""
    made: list[Message] = []
    texts: list[str] = []

    def close_text() -> None:
        if texts:
            made.append(Message(role="user", content=join_text_parts(texts)))
            texts.clear()

    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.type == "tool_result":
            close_text()
            made.append(reader.result(block, place))
        else:
            texts.append(_text(block, place))
    close_text()
    return made or [Message(role="user")]


def _assistant(blocks: Sequence[Block], where: str, *, is_last: bool) -> Message:
    """One turn of the model. Texts that calls divide were one text when the model wrote
    them, so they are put together as chat clients do; neighbours are separate parts."""
    runs: list[list[str]] = [[]]
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        match block.type:
            case "thinking":
                reasoning.append(block.thinking or "")
            case "redacted_thinking":
                # Written by another server, and readable by that one only.
                pass
            case "tool_use":
                calls.append(
                    ToolCall(
                        call_id=required(block.id, f"{place}.id"),
                        name=required(block.name, f"{place}.name"),
                        arguments=call_arguments(block.input, f"{place}.input"),
                    )
                )
                runs.append([])
            case _:
                runs[-1].append(_text(block, place))
    return Message(
        role="assistant",
        content="".join(join_text_parts(run) for run in runs),
        reasoning="".join(reasoning) or None,
        tool_calls=tuple(calls),
        # The dialect's own way to begin the answer for the model.
        continues=is_last and not calls,
    )


def _text(block: Block, where: str) -> str:
    match block.type:
        case "text":
            return required(block.text, f"{where}.text")
        case "image":
            # An agent that reads these words takes its picture out and goes on.
            raise InvalidRequest(
                f"{where}: Could not process image: this model takes text only",
                param=where,
                code="unsupported_content",
            )
        case "document":
            raise unsupported(where, f"{where}: a document")
        case _:
            raise unsupported(where, f"{where}: this type of content block")


def _tool(tool: ToolBody, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise unsupported(f"{where}.type", f"{where}: a tool that the server would have to run")
    return make_tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=bool(tool.strict),
        where=where,
        schema_name="input_schema",
    )


def _definition(tool: Tool) -> str:
    """A tool as JSON, as a result that refers to it shows it."""
    name, description = (
        json.dumps(text, ensure_ascii=False) for text in (tool.name, tool.description)
    )
    function = f'{{"name":{name},"description":{description},"parameters":{tool.parameters}}}'
    return f'{{"type":"function","function":{function}}}'


def _tool_choice(body: CountBody) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "auto" | "none" as kind:
            return ToolChoice(kind=kind, parallel=parallel)
        case "any":
            return ToolChoice(kind="required", parallel=parallel)
        case "tool":
            name = required(choice.name, "tool_choice.name")
            return ToolChoice(kind="named", name=name, parallel=parallel)
        case _:
            raise InvalidRequest(
                "tool_choice.type must be auto, any, tool or none",
                param="tool_choice.type",
                code="invalid_value",
            )


def _thinking(body: CountBody, support: ThinkingSupport) -> Thinking:
    """Thinking by switch, budget and effort.

    Clients of this dialect ask for it whatever the model is. A budget allows to
    think and does not demand it, so a model that cannot is in order.
    """
    effort = body.output_config.effort if body.output_config is not None else None
    asked = effort_thinking(effort, "output_config.effort")
    wanted = body.thinking
    match wanted.type if wanted is not None else None:
        case None | "adaptive":
            # Effort alone does not switch thinking on; the model's habit decides.
            made = Thinking(effort=asked.effort)
        case "disabled":
            made = Thinking(mode="off")
        case "enabled":
            budget = wanted.budget_tokens if wanted is not None else None
            if budget is not None:
                ranges.integer("thinking.budget_tokens", budget, 0, 1, 2**53)
            made = Thinking(mode="on", effort=asked.effort or _budget_effort(budget))
        case _:
            raise InvalidRequest(
                "thinking.type must be enabled, disabled or adaptive",
                param="thinking.type",
                code="invalid_value",
            )
    if support == "none":
        return Thinking()
    return made


def _budget_effort(budget_tokens: int | None) -> Effort | None:
    if budget_tokens is None:
        return None
    if budget_tokens < LOW_BUDGET_TOKENS:
        return "low"
    return "medium" if budget_tokens < MEDIUM_BUDGET_TOKENS else "high"


def _answer(body: CountBody) -> tuple[Constraint | None, str]:
    """The form the answer must have, under its newer or its older name."""
    if body.output_config is not None and body.output_config.format is not None:
        return _format(body.output_config.format, "output_config.format"), "output_config.format"
    if body.output_format is not None:
        return _format(body.output_format, "output_format"), "output_format"
    return None, "output_config.format"


def _format(wanted: AnswerFormat, where: str) -> Constraint:
    if wanted.type != "json_schema":
        raise InvalidRequest(
            f"{where}.type must be json_schema", param=f"{where}.type", code="invalid_value"
        )
    return schema_constraint(wanted.schema, f"{where}.schema")
