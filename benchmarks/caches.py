"""Who is measured: one face for ours and every peer, as thin as it can be.

A contestant takes its keys in its own native form, made beforehand by `key`: turning tokens into that form is not what
is compared. Each verb below is what an engine would call, in the peer's own words.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from radix_cache import Lease, PrefixCache, RadixTree


class Tree(Protocol):
    """What remembers prefixes, in a pool of ``num_blocks`` one-token blocks."""

    name: str

    def __init__(self, num_blocks: int) -> None: ...

    def key(self, tokens: bytes) -> Any:
        """Packed tokens in the contestant's own form."""

    def add(self, key: Any) -> None:
        """Cache ``key`` in fresh blocks."""

    def use(self, key: Any) -> Any:
        """Match, lock, release."""

    def evict(self, num_blocks: int) -> None:
        """Evict at least ``num_blocks``, and give them back to the pool."""

    def clear(self, num_blocks: int) -> None:
        """Evict all ``num_blocks``, in the form that is cheapest for so many."""


class Cache(Tree, Protocol):
    """A tree with a pool, so that it can serve requests."""

    def open(self, key: Any) -> Any:
        """Match, lock and allocate; returns what `publish` and `close` need."""

    def publish(self, opened: Any) -> None:
        """Insert what was opened."""

    def close(self, opened: Any) -> None:
        """Unlock what was opened."""

    def cycle(self, key: Any) -> None:
        """Match, lock, allocate (evict if need be), insert, unlock: one request."""


class OurCache:
    """`PrefixCache`: tree, pool and leases, with all of its checks."""

    name = "PrefixCache"

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, block_size=1)

    def key(self, tokens: bytes) -> bytes:
        return tokens

    def add(self, key: bytes) -> None:
        self.cycle(key)

    def use(self, key: bytes) -> None:
        cache = self.cache
        cache.release(cache.match_prefix(key))

    def open(self, key: bytes) -> tuple[Lease, bytes]:
        return self.cache.match_prefix(key, num_tokens=len(key) // 4), key

    def publish(self, opened: tuple[Lease, bytes]) -> None:
        lease, tokens = opened
        self.cache.insert(lease, tokens)

    def close(self, opened: tuple[Lease, bytes]) -> None:
        self.cache.release(opened[0])

    def evict(self, num_blocks: int) -> None:
        self.cache.evict(num_blocks)

    clear = evict

    def cycle(self, key: bytes) -> None:
        cache = self.cache
        lease = cache.match_prefix(key, num_tokens=len(key) // 4)
        cache.insert(lease, key)
        cache.release(lease)


class OurTree:
    """`RadixTree` alone: who brings the block ids is the caller, here a counter."""

    name = "RadixTree"

    def __init__(self, num_blocks: int) -> None:
        self.tree = RadixTree(block_size=1)
        self._next = 0

    def key(self, tokens: bytes) -> bytes:
        return tokens

    def add(self, key: bytes) -> None:
        start = self._next
        self._next = stop = start + len(key) // 4
        self.tree.insert(key, array("i", range(start, stop)))

    def use(self, key: bytes) -> None:
        tree = self.tree
        tree.release(tree.match_prefix(key))

    def evict(self, num_blocks: int) -> None:
        self.tree.evict(num_blocks)

    clear = evict


OURS: tuple[type[Tree], ...] = (OurTree, OurCache)
