"""The insert: publish what a lease has computed, and find out which of its blocks became canonical.

Everything that can be refused is found out before the first change; see `radix_cache.executor`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from radix_cache.errors import InvalidArgument, InvalidBlocks, InvalidTokens, StaleLease
from radix_cache.hints import NO_HINTS
from radix_cache.leases import Lease
from radix_cache.node import BLOCK_ID_BYTES
from radix_cache.operations import Insert, InsertResult
from radix_cache.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radix_cache.executor import Executor

__all__ = ["insert"]

_new: Any = tuple.__new__  # a named tuple without its own constructor, which is a Python function


def insert(cache: Executor, operation: Insert, engine_id: str | None) -> InsertResult:
    """Run an `Insert`. O(tokens)."""
    lease_id, tokens, offset, hints = operation
    lease = cache.named(lease_id, engine_id)
    if lease._is_stale:
        raise StaleLease(lease_id)
    if lease.is_pin:
        raise InvalidArgument(f"lease {lease_id!r} is a pin, which publishes nothing")
    published = lease.num_published_tokens
    if offset % cache.block_size or offset > published:
        raise InvalidArgument(
            f"offset is a multiple of {cache.block_size} up to the {published} tokens published, not {offset}"
        )
    block_bytes = cache.index.block_bytes
    stop = len(tokens) - len(tokens) % block_bytes
    overlap, known = 0, b""
    if published > offset:
        overlap = min((published - offset) * TOKEN_BYTES, len(tokens))
        _check_overlap(cache, lease, tokens, offset, overlap)
        overlap = min(overlap, stop)
        first = offset // cache.block_size * BLOCK_ID_BYTES
        known = lease._published_ids()[first : first + overlap // block_bytes * BLOCK_ID_BYTES]
    num_new = (stop - overlap) // block_bytes
    if num_new > len(lease._private):
        raise InvalidBlocks(f"the tokens need {num_new} more blocks, the table has {len(lease._private)} private ones")
    if hints is not NO_HINTS:
        lease._hints = hints
    if num_new:
        num_cached_tokens, canonical, redundant = _publish(cache, lease, tokens, overlap, stop)
    else:
        num_cached_tokens, canonical, redundant = offset + stop // TOKEN_BYTES, b"", array("i")
        _touch_to(cache, lease, num_cached_tokens)
    if tokens and lease._num_queried_tokens is not None:
        _count_request(cache, lease)
    result: InsertResult = _new(InsertResult, (num_cached_tokens, array("i", known + canonical), redundant))
    return result


def _check_overlap(cache: Executor, lease: Lease, tokens: bytes, offset: int, overlap: int) -> None:
    """Raise `InvalidTokens` unless the first ``overlap`` bytes of ``tokens`` are what is published at
    ``offset``.
    """
    assert lease._node is not None
    start, depth = offset * TOKEN_BYTES, lease.num_published_tokens * TOKEN_BYTES
    if not cache.index.agrees(lease._node, depth, start, tokens, overlap):
        known, _ = cache.index.path_slice(lease._node, depth, start, depth)
        wrong = next(at for at in range(overlap) if known[at] != tokens[at]) // TOKEN_BYTES
        position = offset + wrong
        raise InvalidTokens(
            f"the tokens contradict what lease {lease.lease_id!r} has published at position {position}", wrong
        )


def _publish(cache: Executor, lease: Lease, tokens: bytes, start: int, stop: int) -> tuple[int, bytes, array[int]]:
    """Take bytes [start, stop) of ``tokens`` into the tree, behind what the lease has published.

    Returns how many tokens from position 0 were cached before, the canonical ids, and the redundant ones.
    """
    index, held = cache.index, lease._node
    parts: list[bytes] = []
    node, at, child, covered = index.walk(held or lease._root, tokens, start, stop, parts)
    if child is not None:
        node = index.cut(child, covered)
        at += covered
    canonical = b"".join(parts) if parts else b""
    num_redundant = len(canonical) // BLOCK_ID_BYTES
    redundant = lease._private[:num_redundant]
    if at < stop:
        num_given = (stop - start) // index.block_bytes
        adopted = lease._private[num_redundant:num_given].tobytes()
        node = index.graft(node, 1 if node is held else 0, tokens[at:stop], adopted)
        canonical += adopted
        cache.allocator.lease(lease._root, num_redundant - num_given)
        cache.counters.num_inserted_blocks += num_given - num_redundant
    counted = None if lease._num_queried_tokens is not None else held
    matched = lease.num_published_tokens + (at - start) // TOKEN_BYTES
    num_tokens = lease.num_published_tokens + (stop - start) // TOKEN_BYTES
    if node is held:
        index.touch(node, num_tokens, True, counted, lease._hints)
    else:
        index.hold(node, num_tokens, True, counted, lease._hints)
        if held is not None:
            index.unlock(held)
        lease._node = node
    if lease._partial is not None:
        cache.let_go_of_partial(lease)
    lease._publish(canonical, redundant)
    cache.counters.num_redundant_blocks += num_redundant
    return matched, canonical, redundant


def _touch_to(cache: Executor, lease: Lease, num_tokens: int) -> None:
    """Touch the first ``num_tokens`` of what the lease has published."""
    if num_tokens and lease._node is not None:
        depth = lease.num_published_tokens * TOKEN_BYTES
        node = cache.index.node_above(lease._node, depth, num_tokens * TOKEN_BYTES)
        cache.index.touch(node, num_tokens, True, None if lease._num_queried_tokens is not None else node, lease._hints)


def _count_request(cache: Executor, lease: Lease) -> None:
    """Count the reuse of a request, once, when it first inserts."""
    counters, num_queried = cache.counters, lease._num_queried_tokens or 0
    counters.num_requests += 1
    counters.num_queried_tokens += num_queried
    counters.num_hit_tokens += lease.num_cached_tokens
    root = lease._root
    root.num_requests += 1
    root.num_queried_tokens += num_queried
    root.num_hit_tokens += lease.num_cached_tokens
    lease._num_queried_tokens = None
