"""The prefix advisor: names the habit that was put into a trace, its price, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_agents import (
    NUM_AGENTS,
    Trace,
    agent_trace,
    each,
    encoded,
    num_computed,
    recorded,
    tools,
    with_system,
    words,
)
from recipe_deepseek import V4, deepseek_recipe
from recipe_models import cached_recipe, smollm2_source

from headwater.recipe.advice import Advice, advise
from headwater.recipe.advice_align import Habit
from headwater.recipe.advice_units import UnitMaker, parting
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.conversation import Conversation, Message
from headwater.recipe.recipe import EncodedPrompt, Recipe
from headwater.recipe.record import BadRecord, Piece, from_line, to_line
from headwater.recipe.record_maker import RecordMaker

RECIPES: dict[str, Callable[[], Recipe]] = {
    "qwen3": lambda: cached_recipe("qwen3"),
    "xml": lambda: cached_recipe("xml"),
    "deepseek": lambda: deepseek_recipe(V4),
}


def clock(number: int, conversation: Conversation) -> Conversation:
    return with_system(conversation, f"2026-11-29 16:{number:02}:{number * 7 % 60:02}")


def clock_per_agent(number: int, conversation: Conversation) -> Conversation:
    return with_system(conversation, f"agent {'abc'[number % NUM_AGENTS] * 8}")


def shuffled_tools(number: int, conversation: Conversation) -> Conversation:
    order = list(conversation.tools)
    random.Random(number).shuffle(order)
    return replace(conversation, tools=tuple(order))


def changing_tools(number: int, conversation: Conversation) -> Conversation:
    first = replace(conversation.tools[0], description=f"{number} calls so far")
    return replace(conversation, tools=(first, *conversation.tools[1:]))


def respelt_calls(number: int, conversation: Conversation) -> Conversation:
    """Calls are sent back with other JSON spelling once they are a turn old."""

    def change(index: int, message: Message) -> Message:
        if index + 3 > len(conversation.messages):
            return message
        calls = tuple(
            replace(c, arguments=json.dumps(dict(sorted(json.loads(c.arguments).items()))))
            for c in message.tool_calls
        )
        return replace(message, tool_calls=calls)

    messages = tuple(change(i, m) for i, m in enumerate(conversation.messages))
    return replace(conversation, messages=messages)


def without_old_reasoning(number: int, conversation: Conversation) -> Conversation:
    last = len(conversation.messages) - 2
    messages = tuple(
        replace(m, reasoning=None) if i < last else m for i, m in enumerate(conversation.messages)
    )
    return replace(conversation, messages=messages)


def window_of_history(number: int, conversation: Conversation) -> Conversation:
    system, *rest = conversation.messages
    return replace(conversation, messages=(system, *rest[-5:]))


def cleared_results(number: int, conversation: Conversation) -> Conversation:
    """Results that are more than two turns old become a note."""
    last = len(conversation.messages) - 4
    messages = tuple(
        replace(m, content="[cleared]") if m.role == "tool" and i < last else m
        for i, m in enumerate(conversation.messages)
    )
    return replace(conversation, messages=messages)


WITH_TOOLS = {
    Habit.CHANGING_VALUE: clock,
    Habit.TOOLS_REORDERED: shuffled_tools,
    Habit.TOOLS_CHANGED: changing_tools,
    Habit.HISTORY_EDITED: cleared_results,
}


def advice_of(recipe: Recipe, trace: Trace) -> Advice:
    return advise(recorded(recipe, trace))


def measured_saving(recipe: Recipe, bad: Trace, clean: Trace) -> int:
    return num_computed(p.tokens for p in encoded(recipe, bad)) - num_computed(
        p.tokens for p in encoded(recipe, clean)
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_clean_trace_gets_no_advice(name: str) -> None:
    recipe = RECIPES[name]()
    advice = advice_of(recipe, agent_trace())
    assert advice.findings == ()
    assert advice.num_saved_tokens == 0
    assert advice.num_tenants == 1
    computed = num_computed(p.tokens for p in encoded(recipe, agent_trace()))
    hits = advice.num_prompt_tokens - computed
    assert 0.97 * hits <= advice.num_hit_tokens <= hits


@pytest.mark.parametrize("habit", WITH_TOOLS)
@pytest.mark.parametrize("name", RECIPES)
def test_an_injected_habit_is_named_alone_with_its_price(name: str, habit: Habit) -> None:
    recipe = RECIPES[name]()
    clean = agent_trace()
    bad = each(clean, WITH_TOOLS[habit])
    advice = advice_of(recipe, bad)
    assert [finding.habit for finding in advice.findings] == [habit]
    saved = measured_saving(recipe, bad, clean)
    assert advice.findings[0].num_saved_tokens == pytest.approx(saved, rel=0.05)


def conversations_of_users(number: int, conversation: Conversation) -> Conversation:
    """One turn each, and the user's name in the system message."""
    return replace(with_system(conversation, f"user {number} {words(number, 3)}"), tools=tools())


