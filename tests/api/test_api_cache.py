"""The cache at the door: how long KV is kept, and whose it is."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import (
    MODEL_ID,
    Script,
    Served,
    error_of,
    say,
    say_with_hit,
    serving,
)
from api_talk import talking, write
from hypothesis import given
from hypothesis import strategies as st

from headwater.api.caching import namespace
from headwater.api.config import ApiConfig, ApiKey
from headwater.api.recording import RequestRecorder
from headwater.api.retention import CacheAsk, Caller, KeepTimes, choose_retention
from headwater.core.cache import CacheReport, MissReason, Retention, RetentionClass
from headwater.core.errors import ConfigError
from headwater.core.request import DEVICE_ONLY, Request
from headwater.recipe.record import from_line

DAY_S = 86400.0
AGENT, CHAT = RetentionClass.AGENT, RetentionClass.CHAT
MARKER = "MARKER-TEXT"
DIALECTS = ("chat", "complete", "respond", "message")
TOOL = {"name": "f", "description": "d"}
TOOLS: dict[str, list[dict[str, object]]] = {
    "chat": [{"type": "function", "function": TOOL}],
    "respond": [{"type": "function", **TOOL}],
    "message": [{**TOOL, "input_schema": {"type": "object"}}],
}
ADMIN = ApiKey("admin", "sk-admin")
SHORT = ApiKey("short", "sk-short", kind=AGENT, max_keep_s=3600.0)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with talking() as running:
        yield running


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with serving(ApiConfig(keys=(ADMIN, SHORT))) as running:
        yield running


def send(served: Served, dialect: str, content: str = "hello there", **fields: object) -> Request:
    answer: httpx.Response = getattr(served, dialect)(content, **fields)
    assert answer.status_code == 200, answer.text
    return served.generator.requests[-1]


# ------------------------------------------------------------------ how long KV is kept


@pytest.mark.parametrize("dialect", DIALECTS)
def test_traffic_decides_the_class_and_the_request_may_choose_or_shorten(
    served: Served, dialect: str
) -> None:
    served.generator.play(write("ok"))
    assert send(served, dialect).retention == Retention(CHAT, 7 * DAY_S)
    if dialect in TOOLS:
        with_tools = send(served, dialect, tools=TOOLS[dialect])
        assert with_tools.retention == Retention(AGENT, 3 * DAY_S)
        chosen = send(served, dialect, tools=TOOLS[dialect], cache_retention="chat")
        assert chosen.retention == Retention(CHAT, 7 * DAY_S)
    for asked, kept in (
        ("agent", Retention(AGENT, 3 * DAY_S)),
        ("none", Retention(CHAT, 0.0)),
        (60, Retention(CHAT, 60.0)),
        (0.5, Retention(CHAT, 0.5)),
        (1e9, Retention(CHAT, 7 * DAY_S)),  # it can only shorten
        (None, Retention(CHAT, 7 * DAY_S)),
    ):
        assert send(served, dialect, cache_retention=asked).retention == kept, asked


@pytest.mark.parametrize("dialect", ["chat", "complete", "respond"])
@pytest.mark.parametrize(
    ("asked", "keep_s"), [("in_memory", 0.0), ("in-memory", 0.0), ("24h", DAY_S), (None, 7 * DAY_S)]
)
def test_openais_word_for_retention_is_understood(
    served: Served, dialect: str, asked: str | None, keep_s: float
) -> None:
    served.generator.play(write("ok"))
    request = send(served, dialect, prompt_cache_retention=asked, prompt_cache_key="any")
    assert request.retention == Retention(CHAT, keep_s)
    shorter = send(served, dialect, prompt_cache_retention=asked, cache_retention=60)
    assert shorter.retention.keep_s == min(60.0, keep_s)


def test_anthropics_marks_change_nothing(served: Served) -> None:
    served.generator.play(write("ok"))
    mark = {"type": "ephemeral", "ttl": "5m"}
    block = {"type": "text", "text": "hello there", "cache_control": mark}
    marked = send(served, "message", messages=[{"role": "user", "content": [block]}])
    plain = send(served, "message")
    assert marked.prompt_tokens == plain.prompt_tokens
    assert marked.retention == plain.retention == Retention(CHAT, 7 * DAY_S)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "fields",
    [
        {"cache_retention": "forever"},
        {"cache_retention": -1},
        {"cache_retention": 1e300},
        {"cache_retention": 10**400},
        {"cache_retention": True},
        {"cache_retention": []},
        {"cache_salt": ""},
        {"cache_salt": "x" * 257},
        {"cache_salt": 5},
        {"return_cache_report": "yes"},
        {"prompt_cache_retention": "1y"},
    ],
)
def test_what_makes_no_sense_is_a_400_that_names_the_field(
    served: Served, dialect: str, fields: dict[str, object]
) -> None:
    (name,) = fields
    if dialect == "message" and name.startswith("prompt_"):
        pytest.skip("no field of that API")
    answer: httpx.Response = getattr(served, dialect)(**fields)
    assert answer.status_code == 400
    assert name in answer.text
    assert "forever" not in answer.text


def test_the_keys_limit_holds_whatever_a_request_says(keyed: Served) -> None:
    keyed.generator.play(say("ok"))

    def kept(key: ApiKey, **fields: object) -> Retention:
        headers = {"authorization": f"Bearer {key.secret}"}
        assert keyed.post("/v1/completions", {"prompt": "x"} | fields, **headers).is_success
        return keyed.generator.requests[-1].retention

    assert kept(SHORT) == Retention(AGENT, 3600.0)
    assert kept(SHORT, cache_retention="chat") == Retention(CHAT, 3600.0)
    assert kept(SHORT, cache_retention=7200) == Retention(AGENT, 3600.0)
    assert kept(SHORT, prompt_cache_retention="24h") == Retention(AGENT, 3600.0)
    assert kept(SHORT, cache_retention=60) == Retention(AGENT, 60.0)
    assert kept(ADMIN) == Retention(CHAT, 7 * DAY_S)


KINDS = st.sampled_from([None, AGENT, CHAT])
SECONDS = st.floats(0, 1e9) | st.just(math.inf)


@given(
    has_tools=st.booleans(),
    asked=KINDS,
    keys_own=KINDS,
    asked_s=SECONDS,
    key_s=SECONDS,
    agent_s=st.floats(0, 1e7),
    chat_s=st.floats(0, 1e7),
)
def test_no_request_keeps_longer_than_its_class_its_key_or_its_word(
    has_tools: bool,
    asked: RetentionClass | None,
    keys_own: RetentionClass | None,
    asked_s: float,
    key_s: float,
    agent_s: float,
    chat_s: float,
) -> None:
    ask = CacheAsk(has_tools=has_tools, kind=asked, keep_s=asked_s)
    caller = Caller(tenant="t", kind=keys_own, max_keep_s=key_s)
    kept = choose_retention(ask, caller, KeepTimes(agent_s=agent_s, chat_s=chat_s))
    assert kept.kind is (asked or keys_own or (AGENT if has_tools else CHAT))
    of_class = agent_s if kept.kind is AGENT else chat_s
    assert kept.keep_s == min(of_class, key_s, asked_s)


def test_days_come_from_the_settings() -> None:
    config = ApiConfig(keep=KeepTimes(agent_s=10.0, chat_s=0.0))
    with serving(config) as served:
        served.generator.play(say("ok"))
        assert send(served, "complete").retention == DEVICE_ONLY
        assert send(served, "complete", cache_retention="agent").retention.keep_s == 10.0


@pytest.mark.parametrize(
    "key",
    [
        ApiKey("a b", "s"),
        ApiKey("a~00", "s"),  # the mark of a salt: no key may own a part of another's namespace
        ApiKey("~", "s"),
        ApiKey("a\n", "s"),
        ApiKey("x" * 65, "s"),
        ApiKey("a", "s", max_keep_s=-1.0),
        ApiKey("a", "s", max_keep_s=math.nan),
    ],
    ids=repr,
)
def test_a_key_that_makes_no_sense_is_refused_at_start(key: ApiKey) -> None:
    with pytest.raises(ConfigError, match=r"api\.keys"):
        ApiConfig(keys=(key,))


# ------------------------------------------------------------------ C12: whose it is


class TenantCache:
    """A worker that keeps each prompt under the tenant of its request, and hits by tokens."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[int, ...]]] = {}

    def script(self) -> Script:
        async def play(request: Request) -> Any:
            kept = self._kept.setdefault(request.tenant, [])
            tokens = request.prompt_tokens
            hit = max((_shared(tokens, other) for other in kept), default=0)
            hit = min(hit, len(tokens) - 1)
            kept.append(tokens)
            is_others = any(tokens in k for t, k in self._kept.items() if t != request.tenant)
            reason = MissReason.OTHER_TENANT if is_others and not hit else MissReason.NEW
            report = CacheReport(num_disk_tokens=hit, reason=reason)
            async for output in say_with_hit("ok", report)(request):
                yield output

        return play


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def cached_tokens(served: Served, key: str, prompt: str = "a secret", **fields: object) -> int:
    headers = {"authorization": f"Bearer {key}"}
    answer = served.post("/v1/completions", {"prompt": prompt} | fields, **headers)
    assert answer.status_code == 200
    assert "other_tenant" not in str(answer.headers) + answer.text
    hit: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer.headers["x-headwater-cache"].startswith(f"hit={hit}; ")
    return hit


