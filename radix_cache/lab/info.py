"""What a trace is like, before anything is replayed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from radix_cache.lab.blocks import BlockTrace
from radix_cache.lab.curve import Curve, block_curve
from radix_cache.lab.hits import Hits
from radix_cache.lab.requests import Request
from radix_cache.lab.turns import conversations_of

__all__ = ["Spread", "TraceInfo", "trace_info"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some numbers; all 0 where there are none."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of ``values``. Percentiles are values that occur."""
        ordered = sorted(values)
        if not ordered:
            return cls(0, 0, 0, 0, 0)
        p50, p90, p99 = (ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """A trace in figures.

    tokens_per_block: of the first request's blocks. num_blocks: different ones, the working set. ideal: what a
    boundless cache finds. seconds: from the first request to the last. num_out_of_order: requests that are earlier than
    the one before. gap_s: between neighbours. reuse_distance: of the blocks found, how many blocks LRU must hold to
    find them. is_named: whether the trace says which conversation a request belongs to; else that is a guess. turns:
    requests of a conversation. think_s: from a turn's arrival to the next one's, the answer's time included. curve:
    LRU.
    """

    num_requests: int
    num_conversations: int
    is_named: bool
    tokens_per_block: int
    num_blocks: int
    num_prompt_blocks: int
    seconds: float
    num_out_of_order: int
    ideal: Hits
    prompt_tokens: Spread
    output_tokens: Spread
    gap_s: Spread
    turns: Spread
    think_s: Spread
    reuse_distance: Spread
    curve: Curve

    def as_dict(self) -> dict[str, Any]:
        """Return all figures but the curve by name, ready for JSON."""
        names = [name for name in self.__slots__ if name not in {"curve", "ideal"}]
        plain = {name: getattr(self, name) for name in names}
        shown = {name: asdict(value) if isinstance(value, Spread) else value for name, value in plain.items()}
        return {**shown, "ideal": self.ideal.as_dict()}


def trace_info(requests: Sequence[Request], block_size: int = 16) -> TraceInfo:
    """Return what ``requests`` are like. block_size: of traces of token ids. O(blocks)."""
    trace = BlockTrace.of(requests, block_size)
    curve = block_curve(trace)
    conversations = conversations_of(requests, trace)
    times = [request.timestamp_ms / 1000 for request in requests]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return TraceInfo(
        num_requests=len(requests),
        num_conversations=len(set(conversations)),
        is_named=any(request.conversation for request in requests),
        tokens_per_block=trace.block_tokens[0] if len(trace) else block_size,
        num_blocks=trace.num_blocks,
        num_prompt_blocks=trace.num_prompt_blocks,
        seconds=max(times) - min(times) if times else 0.0,
        num_out_of_order=sum(gap < 0 for gap in gaps),
        ideal=curve.whole.at(trace.num_blocks),
        prompt_tokens=Spread.of(request.num_prompt_tokens for request in requests),
        output_tokens=Spread.of(request.num_output_tokens for request in requests),
        gap_s=Spread.of(gap for gap in gaps if gap >= 0),
        turns=Spread.of(Counter(conversations).values()),
        think_s=Spread.of(_think_times(times, conversations)),
        reuse_distance=_distances(curve),
        curve=curve,
    )


def _think_times(times: Sequence[float], conversations: Sequence[int]) -> list[float]:
    latest: dict[int, float] = {}
    found = []
    for now, conversation in zip(times, conversations, strict=True):
        if conversation in latest:
            found.append(max(now - latest[conversation], 0.0))
        latest[conversation] = now
    return found


def _distances(curve: Curve) -> Spread:
    """Return the spread of the depths at which blocks are found, read off the curve."""
    hits = curve.whole.hit_blocks
    num_hits = hits[-1]
    if not num_hits:
        return Spread.of(())
    p50, p90, p99 = (bisect_left(hits, num_hits * share) for share in (0.5, 0.9, 0.99))
    mean = sum(depth * (after - before) for depth, (before, after) in enumerate(pairwise(hits), 1)) / num_hits
    return Spread(mean, p50, p90, p99, bisect_left(hits, num_hits))
