"""Limits of namespaces: how much of the pool they may have, and how much of it others may not take.

A limit is set for a prefix of the namespace tuple, and holds for all namespaces that begin with it, together; the
longest one that fits counts. ``max_blocks`` bounds what they have in all, cached and leased, so it is checked where
blocks are allocated: a tenant at its limit evicts its own. ``min_blocks`` of what they have cached are not evicted for
anybody else, so that one tenant can't flush another.

Each limited group has an eviction order of its own; what compares the victims of two is the policy's `urgency`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from radix_cache.errors import InvalidArgument
from radix_cache.hints import Hints
from radix_cache.node import Node, Share
from radix_cache.operations import MAX_BLOCKS, Namespace, check_count, check_namespace
from radix_cache.policies import EvictionPolicy

__all__ = ["NamespaceLimit", "SharedPolicy", "make_shares"]


class NamespaceLimit(NamedTuple):
    """What the namespaces under one prefix may have together, those left out that are under a longer one with a limit.

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
    """One policy with several orders: one for each share and one for all other namespaces.

    What the policy knows beyond its orders (an age, rates, evicted blocks) is of the pool, and so of all of them.
    """

    def __init__(self, policy: EvictionPolicy, shares: Mapping[Namespace, Share]) -> None:
        self.name = policy.name
        self._spec = policy.spec
        self.merges_touched = policy.merges_touched
        self._policy = policy
        self._orders: dict[Share | None, dict[str, Any]] = {
            share: policy.empty_order() for share in (None, *shares.values())
        }
        self._use(None)

    @property
    def spec(self) -> str:
        """Return the policy's."""
        return self._spec

    def _use(self, share: Share | None) -> EvictionPolicy:
        """Return the policy with that order in its hands."""
        self._policy.__dict__.update(self._orders[share])
        return self._policy

    def _of(self, node: Node) -> EvictionPolicy:
        return self._use(node.root.share)  # type: ignore[union-attr]

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
        return self._most_urgent(self._orders)

    def victim_of(self, share: Share) -> Node | None:
        """Return the share's own next leaf."""
        return self._use(share).victim()

    def victim_for(self, share: Share | None) -> tuple[Node | None, int]:
        """Return the most urgent leaf that ``share`` may take, and how many blocks of it. O(shares)."""
        may = {other: _num_to_take(other, share) for other in self._orders}
        leaf = self._most_urgent([other for other, most in may.items() if most])
        return leaf, 0 if leaf is None else min(may[leaf.root.share], leaf.num_blocks)  # type: ignore[union-attr]

    def _most_urgent(self, shares: Iterable[Share | None]) -> Node | None:
        found: list[tuple[Any, int, Node]] = []
        for number, share in enumerate(shares):
            policy = self._use(share)
            if (leaf := policy.victim()) is not None:
                found.append((policy.urgency(leaf), number, leaf))
        return min(found)[2] if found else None

    def candidates(self) -> Iterator[Node]:
        """Yield the orders one after the other."""
        for share in self._orders:
            yield from list(self._use(share).candidates())

    def ranking(self, leaf: Node) -> Any:
        """Pass it on."""
        return self._of(leaf).ranking(leaf)

    def rank_again(self, leaf: Node, ranking: Any) -> None:
        """Pass it on."""
        self._of(leaf).rank_again(leaf, ranking)

    def saved(self) -> Any:
        """Return what the policy knows."""
        return self._policy.saved()

    def restore(self, saved: Any) -> None:
        """Tell the policy what it knew."""
        self._policy.restore(saved)


def _num_to_take(other: Share | None, share: Share | None) -> int:
    """How many blocks of ``other``'s one of ``share`` may evict; of those without limits, whatever there is."""
    if other is None:
        return MAX_BLOCKS
    return other.num_evictable_blocks if other is share else other.num_spare_blocks