@pytest.mark.parametrize("salt", [None, "K1's salt"])
def test_c12_a_key_sees_nothing_of_another_keys_prompts_whatever_salt_it_sends(
    keyed: Served, salt: str | None
) -> None:
    keyed.generator.play(TenantCache().script())
    own = {} if salt is None else {"cache_salt": salt}
    assert cached_tokens(keyed, "sk-admin", **own) == 0
    tries = {"K1's salt", "admin", "admin~", namespace("admin", "x"), namespace("admin", salt)}
    for tried in sorted(tries):
        assert cached_tokens(keyed, "sk-short", cache_salt=tried) == 0
    # Neither by fields that name a tenant outright.
    assert cached_tokens(keyed, "sk-short", tenant="admin", user="admin") == 0
    # The paired check: its owner hits, with the same salt and only with it.
    assert cached_tokens(keyed, "sk-admin", **own) == 7
    assert cached_tokens(keyed, "sk-admin", "a secret", cache_salt="another") == 0


def test_c12_a_salt_narrows_a_keys_own_namespace(keyed: Served) -> None:
    keyed.generator.play(TenantCache().script())
    assert cached_tokens(keyed, "sk-admin") == 0
    assert cached_tokens(keyed, "sk-admin", cache_salt="s") == 0
    assert cached_tokens(keyed, "sk-admin", cache_salt="s") == 7
    assert cached_tokens(keyed, "sk-admin", cache_salt=None) == 7


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,20}", fullmatch=True) | st.just("")
SALTS = st.none() | st.text(min_size=1, max_size=40)


