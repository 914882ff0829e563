"""Orders of time: first in first out, last in first out, most recently used first (SGLang's fifo, filo and mru)."""

from __future__ import annotations

from radix_cache.node import Node
from radix_cache.policies.scored import ScoredPolicy

__all__ = ["FIFO", "FILO", "MRU"]


class FIFO(ScoredPolicy):
    """P = created: the leaf that was inserted first goes first, however often it was read since.

    On chats it looks like LRU, because a leaf that is read again is nearly always extended by a new one.
    """

    name = "fifo"

    def score(self, leaf: Node) -> int:
        """Return the logical time at which it came."""
        return leaf.created


class FILO(FIFO):
    """P = -created: the leaf that was inserted last goes first."""

    name = "filo"

    def score(self, leaf: Node) -> int:
        """Return the age with its sign turned."""
        return -super().score(leaf)


class MRU(ScoredPolicy):
    """P = -last: the leaf that was touched last goes first. For loops longer than the cache, where LRU hits nothing."""

    name = "mru"
    merges_touched = True

    def score(self, leaf: Node) -> int:
        """Return the recency with its sign turned."""
        return -leaf.last_access
