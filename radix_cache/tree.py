"""The radix tree on its own: the caller owns the block ids, the tree remembers which tokens they hold.

For those who bring their own pool and scheduler. `RadixTree` puts three things in front of `radix_cache.index`: tokens
in any form, a holder for each lock, and the check that a block id is never given to it twice.
"""

from __future__ import annotations

import copy
from array import array
from types import TracebackType
from typing import Any

from radix_cache.errors import IntegrityError, InvalidBlocks, UnknownLease
from radix_cache.frozen_nodes import FrozenNode, freeze_nodes, rank_nodes, thaw_nodes
from radix_cache.hints import Hints, check_hints
from radix_cache.index import PrefixIndex
from radix_cache.integrity import check_index
from radix_cache.node import BLOCK_ID_BYTES, Node
from radix_cache.operations import MAX_TOKENS, InsertResult, Namespace, check_count, check_namespace
from radix_cache.policies import EvictionPolicy, make_policy
from radix_cache.reading import nodes_below
from radix_cache.tokens import TOKEN_BYTES, BlockIds, TokenIds, as_block_ids, pack_tokens

__all__ = ["Match", "RadixTree"]


class Match:
    """The longest cached prefix of a prompt, locked until it is released; a context manager that releases.

    num_tokens: tokens matched, a multiple of the block size.
    """

    __slots__ = ("_block_ids", "_node", "_parts", "_tree", "num_tokens")

    def __init__(self, tree: RadixTree, node: Node | None, num_tokens: int, parts: list[bytes]) -> None:
        self.num_tokens = num_tokens
        self._tree = tree
        self._node = node
        self._parts = parts
        self._block_ids: array[int] | None = None

    @property
    def block_ids(self) -> array[int]:
        """The ids of the matched blocks in token order, int32; the same array each time, the caller's to change."""
        if self._block_ids is None:
            self._block_ids = array("i", b"".join(self._parts))
        return self._block_ids

    def __enter__(self) -> Match:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in self._tree._held:
            self._tree.release(self)

    def __repr__(self) -> str:
        return f"<Match of {self.num_tokens} tokens, {'held' if self in self._tree._held else 'released'}>"


