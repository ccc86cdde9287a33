"""Habits of real agents that a server must know, and the answers that keep the agents going."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx
import pytest
from clients_model import MODEL_ID, Call, Played, Script, Turn, num_common_tokens
from clients_server import KEY, Served, serving

LOOK: Final = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION: Final = {"type": "function", "name": "look", "parameters": LOOK}
FILES: Final = {"type": "namespace", "name": "files", "description": "Files.", "tools": [FUNCTION]}
WEB: Final = {"type": "web_search", "external_web_access": True}
NOW: Final = {"name": "look", "input_schema": LOOK}
LATER: Final = {
    "name": "fetch",
    "description": "Gets a page.",
    "input_schema": LOOK,
    "defer_loading": True,
}
FOUND: Final = [
    {"role": "user", "content": "go on"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [{"type": "tool_reference", "tool_name": "fetch"}],
            }
        ],
    },
]


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def served(running: Served) -> Served:
    running.model.played.clear()
    running.model.scripts = (Script(opening="", turns=(Turn(text="Done."),)),)
    return running


def post(served: Served, path: str, body: Mapping[str, object]) -> httpx.Response:
    # No TLS here: reading the certificate store would be most of a test's time.
    with httpx.Client(trust_env=False, verify=False, timeout=20) as client:
        return client.post(
            f"http://127.0.0.1:{served.port}{path}",
            json={"model": MODEL_ID, **body},
            headers={"authorization": f"Bearer {KEY}"},
        )


def messages(served: Served, **body: object) -> Played:
    """A call of Messages, and what the model saw of it."""
    response = post(served, "/v1/messages", {"max_tokens": 64, **body})
    assert response.status_code == 200, response.text
    return served.model.played[-1]


def prompt_text(served: Served, played: Played) -> str:
    return served.model.recipe.decode(played.prompt_tokens, keep_control=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_function_in_a_namespace_comes_back_under_both_names(
    served: Served, stream: bool
) -> None:
    call = Call("files__look", {"path": "a.txt"})
    served.model.scripts = (Script(opening="", turns=(Turn(calls=(call,)),)),)
    body = {"input": "go on", "tools": [FILES], "stream": stream}
    response = post(served, "/v1/responses", body)
    assert response.status_code == 200, response.text
    items: list[dict[str, Any]]
    if stream:
        events = [
            json.loads(line[6:]) for line in response.text.split("\n") if line[:6] == "data: "
        ]
        items = [event["item"] for event in events if "item" in event]
        items += events[-1]["response"]["output"]
        assert len(items) == 3  # added, done, and in the whole response
    else:
        items = response.json()["output"]
    assert {(item["name"], item["namespace"]) for item in items} == {("look", "files")}


def test_a_call_under_both_names_in_the_history_is_the_call_that_the_model_wrote(
    served: Served,
) -> None:
    call = Call("files__look", {"path": "a.txt"})
    served.model.scripts = (Script(opening="", turns=(Turn(calls=(call,)), Turn(text="Done."))),)
    body: dict[str, Any] = {"input": [{"role": "user", "content": "go on"}], "tools": [FILES]}
    output = post(served, "/v1/responses", body).json()["output"]
    result = {"type": "function_call_output", "call_id": output[0]["call_id"], "output": "empty"}
    body["input"] += [*output, result]
    assert post(served, "/v1/responses", body).status_code == 200
    first, second = served.model.played
    whole = first.prompt_tokens + first.output_tokens
    assert num_common_tokens(whole, second.prompt_tokens) == len(whole)


def test_a_search_tool_that_is_offered_to_any_server_is_left_out_and_the_answer_says_so(
    served: Served,
) -> None:
    response = post(served, "/v1/responses", {"input": "go on", "tools": [FUNCTION, WEB]})
    assert response.status_code == 200, response.text
    assert [tool["type"] for tool in response.json()["tools"]] == ["function"]
    assert "web_search" not in prompt_text(served, served.model.played[-1])


def test_other_tools_that_a_server_would_have_to_run_are_refused_by_name(served: Served) -> None:
    tools = [{"type": "code_interpreter", "container": {"type": "auto"}}]
    response = post(served, "/v1/responses", {"input": "go on", "tools": tools})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].type"


def test_a_tool_to_be_loaded_later_is_defined_where_it_is_found_so_the_prefix_stays(
    served: Served,
) -> None:
    before = messages(served, messages=FOUND[:1], tools=[NOW, LATER])
    after = messages(served, messages=FOUND, tools=[LATER, NOW])
    head, found = prompt_text(served, before), prompt_text(served, after)
    assert "Gets a page." not in head
    assert found.startswith(head)
    assert '"name":"fetch","description":"Gets a page."' in found


def test_a_reference_to_a_tool_that_is_not_listed_is_its_name(served: Served) -> None:
    played = messages(served, messages=FOUND, tools=[NOW])
    assert "<tool_response>\nfetch\n</tool_response>" in prompt_text(served, played)


def test_an_image_is_refused_in_the_words_that_make_an_agent_take_it_out(served: Served) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    content = [{"type": "image", "source": source}]
    response = post(
        served,
        "/v1/messages",
        {"max_tokens": 64, "messages": [{"role": "user", "content": content}]},
    )
    assert response.status_code == 400
    assert "Could not process image" in response.json()["error"]["message"]


def test_a_system_message_among_the_others_is_the_same_as_blocks_or_as_text(
    served: Served,
) -> None:
    user = {"role": "user", "content": "go on"}
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = {"role": "system", "content": [{"type": "text", "text": "Be brief.", **mark}]}
    text = {"role": "system", "content": "Be brief."}
    first = messages(served, messages=[user, blocks])
    second = messages(served, messages=[user, text])
    assert first.prompt_tokens == second.prompt_tokens
    assert prompt_text(served, first).index("go on") < prompt_text(served, first).index("Be brief.")


def test_answers_have_ids_of_their_own(served: Served) -> None:
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "go on"}]}
    ids = {post(served, "/v1/messages", body).json()["id"] for _ in range(3)}
    assert len(ids) == 3
