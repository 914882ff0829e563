"""Where private blocks come from: the free list, then eviction; and who may have how many.

Whether there is room is found out before anything is evicted, so that a request which can't be served costs nobody
anything.
"""

from __future__ import annotations

from array import array

from radix_cache.errors import IntegrityError, PoolExhausted
from radix_cache.index import PrefixIndex
from radix_cache.node import BLOCK_ID_BYTES, Node, Root, Share
from radix_cache.pool import FreeList
from radix_cache.reading import num_unlocked_bytes
from radix_cache.shares import SharedPolicy

__all__ = ["Allocator"]


class Allocator:
    """Moves blocks between the free list and leases.

    num_growth_blocks: what a match leaves to running leases while any has private blocks. num_leased_blocks: counted
    apart, so that a block lost or doubled anywhere shows in the sum. is_refusing: nobody gets any (a strict batch that
    has run out).
    """

    def __init__(self, pool: FreeList, index: PrefixIndex, num_growth_blocks: int) -> None:
        self.pool = pool
        self.index = index
        self.num_growth_blocks = num_growth_blocks
        self.num_leased_blocks = 0
        self.num_allocated_blocks = 0
        self.is_refusing = False

    def check_match(
        self, num_blocks: int, share: Share | None, node: Node | None, child: Node | None, part: int
    ) -> None:
        """Raise `PoolExhausted` unless a match can have so many private blocks.

        It ends ``part`` bytes into ``child``, or in ``node``; what it would protect cannot be evicted for it.
        """
        kept = self.num_growth_blocks if self.num_leased_blocks else 0
        if num_blocks <= self.pool.num_free_blocks - kept and share is None and not self.is_refusing:
            return
        self._require(num_blocks, share, self._num_own(node, child, part), kept)

    def has_room(self, num_blocks: int, share: Share | None, node: Node | None, child: Node | None, part: int) -> bool:
        """Tell whether a match could have so many, if it protected ``part`` bytes behind ``node``."""
        kept = self.num_growth_blocks if self.num_leased_blocks else 0
        return num_blocks <= min(self._num_available(share, self._num_own(node, child, part), kept))

    def _num_own(self, node: Node | None, child: Node | None, part: int) -> int:
        """How many evictable blocks a match would protect."""
        own = 0 if node is None else num_unlocked_bytes(node) // self.index.block_bytes
        if child is not None and not child.num_locks:
            own += part // self.index.block_bytes
        return own

    def check_growth(self, num_blocks: int, share: Share | None) -> None:
        """Raise `PoolExhausted` unless a running lease can have so many more."""
        self._require(num_blocks, share, 0, 0)

    def _require(self, num_blocks: int, share: Share | None, own: int, kept: int) -> None:
        available, within_limit = self._num_available(share, own, kept)
        if num_blocks > min(available, within_limit) or self.is_refusing:
            because, is_own_limit = "", False
            if self.is_refusing:
                because = "an operation before it in this strict batch was refused"
            elif num_blocks <= available and share is not None:
                because, is_own_limit = f"max_blocks of its namespaces is {share.max_blocks}", True
            raise PoolExhausted(num_blocks, max(min(available, within_limit), 0), because, is_own_limit)

    def _num_available(self, share: Share | None, own: int, kept: int) -> tuple[int, int]:
        """How many blocks the pool has for one of ``share``, and how many its limit allows; ``own`` of the evictable
        ones are its own match.
        """
        index = self.index
        available = self.pool.num_free_blocks - kept + index.num_cached_blocks - index.num_protected_blocks - own
        available -= index.num_withheld_blocks
        if share is None:
            return available, available
        available += share.num_withheld_blocks
        if share.max_blocks is None:
            return available, available
        return available, share.max_blocks - share.num_leased_blocks - share.num_protected_blocks - own

    def take(self, num_blocks: int, root: Root) -> array[int]:
        """Allocate for a lease in ``root``'s namespace; what is not free is evicted, and is known to be there."""
        pool, share = self.pool, root.share
        if share is not None:
            self._make_room_in(share, num_blocks)
        missing = num_blocks - pool.num_free_blocks
        if missing > 0:
            if self.index.shares:
                self._evict_for(share, missing)
            else:
                pool.give(b"".join(self.index.evict(missing)))
        self.num_allocated_blocks += num_blocks
        self.lease(root, num_blocks)
        return array("i", pool.take(num_blocks))

    def lease(self, root: Root, num_blocks: int) -> None:
        """Count blocks as leased in a namespace; a negative number for those that no longer are."""
        self.num_leased_blocks += num_blocks
        root.num_leased_blocks += num_blocks
        if root.share is not None:
            root.share.num_leased_blocks += num_blocks

    def give_back(self, root: Root, block_ids: array[int]) -> None:
        """Leased blocks are free again."""
        self.lease(root, -len(block_ids))
        self.pool.give(block_ids.tobytes())

    def evict(self, num_blocks: int) -> int:
        """Return up to so many evictable blocks to the pool; what is kept for a namespace goes last."""
        evicted = self._evict_for(None, num_blocks) if self.index.shares else 0
        rest = b"".join(self.index.evict(num_blocks - evicted))
        self.pool.give(rest)
        return evicted + len(rest) // BLOCK_ID_BYTES

    def _make_room_in(self, share: Share, num_blocks: int) -> None:
        """Evict blocks of the share's own until so many more are within its limit."""
        policy = self.index.policy
        assert isinstance(policy, SharedPolicy)
        have = share.num_cached_blocks + share.num_leased_blocks
        left = 0 if share.max_blocks is None else have + num_blocks - share.max_blocks
        while left > 0:
            leaf = policy.victim_of(share)
            if leaf is None:
                raise IntegrityError(f"a share has no victim; {left} more of its blocks were evictable")
            piece = self.index.evict_from(leaf, left)
            left -= len(piece) // BLOCK_ID_BYTES
            self.pool.give(piece)

    def _evict_for(self, share: Share | None, num_blocks: int) -> int:
        """Evict up to so many blocks that ``share`` may take; return how many."""
        policy = self.index.policy
        assert isinstance(policy, SharedPolicy)
        left = num_blocks
        while left:
            leaf, most = policy.victim_for(share)
            if leaf is None:
                break
            piece = self.index.evict_from(leaf, min(left, most))
            left -= len(piece) // BLOCK_ID_BYTES
            self.pool.give(piece)
        return num_blocks - left
