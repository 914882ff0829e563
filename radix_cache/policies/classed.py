"""The base of policies whose scores change by themselves as time passes.

No order of all leaves can hold such scores. But leaves of one class (the same kind of request, the same costs) keep
their order among themselves, so each class is a sorted list, and only the first leaves of the classes are compared,
with their scores of now. A policy bounds the number of its classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedList

from radix_cache.node import Node
from radix_cache.policies.base import EvictionPolicy

__all__ = ["ClassedPolicy"]


class ClassedPolicy(EvictionPolicy):
    """Subclasses give `classify`, `place` and `urgency`, and `visit` where they keep a record in ``node.data``."""

    def __init__(self) -> None:
        self._all: list[defaultdict[Any, SortedList[Any]]] = []  # a dict for each order
        self._orders: defaultdict[Any, SortedList[Any]] = self.empty_order()["_orders"]
        self._num_ranked = 0

    def empty_order(self) -> dict[str, Any]:
        """Return sorted lists by class, none yet."""
        self._all.append(defaultdict(SortedList))
        return {"_orders": self._all[-1]}

    @abstractmethod
    def classify(self, leaf: Node) -> Any:
        """Return the class of ``leaf``, hashable."""

    @abstractmethod
    def place(self, leaf: Node) -> Any:
        """Return what orders the leaves of one class, whatever the time; the smallest goes first."""

    @abstractmethod
    def urgency(self, leaf: Node) -> Any:
        """Return the score of ``leaf`` now; the smallest goes first."""

    def touch(self, leaf: Node) -> None:
        """Rank ``leaf`` anew. O(log leaves)."""
        self.discard(leaf)
        self.add(leaf)

    def add(self, leaf: Node) -> None:
        """Rank ``leaf`` if it is not. O(log leaves)."""
        if leaf.rank is None:
            self._num_ranked += 1
            self._rank(leaf, self.classify(leaf), (self.place(leaf), self._num_ranked, leaf))

    def _rank(self, leaf: Node, kind: Any, entry: tuple[Any, int, Node]) -> None:
        leaf.rank = (entry, kind)
        self._orders[kind].add(entry)

    def discard(self, leaf: Node) -> None:
        """Forget ``leaf`` if it is ranked. O(log leaves)."""
        if leaf.rank is not None:
            entry, kind = leaf.rank
            self._orders[kind].remove(entry)
            leaf.rank = None

    def ranking(self, leaf: Node) -> Any:
        """Return the class of ``leaf``, its place there, and when it was ranked."""
        return leaf.rank and (leaf.rank[1], *leaf.rank[0][:2])

    def rank_again(self, leaf: Node, ranking: Any) -> None:
        """Rank ``leaf`` as it was. O(log leaves)."""
        kind, place, number = ranking
        self._rank(leaf, kind, (place, number, leaf))
        self._num_ranked = max(self._num_ranked, number)

    def is_unused(self, kind: Any) -> bool:
        """Tell whether no leaf is of that class; if so, forget its empty lists."""
        if any(orders.get(kind) for orders in self._all):
            return False
        for orders in self._all:
            orders.pop(kind, None)
        return True

    def heads(self) -> list[Node]:
        """Return the first unlocked leaf of each class. O(classes), amortised over locked ones passed."""
        return [order[0][2] for order in self._orders.values() if _has_unlocked(order, 0)]

    def ends(self) -> Iterator[tuple[Node, Node]]:
        """Yield the first and the last unlocked leaf of each class, in each group with limits. Cost as of `heads`."""
        for orders in self._all:
            for order in orders.values():
                if _has_unlocked(order, 0) and _has_unlocked(order, -1):
                    yield order[0][2], order[-1][2]

    def victim(self) -> Node | None:
        """Return the most urgent head. O(classes)."""
        self.weigh()
        return min(self.heads(), key=self.urgency, default=None)

    def candidates(self) -> Iterator[Node]:
        """Yield the leaves, class by class."""
        return (entry[2] for order in self._orders.values() for entry in order)


def _has_unlocked(order: SortedList[Any], end: int) -> bool:
    """Forget the locked leaves at an end of ``order`` (0 or -1); tell whether another is left."""
    while order and (leaf := order[end][2]).num_locks:
        del order[end]
        leaf.rank = None
    return bool(order)
