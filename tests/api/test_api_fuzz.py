"""Bodies that nobody meant: each is understood or refused by name, never a failure of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_server import MODEL_ID
from api_talk import TALK_INFO, TalkRecipe, check_constraint
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.api.anthropic.bodies import Block, MessagesBody
from headwater.api.anthropic.messages import CountDialect, MessagesDialect
from headwater.api.calls import CallFacts, Dialect
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing
from headwater.api.decode import UnknownNames
from headwater.api.direct import DirectDialect
from headwater.api.failure import Refused
from headwater.api.openai.bodies import ChatBody, Message
from headwater.api.openai.chat import ChatDialect
from headwater.api.openai.responses import ResponsesDialect
from headwater.api.openai.responses_bodies import InputItem, ResponsesBody
from headwater.api.openai.tokenize import TokenizeDialect
from headwater.core.errors import InvalidRequest

FACTS = CallFacts(call_id="x", created_s=0, info=TALK_INFO)
CONVERSING = Conversing(TalkRecipe(), check_constraint)
CONFIG, UNKNOWN = ApiConfig(), UnknownNames()
DIALECTS: dict[str, Dialect] = {
    "chat": ChatDialect.create(CONVERSING, CONFIG, UNKNOWN),
    "responses": ResponsesDialect.create(CONVERSING, CONFIG, UNKNOWN),
    "messages": MessagesDialect.create(CONVERSING, CONFIG, UNKNOWN),
}
DIRECT: dict[str, DirectDialect] = {
    "count": CountDialect.create(CONVERSING, CONFIG, UNKNOWN),
    "tokenize": TokenizeDialect.create(CONVERSING, CONFIG, UNKNOWN),
}

NAMES = sorted(
    {
        *ChatBody.__struct_encode_fields__,
        *ResponsesBody.__struct_encode_fields__,
        *MessagesBody.__struct_encode_fields__,
        *Message.__struct_encode_fields__,
        *InputItem.__struct_encode_fields__,
        *Block.__struct_encode_fields__,
        *("function", "parameters", "schema", "json_schema", "format", "effort", "json", "regex"),
    }
)
SAID = """
user assistant tool system developer text function tool_use auto tool_result thinking reasoning
message function_call json_schema function_call_output input_text required any high {} [1]
"""
WORDS = st.sampled_from(SAID.split())
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS, st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)
TURNS = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), max_size=3)
SAYS = st.fixed_dictionaries({"role": WORDS, "type": WORDS, "content": VALUES, "call_id": WORDS})
MANY = TURNS | st.lists(SAYS, max_size=3)
REST = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
BODIES = st.builds(lambda rest, turns: {**rest, "messages": turns, "input": turns}, REST, MANY)


def is_served(name: str, body: bytes) -> bool:
    """Whether ``body`` is understood; any error but a refusal of ours goes through."""
    try:
        if name in DIRECT:
            DIRECT[name].answer(body, FACTS)
        else:
            DIALECTS[name].parse(body, FACTS).open_output(0)
    except (InvalidRequest, Refused):
        return False
    return True


@settings(max_examples=250, deadline=None)
@given(fields=BODIES)
def test_any_json_is_understood_or_refused_with_an_error_of_ours(fields: dict[str, Any]) -> None:
    body = json.dumps(fields | {"model": MODEL_ID}).encode()
    for name in (*DIALECTS, *DIRECT):
        is_served(name, body)


DEEP = "[" * 50_000 + "]" * 50_000
DEEP_OBJECT = '{"a":' * 50_000 + "1" + "}" * 50_000


@pytest.mark.parametrize("deep", [DEEP, DEEP_OBJECT, json.dumps(DEEP), json.dumps(DEEP_OBJECT)])
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("chat", '{"messages": [{"role": "user", "content": %s}]}'),
        ("chat", '{"messages": [], "tools": [{"type": "function", "function": %s}]}'),
        (
            "chat",
            '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function",'
            ' "function": {"name": "f", "parameters": {"x": %s}}}]}',
        ),
        ("chat", '{"messages": [], "structured_outputs": {"json": %s}}'),
        (
            "chat",
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",'
            ' "arguments": %s}}]}]}',
        ),
        ("responses", '{"input": [{"type": "function_call", "arguments": %s}]}'),
        ("responses", '{"input": "x", "text": {"format": {"type": "json_schema", "schema": %s}}}'),
        ("messages", '{"messages": [{"role": "assistant", "content": [{"type": "tool_use",'
         ' "id": "x", "name": "f", "input": %s}]}]}'),
        ("messages", '{"messages": [], "tools": [{"name": "f", "input_schema": %s}]}'),
        ("messages", '{"messages": [], "future": %s}'),
    ],
)  # fmt: skip
def test_i03_nesting_without_end_is_refused(name: str, body: str, deep: str) -> None:
    may_be_text = deep.startswith('"')  # where text may stand, it is text
    assert not is_served(name, (body % deep).encode()) or may_be_text
