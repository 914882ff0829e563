"""Limits of namespaces: how much of the pool they may have, and how much of it others may not take.

A limit is set for a prefix of the namespace tuple, and holds for all namespaces that begin with it, together; the
longest one that fits counts. ``max_blocks`` bounds what they have in all, cached and leased, so it is checked where
blocks are allocated: a tenant at its limit evicts its own. ``min_blocks`` of what they have cached are not evicted for
anybody else, so that one tenant can't flush another.

Each limited group keeps an eviction order of its own; what compares the victims of two is their policy's `urgency`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from radix_cache.errors import InvalidArgument
from radix_cache.hints import Hints
from radix_cache.node import Node, Share
from radix_cache.operations import Namespace, check_count, check_namespace
from radix_cache.policies import EvictionPolicy

__all__ = ["NamespaceLimit", "SharedPolicy", "make_shares"]


class NamespaceLimit(NamedTuple):
    """What the namespaces under one prefix may have together.

    max_blocks: the most, cached and leased; None: any number. min_blocks: so many cached ones stay theirs.
    """

    max_blocks: int | None = None
    min_blocks: int = 0


def make_shares(limits: Mapping[Namespace, NamespaceLimit], num_usable_blocks: int) -> dict[Namespace, Share]:
    """Return a `Share` for each limited prefix. Raises `InvalidArgument` that names what can't be kept."""
    shares: dict[Namespace, Share] = {}
    for namespace, limit in limits.items():
        name = check_namespace(namespace)
        if not isinstance(limit, NamespaceLimit):
            raise InvalidArgument(f"a limit is a NamespaceLimit, not {type(limit).__name__}")
        most = None if limit.max_blocks is None else check_count(limit.max_blocks, "max_blocks", 1)
        shares[name] = Share(most, check_count(limit.min_blocks, "min_blocks", most=most or num_usable_blocks))
    num_kept = sum(share.min_blocks for share in shares.values())
    if num_kept > num_usable_blocks:
        raise InvalidArgument(f"min_blocks of all limits are {num_kept} together, and the pool has {num_usable_blocks}")
    return shares


class SharedPolicy(EvictionPolicy):
    """One order for each share and one for all other namespaces, each by a copy of the same policy."""

    def __init__(self, policy: EvictionPolicy, shares: Mapping[Namespace, Share]) -> None:
        self.name = policy.name
        self.merges_touched = policy.merges_touched
        self._rest = policy
        self._orders: dict[Share | None, EvictionPolicy] = {None: policy}
        for share in shares.values():
            self._orders[share] = order = copy.copy(policy)
            order.clock = policy.clock

    def _of(self, node: Node) -> EvictionPolicy:
        return self._orders[node.root.share]  # type: ignore[union-attr]

    def visit(self, node: Node, num_tokens: int, is_insert: bool, counted: Node | None, hints: Hints) -> None:
        """Pass it on."""
        self._of(node).visit(node, num_tokens, is_insert, counted, hints)

    def touch(self, leaf: Node) -> None:
        """Pass it on."""
        self._of(leaf).touch(leaf)

    def add(self, leaf: Node) -> None:
        """Pass it on."""
        self._of(leaf).add(leaf)

    def discard(self, leaf: Node) -> None:
        """Pass it on."""
        self._of(leaf).discard(leaf)

    def boundary(self, node: Node, num_tokens: int, hints: Hints) -> int | None:
        """Pass it on."""
        return self._of(node).boundary(node, num_tokens, hints)

    def evicted(self, leaf: Node, num_blocks: int) -> None:
        """Pass it on."""
        self._of(leaf).evicted(leaf, num_blocks)

    def unlocked(self, node: Node) -> None:
        """Pass it on."""
        self._of(node).unlocked(node)

    def victim(self) -> Node | None:
        """Return the most urgent leaf of all, whoever has it. O(shares)."""
        return self._most_urgent(self._orders.values())[0]

    def victim_of(self, share: Share) -> Node | None:
        """Return the share's own next leaf."""
        return self._orders[share].victim()

    def victim_for(self, share: Share | None) -> tuple[Node | None, int]:
        """Return the most urgent leaf that ``share`` may take, and how many blocks of it. O(shares)."""
        may = {
            order: other.num_evictable_blocks if other is share else other.num_spare_blocks
            for other, order in self._orders.items()
            if other is not None
        }
        leaf, order = self._most_urgent(chain([self._rest], (order for order, most in may.items() if most)))
        return leaf, 0 if leaf is None else may.get(order, leaf.num_blocks)  # type: ignore[arg-type]

    @staticmethod
    def _most_urgent(orders: Any) -> tuple[Node | None, EvictionPolicy | None]:
        found = [(order, leaf) for order in orders if (leaf := order.victim()) is not None]
        if not found:
            return None, None
        order, leaf = min(found, key=lambda pair: pair[0].urgency(pair[1]))
        return leaf, order

    def candidates(self) -> Iterator[Node]:
        """Yield the orders one after the other."""
        for order in self._orders.values():
            yield from order.candidates()

    def ranking(self, leaf: Node) -> Any:
        """Pass it on."""
        return self._of(leaf).ranking(leaf)

    def rank_again(self, leaf: Node, ranking: Any) -> None:
        """Pass it on."""
        self._of(leaf).rank_again(leaf, ranking)

    def saved(self) -> list[Any]:
        """Return what each order knows."""
        return [order.saved() for order in self._orders.values()]

    def restore(self, saved: Any) -> None:
        """Give each order what it knew."""
        for order, known in zip(self._orders.values(), saved or (), strict=False):
            order.restore(known)