@given(first=st.tuples(NAMES, SALTS), second=st.tuples(NAMES, SALTS))
def test_c12_only_the_same_tenant_with_the_same_salt_shares_a_namespace(
    first: tuple[str, str | None], second: tuple[str, str | None]
) -> None:
    assert (namespace(*first) == namespace(*second)) == (first == second)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_c12_no_answer_says_that_another_tenant_exists(
    served: Served, dialect: str, stream: bool
) -> None:
    served.generator.play(say_with_hit("ok", CacheReport(reason=MissReason.OTHER_TENANT)))
    answer: httpx.Response = getattr(served, dialect)(stream=stream, return_cache_report=True)
    assert "reason=new" in answer.headers["x-headwater-cache"]
    assert '"reason":"new"' in answer.text
    assert "tenant" not in answer.text


# ------------------------------------------------------------------ records of prompts


def test_the_recorder_gets_each_prompt_with_its_namespace_and_no_answer_waits(
    tmp_path: Path,
) -> None:
    recorder = RequestRecorder.open(tmp_path / "log")
    config = ApiConfig(keys=(ADMIN,))
    headers = {"authorization": f"Bearer {ADMIN.secret}"}
    turn = [{"role": "user", "content": MARKER}]
    with contextlib.closing(recorder), serving(config, recorder=recorder) as served:
        served.generator.play(say("ok"))
        for path, body in (
            ("chat/completions", {"messages": turn}),
            ("chat/completions", {"messages": turn, "cache_salt": "s"}),
            ("messages", {"messages": turn, "max_tokens": 5}),
            ("responses", {"input": MARKER}),
            ("completions", {"prompt": [MARKER, "x"]}),
            ("chat/completions", {"messages": turn, "n": 0}),  # refused: not recorded
        ):
            served.post(f"/v1/{path}", body, **headers)
    log = (tmp_path / "log").read_bytes()
    records = [from_line(line) for line in log.splitlines() if line]
    assert [record.dialect for record in records] == [
        "chat", "chat", "messages", "responses", "completions", "completions",
    ]  # fmt: skip
    assert records[0].tenant == records[2].tenant != records[1].tenant
    assert {record.model for record in records} == {MODEL_ID}
    assert [bool(record.messages) for record in records] == [True] * 4 + [False] * 2
    assert MARKER.encode() not in log


# ------------------------------------------------------------------ what KV depends on


@pytest.mark.parametrize("dialect", ["chat", "complete"])
@pytest.mark.parametrize("field", ["lora", "lora_name"])
def test_c10_an_adapter_is_refused_and_never_ignored(
    served: Served, dialect: str, field: str
) -> None:
    """Ignored, its prompt's KV would be kept, and hit, as the base model's."""
    answer: httpx.Response = getattr(served, dialect)("hi", **{field: "a"})
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (
        400, field, "unsupported_parameter",
    )  # fmt: skip
