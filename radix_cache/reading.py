"""Reading a tree: what a path holds, which nodes there are, and rows of them for people. Changes nothing.

A path is told by the node where it ends, and read upwards; a tree is read downwards, parents first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from radix_cache.node import BLOCK_ID_BYTES, Node, Root
from radix_cache.stats import TreeNode
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["agrees", "last_id", "nodes_below", "num_unlocked_bytes", "path_slice", "tree_rows"]


def agrees(node: Node, start: int, tokens: bytes) -> bool:
    """Tell whether the path through ``node`` has ``tokens`` at byte ``start``, as far as both of them go.

    ``start`` is a whole block. A memcmp for each node that is read.
    """
    above: Node | None = node
    length = len(tokens)
    while above is not None and (end := above.end - start) > 0:
        span = above.tokens
        begin = end - len(span)  # from here on counted in ``tokens``
        if begin < length:
            if begin < 0 or end > length:
                span = span[max(-begin, 0) : length - begin]
                begin = max(begin, 0)
            if not tokens.startswith(span, begin):
                return False
        above = above.parent
    return True


def path_slice(node: Node, start: int, stop: int) -> tuple[bytes, bytes]:
    """Return tokens and block ids of bytes [start, stop) of the path through ``node``.

    ``start`` and ``stop`` are whole blocks. O(depth of the part that is read).
    """
    tokens: list[bytes] = []
    block_ids: list[bytes] = []
    above: Node | None = node
    while above is not None and above.end > start:
        begin = above.end - len(above.tokens)
        low, high = max(start - begin, 0), min(stop - begin, len(above.tokens))
        if low < high:
            per_block = len(above.tokens) // above.num_blocks
            tokens.append(above.tokens[low:high])
            block_ids.append(above.block_ids[low // per_block * BLOCK_ID_BYTES : high // per_block * BLOCK_ID_BYTES])
        above = above.parent
    return b"".join(reversed(tokens)), b"".join(reversed(block_ids))


def num_unlocked_bytes(node: Node) -> int:
    """Return how many bytes of the path through ``node`` a lock on it would protect that nothing protects. O(depth)."""
    above = node
    while not above.num_locks and above.parent is not None:
        above = above.parent
    return node.end - above.end


def last_id(node: Node | None) -> int | None:
    """Return the id of the block that a node ends with; None for a root."""
    return memoryview(node.block_ids).cast("i")[-1] if node is not None and node.block_ids else None


def nodes_below(tops: Iterable[Node]) -> Iterator[Node]:
    """Yield ``tops`` and all below, parents first, children in the order in which they were added."""
    stack = list(tops)[::-1]
    while stack:
        node = stack.pop()
        yield node
        if node.children is not None:
            stack.extend(reversed(list(node.children.values())))


def tree_rows(roots: Iterable[Root], now: int, max_nodes: int, max_span_tokens: int) -> Iterator[TreeNode]:
    """Yield up to ``max_nodes`` rows of the trees under ``roots``, parents first. ``now``: the tree's logical time."""
    for root in roots:
        stack: list[tuple[Node, int]] = [(root, 0)]
        while stack and max_nodes:
            max_nodes -= 1
            node, depth = stack.pop()
            yield _row(node, root.namespace, depth, now, max_span_tokens * TOKEN_BYTES)
            children = [] if node.children is None else list(node.children.values())
            stack.extend((child, depth + 1) for child in reversed(children[:max_nodes]))


def _row(node: Node, namespace: tuple[str, ...], depth: int, now: int, max_bytes: int) -> TreeNode:
    num_bytes = len(node.tokens)
    shown = min(num_bytes, max_bytes)
    num_shown_blocks = -(-shown * node.num_blocks // num_bytes) if num_bytes else 0
    return TreeNode(
        namespace=namespace,
        depth=depth,
        num_tokens=num_bytes // TOKEN_BYTES,
        num_blocks=node.num_blocks,
        num_locks=node.num_locks,
        num_children=0 if node.children is None else len(node.children),
        age=now - node.last_access,
        tokens=node.tokens[:shown],
        block_ids=node.block_ids[: num_shown_blocks * BLOCK_ID_BYTES],
    )
