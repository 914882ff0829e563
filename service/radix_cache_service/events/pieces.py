"""Events in pieces of about 64 KiB: what waits for a reader over ZeroMQ is counted in messages, so none may be large.

A piece is as good as a batch of its own: parents come before children, and a removed block after all behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from radix_cache.events import BlockRemoved, BlockStored, Event
from radix_cache_service.events.names import lora_name_of

__all__ = ["Pieces"]

_PIECE_BYTES = 64 * 1024
_MAX_WAITING_BYTES = 64 * 1024 * 1024
_BYTES_OF_A_TOKEN = 5  # in msgpack, as in the next two
_BYTES_OF_A_HASH = 9
_BYTES_OF_AN_EVENT = 256
_LONGEST_NAME = 12 * 1024  # 1024 characters of 4 bytes, each written as %XX


class Pieces:
    """Cuts events. num_waiting: so many pieces are 64 MiB together.

    A block that is longer than a piece is a piece by itself.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * _BYTES_OF_A_TOKEN + _BYTES_OF_A_HASH
        self._piece_bytes = max(_PIECE_BYTES, self._block_bytes + _BYTES_OF_AN_EVENT + _LONGEST_NAME)
        self.num_waiting = max(_MAX_WAITING_BYTES // self._piece_bytes, 1)

    def __call__(self, events: Iterable[Event]) -> Iterator[list[Event]]:
        """Yield the events in pieces, at least one. O(events), and O(tokens) of those that are cut."""
        piece: list[Event] = []
        room = self._piece_bytes
        for event in events:
            for part in self._parts(event):
                num_bytes = self._num_bytes(part)
                if num_bytes > room and piece:
                    yield piece
                    piece, room = [], self._piece_bytes
                piece.append(part)
                room -= num_bytes
        yield piece

    def _num_bytes(self, event: Event) -> int:
        if isinstance(event, BlockStored):
            return _bytes_around(event) + len(event.block_hashes) * self._block_bytes
        if isinstance(event, BlockRemoved):
            return _BYTES_OF_AN_EVENT + len(event.block_hashes) * _BYTES_OF_A_HASH
        return _BYTES_OF_AN_EVENT

    def _parts(self, event: Event) -> Iterable[Event]:
        if self._num_bytes(event) <= self._piece_bytes:
            return (event,)
        if isinstance(event, BlockStored):
            return _stored_in_parts(event, (self._piece_bytes - _bytes_around(event)) // self._block_bytes)
        assert isinstance(event, BlockRemoved)
        most, hashes = (self._piece_bytes - _BYTES_OF_AN_EVENT) // _BYTES_OF_A_HASH, event.block_hashes
        return (BlockRemoved(hashes[at : at + most]) for at in range(0, len(hashes), most))


def _bytes_around(event: BlockStored) -> int:
    return _BYTES_OF_AN_EVENT + len(lora_name_of(event.namespace) or "")


def _stored_in_parts(event: BlockStored, most: int) -> Iterator[BlockStored]:
    """Yield the blocks of an event ``most`` at a time, each part behind the one before."""
    namespace, parent_hash, hashes, tokens = event
    per_block = len(tokens) // len(hashes)
    for at in range(0, len(hashes), most):
        part = hashes[at : at + most]
        yield BlockStored(namespace, parent_hash, part, tokens[at * per_block : (at + most) * per_block])
        parent_hash = part[-1]
