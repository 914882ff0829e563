"""The clients' side of `WatchEvents`: messages into batches of events, and a watch over the stream's silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc

from radix_cache.errors import DeadlineExceeded, InvalidArgument, RadixCacheError
from radix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from radix_cache.tokens import shown
from radix_cache_service.errors import from_call_error
from radix_cache_service.pb import prefix_cache_pb2 as pb

__all__ = ["Assembly", "WatchedEvents", "silence_s", "too_quiet", "watch_request", "watched"]

_LEAST_SILENCE_S = 3.0  # of a stream with a heartbeat each second


class WatchedEvents(NamedTuple):
    """What one call to the server's cache changed, or a part of it where that is much; nothing, in a heartbeat.

    seq, epoch: where in which stream. is_reset: it begins with `AllBlocksCleared`, and has all that is cached; where
    that is much, it may go on in the next ones.
    """

    seq: int
    epoch: str
    is_reset: bool
    events: list[Event]


def watch_request(after: WatchedEvents | None, snapshot: bool) -> pb.WatchEventsRequest:
    """Return what asks for the events behind ``after``, or from now on."""
    if after is None:
        return pb.WatchEventsRequest(snapshot=snapshot)
    if not isinstance(after, WatchedEvents):
        raise InvalidArgument(f"after is what the watch gave last, not {shown(after)}")
    return pb.WatchEventsRequest(after_seq=after.seq, epoch=after.epoch)


class Assembly:
    """Puts the pieces of a batch together."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._is_reset = False

    def read(self, message: pb.WatchEventsResponse) -> WatchedEvents | None:
        """Take a message; return the batch that it ends, if it ends one."""
        if message.is_reset:
            self._is_reset = True
            self._events.append(AllBlocksCleared())
        self._events += map(_read_event, message.events)
        if message.is_partial:
            return None
        batch = WatchedEvents(message.seq, message.epoch, self._is_reset, self._events)
        self._events, self._is_reset = [], False
        return batch


def _read_event(said: pb.BlockEvent) -> Event:
    kind = said.WhichOneof("event")
    if kind == "stored":
        stored = said.stored
        parent = stored.parent_hash if stored.HasField("parent_hash") else None
        return BlockStored(tuple(stored.namespace), parent, list(stored.block_hashes), stored.tokens)
    return BlockRemoved(list(said.removed.block_hashes)) if kind == "removed" else AllBlocksCleared()


class _Silence:
    """Ends a call of which nothing is heard for ``timeout_s``, or 3 s; as a context manager.

    A heartbeat comes each second.
    """

    def __init__(self, call: Any, timeout_s: float) -> None:
        self.is_broken = False
        self._limit_s = silence_s(timeout_s)
        self._call = call
        self._waiting_since: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="radix-cache watch", daemon=True)

    def waits(self) -> None:
        """The caller waits for a message from now on."""
        self._waiting_since = time.monotonic()

    def heard(self) -> None:
        """A message is there; what the caller does with it may take long."""
        self._waiting_since = None

    def _watch(self) -> None:
        left_s = self._limit_s
        while not self._ended.wait(left_s):
            now, since = time.monotonic(), self._waiting_since
            left_s = self._limit_s if since is None else since + self._limit_s - now
            if left_s <= 0:
                self.is_broken = True
                self._call.cancel()
                return

    def __enter__(self) -> _Silence:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._call.cancel()
        self._thread.join()

    def meaning(self, error: grpc.RpcError) -> RadixCacheError:
        """Return the library's error for what ended the call."""
        return too_quiet(self._limit_s) if self.is_broken else from_call_error(error)


def silence_s(timeout_s: float) -> float:
    """Return how long a stream may be silent for a client with this timeout."""
    return max(timeout_s, _LEAST_SILENCE_S)


def too_quiet(limit_s: float) -> DeadlineExceeded:
    """Return the error of a stream that was silent for too long."""
    return DeadlineExceeded(f"neither an event nor a heartbeat for {limit_s:g} s")


def watched(call: Any, timeout_s: float) -> Iterator[WatchedEvents]:
    """Yield the batches of a call, and end it with the generator."""
    assembly = Assembly()
    with _Silence(call, timeout_s) as silence:
        silence.waits()
        try:
            for message in call:
                silence.heard()
                batch = assembly.read(message)
                if batch is not None:
                    yield batch
                silence.waits()
        except grpc.RpcError as error:
            raise silence.meaning(error) from None
