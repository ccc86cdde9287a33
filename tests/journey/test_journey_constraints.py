"""Output constraints from end to end: real schedulers and engines, then a real server.

The toy model has random weights: whatever is valid in its output is the constraint's work.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from journey_server import Served, serving
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from openai.types.shared_params import ResponseFormatJSONSchema

from headwater.app.assemble import WorkerParts, build_worker
from headwater.app.groups import CacheSettings, EngineSettings, ModelSettings
from headwater.app.settings import Settings
from headwater.core.constraint import Constraint
from headwater.core.request import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from headwater.recipe.tokenizer_byte import IM_END_ID

LIMIT_S = 60.0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
SCHEMA = Constraint("json_schema", json.dumps(PERSON))


class Clock:
    def now_s(self) -> float:
        return time.monotonic()


def build(*, num_blocks: int = 256, context_tokens: int = 1024) -> WorkerParts:
    settings = Settings(
        model=ModelSettings(model="toy", numerics="reference", context_tokens=context_tokens),
        engine=EngineSettings(
            threads=1, block_tokens=16, num_blocks=num_blocks, max_running=32,
            max_step_tokens=512, max_mixed_prefill_tokens=128,
        ),
        cache=CacheSettings(cache_dir=None),
    )  # fmt: skip
    return build_worker(settings, Clock())


def request(
    name: str,
    constraint: Constraint | None,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    num_choices: int = 1,
    max_output_tokens: int = 200,
) -> Request:
    draw = random.Random(name)
    return Request(
        request_id=RequestId(name),
        prompt_tokens=tuple(draw.randrange(256) for _ in range(40)),
        num_choices=num_choices,
        sampling=SamplingParams(temperature=temperature, seed=seed),
        stop=StopParams(max_output_tokens=max_output_tokens, end_token_ids=frozenset({IM_END_ID})),
        constraint=constraint,
    )


class Outcome:
    """What one choice wrote, and how it ended."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.last: SequenceOutput | None = None

    @property
    def finish(self) -> FinishReason | None:
        assert self.last is not None
        return self.last.finish

    @property
    def text(self) -> str:
        return bytes(self.ids).decode()


def run(parts: WorkerParts, requests: Sequence[Request]) -> dict[tuple[str, int], Outcome]:
    scheduler, engine = parts.scheduler, parts.engine
    for asked in requests:
        scheduler.submit(asked)
    outcomes: dict[tuple[str, int], Outcome] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while scheduler.has_work or scheduler.is_awaiting:
        assert time.monotonic() < deadline_s
        outputs = scheduler.take_ready()
        plan = scheduler.plan()
        if plan is not None:
            outputs += scheduler.apply(plan, engine.run(plan))
        for output in outputs:
            outcome = outcomes.setdefault((output.request_id, output.index), Outcome())
            outcome.ids += [token.token_id for token in output.tokens]
            outcome.last = output
        scheduler.audit()
    assert scheduler.load().num_held_blocks == 0
    return outcomes


