"""A batch of events, and the latest of them that are kept to be sent again."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from radix_cache.events import AllBlocksCleared, BlockStored, Event

__all__ = ["EventBatch", "KeptBatches", "num_bytes_of"]

_MAX_KEPT_BYTES = 64 * 1024 * 1024
_BYTES_OF_A_HASH = 40  # about what Python needs for one in a list
_BYTES_OF_A_BATCH = 200


class EventBatch(NamedTuple):
    """What one call changed, or a piece of that; nothing, in a heartbeat.

    is_reset: it begins from nothing, with all that is cached now; where that is much, it may go on in the next ones.
    payload: as ZeroMQ has it, where that is served. num_bytes: about how much memory it takes.
    """

    seq: int
    events: list[Event]
    is_reset: bool
    payload: bytes
    num_bytes: int


class KeptBatches:
    """The latest batches, without a gap: up to ``num_kept``, and up to 64 MiB of them."""

    def __init__(self, num_kept: int) -> None:
        self._batches: deque[EventBatch] = deque()
        self._num_kept = num_kept
        self._num_bytes = 0

    def add(self, batch: EventBatch) -> None:
        """Keep the next one, and let go of the oldest for it."""
        self._batches.append(batch)
        self._num_bytes += batch.num_bytes
        while len(self._batches) > self._num_kept or self._num_bytes > _MAX_KEPT_BYTES:
            self._num_bytes -= self._batches.popleft().num_bytes

    def since(self, start_seq: int, last_seq: int) -> list[EventBatch] | None:
        """Return those from ``start_seq`` on, where ``last_seq`` is the newest of all; None if not all are there."""
        oldest = self._batches[0].seq if self._batches else last_seq + 1
        if oldest <= start_seq <= last_seq + 1:
            return list(islice(self._batches, start_seq - oldest, None))
        return None


def num_bytes_of(events: list[Event], payload: bytes) -> int:
    """Return about how much memory a batch of these takes."""
    return _BYTES_OF_A_BATCH + len(payload) + sum(map(_num_bytes, events))


def _num_bytes(event: Event) -> int:
    if isinstance(event, AllBlocksCleared):
        return 0
    num_tokens_bytes = len(event.tokens) if isinstance(event, BlockStored) else 0
    return num_tokens_bytes + _BYTES_OF_A_HASH * len(event.block_hashes)
