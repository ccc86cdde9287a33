"""The metrics page. Names, types and labels are a contract: dashboards live on them.

One registry per app, no globals. Base units (seconds, tokens). No label ever
holds a key, a tenant, a path as typed or anything from a body. Figures that the
router already keeps are read from its status when the page is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headwater import __version__
from headwater.api.metrics_cache import cache_metrics
from headwater.core.control import StepTiming, WorkerLoad
from headwater.core.ports import Generator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
_LOAD_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_CALL_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Ending(StrEnum):
    """How a sequence ended, as a metric label."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"  # the caller left first
    FAILED = "failed"


class Metrics:
    """What the door counts itself, plus a view of the router's status."""

    def __init__(self, generator: Generator) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._http_requests = Counter(
            "headwater_http_requests_total",
            "HTTP requests answered, by route and status (499: the caller left first).",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self.http_in_flight = Gauge(
            "headwater_http_requests_in_flight",
            "HTTP requests being answered now.",
            registry=self._registry,
        )
        self._http_seconds = Histogram(
            "headwater_http_request_seconds",
            "From a request's arrival to its last answer byte.",
            ("route",),
            buckets=_CALL_BUCKETS_S,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "headwater_time_to_first_token_seconds",
            "From a request's arrival to its first output token.",
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self.inter_token_seconds = Histogram(
            "headwater_inter_token_seconds",
            "Time between output tokens of one sequence.",
            buckets=_ITL_BUCKETS_S,
            registry=self._registry,
        )
        prompt_tokens = Counter(
            "headwater_prompt_tokens_total",
            "Prompt tokens, by whether their KV came from the cache (hit) or was computed (miss).",
            ("source",),
            registry=self._registry,
        )
        self.prompt_hit_tokens = prompt_tokens.labels(source="hit")
        self.prompt_miss_tokens = prompt_tokens.labels(source="miss")
        self.cache_load_seconds = Histogram(
            "headwater_cache_load_seconds",
            "From the decision to load a prompt's hit from another tier until it was there.",
            buckets=_LOAD_BUCKETS_S,
            registry=self._registry,
        )
        self.output_tokens = Counter(
            "headwater_output_tokens_total",
            "Output tokens that callers were charged for.",
            registry=self._registry,
        )
        finished = Counter(
            "headwater_sequences_finished_total",
            "Sequences that ended, by reason.",
            ("reason",),
            registry=self._registry,
        )
        # Made at once, so that every reason is on the page from the start.
        self._finished = {ending: finished.labels(reason=ending.value) for ending in Ending}
        self._registry.register(_StatusCollector(generator))

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        self._http_requests.labels(route=route, method=method, status=str(status)).inc()
        self._http_seconds.labels(route=route).observe(seconds)

    def sequence_finished(self, ending: Ending) -> None:
        self._finished[ending].inc()

    def page(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _StatusCollector(Collector):
    """Turns ``generator.status()`` into metrics when asked; keeps nothing itself."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def describe(self) -> Iterator[Metric]:
        # Keeps the registry from collecting (and so asking the router) at registration.
        return iter(())

    def collect(self) -> Iterator[Metric]:
        status, info = self._generator.status(), self._generator.info
        yield GaugeMetricFamily(
            "headwater_ready", "1 when requests are taken now.", value=float(status.ready)
        )
        yield GaugeMetricFamily(
            "headwater_requests_in_flight",
            "Requests accepted by the router and not finished.",
            value=status.num_in_flight,
        )
        yield CounterMetricFamily(
            "headwater_worker_restarts_total",
            "Workers started again after one was lost.",
            value=status.num_worker_restarts,
        )
        build = GaugeMetricFamily(
            "headwater_build_info",
            "Always 1; the labels say what runs.",
            labels=("version", "model", "weights", "device"),
        )
        if info is not None:
            build.add_metric((__version__, info.model_id, info.weights_format, info.device), 1)
        yield build
        yield from _load_metrics(status.load)
        yield from cache_metrics(status.load)
        yield from _timing_metrics(status.step_totals)
        yield from _budget_metrics(status.load)


def _load_metrics(load: WorkerLoad | None) -> Iterator[Metric]:
    """The same families with and without a worker: without one they have no samples."""
    sequences = GaugeMetricFamily(
        "headwater_sequences",
        "Sequences in the worker, by state; waiting is the queue's depth.",
        labels=("state",),
    )
    blocks = GaugeMetricFamily("headwater_blocks", "KV blocks, by use.", labels=("use",))
    # Counted by the worker since it started: a restart sets them to 0, as scrapers expect.
    steps = CounterMetricFamily("headwater_steps_total", "Engine steps.", labels=())
    preemptions = CounterMetricFamily(
        "headwater_preemptions_total", "Sequences that lost their blocks and wait again.", labels=()
    )
    recomputed = CounterMetricFamily(
        "headwater_recomputed_tokens_total", "Tokens computed again after preemption.", labels=()
    )
    grammars = GaugeMetricFamily(
        "headwater_cached_grammars", "Compiled output constraints that are kept.", labels=()
    )
    if load is not None:
        sequences.add_metric(("waiting",), load.num_waiting)
        sequences.add_metric(("loading",), load.num_loading)
        sequences.add_metric(("prefilling",), load.num_prefilling)
        sequences.add_metric(("decoding",), load.num_decoding)
        blocks.add_metric(("free",), load.num_free_blocks)
        blocks.add_metric(("cached",), load.num_cached_blocks)
        blocks.add_metric(("held",), load.num_held_blocks)
        steps.add_metric((), load.num_steps)
        preemptions.add_metric((), load.num_preemptions)
        recomputed.add_metric((), load.num_recomputed_tokens)
        grammars.add_metric((), load.num_cached_grammars)
    yield from (sequences, blocks, steps, preemptions, recomputed, grammars)


def _timing_metrics(totals: StepTiming) -> Iterator[Metric]:
    seconds = CounterMetricFamily(
        "headwater_step_seconds_total",
        "Seconds that engine steps took, by part.",
        labels=("part",),
    )
    seconds.add_metric(("plan",), totals.plan_s)
    seconds.add_metric(("forward",), totals.forward_s)
    seconds.add_metric(("sample",), totals.sample_s)
    seconds.add_metric(("apply",), totals.apply_s)
    tokens = CounterMetricFamily(
        "headwater_step_tokens_total",
        "Tokens that engine steps computed, recomputed ones included, by phase.",
        labels=("phase",),
    )
    tokens.add_metric(("prefill",), totals.num_prefill_tokens)
    tokens.add_metric(("decode",), totals.num_decode_tokens)
    predicted = CounterMetricFamily(
        "headwater_step_predicted_seconds_total",
        "Seconds that engine steps were predicted to take, all parts.",
        value=totals.predicted_s,
    )
    yield from (seconds, tokens, predicted)


def _budget_metrics(load: WorkerLoad | None) -> Iterator[Metric]:
    error = GaugeMetricFamily(
        "headwater_step_prediction_error",
        "How far the last steps' seconds were from their prediction, as a share of it: median.",
        labels=(),
    )
    steps = CounterMetricFamily(
        "headwater_budgeted_steps_total",
        "Engine steps under a time budget, by whether they took up to 1.25 times of it.",
        labels=("kept",),
    )
    if load is not None:
        if load.step_error is not None:
            error.add_metric((), load.step_error)
        steps.add_metric(("yes",), load.num_steps_within)
        steps.add_metric(("no",), load.num_budgeted_steps - load.num_steps_within)
    yield from (error, steps)