def check_person(outcome: Outcome) -> None:
    """Valid, and nothing behind it; or cut, and then the beginning of something valid."""
    if outcome.finish is FinishReason.LENGTH:
        assert outcome.text.lstrip().startswith("{")
        return
    assert outcome.finish is FinishReason.STOP
    person = json.loads(outcome.text)
    assert outcome.text.endswith("}")
    assert {"name", "kind"} <= person.keys() <= {"name", "kind", "legs"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 12
    assert person["kind"] in ("cat", "dog")
    assert all(0 <= leg <= 9 for leg in person.get("legs", []))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a25_random_weights_write_valid_json_or_are_cut(temperature: float) -> None:
    asked = [
        request(f"p{i}", SCHEMA, seed=i, temperature=temperature, num_choices=1 + i % 2)
        for i in range(12)
    ]
    outcomes = run(build(), asked)
    assert len(outcomes) == 18
    for outcome in outcomes.values():
        check_person(outcome)
    ends = [outcome.finish for outcome in outcomes.values()]
    assert ends.count(FinishReason.STOP) >= len(ends) // 2
    if temperature:
        assert outcomes["p1", 0].ids != outcomes["p1", 1].ids


def test_every_kind_of_constraint_works_beside_free_requests() -> None:
    asked = [
        request("regex", Constraint("regex", "[a-z]{3,9}")),
        request("lark", Constraint("lark", 'start: WORD ("-" WORD)+\nWORD: /[ab]{2}/')),
        request("object", Constraint("json_object"), max_output_tokens=60),
        request("bad", Constraint("regex", "(((")),
        request("free", None, max_output_tokens=20),
    ]
    outcomes = run(build(), asked)
    assert outcomes["regex", 0].text.isalpha()
    assert re.match(r"[ab]{2}(-[ab]{2})*-?[ab]?$", outcomes["lark", 0].text)
    if outcomes["object", 0].finish is FinishReason.STOP:
        assert isinstance(json.loads(outcomes["object", 0].text), dict)
    assert outcomes["bad", 0].finish is FinishReason.FAILED
    assert len(outcomes["free", 0].ids) == 20
    alone = run(build(), [asked[-1]])
    assert alone["free", 0].ids == outcomes["free", 0].ids


def test_constrained_outputs_are_the_same_alone_in_a_crowd_and_after_preemption() -> None:
    asked = [request(f"q{i}", SCHEMA, seed=i) for i in range(6)]
    crowd = run(build(), asked)
    tight = build(num_blocks=16, context_tokens=256)
    preempted = run(tight, asked)
    assert tight.scheduler.load().num_preemptions > 0
    for index, one in enumerate(asked):
        ids = crowd[f"q{index}", 0].ids
        assert preempted[f"q{index}", 0].ids == ids
        if index < 2:
            assert run(build(), [one])[f"q{index}", 0].ids == ids


def test_an_abort_in_the_middle_leaves_nothing() -> None:
    parts = build()
    scheduler = parts.scheduler
    scheduler.submit(request("gone", SCHEMA, num_choices=2))
    deadline_s = time.monotonic() + LIMIT_S
    while not scheduler.load().num_decoding:
        assert time.monotonic() < deadline_s
        scheduler.take_ready()
        plan = scheduler.plan()
        if plan is not None:
            scheduler.apply(plan, parts.engine.run(plan))
    assert len(scheduler.abort(RequestId("gone"))) == 2
    scheduler.audit()
    assert not scheduler.has_work
    check_person(run(parts, [replace(request("next", SCHEMA))])["next", 0])


# A real server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(
        tmp_path_factory.mktemp("constraints"), "--model=smollm2", "--step-budget-ms=none"
    ) as made:
        yield made


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.root}/v1", api_key="none", max_retries=0) as made:
        yield made


CITY: dict[str, object] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "continent": {"enum": ["Asia", "Europe", "Africa"]},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "continent", "is_capital"],
    "additionalProperties": False,
}


def test_a_chat_answer_under_a_schema_is_that_json_streamed_or_not(client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the capital of Japan? Use JSON."}
    ]
    wanted: ResponseFormatJSONSchema = {
        "type": "json_schema",
        "json_schema": {"name": "city", "strict": True, "schema": CITY},
    }
    whole = client.chat.completions.create(
        model="smollm2", messages=messages, response_format=wanted, temperature=0, max_tokens=120
    )
    text = whole.choices[0].message.content
    assert text is not None
    assert whole.choices[0].finish_reason == "stop"
    answer = json.loads(text)
    assert list(answer) == ["city", "continent", "is_capital"]
    assert answer["continent"] in ("Asia", "Europe", "Africa")
    stream = client.chat.completions.create(
        model="smollm2", messages=messages, response_format=wanted, temperature=0,
        max_tokens=120, stream=True,
    )  # fmt: skip
    streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert streamed == text


def test_i03_a_bad_schema_is_a_400_and_the_next_request_is_served(served: Served) -> None:
    def ask(response_format: object) -> tuple[int, dict[str, object]]:
        return served.post(
            "/v1/chat/completions",
            {
                "model": "smollm2",
                "messages": [{"role": "user", "content": "Give me a JSON object."}],
                "response_format": response_format,
                "max_tokens": 60,
                "temperature": 0,
            },
        )

    bad: list[object] = [{"type": "objekt"}, {"pattern": "((("}, {"multipleOf": 99_999_999}]
    for schema in bad:
        status, body = ask({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        error = body["error"]
        assert isinstance(error, dict)
        assert (status, error["code"]) == (400, "invalid_json_schema")
        assert "response_format" in error["param"]
    status, body = ask({"type": "json_object"})
    assert status == 200
    choices = body["choices"]
    assert isinstance(choices, list)
    if choices[0]["finish_reason"] == "stop":
        assert isinstance(json.loads(choices[0]["message"]["content"]), dict)
    served.wait_until("free blocks", lambda: served.num_held_blocks == 0)
    assert served.metric("headwater_cached_grammars") >= 1
