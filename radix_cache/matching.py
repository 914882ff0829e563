"""The match: find the longest cached prefix, lock it, allocate private blocks behind it. Also forks, and pins.

Everything that can be refused is found out before the first change; see `radix_cache.executor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from radix_cache.errors import InvalidArgument, PoolExhausted, StaleLease
from radix_cache.hints import NO_HINTS
from radix_cache.leases import Lease
from radix_cache.nearest import num_near_tokens
from radix_cache.node import Node, Root
from radix_cache.operations import MatchPrefix
from radix_cache.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radix_cache.executor import Executor

__all__ = ["match_prefix", "num_pinned"]

Near: TypeAlias = tuple[Node | None, int, int, int]
"""The node that a partial block is in, at which byte, and for how many tokens it agrees; tokens that were missed."""

_NONE: Near = (None, 0, 0, 0)


def match_prefix(  # noqa: C901 - one look at each option, in the order in which they matter
    cache: Executor, operation: MatchPrefix, engine_id: str | None
) -> Lease:
    """Run a `MatchPrefix`; return the lease that it opens. O(tokens)."""
    tokens, lease_id, namespace, max_tokens, num_tokens, num_blocks, parent_id, hints, pin_s, _ = operation
    if lease_id in cache.leases.by_id:
        raise InvalidArgument(f"lease_id {lease_id!r} is in use")
    index, block_size = cache.index, cache.block_size
    published, held, parts = 0, None, []
    if parent_id is not None:
        parent = _forked(cache, operation, parent_id, engine_id)
        namespace, published, held, parts = (
            parent.namespace,
            parent.num_published_tokens,
            parent._node,
            parent._parts[:],
        )
    root = index.roots.get(namespace)
    limit = len(tokens) if max_tokens is None else min(len(tokens), (max_tokens - published) * TOKEN_BYTES)
    node, at, child, covered = held or root, 0, None, 0
    near = _NONE
    if node is not None:
        node, at, child, covered = index.walk(node, tokens, 0, limit - limit % index.block_bytes, parts)
        if block_size > 1 and at + covered < limit:
            near = _look_behind(cache, operation, node, child, at, covered, limit)
    num_cached_tokens = published + (at + covered) // TOKEN_BYTES
    num_private = 0
    if num_tokens is not None or num_blocks is not None or pin_s is not None:
        num_private = cache.num_missing(num_cached_tokens // block_size, num_tokens, num_blocks)
        matched = node if num_cached_tokens else None
        near = _check(cache, operation, num_cached_tokens, num_private, root, matched, child, covered, near)

    lease = Lease(lease_id, namespace, block_size, num_cached_tokens, parts, engine_id)
    lease._root = root = root or index.open_root(namespace)
    root.num_leases += 1
    if num_cached_tokens and node is not None:
        lease._node = node = index.cut(child, covered) if child is not None else node
        index.hold(node, hints=hints)
    if near[3] or near[0] is not None:
        _hold_partial(cache, lease, near, covered)
    if num_private:
        lease._private = cache.allocator.take(num_private, root)
    if hints is not NO_HINTS:
        lease._hints = hints
    if pin_s is not None:
        _pin(cache, lease, pin_s)
        return lease
    cache.leases.add(lease, cache.now)
    lease._num_queried_tokens = num_queried = published + len(tokens) // TOKEN_BYTES
    counters = cache.counters
    counters.num_lookups += 1
    counters.num_lookup_tokens += num_queried
    counters.num_lookup_hit_tokens += num_cached_tokens
    return lease


def _look_behind(
    cache: Executor, operation: MatchPrefix, node: Node, child: Node | None, at: int, covered: int, limit: int
) -> Near:
    """Find what block rounding costs behind a match, and the partial block if one is asked for. Changes nothing."""
    block_bytes, start = cache.index.block_bytes, at + covered
    piece = operation.tokens[start : min(start + block_bytes, limit)]
    num_missed = num_near_tokens(child or node, covered, piece, block_bytes)
    if not operation.partial:
        return None, 0, 0, num_missed
    return (*cache.index.nearest.find_behind(node, child, covered, piece, block_bytes), num_missed)


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
    near: Near,
) -> Near:
    """Raise `PoolExhausted` unless there is room for private blocks, or for a pin.

    Returns ``near``, or none where its block is needed: reuse must not be what a request fails for.
    """
    if num_private:
        share = cache.index.share_of(operation.namespace) if root is None else root.share
        has_own = near[0] is not None and not near[0].num_locks
        if has_own and not cache.allocator.has_room(
            num_private, share, node, near[0], near[1] + cache.index.block_bytes
        ):
            near = (None, 0, 0, near[3])
        cache.allocator.check_match(num_private, share, node, child, covered)
    if operation.pin_s is not None:
        if operation.num_tokens or operation.num_blocks:
            raise InvalidArgument("a pin has no blocks of its own: num_tokens and num_blocks do not go with pin_s")
        num_blocks, left = num_pinned(cache, num_cached_tokens), cache.max_pinned_blocks - cache.num_pinned_blocks
        if num_blocks > left:
            raise PoolExhausted(num_blocks, left, f"pins keep at most {cache.max_pinned_blocks} blocks (pin_share)")
    return near


def _hold_partial(cache: Executor, lease: Lease, near: Near, num_cut: int) -> None:
    """Lock the partial block, without touching it, if there is one; its node has lost its first ``num_cut`` bytes."""
    node, start, num_tokens, num_missed = near
    cache.counters.num_near_miss_tokens += num_missed
    lease._root.num_near_miss_tokens += num_missed
    if node is None:
        return
    lease._partial = node = cache.index.cut(node, start - num_cut + cache.index.block_bytes)
    cache.index.lock(node)
    lease.partial_block_id = memoryview(node.block_ids).cast("i")[-1]
    lease.num_partial_tokens = num_tokens
    cache.counters.num_partial_tokens += num_tokens


def num_pinned(cache: Executor, num_tokens: int) -> int:
    """Return what a pin of so many tokens counts for: one block at least, so that pins of nothing come to an end."""
    return max(num_tokens // cache.block_size, 1)


def _pin(cache: Executor, lease: Lease, pin_s: float) -> None:
    """Make a pin of a new lease."""
    lease.is_pin, lease.engine_id = True, None
    cache.num_pins += 1
    cache.num_pinned_blocks += num_pinned(cache, lease.num_published_tokens)
    cache.leases.add_pin(lease, cache.read_clock(), pin_s)