def test_a_value_that_differs_between_conversations_is_told_from_one_that_changes_in_them() -> None:
    recipe = cached_recipe("qwen3")
    bad = each(agent_trace(), clock_per_agent)
    # Each agent's value is its own and stays: what is lost is one prompt's rest per agent.
    starts = [
        replace(c, messages=(c.messages[0], Message(role="user", content=words(n, 20))))
        for n, c in enumerate(agent_trace())
    ]
    assert advice_of(recipe, starts).findings == ()
    users = each(starts, conversations_of_users)
    (finding,) = advice_of(recipe, users).findings
    assert finding.habit is Habit.VALUE_PER_CONVERSATION
    saved = measured_saving(recipe, users, starts)
    assert finding.num_saved_tokens == pytest.approx(saved, rel=0.05)
    assert not [f for f in advice_of(recipe, bad).findings if f.habit is Habit.CHANGING_VALUE]


@pytest.mark.parametrize("name", ["xml", "deepseek"])
def test_reasoning_that_a_client_drops_is_named(name: str) -> None:
    recipe = RECIPES[name]()
    clean = agent_trace(with_reasoning=True)
    assert advice_of(recipe, clean).findings == ()
    bad = each(clean, without_old_reasoning)
    (finding,) = advice_of(recipe, bad).findings
    assert finding.habit is Habit.REASONING_DROPPED
    assert finding.place.kind == "assistant"
    assert finding.num_saved_tokens == pytest.approx(measured_saving(recipe, bad, clean), rel=0.05)


def test_reasoning_that_the_format_leaves_out_is_not_blamed_on_the_client() -> None:
    recipe = deepseek_recipe(V4)
    clean = agent_trace(with_tools=False, with_reasoning=True)
    habits = [finding.habit for finding in advice_of(recipe, clean).findings]
    # DeepSeek's format drops earlier reasoning at once: no prompt ever had it, nothing parts.
    assert habits == []


def test_calls_that_come_back_in_another_spelling_are_named() -> None:
    recipe = cached_recipe("qwen3")
    clean = agent_trace()
    bad = each(clean, respelt_calls)
    (finding,) = advice_of(recipe, bad).findings
    assert finding.habit is Habit.RESPELT
    assert finding.num_saved_tokens == pytest.approx(measured_saving(recipe, bad, clean), rel=0.05)


@pytest.mark.parametrize("name", RECIPES)
def test_a_window_over_the_history_is_named(name: str) -> None:
    recipe = RECIPES[name]()
    clean = agent_trace()
    bad = each(clean, window_of_history)
    (finding,) = advice_of(recipe, bad).findings
    assert finding.habit is Habit.HISTORY_CUT
    assert finding.num_saved_tokens == pytest.approx(measured_saving(recipe, bad, clean), rel=0.05)


def new_call_ids(number: int, conversation: Conversation) -> Conversation:
    """A client that makes up new ids of calls each time it builds the history."""

    def change(message: Message) -> Message:
        calls = tuple(replace(c, call_id=f"{c.call_id}{number:06}") for c in message.tool_calls)
        result_of = message.tool_call_id and f"{message.tool_call_id}{number:06}"
        return replace(message, tool_calls=calls, tool_call_id=result_of)

    return replace(conversation, messages=tuple(map(change, conversation.messages)))


def test_ids_that_the_format_does_not_print_cost_nothing_and_are_not_mentioned() -> None:
    recipe = cached_recipe("qwen3")
    assert advice_of(recipe, each(agent_trace(), new_call_ids)).findings == ()


