"""The slow tail of the full-pool cycle at 200,000 leaves: garbage collection, rehashes and heaps included.

Every cycle is timed on its own. The collector is on, `radix_cache.settle_gc` is called every 2,000 requests and counts
as part of that request, and a few hundred thousand objects of somebody else are alive, some of them fresh, as in a
server. The best of three runs stands for the code, since neighbours on the machine only ever add; the time that the
thread itself was on a processor is kept beside the wall clock and tells a pause of ours from one of theirs.
"""

from __future__ import annotations

from array import array
from collections import deque
from time import perf_counter, thread_time

from benchmarks.caches import OurCache
from benchmarks.cycle import NUM_TOKENS
from benchmarks.options import Options
from benchmarks.prompts import Prompts
from benchmarks.report import Goal, Row
from benchmarks.timing import Spread
from radix_cache import settle_gc

TITLE = "pauses"

_SETTLED_EVERY = 2000
_NUM_RUNS = 3
_P999_US, _PAUSE_US = 1000, 5000  # the goals


def run(options: Options) -> list[Row]:
    """One row for the best run, and one for each run."""
    num_leaves = options.pick(200_000, 200_000, 100)
    num_cycles = options.pick(400_000, 100_000, 300)
    bystanders = [{"request": number, "tokens": [number]} for number in range(options.pick(200_000, 200_000, 10))]
    cache, prompts = OurCache(num_leaves * NUM_TOKENS), Prompts()
    for _ in range(num_leaves):
        cache.cycle(prompts.one(NUM_TOKENS))
    settle_gc()
    runs = [_timed(cache, prompts, num_cycles) for _ in range(_NUM_RUNS)]
    walls, cpus = [min(ordered, key=_badness) for ordered in zip(*runs, strict=True)]
    label = f"full-pool cycle, {num_leaves:,} leaves, {num_cycles:,} cycles, {len(bystanders):,} other live objects"
    rows = [_row(f"run {number} of {_NUM_RUNS}", *times) for number, times in enumerate(runs, 1)]
    return [_row(f"{label}: best of {_NUM_RUNS} runs, by each clock", walls, cpus, has_goals=True), *rows]


def _badness(ordered: array[float]) -> float:
    """How far a run is from its goals."""
    return max(_quantile(ordered, 0.999) / _P999_US, ordered[-1] / _PAUSE_US)


def _timed(cache: OurCache, prompts: Prompts, num_cycles: int) -> tuple[array[float], array[float]]:
    """Wall and processor time of each cycle in microseconds, sorted each on its own."""
    walls, cpus = array("d"), array("d")
    recent: deque[dict[str, object]] = deque(maxlen=1000)
    cycle = cache.cycle
    for number in range(1, num_cycles + 1):
        tokens = prompts.one(NUM_TOKENS)
        recent.append({"tokens": tokens, "number": number, "log": []})
        cpu = thread_time()
        start = perf_counter()
        cycle(tokens)
        if not number % _SETTLED_EVERY:
            settle_gc()
        walls.append((perf_counter() - start) * 1e6)
        cpus.append((thread_time() - cpu) * 1e6)
    return array("d", sorted(walls)), array("d", sorted(cpus))


def _quantile(ordered: array[float], part: float) -> float:
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


def _row(label: str, walls: array[float], cpus: array[float], has_goals: bool = False) -> Row:
    times = {"wall": walls, "processor": cpus}
    parts = {"median": 0.5, "p99": 0.99, "p99.9": 0.999, "p99.99": 0.9999, "longest": 1.0}
    figures = {f"{part}, {kind}": _quantile(times[kind], parts[part]) for part in parts for kind in times}
    goals = [
        goal
        for kind, ordered in times.items()
        for goal in (
            Goal(f"p99.9 in us, {kind}", _quantile(ordered, 0.999), _P999_US),
            Goal(f"longest pause in us, {kind}", ordered[-1], _PAUSE_US),
        )
    ]
    spreads = {name: Spread(us, us, us) for name, us in figures.items()}
    return Row(label, spreads, goals=tuple(goals) if has_goals else ())
