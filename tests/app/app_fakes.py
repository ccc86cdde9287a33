"""A small HTTP server that speaks just enough server-sent events, on a thread of its own.

Each POST is answered by the next ``Script`` (the last one repeats), so that a
test decides what a client sees: chunks, pauses, errors, a broken stream.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One answer. ``pauses_s[i]`` is waited before chunk i."""

    chunks: Sequence[str] = ("Hel", "lo")
    pauses_s: Sequence[float] = ()
    usage: dict[str, object] | None = field(
        default_factory=lambda: {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
    )
    finish: str | None = "stop"
    status: int = 200
    error: str = ""  # body of a status that is not 200, or an error event with 200


class FakeServer:
    """Listens on loopback; ``requests`` has the paths and bodies that came."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts or (Script(),))
        self.requests: list[tuple[str, dict[str, object]]] = []
        self.headers: list[dict[str, str]] = []
        self.num_in_flight = 0
        self.max_in_flight = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                """The test's output stays clean."""

            def do_GET(self) -> None:
                body = json.dumps({"data": [{"id": "fake-model"}]}).encode()
                self._head(200, "application/json", len(body))
                self.wfile.write(body)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                with server.answering(self.path, body, dict(self.headers)) as script:
                    self._answer(script)

            def _answer(self, script: Script) -> None:
                if script.status != 200:
                    refusal = json.dumps({"error": {"message": script.error}}).encode()
                    self._head(script.status, "application/json", len(refusal))
                    self.wfile.write(refusal)
                    return
                self.close_connection = True
                self._head(200, "text/event-stream", None)
                is_chat = self.path.endswith("/chat/completions")
                try:
                    for event in events(script, is_chat=is_chat):
                        self.wfile.write(event)
                        self.wfile.flush()
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client went away, which is what some tests do

            def _head(self, status: int, content_type: str, length: int | None) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                if length is None:
                    self.send_header("Connection", "close")
                else:
                    self.send_header("Content-Length", str(length))
                self.end_headers()

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @contextmanager
    def answering(
        self, path: str, body: dict[str, object], headers: dict[str, str]
    ) -> Iterator[Script]:
        with self._lock:
            self.requests.append((path, body))
            self.headers.append(headers)
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
            self.num_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            yield script
        finally:
            with self._lock:
                self.num_in_flight -= 1

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def events(script: Script, *, is_chat: bool) -> Iterator[bytes]:
    yield b": keep-alive\n\n"
    if is_chat:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for index, text in enumerate(script.chunks):
        time.sleep(script.pauses_s[index] if index < len(script.pauses_s) else 0.0)
        choice = {"delta": {"content": text}} if is_chat else {"text": text}
        yield event({"choices": [{"index": 0, **choice, "finish_reason": None}]})
    if script.error:
        yield event({"error": {"message": script.error}})
        return
    if script.finish is not None:
        last: dict[str, object] = {"delta": {}} if is_chat else {"text": ""}
        yield event({"choices": [{"index": 0, **last, "finish_reason": script.finish}]})
        if script.usage is not None:
            yield event({"choices": [], "usage": script.usage})
        yield b"data: [DONE]\n\n"


def event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
