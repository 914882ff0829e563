"""What each verb does to tree, pool and leases. Everything that moves a block from one owner to another is here.

One method for each operation. It first finds out whether it can do all of its work, and only then does any: so an error
changes nothing, and what the sums say holds between any two calls. Not thread-safe: `radix_cache.cache` holds the lock.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from radix_cache.errors import (
    IntegrityError,
    InvalidArgument,
    InvalidBlocks,
    InvalidTokens,
    PoolExhausted,
    RadixCacheError,
    StaleLease,
)
from radix_cache.index import PrefixIndex
from radix_cache.leases import Lease, LeaseTable
from radix_cache.node import BLOCK_ID_BYTES, Node
from radix_cache.operations import (
    Allocate,
    Evict,
    Free,
    Insert,
    InsertResult,
    Invalid,
    MatchPrefix,
    Namespace,
    Operation,
    Outcome,
    Probe,
    Release,
    Renew,
    Reset,
    needed_by,
    opened_by,
)
from radix_cache.pool import FreeList
from radix_cache.stats import Counters
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["Executor"]

R = TypeVar("R")

_NUM_SWEPT_NODES = 1024


class Executor:
    """One pool, one tree, the leases, and an operation at a time.

    clock: seconds, never going back; read only where leases expire. num_growth_blocks: what a match leaves to
    `Allocate` while another lease holds private blocks.
    """

    def __init__(
        self,
        pool: FreeList,
        index: PrefixIndex,
        leases: LeaseTable,
        clock: Callable[[], float],
        num_growth_blocks: int,
    ) -> None:
        self.pool = pool
        self.index = index
        self.leases = leases
        self.counters = Counters()
        self.num_leased_blocks = 0  # counted apart, so that a block lost or doubled anywhere shows in the sum
        self._clock = clock
        self._block_size = index.block_size
        self._num_growth_blocks = num_growth_blocks
        self._is_refusing = False  # inside a strict batch that has run out of blocks
        self._verbs: dict[type, Callable[[Any, str | None], Any]] = {
            MatchPrefix: self._match_prefix,
            Allocate: self._allocate,
            Insert: self._insert,
            Free: self._free,
            Release: self._release,
            Renew: self._renew,
            Probe: self._probe,
            Evict: self._evict,
            Reset: self._reset,
        }

    def begin(self, engine_id: str | None) -> None:
        """Start a call: let leases run out whose time is up, then renew those of the engine that calls."""
        if self.leases.ttl_s is not None:
            now = self._clock()
            for lease in self.leases.expired(now):
                self.counters.num_expired_leases += 1
                self._end(lease)
            if engine_id is not None:
                self.leases.heartbeat(engine_id, now)

    def do(self, operation: Operation, engine_id: str | None) -> Any:
        """Run one operation; return its value or raise its error. Raises `IntegrityError` if the sums are off after
        it.
        """
        value = self._verbs[type(operation)](operation, engine_id)
        pool = self.pool
        if pool.num_free_blocks + self.num_leased_blocks + self.index.num_cached_blocks != pool.num_usable_blocks:
            raise IntegrityError(f"blocks were lost or doubled: {self._sums()}")
        return value

    def _sums(self) -> str:
        pool, cached = self.pool, self.index.num_cached_blocks
        parts = f"{pool.num_free_blocks} free + {self.num_leased_blocks} leased + {cached} cached"
        return f"{parts}, of {pool.num_usable_blocks}"

    def do_all(
        self,
        operations: Sequence[Operation],
        engine_id: str | None,
        strict: bool,
        encode: Callable[[Operation, Outcome], R],
    ) -> list[R]:
        """Run ``operations`` in order; return what ``encode`` makes of each outcome, called right after its
        operation.
        """
        failed: dict[str, RadixCacheError] = {}
        try:
            return [encode(operation, self._attempt(operation, engine_id, failed, strict)) for operation in operations]
        finally:
            self._is_refusing = False

    def _attempt(
        self, operation: Operation, engine_id: str | None, failed: dict[str, RadixCacheError], strict: bool
    ) -> Outcome:
        """Run one operation of a batch; one that needs a lease whose match failed there gets the same error."""
        needs, opens = needed_by(operation), opened_by(operation)
        error = operation.error if isinstance(operation, Invalid) else failed.get(needs) if needs else None
        if error is None:
            try:
                value = self.do(operation, engine_id)
                failed.pop(opens or "", None)
                return Outcome(value)
            except RadixCacheError as refusal:
                error = refusal.with_traceback(None)
                self._is_refusing |= strict and isinstance(error, PoolExhausted)
        if opens:
            failed[opens] = error
        return Outcome(error=error)

    def _named(self, lease_id: str, engine_id: str | None) -> Lease:
        """Find the lease; a call without an engine renews it."""
        lease = self.leases.get(lease_id)
        if engine_id is None and self.leases.ttl_s is not None:
            self.leases.renew(lease, self._clock())
        return lease

    def _match_prefix(self, operation: MatchPrefix, engine_id: str | None) -> Lease:
        tokens, lease_id, namespace, max_tokens, num_tokens, num_blocks, parent_id = operation
        if lease_id in self.leases.by_id:
            raise InvalidArgument(f"lease_id {lease_id!r} is in use")
        index = self.index
        parts: list[bytes] = []
        published = 0
        node: Node | None = None
        if parent_id is not None:
            parent = self._forked(parent_id, namespace, max_tokens, engine_id)
            namespace, published, node = parent.namespace, parent.num_published_tokens, parent._node
            parts.extend(parent._parts)
        node = node or index.roots.get(namespace)
        limit = len(tokens)
        if max_tokens is not None:
            limit = min(limit, (max_tokens - published) * TOKEN_BYTES)
        at, child, covered = 0, None, 0
        if node is not None:
            node, at, child, covered = index.walk(node, tokens, 0, limit - limit % index.block_bytes, parts)
        num_cached_tokens = published + (at + covered) // TOKEN_BYTES
        num_private = self._num_missing(num_cached_tokens // self._block_size, num_tokens, num_blocks)
        if num_private:
            self._check_room(num_private, node if num_cached_tokens else None, child, covered)

        lease = Lease(lease_id, namespace, self._block_size, num_cached_tokens, parts, engine_id)
        if num_cached_tokens and node is not None:
            lease._node = node = index.cut(child, covered) if child is not None else node
            index.hold(node, False)
        if num_private:
            lease._private = self._take(num_private)
        self.leases.add(lease, self._clock() if self.leases.ttl_s is not None else 0.0)
        lease._num_queried_tokens = num_queried = published + len(tokens) // TOKEN_BYTES
        counters = self.counters
        counters.num_lookups += 1
        counters.num_lookup_tokens += num_queried
        counters.num_lookup_hit_tokens += num_cached_tokens
        return lease

    def _forked(self, parent_id: str, namespace: Namespace, max_tokens: int | None, engine_id: str | None) -> Lease:
        """Return the parent lease of a match, if it can be one."""
        parent = self._named(parent_id, engine_id)
        if parent._is_stale:
            raise StaleLease(parent_id)
        if namespace and namespace != parent.namespace:
            raise InvalidArgument("a fork stays in its parent's namespace, and was asked for another")
        if max_tokens is not None and max_tokens < parent.num_published_tokens:
            raise InvalidArgument(
                f"max_tokens {max_tokens} is below the parent's {parent.num_published_tokens} published"
            )
        return parent

    def _num_missing(self, have: int, num_tokens: int | None, num_blocks: int | None) -> int:
        """How many private blocks a table of ``have`` blocks lacks; with both targets, whichever asks for fewer."""
        if num_tokens is None:
            return num_blocks or 0
        missing = max(-(-num_tokens // self._block_size) - have, 0)
        return missing if num_blocks is None else min(missing, num_blocks)

    def _check_room(self, num_private: int, node: Node | None, child: Node | None, covered: int) -> None:
        """Raise `PoolExhausted` unless a match can have its private blocks.

        It ends ``covered`` bytes into ``child``, or in ``node``; what it would protect cannot be evicted for it.
        """
        index, pool = self.index, self.pool
        kept = self._num_growth_blocks if self.num_leased_blocks else 0
        available = pool.num_free_blocks - kept
        if num_private > available or self._is_refusing:
            own = 0 if node is None else index.num_evictable_above(node)
            if child is not None and not child.num_locks:
                own += covered // index.block_bytes
            available += index.num_cached_blocks - index.num_protected_blocks - own
        self._require(num_private, max(available, 0))

    def _require(self, num_blocks: int, available: int) -> None:
        if num_blocks > available or self._is_refusing:
            raise PoolExhausted(num_blocks, available)

    def _take(self, num_blocks: int) -> array[int]:
        """Allocate; what is not free is evicted first, and is known to be there."""
        missing = num_blocks - self.pool.num_free_blocks
        if missing > 0:
            self._evict_blocks(missing)
        self.counters.num_allocated_blocks += num_blocks
        self.num_leased_blocks += num_blocks
        return array("i", self.pool.take(num_blocks))

    def _allocate(self, operation: Allocate, engine_id: str | None) -> array[int]:
        lease = self._named(operation.lease_id, engine_id)
        num_blocks = self._num_missing(lease.num_blocks, operation.num_tokens, operation.num_blocks)
        if not num_blocks:
            return array("i")
        self._require(num_blocks, self.pool.num_free_blocks + self.index.num_evictable_blocks)
        added = self._take(num_blocks)
        lease._grow(added)
        return added

    def _insert(self, operation: Insert, engine_id: str | None) -> InsertResult:
        lease_id, tokens, offset = operation
        lease = self._named(lease_id, engine_id)
        if lease._is_stale:
            raise StaleLease(lease_id)
        published = lease.num_published_tokens
        if offset % self._block_size or offset > published:
            raise InvalidArgument(
                f"offset is a multiple of {self._block_size} up to the {published} tokens published, not {offset}"
            )
        stop = len(tokens) - len(tokens) % self.index.block_bytes
        overlap = min((published - offset) * TOKEN_BYTES, len(tokens))
        known = b""
        if overlap:
            self._check_overlap(lease, tokens, offset, overlap)
            overlap = min(overlap, stop)
            first = offset // self._block_size * BLOCK_ID_BYTES
            known = lease._published_ids()[first : first + overlap // self.index.block_bytes * BLOCK_ID_BYTES]
        num_new = (stop - overlap) // self.index.block_bytes
        if num_new > len(lease._private):
            raise InvalidBlocks(
                f"the tokens need {num_new} more blocks, the table has {len(lease._private)} private ones"
            )
        if num_new:
            num_cached_tokens, canonical, redundant = self._publish(lease, tokens, overlap, stop)
        else:
            num_cached_tokens, canonical, redundant = offset + stop // TOKEN_BYTES, b"", array("i")
            self._touch_to(lease, num_cached_tokens)
        if lease._num_queried_tokens:
            self._count_request(lease)
        return InsertResult(num_cached_tokens, array("i", known + canonical), redundant)

    def _check_overlap(self, lease: Lease, tokens: bytes, offset: int, overlap: int) -> None:
        """Raise `InvalidTokens` unless the first ``overlap`` bytes of ``tokens`` are what is published at
        ``offset``.
        """
        assert lease._node is not None
        start, depth = offset * TOKEN_BYTES, lease.num_published_tokens * TOKEN_BYTES
        if not self.index.agrees(lease._node, depth, start, tokens, overlap):
            known, _ = self.index.path_slice(lease._node, depth, start, depth)
            wrong = next(at for at in range(overlap) if known[at] != tokens[at]) // TOKEN_BYTES
            position = offset + wrong
            raise InvalidTokens(
                f"the tokens contradict what lease {lease.lease_id!r} has published at position {position}", wrong
            )

    def _publish(self, lease: Lease, tokens: bytes, start: int, stop: int) -> tuple[int, bytes, array[int]]:
        """Take bytes [start, stop) of ``tokens`` into the tree, behind what the lease has published.

        Returns how many tokens from position 0 were cached before, the canonical ids, and the redundant ones.
        """
        index, held = self.index, lease._node
        parts: list[bytes] = []
        node, at, child, covered = index.walk(held or index.open_root(lease.namespace), tokens, start, stop, parts)
        if child is not None:
            node = index.cut(child, covered)
        matched = (at + covered - start) // TOKEN_BYTES
        canonical = b"".join(parts)
        redundant = lease._private[: len(canonical) // BLOCK_ID_BYTES]
        if at + covered < stop:
            adopted = lease._private[len(redundant) : (stop - start) // index.block_bytes].tobytes()
            node = index.graft(node, 1 if node is held else 0, tokens[at + covered : stop], adopted)
            canonical += adopted
            num_adopted = len(adopted) // BLOCK_ID_BYTES
            self.num_leased_blocks -= num_adopted
            self.counters.num_inserted_blocks += num_adopted
        counted = None if lease._num_queried_tokens else held
        if node is held:
            index.touch(node, True, counted)
        else:
            index.hold(node, True, counted)
            if held is not None:
                index.unlock(held)
            lease._node = node
        num_cached_tokens = lease.num_published_tokens + matched
        lease._publish(canonical, redundant)
        self.counters.num_redundant_blocks += len(redundant)
        return num_cached_tokens, canonical, redundant

    def _touch_to(self, lease: Lease, num_tokens: int) -> None:
        """Touch the first ``num_tokens`` of what the lease has published."""
        if num_tokens and lease._node is not None:
            depth = lease.num_published_tokens * TOKEN_BYTES
            node = self.index.node_above(lease._node, depth, num_tokens * TOKEN_BYTES)
            self.index.touch(node, True, None if lease._num_queried_tokens else node)

    def _count_request(self, lease: Lease) -> None:
        """Count the reuse of a request, once, when it first publishes."""
        counters = self.counters
        counters.num_requests += 1
        counters.num_queried_tokens += lease._num_queried_tokens
        counters.num_hit_tokens += lease.num_cached_tokens
        lease._num_queried_tokens = 0

    def _free(self, operation: Free, engine_id: str | None) -> None:
        lease = self._named(operation.lease_id, engine_id)
        num_trimmed = lease._check_return(operation.block_ids)
        lease._return(operation.block_ids, num_trimmed)
        self.num_leased_blocks -= len(operation.block_ids)
        self.pool.give(operation.block_ids.tobytes())

    def _release(self, operation: Release, engine_id: str | None) -> None:
        lease = self._named(operation.lease_id, engine_id)
        self.leases.remove(lease)
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        """Undo the lock and return what is private; the lease is out of the table already."""
        owned = lease._owned()
        if owned:
            self.num_leased_blocks -= len(owned)
            self.pool.give(owned.tobytes())
        if lease._node is not None:
            freed = self.index.unlock(lease._node)
            lease._node = None
            if freed:
                self.pool.give(freed)

    def _renew(self, operation: Renew, engine_id: str | None) -> None:
        lease = self._named(operation.lease_id, engine_id)
        if self.leases.ttl_s is not None:
            ttl_s = self.leases.ttl_s if operation.ttl_s is None else operation.ttl_s
            self.leases.promise(lease, self._clock(), ttl_s)

    def _probe(self, operation: Probe, engine_id: str | None) -> int:
        root = self.index.roots.get(operation.namespace)
        if root is None:
            return 0
        _, at, _, covered = self.index.walk(root, operation.tokens, 0, self.index.whole(len(operation.tokens)), [])
        return (at + covered) // TOKEN_BYTES

    def _evict(self, operation: Evict, engine_id: str | None) -> int:
        return self._evict_blocks(operation.num_blocks)

    def _evict_blocks(self, num_blocks: int) -> int:
        evicted = b"".join(self.index.evict(num_blocks))
        self.pool.give(evicted)
        num_evicted = len(evicted) // BLOCK_ID_BYTES
        self.counters.num_evicted_blocks += num_evicted
        return num_evicted

    def _reset(self, operation: Reset, engine_id: str | None) -> None:
        self.detach(operation)
        while self.sweep():
            pass

    def detach(self, operation: Reset) -> None:
        """Put what is reset out of sight and make the older leases stale."""
        namespace, tokens = operation
        self.index.detach(namespace, self.index.checked_whole(tokens))
        for lease in self.leases:
            if lease.namespace[: len(namespace)] == namespace:
                lease._is_stale = True
        self.counters.num_resets += 1

    def sweep(self) -> bool:
        """Free a piece of what was reset; False when there is none left."""
        freed = self.index.sweep(_NUM_SWEPT_NODES)
        if freed:
            self.pool.give(b"".join(freed))
        return freed is not None

    def check_integrity(self) -> None:
        """Walk tree, pool and leases; raise `IntegrityError` on the first broken invariant. O(everything)."""
        owners = Counter(self.index.check_integrity(lease._node for lease in self.leases if lease._node is not None))
        owners.update(self.pool.check_integrity())
        num_leased = 0
        for lease in self.leases:
            self._check_lease(lease)
            owners.update(lease._owned())
            num_leased += len(lease._owned())
        shared = [block_id for block_id, count in owners.items() if count > 1]
        if shared:
            raise IntegrityError(f"block {shared[0]} has {owners[shared[0]]} owners")
        if len(owners) != self.pool.num_usable_blocks or num_leased != self.num_leased_blocks:
            raise IntegrityError(f"{len(owners)} blocks have an owner, {num_leased} a lease; not {self._sums()}")
        if wrong := self.leases.check():
            raise IntegrityError(wrong[0])

    def _check_lease(self, lease: Lease) -> None:
        """A lease ends in the tree where its books say, under the ids that its table names."""
        depth = lease.num_published_tokens * TOKEN_BYTES
        if (lease._node is None) is not (depth == 0):
            raise IntegrityError(f"{lease!r} is locked exactly if it has published something")
        if lease._node is None:
            return
        tokens, block_ids = self.index.path_slice(lease._node, depth, 0, depth)
        if len(tokens) != depth or lease._published_ids() != block_ids:
            raise IntegrityError(f"the block table of {lease!r} is not its path in the tree")
