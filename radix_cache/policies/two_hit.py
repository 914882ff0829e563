"""Admission by a second request: what was asked for once gives way to what was asked for again."""

from __future__ import annotations

from radix_cache.hints import Hints
from radix_cache.node import Node
from radix_cache.operations import check_count
from radix_cache.policies.digests import Ghost
from radix_cache.policies.scored import ScoredPolicy
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["TwoHit"]


class TwoHit(ScoredPolicy):
    """P = (used by two or more requests, last): LRU in two segments; a block's first request does not earn it a place.

    Evicted blocks are remembered, so a second request counts that comes after the first one's blocks are gone (the A1
    queues of 2Q: Johnson and Shasha, VLDB 1994). Only inserts are uses, as in `radix_cache.policies.SLRU`.

    ghost_blocks: how many evicted blocks are remembered, about 150 bytes each. Four times the pool found as much on two
    traces as any number, or more.
    """

    name = "two-hit"

    def __init__(self, ghost_blocks: int = 65_536) -> None:
        super().__init__()
        self.ghost_blocks = check_count(ghost_blocks, "ghost_blocks", 1, 10**8)
        self._ghost = Ghost(self.ghost_blocks)
        self._known_end = 0  # up to where the path that is being touched was evicted before

    def boundary(self, node: Node, num_tokens: int, hints: Hints) -> int | None:
        """Return where what was evicted before ends within a new node."""
        self._known_end = 0
        if node.data is None and (num_known := self._ghost.num_known(node)):
            num_new = (node.num_blocks - num_known) * (len(node.tokens) // node.num_blocks) // TOKEN_BYTES
            self._known_end = num_tokens - num_new
        return self._known_end or None

    def update(self, node: Node, end: int, counts: bool, hints: Hints) -> None:
        """Count the request, after the one whose blocks were evicted."""
        before = node.data if node.data is not None else int(end <= self._known_end)
        node.data = min(before + counts, 2)

    def score(self, leaf: Node) -> tuple[bool, int]:
        """Return segment and last access."""
        return leaf.data >= 2, leaf.last_access

    def evicted(self, leaf: Node, num_blocks: int) -> None:
        """Remember the blocks."""
        self._ghost.add(leaf, num_blocks)

    def saved(self) -> list[int]:
        """Return the digests of evicted blocks."""
        return self._ghost.saved()

    def restore(self, saved: list[int]) -> None:
        """Remember those blocks."""
        self._ghost.restore(saved)
