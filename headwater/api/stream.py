"""Bytes on the wire: event streams with keepalives, and leaving when the caller leaves.

Works on frames and futures only; knows no dialect and nothing of a generation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from headwater.api.failure import ClientGone, Failure, failure_of, log_failure

ResultT = TypeVar("ResultT")

# A comment line: every event-stream parser skips it, and every proxy sees bytes.
COMMENT_FRAME = b": keepalive\n\n"

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a buffering proxy would hold tokens back
)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``, which is cancelled as soon as the caller disconnects.

    Call it when the body has been read. Raises ClientGone; work that was done
    by then counts as done. ``work`` has ended, cleaned up, when this returns.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the caller closed the connection")
        return working.result()
    finally:
        await end_tasks(working, leaving)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what still runs and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def send_stream(
    send: Send,
    frames: AsyncGenerator[bytes, None],
    *,
    keepalive_s: float,
    keepalive_frame: bytes,
    error_frame: Callable[[Failure], bytes],
    call_id: str,
    headers: tuple[tuple[str, str], ...] = (),
) -> None:
    """Headers at once, then ``frames``; a sign of life whenever ``keepalive_s`` pass in silence.

    The sign is a comment line until the first frame, then ``keepalive_frame``: a
    dialect's own event may not come before the event that opens its stream.

    The timer is a wall clock of its own: it ticks while a step takes minutes.
    An error ends the stream with one error frame, and nothing after it.
    """
    fields = [*_HEADERS, (b"x-request-id", call_id.encode()), *_encoded(headers)]
    await send({"type": "http.response.start", "status": 200, "headers": fields})
    now_s = asyncio.get_running_loop().time
    last_sent_s = now_s()
    sign = COMMENT_FRAME

    async def keep_alive() -> None:
        nonlocal last_sent_s
        while True:
            wait_s = last_sent_s + keepalive_s - now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                last_sent_s = now_s()
                await send(_part(sign))

    beating = asyncio.create_task(keep_alive())
    last_frame = b""
    try:
        async with contextlib.aclosing(frames):
            async for frame in frames:
                await send(_part(frame))
                last_sent_s = now_s()
                sign = keepalive_frame
    # The headers are out: whatever went wrong, the caller must not take the
    # stream's end for success.
    except Exception as error:
        log_failure(error, call_id)
        last_frame = error_frame(failure_of(error))
    finally:
        await end_tasks(beating)
    await send({"type": "http.response.body", "body": last_frame, "more_body": False})


async def send_json(
    send: Send, body: bytes, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
) -> None:
    """A whole JSON answer."""
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *_encoded(headers),
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _encoded(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers]


def _part(frame: bytes) -> Message:
    return {"type": "http.response.body", "body": frame, "more_body": True}


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
