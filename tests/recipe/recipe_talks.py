"""Conversations with tools and reasoning, in our form and in that of Hugging Face templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from recipe_models import Style

from headwater.recipe.conversation import Conversation, Message, Thinking, Tool, ToolCall

WEATHER = Tool(
    name="get_weather",
    description='The weather in one city, e.g. "Oslo" or 東京.',
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "days": {"type": "integer", "minimum": 1, "default": 3},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
        separators=(",", ":"),
    ),
)
RUN = Tool(
    name="run",
    description="Run a command.",
    parameters='{"type":"object","properties":{"argv":{"type":"array","items":{"type":"string"}}}}',
)
SYSTEM = Message(role="system", content="be kind")


def ask(text: str) -> Message:
    return Message(role="user", content=text)


def answer(text: str, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def call(name: str, arguments: Mapping[str, object], call_id: str = "call_0001") -> ToolCall:
    return ToolCall(call_id=call_id, name=name, arguments=json.dumps(arguments))


def calling(*calls: ToolCall, content: str = "", reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def result(text: str, call_id: str = "call_0001") -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def talk(*messages: Message, tools: Sequence[Tool] = (), mode: str = "default") -> Conversation:
    thinking = {"default": Thinking(), "on": Thinking(mode="on"), "off": Thinking(mode="off")}
    return Conversation(messages=messages, tools=tuple(tools), thinking=thinking[mode])


OSLO = {"city": "Oslo", "days": 2, "note": 'a "b"\n\tc \\ 東京 é', "deep": {"x": [1.5, None, True]}}
# Every conversation that all styles with tools can carry.
TOOL_TALKS: dict[str, Conversation] = {
    "offered": talk(ask("hello world"), tools=[WEATHER]),
    "two": talk(SYSTEM, ask("  hello \n"), tools=[WEATHER, RUN]),
    "called": talk(
        SYSTEM,
        ask("the weather?"),
        calling(call("get_weather", OSLO)),
        result('{"t": -3}\n'),
        tools=[WEATHER, RUN],
    ),
    "answered": talk(
        ask("the weather?"),
        calling(call("get_weather", {})),
        result("-3 <C>"),
        answer("It's -3."),
        ask("and in\n\nTokyo?"),
        calling(call("get_weather", {"city": "東京"}, "call_0002")),
        result("", "call_0002"),
        tools=[WEATHER],
    ),
    "plain": talk(SYSTEM, ask("hello"), answer("hello world"), ask("the fox?")),
}
# What only some of them can.
PARALLEL = talk(
    ask("both"),
    calling(call("get_weather", OSLO), call("run", {"argv": ["ls", "-l"]}, "call_0002")),
    result("cold"),
    result("a.txt", "call_0002"),
    tools=[WEATHER, RUN],
)
CALL_WITH_TEXT = talk(
    ask("both"), calling(call("run", {}), content="I look."), result("ok"), tools=[RUN]
)
REASONED = talk(
    ask("the weather?"),
    calling(call("get_weather", OSLO), reasoning="\nask the tool\n"),
    result("cold"),
    answer("It is cold.", "cold\n\nthen"),
    ask("sure?"),
    calling(call("get_weather", OSLO, "call_0002"), content="Hm.", reasoning="again"),
    result("warm", "call_0002"),
    tools=[WEATHER],
)


def with_mode(conversation: Conversation, mode: str) -> Conversation:
    return replace(conversation, thinking=talk(mode=mode).thinking)


def hf_messages(
    conversation: Conversation, *, arguments: str = "object", no_content: object = ""
) -> list[dict[str, object]]:
    """Messages as a caller of ``apply_chat_template`` writes them."""
    return [_hf_message(m, conversation, arguments, no_content) for m in conversation.messages]


def _hf_message(
    message: Message, conversation: Conversation, arguments: str, no_content: object
) -> dict[str, object]:
    found: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["content"] = message.content or no_content
        found["tool_calls"] = [
            {
                "id": c.call_id,
                "type": "function",
                "function": {
                    "name": c.name,
                    "arguments": c.arguments if arguments == "text" else json.loads(c.arguments),
                },
            }
            for c in message.tool_calls
        ]
    if message.reasoning is not None:
        found["reasoning_content"] = found["thinking"] = message.reasoning
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
        names = {c.call_id: c.name for m in conversation.messages for c in m.tool_calls}
        found["name"] = message.name or names.get(message.tool_call_id)
    elif message.name is not None:
        found["name"] = message.name
    return found


def hf_tools(conversation: Conversation) -> list[dict[str, object]] | None:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters),
            },
        }
        for tool in conversation.tools
    ] or None


def hf_switches(conversation: Conversation) -> dict[str, object]:
    mode = conversation.thinking.mode
    return {} if mode == "default" else {"enable_thinking": mode == "on", "thinking": mode == "on"}


# How each style wants arguments, and the content of a turn that only calls.
FORMS: Mapping[str, tuple[str, object]] = {"r1": ("text", None)}


def plain_ids(style: Style, conversation: Conversation, *, generation: bool = True) -> list[int]:
    """What a stack without any defence makes of ``conversation``."""
    arguments, no_content = FORMS.get(style.name, ("object", ""))
    return style.plain_ids(
        hf_messages(conversation, arguments=arguments, no_content=no_content),
        generation=generation,
        tools=hf_tools(conversation),
        **hf_switches(conversation),
    )
