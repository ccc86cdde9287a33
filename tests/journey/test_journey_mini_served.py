"""headwater-mini as a person meets it: `headwater serve` with nothing said, and the SDKs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from anthropic import Anthropic
from journey_server import Served, serving
from openai import OpenAI
from openai.types.chat import ChatCompletionToolUnionParam

MODEL = "headwater-mini"
GREETING = "Hello!"
LIMIT = 200  # an answer to a greeting ends long before
CITIES = ("Rome", "Paris")
CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
}
SPLIT = ("--prefill=1", "--decode=1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("mini")) as made:
        yield made
        assert "Traceback" not in made.log.read_text()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.root}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_it_is_what_is_served_when_nobody_says_what(served: Served, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert f"serving {MODEL}: ced, bf16 weights" in served.log.read_text()
    status, body = served.get("/v1/models")
    assert status == 200
    [model] = json.loads(body)["data"]
    assert model["capabilities"]["tools"]
    assert model["capabilities"]["thinking"] == "optional"
    assert model["context_tokens"] == 131_072


@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_ends_in_time_and_is_the_same_streamed_and_in_both_dialects(
    served: Served, client: OpenAI, thinking: bool
) -> None:
    wanted = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    whole = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": GREETING}],
        temperature=0,
        max_tokens=LIMIT,
        extra_body=wanted,
    )
    choice = whole.choices[0]
    assert choice.finish_reason == "stop"
    text = choice.message.content
    assert text
    reasoning = getattr(choice.message, "reasoning_content", None)
    assert bool(reasoning) == thinking
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": GREETING}],
        temperature=0,
        max_tokens=LIMIT,
        stream=True,
        extra_body=wanted,
    )
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == text
    assert chunks[-1].finish_reason == "stop"
    body = {"temperature": 0, **wanted}
    if thinking:
        body["thinking"] = {"type": "enabled", "budget_tokens": 8192}
    with Anthropic(base_url=served.root, api_key="none", max_retries=0) as anthropic:
        message = anthropic.messages.create(
            model=MODEL,
            messages=[{"role": "user", "content": GREETING}],
            max_tokens=LIMIT,
            extra_body=body,
        )
        with anthropic.messages.stream(
            model=MODEL,
            messages=[{"role": "user", "content": GREETING}],
            max_tokens=LIMIT,
            extra_body=body,
        ) as events:
            streamed = events.get_final_message()
    assert message.stop_reason == streamed.stop_reason == "end_turn"
    for found in (message, streamed):
        said = {block.type: block for block in found.content}
        assert ("thinking" in said) == thinking
        assert said["text"].type == "text"
        assert said["text"].text == text


def test_a_call_that_is_asked_for_has_a_name_and_arguments_that_can_be_read(
    client: OpenAI,
) -> None:
    tools: list[ChatCompletionToolUnionParam] = [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY},
        }
    ]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=tools,
        tool_choice="required",
        temperature=0,
        max_tokens=LIMIT,
        extra_body={"thinking": {"type": "disabled"}},
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in CITIES
    assert choice.message.tool_calls


def test_it_recalls_what_the_prompt_says_and_calls_a_tool_by_itself(client: OpenAI) -> None:
    """What the weights in the package were trained for, at its easiest."""
    facts = "The code of the red box is 4271. The code of the blue box is 8853. My dog is Rex."
    said = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"{facts} What is the code of the red box?"}],
        temperature=0,
        max_tokens=LIMIT,
        reasoning_effort="none",
    )
    assert "4271" in (said.choices[0].message.content or "")
    parameters = {**CITY, "properties": {"city": {"type": "string"}}}
    called = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather like in Paris?"}],
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "description": "Get the weather in a city.",
                    "parameters": parameters,
                },
            }
        ],
        temperature=0,
        max_tokens=LIMIT,
        reasoning_effort="none",
    )
    [call] = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_an_answer_that_must_be_json_is_json(client: OpenAI) -> None:
    schema: dict[str, object] = {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog"]}, "legs": {"enum": [2, 4]}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name an animal."}],
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        temperature=0,
        max_tokens=LIMIT,
    )
    assert answer.choices[0].finish_reason == "stop"
    found = json.loads(answer.choices[0].message.content or "")
    assert found["animal"] in ("cat", "dog")
    assert found["legs"] in (2, 4)


# Two workers, and a restart


@dataclass(frozen=True, slots=True)
class Said:
    tokens: list[str]
    logprobs: list[float]
    num_hit_tokens: int


def ask(served: Served, prompt: str, salt: str = "") -> Said:
    """``salt``: shares nothing that is kept with other salts."""
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 16,
        "ignore_eos": True, "logprobs": True, "thinking": {"type": "disabled"},
    }  # fmt: skip
    status, answer = served.post("/v1/chat/completions", body | {"cache_salt": salt or None})
    assert status == 200, answer
    choices, usage = answer["choices"], answer["usage"]
    assert isinstance(choices, list)
    assert isinstance(usage, dict)
    entries = choices[0]["logprobs"]["content"]
    assert entries
    return Said(
        [entry["token"] for entry in entries],
        [float(entry["logprob"]) for entry in entries],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def story(name: str, first: int, count: int) -> str:
    return " ".join(f"{name} has {first + number} red boats." for number in range(count))


@pytest.mark.parametrize("decoder_replay", ["on", "off"])
def test_a_split_answers_like_one_worker_from_disk_and_from_what_is_handed_over(
    tmp_path: Path, decoder_replay: str
) -> None:
    flags = ("--numerics=reference", "--num-blocks=128", f"--decoder-replay={decoder_replay}")
    kept = [story("Anna", 3, 40), story("Tom", 50, 60)]
    new = [story("Ida", 7, 12), story("Leo", 9, 50), story("Max", 5, 70)]
    with serving(tmp_path, *flags) as single:
        want = [ask(single, prompt) for prompt in kept]
        want += [ask(single, prompt, "of its own") for prompt in new]
    assert not any(said.num_hit_tokens for said in want)
    with serving(tmp_path, *flags, *SPLIT) as split:
        got = [ask(split, prompt) for prompt in (*kept, *new)]
        pools = json.loads(split.get("/pools")[1])
    held = {worker["role"]: worker["holds"] for worker in pools["workers"]}
    assert held == {"prefill": "early" if decoder_replay == "on" else "all", "decode": "all"}
    # With decoder replay the decode worker computes the last 140 tokens whatever was kept.
    assert all(said.num_hit_tokens > 200 for said in got[: len(kept)])
    assert not any(said.num_hit_tokens for said in got[len(kept) :])
    assert pools["handoffs"]["num_done"] >= 2
    for found, expected in zip(got, want, strict=True):
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
