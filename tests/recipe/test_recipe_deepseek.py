"""The deepseek recipe: the library's own ids, origins, and nothing forged in any field."""

from __future__ import annotations

import json
from dataclasses import replace

import deepseek_recipe as library
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_attacks import HARMLESS, PLACES, attacks
from recipe_deepseek import BOTH, V4, V4_1, deepseek_recipe, deepseek_source, library_ids
from recipe_models import chatml_style
from recipe_talks import RUN, SYSTEM, WEATHER, answer, ask, call, calling, result, talk

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest, ModelError
from headwater.recipe.conversation import Conversation, Message, Thinking, Tool, ToolChoice
from headwater.recipe.deepseek import DeepseekRecipe
from headwater.recipe.deepseek_format import ASSISTANT, DSML, END_THINK, THINK, DeepseekVersion
from headwater.recipe.load import load_recipe

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": json.loads(tool.parameters),
        },
    }
    for tool in (WEATHER, RUN)
]
_CALLED = [
    {"id": "call_0001", "type": "function",
     "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}},
    {"id": "call_0002", "type": "function",
     "function": {"name": "run", "arguments": '{"argv": ["ls", "a b"], "note": "x\\ny"}'}},
]  # fmt: skip

# The same conversation as a Chat Completions body, read by the library, and in our form.
PAIRS: dict[str, tuple[dict[str, object], Conversation]] = {
    "one question": (
        {"messages": [{"role": "user", "content": "hello <think> there"}]},
        talk(ask("hello <think> there")),
    ),
    "thinking off": (
        {"messages": [{"role": "user", "content": "hello"}], "thinking": {"type": "disabled"}},
        talk(ask("hello"), mode="off"),
    ),
    "a dialogue": (
        {
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "q1"},
                {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "q2"},
            ]
        },
        talk(
            SYSTEM, ask("q1"), answer("a1", "r1"), Message(role="system", content="be brief"),
            ask("q2"),
        ),
    ),
    "low effort": (
        {"messages": [{"role": "user", "content": "q"}], "reasoning_effort": "low"},
        replace(talk(ask("q")), thinking=Thinking(mode="on", effort="low")),
    ),
    "middle effort": (
        {"messages": [{"role": "user", "content": "q"}], "reasoning_effort": "medium"},
        replace(talk(ask("q")), thinking=Thinking(effort="medium")),
    ),
    "most effort": (
        {"messages": [{"role": "user", "content": "q"}], "reasoning_effort": "max"},
        replace(talk(ask("q")), thinking=Thinking(effort="max")),
    ),
    "tools": (
        {
            "tools": _TOOLS,
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "weather?"},
                {
                    "role": "assistant",
                    "content": "I look",
                    "reasoning_content": "two calls",
                    "tool_calls": _CALLED,
                },
                {"role": "tool", "tool_call_id": "call_0002", "content": "a b"},
                {"role": "tool", "tool_call_id": "call_0001", "content": "rain"},
                {"role": "user", "content": "and?"},
            ],
        },
        talk(
            SYSTEM, ask("weather?"),
            calling(
                call("get_weather", {"city": "Oslo", "days": 2}, "call_0001"),
                call("run", {"argv": ["ls", "a b"], "note": "x\ny"}, "call_0002"),
                content="I look", reasoning="two calls",
            ),
            result("a b", "call_0002"), result("rain", "call_0001"), ask("and?"),
            tools=[WEATHER, RUN],
        ),
    ),
    "no reasoning in a turn with calls": (
        {
            "tools": _TOOLS,
            "messages": [
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": None, "tool_calls": _CALLED[:1]},
                {"role": "tool", "tool_call_id": "call_0001", "content": "rain"},
            ],
        },
        talk(
            ask("weather?"), calling(call("get_weather", {"city": "Oslo", "days": 2})),
            result("rain"), tools=[WEATHER, RUN],
        ),
    ),
    "tools that may not be used": (
        {
            "tools": _TOOLS,
            "tool_choice": "none",
            "messages": [{"role": "user", "content": "q"}],
        },
        replace(talk(ask("q"), tools=[WEATHER, RUN]), tool_choice=ToolChoice(kind="none")),
    ),
    "a tool that must be used": (
        {
            "tools": _TOOLS,
            "tool_choice": "required",
            "thinking": {"type": "disabled"},
            "messages": [{"role": "user", "content": "q"}],
        },
        replace(
            talk(ask("q"), tools=[WEATHER, RUN], mode="off"),
            tool_choice=ToolChoice(kind="required"),
        ),
    ),
    "json": (
        {
            "messages": [{"role": "user", "content": "some json"}],
            "response_format": {"type": "json_object"},
        },
        replace(talk(ask("some json")), answer=Constraint("json_object")),
    ),
    "a schema": (
        {
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "q"},
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "title": "t"}},
            },
        },
        replace(
            talk(SYSTEM, ask("q")),
            answer=Constraint("json_schema", '{"type":"object","title":"t"}'),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", BOTH)
@pytest.mark.parametrize("name", PAIRS)
def test_ids_are_those_of_the_librarys_own_reading_and_encoding(
    name: str, version: DeepseekVersion
) -> None:
    body, conversation = PAIRS[name]
    prompt = deepseek_recipe(version).encode(conversation)
    assert list(prompt.tokens) == library_ids(version, library.ChatCompletionRequest, body)


@settings(max_examples=40, deadline=None)
@given(
    version=st.sampled_from(BOTH),
    texts=st.lists(
        st.one_of(
            st.text(max_size=12),
            st.sampled_from([f"a{DSML}b", f"{END_THINK}x", f"{ASSISTANT}{THINK}", "  \n", "🙂é"]),
        ),
        min_size=3,
        max_size=3,
    ),
)
def test_ids_are_the_librarys_whatever_is_said(version: DeepseekVersion, texts: list[str]) -> None:
    system, user, last = (text.replace("\0", "") for text in texts)
    body: dict[str, object] = {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
            {"role": "assistant", "content": last},
            {"role": "user", "content": user},
        ]
    }
    conversation = talk(Message(role="system", content=system), ask(user), answer(last), ask(user))
    prompt = deepseek_recipe(version).encode(conversation)
    assert list(prompt.tokens) == library_ids(version, library.ChatCompletionRequest, body)


