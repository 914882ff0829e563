"""The tree as the contract describes it, kept as plainly as possible: one entry for each cached block.

There are no nodes here, no splits and no order that is kept: each question is answered by looking at every block. What
the real tree does in a few steps is checked against that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile

Tokens = tuple[int, ...]
Namespace = tuple[str, ...]


@dataclass(eq=False)
class Block:
    """One cached block: its id, all tokens up to its end, and when a match or an insert last covered it."""

    block_id: int
    namespace: Namespace
    prefix: Tokens
    last_touch: int = 0


def ANY(_: Block) -> bool:  # noqa: N802 - a constant
    """Tell that any block may go."""
    return True


class TreeModel:
    """Cached blocks by their whole prefix, and who holds which path."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.visible: dict[tuple[Namespace, Tokens], Block] = {}
        self.detached: list[Block] = []  # out of sight since a reset, but still held
        self.held: dict[Hashable, list[Block]] = {}  # holder -> the path that it locks
        self.now = 0

    # Questions.

    def whole(self, num_tokens: int) -> int:
        """Round down to whole blocks."""
        return num_tokens // self.block_size * self.block_size

    def find(self, namespace: Namespace, tokens: Sequence[int]) -> list[Block]:
        """Return the blocks of the longest cached prefix of ``tokens``."""
        path: list[Block] = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = self.visible.get((namespace, tuple(tokens[:end])))
            if block is None:
                break
            path.append(block)
        return path

    def nearest(self, namespace: Namespace, tokens: Sequence[int], num_blocks: int) -> tuple[Block | None, int]:
        """Return the block behind the first ``num_blocks`` that agrees longest with what follows, and for how many
        tokens; of equals the one whose tokens come first as little-endian bytes.
        """
        start = num_blocks * self.block_size
        head, piece = tuple(tokens[:start]), tuple(tokens[start:])
        found: list[tuple[int, bytes, Block]] = []
        for (name, prefix), block in self.visible.items():
            if name == namespace and len(prefix) == start + self.block_size and prefix[:start] == head:
                pairs = zip(prefix[start:], piece, strict=False)
                agreeing = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                found.append((-agreeing, b"".join(token.to_bytes(4, "little") for token in prefix[start:]), block))
        best = min(found, key=lambda item: item[:2], default=(0, b"", None))
        return (best[2], -best[0]) if best[0] else (None, 0)

    @property
    def locked(self) -> set[Block]:
        """Every block that somebody holds; a path is held from its beginning, so nothing below is missing."""
        return {block for path in self.held.values() for block in path}

    @property
    def cached(self) -> list[Block]:
        """Every block of the tree, in sight or not."""
        return [*self.visible.values(), *self.detached]

    @property
    def block_ids(self) -> set[int]:
        """Their ids."""
        return {block.block_id for block in self.cached}

    @property
    def num_protected(self) -> int:
        """Blocks with a lock on or below them."""
        return len(self.locked)

    @property
    def num_evictable(self) -> int:
        """All others."""
        return len(self.cached) - self.num_protected

    # Changes.

    def touch(self, path: list[Block]) -> None:
        """A match or an insert covered ``path``."""
        self.now += 1
        for block in path:
            block.last_touch = self.now

    def hold(self, holder: Hashable, path: list[Block]) -> None:
        """``holder`` locks ``path``, in place of what it locked before."""
        self.held[holder] = path

    def let_go(self, holder: Hashable) -> list[int]:
        """End a lock; return the ids of detached blocks that nobody holds any more."""
        del self.held[holder]
        return self._drop_unheld()

    def _drop_unheld(self) -> list[int]:
        locked = self.locked
        dropped = [block.block_id for block in self.detached if block not in locked]
        self.detached = [block for block in self.detached if block in locked]
        return dropped

    def add(self, namespace: Namespace, tokens: Sequence[int], block_ids: Sequence[int]) -> list[Block]:
        """Cache what of ``tokens`` is not cached yet in the ``block_ids`` at its place, touch all of it, return the
        path.
        """
        path = self.find(namespace, tokens)
        for place in range(len(path), len(tokens) // self.block_size):
            prefix = tuple(tokens[: (place + 1) * self.block_size])
            block = Block(block_ids[place], namespace, prefix)
            self.visible[namespace, prefix] = block
            path.append(block)
        self.touch(path)
        return path

    def evict(self, num_blocks: int, may: Callable[[Block], bool] = ANY) -> list[int]:
        """Remove up to that many blocks of those that ``may`` go, one by one; return their ids in that order."""
        evicted = []
        while len(evicted) < num_blocks and (candidates := list(filter(may, self._candidates()))):
            victim = min(candidates, key=lambda block: (block.last_touch, -len(block.prefix)))
            del self.visible[victim.namespace, victim.prefix]
            evicted.append(victim.block_id)
        return evicted

    def _candidates(self) -> list[Block]:
        locked = self.locked
        return [b for b in self.visible.values() if b not in locked and not self._is_extended(b)]

    def _is_extended(self, block: Block) -> bool:
        length = len(block.prefix)
        return any(
            namespace == block.namespace and len(prefix) > length and prefix[:length] == block.prefix
            for namespace, prefix in self.visible
        )

    def reset(self, namespace: Namespace, tokens: Sequence[int]) -> list[int]:
        """Put what extends ``tokens`` in these namespaces out of sight; return the ids of what nobody holds."""
        prefix, length = tuple(tokens), len(tokens)
        for name, key in list(self.visible):
            if name[: len(namespace)] == namespace and len(key) > length and key[:length] == prefix:
                self.detached.append(self.visible.pop((name, key)))
        return self._drop_unheld()
