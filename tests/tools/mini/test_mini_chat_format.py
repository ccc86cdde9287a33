"""The fast rendering of training chats: the same text as the format's own library."""

from __future__ import annotations

import json
import random

import deepseek_recipe as library
import pytest

from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.conversation import Conversation, Message, Thinking, Tool
from headwater.recipe.load import load_recipe
from headwater.recipe.parts import AnswerText, ReasoningText, ToolCallArguments, ToolCallStart
from tools.mini.chat_format import (
    DSML,
    END_THINK,
    EOS,
    Call,
    Chat,
    ToolDefinition,
    Turn,
    prompt_text,
    render,
)
from tools.mini.document import mark, unmarked
from tools.mini.tokenizer import SPECIAL, train

TEXTS = ("Hello.", "What is 4271?", "Two\nlines", 'A "quoted" text', "ümlaut", "", '{"a": 1}')
VALUES: tuple[object, ...] = ("Rome", 'a "b"', 3, 1.5, True, None, [1, "x"], {"k": "ü"}, "")


def _tools(rng: random.Random) -> list[ToolDefinition]:
    return [
        ToolDefinition(
            name=f"tool_{i}",
            description=rng.choice(("Does it.", 'Says "it" (ü).')),
            parameters={
                "type": "object",
                "properties": {"city": {"type": "string", "description": 'Ü "x"'}},
                "required": ["city"],
            },
        )
        for i in range(rng.randrange(1, 4))
    ]


def _chat(rng: random.Random) -> Chat:
    tools = _tools(rng) if rng.random() < 0.5 else []
    turns: list[Turn] = []
    for _ in range(rng.randrange(1, 5)):
        turns.append(Turn(role="user", text=rng.choice(TEXTS[:5])))
        if tools and rng.random() < 0.6:
            calls = tuple(
                Call(
                    name=tool.name,
                    arguments={f"p{i}": rng.choice(VALUES) for i in range(rng.randrange(3))},
                )
                for tool in rng.sample(tools, rng.randrange(1, len(tools) + 1))
            )
            turns.append(
                Turn(role="assistant", text=rng.choice(TEXTS), thought="I need it.", calls=calls)
            )
            turns.extend(Turn(role="tool", text=rng.choice(TEXTS)) for _ in calls)
        text = rng.choice(TEXTS[:5])
        turns.append(Turn(role="assistant", text=text, thought=f"So: {mark(text)}"))
    return Chat(
        turns=turns,
        system=rng.choice((None, "Be brief.", "Two\n\nparagraphs")),
        tools=tools,
        thinking=rng.random() < 0.5,
        effort=rng.choice(("low", "high", "max")),
    )


def _library_text(chat: Chat) -> str:
    """The same conversation without its last answer, rendered by the library."""
    turns = chat.turns[:-1] if chat.turns[-1].role == "assistant" else chat.turns
    messages: list[library.Message] = []
    if chat.system is not None:
        messages.append(library.SystemMessage(chat.system))
    for turn in turns:
        match turn.role:
            case "user":
                messages.append(library.UserMessage(turn.text))
            case "tool":
                messages.append(library.ToolMessage(turn.text, "c"))
            case "assistant":
                messages.append(
                    library.AssistantMessage(
                        unmarked(turn.text),
                        unmarked(turn.thought) if chat.thinking else None,
                        [library.ToolCall("c", c.name, json.dumps(c.arguments)) for c in turn.calls]
                        or None,
                    )
                )
    conversation = library.Conversation(
        messages,
        thinking_mode=chat.thinking,
        reasoning_effort=chat.effort if chat.thinking else None,
        tools=[library.ToolDefinition(t.name, t.description, t.parameters) for t in chat.tools]
        or None,
    )
    return library.DeepseekV41Encoding().render_conversation(conversation).prompt


@pytest.mark.parametrize("seed", range(200))
def test_a_chat_is_rendered_as_the_library_renders_it(seed: int) -> None:
    chat = _chat(random.Random(seed))
    whole = render(chat).text
    last = chat.turns[-1]
    thought = f"{unmarked(last.thought)}{END_THINK}" if chat.thinking else ""
    assert whole == _library_text(chat) + thought + last.text + EOS


@pytest.mark.parametrize("seed", range(50))
def test_a_prompt_is_rendered_as_the_library_renders_it(seed: int) -> None:
    chat = _chat(random.Random(seed))
    asked = Chat(
        turns=chat.turns[:-1], system=chat.system, tools=chat.tools, thinking=chat.thinking,
        effort=chat.effort,
    )  # fmt: skip
    assert prompt_text(asked) == _library_text(asked)


def test_what_is_marked_weighs_more_than_the_answer_and_the_question_least() -> None:
    chat = Chat(
        turns=[
            Turn(role="user", text="Where is it?"),
            Turn(role="assistant", text=f"It is {mark('here')}."),
        ]
    )
    weight = dict(render(chat).pieces)
    assert weight["here"] > weight["It is "] > weight["Where is it?"]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_the_recipe_parses_an_answer_back_into_what_was_rendered(
    thinking: bool, calls: int
) -> None:
    tool = ToolDefinition(name="find", description="d", parameters={"type": "object"})
    arguments: dict[str, object] = {"city": 'Rome "x" ü', "n": 3, "deep": {"a": [1, None]}}
    answer = Turn(
        role="assistant",
        text="" if calls else "It is warm.",
        thought="I look.",
        calls=tuple(Call(name="find", arguments=arguments) for _ in range(calls)),
    )
    chat = Chat(turns=[Turn(role="user", text="w?"), answer], tools=[tool], thinking=thinking)
    start = prompt_text(Chat(turns=chat.turns[:1], tools=[tool], thinking=thinking))
    written = render(chat).text.removeprefix(start)
    parser = load_recipe(_source()).open_parser(
        Conversation(
            messages=(Message(role="user", content="w?"),),
            tools=(Tool(name="find", description="d"),),
            thinking=Thinking(mode="on" if thinking else "off"),
        )
    )
    parts = []
    for piece in _split_controls(written.removesuffix(EOS)):
        parts += parser.push_control(piece) if piece in (DSML, END_THINK) else parser.push(piece)
    parts += parser.finish()
    names = [part.name for part in parts if isinstance(part, ToolCallStart)]
    assert names == ["find"] * calls
    for index in range(calls):
        text = "".join(
            p.text for p in parts if isinstance(p, ToolCallArguments) and p.index == index
        )
        assert json.loads(text) == arguments
    assert "".join(p.text for p in parts if isinstance(p, AnswerText)) == answer.text
    thought = "".join(p.text for p in parts if isinstance(p, ReasoningText))
    assert thought == (answer.thought if thinking else "")


def _split_controls(text: str) -> list[str]:
    for literal in (DSML, END_THINK):
        text = text.replace(literal, f"\x00{literal}\x00")
    return [piece for piece in text.split("\x00") if piece]


def _source() -> TokenizerSource:
    tokenizer = train(["one two"], vocabulary=256 + len(SPECIAL))
    return TokenizerSource(
        kind="hf",
        tokenizer_json=tokenizer.to_str().encode(),
        end_token_ids=frozenset({1}),
        vocab_size=tokenizer.get_vocab_size(),
        model_id="m",
    )
