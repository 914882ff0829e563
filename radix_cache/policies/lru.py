"""Least recently used first: RadixAttention's rule (Zheng et al., SGLang, arXiv 2312.07104), kept in O(1).

The leaf with the smallest ``last_access`` goes first. Two leaves never share one: a logical time belongs to one path,
and a path has one leaf; when that is gone its parent, touched at the same time or later, is next in line.

Leaves hang in a doubly linked list in the order of their last touch, so that a touch is an unlink and a link: 0.4 us,
where any sorted container needs a search. Two kinds of leaves come up out of that order, parents whose last child
was evicted and leaves that were passed over while locked. They wait in a heap, which is small because such leaves are
few.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from radix_cache.node import Node
from radix_cache.policies.base import EvictionPolicy

__all__ = ["LRU"]


class LRU(EvictionPolicy):
    """The least recently touched leaf first. Every method is O(1), or O(log h) with h leaves in the heap."""

    name = "lru"
    merges_touched = True
    has_lasting_urgency = True

    def __init__(self) -> None:
        self._ends = ends = Node(None, b"", b"")  # the list's two ends in one: next is the oldest, prev the newest
        ends.prev = ends.next = ends
        self._heap: list[tuple[int, int, Node]] = []
        self._num_pushed = 0

    def empty_order(self) -> dict[str, Any]:
        """Return a list and a heap."""
        ends = Node(None, b"", b"")
        ends.prev = ends.next = ends
        return {"_ends": ends, "_heap": []}

    def touch(self, leaf: Node) -> None:
        """Move ``leaf`` to the newest end."""
        previous, following, ends = leaf.prev, leaf.next, self._ends
        if previous is not None and following is not None:
            previous.next, following.prev = following, previous
        leaf.rank = None
        leaf.prev = newest = ends.prev
        leaf.next = ends
        newest.next = ends.prev = leaf

    def add(self, leaf: Node) -> None:
        """Take ``leaf`` up at the place that its last access gives it."""
        if leaf.prev is None and leaf.rank is None:
            self._num_pushed += 1
            leaf.rank = entry = (leaf.last_access, self._num_pushed, leaf)
            heapq.heappush(self._heap, entry)

    def discard(self, leaf: Node) -> None:
        """Forget ``leaf``; an entry in the heap is only disowned, and dropped when it comes up."""
        previous, following = leaf.prev, leaf.next
        if previous is not None and following is not None:
            previous.next, following.prev = following, previous
            leaf.prev = leaf.next = None
        leaf.rank = None

    def victim(self) -> Node | None:
        """Return the older of the list's first unlocked leaf and the heap's."""
        ends, heap = self._ends, self._heap
        oldest = ends.next
        while oldest.num_locks:  # the ends themselves are never locked
            self.discard(oldest)
            oldest = ends.next
        while heap and (heap[0][2].rank is not heap[0] or heap[0][2].num_locks):
            entry = heapq.heappop(heap)
            if entry[2].rank is entry:
                entry[2].rank = None
        if heap and (oldest is ends or heap[0][0] < oldest.last_access):
            return heap[0][2]
        return None if oldest is ends else oldest

    def candidates(self) -> Iterator[Node]:
        """Yield the list from its oldest end, then the heap."""
        node = self._ends.next
        while node is not None and node is not self._ends:
            yield node
            node = node.next
        yield from (entry[2] for entry in self._heap if entry[2].rank is entry)
