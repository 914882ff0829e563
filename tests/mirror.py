"""What a subscriber knows: the blocks that events announced, and a second way to say what it should know."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

from radix_cache import PrefixCache
from radix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event


class Mirror:
    """Hash -> hash of the block before. Refuses events that a router could not follow."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}

    def read(self, events: Iterable[Event]) -> None:
        """Take events in."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for number in event.block_hashes:
                    assert number not in self.parents.values(), "a block is removed before its child"
                    del self.parents[number]
            else:
                assert isinstance(event, AllBlocksCleared)
                self.parents.clear()

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_hash
        assert parent is None or parent in self.parents, "a parent is not there"
        assert event.block_hashes
        for number in event.block_hashes:
            assert 0 <= number < 2**64
            assert number not in self.parents, "a block is stored twice"
            self.parents[number] = parent
            parent = number


def hashes_of(tokens: bytes, namespace: tuple[str, ...], block_size: int) -> list[int]:
    """Return the hashes of a prompt's whole blocks, computed from the text of the rule."""
    state = sha256(b"".join(len(p.encode()).to_bytes(4, "little") + p.encode() for p in namespace)).digest()
    found = []
    for start in range(0, len(tokens) - 4 * block_size + 1, 4 * block_size):
        state = sha256(state + tokens[start : start + 4 * block_size]).digest()
        found.append(int.from_bytes(state[:8], "little"))
    return found


def walked(cache: PrefixCache) -> dict[int, int | None]:
    """Return what can be matched in ``cache``, found by walking its tree: hash -> hash of the block before."""
    found: dict[int, int | None] = {}
    stack: list[tuple[Any, bytes]] = [(root, b"") for root in cache._executor.index.roots.values()]
    while stack:
        node, above = stack.pop()
        path = above + node.tokens
        namespace = node.namespace if node.root is None else node.root.namespace
        hashes = hashes_of(path, namespace, cache.block_size)
        found.update(zip(hashes, [None, *hashes], strict=False))
        stack += [(child, path) for child in (node.children.values() if node.children is not None else ())]
    return found
