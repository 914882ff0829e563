"""What a call costs as the tree grows to a million nodes.

All trees are in memory at once and take turns. Prompts are drawn at random among those cached, so in a large tree every
call meets nodes that no processor cache holds: that is in the figures, and is why "flat" means within a factor of two.
"""

from __future__ import annotations

import random

from benchmarks.caches import OurTree
from benchmarks.options import Options
from benchmarks.prompts import Prompts
from benchmarks.report import Goal, Row
from benchmarks.timing import Prepare, Work, each, measure, ratio, spread
from radix_cache import settle_gc

TITLE = "cost against nodes"

_NUM_TOKENS = 4
_NUM_CALLS = 1000


def sizes(options: Options) -> tuple[int, ...]:
    """Numbers of nodes."""
    return options.pick((1_000, 10_000, 100_000, 1_000_000), (1_000, 100_000), (50, 100))


def run(options: Options) -> list[Row]:
    """One row for each verb."""
    loaded = {f"{number:,} nodes": load(number) for number in sizes(options)}
    settle_gc()
    num_rounds = options.pick(21, 7, 1)
    rows = []
    for label, verb in (("match + lock + release", uses), ("insert + evict of one leaf", _turnover)):
        series = measure({name: verb(*tree) for name, tree in loaded.items()}, num_rounds)
        names = list(series)
        growth = ratio(series[names[-1]], series[names[0]]).median
        rows.append(
            Row(
                f"{label} as nodes grow in number",
                {name: spread(values) for name, values in series.items()},
                goals=(Goal(f"{names[-1]} / {names[0]}", growth, 2),),
            )
        )
    return rows


def load(num_nodes: int) -> tuple[OurTree, list[bytes]]:
    """A tree of prompts, two to a beginning: three nodes for each two."""
    cache, prompts = OurTree(0), Prompts()
    cached = []
    while cache.tree.num_nodes < num_nodes:
        beginning = prompts.one(_NUM_TOKENS)
        for _ in range(2):
            cached.append(beginning + prompts.one(_NUM_TOKENS))
            cache.add(cached[-1])
    return cache, cached


def uses(cache: OurTree, cached: list[bytes]) -> Prepare:
    draw = random.Random(1)

    def prepare() -> Work:
        return each(cache.use, draw.choices(cached, k=_NUM_CALLS))

    return prepare


def _turnover(cache: OurTree, cached: list[bytes]) -> Prepare:
    prompts = Prompts(2)

    def prepare() -> Work:
        fresh = prompts.many(_NUM_CALLS, _NUM_TOKENS)

        def run() -> None:
            for tokens in fresh:
                cache.add(tokens)
                cache.evict(_NUM_TOKENS)

        return Work(_NUM_CALLS, run)

    return prepare
