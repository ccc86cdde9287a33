"""The official Anthropic client against the real app: sync and async, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam
from api_server import MODEL_ID, Served, say, say_then_raise
from api_talk import talking, write

from headwater.api.config import ApiConfig, ApiKey
from headwater.core.errors import EngineFault, Overloaded

SECRET = "sk-test"
CALL = '<call weather>{"city": "Oslo"}</call>'
MESSAGES: list[MessageParam] = [{"role": "user", "content": "hi"}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with talking(ApiConfig(keys=(ApiKey("t", SECRET),), keepalive_s=0.02)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key=SECRET, max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=served.url, api_key=SECRET, max_retries=0) as made:
        yield made


def test_a_message(served: Served, client: Anthropic) -> None:
    served.generator.play(write("hello 😀", hit=3))
    message = client.messages.create(
        model=MODEL_ID,
        max_tokens=100,
        system="be kind",
        messages=MESSAGES,
        extra_body={"temperature": 0},
    )
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "hello 😀"
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 3


def test_tools_thinking_and_their_way_back(served: Served, client: Anthropic) -> None:
    served.generator.play(write(f"<think>hm</think>I look.{CALL}"))
    messages = [*MESSAGES]
    message = client.messages.create(
        model=MODEL_ID,
        max_tokens=2000,
        messages=messages,
        tools=[WEATHER],
        tool_choice={"type": "any"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    thinking, text, call = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "hm"
    assert text.type == "text"
    assert call.type == "tool_use"
    assert call.input == {"city": "Oslo"}
    assert message.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": message.content})
    result: ToolResultBlockParam = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": "sunny",
    }
    messages.append({"role": "user", "content": [result]})
    served.generator.play(write("Sunny."))
    client.messages.create(model=MODEL_ID, max_tokens=100, messages=messages, tools=[WEATHER])
    prompt = bytes(t for t in served.generator.requests[0].prompt_tokens if t < 256).decode()
    assert f"<think>hm</think>I look.{CALL}" in prompt
    assert "tool:sunny" in prompt


def test_a02_a_streamed_message_is_put_together_by_the_client(
    served: Served, client: Anthropic
) -> None:
    served.generator.play(write(f"<think>hm</think>First.{CALL}\n{CALL}\nDone."))
    with client.messages.stream(
        model=MODEL_ID, max_tokens=2000, messages=MESSAGES, tools=[WEATHER]
    ) as stream:
        seen = [event.type for event in stream]
        message = stream.get_final_message()
    assert seen[0] == "message_start"
    assert seen[-1] == "message_stop"
    assert {"thinking", "text", "input_json", "signature"} <= set(seen)
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use", "text"]
    call = message.content[2]
    assert call.type == "tool_use"
    assert call.input == {"city": "Oslo"}
    assert message.stop_reason == "tool_use"
    total = served.generator.requests[0].num_prompt_tokens
    assert message.usage.input_tokens == total
    assert message.usage.output_tokens > 10


def test_a07_pings_and_comments_change_nothing(served: Served, client: Anthropic) -> None:
    served.generator.play(say("hello 😀", delay_s=0.05, step_tokens=4))
    with client.messages.stream(model=MODEL_ID, max_tokens=99, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == "hello 😀"


def test_a04_the_stop_sequence_is_told(served: Served, client: Anthropic) -> None:
    served.generator.play(write("abc@@END"))
    raw = client.messages.create(
        model=MODEL_ID, max_tokens=99, messages=MESSAGES, stop_sequences=["@@END"], stream=True
    )
    (delta,) = [event for event in raw if event.type == "message_delta"]
    assert delta.delta.stop_reason == "stop_sequence"
    assert delta.delta.stop_sequence == "@@END"


def test_a01_counting_tokens(served: Served, client: Anthropic) -> None:
    served.generator.play(write("ok"))
    counted = client.messages.count_tokens(
        model=MODEL_ID, messages=MESSAGES, system="be kind", tools=[WEATHER]
    )
    client.messages.create(
        model=MODEL_ID, max_tokens=9, messages=MESSAGES, system="be kind", tools=[WEATHER]
    )
    assert counted.input_tokens == served.generator.requests[0].num_prompt_tokens


def test_an_output_schema_is_taken(served: Served, client: Anthropic) -> None:
    served.generator.play(write('{"a": 1}'))
    client.messages.create(
        model=MODEL_ID,
        max_tokens=99,
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert served.generator.requests[0].constraint is not None


def test_models_are_listed(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == (MODEL_ID, MODEL_ID, "model")


def test_errors_become_the_clients_own_exceptions(served: Served, client: Anthropic) -> None:
    def ask(content: str = "hi") -> None:
        client.messages.create(
            model=MODEL_ID, max_tokens=9, messages=[{"role": "user", "content": content}]
        )

    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask("x" * 9000)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=9, messages=MESSAGES)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(
            model=MODEL_ID, max_tokens=9, messages=MESSAGES
        )
    served.generator.play(say_then_raise("", Overloaded("full", retry_after_s=1)))
    with pytest.raises(anthropic.RateLimitError):
        ask()
    served.generator.play(say_then_raise("", EngineFault("x")))
    with pytest.raises(anthropic.InternalServerError):
        ask()


def test_a20_the_client_raises_when_a_stream_fails_midway(
    served: Served, client: Anthropic
) -> None:
    served.generator.play(say_then_raise("abc", EngineFault("x")))
    with (
        pytest.raises(anthropic.APIStatusError, match="engine failed"),
        client.messages.stream(model=MODEL_ID, max_tokens=9, messages=MESSAGES) as stream,
    ):
        stream.until_done()


async def test_async_message_and_stream(served: Served, async_client: AsyncAnthropic) -> None:
    served.generator.play(write(f"<think>hm</think>hello{CALL}"))
    message = await async_client.messages.create(
        model=MODEL_ID, max_tokens=99, messages=MESSAGES, tools=[WEATHER]
    )
    async with async_client.messages.stream(
        model=MODEL_ID, max_tokens=99, messages=MESSAGES, tools=[WEATHER]
    ) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_message()
    kinds = [block.type for block in message.content]
    assert kinds == [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert message.usage.output_tokens == streamed.usage.output_tokens
    counted = await async_client.messages.count_tokens(model=MODEL_ID, messages=MESSAGES)
    assert counted.input_tokens > 0


async def test_async_beta_messages_go_the_same_way(
    served: Served, async_client: AsyncAnthropic
) -> None:
    """The client sends ``?beta=true`` and an ``anthropic-beta`` header."""
    served.generator.play(write("hello"))
    message = await async_client.beta.messages.create(
        model=MODEL_ID, max_tokens=99, messages=[{"role": "user", "content": "x"}], betas=["a-2099"]
    )
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "hello"
