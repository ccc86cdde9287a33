"""The door itself: keys, hosts, bodies, health, logs.

Raw sockets where a client would be too polite.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from api_server import (
    INFO,
    Script,
    ScriptedGenerator,
    Served,
    SteadyClock,
    byte_recipe,
    error_of,
    say,
    say_then_raise,
    serving,
    wait_forever,
    wait_until,
)
from starlette.routing import Route

from headwater import __version__
from headwater.api.app import create_app
from headwater.api.config import ApiConfig, ApiKey
from headwater.core.errors import ConfigError, EngineFault
from headwater.core.request import Request, SequenceOutput

SECRET = "sk-marker-secret"
KEYS = (ApiKey("alice", SECRET), ApiKey.unnamed("sk-other"))
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with serving(ApiConfig(keys=KEYS)) as running:
        yield running


@pytest.fixture(scope="module")
def keyless() -> Iterator[Served]:
    config = ApiConfig(allowed_hosts=("box.lan",), max_body_bytes=4096, body_timeout_s=0.3)
    with serving(config) as running:
        yield running


# ------------------------------------------------------------------ keys


def all_paths() -> list[str]:
    app = create_app(ScriptedGenerator(), byte_recipe(), ApiConfig(), SteadyClock())
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    assert len(paths) == len(app.routes) >= 13
    return paths


@pytest.mark.parametrize("path", [*all_paths(), "/", "/docs", "/openapi.json", "/nowhere"])
def test_i01_every_route_and_method_but_liveness_needs_a_key(keyed: Served, path: str) -> None:
    with keyed.client() as client:
        for method in METHODS:
            for spelt in (path, "/" + path, path + "/", path.upper(), "/x" + path):
                answer = client.request(method, keyed.url + spelt, json={"prompt": "x"})
                is_public = spelt == "/health/live" and method in ("GET", "HEAD")
                assert answer.status_code == (200 if is_public else 401), (method, spelt)
                if not is_public and method != "HEAD":
                    if spelt.startswith("/v1/messages"):
                        assert answer.json()["error"]["type"] == "authentication_error"
                    else:
                        assert error_of(answer)["code"] == "invalid_api_key"
                    assert answer.headers["www-authenticate"] == "Bearer"
    assert not keyed.generator.requests


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {SECRET}"},
        {"Authorization": f"bearer   {SECRET}"},
        {"x-api-key": SECRET},
        {"X-API-Key": "sk-other"},
    ],
)
def test_i01_a_key_opens_as_bearer_and_as_x_api_key(keyed: Served, headers: dict[str, str]) -> None:
    keyed.generator.play(say("ok"))
    assert keyed.post("/v1/completions", {"prompt": "x"}, **headers).status_code == 200
    tenant = keyed.generator.requests[0].tenant
    assert tenant == ("alice" if SECRET in str(headers) else KEYS[1].name)
    assert "sk-" not in tenant
    assert keyed.get("/v1/nowhere", **headers).status_code == 404
    assert keyed.get("/v1/completions", **headers).status_code == 405
    assert keyed.get("//v1/models", **headers).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        b"Authorization: Bearer wrong\r\n",
        b"Authorization: Bearer \r\n",
        b"Authorization: Basic " + SECRET.encode() + b"\r\n",
        b"Authorization: " + SECRET.encode() + b"\r\n",
        b"x-api-key: alice\r\n",
        b"x-api-key: \xff\xfe\r\n",
        b"x-api-key: wrong\r\nx-api-key: " + SECRET.encode() + b"\r\n",
        b"Authorization: Bearer a\r\nAuthorization: Bearer " + SECRET.encode() + b"\r\n",
        b"Cookie: key=" + SECRET.encode() + b"\r\n",
    ],
)
def test_i01_anything_else_does_not_open(keyed: Served, headers: bytes) -> None:
    answer = keyed.raw(
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "target", [b"/health/live/../../v1/models", b"/health/live;/v1/models", b"/health/live%00"]
)
def test_i01_the_public_path_opens_no_other_one(keyed: Served, target: bytes) -> None:
    answer = keyed.raw(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_i01_a_websocket_is_closed_without_a_key(keyed: Served) -> None:
    answer = keyed.raw(
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        first_line_only=True,
    )
    assert answer.split()[1] in (b"401", b"403")


def test_keys_never_show_in_a_config_and_bad_ones_are_refused() -> None:
    assert SECRET not in repr(ApiConfig(keys=KEYS))
    for keys in ((ApiKey("a", ""),), (ApiKey("", "x"),), (ApiKey("a", "1"), ApiKey("a", "2"))):
        with pytest.raises(ConfigError, match="keys"):
            ApiConfig(keys=keys)
    with pytest.raises(ConfigError, match="max_body_bytes"):
        ApiConfig(max_body_bytes=0)
    with pytest.raises(ConfigError, match="keepalive_s"):
        ApiConfig(keepalive_s=float("nan"))


# ------------------------------------------------------------------ hosts and origins


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("[0:0:0:0:0:0:0:1]", 200),
        ("box.lan:80", 200),
        ("evil.test:8000", 403),
        ("localhost.evil.test", 403),
        ("evil.test@127.0.0.1", 403),
        ("127.0.0.1:x", 403),
        ("127.0.0.1/x", 403),
        ("0.0.0.0", 403),
        ("169.254.169.254", 403),
        ("", 403),
    ],
)
def test_i09_a_keyless_server_answers_only_to_names_of_its_own(
    keyless: Served, host: str, status: int
) -> None:
    for path in ("/v1/models", "/nowhere", "/health/live"):
        got = keyless.get(path, Host=host).status_code
        assert got == (404 if status == 200 and path == "/nowhere" else status)


def test_i09_no_host_or_two_are_refused(keyless: Served) -> None:
    assert keyless.raw(b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403 ")
    two = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.test\r\nConnection: close\r\n"
    assert b" 200 " not in keyless.raw(two + b"\r\n").split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.test", 403),
        ("null", 403),
        ("http://localhost:3000", 200),
        ("https://127.0.0.1", 200),
        ("file://localhost", 403),
    ],
)
def test_i09_pages_of_other_sites_are_refused_and_no_cors_is_granted(
    keyless: Served, origin: str, status: int
) -> None:
    keyless.generator.play(say("ok"))
    answer = keyless.post("/v1/completions", {"prompt": "x"}, Origin=origin)
    assert answer.status_code == status
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with keyless.client() as client:
        asked = client.options("/v1/completions", headers=preflight)
    for got in (answer, asked):
        assert not [name for name in got.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "content_type",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"],
)
def test_i09_a_body_that_is_not_declared_json_is_a_415(
    keyless: Served, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    with keyless.client() as client:
        answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415
    error_of(answer)


def test_json_with_a_charset_is_json_and_a_compressed_body_is_not_taken(keyless: Served) -> None:
    keyless.generator.play(say("ok"))
    body = b'{"prompt": "x"}'
    with keyless.client() as client:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 200
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 415


# ------------------------------------------------------------------ bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"{'prompt': 1}",
        b'{"prompt": "x"} {}',
        b'\xff\xfe{"prompt": "x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 4000,
        b'{"u":' + b'{"a":' * 700,
        b'{"prompt": ' + b"[" * 3000 + b"]" * 1000 + b"}",
        b'{"tools": ' + b"[" * 1900 + b"]" * 1900 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_i07_bodies_that_are_not_a_json_object_are_a_400(keyless: Served, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        with keyless.client() as client:
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        error_of(answer)
    keyless.generator.play(say("ok"))
    assert keyless.complete().status_code == 200


def head(path: str = "/v1/completions", *lines: str) -> bytes:
    fixed = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join([*fixed, *lines, "", ""]).encode()


def test_i07_a_body_over_the_cap_is_a_413_before_it_is_sent(keyless: Served) -> None:
    started_s = time.monotonic()
    answer = keyless.raw(head("/v1/completions", "Content-Length: 300000000"), first_line_only=True)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert time.monotonic() - started_s < 0.25
    huge = keyless.raw(head("/v1/completions", "Content-Length: " + "9" * 400))
    assert huge.startswith(b"HTTP/1.1 4")


def test_i07_a_client_that_sends_a_large_body_regardless_still_reads_the_413(
    keyless: Served,
) -> None:
    answer = keyless.complete("x" * 2_000_000)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"


def test_i07_a_chunked_body_is_counted_as_it_comes(keyless: Served) -> None:
    chunk = b"400\r\n" + b"x" * 0x400 + b"\r\n"
    sent = head("/v1/completions", "Transfer-Encoding: chunked") + chunk * 5
    assert keyless.raw(sent, first_line_only=True).startswith(b"HTTP/1.1 413 ")


def test_i07_a_body_that_never_ends_is_a_408(keyless: Served) -> None:
    answer = keyless.raw(head("/v1/completions", "Content-Length: 100") + b'{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    # Length and chunks at once: the oldest trick to hide a second request.
    both = head("/v1/completions", "Content-Length: 3", "Transfer-Encoding: chunked")
    assert b" 200 " not in keyless.raw(both + b"0\r\n\r\n", first_line_only=True)


def test_e06_a_client_that_leaves_while_it_sends_its_body_leaves_no_trace(keyless: Served) -> None:
    keyless.generator.play(say("ok"))
    keyless.raw(head("/v1/completions", "Content-Length: 100") + b'{"prompt"', read=False)
    assert keyless.complete().status_code == 200
    assert len(keyless.generator.requests) == 1


def test_i07_health_answers_while_large_prompts_are_tokenised() -> None:
    with serving() as served, ThreadPoolExecutor(4) as pool:
        content = "word " * 300_000
        calls = [pool.submit(served.chat, content) for _ in range(4)]
        slowest_s, num_probes = 0.0, 0
        while not all(call.done() for call in calls):
            started_s = time.monotonic()
            assert served.get("/health/live").status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - started_s)
            num_probes += 1
        assert {call.result().status_code for call in calls} == {400}
        assert num_probes > 1
        assert slowest_s < 3


# ------------------------------------------------------------------ health, version


def test_j01_ready_tells_the_routers_truth_and_live_does_not_care(keyless: Served) -> None:
    keyless.generator.play(say("ok"))
    assert keyless.get("/health/ready").json() == {"status": "ready"}
    keyless.generator.ready = False
    keyless.generator.reason = "stuck: no step ended for 30 s"
    answer = keyless.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "stuck: no step ended for 30 s"
    assert keyless.get("/health/live").status_code == 200


def test_j01_before_a_model_is_loaded_calls_get_503_and_probes_answer(keyless: Served) -> None:
    keyless.generator.play(say("ok"))
    keyless.generator.info = None
    keyless.generator.reason = "starting"
    for answer in (keyless.chat(), keyless.complete(), keyless.get("/v1/models")):
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert error_of(answer)["code"] == "not_ready"
    assert keyless.get("/health/live").status_code == 200
    assert keyless.get("/metrics").status_code == 200
    keyless.generator.info = INFO


def test_version_is_the_packages(keyless: Served) -> None:
    assert keyless.get("/version").json() == {"version": __version__}


# ------------------------------------------------------------------ logs

MARKERS = ("MARKER-PROMPT", "MARKER-OUTPUT", SECRET, "MARKER-QUERY", "MARKER-FIELD", "MARKER-ERR")


async def leaky(request: Request) -> AsyncIterator[SequenceOutput]:
    async for output in say_then_raise("MARKER-OUTPUT", RuntimeError("MARKER-ERR"))(request):
        await asyncio.sleep(0.005)
        yield output


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
@pytest.mark.parametrize(
    "script", [say("MARKER-OUTPUT"), leaky, say_then_raise("", EngineFault("no text"))]
)
def test_j06_no_prompt_output_or_key_is_in_any_log_or_error(
    keyed: Served, caplog: pytest.LogCaptureFixture, level: int, script: Script
) -> None:
    keyed.generator.play(script)
    headers = {"Authorization": f"Bearer {SECRET}"}
    prompts: list[dict[str, object]] = [
        {"prompt": "MARKER-PROMPT"},
        {"prompt": "MARKER-PROMPT", "stream": True},
        {"prompt": "MARKER-PROMPT", "MARKER-FIELD " + "x" * 80: "MARKER-FIELD"},
        {"prompt": "MARKER-PROMPT", "temperature": "MARKER-FIELD"},
        {"prompt": "MARKER-PROMPT", "model": "MARKER-FIELD"},
        {"prompt": "MARKER-PROMPT", "logit_bias": {"MARKER-FIELD": 1}},
        {"prompt": "MARKER-PROMPT" * 100},
        {"prompt": ["MARKER-PROMPT", 5]},
        {"messages": [{"role": "MARKER-FIELD", "content": "MARKER-PROMPT"}]},
        {"messages": [{"role": "user", "content": [{"type": "MARKER-FIELD"}]}]},
    ]
    errors = ""
    with caplog.at_level(level):
        for body in prompts:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answer = keyed.post(f"{path}?q=MARKER-QUERY", body, **headers)
            if answer.status_code >= 400:
                errors += answer.text
        errors += keyed.get("/MARKER-QUERY", **headers).text
        errors += keyed.get("/v1/models/MARKER-QUERY", **headers).text
    # The test's own client logs too, and uvicorn's access log is off where Headwater serves.
    formatter = logging.Formatter()  # adds tracebacks
    ours = [record for record in caplog.records if record.name.startswith("headwater")]
    logged = "\n".join(formatter.format(record) for record in ours)
    assert "POST /v1/completions" in logged
    for marker in MARKERS:
        assert marker not in logged
        assert marker not in errors


def test_one_access_line_says_route_status_seconds_and_tokens(
    keyless: Served, caplog: pytest.LogCaptureFixture
) -> None:
    keyless.generator.play(say("hello", hit=1))
    with caplog.at_level(logging.INFO, "headwater.api.access"):
        call_id = keyless.complete("abc").json()["id"]
        keyless.get("/health/live")
        keyless.get("/metrics")
        keyless.get("/no/such/path")
        # A line is written when the answer is out.
        wait_until(lambda: len(caplog.records) >= 2, 2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    method, path, status, seconds, *tokens, line_id = lines[0].split()
    assert (method, path, status, line_id) == ("POST", "/v1/completions", "200", call_id)
    assert float(seconds.removesuffix("s")) >= 0
    assert tokens == ["prompt=3", "hit=1", "output=5"]
    assert lines[1].split()[:3] == ["GET", "unmatched", "404"]


def test_a_caller_that_left_is_named_so_in_its_access_line(
    keyless: Served, caplog: pytest.LogCaptureFixture
) -> None:
    keyless.generator.play(wait_forever())
    body = json.dumps({"prompt": "x"}).encode()
    with caplog.at_level(logging.INFO, "headwater.api.access"):
        address = ("127.0.0.1", keyless.port)
        with socket.create_connection(address) as connection:
            connection.sendall(head("/v1/completions", f"Content-Length: {len(body)}") + body)
            time.sleep(0.1)
        wait_until(lambda: len(caplog.records) >= 1, 2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert " 499 " in line
    assert "caller-left" in line
