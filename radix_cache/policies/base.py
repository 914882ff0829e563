"""What the tree asks of an eviction policy: an order of leaves, and nothing else.

The tree decides what may go (unlocked leaves only) and does the removing; a policy only says which of them is next. It
never unlocks, pins or edits a node beyond the three slots that are its own (``prev``, ``next``, ``rank``).

Locks are not announced: a policy finds a locked leaf when it looks for a victim, forgets it there and then, and hears
of it again through `add` when it is unlocked. So a leaf costs the policy nothing while requests come and go, and a
locked one at the head of the order is looked at once, not at each eviction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from radix_cache.node import Node

__all__ = ["EvictionPolicy"]


class EvictionPolicy(ABC):
    """An order of the leaves. Raised exceptions are bugs of the policy; none of these methods is expected to fail.

    name: what users call it.
    merges_touched: whether blocks touched at the same time are alike to it, whenever they came, so that a leaf may grow
    in place. Only recency alone allows that.
    """

    name: str
    merges_touched = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are made empty: the order belongs to one tree, and a copied tree fills its own."""
        return type(self), ()

    def visit(self, node: Node, is_insert: bool, counted: Node | None) -> None:
        """The path through ``node`` was covered by a match or an insert, at ``node.last_access``.

        ``counted``: the node of this path where the last insert of the same request ended, None for its first. Hits
        that count once a request count below it.
        """
        if node.children is None:
            self.touch(node)

    @abstractmethod
    def touch(self, leaf: Node) -> None:
        """``leaf``, new or known, locked or not, was covered by a match or an insert at ``leaf.last_access``."""

    @abstractmethod
    def add(self, leaf: Node) -> None:
        """``leaf`` can be evicted from now on: it was unlocked, or it lost its last child. It may be known already."""

    @abstractmethod
    def discard(self, leaf: Node) -> None:
        """``leaf`` is gone, or has a child now. It may be unknown."""

    @abstractmethod
    def victim(self) -> Node | None:
        """Return the unlocked leaf whose tail goes next, or None if there is none; it stays in the order.

        Asked only when blocks of that leaf are evicted right after.
        """

    @abstractmethod
    def candidates(self) -> Iterable[Node]:
        """Yield every leaf in the order, for integrity checks: all unlocked leaves, each once, and maybe locked
        ones.
        """
