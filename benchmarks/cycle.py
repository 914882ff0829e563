"""A request in a full pool: match, lock, allocate by evicting, insert, unlock; 64 tokens that nobody has seen.

The state that every busy server is in. Ours is `PrefixCache`, with its leases and its checks.
"""

from __future__ import annotations

from benchmarks.caches import Cache, OurCache
from benchmarks.options import Options
from benchmarks.prompts import Prompts
from benchmarks.report import Row, compared
from benchmarks.timing import Prepare, Work, each, measure
from radix_cache import settle_gc

TITLE = "full-pool cycle"

NUM_TOKENS = 64
_CALLS = {"PrefixCache": 2000, "SGLang": 20, "SGLang's Rust core": 20, "SGLang's Python tree": 3}


def run(options: Options) -> list[Row]:
    """One row."""
    num_leaves = options.pick(40_000, 40_000, 50)
    contestants: dict[str, Prepare] = {}
    makes: tuple[type[Cache], ...] = (OurCache, *options.peers)
    for make in makes:
        cache = make(num_leaves * NUM_TOKENS)
        for tokens in Prompts().many(num_leaves, NUM_TOKENS):
            cache.add(cache.key(tokens))
        contestants[make.name] = _cycles(cache, 3 if options.size == "tiny" else _CALLS[make.name])
    settle_gc()
    series = measure(contestants, options.pick(21, 7, 1))
    label = f"full-pool cycle of {NUM_TOKENS} tokens, {num_leaves:,} leaves"
    return [compared(label, series, [OurCache.name], bound=50)]


def _cycles(cache: Cache, num_calls: int) -> Prepare:
    prompts = Prompts(2)

    def prepare() -> Work:
        return each(cache.cycle, [cache.key(tokens) for tokens in prompts.many(num_calls, NUM_TOKENS)])

    return prepare
