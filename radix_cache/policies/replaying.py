"""A recent window of requests, and a small model of the cache to play it to: what would another parameter have found?

The model is of whole nodes, leaf-only, and asks the policy itself, one with a fixed parameter. It begins empty, so that
it is given no more room than half of what the window touches, or nothing would ever be evicted. Work and memory are
bounded by the window's requests, of which the first 64 nodes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

from radix_cache.node import Node, Root
from radix_cache.policies.digests import digest_of
from radix_cache.tokens import TOKEN_BYTES

__all__ = ["Replayed", "Window"]

Path: TypeAlias = list[tuple[int, int]]
"""Digest and position of each node's end, from the root down."""

_MAX_NODES = 64
_NUM_OPEN = 32  # among so many requests the earlier chunks of one are looked for


class Replayed(Protocol):
    """What is asked of a policy; ``update`` notes that a request covered a node which ends there."""

    def update(self, node: Node, end: int, /) -> None: ...  # noqa: D102
    def touch(self, leaf: Node, /) -> None: ...  # noqa: D102
    def add(self, leaf: Node, /) -> None: ...  # noqa: D102
    def discard(self, leaf: Node, /) -> None: ...  # noqa: D102
    def victim(self, /) -> Node | None: ...  # noqa: D102


class Window:
    """The paths of the last requests, up to ``num_requests``, and how much was cached then."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self._paths: list[Path] = []
        self._num_cached_tokens: dict[int, int] = {}  # by namespace

    @property
    def is_full(self) -> bool:
        """Whether all requests are there that it is for."""
        return len(self._paths) >= self.num_requests

    def add(self, node: Node, num_tokens: int, continues: bool) -> None:
        """Note a request's path through ``node``; if it ``continues``, in place of its part noted before. O(depth)."""
        path: Path = []
        end, above = num_tokens, node
        while above.parent is not None:
            path.append((digest_of(above), end))
            end -= len(above.tokens) // TOKEN_BYTES
            above = above.parent
        assert isinstance(above, Root)
        block_size = len(node.tokens) // TOKEN_BYTES // node.num_blocks
        self._num_cached_tokens[digest_of(above)] = above.num_cached_blocks * block_size
        if continues:
            self._drop_part_of(path)
        self._paths.append(path[: -_MAX_NODES - 1 : -1])

    def _drop_part_of(self, path: Path) -> None:
        """Forget the last request that ends on ``path``, if it is a recent one."""
        digests = {digest for digest, _ in path}
        oldest = max(len(self._paths) - _NUM_OPEN, 0)
        for number in range(len(self._paths) - 1, oldest - 1, -1):
            if self._paths[number][-1][0] in digests:
                del self._paths[number]
                return

    def clear(self) -> None:
        """Begin a new window."""
        self._paths.clear()
        self._num_cached_tokens.clear()

    def hit_tokens(self, policy: Replayed) -> int:
        """Return how many tokens the window's requests would have found with ``policy``, a fresh one."""
        sizes = {digest: end - start for path in self._paths for digest, start, end in _spans(path)}
        model = _Model(policy, min(sum(self._num_cached_tokens.values()), sum(sizes.values()) // 2))
        num_hit_tokens = sum(model.play(path) for path in self._paths)
        model.end()
        return num_hit_tokens

    def saved(self) -> list[Any]:
        """Return the requests and the sizes."""
        return [self._paths[:], list(self._num_cached_tokens.items())]

    def restore(self, saved: list[Any]) -> None:
        """Take up what `saved` returned."""
        paths, sizes = saved
        self._paths = [[(digest, end) for digest, end in path] for path in paths]
        self._num_cached_tokens = dict(sizes)


class _Model:
    """A cache of ``capacity`` tokens that holds nodes by their digests."""

    def __init__(self, policy: Replayed, capacity: int) -> None:
        self._policy = policy
        self._room = capacity
        self._now = 0
        self._root = Node(None, b"", b"")
        self._nodes: dict[int, tuple[Node, int]] = {}  # with its size in tokens

    def play(self, path: Path) -> int:
        """Insert ``path`` and return how many tokens of it were there. O(its nodes, and what is evicted)."""
        self._now += 1
        num_hit_tokens, node, is_hit = 0, self._root, True
        for digest, start, end in _spans(path):
            is_hit = is_hit and digest in self._nodes
            num_hit_tokens = end if is_hit else num_hit_tokens
            node = self._node(node, digest, end - start)
            node.last_access = self._now
            self._policy.update(node, end)
        node.num_locks = 1
        if node.children is None:
            self._policy.touch(node)
        while self._room < 0 and (leaf := self._policy.victim()) is not None:
            self._remove(leaf)
        node.num_locks = 0
        if node.children is None:
            self._policy.add(node)
        return num_hit_tokens

    def end(self) -> None:
        """Take all nodes apart: they hold each other, and would wait for the garbage collector."""
        for node, _ in self._nodes.values():
            self._policy.discard(node)
            node.parent = node.children = None
        self._root.children = None

    def _node(self, parent: Node, digest: int, size: int) -> Node:
        if digest not in self._nodes:
            node = Node(parent, b"", b"")
            node.prev = digest  # where `digest_of` finds it
            self._nodes[digest] = node, size
            self._room -= size
            if parent.children is None:
                parent.children = {}
                self._policy.discard(parent)
            parent.children[_key(digest)] = node
        return self._nodes[digest][0]

    def _remove(self, leaf: Node) -> None:
        digest, parent = digest_of(leaf), leaf.parent
        self._room += self._nodes.pop(digest)[1]
        self._policy.discard(leaf)
        assert parent is not None
        assert isinstance(parent.children, dict)
        del parent.children[_key(digest)]
        if not parent.children:
            parent.children = None
            if parent is not self._root and not parent.num_locks:
                self._policy.add(parent)


def _spans(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield digest, start and end of each node."""
    start = 0
    for digest, end in path:
        yield digest, start, end
        start = end


def _key(digest: int) -> bytes:
    return digest.to_bytes(8)
