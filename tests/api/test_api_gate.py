"""The gate before there is a model: live, not ready, and saying so in each dialect."""

from __future__ import annotations

import httpx
import pytest
from api_server import ScriptedGenerator, SteadyClock, byte_recipe

from headwater.api.app import create_app
from headwater.api.config import ApiConfig
from headwater.api.gate import Gate


@pytest.fixture
def gate() -> Gate:
    return Gate(lambda: "loading weights")


def client_of(gate: Gate) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=gate)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_j01_before_a_model_is_loaded_it_is_live_and_not_ready(gate: Gate) -> None:
    async with client_of(gate) as client:
        assert (await client.get("/health/live")).status_code == 200
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "loading weights")


@pytest.mark.parametrize(
    ("path", "has_type"),
    [("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/responses", False)],
)
async def test_before_a_model_is_loaded_calls_are_refused_in_their_dialect(
    gate: Gate, path: str, has_type: bool
) -> None:
    async with client_of(gate) as client:
        answer = await client.post(path, json={})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert ("type" in answer.json()) == has_type
    assert "starting" in answer.json()["error"]["message"]


async def test_once_open_everything_goes_to_the_app(gate: Gate) -> None:
    await gate.open(create_app(ScriptedGenerator(), byte_recipe(), ApiConfig(), SteadyClock()))
    async with client_of(gate) as client:
        assert (await client.get("/v1/models")).status_code == 200
    await gate.close()
