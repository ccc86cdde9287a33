"""The pages name every field, refusal and metric that the code has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headwater.api.anthropic.bodies import COUNT_TABLE, MESSAGES_TABLE, MessagesBody
from headwater.api.cache_report import CACHE_HEADER, CacheWire, cache_header
from headwater.api.decode import FieldTable
from headwater.api.openai.bodies import (
    CHAT_TABLE,
    COMPLETION_TABLE,
    ChatBody,
    CompletionBody,
)
from headwater.api.openai.responses_bodies import RESPONSES_TABLE, ResponsesBody
from headwater.api.openai.tokenize import TOKENIZE_TABLE, TokenizeBody
from headwater.api.reasons import REASON_TEXTS
from headwater.core.cache import CacheReport, MissReason
from headwater.core.request import PromptReport

DOCS = Path(__file__).resolve().parents[2] / "docs"
DIALECTS = (DOCS / "dialects.md").read_text(encoding="utf-8")
ROOM = (DOCS / "rooms" / "api.md").read_text(encoding="utf-8")
METRICS = (Path(__file__).parent / "api_metrics.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "body", [ChatBody, CompletionBody, ResponsesBody, MessagesBody, TokenizeBody]
)
def test_every_field_of_a_body_is_on_the_page(body: type[msgspec.Struct]) -> None:
    fields = body.__struct_encode_fields__
    said = (f"`{name}{end}" for name in fields for end in ("`", ".", ": "))
    named = {text.strip("`.: ") for text in said if text in DIALECTS}
    assert not [name for name in fields if name not in named]


@pytest.mark.parametrize(
    "table",
    [
        CHAT_TABLE,
        COMPLETION_TABLE,
        RESPONSES_TABLE,
        MESSAGES_TABLE,
        COUNT_TABLE,
        TOKENIZE_TABLE,
    ],
)
def test_every_refused_and_ignored_field_is_on_the_page(table: FieldTable) -> None:
    names = [*table.refused, *table.ignored]
    assert not [name for name in names if f"`{name}`" not in DIALECTS]


def test_every_reason_is_on_the_caches_page_with_its_sentence() -> None:
    page = (DOCS / "cache.md").read_text(encoding="utf-8")
    assert not [
        reason
        for reason, text in REASON_TEXTS.items()
        if f"| `{reason.value}` | {text} |" not in page
    ]


def test_the_report_and_the_header_on_the_caches_page_are_what_the_door_writes() -> None:
    page = (DOCS / "cache.md").read_text(encoding="utf-8")
    shown = page.partition("```json\n")[2].partition("```")[0]
    report = msgspec.json.decode(shown, type=CacheWire, strict=True)
    assert set(msgspec.json.decode(shown)) == set(CacheWire.__struct_encode_fields__)
    assert report.explanation == REASON_TEXTS[MissReason(report.reason)]
    cache = CacheReport(num_disk_tokens=report.disk_tokens, reason=MissReason(report.reason))
    num_miss_tokens = report.prompt_tokens - report.hit_tokens
    prompt = PromptReport(
        num_hit_tokens=report.hit_tokens, num_miss_tokens=num_miss_tokens, cache=cache
    )
    assert f"{CACHE_HEADER}: {cache_header([prompt])}\n" in page


def test_every_metric_is_on_the_page() -> None:
    names = [line.split()[0] for line in METRICS.splitlines()]
    assert not [name for name in names if f"`{name}`" not in ROOM]
