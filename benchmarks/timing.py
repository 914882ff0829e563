"""How anything here is measured.

Contestants take turns, round by round, so that all of them meet the same clock speed and the same neighbours on the
machine. A round is preparation, which is not timed, and work, which is. The first round warms up and is thrown away.
What is compared are the ratios *within* a round; what is reported is their median, with the quartiles as spread.

The clock is the time that the thread was on a processor. On a shared machine the wall clock adds 4 ms whenever a
neighbour gets the processor, in rounds of 10 ms, and so measures the neighbours. All contestants do their work in the
calling thread.

The garbage collector is off while a round is timed, as in `timeit`, for everybody alike. The benchmark of pauses
(`benchmarks.pauses`) leaves it on, and times each request by the wall clock too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ROUND_S = 0.01
"""What a round of one contestant lasts, where the number of calls is free."""


class Spread(NamedTuple):
    """Median and quartiles over the rounds."""

    median: float
    low: float
    high: float


class Work(NamedTuple):
    """One round of a contestant: ``run()`` does ``num_calls`` operations."""

    num_calls: int
    run: Callable[[], object]


Prepare = Callable[[], Work]
"""Called before each round, untimed."""


def measure(contestants: Mapping[str, Prepare], num_rounds: int) -> dict[str, list[float]]:
    """Return for each contestant its microseconds a call, one figure a round; figure ``i`` of all is the same round."""
    series: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(num_rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            us = _timed(contestants[name]())
            if number:
                series[name].append(us)
    return series


def _timed(work: Work) -> float:
    gc.disable()
    try:
        start = time.thread_time()
        work.run()
        elapsed_s = time.thread_time() - start
    finally:
        gc.enable()
    return elapsed_s / work.num_calls * 1e6


def repeated(call: Callable[..., object], *args: Any, most: int = 100_000) -> Prepare:
    """A contestant that makes the same call again and again; how often, is found out here."""
    call(*args)
    start = time.thread_time()
    call(*args)
    num_calls = max(1, min(most, int(ROUND_S / (time.thread_time() - start))))

    def run() -> None:
        for _ in range(num_calls):
            call(*args)

    return lambda: Work(num_calls, run)


def each(call: Callable[[Any], object], items: Sequence[Any]) -> Work:
    """One round that makes the call once for each item."""

    def run() -> None:
        for item in items:
            call(item)

    return Work(len(items), run)


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Median and quartiles of the rounds' ratios."""
    return spread([one / other for one, other in zip(numerators, denominators, strict=True)])
