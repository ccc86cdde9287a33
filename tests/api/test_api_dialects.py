"""One conversation, three dialects: the same ids in, the same turn out, however it was cut."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from api_server import ScriptedGenerator, Served, SteadyClock, chunks_of, wait_until
from api_talk import (
    TALK_INFO,
    TalkRecipe,
    check_constraint,
    events_of,
    talk_generator,
    talking,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_api_messages import assembled
from test_api_tools import streamed_message

from headwater.api.admission import build_requests
from headwater.api.anthropic.messages import MessagesDialect
from headwater.api.calls import CallFacts, Dialect
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing
from headwater.api.decode import UnknownNames
from headwater.api.generation import Generation
from headwater.api.metrics import Metrics
from headwater.api.observe import CallRecord
from headwater.api.openai.chat import ChatDialect
from headwater.api.openai.responses import ResponsesDialect
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.load import load_recipe
from headwater.recipe.recipe import Recipe

SCHEMA: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}}

# ------------------------------------------------------------------ B03: the same ids


class Client(Protocol):
    """Sends one conversation, turn by turn, and keeps what comes back as its dialect does."""

    def ask(self, text: str) -> None: ...
    def result(self, number: int, text: str) -> None: ...
    def send(self, served: Served) -> None: ...


class ChatClient:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}]
        self._calls: list[dict[str, Any]] = []

    def ask(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def result(self, number: int, text: str) -> None:
        call_id = self._calls[number]["id"]
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def send(self, served: Served) -> None:
        tool = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
        tools = [{"type": "function", "function": tool}]
        answer = served.chat(messages=self._messages, tools=tools)
        message = answer.json()["choices"][0]["message"]
        self._messages.append(message)
        self._calls = message.get("tool_calls", [])


class ResponsesClient:
    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []

    def ask(self, text: str) -> None:
        part = {"type": "input_text", "text": text}
        self._items.append({"type": "message", "role": "user", "content": [part]})

    def result(self, number: int, text: str) -> None:
        call_id = self._calls[number]["call_id"]
        item = {"type": "function_call_output", "call_id": call_id, "output": text}
        self._items.append(item)

    def send(self, served: Served) -> None:
        tool = {"type": "function", "name": "weather", "description": "of a city"}
        answer = served.respond(
            self._items, instructions="be kind", tools=[tool | {"parameters": SCHEMA}]
        )
        output = answer.json()["output"]
        self._items += output
        self._calls = [item for item in output if item["type"] == "function_call"]


class MessagesClient:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._results: list[dict[str, Any]] = []

    def ask(self, text: str) -> None:
        block = {"type": "text", "text": text}
        self._messages.append({"role": "user", "content": [*self._results, block]})
        self._results = []

    def result(self, number: int, text: str) -> None:
        call_id = self._calls[number]["id"]
        self._results.append({"type": "tool_result", "tool_use_id": call_id, "content": text})

    def send(self, served: Served) -> None:
        if self._results:
            self._messages.append({"role": "user", "content": self._results})
            self._results = []
        tool = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
        system = [{"type": "text", "text": "be kind"}]
        answer = served.message(messages=self._messages, system=system, tools=[tool])
        content = answer.json()["content"]
        self._messages.append({"role": "assistant", "content": content})
        self._calls = [block for block in content if block["type"] == "tool_use"]


CALL = '<call weather>{"city": "Ålesund", "days": [1, 2.5], "deep": {"b": null, "a": true}}</call>'
# What is asked, and what the model writes: text, calls, reasoning, or all of it.
TURNS = [
    ("hello", "Hi there."),
    ("think", "<think>Hm, why?</think>Because."),
    ("weather?", f"<think>I need the tool.</think>I look.{CALL}"),
    (["sunny"], "It is sunny."),
    ("twice", f"{CALL}\n{CALL}\n"),
    (["sunny", "rain"], f"One more.{CALL}Wait."),
    (["fog"], "Fog.\n\n  Indented."),
    ("emoji 😀", "<think>漢字</think>😀 ok"),
    ("empty", ""),
    ("bye", "Bye."),
]


def hermes_recipe() -> Recipe:
    """A real recipe: a chat template of the Hermes family, on bytes."""
    template = Path(__file__).parents[1] / "clients" / "hermes.jinja"
    return load_recipe(
        TokenizerSource(
            kind="byte",
            vocab_size=TALK_INFO.vocab_size,
            chat_template=template.read_text(encoding="utf-8"),
        )
    )


def hermes_output(text: str) -> str:
    """``text`` as a model of that family writes it."""
    call = r'<tool_call>\n{"name": "\1", "arguments": \2}\n</tool_call>'
    return re.sub(r"<call (\w+)>(.*?)</call>", call, text)


@pytest.mark.parametrize(
    ("make_recipe", "output"), [(TalkRecipe, str), (hermes_recipe, hermes_output)]
)
def test_b03_ten_turns_give_the_same_ids_through_all_three_dialects(
    make_recipe: Callable[[], Recipe], output: Callable[[str], str]
) -> None:
    clients: list[Client] = [ChatClient(), ResponsesClient(), MessagesClient()]
    with talking(recipe=make_recipe()) as served:
        for asked, text in TURNS:
            prompts = []
            for client in clients:
                if isinstance(asked, str):
                    client.ask(asked)
                else:
                    for number, result in enumerate(asked):
                        client.result(number, result)
                served.generator.play(write(output(text)))
                client.send(served)
                prompts.append(served.generator.requests[0].prompt_tokens)
            assert prompts[0] == prompts[1], asked
            assert prompts[0] == prompts[2], asked


def test_b03_a_pre_rendered_prompt_has_the_same_begin(recipe: TalkRecipe) -> None:
    """One begin token at most, on every path: this tokenizer has none."""
    assert recipe.encode_completion("x").tokens == (ord("x"),)


@pytest.fixture
def recipe() -> TalkRecipe:
    return TalkRecipe()


# ------------------------------------------------------------------ K02: one ledger


@pytest.mark.parametrize("stream", [False, True])
def test_k01_k02_every_dialect_and_the_ledger_have_the_same_counts(stream: bool) -> None:
    """A price sheet of 10 a new and 1 a cached token gives one bill."""
    text = "<think>hm</think>yes"
    ledger = ("headwater_prompt_tokens_total", "headwater_output_tokens_total")
    with talking() as served:

        def booked() -> tuple[float, float, float]:
            miss = served.metric(ledger[0], source="miss")
            return miss, served.metric(ledger[0], source="hit"), served.metric(ledger[1])

        bills = []
        for name in ("chat", "respond", "message"):
            before = booked()
            served.generator.play(write(text, hit=16))
            options = {"stream_options": {"include_usage": True}} if name == "chat" else {}
            answer = getattr(served, name)("x" * 40, stream=stream, **options)
            counts = {
                "chat": chat_counts,
                "respond": responses_counts,
                "message": messages_counts,
            }[name](answer.text, stream)
            wait_until(lambda: booked()[2] > before[2], 2)  # noqa: B023 - waited for here
            new, cached, output = (int(b - a) for a, b in zip(before, booked(), strict=True))
            assert counts == (new, cached, output)
            assert (cached, output) == (16, len(text))
            bills.append(10 * new + cached)
        assert len(set(bills)) == 1


Counts = tuple[int, int, int]  # new, cached, output


def chat_counts(text: str, stream: bool) -> Counts:
    usage = chunks_of(text)[-1]["usage"] if stream else json.loads(text)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"] - cached, cached, usage["completion_tokens"]


def responses_counts(text: str, stream: bool) -> Counts:
    usage = (events_of(text)[-1]["response"] if stream else json.loads(text))["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return usage["input_tokens"] - cached, cached, usage["output_tokens"]


def messages_counts(text: str, stream: bool) -> Counts:
    usage = (events_of(text)[-2] if stream else json.loads(text))["usage"]
    return usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]


# ------------------------------------------------------------------ the same turn, any cut


CONFIG = ApiConfig()
CLOCK = SteadyClock()
METRICS = Metrics(ScriptedGenerator())
CHAT_BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "stop": ["END", "ENDING"],
}
RESPONSES_BODY = {"input": "x", "tools": [{"type": "function", "name": "f"}]}
MESSAGES_BODY = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"name": "f", "input_schema": {}}],
    "stop_sequences": ["END", "ENDING"],
}


def played(dialect: Dialect, body: dict[str, Any], text: str, cuts: Sequence[int]) -> bytes:
    """The answer to ``body`` when the model writes ``text`` in steps that end at ``cuts``."""

    async def play() -> bytes:
        facts = CallFacts(call_id=dialect.id_prefix + "0", created_s=0, info=TALK_INFO)
        call = dialect.parse(json.dumps(body).encode(), facts)
        generator = talk_generator()
        generator.script = write(text, cuts)
        requests = build_requests(
            call.ask, TALK_INFO, frozenset(), call_id="c", tenant="", entropy=os.urandom
        )
        generation = Generation(
            generator,
            requests,
            call.open_output,
            metrics=METRICS,
            clock=CLOCK,
            record=CallRecord(arrived_s=0),
        )
        try:
            await generation.start(1.0)
            if not call.stream:
                return await call.whole(generation)
            return b"".join([frame async for frame in call.frames(generation)])
        finally:
            await generation.aclose()

    return asyncio.run(play())


def whole_and_streamed(
    dialect: Dialect, body: dict[str, Any], text: str, cuts: Sequence[int]
) -> tuple[dict[str, Any], str]:
    body = body | {"max_tokens": 4000} if "input" not in body else body
    whole = json.loads(played(dialect, body, text, cuts))
    return whole, played(dialect, body | {"stream": True}, text, cuts).decode()


def dialect_of(kind: type[ChatDialect] | type[MessagesDialect] | type[ResponsesDialect]) -> Dialect:
    # A fresh recipe each time, so that calls have the same ids in every run.
    conversing = Conversing(TalkRecipe(), check_constraint)
    return kind.create(conversing, CONFIG, UnknownNames())


MARKS = ("<think>", "</think>", "<call f>", "</call>", '<call f>{"a": 1}</call>', "<think>x")
WORDS = ("a", "\n", " ", "é", "😀", "END", "EN", "words ", "<", "</", "{}")
PIECES = st.sampled_from(WORDS + MARKS)
OUTPUTS = st.lists(PIECES, max_size=12).map("".join)
CUTS = st.lists(st.integers(1, 120), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(text=OUTPUTS, cuts=CUTS)
def test_chat_gives_one_message_however_the_ids_came_in_steps(text: str, cuts: list[int]) -> None:
    expected = json.loads(played(dialect_of(ChatDialect), CHAT_BODY, text, [10**6]))
    whole, stream = whole_and_streamed(dialect_of(ChatDialect), CHAT_BODY, text, cuts)
    assert anonymous(whole["choices"]) == anonymous(expected["choices"])
    assert whole["usage"] == expected["usage"]
    streamed, reason = streamed_message(chunks_of(stream))
    message = whole["choices"][0]["message"]
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning_content"] == message.get("reasoning_content", "")
    assert anonymous(streamed["tool_calls"]) == anonymous(message.get("tool_calls", []))
    assert reason == whole["choices"][0]["finish_reason"]


@settings(max_examples=60, deadline=None)
@given(text=OUTPUTS, cuts=CUTS)
def test_messages_gives_one_message_however_the_ids_came_in_steps(
    text: str, cuts: list[int]
) -> None:
    expected = json.loads(played(dialect_of(MessagesDialect), MESSAGES_BODY, text, [10**6]))
    whole, stream = whole_and_streamed(dialect_of(MessagesDialect), MESSAGES_BODY, text, cuts)
    assert anonymous(whole) == anonymous(expected)
    streamed = anonymous(assembled(complete(events_of(stream))))
    assert streamed == anonymous(whole)


@settings(max_examples=60, deadline=None)
@given(text=OUTPUTS, cuts=CUTS)
def test_responses_gives_one_output_however_the_ids_came_in_steps(
    text: str, cuts: list[int]
) -> None:
    expected = json.loads(played(dialect_of(ResponsesDialect), RESPONSES_BODY, text, [10**6]))
    whole, stream = whole_and_streamed(dialect_of(ResponsesDialect), RESPONSES_BODY, text, cuts)
    assert anonymous(whole) == anonymous(expected)
    last = events_of(stream)[-1]
    assert anonymous(last["response"]) == anonymous(whole)


def anonymous(value: Any) -> Any:
    """Without the ids that the server makes up."""
    if isinstance(value, dict):
        return {k: anonymous(v) for k, v in value.items() if k not in ("id", "call_id")}
    if isinstance(value, list):
        return [anonymous(item) for item in value]
    return value


def complete(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A call that never ended has no input to read: its pieces are left out, as in a
    whole answer."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_stop" and kept[-1].get("delta", {}).get("partial_json"):
            pieces = [e for e in kept if e.get("index") == event["index"] and "delta" in e]
            text = "".join(e["delta"]["partial_json"] for e in pieces)
            try:
                json.loads(text)
            except ValueError:
                kept = [e for e in kept if e not in pieces]
        kept.append(event)
    return kept
