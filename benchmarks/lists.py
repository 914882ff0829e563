"""Tokens given as a list of Python integers: what a match costs beside the packing that cannot be avoided."""

from __future__ import annotations

from array import array

from benchmarks.caches import OURS, OurTree
from benchmarks.options import Options
from benchmarks.prompts import Prompts
from benchmarks.report import Goal, Row
from benchmarks.timing import measure, ratio, repeated, spread
from radix_cache import pack_tokens

TITLE = "tokens as a list"


def run(options: Options) -> list[Row]:
    """One row."""
    num_tokens = options.pick(32_768, 32_768, 256)
    listed = Prompts().listed(num_tokens)
    caches = [make(num_tokens) for make in OURS]
    for cache in caches:
        cache.add(pack_tokens(listed))
    contestants = {cache.name: repeated(cache.use, listed) for cache in caches}
    floor = "array('I', tokens)"
    contestants[floor] = repeated(array, "I", listed)
    series = measure(contestants, options.pick(31, 9, 1))
    growth = ratio(series[OurTree.name], series[floor]).median
    return [
        Row(
            f"match + lock + release: a list of {num_tokens:,}",
            {name: spread(values) for name, values in series.items()},
            goals=(Goal(f"{OurTree.name} / {floor}", growth, 1.3),),
        )
    ]
