"""Eviction: one block among many leaves, everything, and one block as the leaves grow in number.

Leaves are of one block where one block is evicted, so that those who evict whole leaves do no more than asked. Each
round evicts and then fills up again, untimed.
"""

from __future__ import annotations

from benchmarks.caches import OURS, OurCache, OurTree, Tree
from benchmarks.options import Options
from benchmarks.prompts import Prompts
from benchmarks.report import Goal, Row, compared
from benchmarks.timing import Prepare, Work, measure, ratio, spread

TITLE = "evict"

_SLOW = "SGLang's Python tree"


def run(options: Options) -> list[Row]:
    """Three rows."""
    return [_one(options), _everything(options), _scaling(options)]


def _one(options: Options) -> Row:
    num_leaves = options.pick(10_000, 10_000, 50)
    contestants = {
        make.name: _evictions(make(num_leaves), num_leaves, 10 if make.name == _SLOW else 100)
        for make in (*OURS, *options.peers)
    }
    return _row(f"evict one block among {num_leaves:,} leaves", contestants, options.pick(31, 9, 1))


def _evictions(cache: Tree, num_leaves: int, num_calls: int) -> Prepare:
    prompts = Prompts(num_leaves)
    num_calls = min(num_calls, num_leaves // 2)
    num_missing = num_leaves

    def prepare() -> Work:
        nonlocal num_missing
        for tokens in prompts.many(num_missing, 1):
            cache.add(cache.key(tokens))
        num_missing = num_calls

        def run() -> None:
            for _ in range(num_calls):
                cache.evict(1)

        return Work(num_calls, run)

    return prepare


def _everything(options: Options) -> Row:
    num_leaves = options.pick(10_000, 5_000, 50)
    contestants = {make.name: _clearing(make(num_leaves * 64), num_leaves) for make in (*OURS, *options.peers)}
    return _row(f"evict everything: {num_leaves:,} leaves of 64 blocks, per leaf", contestants, options.pick(7, 3, 1))


def _clearing(cache: Tree, num_leaves: int) -> Prepare:
    prompts = Prompts()

    def prepare() -> Work:
        for tokens in prompts.many(num_leaves, 64):
            cache.add(cache.key(tokens))
        return Work(num_leaves, lambda: cache.clear(num_leaves * 64))

    return prepare


def _scaling(options: Options) -> Row:
    few, many = options.pick((2_000, 200_000), (2_000, 200_000), (20, 40))
    contestants: dict[str, Prepare] = {}
    for num_leaves in (few, many):
        contestants[f"{num_leaves:,} leaves"] = _evictions(OurTree(num_leaves), num_leaves, 500)
    series = measure(contestants, options.pick(31, 9, 1))
    small, large = series.values()
    growth = ratio(large, small)
    return Row(
        "evict one block as leaves grow in number",
        {name: spread(values) for name, values in series.items()},
        goals=(Goal(f"{many:,} leaves / {few:,}", growth.median, 1.5),),
    )


def _row(label: str, contestants: dict[str, Prepare], num_rounds: int) -> Row:
    return compared(label, measure(contestants, num_rounds), [OurTree.name, OurCache.name])
