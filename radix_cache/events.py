"""What a cache stores and removes, block by block, for those who keep a picture of it: routers, nodes, dashboards.

Two steps. The tree notes *changes*: pieces of its own bytes, so that a note costs next to nothing, and none is made
where nobody listens. `BlockHashes` turns changes into *events*, which name each block by a hash of all that leads to
it: the namespace, the blocks before it, its own tokens. Whoever needs the events does that, in whatever thread.

What holds of the events, in the order in which they come:

- A block is stored once and removed once, and its parent is there for as long as it is.
- What cuts and joins nodes, or only finds and touches them, is no change: no block comes or goes.
- A reset of everything is one `AllBlocksCleared`; any other reset removes, children before parents.
- What a reset takes out of sight is removed at once, however long its blocks are still locked or waiting for the sweep.

A block's hash is the first 8 bytes of a SHA-256, read as a little-endian unsigned integer: of the SHA-256 of the block
before (of the namespace, for the first) and the block's packed tokens. The same prompt has the same hashes in every
process, and equal tokens in two namespaces have none in common.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from struct import Struct
from typing import NamedTuple, TypeAlias

from radix_cache.operations import Namespace
from radix_cache.tokens import TOKEN_BYTES

__all__ = [
    "AllBlocksCleared",
    "BlockHashes",
    "BlockRemoved",
    "BlockStored",
    "Change",
    "Cleared",
    "Dropped",
    "Event",
    "Grafted",
]

_WORDS_IN_A_STATE = 4  # a SHA-256, in words of 8 bytes


class Grafted(NamedTuple):
    """A change: blocks came into the tree, one behind the other. ``parent_id``: the block before; None at the top."""

    namespace: Namespace
    parent_id: int | None
    tokens: bytes
    block_ids: bytes


class Dropped(NamedTuple):
    """A change: blocks went out of sight, the last in ``block_ids`` first.

    It may name what an earlier one has named: a block that a reset took out of sight is named again when it is freed.
    """

    block_ids: bytes


class Cleared(NamedTuple):
    """A change: all went out of sight."""


Change: TypeAlias = Grafted | Dropped | Cleared


class BlockStored(NamedTuple):
    """An event: blocks that can be matched now, one behind the other. ``parent_hash``: of the one before the first."""

    namespace: Namespace
    parent_hash: int | None
    block_hashes: list[int]
    tokens: bytes


class BlockRemoved(NamedTuple):
    """An event: blocks that can be matched no more, children before parents."""

    block_hashes: list[int]


class AllBlocksCleared(NamedTuple):
    """An event: no block can be matched any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class BlockHashes:
    """Turns the changes of one cache into events. Not thread-safe. One entry for each block of the pool.

    >>> from radix_cache import PrefixCache
    >>> cache, hashes, seen = PrefixCache(num_blocks=8, block_size=2), BlockHashes(8, 2), []
    >>> cache.subscribe(lambda changes: seen.extend(hashes.events(changes)))
    >>> with cache.batch() as batch:
    ...     lease = batch.match_prefix([1, 2, 3, 4], num_tokens=4, lease_id="a")
    ...     inserted = batch.insert("a", [1, 2, 3, 4])
    >>> stored = seen.pop()
    >>> stored.parent_hash, len(stored.block_hashes), stored.tokens.hex(" ", 4)
    (None, 2, '01000000 02000000 03000000 04000000')
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._blocks = Struct(f"{block_size * TOKEN_BYTES}s").iter_unpack
        self._states: list[bytes | None] = [None] * num_blocks  # by block id; None: not stored, or removed

    def events(self, changes: Iterable[Change]) -> list[Event]:
        """Return what these changes amount to. O(blocks)."""
        events: list[Event] = []
        for change in changes:
            if isinstance(change, Grafted):
                events.append(self._stored(change))
            elif isinstance(change, Dropped):
                self._remove(change.block_ids, events)
            else:
                self._states = [None] * len(self._states)
                events.append(AllBlocksCleared())
        return events

    def known(self, changes: Iterable[Change]) -> list[Event]:
        """Return as events what has been stored and is there. Changes nothing. O(blocks)."""
        return [self._known(change) for change in changes if isinstance(change, Grafted)]

    def _known(self, change: Grafted) -> BlockStored:
        namespace, parent_id, tokens, block_ids = change
        states = self._states
        found = [states[block_id] for block_id in memoryview(block_ids).cast("i")]
        above = None if parent_id is None else states[parent_id]
        return BlockStored(namespace, _hash_of(above), _hashes_of(found), tokens)  # type: ignore[arg-type]

    def _stored(self, change: Grafted) -> BlockStored:
        namespace, parent_id, tokens, block_ids = change
        states = self._states
        above = None if parent_id is None else states[parent_id]
        state = namespace_state(namespace) if above is None else above
        found = [state := sha256(state + block).digest() for (block,) in self._blocks(tokens)]
        for block_id, state in zip(memoryview(block_ids).cast("i"), found, strict=True):
            states[block_id] = state
        return BlockStored(namespace, _hash_of(above), _hashes_of(found), tokens)

    def _remove(self, block_ids: bytes, events: list[Event]) -> None:
        """Note as removed those of the blocks that are not; as part of the last event, if that removes too."""
        states = self._states
        found: list[bytes] = []
        for block_id in reversed(memoryview(block_ids).cast("i")):
            state = states[block_id]
            if state is not None:
                states[block_id] = None
                found.append(state)
        hashes = _hashes_of(found)
        if events and isinstance(last := events[-1], BlockRemoved):
            last.block_hashes.extend(hashes)
        elif hashes:
            events.append(BlockRemoved(hashes))


def namespace_state(namespace: Namespace) -> bytes:
    """Return what the chains of a namespace begin with: a hash of its parts, each with its length before it."""
    parts = [part.encode("utf-8", "surrogatepass") for part in namespace]
    return sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()


def _hash_of(state: bytes | None) -> int | None:
    return None if state is None else int.from_bytes(state[:8], "little")


def _hashes_of(states: list[bytes]) -> list[int]:
    """Return the first 8 bytes of each state as a number."""
    words = array("Q", b"".join(states))
    if sys.byteorder == "big":  # pragma: no cover - no such machine in our CI
        words.byteswap()
    return words[::_WORDS_IN_A_STATE].tolist()
