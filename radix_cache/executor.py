"""What each verb does to tree, pool and leases. Everything that moves a block from one owner to another is here.

One function for each operation; the two long ones are in `radix_cache.matching` and `radix_cache.publishing`. It first
finds out whether it can do all of its work, and only then does any: so an error changes nothing, and what the sums say
holds between any two calls. Not thread-safe: `radix_cache.cache` holds the lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from radix_cache.allocation import Allocator
from radix_cache.errors import (
    IntegrityError,
    InvalidArgument,
    PoolExhausted,
    RadixCacheError,
)
from radix_cache.index import PrefixIndex
from radix_cache.integrity import check_cache
from radix_cache.leases import Lease, LeaseTable
from radix_cache.matching import match_prefix, num_pinned
from radix_cache.node import BLOCK_ID_BYTES
from radix_cache.operations import (
    Allocate,
    Evict,
    Free,
    Insert,
    Invalid,
    MatchPrefix,
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
from radix_cache.publishing import insert
from radix_cache.reading import agrees
from radix_cache.stats import Counters
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["Executor"]

R = TypeVar("R")

_NUM_SWEPT_NODES = 1024


class Executor:
    """One pool, one tree, the leases, and an operation at a time.

    clock: seconds, never going back; read once a call, and only where leases expire. num_growth_blocks: what a match
    leaves to `Allocate` while another lease holds private blocks. max_pinned_blocks: what all pins may hold together.
    """

    def __init__(
        self,
        pool: FreeList,
        index: PrefixIndex,
        leases: LeaseTable,
        clock: Callable[[], float],
        num_growth_blocks: int,
        max_pinned_blocks: int,
    ) -> None:
        self.pool = pool
        self.index = index
        self.leases = leases
        self.allocator = Allocator(pool, index, num_growth_blocks)
        self.counters = Counters()
        self.num_pins = self.num_pinned_blocks = 0
        self.max_pinned_blocks = max_pinned_blocks
        self._clock = clock
        self.now = 0.0  # when the call began, where leases run out
        self.block_size = index.block_size

    def begin(self, engine_id: str | None) -> None:
        """Start a call: let leases run out whose time is up, then renew those of the engine that calls."""
        if self.leases.is_timed:
            self.now = now = self._clock()
            for lease in self.leases.expired(now):
                self.counters.num_expired_leases += not lease.is_pin
                self._end(lease)
            if engine_id is not None:
                self.leases.heartbeat(engine_id, now)

    def do(self, operation: Operation, engine_id: str | None) -> Any:
        """Run one operation; return its value or raise its error. Raises `IntegrityError` if the sums are off after
        it.
        """
        try:
            verb = _VERBS[type(operation)]
        except KeyError:
            raise InvalidArgument(f"an operation is needed, not {type(operation).__name__}") from None
        value = verb(self, operation, engine_id)
        pool = self.pool
        num_leased = self.allocator.num_leased_blocks
        if pool.num_free_blocks + num_leased + self.index.num_cached_blocks != pool.num_usable_blocks:
            raise IntegrityError(f"blocks were lost or doubled: {self.sums()}")
        return value

    def read_clock(self) -> float:
        """Return the time of this call, also where no lease has needed one yet."""
        return self.now if self.leases.is_timed else self._clock()

    def sums(self) -> str:
        """Return blocks by state, in words."""
        pool, cached = self.pool, self.index.num_cached_blocks
        parts = f"{pool.num_free_blocks} free + {self.allocator.num_leased_blocks} leased + {cached} cached"
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
            self.allocator.is_refusing = False

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
                self.allocator.is_refusing |= strict and isinstance(error, PoolExhausted)
        if opens:
            failed[opens] = error
        return Outcome(error=error)

    def named(self, lease_id: str, engine_id: str | None) -> Lease:
        """Find the lease; a call without an engine renews it."""
        leases = self.leases
        lease = leases.by_id.get(lease_id) or leases.get(lease_id)
        if engine_id is None and leases.ttl_s is not None:
            leases.renew(lease, self.now)
        return lease

    def num_missing(self, have: int, num_tokens: int | None, num_blocks: int | None) -> int:
        """How many private blocks a table of ``have`` blocks lacks; with both targets, whichever asks for fewer."""
        if num_tokens is None:
            return num_blocks or 0
        missing = max(-(-num_tokens // self.block_size) - have, 0)
        return missing if num_blocks is None else min(missing, num_blocks)

    def _allocate(self, operation: Allocate, engine_id: str | None) -> array[int]:
        lease = self.named(operation.lease_id, engine_id)
        num_blocks = self.num_missing(lease.num_blocks, operation.num_tokens, operation.num_blocks)
        if not num_blocks:
            return array("i")
        if lease.is_pin:
            raise InvalidArgument(f"lease {lease.lease_id!r} is a pin, which has no blocks of its own")
        self.allocator.check_growth(num_blocks, lease._root.share)
        added = self.allocator.take(num_blocks, lease._root)
        lease._grow(added)
        return added

    def _free(self, operation: Free, engine_id: str | None) -> None:
        lease = self.named(operation.lease_id, engine_id)
        num_trimmed = lease._check_return(operation.block_ids)
        lease._return(operation.block_ids, num_trimmed)
        self.allocator.give_back(lease._root, operation.block_ids)

    def _release(self, operation: Release, engine_id: str | None) -> None:
        lease = self.named(operation.lease_id, engine_id)
        if operation.pin_only and not lease.is_pin:
            raise InvalidArgument(f"lease {operation.lease_id!r} is no pin, but a request's")
        self.leases.remove(lease)
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        """Undo the lock and return what is private; the lease is out of the table already."""
        owned = lease._owned()
        root = lease._root
        if owned:
            self.allocator.give_back(root, owned)
        if lease._partial is not None:
            self.let_go_of_partial(lease)
        if lease._node is not None:
            freed = self.index.unlock(lease._node)
            lease._node = None
            if freed:
                self._give_reset(freed)
        if lease.is_pin:
            self.num_pins -= 1
            self.num_pinned_blocks -= num_pinned(self, lease.num_published_tokens)
        root.num_leases -= 1
        if root.children is None:
            self.index.close_root(root)

    def _renew(self, operation: Renew, engine_id: str | None) -> None:
        lease = self.named(operation.lease_id, engine_id)
        ttl_s = self.leases.ttl_s if operation.ttl_s is None else operation.ttl_s
        if ttl_s is not None:
            self.leases.promise(lease, self.now, ttl_s)

    def _probe(self, operation: Probe, engine_id: str | None) -> int:
        root = self.index.roots.get(operation.namespace)
        if root is None:
            return 0
        _, at, _, covered = self.index.walk(root, operation.tokens, 0, self.index.whole(len(operation.tokens)), [])
        return (at + covered) // TOKEN_BYTES

    def _evict(self, operation: Evict, engine_id: str | None) -> int:
        return self.allocator.evict(operation.num_blocks)

    def _reset(self, operation: Reset, engine_id: str | None) -> None:
        self.detach(operation)
        while self.sweep():
            pass

    def detach(self, operation: Reset) -> None:
        """Put what is reset out of sight and make the older leases stale."""
        namespace, tokens = operation
        self.index.checked_whole(tokens)
        for lease in list(self.leases):
            if lease.namespace[: len(namespace)] == namespace:
                if not lease.is_pin:
                    lease._is_stale = True
                elif self._extends(lease, tokens):  # what it keeps would never be matched again
                    self.leases.remove(lease)
                    self._end(lease)
        self.index.detach(namespace, tokens)
        self.counters.num_resets += 1

    def _extends(self, lease: Lease, tokens: bytes) -> bool:
        """Tell whether a lease holds more than ``tokens``, from position 0."""
        node = lease._node
        return node is not None and node.end > len(tokens) and agrees(node, 0, tokens)

    def totals(self) -> dict[str, int]:
        """Return the running totals by name, those that others keep included."""
        index, counters = self.index, self.counters
        counters.num_allocated_blocks = self.allocator.num_allocated_blocks
        counters.num_evicted_blocks = index.num_evicted_blocks
        counters.evicted_age, counters.evicted_idle = index.evicted_age, index.evicted_idle
        return counters.as_dict()

    def oldest_lease_age_s(self) -> float | None:
        """Return the age of the oldest lease that is no pin; None without one, or where leases do not run out."""
        return self.leases.oldest_age_s(self.now) if self.leases.ttl_s is not None else None

    def sweep(self) -> bool:
        """Free a piece of what was reset; False when there is none left."""
        freed = self.index.sweep(_NUM_SWEPT_NODES)
        if freed:
            self._give_reset(b"".join(freed))
        return freed is not None

    def let_go_of_partial(self, lease: Lease) -> None:
        """Unlock the block that a match named behind its whole blocks."""
        assert lease._partial is not None
        freed = self.index.unlock(lease._partial)
        lease._partial = None
        if freed:
            self._give_reset(freed)

    def _give_reset(self, freed: bytes) -> None:
        """Blocks that a reset forgot are free."""
        self.counters.num_reset_blocks += len(freed) // BLOCK_ID_BYTES
        self.pool.give(freed)

    def check_integrity(self) -> None:
        """Walk tree, pool and leases; raise `IntegrityError` on the first broken invariant. O(everything)."""
        check_cache(self)


_VERBS: dict[type, Callable[[Executor, Any, str | None], Any]] = {
    MatchPrefix: match_prefix,
    Allocate: Executor._allocate,
    Insert: insert,
    Free: Executor._free,
    Release: Executor._release,
    Renew: Executor._renew,
    Probe: Executor._probe,
    Evict: Executor._evict,
    Reset: Executor._reset,
}
