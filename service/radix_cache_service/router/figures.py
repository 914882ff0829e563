"""A router's figures as Prometheus has them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.telemetry.metrics import BUCKETS_S, Latencies

if TYPE_CHECKING:
    from radix_cache_service.router.servicer import RouterServicer

__all__ = ["RouterFigures", "families", "take_figures"]

_PREFIX = "radix_cache_router"
_STATES = {number: name.removeprefix("NODE_STATE_").lower() for name, number in pb.NodeState.items() if number}


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """What a router counted until now. by_node: requests routed, their tokens, those that were cached, in
    flight, whether its events are not heard.
    """

    by_node: Mapping[str, tuple[int, ...]]
    states: Mapping[int, int]
    latencies: Latencies
    num_expired: int
    num_calls: Mapping[str, int]


def take_figures(servicer: RouterServicer) -> RouterFigures:
    """Return the figures of now; for the event loop to call. O(nodes)."""
    routing = servicer.routing
    nodes = routing.fleet.by_name.values()
    return RouterFigures(
        by_node={
            node.name: (
                node.num_routed,
                node.num_prompt_tokens,
                node.num_cached_tokens,
                0 if node.worker is None else routing.flights.num_at(node.worker),
                int(bool(node.events_problem)),
            )
            for node in nodes
        },
        states=Counter(node.state for node in nodes),
        latencies=copy.copy(routing.latencies),
        num_expired=routing.num_expired,
        num_calls=dict(servicer.metrics.num_calls),
    )


def families(figures: RouterFigures) -> Iterator[Metric]:
    """Yield the metrics."""
    kinds = (
        (CounterMetricFamily, "requests", "Requests that were sent to the node."),
        (CounterMetricFamily, "prompt_tokens", "Prompt tokens of those."),
        (CounterMetricFamily, "cached_tokens", "Prompt tokens of those that the node had, as far as was known."),
        (GaugeMetricFamily, "requests_in_flight", "Requests that were sent to the node and are not finished."),
        (GaugeMetricFamily, "events_unheard", "1 where the node serves and its events' ports can't be reached."),
    )
    for place, (kind, name, text) in enumerate(kinds):
        family: CounterMetricFamily | GaugeMetricFamily = kind(f"{_PREFIX}_{name}", text, labels=["node"])
        for node, numbers in figures.by_node.items():
            family.add_metric([node], numbers[place])
        yield family
    nodes = GaugeMetricFamily(f"{_PREFIX}_nodes", "Nodes by state.", labels=["state"])
    for number, state in _STATES.items():
        nodes.add_metric([state], figures.states.get(number, 0))
    yield nodes
    yield CounterMetricFamily(
        f"{_PREFIX}_requests_expired", "Requests that nobody finished in time.", figures.num_expired
    )
    calls = CounterMetricFamily(f"{_PREFIX}_calls", "Calls answered.", labels=["method", "code"])
    for name, count in figures.num_calls.items():
        calls.add_metric(name.split("/"), count)
    yield calls
    selection = HistogramMetricFamily(f"{_PREFIX}_selection_seconds", "Time that it took to choose a node.")
    below = zip(map(str, BUCKETS_S), map(float, figures.latencies.buckets()), strict=True)
    selection.add_metric([], [*below, ("+Inf", float(figures.latencies.num_samples))], figures.latencies.sum_s)
    yield selection
