"""What a cache stores and removes, block by block, for those who keep a picture of it: routers, nodes, dashboards.

Two steps. The tree notes *changes*: pieces of its own bytes, so that a note costs next to nothing, and none is made
where nobody listens. `BlockHashes` turns changes into *events*, which name each block by a hash of all that leads to
it: the namespace, the blocks before it, its own tokens. Whoever needs the events does that, in whatever thread.

What holds of the events, in the order in which they come:

- A block is stored once and removed once, and its parent is there for as long as it is.
- What cuts and joins nodes, or only finds and touches them, is no change: no block comes or goes.
- A reset of everything is one `AllBlocksCleared`; any other reset removes, children before parents.
- What a reset takes out of sight is removed at once, however long its blocks are still locked or waiting for the sweep.

A block's hash is the first 8 bytes of a SHA-256, read as a little-endian unsigned integer. It is of 16 bytes of the
same hash of the block before (of the namespace, for the first), and the block's packed tokens: the same prompt has the
same hashes in every process, and equal tokens in two namespaces have none in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
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

_STATE_BYTES = 16
_HASH_BYTES = 8


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
    block_hashes: Sequence[int]
    tokens: bytes


class BlockRemoved(NamedTuple):
    """An event: blocks that can be matched no more, children before parents."""

    block_hashes: Sequence[int]


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
        self._block_bytes = block_size * TOKEN_BYTES
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
        states, (namespace, parent_id, tokens, block_ids) = self._states, change
        hashes = [_hash_of(states[block_id]) for block_id in memoryview(block_ids).cast("i")]  # type: ignore[arg-type]
        parent = None if parent_id is None else _hash_of(states[parent_id])  # type: ignore[arg-type]
        return BlockStored(namespace, parent, hashes, tokens)

    def _stored(self, change: Grafted) -> BlockStored:
        namespace, parent_id, tokens, block_ids = change
        states, block_bytes, at = self._states, self._block_bytes, 0
        state = parent = None if parent_id is None else states[parent_id]
        if state is None:
            state = namespace_state(namespace)
        hashes: list[int] = []
        for block_id in memoryview(block_ids).cast("i"):
            states[block_id] = state = sha256(state + tokens[at : at + block_bytes]).digest()[:_STATE_BYTES]
            hashes.append(_hash_of(state))
            at += block_bytes
        return BlockStored(namespace, None if parent is None else _hash_of(parent), hashes, tokens)

    def _remove(self, block_ids: bytes, events: list[Event]) -> None:
        """Note as removed those of the blocks that are not; as part of the last event, if that removes too."""
        states = self._states
        hashes: list[int] = []
        for block_id in reversed(memoryview(block_ids).cast("i")):
            state = states[block_id]
            if state is not None:
                states[block_id] = None
                hashes.append(_hash_of(state))
        if events and isinstance(last := events[-1], BlockRemoved):
            events[-1] = BlockRemoved([*last.block_hashes, *hashes])
        elif hashes:
            events.append(BlockRemoved(hashes))


def namespace_state(namespace: Namespace) -> bytes:
    """Return what the chains of a namespace begin with: a hash of its parts, each with its length before it."""
    parts = [part.encode("utf-8", "surrogatepass") for part in namespace]
    return sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()[:_STATE_BYTES]


def _hash_of(state: bytes) -> int:
    return int.from_bytes(state[:_HASH_BYTES], "little")
