"""Agents' conversations for the prefix advisor: clean ones, and the same with one bad habit.

A trace is the list of conversations that a client sends, turn by turn, several agents
in turn. A habit rewrites what is sent; the text is Python's own reference.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pydoc_data.topics import topics

from headwater.recipe.conversation import Conversation, Message, Thinking, Tool, ToolCall
from headwater.recipe.recipe import EncodedPrompt, Recipe
from headwater.recipe.record import RequestRecord
from headwater.recipe.record_maker import RecordMaker

Trace = Sequence[Conversation]
NUM_AGENTS, NUM_STEPS = 3, 8


@cache
def _reference() -> Sequence[str]:
    return " ".join(topics[name] for name in sorted(topics)).split()


def words(name: object, count: int) -> str:
    start = random.Random(str(name)).randrange(len(_reference()) - count)
    return " ".join(_reference()[start : start + count])


def tools() -> tuple[Tool, ...]:
    return tuple(
        Tool(
            name=f"tool_{number}",
            description=words(f"tool {number}", 8),
            parameters=json.dumps(
                {"type": "object", "properties": {f"p{number}": {"type": "string"}}},
                separators=(",", ":"),
            ),
        )
        for number in range(4)
    )


def agent_trace(*, with_tools: bool = True, with_reasoning: bool = False) -> list[Conversation]:
    """What an agent should send: each turn is the one before, and more."""
    histories = [
        [
            Message(role="system", content=f"{words('system', 30)} {words('rules', 70)}"),
            Message(role="user", content=words(f"task {agent}", 30)),
        ]
        for agent in range(NUM_AGENTS)
    ]
    trace = []
    for step in range(NUM_STEPS):
        for agent, history in enumerate(histories):
            if step:
                history += _step(agent, step, with_tools, with_reasoning)
            trace.append(
                Conversation(
                    messages=tuple(history),
                    tools=tools() if with_tools else (),
                    thinking=Thinking(mode="on" if with_reasoning else "default"),
                )
            )
    return trace


def _step(agent: int, step: int, with_tools: bool, with_reasoning: bool) -> list[Message]:
    name = (agent, step)
    reasoning = words(("why", *name), 20) if with_reasoning else None
    result = words(("result", *name), 25)
    if not with_tools:
        answer = Message(role="assistant", content=words(("answer", *name), 10))
        return [replace(answer, reasoning=reasoning), Message(role="user", content=result)]
    arguments = json.dumps({"q": words(("q", *name), 4), "n": step})
    call = ToolCall(call_id=f"call_{agent}{step}", name=f"tool_{step % 4}", arguments=arguments)
    return [
        Message(
            role="assistant",
            content=words(("say", *name), 6),
            reasoning=reasoning,
            tool_calls=(call,),
        ),
        Message(role="tool", content=result, tool_call_id=call.call_id),
    ]


def each(trace: Trace, change: Callable[[int, Conversation], Conversation]) -> list[Conversation]:
    return [change(number, conversation) for number, conversation in enumerate(trace)]


def with_message(
    conversation: Conversation, index: int, change: Callable[[Message], Message]
) -> Conversation:
    messages = list(conversation.messages)
    messages[index] = change(messages[index])
    return replace(conversation, messages=tuple(messages))


def with_system(conversation: Conversation, value: str) -> Conversation:
    """``value`` in the middle of the system message."""
    half = len(words("system", 30))
    return with_message(
        conversation,
        0,
        lambda m: replace(m, content=f"{m.content[:half]} Now: {value}. {m.content[half:]}"),
    )


def encoded(recipe: Recipe, trace: Trace) -> list[EncodedPrompt]:
    return [recipe.encode(conversation) for conversation in trace]


def recorded(
    recipe: Recipe, trace: Trace, *, tenant: str = "t", key: bytes = b"k" * 32
) -> list[RequestRecord]:
    maker = RecordMaker(key, tenant)
    return [
        maker.record(
            recipe.encode(conversation),
            conversation,
            time_s=float(number),
            model="m",
            dialect="chat",
        )
        for number, conversation in enumerate(trace)
    ]


def num_computed(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens that a cache which keeps every prompt, to the token, has to compute."""
    kept: set[int] = set()
    computed = 0
    for tokens in prompts:
        chain, num_hit_tokens, is_hit = 0, 0, True
        for position, token in enumerate(tokens):
            chain = hash((chain, position, token))
            is_hit = is_hit and chain in kept
            num_hit_tokens += is_hit
            kept.add(chain)
        computed += len(tokens) - min(num_hit_tokens, len(tokens) - 1)
    return computed
