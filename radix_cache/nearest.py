"""Which cached block agrees best with a piece of a prompt that fills no block, among the children of one node.

An engine can copy such a block and compute only what follows the tokens that agree. The keys that share the longest
beginning with a piece lie side by side in sorted order, so a node with many children keeps its keys sorted as well:
from the first question on, and only where there are many. A few keys are looked through.
"""

from __future__ import annotations

from sortedcontainers import SortedList

from radix_cache.node import Node
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["NearestKeys", "num_common_tokens"]

_NUM_LOOKED_THROUGH = 16


def num_common_tokens(block: bytes, piece: bytes) -> int:
    """Return how many leading tokens of two short spans agree. O(tokens)."""
    places = range(0, min(len(block), len(piece)), TOKEN_BYTES)
    differing = (at for at in places if block[at : at + TOKEN_BYTES] != piece[at : at + TOKEN_BYTES])
    return next(differing, len(places) * TOKEN_BYTES) // TOKEN_BYTES


class NearestKeys:
    """The sorted keys of nodes that have been asked about. The index tells it of each child that comes and goes."""

    def __init__(self) -> None:
        self._sorted: dict[Node, SortedList[bytes]] = {}

    def find(self, node: Node, piece: bytes) -> tuple[bytes, int]:
        """Return the key of ``node``'s children that agrees longest with ``piece``, the smallest of equals, and for how
        many tokens; 0 where none does. O(log children) but for the first question about a node.
        """
        children = node.children
        if children is None:
            return b"", 0
        if len(children) <= _NUM_LOOKED_THROUGH:
            keys = sorted(key for key, _ in children.items())
            most = max((num_common_tokens(key, piece) for key in keys), default=0)
            return next((key for key in keys if num_common_tokens(key, piece) == most), b""), most
        order = self._sorted.get(node)
        if order is None:
            self._sorted[node] = order = SortedList(key for key, _ in children.items())
        place = order.bisect_left(piece)
        most = max(num_common_tokens(key, piece) for key in order[max(place - 1, 0) : place + 1])
        return order[order.bisect_left(piece[: most * TOKEN_BYTES])] if most else b"", most

    def added(self, node: Node, key: bytes) -> None:
        """``node`` has a new child."""
        if self._sorted and node in self._sorted:
            self._sorted[node].add(key)

    def removed(self, node: Node, key: bytes) -> None:
        """``node`` has lost a child."""
        if self._sorted and node in self._sorted:
            self._sorted[node].remove(key)
            if len(self._sorted[node]) <= _NUM_LOOKED_THROUGH:
                del self._sorted[node]

    def forget(self, node: Node) -> None:
        """``node`` is gone, or has no children any more."""
        if self._sorted:
            self._sorted.pop(node, None)
