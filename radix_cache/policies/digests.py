"""Names for prefixes that outlive the nodes: a 64-bit digest of all tokens from a namespace's root to a node's end.

It is a polynomial in 2 over the bytes, modulo a prime of which 2 is a primitive root. So it grows with what is
appended, and shrinks with what is taken off the end, at the cost of that part alone, 25 ns a token. A node's digest is
found when it is first asked for, and kept in ``node.prev``: an end stays the same token when a node is cut or merged,
and whoever trims a leaf sees to it.

It tells prompts apart that nobody made to collide; whoever does gains an order of eviction, never a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

from radix_cache.node import Node, Root

__all__ = ["Ghost", "digest_of"]

_PRIME = 2**64 - 59


def digest_of(node: Node) -> int:
    """Return the digest of the path through ``node``. O(tokens above that were never asked about)."""
    unknown: list[Node] = []
    above = node
    while above.prev is None:
        if isinstance(above, Root):
            _keep(above, int.from_bytes(blake2b(repr(above.namespace).encode(), digest_size=8).digest()) % _PRIME)
            break
        unknown.append(above)
        assert above.parent is not None
        above = above.parent
    for below in reversed(unknown):
        _keep(below, _longer(_kept(below.parent), below.tokens))
    return _kept(node)


def _kept(node: Node | None) -> int:
    digest: int = node.prev  # type: ignore[union-attr]  # no root has a parent, and theirs is kept
    return digest


def _keep(node: Node, digest: int) -> None:
    node.prev = digest


def _longer(digest: int, tokens: bytes) -> int:
    return (digest * _shift(len(tokens)) + int.from_bytes(tokens)) % _PRIME


def _shorter(digest: int, tokens: bytes) -> int:
    return (digest - int.from_bytes(tokens)) * _shift(-len(tokens)) % _PRIME


@lru_cache(1024)
def _shift(num_bytes: int) -> int:
    return pow(2, 8 * num_bytes, _PRIME)


class Ghost:
    """The digests of up to ``num_blocks`` blocks that were evicted last."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._digests: OrderedDict[int, None] = OrderedDict()  # the newest last

    def add(self, leaf: Node, num_blocks: int) -> None:
        """Remember the last ``num_blocks`` blocks of ``leaf``, which are about to go. O(their tokens)."""
        digest, span = digest_of(leaf), leaf.tokens
        length = len(span) // leaf.num_blocks
        for stop in range(len(span), len(span) - num_blocks * length, -length):
            self._remember(digest)
            digest = _shorter(digest, span[stop - length : stop])
        _keep(leaf, digest)

    def _remember(self, digest: int) -> None:
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self.num_blocks:
            self._digests.popitem(last=False)

    def num_known(self, node: Node) -> int:
        """Return how many blocks at the beginning of ``node`` are remembered. O(their tokens)."""
        assert node.parent is not None
        digest, span = digest_of(node.parent), node.tokens
        length = len(span) // node.num_blocks
        for start in range(0, len(span), length):
            digest = _longer(digest, span[start : start + length])
            if digest not in self._digests:
                return start // length
        return node.num_blocks

    def saved(self) -> list[int]:
        """Return what is remembered, the oldest first."""
        return list(self._digests)

    def restore(self, saved: Iterable[int]) -> None:
        """Remember what `saved` returned, the newest as far as there is room."""
        digests = list(saved)
        self._digests = OrderedDict.fromkeys(islice(digests, max(len(digests) - self.num_blocks, 0), None))
