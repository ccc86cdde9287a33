"""The cache's part of the metrics page: hits by tier, why they ended, what the tiers hold.

Read from a worker's load when the page is asked for; keeps nothing. Called by
``metrics`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headwater.core.cache import StoreStats
from headwater.core.control import WorkerLoad

# Name, help and figure of what each tier tells of itself.
_GAUGES: Final[tuple[tuple[str, str, Callable[[StoreStats], float]], ...]] = (
    ("records", "KV records in a tier.", lambda s: s.num_records),
    ("bytes", "Bytes that count against a tier's cap.", lambda s: s.num_bytes),
    ("max_bytes", "A tier's cap.", lambda s: s.max_bytes),
    ("writable", "1 while a tier can be written.", lambda s: float(s.is_writable)),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[StoreStats], float]], ...]] = (
    ("loaded_records", "Records loaded to the device.", lambda s: s.num_loaded),
    ("loaded_bytes", "Bytes loaded to the device.", lambda s: s.num_loaded_bytes),
    ("stored_records", "Records written.", lambda s: s.num_put),
    ("stored_bytes", "Bytes written.", lambda s: s.num_put_bytes),
    ("evictions", "Records dropped for space.", lambda s: s.num_evicted),
    ("expirations", "Records dropped for age.", lambda s: s.num_expired),
    ("damaged", "Records that did not pass a check: each a miss.", lambda s: s.num_damaged),
    ("errors", "Reads and writes that the system refused.", lambda s: s.num_errors),
)


def cache_metrics(load: WorkerLoad | None) -> Iterator[Metric]:
    """The same families with and without a worker: without one they have no samples."""
    hits = CounterMetricFamily(
        "headwater_cache_hit_tokens_total",
        "Prompt tokens whose KV was not computed, by the tier that held it.",
        labels=("tier",),
    )
    replayed = CounterMetricFamily(
        "headwater_cache_replayed_tokens_total",
        "Hit tokens of which window KV was computed again.",
        labels=(),
    )
    misses = CounterMetricFamily(
        "headwater_cache_misses_total",
        "Prompts that were no whole hit, by why the hit ended where it did.",
        labels=("reason",),
    )
    dropped_loads = CounterMetricFamily(
        "headwater_cache_dropped_loads_total",
        "Loads that were given up because computing was faster.",
        labels=(),
    )
    dropped_stores = CounterMetricFamily(
        "headwater_cache_dropped_stores_total",
        "Blocks that left the device before they could be written.",
        labels=(),
    )
    queued_stores = GaugeMetricFamily(
        "headwater_cache_queued_stores", "Blocks that wait to be written.", labels=()
    )
    if load is not None:
        num_device = load.num_hit_tokens - load.num_host_hit_tokens - load.num_disk_hit_tokens
        hits.add_metric(("device",), num_device)
        hits.add_metric(("host",), load.num_host_hit_tokens)
        hits.add_metric(("disk",), load.num_disk_hit_tokens)
        replayed.add_metric((), load.num_replayed_tokens)
        for reason, num_prompts in load.misses:
            misses.add_metric((reason,), num_prompts)
        dropped_loads.add_metric((), load.num_dropped_loads)
        dropped_stores.add_metric((), load.num_dropped_stores)
        queued_stores.add_metric((), load.num_queued_stores)
    yield from (hits, replayed, misses, dropped_loads, dropped_stores, queued_stores)
    tiers = () if load is None else load.tiers
    for name, text, figure in _GAUGES:
        gauge = GaugeMetricFamily(f"headwater_cache_{name}", text, labels=("tier",))
        for stats in tiers:
            gauge.add_metric((stats.tier.value,), figure(stats))
        yield gauge
    for name, text, figure in _COUNTERS:
        counter = CounterMetricFamily(f"headwater_cache_{name}_total", text, labels=("tier",))
        for stats in tiers:
            counter.add_metric((stats.tier.value,), figure(stats))
        yield counter
