"""Limits of namespaces: how much of the pool they may have, and how much of it others may not take.

A limit is set for a prefix of the namespace tuple, and holds for all namespaces that begin with it, together; the
longest one that fits counts. ``max_blocks`` bounds what they have in all, cached and leased, so it is checked where
blocks are allocated: a tenant at its limit evicts its own. ``min_blocks`` of what they have cached are not evicted for
anybody else, so that one tenant can't flush another.

Each limited group has an eviction order of its own; what compares the victims of two is the policy's `urgency`. Where
that lasts as long as a leaf is not touched, the most urgent of many groups is found without a look at each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from radix_cache.errors import InvalidArgument
from radix_cache.foremost import Foremost
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
        self._shares: list[Share | None] = [None, *shares.values()]
        self._orders: dict[Share | None, dict[str, Any]] = {share: policy.empty_order() for share in self._shares}
        self._numbers = {share: number for number, share in enumerate(self._shares)}
        self._open = Foremost(self._urgency_of)  # whose blocks others may take, as far as is known
        self._kept = Foremost(self._urgency_of)  # found to have no more than their minimum
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
        if node.children is None:
            self._note(node)

    def touch(self, leaf: Node) -> None:
        """Pass it on."""
        self._of(leaf).touch(leaf)
        self._note(leaf)

    def add(self, leaf: Node) -> None:
        """Pass it on."""
        self._of(leaf).add(leaf)
        self._note(leaf)

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

    def _note(self, leaf: Node) -> None:
        """``leaf`` may be the first of its order now, and its share may have more than its minimum."""
        if self._policy.has_lasting_urgency:
            number = self._numbers[leaf.root.share]  # type: ignore[union-attr]
            if number in self._kept:
                self._open.lower(number, self._kept.leave_out(number))
            self._open.lower(number, self._policy.urgency(leaf))

    def _urgency_of(self, number: int) -> Any:
        """Return the urgency of an order's first leaf, None where it has none."""
        leaf = self._use(self._shares[number]).first()
        return None if leaf is None else self._policy.urgency(leaf)

    def _settle(self) -> None:
        """Bring to their places the leaves that time has moved."""
        for leaf in self._policy.overdue():
            self.touch(leaf)

    def victim(self) -> Node | None:
        """Return the most urgent leaf of all, whoever has it. O(log shares), O(shares) where urgency does not last."""
        if not self._policy.has_lasting_urgency:
            return self._most_urgent(self._shares)
        self._settle()
        found = [first for first in (self._open.first(), self._kept.first()) if first is not None]
        return self._use(self._shares[min(found)[1]]).first() if found else None

    def victim_of(self, share: Share | None) -> Node | None:
        """Return the share's own next leaf."""
        self._settle()
        return self._use(share).first()

    def victim_for(self, share: Share | None) -> tuple[Node | None, int]:
        """Return the most urgent leaf that ``share`` may take, and how many blocks of it. As `victim` in cost."""
        if self._policy.has_lasting_urgency:
            leaf = self._first_for(share)
        else:
            leaf = self._most_urgent([other for other in self._shares if _num_to_take(other, share)])
        return leaf, 0 if leaf is None else min(_num_to_take(leaf.root.share, share), leaf.num_blocks)  # type: ignore[union-attr]

    def _first_for(self, share: Share | None) -> Node | None:
        self._settle()
        while (first := self._open.first()) is not None and not _num_to_take(self._shares[first[1]], None):
            self._kept.lower(first[1], self._open.leave_out(first[1]))
        found = [] if first is None else [first]
        if share is not None and (own := self._urgency_of(self._numbers[share])) is not None:
            found.append((own, self._numbers[share]))
        return self._use(self._shares[min(found)[1]]).first() if found else None

    def _most_urgent(self, shares: Iterable[Share | None]) -> Node | None:
        self._settle()
        self._policy.weigh()
        heads = [leaf for share in shares for leaf in self._use(share).heads()]
        return min(heads, key=self._policy.urgency, default=None)

    def candidates(self) -> Iterator[Node]:
        """Yield the orders one after the other."""
        for share in self._orders:
            yield from list(self._use(share).candidates())

    def ranking(self, leaf: Node) -> Any:
        """Pass it on."""
        return self._of(leaf).ranking(leaf)

    def take_up(self, leaf: Node, ranking: Any) -> None:
        """Pass it on; what is known of the orders was restored with all that is in them."""
        self._of(leaf).take_up(leaf, ranking)

    def saved(self) -> Any:
        """Return what the policy knows, and what is known of its orders."""
        return [self._policy.saved(), self._open.saved(), self._kept.saved()]

    def restore(self, saved: Any) -> None:
        """Take up what `saved` returned."""
        known, is_open, is_kept = saved
        self._policy.restore(known)
        self._open.restore(is_open)
        self._kept.restore(is_kept)


def _num_to_take(other: Share | None, share: Share | None) -> int:
    """How many blocks of ``other``'s one of ``share`` may evict; of those without limits, whatever there is."""
    if other is None:
        return MAX_BLOCKS
    return other.num_evictable_blocks if other is share else other.num_spare_blocks