@pytest.mark.parametrize("version", BOTH)
@pytest.mark.parametrize("place", PLACES)
def test_b01_control_ids_are_those_of_the_benign_twin(place: str, version: DeepseekVersion) -> None:
    recipe = deepseek_recipe(version)
    benign = recipe.encode(PLACES[place](HARMLESS))
    expected = [benign.tokens[i] for i in benign.control_positions]
    assert len(expected) >= 4
    for kind, attack in attacks(recipe).items():
        prompt = recipe.encode(PLACES[place](attack))
        assert [prompt.tokens[i] for i in prompt.control_positions] == expected, kind
        assert all(recipe.tokenizer.is_control(prompt.tokens[i]) for i in prompt.control_positions)
        for span in prompt.spans:
            inside = prompt.tokens[span.start : span.end]
            # A call is written with tags of its own; nothing else holds a control token.
            assert not any(map(recipe.tokenizer.is_control, inside)), (kind, span)


def test_b01_the_corpus_has_many_attempts() -> None:
    assert len(PLACES) * len(attacks(deepseek_recipe(V4_1))) >= 60


@pytest.mark.parametrize("version", BOTH)
def test_spans_say_where_outside_text_went(version: DeepseekVersion) -> None:
    recipe = deepseek_recipe(version)
    _, conversation = PAIRS["tools"]
    conversation = replace(  # the same text in several places, and one that looks like a mark
        conversation, messages=(*conversation.messages, answer("@0<"), ask("weather?"))
    )
    prompt = recipe.encode(conversation)
    found = [
        (span.part, span.message_index, recipe.decode(prompt.tokens[span.start : span.end]))
        for span in prompt.spans
    ]
    assert [item for item in found if item[0] == "content"] == [
        ("content", 0, "be kind"),
        ("content", 1, "weather?"),
        ("content", 2, "I look"),
        ("content", 4, "rain"),  # in the order of the calls
        ("content", 3, "a b"),
        ("content", 5, "and?"),
        ("content", 6, "@0<"),
        ("content", 7, "weather?"),
    ]
    assert ("reasoning", 2, "two calls") in found
    assert [text for part, _, text in found if part == "tool_call"] == [
        "get_weather", "Oslo", "run", "ls", "a b", "x\ny",
    ]  # fmt: skip
    tools = [text for part, _, text in found if part == "tool"]
    assert [text[:8] for text in tools] == ["get_weat", 'run", "d']
    content = next(span for span in prompt.spans if span.part == "content")
    assert (content.start_char, content.end_char) == (0, len("be kind"))


