"""Insert of a tail of 100 tokens behind 2,048 that are cached.

What is timed is the insert alone. Match, lock and allocation come before it, as in a request; the lock goes after it.
Ours is the verb of `PrefixCache`: it checks that what is published already agrees, and moves the lock.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.caches import Cache, OurCache
from benchmarks.options import Options
from benchmarks.prompts import TOKEN_BYTES, Prompts
from benchmarks.report import Row, compared
from benchmarks.timing import Prepare, Work, each, measure
from radix_cache import Lease

TITLE = "insert"


def run(options: Options) -> list[Row]:
    """One row."""
    num_rounds = options.pick(31, 9, 1)
    num_calls = options.pick(100, 50, 3)
    prompts = Prompts()
    shared = prompts.one(2048)
    tails = [prompts.many(num_calls, 100) for _ in range(num_rounds + 1)]
    contestants: dict[str, Prepare] = {}
    makes: tuple[type[Cache], ...] = (OurCache, OurCacheByTail, *options.peers)
    for make in makes:
        cache = make(2048 + (num_rounds + 1) * num_calls * 100)
        cache.add(cache.key(shared))
        contestants[cache.name] = _inserts(cache, shared, iter(tails).__next__)
    series = measure(contestants, num_rounds)
    return [compared("insert: 100 tokens behind 2,048 cached", series, [OurCache.name, OurCacheByTail.name])]


class OurCacheByTail(OurCache):
    """Names only what is new, from ``offset=`` on; the peers' verbs have to be given the whole prompt."""

    name = "PrefixCache, offset="

    def publish(self, opened: tuple[Lease, bytes]) -> None:
        lease, tokens = opened
        start = lease.num_cached_tokens
        self.cache.insert(lease, tokens[start * TOKEN_BYTES :], offset=start)


def _inserts(cache: Cache, shared: bytes, next_tails: Callable[[], list[bytes]]) -> Prepare:
    opened: list[object] = []

    def prepare() -> Work:
        for done in opened:
            cache.close(done)
        opened[:] = [cache.open(cache.key(shared + tail)) for tail in next_tails()]
        return each(cache.publish, opened)

    return prepare
