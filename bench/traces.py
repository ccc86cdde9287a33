"""Agent traces made from real text: several agents, one system prompt, many short steps.

    agent 0   sys tools task0 | call result | call result | ...
    agent 1   sys tools task1 | call result | ...
    agent 3   = agent 0 up to a step, then other results (a fork)

The text is Python's own reference (`pydoc_data`, on every installation), cut by a
seed, so a trace is the same on every machine with that Python. Answers are scripted:
a request's history never depends on what a model said. Pure; used by `bench/cache.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pydoc_data.topics import topics
from typing import Final

from headwater.core.randomness import keyed_bits
from headwater.recipe.conversation import Conversation, Message, Tool, ToolCall

WORDS_PER_TOKEN: Final = 0.55  # of this text, in common vocabularies
SYSTEM_WORDS: Final = 420
CALL_WORDS: Final = 12

_TOOL_WORDS: Final = (
    ("read_topic", "Read a page of the language reference.", ("topic", "offset", "limit")),
    ("search_topics", "Find pages that mention a phrase.", ("phrase", "max_results")),
    ("run_code", "Run a short program and return what it printed.", ("source", "timeout_s")),
    ("write_note", "Keep a note for later steps.", ("title", "text")),
    ("list_notes", "List the titles of all notes.", ("prefix",)),
    ("finish", "Give the final answer and stop.", ("answer",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """``num_agents`` agents make ``num_steps`` requests each, the last one of about
    ``num_tokens``; the last ``num_forks`` of them leave an earlier agent's path half way."""

    num_agents: int = 4
    num_forks: int = 1
    num_steps: int = 60
    num_tokens: int = 6000
    seed: int = 0

    @property
    def result_words(self) -> int:
        """Words of one tool result."""
        words = self.num_tokens * WORDS_PER_TOKEN - SYSTEM_WORDS - 120
        return max(8, int(words / self.num_steps) - CALL_WORDS - 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One call of one agent."""

    agent: int
    step: int
    conversation: Conversation


def agent_requests(options: TraceOptions) -> Iterator[AgentRequest]:
    """All requests in sending order: the agents take turns."""
    messages = {agent: [*_opening(options, agent)] for agent in range(options.num_agents)}
    for step in range(options.num_steps):
        for agent, history in messages.items():
            source = _source(options, agent, step)
            if step:
                history += _step(options, source, step)
            yield AgentRequest(
                agent=agent,
                step=step,
                conversation=Conversation(messages=tuple(history), tools=_tools()),
            )


def without_tools(conversation: Conversation) -> Conversation:
    """The same words for a format that has no tools: definitions in the system text, calls in
    the assistant's, results as the user's."""
    described = "\n".join(
        json.dumps({"name": t.name, "description": t.description, "parameters": t.parameters})
        for t in conversation.tools
    )
    messages: list[Message] = []
    for message in conversation.messages:
        match message.role:
            case "system":
                content = f"{message.content}\n\nTools:\n{described}"
                messages.append(replace(message, content=content))
            case "assistant":
                calls = "\n".join(f"{c.name} {c.arguments}" for c in message.tool_calls)
                messages.append(Message(role="assistant", content=f"{message.content}\n{calls}"))
            case "tool":
                messages.append(Message(role="user", content=f"Result:\n{message.content}"))
            case "user":
                messages.append(message)
    return Conversation(messages=tuple(messages))


def plain_text(conversation: Conversation) -> str:
    """All of it as one text, for a model without a template; a longer history extends it."""
    return "".join(
        f"{message.role}: {message.content}\n\n" for message in without_tools(conversation).messages
    )


def _opening(options: TraceOptions, agent: int) -> tuple[Message, Message]:
    system = _words(options.seed, "system", SYSTEM_WORDS)
    source = _source(options, agent, 0)
    task = f"Task {source}: explain this. {_words(options.seed, f'task {source}', 40)}"
    return (
        Message(role="system", content=f"You look things up and answer briefly. {system}"),
        Message(role="user", content=task),
    )


def _source(options: TraceOptions, agent: int, step: int) -> int:
    """Whose path ``agent`` is on: a fork follows another agent for half of the steps."""
    first_fork = options.num_agents - options.num_forks
    if agent >= first_fork > 0 and step < options.num_steps // 2:
        return (agent - first_fork) % first_fork
    return agent


def _step(options: TraceOptions, source: int, step: int) -> tuple[Message, Message]:
    name = f"step {source}.{step}"
    tool, _, parameters = _TOOL_WORDS[keyed_bits(options.seed, step, name) % len(_TOOL_WORDS)]
    arguments = json.dumps({parameters[0]: _words(options.seed, f"{name} call", CALL_WORDS // 2)})
    call = ToolCall(call_id=f"call_{source:02}{step:06}", name=tool, arguments=arguments)
    thought = _words(options.seed, f"{name} thought", CALL_WORDS // 2)
    result = _words(options.seed, f"{name} result", options.result_words)
    return (
        Message(role="assistant", content=thought, tool_calls=(call,)),
        Message(role="tool", content=result, tool_call_id=call.call_id),
    )


def _tools() -> tuple[Tool, ...]:
    return tuple(
        Tool(
            name=name,
            description=description,
            parameters=json.dumps(
                {
                    "type": "object",
                    "properties": {
                        p: {"type": "string", "description": f"The {p.replace('_', ' ')}."}
                        for p in parameters
                    },
                    "required": [parameters[0]],
                },
                separators=(",", ":"),
            ),
        )
        for name, description, parameters in _TOOL_WORDS
    )


def _words(seed: int, purpose: str, num_words: int) -> str:
    """A passage of the reference, found by the seed."""
    words = _reference()
    start = keyed_bits(seed, num_words, purpose) % (len(words) - num_words)
    return " ".join(words[start : start + num_words])


@cache
def _reference() -> Sequence[str]:
    return " ".join(topics[name] for name in sorted(topics)).split()
