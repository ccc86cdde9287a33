"""What a Messages body means: blocks and turns as a conversation, switches, sampling."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_server import Served
from api_talk import TalkRecipe, talking, write

from headwater.api.config import ApiConfig
from headwater.core.constraint import Constraint
from headwater.recipe.conversation import Conversation, Thinking, ToolChoice
from headwater.recipe.recipe import Capabilities

WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"b": {}, "a": {}}}}


@pytest.fixture(scope="module")
def recipe() -> TalkRecipe:
    return TalkRecipe()


@pytest.fixture(scope="module")
def served(recipe: TalkRecipe) -> Iterator[Served]:
    with talking(recipe=recipe) as running:
        yield running


def conversation_of(served: Served, recipe: TalkRecipe, **fields: object) -> Conversation:
    served.generator.play(write("ok"))
    answer = served.message(**fields)
    assert answer.status_code == 200, answer.text
    return recipe.seen[-1]


def test_blocks_of_all_kinds_become_messages_in_order(served: Served, recipe: TalkRecipe) -> None:
    said = conversation_of(
        served,
        recipe,
        system=[
            {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "be short"},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}},
                    {"type": "tool_use", "id": "b", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "b",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no such city"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        tools=[WEATHER],
    )
    system, user, assistant, first, second, last = said.messages
    assert (system.role, system.content) == ("system", "be kind\nbe short")
    assert user.content == "hi"
    assert (assistant.reasoning, assistant.content) == ("hm", "I look.")
    assert [call.arguments for call in assistant.tool_calls] == ['{"city": "Oslo"}', "{}"]
    assert (first.role, first.tool_call_id, first.content) == ("tool", "a", "sunny")
    assert second.content == "Error: no such city"
    assert (last.role, last.content) == ("user", "and?")


def test_a23_a_system_turn_keeps_its_place(served: Served, recipe: TalkRecipe) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    said = conversation_of(served, recipe, messages=turns)
    assert [(m.role, m.content) for m in said.messages] == [("user", "a"), ("system", "b")]


def test_a_last_assistant_turn_is_continued(served: Served, recipe: TalkRecipe) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]
    assert conversation_of(served, recipe, messages=turns).messages[-1].continues


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "none"}, ToolChoice(kind="none")),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            ToolChoice(kind="required", parallel=False),
        ),
        ({"type": "tool", "name": "weather"}, ToolChoice(kind="named", name="weather")),
    ],
)
def test_tool_choices(
    served: Served, recipe: TalkRecipe, choice: dict[str, object], expected: ToolChoice
) -> None:
    said = conversation_of(served, recipe, tools=[WEATHER], tool_choice=choice)
    assert said.tool_choice == expected
    assert said.tools[0].parameters == '{"type":"object","properties":{"b":{},"a":{}}}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Thinking()),
        ({"thinking": {"type": "disabled"}}, Thinking(mode="off")),
        ({"thinking": {"type": "adaptive"}}, Thinking()),
        ({"thinking": {"type": "enabled"}}, Thinking(mode="on")),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            Thinking(mode="on", effort="low"),
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 31999}},
            Thinking(mode="on", effort="high"),
        ),
        ({"output_config": {"effort": "max"}}, Thinking(effort="max")),
    ],
)
def test_thinking(
    served: Served, recipe: TalkRecipe, fields: dict[str, object], expected: Thinking
) -> None:
    assert conversation_of(served, recipe, **fields).thinking == expected


def test_a_model_that_cannot_think_takes_a_budget_for_it() -> None:
    plain = TalkRecipe(capabilities=Capabilities(chat=True))
    with talking(recipe=plain) as served:
        thinking = {"type": "enabled", "budget_tokens": 9999}
        assert conversation_of(served, plain, thinking=thinking).thinking == Thinking()


@pytest.mark.parametrize("name", ["output_format", "output_config"])
def test_an_output_schema_reaches_the_request(served: Served, name: str) -> None:
    served.generator.play(write("{}"))
    wanted: dict[str, object] = {"type": "json_schema", "schema": {"type": "object"}}
    fields = {name: wanted if name == "output_format" else {"format": wanted}}
    assert served.message(**fields).status_code == 200
    constraint = served.generator.requests[0].constraint
    assert constraint == Constraint("json_schema", '{"type":"object"}')


def test_sampling_reaches_the_request(served: Served) -> None:
    served.generator.play(write("ok"))
    assert served.message(temperature=0.5, top_p=0.9, top_k=7, max_tokens=9).status_code == 200
    request = served.generator.requests[0]
    assert request.sampling.temperature == 0.5
    assert (request.sampling.top_p, request.sampling.top_k) == (0.9, 7)
    assert request.stop.max_output_tokens == 9


def test_b05_a_billing_line_that_changes_is_left_out_only_when_asked() -> None:
    """Then the prompts of one agent's calls are the same; all other text stays as it is."""

    def prompts(served: Served, recipe: TalkRecipe, *texts: str) -> set[str]:
        found = set()
        for text in texts:
            blocks = [{"type": "text", "text": text}, {"type": "text", "text": "be kind"}]
            found.add(conversation_of(served, recipe, system=blocks).messages[0].content)
        return found

    lines = ("x-agent-billing: v=1; h=5ab", "x-agent-billing: v=1; h=c0d")
    for config, num_prompts in ((ApiConfig(), 2), (ApiConfig(normalise_agent_noise=True), 1)):
        recipe = TalkRecipe()
        with talking(config, recipe=recipe) as served:
            assert len(prompts(served, recipe, *lines)) == num_prompts
            assert prompts(served, recipe, "be brief") == {"be brief\nbe kind"}


def test_a_tool_to_be_loaded_later_is_printed_where_a_result_refers_to_it(
    served: Served, recipe: TalkRecipe
) -> None:
    later = WEATHER | {"name": "later", "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "later"}
    said = conversation_of(
        served,
        recipe,
        messages=[
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [reference]}],
            },
        ],
        tools=[later, WEATHER],
    )
    assert [tool.name for tool in said.tools] == ["weather"]
    assert '"name":"later"' in said.messages[-1].content
