"""``GET /v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headwater.api.calls import Door
from headwater.api.failure import failure_of
from headwater.api.openai.errors import error_response
from headwater.api.served import no_model, served_names
from headwater.core.errors import HeadwaterError
from headwater.core.request import ModelInfo
from headwater.recipe.recipe import Capabilities


def model_routes(door: Door, capabilities: Capabilities) -> list[Route]:
    """Cards in OpenAI's form, with what the model's format can carry, and with the
    fields that Anthropic's client reads (``type``, ``display_name``, ``created_at``)."""
    started_s = int(door.unix_time_s())
    started = datetime.fromtimestamp(started_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    abilities = {
        "chat": capabilities.chat,
        "tools": capabilities.tools,
        "parallel_tools": capabilities.parallel_tools,
        "forced_tools": capabilities.forced_tools,
        "thinking": capabilities.thinking,
    }

    def card(name: str, info: ModelInfo) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": started_s,
            "owned_by": "headwater",
            "context_tokens": info.context_tokens,
            "max_model_len": info.context_tokens,
            "capabilities": abilities,
            "notes": list(capabilities.notes),
            "type": "model",
            "display_name": name,
            "created_at": started,
        }

    async def list_models(_: HttpRequest) -> Response:
        try:
            info = door.info()
        except HeadwaterError as error:
            return error_response(failure_of(error))
        cards = [card(name, info) for name in served_names(door.config, info)]
        page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return _json({"object": "list", "data": cards} | page)

    async def one_model(http: HttpRequest) -> Response:
        try:
            info = door.info()
            names = served_names(door.config, info)
            if (name := http.path_params["name"]) not in names:
                raise no_model(names)
        except HeadwaterError as error:
            return error_response(failure_of(error))
        return _json(card(name, info))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        # Names of models may hold slashes.
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
    ]


def _json(content: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
