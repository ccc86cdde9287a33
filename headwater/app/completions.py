"""A streaming client for any OpenAI-compatible server, for ``chat`` and ``bench``.

One answer is an async iterator of ``Delta``; whatever goes wrong is one
``StreamFailed`` with a short kind to count by. Keeps no history and prints
nothing. Closing the iterator closes the connection, which cancels the answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import httpx

from headwater.app.settings import is_loopback
from headwater.app.target import Target
from headwater.core.errors import HeadwaterError

JsonObject = Mapping[str, object]

_MAX_ERROR_BYTES = 4096


class StreamFailed(HeadwaterError):
    """An answer did not come, or not whole. ``kind`` is short and the same for like faults."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedUsage:
    """What the server counted; None where it does not say."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_hit_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one event of the stream brought."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: ReportedUsage | None = None


def open_client(target: Target) -> httpx.AsyncClient:
    """A client for ``target``, with no bound on connections: the caller bounds its requests."""
    return httpx.AsyncClient(
        headers=target.headers,
        timeout=httpx.Timeout(target.timeout_s, connect=min(10.0, target.timeout_s), pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        # A proxy from the environment is for the world outside, not for this machine.
        trust_env=not is_loopback(target.host),
    )


async def first_model(client: httpx.AsyncClient, target: Target) -> str:
    """The first model that the server lists. Raises StreamFailed."""
    try:
        response = await client.get(f"{target.base_url}/models")
    except httpx.HTTPError as error:
        raise _transport_failure(error, target) from error
    if response.status_code != httpx.codes.OK:
        raise _status_failure(response, response.content)
    names = [
        item["id"]
        for item in _list(_parse(response.text).get("data"))
        if isinstance(item, dict) and isinstance(item.get("id"), str)
    ]
    if not names:
        raise StreamFailed("no model", f"{target.base_url} lists no model; name one with --model")
    return str(names[0])


async def stream_answer(
    client: httpx.AsyncClient, target: Target, path: str, body: JsonObject
) -> AsyncGenerator[Delta]:
    """POST ``body`` to ``path`` with streaming on; yields until the answer is whole.

    Raises StreamFailed if the server cannot be reached, refuses, reports an error
    inside the stream, or closes before any finish reason.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    finished = False
    try:
        async with client.stream("POST", f"{target.base_url}{path}", json=request) as response:
            if response.status_code != httpx.codes.OK:
                raise _status_failure(response, await _head_of(response))
            async for line in response.aiter_lines():
                # Comment lines (": ...") keep a silent connection open; other fields are not used.
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                delta = _delta(_parse(data))
                finished = finished or delta.finish_reason is not None
                yield delta
    except httpx.HTTPError as error:
        raise _transport_failure(error, target) from error
    if not finished:
        raise StreamFailed("cut short", "the stream ended before the answer was finished")


async def _head_of(response: httpx.Response) -> bytes:
    """The first bytes of an error body, which may be of any length."""
    head = b""
    async for part in response.aiter_bytes():
        head += part
        if len(head) >= _MAX_ERROR_BYTES:
            break
    return head[:_MAX_ERROR_BYTES]


def _delta(event: JsonObject) -> Delta:
    if event.get("error") is not None:
        raise StreamFailed("error in stream", _error_text(event) or "the server reported an error")
    choices = _list(event.get("choices"))
    choice = _object(choices[0]) if choices else {}
    message = _object(choice.get("delta"))
    return Delta(
        # Chat has delta.content, completions has text.
        text=_text(message.get("content")) or _text(choice.get("text")),
        reasoning=_text(message.get("reasoning_content")) or _text(message.get("reasoning")),
        finish_reason=_text(choice.get("finish_reason")) or None,
        usage=_usage(event.get("usage")),
    )


def _usage(found: object) -> ReportedUsage | None:
    if not isinstance(found, dict):
        return None
    details = _object(found.get("prompt_tokens_details"))
    return ReportedUsage(
        num_prompt_tokens=_count(found.get("prompt_tokens")),
        num_output_tokens=_count(found.get("completion_tokens")),
        num_hit_tokens=_count(details.get("cached_tokens")),
    )


def _status_failure(response: httpx.Response, body: bytes) -> StreamFailed:
    try:
        said = _error_text(_parse(body.decode("utf-8", "replace")))
    except StreamFailed:
        said = ""
    status = response.status_code
    return StreamFailed(
        f"HTTP {status}", f"the server answered HTTP {status}: {said or 'no reason'}"
    )


def _transport_failure(error: httpx.HTTPError, target: Target) -> StreamFailed:
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return StreamFailed(
                "no connection",
                f"no server answers at {target.base_url}; start one with `headwater serve`, "
                "or name another with --url",
            )
        case httpx.TimeoutException():
            return StreamFailed("timeout", f"the server was silent for {target.timeout_s:g} s")
        case _:
            return StreamFailed("connection lost", f"the connection broke: {error}")


def _error_text(event: JsonObject) -> str:
    error = event.get("error")
    return _text(error.get("message")) if isinstance(error, dict) else _text(error)


def _parse(text: str) -> JsonObject:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise StreamFailed("bad JSON", "the server sent something that is not a JSON object")
    return found


def _text(found: object) -> str:
    return found if isinstance(found, str) else ""


def _count(found: object) -> int | None:
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _list(found: object) -> list[object]:
    return found if isinstance(found, list) else []


def _object(found: object) -> dict[str, object]:
    return found if isinstance(found, dict) else {}
