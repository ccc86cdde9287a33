"""The official OpenAI client: Responses, and chat with tools, reasoning and schemas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from api_server import MODEL_ID, Served, say, say_then_raise
from api_talk import talking, write
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam, ResponseInputParam
from openai.types.shared_params import Reasoning
from pydantic import BaseModel

from headwater.api.config import ApiConfig, ApiKey
from headwater.core.errors import EngineFault

SECRET = "sk-test"
CALL = '<call weather>{"city": "Oslo"}</call>'
SCHEMA: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": SCHEMA},
}
TOOL: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": SCHEMA,
    "strict": False,
}


class City(BaseModel):
    city: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with talking(ApiConfig(keys=(ApiKey("t", SECRET),), keepalive_s=0.02)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key=SECRET, max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=SECRET, max_retries=0) as made:
        yield made


# ------------------------------------------------------------------ Responses


def test_a_response(served: Served, client: OpenAI) -> None:
    served.generator.play(write("hello 😀", hit=3))
    answer = client.responses.create(
        model=MODEL_ID, input="hi", instructions="be kind", store=False, max_output_tokens=99
    )
    assert answer.output_text == "hello 😀"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 3


def test_a_response_with_calls_and_their_way_back(served: Served, client: OpenAI) -> None:
    served.generator.play(write(f"<think>hm</think>I look.{CALL}"))
    items: ResponseInputParam = [{"role": "user", "content": "hi"}]
    answer = client.responses.create(
        model=MODEL_ID, input=items, tools=[TOOL], tool_choice="required"
    )
    reasoning, message, call = answer.output
    assert reasoning.type == "reasoning"
    assert message.type == "message"
    assert call.type == "function_call"
    assert call.arguments == '{"city": "Oslo"}'
    back = [item.model_dump(exclude_none=True) for item in answer.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    served.generator.play(write("Sunny."))
    client.responses.create(
        model=MODEL_ID,
        input=[*items, *back, result],  # type: ignore[list-item]
        tools=[TOOL],
    )
    prompt = bytes(t for t in served.generator.requests[0].prompt_tokens if t < 256).decode()
    assert f"<think>hm</think>I look.{CALL}" in prompt
    assert "tool:sunny" in prompt


@pytest.mark.parametrize("reasoning", [Reasoning(effort="low"), Reasoning(summary="auto")])
def test_a21_a_streamed_response_is_put_together_by_the_client(
    served: Served, client: OpenAI, reasoning: Reasoning
) -> None:
    served.generator.play(write(f"<think>hm</think>First.{CALL}\n{CALL}\nDone."))
    with client.responses.stream(
        model=MODEL_ID,
        input="hi",
        tools=[TOOL],
        reasoning=reasoning,
    ) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert seen[:2] == ["response.created", "response.in_progress"]
    assert seen[-1] == "response.completed"
    kinds = [item.type for item in final.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    assert final.output_text == "First.\nDone."
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens >= 2


def test_a_schema_is_parsed_by_the_client(served: Served, client: OpenAI) -> None:
    served.generator.play(write('{"city": "Oslo"}'))
    answer = client.responses.parse(model=MODEL_ID, input="where", text_format=City)
    assert answer.output_parsed == City(city="Oslo")
    constraint = served.generator.requests[0].constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"


def test_a07_keepalives_change_nothing(served: Served, client: OpenAI) -> None:
    served.generator.play(say("hello 😀", delay_s=0.05, step_tokens=4))
    with client.responses.stream(model=MODEL_ID, input="hi") as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == "hello 😀"


def test_a20_a_response_that_fails_midway_ends_with_a_failed_event(
    served: Served, client: OpenAI
) -> None:
    served.generator.play(say_then_raise("abc", EngineFault("x")))
    events = list(client.responses.create(model=MODEL_ID, input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None


def test_refusals_become_the_clients_own_exceptions(served: Served, client: OpenAI) -> None:
    served.generator.play(write("ok"))
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=MODEL_ID, input="hi", previous_response_id="resp_x")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=MODEL_ID, input="hi", tools=[{"type": "computer"}])
    assert bad.value.param == "tools[0].type"


async def test_async_responses(served: Served, async_client: AsyncOpenAI) -> None:
    served.generator.play(write(f"hello{CALL}"))
    answer = await async_client.responses.create(model=MODEL_ID, input="hi", tools=[TOOL])
    assert [item.type for item in answer.output] == ["message", "function_call"]
    stream = await async_client.responses.create(
        model=MODEL_ID, input="hi", tools=[TOOL], stream=True
    )
    last = [event async for event in stream][-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["message", "function_call"]


# ------------------------------------------------------------------ Chat Completions


MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def test_chat_with_calls_and_their_way_back(served: Served, client: OpenAI) -> None:
    served.generator.play(write(f"I look.{CALL}{CALL}"))
    answer = client.chat.completions.create(
        model=MODEL_ID, messages=MESSAGES, tools=[CHAT_TOOL], parallel_tool_calls=True
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.type == "function"
    assert first.function.arguments == '{"city": "Oslo"}'
    results: list[ChatCompletionMessageParam] = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in (first, second)
    ]
    served.generator.play(write("Sunny."))
    back: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        choice.message.to_dict(),  # type: ignore[list-item]
        *results,
    ]
    client.chat.completions.create(model=MODEL_ID, messages=back, tools=[CHAT_TOOL])
    prompt = bytes(t for t in served.generator.requests[0].prompt_tokens if t < 256).decode()
    assert f"I look.{CALL}{CALL}" in prompt


def test_a_chat_stream_with_reasoning_and_calls_is_put_together_by_the_client(
    served: Served, client: OpenAI
) -> None:
    served.generator.play(write(f"<think>hm</think>I look.{CALL}{CALL}"))
    with client.chat.completions.stream(
        model=MODEL_ID, messages=MESSAGES, tools=[CHAT_TOOL], reasoning_effort="low"
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "I look."
    assert final.message.tool_calls is not None
    assert [c.function.arguments for c in final.message.tool_calls] == ['{"city": "Oslo"}'] * 2


def test_a_chat_schema_is_parsed_by_the_client(served: Served, client: OpenAI) -> None:
    served.generator.play(write('{"city": "Oslo"}'))
    answer = client.chat.completions.parse(model=MODEL_ID, messages=MESSAGES, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Oslo")


async def test_async_chat_with_calls(served: Served, async_client: AsyncOpenAI) -> None:
    served.generator.play(write(CALL))
    stream = await async_client.chat.completions.create(
        model=MODEL_ID, messages=MESSAGES, tools=[CHAT_TOOL], tool_choice="required", stream=True
    )
    arguments, reasons = "", []
    async for chunk in stream:
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or ():
            arguments += (call.function and call.function.arguments) or ""
        reasons.append(choice.finish_reason)
    assert arguments == '{"city": "Oslo"}'
    assert reasons[-1] == "tool_calls"