class RadixTree:
    """Token prefixes -> the blocks that hold their KV. Not thread-safe; no I/O, no clock.

    block_size: tokens in a block, at least 1. policy: a name, ``"module:Class"`` or an `EvictionPolicy`.

    >>> tree = RadixTree(block_size=2)
    >>> result = tree.insert([1, 2, 3, 4, 5], [10, 11])
    >>> with tree.match_prefix([1, 2, 3, 4, 9]) as match:
    ...     match.num_tokens, list(match.block_ids)
    (4, [10, 11])
    """

    def __init__(self, block_size: int = 16, policy: str | EvictionPolicy = "lru") -> None:
        self.block_size = check_count(block_size, "block_size", 1)
        self._index = PrefixIndex(self.block_size, make_policy(policy))
        self._owned = bytearray()  # by block id: 1 if the tree has it
        self._held: set[Match] = set()

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the tree. O(1)."""
        return self._index.num_cached_blocks

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks with no lock on or below them. O(1)."""
        return self._index.num_evictable_blocks

    @property
    def num_protected_blocks(self) -> int:
        """Blocks with a lock on or below them. O(1)."""
        return self._index.num_protected_blocks

    @property
    def num_nodes(self) -> int:
        """Nodes with a span, roots not counted. O(1)."""
        return self._index.num_nodes

    def match_prefix(
        self,
        tokens: TokenIds,
        namespace: Namespace = (),
        max_tokens: int | None = None,
        hints: Hints | None = None,
    ) -> Match:
        """Find the longest cached prefix of ``tokens`` in whole blocks, lock it and touch it.

        ``max_tokens`` caps the match. Mutates: cuts a node that is matched in part. O(tokens), a memcmp for each node.
        Raises `InvalidTokens`, `InvalidArgument`.
        """
        data = tokens if type(tokens) is bytes and not len(tokens) % TOKEN_BYTES else pack_tokens(tokens)
        index = self._index
        limit = len(data)
        if max_tokens is not None:
            limit = min(limit, check_count(max_tokens, "max_tokens", most=MAX_TOKENS) * TOKEN_BYTES)
        limit -= limit % index.block_bytes
        hints = check_hints(hints)
        root = index.roots.get(check_namespace(namespace))
        parts: list[bytes] = []
        match = Match(self, None, 0, parts)
        if root is not None:
            node, at, child, covered = index.walk(root, data, 0, limit, parts)
            if child is not None:
                node = index.cut(child, covered)
            if node is not root:
                match._node = node
                match.num_tokens = (at + covered) // TOKEN_BYTES
                index.hold(node, hints=hints)
        self._held.add(match)
        return match

    def release(self, match: Match) -> array[int]:
        """Undo the lock of ``match``, once. Touches nothing. O(depth).

        Returns the ids that are the caller's again: those that a `reset` took out of the tree while only this match
        still held them. Raises `UnknownLease` for a match that is released already, or another tree's.
        """
        if match not in self._held:
            raise UnknownLease(hex(id(match)), f"{match!r} is not held in this tree")
        self._held.remove(match)
        freed = b"" if match._node is None else self._index.unlock(match._node)
        return self._disown([freed]) if freed else array("i")

    def insert(
        self, tokens: TokenIds, block_ids: BlockIds, namespace: Namespace = (), hints: Hints | None = None
    ) -> InsertResult:
        """Remember that ``block_ids`` hold the whole blocks of ``tokens``.

        ``block_ids``: one for each whole block; one more, for the ragged tail, may follow and is ignored. What the tree
        holds already stays where it is: of the ids given there, those that differ come back as redundant and are still
        the caller's. Mutates; touches the whole path. O(tokens).
        Raises `InvalidTokens`, `InvalidArgument`, and `InvalidBlocks` for the wrong number of ids, an id out of range,
        an id twice, and an id that the tree holds elsewhere.
        """
        data = pack_tokens(tokens)
        namespace, hints = check_namespace(namespace), check_hints(hints)
        limit = self._index.whole(len(data))
        ids = self._checked_ids(block_ids, limit, is_ragged=limit < len(data))
        index = self._index
        parts: list[bytes] = []
        root: Node | None = index.roots.get(namespace)
        node, at, child, covered = index.walk(root, data, 0, limit, parts) if root else (None, 0, None, 0)
        canonical = array("i", b"".join(parts))
        redundant = self._check_ownership(ids, canonical)
        if node is None and limit:
            node = index.open_root(namespace)
        if child is not None:
            node = index.cut(child, covered)
        if node is not None and at + covered < limit:
            adopted = ids[len(canonical) :]
            node = index.graft(node, None, data[at + covered : limit], adopted.tobytes())
            self._own(adopted)
            canonical.extend(adopted)
        if node is not None and limit:
            index.touch(node, is_insert=True, hints=hints)
        return InsertResult((at + covered) // TOKEN_BYTES, canonical, redundant)

    def _checked_ids(self, block_ids: BlockIds, limit: int, *, is_ragged: bool) -> array[int]:
        num_blocks = limit // self._index.block_bytes
        ids = as_block_ids(block_ids)
        if len(ids) != num_blocks and not (is_ragged and len(ids) == num_blocks + 1):
            more = " (or one more, for the ragged tail)" if is_ragged else ""
            raise InvalidBlocks(f"the tokens fill {num_blocks} blocks{more}, and {len(ids)} ids were given")
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise InvalidBlocks(f"block {twice} is named twice", twice)
        return ids[:num_blocks]

    def _check_ownership(self, ids: array[int], canonical: array[int]) -> array[int]:
        """Return the redundant ones of ``ids``; all but those already canonical must be new to the tree."""
        num_matched = len(canonical)
        redundant = array("i")
        if ids[:num_matched] != canonical:
            redundant.extend(given for given, kept in zip(ids, canonical, strict=False) if given != kept)
        owned, length = self._owned, len(self._owned)
        for new in (redundant, ids[num_matched:]):
            for block_id in new:
                if block_id < length and owned[block_id]:
                    raise InvalidBlocks(f"block {block_id} is in the tree already, at another place", block_id)
        return redundant

    def _own(self, ids: array[int]) -> None:
        if max(ids) >= len(
            self._owned
        ):  # a fresh bytearray is zero pages until written to: growing costs the ids in use
            grown = bytearray(max(2 * len(self._owned), max(ids) + 1))
            grown[: len(self._owned)] = self._owned
            self._owned = grown
        for block_id in ids:
            self._owned[block_id] = 1

    def _disown(self, pieces: list[bytes]) -> array[int]:
        ids = array("i", b"".join(pieces))
        for block_id in ids:
            self._owned[block_id] = 0
        return ids

    def evict(self, num_blocks: int) -> array[int]:
        """Remove exactly ``min(num_blocks, num_evictable_blocks)`` blocks and return their ids, now the caller's.

        In the order of eviction: the policy's first leaf first, from its tail. O(what is evicted).
        Raises `InvalidArgument` for a negative number.
        """
        pieces = self._index.evict(check_count(num_blocks, "num_blocks"))
        ids = self._disown(pieces[::-1])
        ids.reverse()
        return ids

    def reset(self, namespace: Namespace | None = None, tokens: TokenIds = b"") -> array[int]:
        """Forget everything, or what lies in namespaces that begin with ``namespace``, or what extends ``tokens``
        there.

        Returns the ids of the unlocked blocks. What is locked is out of sight, and its ids come back from the `release`
        that unlocks them. ``tokens`` are whole blocks, else `InvalidTokens`. O(what is forgotten).
        """
        self._index.detach(check_namespace(namespace or ()), self._index.checked_whole(pack_tokens(tokens)))
        pieces: list[bytes] = []
        while (freed := self._index.sweep(1024)) is not None:
            pieces += freed
        return self._disown(pieces)

    def probe(self, tokens: TokenIds, namespace: Namespace = ()) -> int:
        """Return how many tokens `match_prefix` would match. Changes nothing: no lock, no touch, no cut."""
        data = pack_tokens(tokens)
        root = self._index.roots.get(check_namespace(namespace))
        if root is None:
            return 0
        _, at, _, covered = self._index.walk(root, data, 0, self._index.whole(len(data)), [])
        return (at + covered) // TOKEN_BYTES

    def check_integrity(self) -> None:
        """Walk everything; raise `IntegrityError` on the first broken invariant. O(tree)."""
        held = (match._node for match in self._held if match._node is not None)
        cached = check_index(self._index, held)
        if sum(self._owned) != len(cached) or not all(self._owned[block_id] for block_id in cached):
            raise IntegrityError(f"the tree holds {len(cached)} blocks and has {sum(self._owned)} marked as its own")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle flat, however deep the tree is. Matches are not held in a copy."""
        policy = self._index.policy
        rows, _ = freeze_nodes(self._index, nodes_below(self._index.roots.values()))
        return _restore, (self.block_size, copy.copy(policy), policy.saved(), self._index.now, rows)

    def __repr__(self) -> str:
        return (
            f"<RadixTree {self.num_nodes} nodes, {self.num_cached_blocks} blocks of {self.block_size} tokens, "
            f"{self.num_protected_blocks} protected>"
        )


def _restore(block_size: int, policy: EvictionPolicy, saved: Any, now: int, rows: list[FrozenNode]) -> RadixTree:
    tree = RadixTree(block_size, policy)
    policy.restore(saved)
    tree._index.now = now
    rank_nodes(tree._index, rows, thaw_nodes(tree._index, rows))
    for row in rows:
        if row.block_ids:
            tree._own(array("i", row.block_ids))
    return tree


assert array("i").itemsize == BLOCK_ID_BYTES, "block ids are int32"
