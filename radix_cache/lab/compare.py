"""Policies beside each other: hit rates from the rows of a sweep, and how much of the possible gain each has.

The gain that is possible over LRU is what lies between LRU and the offline optimum; a policy's share of it is 0 where
it finds what LRU finds, 1 where it finds what the optimum does, and negative where LRU would have been better.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from radix_cache.errors import InvalidArgument
from radix_cache.lab.playing import OPTIMAL
from radix_cache.lab.tables import Row

__all__ = ["METRICS", "Comparison", "Point", "compare"]

METRICS = ("block", "token", "request")


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one capacity. rate: the mean over seeds. error: its standard error, None with one seed. gap_closed:
    its share of what lies between LRU and the optimum; None where one of these is missing, or nothing lies between.
    """

    policy: str
    num_blocks: int
    rate: float
    num_seeds: int
    error: float | None
    gap_closed: float | None

    def __str__(self) -> str:
        """Return the figures in percent, as in ``"14.81 ± 0.20 (7 %)"``."""
        error = "" if self.error is None else f" ± {100 * self.error:.2f}"
        share = "" if self.gap_closed is None else f" ({round(100 * self.gap_closed)} %)"
        return f"{100 * self.rate:.2f}{error}{share}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The points of one trace, by capacity and in the order in which policies first appear.

    trace: the name of its file, or the path where two have the same name, and the block size where there are results
    of several. num_trace_blocks: different blocks of the
    trace, of the first seed.
    """

    trace: str
    num_trace_blocks: int
    points: tuple[Point, ...]

    @property
    def policies(self) -> list[str]:
        """The policies, in their order."""
        return list(dict.fromkeys(point.policy for point in self.points))

    @property
    def capacities(self) -> list[int]:
        """The capacities, rising."""
        return sorted({point.num_blocks for point in self.points})

    def at(self, policy: str, num_blocks: int) -> Point | None:
        """Return the point, or None."""
        found = (p for p in self.points if (p.policy, p.num_blocks) == (policy, num_blocks))
        return next(found, None)


def compare(rows: Iterable[Row], metric: str = "block", *, last_half: bool = False) -> list[Comparison]:
    """Return a comparison for each trace, and each size of its blocks. metric: what is hit, of `METRICS`. last_half:
    count only when it is warm.

    Rows with the same policy and capacity are seeds; the same row twice, from two files say, is one. Raises
    `InvalidArgument` for rows that no sweep made.
    """
    if metric not in METRICS:
        raise InvalidArgument(f"metric is one of {', '.join(METRICS)}, not {metric!r}")
    column = f"{'last_half_' if last_half else ''}{metric}_hit_rate"
    rates: dict[_Trace, dict[tuple[str, int], list[float]]] = {}
    sizes: dict[_Trace, int] = {}
    for row in {json.dumps(row, sort_keys=True, default=str): row for row in rows}.values():
        try:
            trace = _Trace(str(row["trace"]), str(row.get("block_size")))
            rate = 0.0 if row[column] is None else _number(row, column)
            sizes.setdefault(trace, _number(row, "num_trace_blocks"))
            rates.setdefault(trace, {}).setdefault((str(row["policy"]), _number(row, "num_blocks")), []).append(rate)
        except KeyError as error:
            raise InvalidArgument(f"these are no results of a sweep: {error} is missing") from None
    names = _names(rates)
    return [Comparison(names[trace], sizes[trace], _points(found)) for trace, found in rates.items()]


class _Trace(NamedTuple):
    path: str
    block_size: str


def _number(row: Row, name: str) -> Any:
    if not isinstance(row[name], (int, float)):
        raise InvalidArgument(f"these are no results of a sweep: {name} is a number, not {row[name]!r}")
    return row[name]


def _names(traces: Collection[_Trace]) -> dict[_Trace, str]:
    """Return what each is called: its file, with as much more as is needed to tell it from the others."""
    num_named = Counter(Path(path).name for path in {trace.path for trace in traces})
    num_sizes = Counter(trace.path for trace in traces)
    return {
        trace: (trace.path if num_named[Path(trace.path).name] > 1 else Path(trace.path).name)
        + (f", {trace.block_size} tokens in a block" if num_sizes[trace.path] > 1 else "")
        for trace in traces
    }


def _points(rates: dict[tuple[str, int], list[float]]) -> tuple[Point, ...]:
    means = {place: fmean(values) for place, values in rates.items()}
    points = [
        Point(policy, num_blocks, rate, len(seeds), _error(seeds), _share(rate, means, num_blocks))
        for ((policy, num_blocks), rate), seeds in zip(means.items(), rates.values(), strict=True)
    ]
    return tuple(sorted(points, key=lambda point: point.num_blocks))


def _error(seeds: list[float]) -> float | None:
    return stdev(seeds) / math.sqrt(len(seeds)) if len(seeds) > 1 else None


def _share(rate: float, means: dict[tuple[str, int], float], num_blocks: int) -> float | None:
    lru, best = means.get(("lru", num_blocks)), means.get((OPTIMAL, num_blocks))
    return None if lru is None or best is None or best <= lru else (rate - lru) / (best - lru)
