"""The official OpenAI client against the real app: sync and async, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from api_server import MODEL_ID, Served, say, say_then_raise, serving
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from headwater.api.config import ApiConfig, ApiKey
from headwater.core.errors import EngineFault, Overloaded

SECRET = "sk-test"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ApiConfig(keys=(ApiKey("t", SECRET),), keepalive_s=0.05)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key=SECRET, max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key=SECRET, max_retries=0) as made:
        yield made


MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def test_chat(served: Served, client: OpenAI) -> None:
    served.generator.play(say("hello 😀", hit=3))
    answer = client.chat.completions.create(
        model=MODEL_ID, messages=MESSAGES, temperature=0, max_tokens=100
    )
    assert answer.choices[0].message.content == "hello 😀"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_a07_chat_stream_parses_the_same_with_keepalives_between(
    served: Served, client: OpenAI
) -> None:
    served.generator.play(say("hello 😀", delay_s=0.06, step_tokens=5))
    stream = client.chat.completions.create(
        model=MODEL_ID,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello 😀"
    assert [c.usage is not None for c in chunks].count(True) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_the_clients_stream_helper_puts_the_message_together(
    served: Served, client: OpenAI
) -> None:
    served.generator.play(say("abc"))
    with client.chat.completions.stream(model=MODEL_ID, messages=MESSAGES) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "abc"


def test_completions_with_ids_and_logprobs(served: Served, client: OpenAI) -> None:
    served.generator.play(say("xyz"))
    answer = client.completions.create(model=MODEL_ID, prompt=[97, 98], logprobs=2, echo=True)
    assert answer.choices[0].text == "abxyz"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]
    stream = client.completions.create(model=MODEL_ID, prompt="ab", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "xyz"


def test_fields_beyond_openais_go_through_extra_body(served: Served, client: OpenAI) -> None:
    served.generator.play(say("xyz"))
    client.chat.completions.create(
        model=MODEL_ID, messages=MESSAGES, extra_body={"top_k": 4, "min_p": 0.1}
    )
    assert served.generator.requests[0].sampling.top_k == 4


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_ID]
    assert client.models.retrieve(MODEL_ID).owned_by == "headwater"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_become_the_clients_own_exceptions(served: Served, client: OpenAI) -> None:
    served.generator.play(say("x"))

    def ask(content: str = "hi", temperature: float = 1) -> None:
        client.chat.completions.create(
            model=MODEL_ID,
            messages=[{"role": "user", "content": content}],
            temperature=temperature,
        )

    with pytest.raises(openai.BadRequestError) as bad:
        ask(temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="prompt is too long") as long:
        ask("x" * 500)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    served.generator.play(say_then_raise("", Overloaded("full", retry_after_s=1)))
    with pytest.raises(openai.RateLimitError):
        ask()
    served.generator.play(say_then_raise("", EngineFault("x")))
    with pytest.raises(openai.InternalServerError):
        ask()


def test_a20_the_client_raises_when_a_stream_fails_midway(served: Served, client: OpenAI) -> None:
    served.generator.play(say_then_raise("abc", EngineFault("x")))
    stream = client.chat.completions.create(model=MODEL_ID, messages=MESSAGES, stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="engine failed"):
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(texts) == "abc"


async def test_async_chat_and_stream(served: Served, async_client: AsyncOpenAI) -> None:
    served.generator.play(say("hello"))
    answer = await async_client.chat.completions.create(model=MODEL_ID, messages=MESSAGES)
    assert answer.choices[0].message.content == "hello"
    stream = await async_client.chat.completions.create(
        model=MODEL_ID, messages=MESSAGES, stream=True
    )
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    assert text == "hello"


async def test_async_completions(served: Served, async_client: AsyncOpenAI) -> None:
    served.generator.play(say("hello"))
    stream = await async_client.completions.create(model=MODEL_ID, prompt="x", stream=True, n=2)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["hello", "hello"]
