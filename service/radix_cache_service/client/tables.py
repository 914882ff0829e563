"""A client's leases and their block tables, kept from the server's answers.

An answer tells only what is new, so answers are applied in the order in which the server gave them. Two calls at once
on one lease have no such order: whoever shares a lease between threads must take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radix_cache.errors import InvalidBlocks, UnknownLease
from radix_cache.leases import Lease
from radix_cache.operations import Allocate, Free, Insert, InsertResult, Operation, Renew
from radix_cache_service.calls import Opened

__all__ = ["Tables"]


class Tables:
    """The leases that this client opened and that are not known to be gone. Not thread-safe.

    until: when each runs out, by this process's clock, as far as calls that name it keep it alive. promised: those that
    were promised a time of their own. lost: those whose end was sent off, and nobody knows whether it has come.
    """

    def __init__(self, engine_id: str | None) -> None:
        self.engine_id = engine_id
        self.leases: dict[str, Lease] = {}
        self.lost: dict[str, Lease] = {}
        self.until: dict[str, float] = {}
        self.promised: set[str] = set()

    def clear(self) -> None:
        """Forget all: the server has."""
        for lease in (*self.leases.values(), *self.lost.values()):
            lease._ended = UnknownLease
        self.leases.clear()
        self.lost.clear()
        self.until.clear()
        self.promised.clear()

    def forget(self, lease_id: str, ended: type[UnknownLease] | None = None) -> None:
        """The lease is gone. ended: what a verb raises from here on that is given its object; None where it may have to
        be named again, in the message that it was lost with.
        """
        lease = self.leases.pop(lease_id, None) or self.lost.pop(lease_id, None)
        if lease is not None:
            lease._ended = ended
            if ended is None:
                self.lost[lease_id] = lease
        self.until.pop(lease_id, None)
        self.promised.discard(lease_id)

    def make(self, opened: Opened, block_size: int) -> Lease:
        """Return a new lease as the server described it; it is not among ours yet."""
        num_cached_blocks = opened.num_cached_tokens // block_size
        cached = opened.block_ids[:num_cached_blocks].tobytes()
        lease = Lease(opened.lease_id, opened.namespace, block_size, opened.num_cached_tokens, [cached], self.engine_id)
        lease._grow(opened.block_ids[num_cached_blocks:])
        lease.partial_block_id, lease.num_partial_tokens = opened.partial_block_id, opened.num_partial_tokens
        return lease

    def renewed(self, lease_id: str, operation: Operation, sent_at: float, ttl_s: float) -> None:
        """A call named the lease."""
        if lease_id not in self.leases:
            return
        own = operation.ttl_s if isinstance(operation, Renew) else getattr(operation, "pin_s", None)
        if own is not None:
            self.promised.add(lease_id)
            ttl_s = own
        self.until[lease_id] = max(self.until.get(lease_id, 0.0), sent_at + ttl_s)


def change(operation: Operation, value: Any, lease: Lease) -> None:
    """Do to a lease's table what the server did. Raises `InvalidBlocks` where someone else has changed it since."""
    if type(operation) in _CHANGES:
        _CHANGES[type(operation)](operation, value, lease)


def _allocated(operation: Allocate, added: Any, lease: Lease) -> None:
    lease._grow(added)


def _inserted(operation: Insert, result: InsertResult, lease: Lease) -> None:
    known = lease.num_published_tokens - operation.offset
    new = result.block_ids[max(known, 0) // lease.block_size :]
    if known < 0 or len(new) > len(lease._private):
        raise InvalidBlocks("published from blocks that are not in the table")
    if new:
        lease._publish(new.tobytes(), result.redundant_block_ids)


def _freed(operation: Free, _: None, lease: Lease) -> None:
    lease._return(operation.block_ids, lease._check_return(operation.block_ids))


_CHANGES: Mapping[type, Any] = {Allocate: _allocated, Insert: _inserted, Free: _freed}
