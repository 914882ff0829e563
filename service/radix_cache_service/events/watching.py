"""`WatchEvents`: the events of a server as one client's stream of messages.

A reader has a queue of its own between the stream's thread and the event loop. One that does not keep up with it is
told so by an error, and nothing is kept for it any more: it resumes after the last number that it has seen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Protocol

from radix_cache.errors import LimitExceeded
from radix_cache.events import BlockRemoved, BlockStored, Event
from radix_cache_service.events.batches import EventBatch
from radix_cache_service.events.stream import EventStream
from radix_cache_service.pb import prefix_cache_pb2 as pb

__all__ = ["messages_of", "watch"]

_PIECE_BYTES = 1024 * 1024
_MAX_QUEUED_BYTES = 256 * 1024 * 1024


class Next(Protocol):
    """How to wait on the event loop, as `radix_cache_service.streams.OpenStreams.next` does."""

    async def __call__(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return what ``ask`` is answered with."""


class _Reader:
    """What waits for one reader. Made on the event loop; `put` is for the stream's thread."""

    def __init__(self, max_queued: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[EventBatch] = deque()
        self._max_queued = max_queued
        self._num_put_bytes = self._num_taken_bytes = 0  # each is changed in one thread
        self._is_behind = False
        self._arrived = asyncio.Event()

    def put(self, batch: EventBatch) -> None:
        """Let the reader have a batch."""
        self._num_put_bytes += batch.num_bytes
        if len(self._queue) >= self._max_queued or self._num_put_bytes - self._num_taken_bytes > _MAX_QUEUED_BYTES:
            self._is_behind = True
            self._queue.clear()
        if not self._is_behind:
            self._queue.append(batch)
        if not self._arrived.is_set():
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def get(self) -> EventBatch:
        """Return the next batch. Raises `LimitExceeded` for a reader that was too slow."""
        while not self._queue:
            if self._is_behind:
                raise LimitExceeded("max_queued_events", self._max_queued)
            self._arrived.clear()
            if not self._queue and not self._is_behind:
                await self._arrived.wait()
        batch = self._queue.popleft()
        self._num_taken_bytes += batch.num_bytes
        return batch


async def watch(
    stream: EventStream, request: pb.WatchEventsRequest, max_queued: int, next_of: Next
) -> AsyncGenerator[pb.WatchEventsResponse]:
    """Yield messages for ever. Raises `LimitExceeded` when the caller is too slow."""
    reader = _Reader(max_queued)
    start = -1 if request.snapshot else request.after_seq + 1 if request.after_seq else None
    joined = stream.join(reader.put, start, request.epoch)
    try:
        for batch in await next_of(lambda: asyncio.wrap_future(joined)):
            for message in messages_of(batch, stream.epoch):
                yield message
        while True:
            for message in messages_of(await next_of(reader.get), stream.epoch):
                yield message
    finally:
        stream.leave(reader.put)


def messages_of(batch: EventBatch, epoch: str) -> Iterator[pb.WatchEventsResponse]:
    """Yield a batch as messages of about 1 MiB at most; one event is never divided."""
    message = pb.WatchEventsResponse(seq=batch.seq, epoch=epoch, is_reset=batch.is_reset)
    num_bytes = 0
    for event in map(_event_of, _told(batch)):
        if num_bytes > _PIECE_BYTES:
            message.is_partial = True
            yield message
            message, num_bytes = pb.WatchEventsResponse(seq=batch.seq, epoch=epoch), 0
        message.events.append(event)
        num_bytes += event.ByteSize()
    yield message


def _told(batch: EventBatch) -> Iterable[Event]:
    return batch.events[1:] if batch.is_reset else batch.events  # a reset says the first by itself


def _event_of(event: Event) -> pb.BlockEvent:
    if isinstance(event, BlockStored):
        return pb.BlockEvent(
            stored=pb.BlocksStored(
                namespace=event.namespace,
                parent_hash=event.parent_hash,
                block_hashes=event.block_hashes,
                tokens=event.tokens,
            )
        )
    if isinstance(event, BlockRemoved):
        return pb.BlockEvent(removed=pb.BlocksRemoved(block_hashes=event.block_hashes))
    return pb.BlockEvent(cleared=pb.AllBlocksCleared())
