"""What several test files share: an injected clock, short names for counters, real chains of nodes, pieces of pool."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from radix_cache.tree import RadixTree


@dataclass
class Clock:
    """A clock that stands still until a test moves it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.now += seconds


class Counters(NamedTuple):
    """The five block counters of `stats`, in the short names of the scenarios."""

    free: int
    leased: int
    cached: int
    evictable: int
    protected: int


def counters(stats: Any) -> Counters:
    """Return the block counters of a ``stats()`` answer, having checked that they add up among themselves."""
    found = Counters(
        stats.num_free_blocks,
        stats.num_leased_blocks,
        stats.num_cached_blocks,
        stats.num_evictable_blocks,
        stats.num_protected_blocks,
    )
    assert found.cached == found.evictable + found.protected, found
    return found


def cached(cache: Any, tokens: Sequence[int], namespace: tuple[str, ...] = ()) -> list[int]:
    """Cache ``tokens`` (whole blocks), leave nothing leased, and return the ids."""
    lease = cache.match_prefix(tokens, namespace, num_tokens=len(tokens))
    ids = cache.insert(lease, tokens).block_ids
    cache.release(lease)
    return list(ids)


def tree_counters(tree: RadixTree) -> tuple[int, int, int]:
    """Return cached, evictable, protected."""
    return tree.num_cached_blocks, tree.num_evictable_blocks, tree.num_protected_blocks


def packed(tokens: Iterable[int]) -> bytes:
    """Return tokens in the wire form, by way of numpy: independent of the code under test."""
    return np.array(list(tokens), dtype="<u4").tobytes()


def split_into_nodes(tree: RadixTree, tokens: bytes) -> None:
    """Make a chain of one node a block out of a cached ``tokens``: matching each shorter prefix cuts it off."""
    step = 4 * tree.block_size
    for stop in range(len(tokens) - step, 0, -step):
        tree.release(tree.match_prefix(tokens[:stop]))


def chain(depth: int, block_size: int = 1) -> tuple[RadixTree, bytes]:
    """Return a tree that is one real chain of ``depth`` nodes, and the tokens of it all."""
    tree = RadixTree(block_size=block_size)
    tokens = packed(range(depth * block_size))
    tree.insert(tokens, range(depth))
    split_into_nodes(tree, tokens)
    assert tree.num_nodes == depth
    return tree, tokens


def assert_fresh_int32(ids: array[int]) -> None:
    """``ids`` is a writable int32 array that numpy wraps without a copy."""
    assert isinstance(ids, array)
    assert ids.itemsize == 4
    assert ids.typecode == "i"
    view = np.frombuffer(ids, dtype=np.int32)
    assert view.flags.writeable
    if len(ids):
        before = ids[0]
        view[0] = before ^ 1
        assert ids[0] == before ^ 1, "numpy works on a copy"
        view[0] = before


class Prompt(NamedTuple):
    """A prompt in few symbols, so that prompts collide whatever the block size: one symbol a block, then a ragged
    tail.
    """

    symbols: tuple[int, ...]
    num_ragged: int = 0

    def tokens(self, block_size: int) -> list[int]:
        """Return the tokens. Blocks 0 and 1 agree up to their last token, blocks 0 and 2 from their second on."""
        blocks = {
            0: [0] * block_size,
            1: [0] * (block_size - 1) + [1],
            2: [2] + [0] * (block_size - 1),
        }
        whole = [token for symbol in self.symbols for token in blocks[symbol]]
        return whole + [0] * (self.num_ragged % block_size)


HOT = (0, 1, 1, 0)  # what many prompts begin with


def prompts(max_blocks: int = 5) -> st.SearchStrategy[Prompt]:
    """Draw prompts of up to that many whole blocks: some of a common beginning, then anything."""
    tails = st.lists(st.integers(0, 2), max_size=max(1, max_blocks - len(HOT) + 1))
    symbols = st.builds(lambda hot, tail: (*HOT[:hot], *tail)[:max_blocks], st.integers(0, len(HOT)), tails)
    return st.builds(Prompt, symbols, st.integers(0, 2))


NAMESPACES: list[tuple[str, ...]] = [(), ("a",), ("a", "b"), ("ab",)]


def namespaces() -> st.SearchStrategy[tuple[str, ...]]:
    """Draw namespaces, mostly the empty one: prompts collide only within one."""
    return st.sampled_from([()] * 6 + NAMESPACES[1:])