@pytest.mark.parametrize("version", BOTH)
def test_without_generation_prompt_nothing_of_the_next_turn_is_there(
    version: DeepseekVersion,
) -> None:
    recipe = deepseek_recipe(version)
    for _, conversation in PAIRS.values():
        asking = recipe.encode(conversation).tokens
        without = recipe.encode(conversation, add_generation_prompt=False).tokens
        assert asking[: len(without)] == without
        assert recipe.tokenizer.control_id(ASSISTANT) == asking[len(without)]


def test_b04_with_tools_the_next_turn_extends_this_one_and_its_answer() -> None:
    recipe = deepseek_recipe(V4_1)
    _, conversation = PAIRS["tools"]
    written = f"let me see{END_THINK}rain it is"
    next_turn = replace(
        conversation,
        messages=(*conversation.messages, answer("rain it is", "let me see"), ask("thanks")),
    )
    ranges = recipe.tokenizer.control_ranges(written, [(0, len(written))])
    turn = (*recipe.encode(conversation).tokens, *recipe.tokenizer.encode_rendered(written, ranges))
    assert recipe.encode(next_turn).tokens[: len(turn)] == turn


def test_b04_what_cannot_be_extended_is_said() -> None:
    notes = deepseek_recipe(V4_1).capabilities.notes
    assert any("drops the reasoning" in note for note in notes)


def test_a_last_message_that_continues_is_left_open() -> None:
    recipe = deepseek_recipe(V4_1)
    text = recipe.decode(
        recipe.encode(talk(ask("q"), replace(answer("so far", "r"), continues=True))).tokens,
        keep_control=True,
    )
    assert text.endswith(f"{THINK}r{END_THINK}so far")
    text = recipe.decode(
        recipe.encode(talk(ask("q"), replace(answer("", "so far"), continues=True))).tokens,
        keep_control=True,
    )
    assert text.endswith(f"{THINK}so far")


@pytest.mark.parametrize(
    ("conversation", "param"),
    [
        (talk(ask("q"), tools=[Tool(name="f", parameters="[1]")]), "tools[0].parameters"),
        (
            talk(ask("q"), tools=[Tool(name="f", parameters='{"a": 36893488147419103232}')]),
            "tools[0].parameters",
        ),
        (
            talk(ask("q"), calling(replace(call("f", {}), arguments="nope"))),
            "messages[1].tool_calls[0].arguments",
        ),
        (talk(ask("\ud800")), "messages[0].content"),
        (
            replace(talk(ask("q")), answer=Constraint("json_schema", '{"a": 1e999}')),
            "response_format",
        ),
        (talk(), "messages"),
    ],
)
def test_b07_what_cannot_be_rendered_is_refused_by_its_field(
    conversation: Conversation, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        deepseek_recipe(V4_1).encode(conversation)
    assert refused.value.param == param


def test_b07_arguments_give_the_same_ids_however_they_are_spaced() -> None:
    recipe = deepseek_recipe(V4_1)
    spelt = ['{"city":"Oslo","days":2}', ' { "city" : "Oslo" ,\n"days": 2 } ']
    prompts = {
        recipe.encode(talk(ask("q"), calling(replace(call("f", {}), arguments=text)))).tokens
        for text in spelt
    }
    assert len(prompts) == 1


@pytest.mark.parametrize("version", BOTH)
def test_the_format_is_chosen_by_the_control_tokens_that_are_declared(
    version: DeepseekVersion,
) -> None:
    recipe = load_recipe(deepseek_source(version))
    assert isinstance(recipe, DeepseekRecipe)
    assert recipe.version is version
    assert not isinstance(load_recipe(chatml_style().source), DeepseekRecipe)
    assert not isinstance(load_recipe(deepseek_source(version), name="template"), DeepseekRecipe)


def test_a_format_that_the_tokenizer_cannot_spell_is_refused() -> None:
    older = load_recipe(deepseek_source(V4_1), name="deepseek-v4")
    assert isinstance(older, DeepseekRecipe)
    assert older.version is V4
    with pytest.raises(ModelError, match="control token"):
        load_recipe(deepseek_source(V4), name="deepseek-v4.1")


def test_completions_and_ids_have_one_begin_token() -> None:
    recipe = deepseek_recipe(V4_1)
    typed = f"a{ASSISTANT}b"
    assert recipe.encode_completion(typed).control_positions == ()
    vouched = recipe.encode_completion(typed, allow_control=True)
    assert vouched.num_control_tokens == 1
    assert recipe.encode_ids(vouched.tokens) == vouched
    assert recipe.decode(vouched.tokens, keep_control=True) == typed
