"""A server's figures as Prometheus has them: names, kinds, labels.

What other prefix caches count too is named as they name it (``..._prefix_cache_queries_tokens_total``). A counter that
is new in the cache shows up by itself. What alerts ask for is there from the start, at 0: of a counter that begins at 1
Prometheus sees no increase.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

import radix_cache
from radix_cache_service.events.stream import EventFigures
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.recording import RecordingFigures
from radix_cache_service.state.keeper import KeeperFigures
from radix_cache_service.telemetry.figures import Figures
from radix_cache_service.telemetry.metrics import BUCKETS_S, Latencies

__all__ = ["families"]

_PREFIX = "radix_cache"
_NAMES = {"num_queried_tokens": "prefix_cache_queries_tokens", "num_hit_tokens": "prefix_cache_hits_tokens"}
_HELP = {
    "num_lookups": "Matches that were answered.",
    "num_lookup_tokens": "Prompt tokens of the matches that were answered.",
    "num_lookup_hit_tokens": "Prompt tokens of the matches that were answered, as far as they were cached.",
    "num_partial_tokens": "Tokens that matches found in partial blocks.",
    "num_near_miss_tokens": "Tokens behind a match that agree with the beginning of a cached block.",
    "num_requests": "Requests that published something, each once.",
    "num_queried_tokens": "Prompt tokens of the requests that published something.",
    "num_hit_tokens": "Prompt tokens of the requests that published something, as far as they were cached.",
    "num_allocated_blocks": "Blocks handed out.",
    "num_inserted_blocks": "Blocks that became the tree's.",
    "num_redundant_blocks": "Blocks published that the tree had already.",
    "num_evicted_blocks": "Cached blocks taken back to be handed out.",
    "num_reset_blocks": "Cached blocks given back by resets.",
    "evicted_age": "Matches and inserts from a block's insertion to its eviction, summed over evicted blocks.",
    "evicted_idle": "Matches and inserts from a block's last use to its eviction, summed over evicted blocks.",
    "num_expired_leases": "Leases that ran out unheard of.",
    "num_resets": "Resets of namespaces.",
}
_EVENT_HELP = {
    "batches": "Batches of events published, heartbeats among them.",
    "queued": "Calls whose events are not published yet.",
    "dropped": "Calls whose events were dropped for want of room; the whole tree was published in their place.",
    "replays": "Times that missed events were asked for.",
    "snapshots": "Times that they were no longer kept, and the whole tree was sent.",
    "watchers": "Readers of the events: streams, and one for ZeroMQ.",
}
_EVENT_GAUGES = {"queued", "watchers"}
_VERBS = {"MatchPrefix", "Allocate", "Insert", "Free", "Release", "Renew", "Probe", "Evict", "Reset"}
_METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["PrefixCacheService"].methods]
_BUGS = ("INTERNAL", "UNKNOWN", "DATA_LOSS")
_CALLS_AT_0 = [f"{method}/{code}" for method in _METHODS for code in _BUGS]
_OPERATIONS_AT_0 = [
    *(f"{verb}/{code}" for verb in sorted(_VERBS) for code in _BUGS),
    *(f"{verb}/{code}" for verb in ("MatchPrefix", "Allocate") for code in ("OK", "RESOURCE_EXHAUSTED")),
]


def families(figures: Figures) -> Iterator[Metric]:
    """Yield the metrics with their samples."""
    yield InfoMetricFamily(
        f"{_PREFIX}_build",
        "What runs here.",
        {"version": radix_cache.__version__, "python": platform.python_version()},
    )
    yield from _pool(figures)
    yield from _counters(figures.stats.counters)
    yield from _calls(figures)
    yield from _server(figures)
    yield from _events(figures.events)
    yield from _journal(figures.journal)
    yield from _recording(figures.recording)


def _pool(figures: Figures) -> Iterator[Metric]:
    stats = figures.stats
    blocks = GaugeMetricFamily(f"{_PREFIX}_blocks", "Blocks by state; their sum is the pool.", labels=["state"])
    for state in ("free", "leased", "evictable", "protected"):
        blocks.add_metric([state], getattr(stats, f"num_{state}_blocks"))
    yield blocks
    yield _gauge("pool_blocks", "Blocks that can be handed out at all.", figures.num_blocks)
    yield _gauge("block_size_tokens", "Tokens in a block.", figures.block_size)
    yield _gauge("leases", "Requests in flight.", stats.num_leases)
    yield _gauge(
        "oldest_lease_age_seconds",
        "Since the oldest request in flight began; 0 without one.",
        stats.oldest_lease_age_s or 0,
    )
    yield _gauge("pins", "Leases that only keep a prefix resident.", stats.num_pins)
    yield _gauge("pinned_blocks", "Blocks that pins keep.", stats.num_pinned_blocks)
    yield _gauge("nodes", "Nodes of the tree.", stats.num_nodes)
    yield _gauge("namespaces", "Namespaces with something cached.", stats.num_namespaces)


def _counters(counters: Mapping[str, int]) -> Iterator[Metric]:
    for name, value in counters.items():
        shown = _NAMES.get(name, name.removeprefix("num_"))
        yield CounterMetricFamily(f"{_PREFIX}_{shown}", _HELP.get(name, "A counter of the cache."), value)


def _calls(figures: Figures) -> Iterator[Metric]:
    calls = CounterMetricFamily(
        f"{_PREFIX}_calls", "Calls and batches of sessions, by status.", labels=["method", "code"]
    )
    for name, number in {**dict.fromkeys(_CALLS_AT_0, 0), **figures.num_calls}.items():
        calls.add_metric(name.split("/"), number)
    yield calls
    operations = CounterMetricFamily(
        f"{_PREFIX}_operations", "Operations, in batches and as calls, by status.", labels=["operation", "code"]
    )
    for name, number in _operations(figures).items():
        operations.add_metric(name.split("/"), number)
    yield operations
    seconds = HistogramMetricFamily(
        f"{_PREFIX}_call_seconds", "Time in the handler, less the wait for blocks.", labels=["method"]
    )
    for method, latencies in figures.latencies.items():
        seconds.add_metric([method], _buckets(latencies), latencies.sum_s)
    yield seconds
    yield HistogramMetricFamily(
        f"{_PREFIX}_wait_seconds",
        "Time that calls waited for blocks, of those that did.",
        _buckets(figures.waits),
        figures.waits.sum_s,
    )
    yield _gauge("waiting_calls", "Calls that wait for blocks now.", figures.num_waiting_calls)


def _operations(figures: Figures) -> dict[str, int]:
    """Those of batches, and the calls that are one operation."""
    single = {name: number for name, number in figures.num_calls.items() if name.partition("/")[0] in _VERBS}
    names = dict.fromkeys([*_OPERATIONS_AT_0, *figures.num_operations, *single])
    return {name: figures.num_operations.get(name, 0) + single.get(name, 0) for name in names}


def _server(figures: Figures) -> Iterator[Metric]:
    yield _gauge("streams", "Sessions and other streams that are open.", figures.num_streams)
    yield _gauge("max_streams", "The most that may be open at once.", figures.max_streams)
    yield _gauge("serving", "1 while the server is ready, 0 once it drains.", int(figures.is_serving))
    yield _gauge("loop_delay_seconds", "How long the server took to come to this scrape.", figures.loop_delay_s)
    yield CounterMetricFamily(
        f"{_PREFIX}_telemetry_failures", "Calls that could not be counted or traced.", figures.num_failures
    )


def _events(events: EventFigures) -> Iterator[Metric]:
    for name, text in _EVENT_HELP.items():
        number = getattr(events, f"num_{name}")
        if name in _EVENT_GAUGES:
            yield _gauge(f"event_{name}", text, number)
        else:
            yield CounterMetricFamily(f"{_PREFIX}_event_{name}", text, number)


def _journal(journal: KeeperFigures) -> Iterator[Metric]:
    yield _gauge("journal_bytes", "How long the journal is; 0 without a state directory.", journal.num_bytes)
    yield _gauge("journal_limit_bytes", "How long the journal gets before it is compacted.", journal.limit_bytes)
    yield CounterMetricFamily(
        f"{_PREFIX}_compactions", "Times that the journal was compacted.", journal.num_compactions
    )
    yield CounterMetricFamily(
        f"{_PREFIX}_compaction_failures",
        "Times that it was to be compacted, and was not.",
        journal.num_failed_compactions,
    )
    yield _gauge(
        "last_compaction_timestamp_seconds",
        "When the journal was last compacted; 0 if it was not since the start.",
        journal.compacted_at_s,
    )


def _recording(recording: RecordingFigures) -> Iterator[Metric]:
    yield _gauge("recording", "1 while requests are recorded, else 0.", recording.is_recording)
    yield CounterMetricFamily(f"{_PREFIX}_recorded_requests", "Requests in the recording.", recording.num_requests)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, value)


def _buckets(latencies: Latencies) -> list[tuple[str, float]]:
    below = [(str(bound), float(count)) for bound, count in zip(BUCKETS_S, latencies.buckets(), strict=True)]
    return [*below, ("+Inf", float(latencies.num_samples))]
