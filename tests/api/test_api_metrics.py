"""The metrics page as dashboards see it: names, types, labels, and figures that add up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ScriptedGenerator, Served, say, say_then_raise, serving, wait_until
from prometheus_client.parser import text_string_to_metric_families

from headwater.api.metrics import Metrics
from headwater.core.errors import EngineFault, Overloaded

CONTRACT = Path(__file__).with_name("api_metrics.txt")


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def answered(served: Served, status: str, *, route: str = "/v1/completions") -> float:
    """Calls counted so far; a call is counted when its answer is out."""
    return served.metric("headwater_http_requests_total", method="POST", route=route, status=status)


def families(text: str) -> set[tuple[str, str, str]]:
    """(name as queried, type, label names) of each family on a page."""
    found = set()
    for family in text_string_to_metric_families(text):
        # client_python adds the time of creation to some; no one queries it.
        samples = [s for s in family.samples if not s.name.endswith("_created")]
        if family.type == "gauge" and not samples:
            continue
        labels = {name for sample in samples for name in sample.labels} - {"le"}
        name = family.name + "_total" if family.type == "counter" else family.name
        found.add((name, family.type, ",".join(sorted(labels)) or "-"))
    return found


def test_j04_names_types_and_labels_are_the_checked_in_list(served: Served) -> None:
    """A rename empties somebody's dashboard: add the new name, keep the old for a release."""
    served.generator.play(say("hello"))
    served.chat()
    wait_until(lambda: answered(served, "200", route="/v1/chat/completions") == 1, 2)
    page = served.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    wanted = {tuple(line.split()) for line in CONTRACT.read_text().splitlines()}
    assert families(page.text) == wanted


def test_j04_the_page_is_whole_before_any_worker_or_request() -> None:
    generator = ScriptedGenerator()
    generator.info = None
    text = Metrics(generator).page().decode()
    assert 'headwater_sequences_finished_total{reason="failed"} 0.0' in text
    assert "headwater_ready 1.0" in text


def test_two_apps_in_one_process_count_apart() -> None:
    first, second = Metrics(ScriptedGenerator()), Metrics(ScriptedGenerator())
    first.output_tokens.inc(3)
    assert b"headwater_output_tokens_total 3.0" in first.page()
    assert b"headwater_output_tokens_total 0.0" in second.page()


def test_tokens_and_endings_are_counted_once_and_add_up(served: Served) -> None:
    served.generator.play(say("hello", "worlds", hit=1))
    served.complete("abc", n=2)
    served.complete("abc", max_tokens=2, stream=True)
    served.generator.play(say_then_raise("ab", EngineFault("x")))
    served.complete("abc")
    served.generator.play(say_then_raise("", Overloaded("full", retry_after_s=1)))
    served.complete("abc")

    def all_counted() -> bool:
        return [answered(served, status) for status in ("200", "500", "429")] == [2, 1, 1]

    wait_until(all_counted, 2)
    tokens = {
        source: served.metric("headwater_prompt_tokens_total", source=source)
        for source in ("hit", "miss")
    }
    assert tokens == {"hit": 2, "miss": 2 + 2 + 3}
    assert served.metric("headwater_output_tokens_total") == 11 + 2 + 2
    endings = {
        reason: served.metric("headwater_sequences_finished_total", reason=reason)
        for reason in ("stop", "length", "failed", "cancelled")
    }
    assert endings == {"stop": 2, "length": 1, "failed": 1, "cancelled": 0}
    assert served.metric("headwater_time_to_first_token_seconds_count") == 3
    assert served.metric("headwater_inter_token_seconds_count") == 4 + 5 + 1 + 1


def test_labels_are_bounded_whatever_callers_send(served: Served) -> None:
    with served.client() as client:
        for i, method in enumerate(("PROPFIND", "MKCOL", "LOCK", "REPORT", "PURGE")):
            client.request(method, f"/path/{i}")

    def all_counted() -> bool:
        labels = {"method": "OTHER", "route": "unmatched", "status": "404"}
        return served.metric("headwater_http_requests_total", **labels) == 5

    wait_until(all_counted, 2)
    assert "path/1" not in served.get("/metrics").text


def test_steps_are_told_beside_what_was_predicted_and_budgeted(served: Served) -> None:
    assert served.metric("headwater_step_predicted_seconds_total") == 0.025
    assert served.metric("headwater_step_prediction_error") == 0.125
    assert served.metric("headwater_budgeted_steps_total", kept="yes") == 6
    assert served.metric("headwater_budgeted_steps_total", kept="no") == 1
