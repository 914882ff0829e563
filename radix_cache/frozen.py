"""All that a cache is, as flat rows that a file can hold; and a cache made of them that goes on as the first would.

"As the first would" is meant to the last block id: the same calls then give the same answers, in the same order of
eviction. So what looks like an accident of history is kept too: the order of the free list, of children and of
namespaces, what the eviction policy knows, in which order deadlines that fall together come up. What follows from other
rows is not: locks, sums, and the books of namespaces are counted again, and `PrefixCache.check_integrity` compares.

Rows are made of numbers, strings, bytes, None, and tuples or lists of these.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple, TypeAlias

from radix_cache.cache import PrefixCache
from radix_cache.hints import NO_HINTS, Hints
from radix_cache.leases import Lease, LeaseTable, _Engine
from radix_cache.node import Node, Root, WideChildren
from radix_cache.operations import Namespace

__all__ = ["Frozen", "freeze", "thaw"]

Seq: TypeAlias = "list[Any] | tuple[Any, ...]"

_ROOT_COUNTS = ("num_requests", "num_queried_tokens", "num_hit_tokens", "num_evicted_blocks")


class FrozenNode(NamedTuple):
    """above: position of the parent; None in a root, which has a namespace and counts instead. is_dead: a reset has
    taken it out of sight, and it is still locked. ranking: its place in the eviction order.
    """

    above: int | None
    namespace: Seq | None
    counts: Seq | None
    tokens: bytes
    block_ids: bytes
    is_dead: bool
    is_wide: bool
    last_access: int
    created: int
    data: Any
    ranking: Any


class FrozenLease(NamedTuple):
    """node: position of where it ends, None where it has published nothing. The three kinds of blocks are packed."""

    lease_id: str
    namespace: Seq
    engine_id: str | None
    is_pin: bool
    is_stale: bool
    num_cached_tokens: int
    num_published_tokens: int
    num_queried_tokens: int
    node: int | None
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
        position: dict[Node, int] = {}
        pool = executor.pool
        return Frozen(
            totals=_totals(cache),
            policy=executor.index.policy.saved(),
            nodes=[_frozen_node(node, position, cache) for node in _all_nodes(cache)],
            leases=[_frozen_lease(lease, position) for lease in executor.leases],
            free=b"".join(pool._pieces)[pool._num_taken_bytes :],
            engines=[(name, each.deadline, each.is_scheduled) for name, each in executor.leases._engines.items()],
            deadlines=list(_deadlines(executor.leases)),
            gone=list(executor.leases._gone.items()),
            answers=[(engine_id, seq, list(answers)) for engine_id, (seq, answers) in cache._answers.items()],
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
    yield from index.nodes(index.roots.values())
    seen: set[Node] = set()
    for lease in cache._executor.leases:
        path: list[Node] = []
        node = lease._node
        while node is not None and node.is_dead and node not in seen:
            path.append(node)
            node = node.parent
        seen.update(path)
        yield from reversed(path)


def _frozen_node(node: Node, position: dict[Node, int], cache: PrefixCache) -> FrozenNode:
    position[node] = len(position)
    is_leaf = node.parent is not None and node.children is None and not node.is_dead
    root = node if isinstance(node, Root) else None
    return FrozenNode(
        above=None if node.parent is None else position[node.parent],
        namespace=None if root is None else root.namespace,
        counts=None if root is None else [getattr(root, name) for name in _ROOT_COUNTS],
        tokens=node.tokens,
        block_ids=node.block_ids,
        is_dead=node.is_dead,
        is_wide=isinstance(node.children, WideChildren),
        last_access=node.last_access,
        created=node.created,
        data=node.data,
        ranking=cache._executor.index.policy.ranking(node) if is_leaf else None,
    )


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


# Back.


def thaw(cache: PrefixCache, frozen: Frozen) -> None:
    """Make ``cache``, which is new and has the settings of the frozen one, into that one. O(everything).

    Raises whatever comes of rows that are not such a cache's; that ``cache`` is then good for nothing.
    """
    executor = cache._executor
    executor.index.policy.restore(frozen.policy)
    nodes = _thaw_nodes(cache, frozen.nodes)
    for row in frozen.leases:
        _thaw_lease(cache, row, nodes)
    _count_locks(cache, nodes)
    _rank(cache, frozen.nodes, nodes)
    _thaw_deadlines(executor.leases, frozen)
    _thaw_totals(cache, frozen)
    cache._answers = OrderedDict((engine_id, (seq, list(answers))) for engine_id, seq, answers in frozen.answers)


def _thaw_nodes(cache: PrefixCache, rows: list[FrozenNode]) -> list[Node]:
    index = cache._executor.index
    nodes: list[Node] = []
    for row in rows:
        if row.above is None:
            root = index.open_root(_tupled(row.namespace))
            for name, count in zip(_ROOT_COUNTS, row.counts or (), strict=True):
                setattr(root, name, count)
            node: Node = root
        else:
            node = Node(nodes[row.above], row.tokens, row.block_ids)
            node.is_dead = bool(row.is_dead)
            if row.is_dead:
                index._dead.add(node)
                index.num_nodes += 1
            else:
                index._adopt(nodes[row.above], node)
            index._cache(node.root, node.num_blocks)  # type: ignore[arg-type]
        if row.is_wide:
            node.children = WideChildren({})
        node.last_access, node.created, node.data = row.last_access, row.created, _tupled(row.data)
        nodes.append(node)
    return nodes


def _thaw_lease(cache: PrefixCache, row: FrozenLease, nodes: list[Node]) -> None:
    executor = cache._executor
    lease = Lease(
        row.lease_id,
        _tupled(row.namespace),
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
    lease._root = executor.index.roots[lease.namespace]
    lease._root.num_leases += 1
    executor.allocator.lease(lease._root, len(lease._owned()))
    executor.leases.by_id[lease.lease_id] = lease
    if lease.engine_id is not None:
        lease._engine = executor.leases._engines.setdefault(lease.engine_id, _Engine())
        lease._engine.leases[lease.lease_id] = lease
    if lease.is_pin:
        executor.num_pins += 1
        executor.num_pinned_blocks += lease.num_published_tokens // cache.block_size


def _count_locks(cache: PrefixCache, nodes: list[Node]) -> None:
    index = cache._executor.index
    ends = Counter(lease._node for lease in cache._executor.leases if lease._node is not None)
    for node in reversed(nodes):  # children first
        node.num_locks += ends[node]
        if node.num_locks and node.parent is not None:
            node.parent.num_locks += 1
            index._protect(node, node.num_blocks)


def _rank(cache: PrefixCache, rows: list[FrozenNode], nodes: list[Node]) -> None:
    """Give every leaf its place in the order of eviction."""
    policy = cache._executor.index.policy
    for row, node in zip(rows, nodes, strict=True):
        if row.ranking is not None:
            policy.rank_again(node, _tupled(row.ranking))
        elif node.parent is not None and node.children is None and not node.is_dead and not node.num_locks:
            policy.add(node)


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
    leases._gone = OrderedDict((lease_id, _tupled(namespace)) for lease_id, namespace in frozen.gone)


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


def _tupled(value: Any) -> Any:
    """Return ``value`` with tuples for the lists that a file made of them."""
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value