def parallel_results(
    number: int, conversation: Conversation, *, shuffled: bool = True
) -> Conversation:
    """Each result comes in three parts; once a turn old, their order is another each time."""
    order = random.Random(number)
    messages: list[Message] = []
    for index, message in enumerate(conversation.messages):
        if message.role != "tool":
            messages.append(message)
            continue
        parts = [replace(message, content=f"{part} {message.content}") for part in "abc"]
        if shuffled and index < len(conversation.messages) - 1:
            order.shuffle(parts)
        messages += parts
    return replace(conversation, messages=tuple(messages))


def test_results_in_another_order_are_named() -> None:
    recipe = cached_recipe("qwen3")
    clean = each(agent_trace(), partial(parallel_results, shuffled=False))
    assert advice_of(recipe, clean).findings == ()
    bad = each(agent_trace(), parallel_results)
    (finding,) = advice_of(recipe, bad).findings
    assert finding.num_saved_tokens == pytest.approx(measured_saving(recipe, bad, clean), rel=0.05)
    assert finding.habit is Habit.RESULTS_REORDERED
    assert finding.place.kind == "tool_result"


def test_reasoning_that_the_format_leaves_out_later_is_its_own_habit() -> None:
    """Qwen3's template keeps reasoning until the user's next question."""
    recipe = cached_recipe("qwen3")
    trace = agent_trace(with_reasoning=True)
    question = Message(role="user", content=words("and then", 12))
    asked = [
        replace(c, messages=(*c.messages, Message(role="assistant", content="so"), question))
        for c in trace[-3 * NUM_AGENTS :]
    ]
    turns = [turn for pair in zip(trace[-3 * NUM_AGENTS :], asked, strict=True) for turn in pair]
    habits = {finding.habit for finding in advice_of(recipe, turns).findings}
    assert habits == {Habit.REASONING_LEFT_OUT}


def on_another_path(message: Message) -> Message:
    return replace(message, content=words(("fork", message.content), 25))


def test_forks_and_short_chats_get_no_advice() -> None:
    recipe = cached_recipe("qwen3")
    trace = agent_trace()
    forks = [
        replace(c, messages=(*c.messages[:3], *map(on_another_path, c.messages[3:])))
        for c in trace
        if len(c.messages) > 6
    ]
    assert advice_of(recipe, [*trace, *forks]).findings == ()
    chats = [
        Conversation(messages=(Message(role="user", content=words(("hi", n), 12)),))
        for n in range(20)
    ]
    assert advice_of(recipe, chats).findings == ()
    assert advise([]).findings == ()


def test_two_habits_are_both_named_and_priced_together() -> None:
    recipe = cached_recipe("qwen3")
    clean = agent_trace()
    bad = each(each(clean, changing_tools), window_of_history)
    advice = advice_of(recipe, bad)
    assert {f.habit for f in advice.findings} == {Habit.TOOLS_CHANGED, Habit.HISTORY_CUT}
    assert advice.num_saved_tokens == pytest.approx(measured_saving(recipe, bad, clean), rel=0.05)


def test_the_place_is_where_the_value_stands() -> None:
    recipe = cached_recipe("qwen3")
    bad = each(agent_trace(), clock)
    prompts = [p.tokens for p in encoded(recipe, bad[::NUM_AGENTS])]
    parts = [
        next(i for i, (a, b) in enumerate(zip(prompts[0], other, strict=False)) if a != b)
        for other in prompts[1:]
    ]
    (finding,) = advice_of(recipe, bad).findings
    assert (finding.place.kind, finding.place.index) == ("system", 0)
    assert min(parts) - 16 <= finding.place.first <= min(parts)
    assert finding.place.last < min(parts) + 80


@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "text"])
def test_a_clock_in_a_prompt_without_messages_is_named_on_a_real_tokenizer(as_ids: bool) -> None:
    recipe = ChatRecipe.from_source(smollm2_source())
    maker = RecordMaker(b"k" * 32, "t")

    def prompts(value: Callable[[int], str]) -> list[EncodedPrompt]:
        found = []
        for turn in range(12):
            text = f"{words('head', 30)} {value(turn)} {words('body', 200)}"
            text += " ".join(words(("turn", t), 20) for t in range(turn))
            prompt = recipe.encode_completion(text)
            found.append(recipe.encode_ids(prompt.tokens) if as_ids else prompt)
        return found

    def records(found: Sequence[EncodedPrompt]) -> Advice:
        return advise(
            maker.record(p, None, time_s=0.0, model="m", dialect="completions") for p in found
        )

    clean, bad = prompts(lambda turn: "noon"), prompts(lambda turn: f"12:{turn:02}")
    assert records(clean).findings == ()
    (finding,) = records(bad).findings
    assert (finding.habit, finding.place.kind) == (Habit.CHANGING_VALUE, "text")
    saved = num_computed(p.tokens for p in bad) - num_computed(p.tokens for p in clean)
    assert finding.num_saved_tokens == pytest.approx(saved, rel=0.05)


