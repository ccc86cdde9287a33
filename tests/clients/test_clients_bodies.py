"""Requests in the shapes that real coding agents send are served, without their packages.

``bodies/`` holds one conversation per client as it was seen on the wire: every
field and every nesting is the client's, the words are ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from clients_model import Call, Script, Turn, num_common_tokens
from clients_server import KEY, Served, serving

BODIES: Final = sorted((Path(__file__).parent / "bodies").glob("*.json"))
ANSWER: Final = "Done."
TURN: Final = Turn(
    thinking="Look first.",
    text="I will look.",
    calls=(Call("look", {"path": "a.txt"}), Call("look", {"path": "b.txt"})),
)
TEXT_DELTA: Final = re.compile(r'"(?:text|content|delta)":"([^"]*)"')
LOOK: Final = {"type": "object", "properties": {"path": {"type": "string"}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


def post(served: Served, target: str, body: object) -> httpx.Response:
    # No TLS here: reading the certificate store would be most of a test's time.
    with httpx.Client(trust_env=False, verify=False, timeout=20) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        return client.post(f"http://127.0.0.1:{served.port}{target}", json=body, headers=headers)


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_a_request_of_a_real_client_is_served(served: Served, path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    served.model.scripts = (Script(opening="", turns=(Turn(text=ANSWER),)),)
    served.model.aside = Turn(text=ANSWER)
    response = post(served, document["target"], document["body"])
    assert response.status_code == 200, response.text
    if document["body"].get("stream"):
        # The answer may come in several deltas, each spelt by its dialect.
        assert "".join(TEXT_DELTA.findall(response.text)).startswith(ANSWER)
    else:
        assert response.json()["input_tokens"] > 0


def test_the_scripted_model_answers_with_two_calls_and_the_next_turn_extends_the_first(
    served: Served,
) -> None:
    served.model.scripts = (Script(opening="go on", turns=(TURN, Turn(text=ANSWER))),)
    served.model.played.clear()
    tools = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go on"}]
    body = {"model": "headwater-scripted", "messages": messages, "tools": tools}
    choice = post(served, "/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look", "look"]
    messages.append(message)
    messages += [
        {"role": "tool", "tool_call_id": call["id"], "content": "empty"}
        for call in message["tool_calls"]
    ]
    choice = post(served, "/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == ANSWER
    first, second = served.model.played
    whole = first.prompt_tokens + first.output_tokens
    assert num_common_tokens(whole, second.prompt_tokens) == len(whole)
    assert second.num_hit_tokens > 0
