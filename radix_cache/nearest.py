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
_MAX_NEAR_CHILDREN = 4


def num_common_tokens(block: bytes, piece: bytes) -> int:
    """Return how many leading tokens of two short spans agree. O(tokens)."""
    places = range(0, min(len(block), len(piece)), TOKEN_BYTES)
    differing = (at for at in places if block[at : at + TOKEN_BYTES] != piece[at : at + TOKEN_BYTES])
    return next(differing, len(places) * TOKEN_BYTES) // TOKEN_BYTES


def num_near_tokens(node: Node, covered: int, piece: bytes, block_bytes: int) -> int:
    """Return how many tokens of ``piece``, which follows a match, agree with a cached block that they do not fill.

    The match covers ``covered`` bytes of ``node``, or ends in it (0); then few children are looked at, of many none.
    O(block_size).
    """
    if covered:
        return num_common_tokens(node.tokens[covered : covered + block_bytes], piece)
    children = node.children
    if type(children) is dict and len(children) <= _MAX_NEAR_CHILDREN:
        return max(num_common_tokens(block, piece) for block in children)
    return 0


class NearestKeys:
    """The sorted keys of nodes that have been asked about. The index tells it of each child that comes and goes.

    orders: by node; while there are none, nothing need be told.
    """

    def __init__(self) -> None:
        self.orders: dict[Node, SortedList[bytes]] = {}

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
        order = self.orders.get(node)
        if order is None:
            self.orders[node] = order = SortedList(key for key, _ in children.items())
        place = order.bisect_left(piece)
        most = max(num_common_tokens(key, piece) for key in order[max(place - 1, 0) : place + 1])
        return order[order.bisect_left(piece[: most * TOKEN_BYTES])] if most else b"", most

    def find_behind(
        self, node: Node, child: Node | None, covered: int, piece: bytes, block_bytes: int
    ) -> tuple[Node | None, int, int]:
        """Find the cached block behind a match that agrees longest with ``piece``, the tokens behind it.

        The match covers ``covered`` bytes of ``child``, or ends in ``node``. Returns the node that the block is in, at
        which byte of it, and for how many tokens it agrees; none for 0. O(block_size + log children).
        """
        if child is not None:
            num_tokens = num_common_tokens(child.tokens[covered : covered + block_bytes], piece)
            return (child, covered, num_tokens) if num_tokens else (None, 0, 0)
        key, num_tokens = self.find(node, piece)
        found = node.children.get(key) if num_tokens and node.children is not None else None
        return found, 0, num_tokens

    def added(self, node: Node, key: bytes) -> None:
        """``node`` has a new child."""
        if node in self.orders:
            self.orders[node].add(key)

    def removed(self, node: Node, key: bytes) -> None:
        """``node`` has lost a child."""
        if node in self.orders:
            self.orders[node].remove(key)
            if len(self.orders[node]) <= _NUM_LOOKED_THROUGH:
                del self.orders[node]

    def forget(self, node: Node) -> None:
        """``node`` is gone, or has no children any more."""
        self.orders.pop(node, None)