def test_c12_tenants_are_advised_apart() -> None:
    """One tenant's prompts never hit another's, so they are no saving either."""
    recipe = cached_recipe("qwen3")
    trace = each(agent_trace(), clock)
    mixed = [
        recorded(recipe, [conversation], tenant=f"tenant {number}")[0]
        for number, conversation in enumerate(trace)
    ]
    advice = advise(mixed)
    assert advice.num_tenants == len(trace)
    assert (advice.findings, advice.num_hit_tokens) == ((), 0)


def test_only_the_newest_records_are_kept_in_memory() -> None:
    recipe = cached_recipe("qwen3")
    records = recorded(recipe, each(agent_trace(), clock))
    assert advise(iter(records), max_records=5).num_requests == 5


# ---- the records themselves


def test_a_record_holds_no_text_no_ids_and_nothing_without_its_key() -> None:
    recipe = cached_recipe("qwen3")
    trace = agent_trace(with_reasoning=True)[-2:]
    lines = [to_line(r) for r in recorded(recipe, trace)]
    for line, conversation in zip(lines, trace, strict=True):
        text = line.decode()
        for message in conversation.messages:
            for word in set(message.content.split()):
                assert len(word) < 12 or word not in text
        ids = recipe.encode(conversation).tokens
        assert not any(str(list(ids[i : i + 3]))[1:-1] in text for i in range(0, 60))
    other = [to_line(r) for r in recorded(recipe, trace, key=b"j" * 32)]
    same_tenant = [to_line(r) for r in recorded(recipe, trace, tenant="u")]
    for line, by_key, by_tenant in zip(lines, other, same_tenant, strict=True):
        pieces = [{p.digest for s in from_line(x).spans for p in s.pieces}
                  for x in (line, by_key, by_tenant)]  # fmt: skip
        assert not pieces[0] & pieces[1]
        assert not pieces[0] & pieces[2]
        assert len({from_line(x).tenant for x in (line, by_key, by_tenant)}) == 3
    assert lines == [to_line(r) for r in recorded(recipe, trace)]  # a restart compares


def test_spans_cover_the_prompt_and_a_line_reads_back_as_it_was() -> None:
    for name in RECIPES:
        recipe = RECIPES[name]()
        for conversation in agent_trace(with_reasoning=True)[-3:]:
            (record,) = recorded(recipe, [conversation])
            assert record.num_tokens == len(recipe.encode(conversation).tokens)
            assert [s.start for s in record.spans[1:]] == [s.end for s in record.spans[:-1]]
            assert from_line(to_line(record)) == record
            prompt = UnitMaker().prompt(record)
            assert sum(unit.num_tokens for unit in prompt.all_units) == record.num_tokens


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_garbled_line_is_refused_or_a_record_that_adds_up(data: st.DataObject) -> None:
    (record,) = recorded(cached_recipe("qwen3"), agent_trace()[:1])
    line = bytearray(to_line(record))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(line) - 1))
        match data.draw(st.sampled_from(["cut", "byte", "drop", "double"])):
            case "cut":
                del line[position:]
            case "byte":
                line[position] = data.draw(st.integers(0, 255))
            case "drop":
                del line[position : position + data.draw(st.integers(1, 40))]
            case _:
                line[position:position] = line[position : position + 30]
        if not line:
            break
    try:
        found = from_line(bytes(line))
    except BadRecord:
        return
    assert sum(p.num_tokens for s in found.spans for p in s.pieces) == found.num_tokens
    assert advise([record, found]).findings == ()


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(line: bytes) -> None:
    try:
        from_line(line)
    except BadRecord:
        return


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_a_parting_accounts_for_every_token_of_both(left: list[int], right: list[int]) -> None:
    cut = parting([Piece(d, d + 1) for d in left], [Piece(d, d + 1) for d in right])
    common = cut.num_before + cut.num_after
    assert common + cut.num_left == sum(d + 1 for d in left)
    assert common + cut.num_right == sum(d + 1 for d in right)
