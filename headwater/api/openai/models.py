"""``GET /v1/models`` and ``/v1/models/{id}``, and the check of a body's ``model``."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headwater.api.calls import CallFacts, Door
from headwater.api.config import ApiConfig
from headwater.api.failure import FailureKind, Refused, failure_of, refused
from headwater.api.openai.errors import error_response
from headwater.core.errors import HeadwaterError, InvalidRequest
from headwater.core.request import ModelInfo


def served_names(config: ApiConfig, info: ModelInfo) -> tuple[str, ...]:
    """Names under which the one loaded model answers; the first is the default."""
    return config.served_names or (info.model_id,)


def check_model(name: str | None, facts: CallFacts, config: ApiConfig) -> str:
    """The name to answer with. Without one the only model is meant, but not in strict mode."""
    names = served_names(config, facts.info)
    if name is None:
        if config.strict:
            raise InvalidRequest(
                "missing required field 'model'", param="model", code="missing_required_parameter"
            )
        return names[0]
    if name not in names:
        raise _no_model(names)
    return name


def model_routes(door: Door) -> list[Route]:
    started_s = int(door.unix_time_s())

    def card(name: str, info: ModelInfo) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": started_s,
            "owned_by": "headwater",
            "context_tokens": info.context_tokens,
        }

    async def list_models(_: HttpRequest) -> Response:
        try:
            info = door.info()
        except HeadwaterError as error:
            return error_response(failure_of(error))
        cards = [card(name, info) for name in served_names(door.config, info)]
        return _json({"object": "list", "data": cards})

    async def one_model(http: HttpRequest) -> Response:
        try:
            info = door.info()
            names = served_names(door.config, info)
            if (name := http.path_params["name"]) not in names:
                raise _no_model(names)
        except HeadwaterError as error:
            return error_response(failure_of(error))
        return _json(card(name, info))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        # Names of models may hold slashes.
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
    ]


def _no_model(names: tuple[str, ...]) -> Refused:
    # The name asked for is not repeated: it may be anything.
    return refused(
        404,
        FailureKind.NOT_FOUND,
        f"the model does not exist here; served: {', '.join(names)}",
        param="model",
        code="model_not_found",
    )


def _json(content: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
