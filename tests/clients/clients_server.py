"""Headwater's door in front of the scripted model, with a tap that remembers every exchange.

Runs the real app on a loopback port, in a thread. The tap sits outside the app
and changes nothing. Used by ``run_clients``, inside the network namespace.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvicorn
from clients_model import ScriptedModel, scripted_recipe
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.api.app import create_app
from headwater.api.config import ApiConfig, ApiKey
from headwater.recipe.constraints import GrammarCompiler

KEY: Final = "dummy"
START_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Exchange:
    """One request as it came in, and how it was answered."""

    method: str
    target: str  # path and query
    headers: list[tuple[str, str]]
    body: bytes = b""
    status: int = 0
    answer: bytes = b""
    complete: bool = False  # the answer's last byte was sent

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def save(self, path: Path) -> None:
        """As JSON that a person can read."""
        try:
            body = json.loads(self.body) if self.body else None
        except ValueError:
            body = repr(self.body)
        document = {
            "request": f"{self.method} {self.target}",
            "headers": self.headers,
            "body": body,
            "status": self.status,
            "answer": self.answer.decode(errors="replace"),
        }
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False), encoding="utf-8")


@dataclass(slots=True)
class Tap:
    """ASGI middleware. ``exchanges`` are in the order in which the requests came."""

    app: ASGIApp
    exchanges: list[Exchange] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        exchange = Exchange(
            method=scope["method"],
            target=scope["path"] + ("?" + query if query else ""),
            headers=[(name.decode(), value.decode()) for name, value in scope["headers"]],
        )
        self.exchanges.append(exchange)

        async def tapped_receive() -> Message:
            message = await receive()
            exchange.body += message.get("body", b"")
            return message

        async def tapped_send(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            elif message["type"] == "http.response.body":
                exchange.answer += message.get("body", b"")
                exchange.complete = not message.get("more_body", False)

        await self.app(scope, tapped_receive, tapped_send)


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    model: ScriptedModel
    tap: Tap
    port: int


class _SteadyClock:
    def now_s(self) -> float:
        return time.monotonic()


@contextlib.contextmanager
def serving() -> Iterator[Served]:
    """The app on a free loopback port, with one key, as a user would start it."""
    recipe = scripted_recipe()
    model = ScriptedModel(recipe)
    compiler = GrammarCompiler(lambda: (recipe.tokenizer, recipe.end_token_ids))
    app = create_app(
        model,
        recipe,
        ApiConfig(keys=(ApiKey("t", KEY),)),
        _SteadyClock(),
        check_constraint=compiler.check,
    )
    tap = Tap(app)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(tap, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        end_s = time.monotonic() + START_TIMEOUT_S
        while not server.started:
            if time.monotonic() > end_s:
                raise TimeoutError("the server did not start")
            time.sleep(0.01)
        yield Served(model, tap, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
