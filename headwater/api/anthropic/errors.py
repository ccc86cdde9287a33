"""Failures in Anthropic's words: ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from headwater.api.failure import Failure, FailureKind

_TYPES = {
    FailureKind.INVALID_REQUEST: "invalid_request_error",
    FailureKind.UNAUTHENTICATED: "authentication_error",
    FailureKind.FORBIDDEN: "permission_error",
    FailureKind.NOT_FOUND: "not_found_error",
    FailureKind.TOO_LARGE: "request_too_large",
    FailureKind.OVERLOADED: "rate_limit_error",
    FailureKind.NOT_READY: "overloaded_error",
    FailureKind.INTERNAL: "api_error",
}


def error_body(failure: Failure) -> bytes:
    """The shape has no place for a field's name, so messages must have it.

    Agents tell that they must compact from how one message begins; it stays as it is.
    """
    message = failure.message
    is_known = failure.code == "context_length_exceeded"
    if failure.param is not None and failure.param not in message and not is_known:
        message = f"{failure.param}: {message}"
    return msgspec.json.encode(
        {"type": "error", "error": {"type": _TYPES[failure.kind], "message": message}}
    )


def error_response(failure: Failure) -> Response:
    """The answer while no header has been sent."""
    return Response(
        error_body(failure),
        status_code=failure.status,
        headers=dict(failure.headers),
        media_type="application/json",
    )


def error_frame(failure: Failure) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + error_body(failure) + b"\n\n"
