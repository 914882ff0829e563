"""The nodes of a tree as flat rows, parents first, and a tree made of them: for copies, pickles and files.

Rows are made of numbers, strings, bytes, None, and tuples or lists of these, so depth does not matter. Locks belong to
a holder and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from radix_cache.index import PrefixIndex
from radix_cache.node import Node, Root, WideChildren

__all__ = ["FrozenNode", "Seq", "freeze_nodes", "rank_nodes", "thaw_nodes", "tupled"]

Seq: TypeAlias = "list[Any] | tuple[Any, ...]"

_ROOT_COUNTS = (
    "num_requests",
    "num_queried_tokens",
    "num_hit_tokens",
    "num_near_miss_tokens",
    "num_evicted_blocks",
    "evicted_age",
    "evicted_idle",
)


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


def freeze_nodes(index: PrefixIndex, nodes: Iterable[Node]) -> tuple[list[FrozenNode], dict[Node, int]]:
    """Return a row for each of ``nodes``, which come parents first, and the position of each. Changes nothing."""
    position: dict[Node, int] = {}
    rows: list[FrozenNode] = []
    for node in nodes:
        position[node] = len(rows)
        rows.append(_row(index, node, position))
    return rows, position


def _row(index: PrefixIndex, node: Node, position: dict[Node, int]) -> FrozenNode:
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
        ranking=index.policy.ranking(node) if is_leaf else None,
    )


def thaw_nodes(index: PrefixIndex, rows: Iterable[FrozenNode]) -> list[Node]:
    """Fill ``index``, which is empty, and return its nodes, in the order of ``rows``. `rank_nodes` orders them."""
    nodes: list[Node] = []
    for row in rows:
        if row.above is None:
            root = index.open_root(tupled(row.namespace))
            for name, count in zip(_ROOT_COUNTS, row.counts or (), strict=True):
                setattr(root, name, count)
            node: Node = root
        else:
            node = Node(nodes[row.above], row.tokens, row.block_ids)
            index.take_up(node, is_dead=bool(row.is_dead))
        if row.is_wide:
            node.children = WideChildren({})
        node.last_access, node.created, node.data = row.last_access, row.created, tupled(row.data)
        nodes.append(node)
    return nodes


def rank_nodes(index: PrefixIndex, rows: Iterable[FrozenNode], nodes: Iterable[Node]) -> None:
    """Give every leaf its place in the order of eviction; what is locked is locked by now. O(nodes log leaves)."""
    policy = index.policy
    for row, node in zip(rows, nodes, strict=True):
        is_leaf = node.parent is not None and node.children is None and not node.is_dead
        if row.ranking is not None or (is_leaf and not node.num_locks):
            policy.take_up(node, tupled(row.ranking))


def tupled(value: Any) -> Any:
    """Return ``value`` with tuples for the lists that a file made of them."""
    return tuple(map(tupled, value)) if isinstance(value, list | tuple) else value
