"""What an answer says of its hit: the header, the report, the place where it ended, metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from api_server import (
    MODEL_ID,
    Served,
    byte_recipe,
    chunks_of,
    error_of,
    prompt_report,
    say,
    say_with_hit,
    serving,
)
from api_talk import events_of, talking

from headwater.api.cache_report import ended_at
from headwater.api.config import ApiConfig
from headwater.api.reasons import REASON_TEXTS
from headwater.core.cache import CacheReport, MissReason
from headwater.core.request import Request

REPORT = CacheReport(
    num_device_tokens=2,
    num_host_tokens=1,
    num_disk_tokens=4,
    num_replayed_tokens=3,
    reason=MissReason.DIFFERS,
    load_s=0.25,
)
DIALECTS = ("chat", "complete", "respond", "message")
MARKER = "MARKER-TEXT"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with talking() as running:
        yield running


# ------------------------------------------------------------------ what an answer says


def cache_of(dialect: str, answer: httpx.Response, stream: bool) -> Any:
    """The report of a whole or streamed answer; KeyError if it has none."""
    match dialect, stream:
        case "message", True:
            return events_of(answer.text)[0]["message"]["cache"]
        case "respond", True:
            return events_of(answer.text)[-1]["response"]["cache"]
        case _, True:
            last = chunks_of(answer.text)[-1]
            assert last["choices"] == []
            return last["cache"]
        case _:
            return answer.json()["cache"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_header_and_the_report_say_tiers_and_reason_in_every_dialect(
    served: Served, dialect: str, stream: bool
) -> None:
    served.generator.play(say_with_hit("ok", REPORT))
    answer = getattr(served, dialect)("hello there", stream=stream, return_cache_report=True)
    num_prompt = len(served.generator.requests[0].prompt_tokens)
    assert answer.headers["x-headwater-cache"] == (
        f"hit=7; device=2; host=1; disk=4; replayed=3; prompt={num_prompt}; reason=differs"
    )
    report = cache_of(dialect, answer, stream)
    if dialect == "complete":
        (report,) = report
    place = report.pop("ended_at")
    assert report == {
        "prompt_tokens": num_prompt,
        "hit_tokens": 7,
        "device_tokens": 2,
        "host_tokens": 1,
        "disk_tokens": 4,
        "replayed_tokens": 3,
        "load_seconds": 0.25,
        "reason": "differs",
        "explanation": REASON_TEXTS[MissReason.DIFFERS],
    }
    assert place["token"] == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("asked", [{}, {"return_cache_report": False}])
def test_who_does_not_ask_gets_the_header_and_the_same_body_as_ever(
    served: Served, dialect: str, stream: bool, asked: dict[str, object]
) -> None:
    served.generator.play(say_with_hit("ok", REPORT))
    answer = getattr(served, dialect)("hello there", stream=stream, **asked)
    assert "reason=differs" in answer.headers["x-headwater-cache"]
    assert '"cache"' not in answer.text
    if stream and dialect in ("chat", "complete"):
        assert all(chunk["choices"] for chunk in chunks_of(answer.text))


def test_strict_servers_know_the_fields() -> None:
    with serving(ApiConfig(strict=True)) as strict:
        strict.generator.play(say_with_hit("ok", REPORT))
        fields = {"cache_retention": "agent", "cache_salt": "s", "return_cache_report": True}
        assert strict.complete("hello there", **fields).json()["cache"][0]["hit_tokens"] == 7
        assert strict.message(**fields).json()["cache"]["hit_tokens"] == 7
        assert error_of(strict.complete(cache_report=True))["param"] == "cache_report"


def test_a_prompt_list_has_a_report_each_and_one_header(served: Served) -> None:
    async def by_prompt(request: Request) -> Any:
        letter = request.prompt_tokens[0]
        reason = MissReason.EXPIRED if letter == ord("a") else MissReason.NEW
        report = CacheReport(num_device_tokens=1, reason=reason)
        async for output in say_with_hit("ok", report)(request):
            yield output

    served.generator.play(by_prompt)
    answer = served.complete(["aa", "bbb"], n=2, return_cache_report=True)
    reports = answer.json()["cache"]
    assert [(r["prompt_tokens"], r["reason"]) for r in reports] == [(2, "expired"), (3, "new")]
    assert answer.headers["x-headwater-cache"] == (
        "hit=2; device=2; host=0; disk=0; replayed=0; prompt=5; reason=several"
    )


def test_a_worker_that_tells_no_tiers_still_has_its_hit_in_the_header(served: Served) -> None:
    served.generator.play(say("ok", hit=1))
    answer = served.complete("abc", return_cache_report=True)
    assert answer.headers["x-headwater-cache"] == "hit=1; prompt=3"
    assert answer.json()["cache"] == [None]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_streams_headers_go_out_when_the_hit_is_settled_not_when_the_prompt_is_computed(
    served: Served, dialect: str
) -> None:
    served.generator.play(say_with_hit("ok", REPORT, prefill_s=0.3))
    answer = getattr(served, dialect)("hello there", stream=True)
    assert "hit=7" in answer.headers["x-headwater-cache"]
    assert re.findall(r'"(?:text|content|delta)":"(o|k)"', answer.text) == ["o", "k"]


def test_a_streams_headers_do_not_wait_for_a_hit_that_is_settled_late(served: Served) -> None:
    async def late(request: Request) -> Any:
        await asyncio.sleep(0.2)  # in the queue, or loading
        async for output in say_with_hit("ok", REPORT)(request):
            yield output

    served.generator.play(late)
    stream = served.chat(stream=True, return_cache_report=True)
    assert "x-headwater-cache" not in stream.headers
    assert chunks_of(stream.text)[-1]["cache"]["hit_tokens"] == 7
    served.generator.play(late)
    assert "hit=7" in served.chat().headers["x-headwater-cache"]


@pytest.mark.parametrize("dialect", ["chat", "complete"])
def test_no_chunk_is_sent_before_the_first_token_because_clients_time_the_first_chunk(
    dialect: str,
) -> None:
    """The hit is known early; a chunk then would be a TTFT that nobody was served."""
    with talking(ApiConfig(keepalive_s=0.05)) as served:
        served.generator.play(say_with_hit("ok", REPORT, prefill_s=0.3))
        text = getattr(served, dialect)("hello there", stream=True).text
        assert text.startswith(": keepalive")
        assert "data: " in text.rpartition(": keepalive")[2]


def test_refusals_have_no_hit(served: Served) -> None:
    assert "x-headwater-cache" not in served.chat(n=0).headers


# ------------------------------------------------------------------ where the hit ended


def test_the_first_difference_is_a_message_a_part_and_characters() -> None:
    """ "grüß dich" in two of three messages: bytes are tokens here, so ü and ß are two each."""
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": f"grüß {MARKER}"},
    ]
    with serving() as served:
        served.generator.play(say("ok"))
        served.chat(messages=messages)
        tokens = served.generator.requests[0].prompt_tokens
        text = bytes(t if t < 256 else 0 for t in tokens)
        at = text.index("grüß".encode())
        for offset, characters in ((0, (0, 1)), (2, (2, 3)), (3, (2, 3)), (4, (3, 4)), (6, (4, 5))):
            report = CacheReport(num_disk_tokens=at + offset, reason=MissReason.DIFFERS)
            served.generator.play(say_with_hit("ok", report))
            answer = served.chat(messages=messages, return_cache_report=True)
            assert MARKER not in answer.text
            assert answer.json()["cache"]["ended_at"] == {
                "token": at + offset,
                "place": "messages[3]",
                "part": "content",
                "start_char": characters[0],
                "end_char": characters[1],
            }
        # The format's own tokens, right before the first message.
        served.generator.play(say_with_hit("ok", CacheReport(reason=MissReason.NEW)))
        ended = served.chat(messages=messages, return_cache_report=True).json()["cache"]["ended_at"]
        assert (ended["place"], ended["part"], ended["start_char"]) == (
            "messages[0]",
            "format",
            None,
        )


def test_places_are_spelt_as_the_caller_counts() -> None:
    with serving() as served:
        turn = [{"role": "user", "content": "hello"}]
        fields: dict[str, Any] = {"return_cache_report": True}
        calls: list[Callable[[], httpx.Response]] = [
            lambda: served.respond(turn, **fields),
            lambda: served.message(messages=turn, system="be kind", **fields),
        ]
        for send_it, spelt in zip(calls, ("input[0]", "messages[0]"), strict=True):
            served.generator.play(say("ok"))
            send_it()
            tokens = served.generator.requests[0].prompt_tokens
            at = bytes(t if t < 256 else 0 for t in tokens).index(b"hello")
            report = CacheReport(num_device_tokens=at + 1, reason=MissReason.NEW)
            served.generator.play(say_with_hit("ok", report))
            ended = send_it().json()["cache"]["ended_at"]
            assert ended["place"] == spelt
            assert (ended["start_char"], ended["end_char"]) == (1, 2)


def test_a_whole_hit_ends_nowhere(served: Served) -> None:
    served.generator.play(say("ok"))
    served.chat("hello there")
    num_hit = len(served.generator.requests[0].prompt_tokens) - 1
    whole = CacheReport(num_device_tokens=num_hit, reason=MissReason.NONE)
    served.generator.play(say_with_hit("ok", whole))
    report = served.chat("hello there", return_cache_report=True).json()["cache"]
    assert (report["reason"], report["ended_at"]) == ("none", None)


def test_a_prompt_of_text_has_a_token_and_no_message() -> None:
    recipe = byte_recipe()
    prompt = recipe.encode_completion("abc")
    place = ended_at(recipe.tokenizer, prompt, 1, ())
    assert (place.token, place.place, place.part) == (1, None, None)


def test_every_reason_has_its_sentence() -> None:
    assert set(REASON_TEXTS) == set(MissReason)
    assert len(set(REASON_TEXTS.values())) == len(MissReason)
    assert all(text.endswith(".") and text.count(". ") == 0 for text in REASON_TEXTS.values())


# ------------------------------------------------------------------ official clients


def test_official_clients_see_usage_as_before_and_the_report_as_an_extra() -> None:
    with serving() as served:
        served.generator.play(say_with_hit("ok", REPORT))
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=MODEL_ID,
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"return_cache_report": True},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 7
            assert (answer.model_extra or {})["cache"]["disk_tokens"] == 4
            stream = client.chat.completions.create(
                model=MODEL_ID,
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                extra_body={"return_cache_report": True},
            )
            *chunks, last = stream
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == "ok"
            assert (last.model_extra or {})["cache"]["reason"] == "differs"
            response = client.responses.create(
                model=MODEL_ID, input="hi", extra_body={"return_cache_report": True}
            )
            assert response.output_text == "ok"
            assert response.usage is not None
            assert response.usage.input_tokens_details.cached_tokens == 7
        with anthropic.Anthropic(base_url=served.url, api_key="x", max_retries=0) as claude:
            message = claude.messages.create(
                model=MODEL_ID,
                max_tokens=20,
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"return_cache_report": True},
            )
            assert message.usage.cache_read_input_tokens == 7
            assert (message.model_extra or {})["cache"]["host_tokens"] == 1
            with claude.messages.stream(
                model=MODEL_ID, max_tokens=20, messages=[{"role": "user", "content": "hi"}]
            ) as events:
                assert events.get_final_text() == "ok"


def test_load_seconds_of_prompts_that_loaded_are_on_the_metrics_page() -> None:
    with serving() as served:
        served.generator.play(say_with_hit("ok", REPORT))
        served.complete("abcdefghij")
        served.generator.play(say_with_hit("ok", CacheReport(num_device_tokens=1)))
        served.complete("abcdefghij")
        assert served.metric("headwater_cache_load_seconds_count") == 1
        assert served.metric("headwater_cache_load_seconds_sum") == 0.25


def test_the_metrics_page_has_the_tiers_as_the_worker_told_them() -> None:
    with serving() as served:
        tiers = {
            tier: served.metric("headwater_cache_hit_tokens_total", tier=tier)
            for tier in ("device", "host", "disk")
        }
        assert tiers == {"device": 50, "host": 20, "disk": 30}
        assert served.metric("headwater_cache_misses_total", reason="expired") == 1
        assert served.metric("headwater_cache_bytes", tier="disk") == 900
        assert served.metric("headwater_cache_max_bytes", tier="host") == 7000
        assert served.metric("headwater_cache_writable", tier="disk") == 0
        assert served.metric("headwater_cache_evictions_total", tier="disk") == 6
        assert served.metric("headwater_sequences", state="loading") == 1


def test_reports_hold_nothing_of_the_prompt(served: Served) -> None:
    report = CacheReport(num_disk_tokens=20, reason=MissReason.DIFFERS)
    served.generator.play(say_with_hit("ok", report))
    for dialect in DIALECTS:
        answer = getattr(served, dialect)(MARKER * 3, return_cache_report=True)
        assert MARKER[:6] not in json.dumps(cache_of(dialect, answer, False))
        assert MARKER[:6] not in answer.headers["x-headwater-cache"]


def test_a_report_of_the_first_choice_counts(served: Served) -> None:
    """Choices share the prompt: what hit for the second one is the first one's work."""

    async def two(request: Request) -> Any:
        async for output in say("a", "b")(request):
            if output.prompt is not None:
                report = CacheReport(num_device_tokens=output.index)
                output = replace(output, prompt=prompt_report(request, output.index, report))
            yield output

    served.generator.play(two)
    answer = served.complete("abcd", n=2, return_cache_report=True)
    assert answer.json()["cache"][0]["hit_tokens"] == 0
    assert answer.json()["usage"]["prompt_cache_hit_tokens"] == 0
