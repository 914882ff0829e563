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
from radix_cache.reading import agrees, path_slice
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
    num_blocks = len(tokens) // cache.index.block_bytes
    known = _known(lease, tokens, offset, num_blocks) if offset < published else b""
    num_new = num_blocks - len(known) // BLOCK_ID_BYTES
    if num_new > len(lease._private):
        raise InvalidBlocks(f"the tokens need {num_new} more blocks, the table has {len(lease._private)} private ones")
    if hints is not NO_HINTS:
        lease._hints = hints
    if num_new:
        num_cached_tokens, canonical, redundant = _publish(cache, lease, tokens, num_blocks, num_new)
    else:
        num_cached_tokens, canonical, redundant = offset + num_blocks * cache.block_size, b"", array("i")
        _touch_to(cache, lease, num_cached_tokens)
    if tokens and lease._num_queried_tokens is not None:
        _count_request(cache, lease)
    block_ids = array("i", known)
    block_ids.frombytes(canonical)
    result: InsertResult = _new(InsertResult, (num_cached_tokens, block_ids, redundant))
    return result


def _known(lease: Lease, tokens: bytes, offset: int, num_blocks: int) -> bytes:
    """Return the ids of those of the ``num_blocks`` blocks that the lease has published already.

    Raises `InvalidTokens` where the tokens contradict what is published at ``offset``.
    """
    node, start = lease._node, offset * TOKEN_BYTES
    assert node is not None
    if not agrees(node, start, tokens):
        published, _ = path_slice(node, start, node.end)
        pairs = zip(published, tokens, strict=False)
        wrong = next(at for at, (one, other) in enumerate(pairs) if one != other) // TOKEN_BYTES
        raise InvalidTokens(
            f"the tokens contradict what lease {lease.lease_id!r} has published at position {offset + wrong}", wrong
        )
    first = offset // lease.block_size
    return lease._published_ids()[first * BLOCK_ID_BYTES : (first + num_blocks) * BLOCK_ID_BYTES]


def _publish(
    cache: Executor, lease: Lease, tokens: bytes, num_blocks: int, num_new: int
) -> tuple[int, bytes, array[int]]:
    """Take the last ``num_new`` of the ``num_blocks`` blocks of ``tokens`` into the tree, behind what is published.

    Returns how many tokens from position 0 were cached before, the canonical ids, and the redundant ones.
    """
    index, held = cache.index, lease._node
    stop = num_blocks * index.block_bytes
    start = stop - num_new * index.block_bytes
    parts: list[bytes] = []
    node, at, child, covered = index.walk(held or lease._root, tokens, start, stop, parts)
    if child is not None:
        node = index.cut(child, covered)
        at += covered
    canonical = b"".join(parts) if parts else b""
    num_redundant = len(canonical) // BLOCK_ID_BYTES
    redundant = lease._private[:num_redundant]
    if at < stop:
        adopted = lease._private[num_redundant:num_new].tobytes()
        node = index.graft(node, held, tokens[at:stop], adopted)
        canonical += adopted
        cache.allocator.lease(lease._root, num_redundant - num_new)
        cache.counters.num_inserted_blocks += num_new - num_redundant
    counted = None if lease._num_queried_tokens is not None else held
    matched = lease.num_published_tokens + num_redundant * cache.block_size
    if node is held:
        index.touch(node, True, counted, lease._hints)
    else:
        index.hold(node, True, counted, lease._hints, held)
        lease._node = node
    if lease._partial is not None:
        cache.let_go_of_partial(lease)
    lease._publish(canonical, redundant)
    cache.counters.num_redundant_blocks += num_redundant
    return matched, canonical, redundant


def _touch_to(cache: Executor, lease: Lease, num_tokens: int) -> None:
    """Touch the first ``num_tokens`` of what the lease has published."""
    if num_tokens and lease._node is not None:
        node = cache.index.node_above(lease._node, num_tokens * TOKEN_BYTES)
        cache.index.touch(node, True, None if lease._num_queried_tokens is not None else node, lease._hints)


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
