"""Streams that are open: counted, and ended when the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc

from radix_cache.errors import LimitExceeded
from radix_cache_service.errors import abort, to_status

__all__ = ["OpenStreams"]

T = TypeVar("T")


class OpenStreams:
    """Each stream is a task, which waits most of the time. max_streams: the most at once."""

    def __init__(self, max_streams: int) -> None:
        self.max_streams = max_streams
        self._num_open = 0
        self._waiting: set[asyncio.Task[Any]] = set()
        self._is_ending = False

    def __len__(self) -> int:
        return self._num_open

    def end(self) -> None:
        """End those that wait now, and each of the others as soon as it would wait, with UNAVAILABLE."""
        self._is_ending = True
        for task in self._waiting:
            task.cancel()

    @asynccontextmanager
    async def opened(self, context: Any) -> AsyncIterator[None]:
        """Count a stream while the block lasts. Refuses one too many."""
        if self._num_open >= self.max_streams:
            await abort(context, to_status(LimitExceeded("max_streams", self.max_streams)))
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def wait(self, context: Any, awaited: Awaitable[T]) -> T:
        """Return what is awaited, unless the streams end first."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            return await awaited
        except asyncio.CancelledError:
            if not self._is_ending:
                raise  # the client has gone
        finally:
            self._waiting.discard(task)
        return await self._abort(context)

    async def next(self, context: Any, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what ``ask`` is answered with, unless the streams end first, or have."""
        if self._is_ending:
            await self._abort(context)
        return await self.wait(context, ask())

    async def read(self, context: Any) -> Any:
        """Return the stream's next message, or ``grpc.aio.EOF``."""
        return await self.next(context, context.read)

    async def _abort(self, context: Any) -> NoReturn:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        raise AssertionError("to abort raises")
