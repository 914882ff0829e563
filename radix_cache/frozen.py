"""All that a cache is, as flat rows that a file can hold.

A cache made of them (`radix_cache.thawing`) goes on as this one would, to the last block id: the same calls give the
same answers, in the same order of eviction. So what looks like an accident of history is kept too: the order of the
free list, of children and of namespaces, what the eviction policy knows, in which order deadlines that fall together
come up. What follows from other rows is not: locks, sums, and the books of namespaces are counted again, and
`PrefixCache.check_integrity` compares.

Rows are made of numbers, strings, bytes, None, and tuples or lists of these.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from radix_cache.cache import PrefixCache
from radix_cache.frozen_nodes import FrozenNode, Seq, freeze_nodes
from radix_cache.hints import NO_HINTS
from radix_cache.leases import Lease, LeaseTable
from radix_cache.node import Node
from radix_cache.operations import Namespace
from radix_cache.reading import nodes_below

__all__ = ["Frozen", "FrozenLease", "FrozenNode", "freeze"]


class FrozenLease(NamedTuple):
    """node: position of where it ends, None where it has published nothing. The three kinds of blocks are packed."""

    lease_id: str
    namespace: Seq
    engine_id: str | None
    is_pin: bool
    is_stale: bool
    num_cached_tokens: int
    num_published_tokens: int
    num_queried_tokens: int | None
    node: int | None
    partial: int | None
    num_partial_tokens: int
    published: bytes
    private: bytes
    redundant: bytes
    deadline: float
    opened_at: float
    hints: Seq | None


class Frozen(NamedTuple):
    """A cache. totals: numbers by name. policy: what it knows beyond the nodes. free: ids that were handed out before
    and are free, the longest-free first. engines: id, deadline, whether it has a deadline in the heap. deadlines: time,
    number, whether it is an engine's, id. gone: ids and namespaces of expired leases. answers: engine, seq, and the
    answers as the cache was given them.
    """

    totals: dict[str, int | float]
    policy: Any
    nodes: list[FrozenNode]
    leases: list[FrozenLease]
    free: bytes
    engines: list[tuple[str, float, bool]]
    deadlines: list[tuple[float, int, bool, str]]
    gone: list[tuple[str, Namespace]]
    answers: list[tuple[str, int, list[Any]]]


def freeze(cache: PrefixCache) -> Frozen:
    """Return all that ``cache`` is. Changes nothing; what it returns changes no more. O(everything).

    Raises `ValueError` while a reset is under way, whose pieces no row could tell.
    """
    with cache._lock:
        executor = cache._executor
        if executor.index._doomed:
            raise ValueError("a cache is frozen between resets, not within one")
        nodes, position = freeze_nodes(executor.index, _all_nodes(cache))
        pool = executor.pool
        return Frozen(
            totals=_totals(cache),
            policy=executor.index.policy.saved(),
            nodes=nodes,
            leases=[_frozen_lease(lease, position) for lease in executor.leases],
            free=b"".join(pool._pieces)[pool._num_taken_bytes :],
            engines=[(name, each.deadline, each.is_scheduled) for name, each in executor.leases._engines.items()],
            deadlines=list(_deadlines(executor.leases)),
            gone=list(executor.leases._gone.items()),
            answers=[(engine_id, seq, list(answers)) for engine_id, seq, answers in cache._answers.items()],
        )


def _totals(cache: PrefixCache) -> dict[str, int | float]:
    executor = cache._executor
    return executor.totals() | {
        "logical_time": executor.index.now,
        "now": executor.now,
        "num_touched": executor.pool._num_touched,
        "num_scheduled": executor.leases._num_scheduled,
        "is_timed": executor.leases.is_timed,
    }


def _all_nodes(cache: PrefixCache) -> Iterator[Node]:
    """Yield every node, parents first: the trees, then what is dead, which some lease ends in or below."""
    index = cache._executor.index
    yield from nodes_below(index.roots.values())
    seen: set[Node] = set()
    for lease in cache._executor.leases:
        for end in (lease._node, lease._partial):
            path: list[Node] = []
            node = end
            while node is not None and node.is_dead and node not in seen:
                path.append(node)
                node = node.parent
            seen.update(path)
            yield from reversed(path)


def _frozen_lease(lease: Lease, position: dict[Node, int]) -> FrozenLease:
    return FrozenLease(
        lease_id=lease.lease_id,
        namespace=lease.namespace,
        engine_id=lease.engine_id,
        is_pin=lease.is_pin,
        is_stale=lease._is_stale,
        num_cached_tokens=lease.num_cached_tokens,
        num_published_tokens=lease.num_published_tokens,
        num_queried_tokens=lease._num_queried_tokens,
        node=None if lease._node is None else position[lease._node],
        partial=None if lease._partial is None else position[lease._partial],
        num_partial_tokens=lease.num_partial_tokens,
        published=lease._published_ids(),
        private=lease._private.tobytes(),
        redundant=array("i", sorted(lease._redundant)).tobytes(),
        deadline=lease._deadline,
        opened_at=lease._opened_at,
        hints=None if lease._hints is NO_HINTS else tuple(lease._hints),
    )


def _deadlines(leases: LeaseTable) -> Iterator[tuple[float, int, bool, str]]:
    """Yield what is in the heap, less what would be ignored when it comes up."""
    names = {engine: name for name, engine in leases._engines.items()}
    for time, number, holder in sorted(leases._deadlines, key=lambda entry: entry[:2]):
        if isinstance(holder, Lease):
            if leases.by_id.get(holder.lease_id) is holder:
                yield time, number, False, holder.lease_id
        elif holder in names:
            yield time, number, True, names[holder]
