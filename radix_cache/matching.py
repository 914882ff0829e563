"""The match: find the longest cached prefix, lock it, allocate private blocks behind it. Also forks, and pins.

Everything that can be refused is found out before the first change; see `radix_cache.executor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix_cache.errors import InvalidArgument, PoolExhausted, StaleLease
from radix_cache.hints import NO_HINTS
from radix_cache.leases import Lease
from radix_cache.node import Node, Root
from radix_cache.operations import MatchPrefix
from radix_cache.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radix_cache.executor import Executor

__all__ = ["match_prefix"]


def match_prefix(cache: Executor, operation: MatchPrefix, engine_id: str | None) -> Lease:
    """Run a `MatchPrefix`; return the lease that it opens. O(tokens)."""
    tokens, lease_id, namespace, max_tokens, num_tokens, num_blocks, parent_id, hints, pin_s = operation
    if lease_id in cache.leases.by_id:
        raise InvalidArgument(f"lease_id {lease_id!r} is in use")
    index, block_size = cache.index, cache.block_size
    published, held, parts = 0, None, []
    if parent_id is not None:
        parent = _forked(cache, operation, parent_id, engine_id)
        namespace, held = parent.namespace, parent._node
        published, parts = parent.num_published_tokens, parent._parts[:]
    root = index.roots.get(namespace)
    limit = len(tokens) if max_tokens is None else min(len(tokens), (max_tokens - published) * TOKEN_BYTES)
    node, at, child, covered = held or root, 0, None, 0
    if node is not None:
        node, at, child, covered = index.walk(node, tokens, 0, limit - limit % index.block_bytes, parts)
    num_cached_tokens = published + (at + covered) // TOKEN_BYTES
    num_private = 0
    if num_tokens is not None or num_blocks is not None or pin_s is not None:
        num_private = cache.num_missing(num_cached_tokens // block_size, num_tokens, num_blocks)
        matched = node if num_cached_tokens else None
        _check(cache, operation, num_cached_tokens, num_private, root, matched, child, covered)
    if block_size > 1 and node is not None and at + covered < limit:
        num_near = index.num_near_tokens(child or node, covered, tokens, at, limit)
        cache.counters.num_near_miss_tokens += num_near

    lease = Lease(lease_id, namespace, block_size, num_cached_tokens, parts, engine_id)
    lease._root = root = root or index.open_root(namespace)
    root.num_leases += 1
    if num_cached_tokens and node is not None:
        lease._node = node = index.cut(child, covered) if child is not None else node
        index.hold(node, num_cached_tokens, hints=hints)
    if num_private:
        lease._private = cache.allocator.take(num_private, root)
    if hints is not NO_HINTS:
        lease._hints = hints
    if pin_s is None:
        cache.leases.add(lease, cache.now)
    else:
        _pin(cache, lease, pin_s)
    lease._num_queried_tokens = num_queried = published + len(tokens) // TOKEN_BYTES
    counters = cache.counters
    counters.num_lookups += 1
    counters.num_lookup_tokens += num_queried
    counters.num_lookup_hit_tokens += num_cached_tokens
    return lease


def _forked(cache: Executor, operation: MatchPrefix, parent_id: str, engine_id: str | None) -> Lease:
    """Return the parent lease of a match, if it can be one."""
    parent = cache.named(parent_id, engine_id)
    if parent._is_stale:
        raise StaleLease(parent_id)
    if operation.namespace and operation.namespace != parent.namespace:
        raise InvalidArgument("a fork stays in its parent's namespace, and was asked for another")
    max_tokens = operation.max_tokens
    if max_tokens is not None and max_tokens < parent.num_published_tokens:
        raise InvalidArgument(f"max_tokens {max_tokens} is below the parent's {parent.num_published_tokens} published")
    return parent


def _check(
    cache: Executor,
    operation: MatchPrefix,
    num_cached_tokens: int,
    num_private: int,
    root: Root | None,
    node: Node | None,
    child: Node | None,
    covered: int,
) -> None:
    """Raise `PoolExhausted` unless there is room for private blocks, or for a pin."""
    if num_private:
        share = cache.index.share_of(operation.namespace) if root is None else root.share
        cache.allocator.check_match(num_private, share, node, child, covered)
    if operation.pin_s is not None:
        if operation.num_tokens or operation.num_blocks:
            raise InvalidArgument("a pin has no blocks of its own: num_tokens and num_blocks do not go with pin_s")
        num_blocks, left = num_cached_tokens // cache.block_size, cache.max_pinned_blocks - cache.num_pinned_blocks
        if num_blocks > left:
            raise PoolExhausted(num_blocks, left)


def _pin(cache: Executor, lease: Lease, pin_s: float) -> None:
    """Make a pin of a new lease."""
    lease.is_pin, lease.engine_id = True, None
    cache.num_pins += 1
    cache.num_pinned_blocks += lease.num_published_tokens // cache.block_size
    cache.leases.add_pin(lease, cache.read_clock(), pin_s)
