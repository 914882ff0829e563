"""A cache made of the rows of another, which goes on as that one would: see `radix_cache.frozen`."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict
from dataclasses import fields

from radix_cache.cache import PrefixCache
from radix_cache.frozen import Frozen, FrozenLease
from radix_cache.frozen_nodes import rank_nodes, thaw_nodes, tupled
from radix_cache.hints import NO_HINTS, Hints
from radix_cache.leases import Lease, LeaseTable, _Engine
from radix_cache.matching import num_pinned
from radix_cache.node import Node

__all__ = ["thaw"]


def thaw(cache: PrefixCache, frozen: Frozen) -> None:
    """Make ``cache``, which is new and has the settings of the frozen one, into that one. O(everything).

    Raises whatever comes of rows that are not such a cache's; that ``cache`` is then good for nothing.
    """
    executor = cache._executor
    executor.index.policy.restore(frozen.policy)
    nodes = thaw_nodes(executor.index, frozen.nodes)
    for row in frozen.leases:
        _thaw_lease(cache, row, nodes)
    _count_locks(cache, nodes)
    rank_nodes(executor.index, frozen.nodes, nodes)
    _thaw_deadlines(executor.leases, frozen)
    _thaw_totals(cache, frozen)
    for engine_id, seq, answers in frozen.answers:
        cache._answers.put(engine_id, seq, list(answers))


def _thaw_lease(cache: PrefixCache, row: FrozenLease, nodes: list[Node]) -> None:
    executor = cache._executor
    lease = Lease(
        row.lease_id,
        tupled(row.namespace),
        cache.block_size,
        row.num_cached_tokens,
        [row.published],
        row.engine_id,
    )
    lease.num_published_tokens = row.num_published_tokens
    lease.is_pin, lease._is_stale = bool(row.is_pin), bool(row.is_stale)
    lease._private = array("i", row.private)
    lease._redundant = frozenset(array("i", row.redundant))
    lease._num_queried_tokens = row.num_queried_tokens
    lease._deadline, lease._opened_at = row.deadline, row.opened_at
    lease._hints = NO_HINTS if row.hints is None else Hints(*row.hints)
    lease._node = None if row.node is None else nodes[row.node]
    if row.partial is not None:
        lease._partial, lease.num_partial_tokens = nodes[row.partial], row.num_partial_tokens
        lease.partial_block_id = memoryview(lease._partial.block_ids).cast("i")[-1]
    lease._root = executor.index.roots[lease.namespace]
    lease._root.num_leases += 1
    executor.allocator.lease(lease._root, len(lease._owned()))
    executor.leases.by_id[lease.lease_id] = lease
    if lease.engine_id is not None:
        lease._engine = executor.leases._engines.setdefault(lease.engine_id, _Engine())
        lease._engine.leases[lease.lease_id] = lease
    if lease.is_pin:
        executor.num_pins += 1
        executor.num_pinned_blocks += num_pinned(executor, lease.num_published_tokens)


def _count_locks(cache: PrefixCache, nodes: list[Node]) -> None:
    index = cache._executor.index
    leases = cache._executor.leases
    ends = Counter(node for lease in leases for node in (lease._node, lease._partial) if node is not None)
    for node in reversed(nodes):  # children first
        node.num_locks += ends[node]
        if node.num_locks and node.parent is not None:
            node.parent.num_locks += 1
            index._protect(node, node.num_blocks)


def _thaw_deadlines(leases: LeaseTable, frozen: Frozen) -> None:
    for name, deadline, is_scheduled in frozen.engines:
        engine = leases._engines[name]
        engine.deadline, engine.is_scheduled = deadline, bool(is_scheduled)
    leases._engines = {name: leases._engines[name] for name, *_ in frozen.engines}
    leases._deadlines = [
        (time, number, leases._engines[name] if is_engine else leases.by_id[name])
        for time, number, is_engine, name in frozen.deadlines
    ]
    heapq.heapify(leases._deadlines)
    for _, _, holder in leases._deadlines:
        if isinstance(holder, Lease):
            holder._is_scheduled = True
    leases._gone = OrderedDict((lease_id, tupled(namespace)) for lease_id, namespace in frozen.gone)


def _thaw_totals(cache: PrefixCache, frozen: Frozen) -> None:
    executor, totals = cache._executor, frozen.totals
    index, pool, leases = executor.index, executor.pool, executor.leases
    for item in fields(executor.counters):
        setattr(executor.counters, item.name, totals.get(item.name, 0))
    for name in ("num_evicted_blocks", "evicted_age", "evicted_idle"):
        setattr(index, name, totals[name])
    executor.allocator.num_allocated_blocks = int(totals["num_allocated_blocks"])
    index.now = int(totals["logical_time"])
    executor.now = totals["now"]
    leases._num_scheduled = int(totals["num_scheduled"])
    leases.is_timed = bool(totals["is_timed"])
    pool._num_touched = int(totals["num_touched"])
    pool._pieces.clear()
    if frozen.free:
        pool._pieces.append(frozen.free)
    pool.num_free_blocks = len(frozen.free) // 4 + pool.num_blocks - pool._num_touched
