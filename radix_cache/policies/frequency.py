"""Orders of use: how many requests inserted a node (SGLang's lfu and slru), and the same with ageing.

A request counts once for each node that it inserts, in however many chunks; a match alone does not count. Frequency
without ageing never forgets: on agent traces it keeps what was popular an hour ago and hits a tenth of what LRU does.
"""

from __future__ import annotations

from radix_cache.errors import InvalidArgument
from radix_cache.hints import Hints
from radix_cache.node import Node
from radix_cache.policies.scored import ScoredPolicy

__all__ = ["LFU", "LFUDA", "SLRU"]


class LFU(ScoredPolicy):
    """P = (hits, last): the leaf of the fewest requests goes first, among equals the least recently touched."""

    name = "lfu"

    def update(self, node: Node, end: int, counts: bool, hints: Hints) -> None:
        """Count the request."""
        node.data = (node.data or 0) + counts

    def score(self, leaf: Node) -> tuple[int, int]:
        """Return hits and last access."""
        return leaf.data, leaf.last_access


class SLRU(LFU):
    """P = (hits >= protected_hits, last): LRU in two segments; what several requests used goes after all else.

    protected_hits: requests that it takes to be in the upper segment.
    """

    name = "slru"

    def __init__(self, protected_hits: int = 2) -> None:
        super().__init__()
        if type(protected_hits) is not int or protected_hits < 1:
            raise InvalidArgument(f"protected_hits is an integer of at least 1, not {protected_hits!r}")
        self.protected_hits = protected_hits

    def score(self, leaf: Node) -> tuple[bool, int]:
        """Return segment and last access."""
        return leaf.data >= self.protected_hits, leaf.last_access


class LFUDA(ScoredPolicy):
    """P = age + hits, where age is the highest P of a victim so far: frequency that the past does not win for ever.

    Least frequently used with dynamic ageing (Arlitt et al., "Evaluating content management techniques for Web proxy
    caches", 2000). P is taken when a node is touched.
    """

    name = "lfu-da"

    def __init__(self) -> None:
        super().__init__()
        self._age: float = 0

    def update(self, node: Node, end: int, counts: bool, hints: Hints) -> None:
        """Count the request, and take P at the age of now."""
        hits = (node.data[0] if node.data else 0) + counts
        node.data = (hits, self._age + hits)

    def score(self, leaf: Node) -> tuple[float, int]:
        """Return P and last access."""
        return leaf.data[1], leaf.last_access

    def evicted(self, leaf: Node, num_blocks: int) -> None:
        """Age to the P of what goes."""
        self._age = max(self._age, leaf.data[1])

    def saved(self) -> float:
        """Return the age."""
        return self._age

    def restore(self, saved: float) -> None:
        """Take up the age."""
        self._age = saved
