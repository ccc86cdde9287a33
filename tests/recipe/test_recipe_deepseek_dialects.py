"""Bodies of three dialects, read by us and by deepseek-recipe: both give the same ids.

The library's reading is the oracle of ours, for every body that both accept.
"""

from __future__ import annotations

import json

import deepseek_recipe as library
import pytest
from recipe_deepseek import BOTH, V4, LibraryRequest, deepseek_recipe, library_ids

from headwater.api.anthropic.messages import MessagesDialect
from headwater.api.calls import CallFacts
from headwater.api.config import ApiConfig
from headwater.api.conversing import Conversing
from headwater.api.decode import UnknownNames
from headwater.api.openai.chat import ChatDialect
from headwater.api.openai.responses import ResponsesDialect
from headwater.core.constraint import Constraint
from headwater.core.request import ModelInfo
from headwater.recipe.deepseek_format import DeepseekVersion

Body = dict[str, object]
OURS: dict[str, type[ChatDialect] | type[MessagesDialect] | type[ResponsesDialect]] = {
    "chat": ChatDialect,
    "messages": MessagesDialect,
    "responses": ResponsesDialect,
}
THEIRS: dict[str, LibraryRequest] = {
    "chat": library.ChatCompletionRequest,
    "messages": library.MessagesRequest,
    "responses": library.ResponsesRequest,
}
SCHEMA: Body = {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}}
ARGUMENTS = '{"z": "x\\n", "a": [1, {"k": null}]}'

ASK: Body = {"role": "user", "content": "hello </think> there"}
CHAT_CALL: Body = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": ARGUMENTS},
}
CHAT_TOOL: Body = {
    "type": "function",
    "function": {"name": "f", "description": "do it", "parameters": SCHEMA},
}
RESPONSES_TOOL: Body = {
    "type": "function",
    "name": "f",
    "description": "do it",
    "parameters": SCHEMA,
    "strict": False,
}
RESPONSES_CALL: Body = {
    "type": "function_call",
    "call_id": "c1",
    "name": "f",
    "arguments": ARGUMENTS,
}
MESSAGES_TOOL: Body = {"name": "f", "description": "do it", "input_schema": SCHEMA}

BODIES: dict[str, tuple[str, Body]] = {
    "chat": ("chat", {"messages": [{"role": "system", "content": "be kind"}, ASK]}),
    "chat, no thinking": ("chat", {"messages": [ASK], "reasoning_effort": "none"}),
    "chat, least effort": ("chat", {"messages": [ASK], "reasoning_effort": "minimal"}),
    "chat, text part": ("chat", {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]}]}),
    "chat, tools": ("chat", {"tools": [CHAT_TOOL], "messages": [
        ASK,
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]}),
    "chat, schema": ("chat", {"messages": [ASK], "response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}),
    "messages": ("messages", {"max_tokens": 9, "system": "be kind", "messages": [ASK]}),
    "messages, system block": ("messages", {"max_tokens": 9, "messages": [ASK], "system": [
        {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}]}),
    "messages, thinking": ("messages", {
        "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 16000}, "messages": [ASK],
        "output_config": {"effort": "max"}}),
    "messages, no thinking": ("messages", {
        "max_tokens": 9, "thinking": {"type": "disabled"}, "messages": [ASK]}),
    "messages, tools": ("messages", {
        "max_tokens": 9, "tools": [MESSAGES_TOOL], "thinking": {"type": "adaptive"}, "messages": [
            ASK,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I do"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": json.loads(ARGUMENTS)}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "done"},
                {"type": "text", "text": "and?"}]},
        ]}),
    "responses": ("responses", {"instructions": "be kind", "input": "hello"}),
    "responses, developer": ("responses", {"instructions": "be kind", "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "be brief"}]}, ASK]}),
    "responses, tools": ("responses", {"tools": [RESPONSES_TOOL], "input": [
        ASK,
        {"type": "reasoning", "id": "r1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "I do", "annotations": []}]},
        RESPONSES_CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]}),
    "responses, effort": ("responses", {"input": "hello", "reasoning": {"effort": "low"}}),
}  # fmt: skip


def our_ids(kind: str, version: DeepseekVersion, body: Body) -> list[int]:
    def accept(_: Constraint) -> None:
        """A compiler that finds nothing wrong."""

    info = ModelInfo(
        model_id="m", family="test", fingerprint="f", vocab_size=1024, context_tokens=8192,
        block_tokens=32, num_blocks=1, kv_bytes_per_token=1, weights_format="none",
        weights_bytes=0, numerics="none", device="none",
    )  # fmt: skip
    dialect = OURS[kind].create(
        Conversing(deepseek_recipe(version), accept), ApiConfig(), UnknownNames()
    )
    data = json.dumps({"model": "m", **body}).encode()
    call = dialect.parse(data, CallFacts(call_id="0", created_s=0, info=info))
    (prompt,) = call.ask.prompts
    return list(prompt.tokens)


@pytest.mark.parametrize("version", BOTH)
@pytest.mark.parametrize("name", BODIES)
def test_b03_a_body_gives_the_ids_of_the_librarys_reading(
    name: str, version: DeepseekVersion
) -> None:
    if (name, version) == ("responses, developer", V4):
        pytest.skip("the library makes a developer a user there; here one is always system")
    kind, body = BODIES[name]
    assert our_ids(kind, version, body) == library_ids(version, THEIRS[kind], body)


@pytest.mark.parametrize("version", BOTH)
def test_b03_the_same_conversation_gives_the_same_ids_in_each_dialect(
    version: DeepseekVersion,
) -> None:
    assert (
        our_ids("chat", version, BODIES["chat"][1])
        == our_ids("messages", version, BODIES["messages"][1])
        == our_ids("responses", version, {"instructions": "be kind", "input": ASK["content"]})
    )
