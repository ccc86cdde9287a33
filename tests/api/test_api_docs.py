"""The room's page names every field, refusal and metric that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.api.decode import FieldTable
from headwater.api.openai.bodies import (
    CHAT_TABLE,
    COMPLETION_TABLE,
    ChatBody,
    CompletionBody,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "rooms" / "api.md").read_text(encoding="utf-8")
METRICS = (ROOT / "tests" / "api" / "api_metrics.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_every_field_of_a_body_is_on_the_page(
    body: type[ChatBody] | type[CompletionBody],
) -> None:
    fields = body.__struct_encode_fields__
    assert not [name for name in fields if f"`{name}`" not in PAGE and f"`{name}." not in PAGE]


@pytest.mark.parametrize("table", [CHAT_TABLE, COMPLETION_TABLE])
def test_every_refused_and_ignored_field_is_on_the_page(table: FieldTable) -> None:
    names = [*table.refused, *table.ignored]
    assert not [name for name in names if f"`{name}`" not in PAGE]


def test_every_metric_is_on_the_page() -> None:
    names = [line.split()[0] for line in METRICS.splitlines()]
    assert not [name for name in names if f"`{name}`" not in PAGE]
