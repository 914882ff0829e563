"""The verbs of `radix_cache.PrefixCache` for those who reach it over a wire: signatures, and nothing else.

Each checks and packs its arguments as the cache itself would, and hands one operation to ``_do``. What they mean, cost
and raise is said there; over a wire each can raise `ServiceUnavailable` and `DeadlineExceeded` as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from typing import Any

from radix_cache import operations
from radix_cache.hints import Hints
from radix_cache.leases import Lease
from radix_cache.operations import InsertResult, Operation
from radix_cache.tokens import BlockIds, TokenIds

__all__ = ["AsyncVerbs", "Verbs"]


class Verbs(ABC):
    """Verbs that return when the answer is there."""

    @abstractmethod
    def _do(self, operation: Operation, lease: object = None, wait_s: float | None = None) -> Any:
        """Return what the operation came to. lease: what the caller named the lease by. wait_s: for blocks."""

    def match_prefix(
        self,
        tokens: TokenIds,
        namespace: Iterable[str] = (),
        max_tokens: int | None = None,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        parent: Lease | str | None = None,
        lease_id: str | None = None,
        wait_s: float | None = None,
        hints: Hints | None = None,
        partial: bool = False,
    ) -> Lease:
        """Find the longest cached prefix, lock it and allocate: `radix_cache.PrefixCache.match_prefix`.

        wait_s: where blocks are missing, wait for them for about so long, instead of raising `PoolExhausted` at once.
        If the answer is lost, the lease is given back along with later calls, unless the caller asks again under the
        same ``lease_id``.
        """
        operation = operations.match_prefix(
            tokens, namespace, max_tokens, num_tokens, num_blocks, parent, lease_id, hints, partial
        )
        lease: Lease = self._do(operation, parent, wait_s)
        return lease

    def allocate(
        self,
        lease: Lease | str,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        wait_s: float | None = None,
    ) -> array[int]:
        """Grow the block table; return the ids added, int32: `radix_cache.PrefixCache.allocate`.

        wait_s: as in `match_prefix`; waiting allocations go before waiting matches.
        """
        added: array[int] = self._do(operations.allocate(lease, num_tokens, num_blocks), lease, wait_s)
        return added

    def insert(self, lease: Lease | str, tokens: TokenIds, offset: int = 0, hints: Hints | None = None) -> InsertResult:
        """Publish whole blocks whose KV is complete: `radix_cache.PrefixCache.insert`."""
        result: InsertResult = self._do(operations.insert(lease, tokens, offset, hints), lease)
        return result

    def free(self, lease: Lease | str, block_ids: BlockIds) -> None:
        """Give back redundant blocks or the tail of the table: `radix_cache.PrefixCache.free`."""
        self._do(operations.free(lease, block_ids), lease)

    def release(self, lease: Lease | str) -> None:
        """End the lease: `radix_cache.PrefixCache.release`. A lost one is repeated later."""
        self._do(operations.release(lease), lease)

    def renew(self, lease: Lease | str, ttl_s: float | None = None) -> None:
        """Let the lease live on: `radix_cache.PrefixCache.renew`. With ``ttl_s``, a closing client leaves it be."""
        self._do(operations.renew(lease, ttl_s), lease)

    def probe(self, tokens: TokenIds, namespace: Iterable[str] = ()) -> int:
        """Count the cached tokens; changes nothing: `radix_cache.PrefixCache.probe`."""
        num_tokens: int = self._do(operations.probe(tokens, namespace))
        return num_tokens

    def evict(self, num_blocks: int) -> int:
        """Return up to so many evictable blocks to the pool; return how many: `radix_cache.PrefixCache.evict`."""
        num_evicted: int = self._do(operations.evict(num_blocks))
        return num_evicted

    def reset(self, namespace: Iterable[str] | None = None, tokens: TokenIds | None = None) -> None:
        """Forget what is cached under a namespace: `radix_cache.PrefixCache.reset`."""
        self._do(operations.reset(namespace, tokens))

    def pin(self, tokens: TokenIds, ttl_s: float, namespace: Iterable[str] = (), lease_id: str | None = None) -> Lease:
        """Keep the cached part of a prefix resident: `radix_cache.PrefixCache.pin`. A closing client leaves it be."""
        lease: Lease = self._do(operations.pin(tokens, ttl_s, namespace, lease_id))
        return lease

    def unpin(self, pin: Lease | str) -> None:
        """End a pin: `radix_cache.PrefixCache.unpin`."""
        self._do(operations.unpin(pin), pin)


class AsyncVerbs(ABC):
    """The same, to be awaited."""

    @abstractmethod
    async def _do(self, operation: Operation, lease: object = None, wait_s: float | None = None) -> Any:
        """Return what the operation came to. lease: what the caller named the lease by. wait_s: for blocks."""

    async def match_prefix(
        self,
        tokens: TokenIds,
        namespace: Iterable[str] = (),
        max_tokens: int | None = None,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        parent: Lease | str | None = None,
        lease_id: str | None = None,
        wait_s: float | None = None,
        hints: Hints | None = None,
        partial: bool = False,
    ) -> Lease:
        """Find the longest cached prefix, lock it and allocate: `Verbs.match_prefix`."""
        operation = operations.match_prefix(
            tokens, namespace, max_tokens, num_tokens, num_blocks, parent, lease_id, hints, partial
        )
        lease: Lease = await self._do(operation, parent, wait_s)
        return lease

    async def allocate(
        self,
        lease: Lease | str,
        num_tokens: int | None = None,
        num_blocks: int | None = None,
        wait_s: float | None = None,
    ) -> array[int]:
        """Grow the block table: `Verbs.allocate`."""
        added: array[int] = await self._do(operations.allocate(lease, num_tokens, num_blocks), lease, wait_s)
        return added

    async def insert(
        self, lease: Lease | str, tokens: TokenIds, offset: int = 0, hints: Hints | None = None
    ) -> InsertResult:
        """Publish whole blocks whose KV is complete: `Verbs.insert`."""
        result: InsertResult = await self._do(operations.insert(lease, tokens, offset, hints), lease)
        return result

    async def free(self, lease: Lease | str, block_ids: BlockIds) -> None:
        """Give back redundant blocks or the tail of the table: `Verbs.free`."""
        await self._do(operations.free(lease, block_ids), lease)

    async def release(self, lease: Lease | str) -> None:
        """End the lease: `Verbs.release`."""
        await self._do(operations.release(lease), lease)

    async def renew(self, lease: Lease | str, ttl_s: float | None = None) -> None:
        """Let the lease live on: `Verbs.renew`."""
        await self._do(operations.renew(lease, ttl_s), lease)

    async def probe(self, tokens: TokenIds, namespace: Iterable[str] = ()) -> int:
        """Count the cached tokens: `Verbs.probe`."""
        num_tokens: int = await self._do(operations.probe(tokens, namespace))
        return num_tokens

    async def evict(self, num_blocks: int) -> int:
        """Return up to so many evictable blocks to the pool: `Verbs.evict`."""
        num_evicted: int = await self._do(operations.evict(num_blocks))
        return num_evicted

    async def reset(self, namespace: Iterable[str] | None = None, tokens: TokenIds | None = None) -> None:
        """Forget what is cached under a namespace: `Verbs.reset`."""
        await self._do(operations.reset(namespace, tokens))

    async def pin(
        self, tokens: TokenIds, ttl_s: float, namespace: Iterable[str] = (), lease_id: str | None = None
    ) -> Lease:
        """Keep the cached part of a prefix resident: `Verbs.pin`."""
        lease: Lease = await self._do(operations.pin(tokens, ttl_s, namespace, lease_id))
        return lease

    async def unpin(self, pin: Lease | str) -> None:
        """End a pin: `Verbs.unpin`."""
        await self._do(operations.unpin(pin), pin)
