"""Reading a request body: content type, size cap and time cap, before any parsing.

The cap counts bytes as they come, so a missing or lying Content-Length changes
nothing. Returns bytes; ``decode`` makes sense of them off the event loop.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest

from headwater.api.failure import ClientGone, FailureKind, Refused, refused


async def read_json_body(http: HttpRequest, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises Refused: 415 (not JSON), 413 (over ``max_bytes``), 408 (too slow)."""
    _check_content_type(http)
    declared = http.headers.get("content-length", "")
    # Fifteen digits are a petabyte; int() itself would choke on thousands.
    if declared.isdecimal() and (len(declared) > 15 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_capped(http, max_bytes)
    except TimeoutError:
        raise refused(
            408,
            FailureKind.INVALID_REQUEST,
            f"the request body did not arrive within {timeout_s:g} seconds",
            code="body_timeout",
            headers=(("Connection", "close"),),
        ) from None


async def _read_capped(http: HttpRequest, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the caller closed the connection while it sent the body")
        part: bytes = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_content_type(http: HttpRequest) -> None:
    # A web page may post text/plain or a form to any site without asking; JSON it may not.
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise refused(
            415,
            FailureKind.INVALID_REQUEST,
            "the body must be JSON: send 'Content-Type: application/json'",
            code="unsupported_media_type",
        )
    if http.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise refused(
            415,
            FailureKind.INVALID_REQUEST,
            "compressed request bodies are not accepted",
            code="unsupported_content_encoding",
        )


def _too_large(max_bytes: int) -> Refused:
    return refused(
        413,
        FailureKind.TOO_LARGE,
        f"the request body is larger than {max_bytes} bytes",
        code="body_too_large",
    )
