"""Failures in OpenAI's words: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from headwater.api.failure import Failure, FailureKind

_TYPES = {
    FailureKind.INVALID_REQUEST: "invalid_request_error",
    FailureKind.UNAUTHENTICATED: "invalid_request_error",
    FailureKind.FORBIDDEN: "invalid_request_error",
    FailureKind.NOT_FOUND: "invalid_request_error",
    FailureKind.TOO_LARGE: "invalid_request_error",
    FailureKind.OVERLOADED: "rate_limit_error",
    FailureKind.NOT_READY: "service_unavailable_error",
    FailureKind.INTERNAL: "server_error",
}


def error_body(failure: Failure) -> bytes:
    return msgspec.json.encode(
        {
            "error": {
                "message": failure.message,
                "type": _TYPES[failure.kind],
                "param": failure.param,
                "code": failure.code,
            }
        }
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
    """The last frame of a stream that failed. No [DONE] follows: the stream is not complete."""
    return b"data: " + error_body(failure) + b"\n\n"
