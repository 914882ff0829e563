"""What a server counted until now, as one copy: taken on the event loop, read by whoever has time for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radix_cache.stats import Stats
from radix_cache_service.events.stream import EventFigures
from radix_cache_service.recording import RecordingFigures
from radix_cache_service.state.keeper import KeeperFigures
from radix_cache_service.telemetry.metrics import Latencies

if TYPE_CHECKING:
    from radix_cache_service.servicer import Servicer

__all__ = ["Figures", "take_figures"]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a server counted until now. num_calls, num_operations: by ``"name/code"``. loop_delay_s: how long the event
    loop took to come to this.
    """

    stats: Stats
    num_blocks: int
    block_size: int
    num_calls: Mapping[str, int]
    num_operations: Mapping[str, int]
    latencies: Mapping[str, Latencies]
    waits: Latencies
    num_failures: int
    num_waiting_calls: int
    num_streams: int
    max_streams: int
    is_serving: bool
    loop_delay_s: float
    events: EventFigures
    journal: KeeperFigures
    recording: RecordingFigures


def take_figures(servicer: Servicer, *, is_serving: bool, loop_delay_s: float) -> Figures:
    """Return the figures of now, and change nothing. O(methods x statuses), about 50 us; for the event loop to call."""
    metrics = servicer.metrics
    said = servicer.cache.describe()
    return Figures(
        stats=servicer.cache.stats(),
        num_blocks=said.num_blocks - said.num_reserved_blocks,
        block_size=said.block_size,
        num_calls=dict(metrics.num_calls),
        num_operations=metrics.num_operations(),
        latencies={method: copy.copy(latencies) for method, latencies in metrics.latencies.items()},
        waits=copy.copy(metrics.waits),
        num_failures=metrics.num_failures,
        num_waiting_calls=len(servicer.runner.line),
        num_streams=len(servicer.streams),
        max_streams=servicer.streams.max_streams,
        is_serving=is_serving,
        loop_delay_s=loop_delay_s,
        events=EventFigures() if servicer.events.stream is None else servicer.events.stream.figures(),
        journal=KeeperFigures() if servicer.runner.keeper is None else servicer.runner.keeper.figures(),
        recording=RecordingFigures() if servicer.runner.recording is None else servicer.runner.recording.figures(),
    )
