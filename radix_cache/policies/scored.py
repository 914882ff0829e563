"""The base of every policy that is a formula: the leaf with the smallest score goes first.

A policy says how a node's record changes when a request covers it, and what its score is. Scores are taken when a leaf
is touched or comes up for eviction, and kept in a sorted list (sortedcontainers' SortedList: 4 us for a touch at 10,000
leaves, against 0.4 for `radix_cache.policies.lru`, whose order needs no search).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedList

from radix_cache.hints import Hints
from radix_cache.node import Node
from radix_cache.policies.base import EvictionPolicy
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["ScoredPolicy"]


class ScoredPolicy(EvictionPolicy):
    """Subclasses give `score`, and `update` where they keep a record of a node in ``node.data``."""

    has_lasting_urgency = True

    def __init__(self) -> None:
        self._order: SortedList[Any] = SortedList()
        self._num_ranked = 0  # breaks ties: whoever was ranked first goes first

    def empty_order(self) -> dict[str, Any]:
        """Return a sorted list."""
        return {"_order": SortedList()}

    @abstractmethod
    def score(self, leaf: Node) -> Any:
        """Return a tuple or number; the smallest goes first. ``leaf.last_access`` is the logical time of its last
        touch.
        """

    def update(self, node: Node, end: int, counts: bool, hints: Hints) -> None:
        """A request covered ``node``, which ends at position ``end`` (in tokens).

        ``counts``: it inserted there, and had not before. ``node.data`` is None at first. ``data`` is replaced, never
        changed: the two halves of a cut share it. It is made of numbers, strings and tuples.
        """

    def visit(self, node: Node, num_tokens: int, is_insert: bool, counted: Node | None, hints: Hints) -> None:
        """Update the records on the path, the deepest first, then the rank of its leaf. O(depth + log leaves)."""
        counts, end, above = is_insert, num_tokens, node
        while above.parent is not None:
            counts = counts and above is not counted
            self.update(above, end, counts, hints)
            end -= len(above.tokens) // TOKEN_BYTES
            above = above.parent
        if node.children is None:
            self.touch(node)

    def urgency(self, leaf: Node) -> Any:
        """Return the score that ``leaf`` was ranked with."""
        return self.score(leaf) if leaf.rank is None else leaf.rank[0]

    def touch(self, leaf: Node) -> None:
        """Rank ``leaf`` anew. O(log leaves)."""
        self.discard(leaf)
        self.add(leaf)

    def add(self, leaf: Node) -> None:
        """Rank ``leaf`` if it is not. O(log leaves)."""
        if leaf.rank is None:
            self._num_ranked += 1
            leaf.rank = (self.score(leaf), self._num_ranked, leaf)
            self._order.add(leaf.rank)

    def discard(self, leaf: Node) -> None:
        """Forget ``leaf`` if it is ranked. O(log leaves)."""
        if leaf.rank is not None:
            self._order.remove(leaf.rank)
            leaf.rank = None

    def ranking(self, leaf: Node) -> Any:
        """Return the score that ``leaf`` was ranked with, and when."""
        return leaf.rank and leaf.rank[:2]

    def rank_again(self, leaf: Node, ranking: Any) -> None:
        """Rank ``leaf`` as it was. O(log leaves)."""
        leaf.rank = (*ranking, leaf)
        self._order.add(leaf.rank)
        self._num_ranked = max(self._num_ranked, ranking[1])

    def victim(self) -> Node | None:
        """Return the unlocked leaf of the smallest score. O(log leaves), amortised over locked ones passed."""
        for leaf in self.overdue():
            self.touch(leaf)
        return self.first()

    def first(self) -> Node | None:
        """Return the victim, as far as scores are up to date."""
        while self._order:
            leaf: Node = self._order[0][2]
            if not leaf.num_locks:
                return leaf
            self.discard(leaf)
        return None

    def candidates(self) -> Iterator[Node]:
        """Yield the leaves in order."""
        return (entry[2] for entry in self._order)
