"""Kinds of requests come back at their own rates: eviction by the chance that a leaf is used again while it is here."""

from __future__ import annotations

import math
from typing import Any

from radix_cache.hints import Hints
from radix_cache.node import Node
from radix_cache.policies.classed import ClassedPolicy
from radix_cache.policies.kinds import OTHER, Kind, Kinds
from radix_cache.policies.parameters import MAX_SECONDS, check_number
from radix_cache.policies.rates import Rate
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["WorkloadAware"]


class WorkloadAware(ClassedPolicy):
    """P = (e^(-r t) * (1 - e^(-r life)), -offset): the least likely to be used again soon goes first, then the deeper.

    The workload-aware rule of "KVCache Cache in the Wild" (Wang et al., USENIX ATC 2025): t is the time since the last
    use, life how long a leaf stays unused until it is evicted, r the rate of reuse of its kind, all over the last hour.
    A node's kind is that of the last request that inserted it: the hint ``request_type`` and which turn of its
    ``conversation`` it was (0 without that hint; 8 and more are one).

    reuse_s, life_s: guesses of 1 / r and of life, that count as much as one observation.
    """

    name = "workload-aware"
    # A node's record: type and turn, the time of its last use, and that of the last request which inserted it.

    def __init__(self, reuse_s: float = 600.0, life_s: float = 600.0) -> None:
        super().__init__()
        self.reuse_s = check_number(reuse_s, "reuse_s", 1e-3, MAX_SECONDS)
        self.life_s = check_number(life_s, "life_s", 1e-3, MAX_SECONDS)
        self._kinds = Kinds(self.is_unused)
        self._ends = Rate()  # of unused leaves, by eviction

    def visit(self, node: Node, num_tokens: int, is_insert: bool, counted: Node | None, hints: Hints) -> None:
        """Note the use of each node on the path, and the time it took to come. O(depth + log leaves)."""
        now, counts, above = self.clock(), is_insert, node
        kind = self._kinds.of(hints, now, counted is None) if is_insert else OTHER
        while above.parent is not None:
            counts = counts and above is not counted
            if not counts:
                above.data = (*above.data[:2], now, above.data[3])
            else:
                if above.data is not None:
                    self._kinds.reuse_of(above.data[:2]).add(now, 1, now - above.data[3])
                above.data = (*kind, now, now)
            above = above.parent
        if node.children is None:
            self.touch(node)

    def classify(self, leaf: Node) -> Kind:
        """Return the kind of the leaf."""
        return self._kinds.known(leaf.data[:2])

    def place(self, leaf: Node) -> tuple[float, int, int]:
        """Return last use and offset: the same rate makes the chance fall with the time alone."""
        return leaf.data[2], -_offset(leaf), leaf.last_access

    def urgency(self, leaf: Node) -> tuple[float, int, int]:
        """Return the logarithm of the chance, the offset, and the last access."""
        now = self.clock()
        used, *others = leaf.rank[0][0]
        rate = self._kinds.reuse_of(leaf.data[:2]).at(now, self.reuse_s)
        life_s = 1 / self._ends.at(now, self.life_s)
        return (math.log(-math.expm1(-rate * life_s)) - rate * (now - used), *others)

    def evicted(self, leaf: Node, num_blocks: int) -> None:
        """Note that a leaf was waited for in vain."""
        if num_blocks == leaf.num_blocks:
            now = self.clock()
            *kind, used, inserted = leaf.data
            self._kinds.reuse_of(tuple(kind)).add(now, 0, now - inserted)
            self._ends.add(now, 1, now - used)

    def saved(self) -> list[Any]:
        """Return the kinds with their rates and turns, and the rate of evictions."""
        return [self._kinds.saved(), self._ends.saved()]

    def restore(self, saved: list[Any]) -> None:
        """Take up what `saved` returned."""
        kinds, ends = saved
        self._kinds.restore(kinds)
        self._ends = Rate(ends)


def _offset(leaf: Node) -> int:
    """Return the position in tokens at which ``leaf`` ends. O(depth)."""
    num_bytes, above = 0, leaf
    while above.parent is not None:
        num_bytes += len(above.tokens)
        above = above.parent
    return num_bytes // TOKEN_BYTES
