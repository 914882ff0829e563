"""The events of a server, in one order and numbered, for whoever wants them: over ZeroMQ, over gRPC.

A thread of its own does all that costs anything: it makes events of the cache's changes, numbers and encodes them, and
keeps the latest. A call to the cache only leaves its changes in a queue, which never blocks it. The queue is bounded:
when it is full, it is emptied, and what is published next is the whole tree. So nobody who reads on stays behind.

What comes first after a start is the whole tree as well, and numbers start from the clock, or higher where a state
directory says so: whoever knew an earlier process of this server sees higher numbers, and what is there now.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from radix_cache import PrefixCache, settle_gc
from radix_cache.events import AllBlocksCleared, BlockHashes, Change, Event
from radix_cache_service.events.batches import EventBatch, KeptBatches, num_bytes_of
from radix_cache_service.events.turns import Turns
from radix_cache_service.state.numbers import Numbers

__all__ = ["EventFigures", "EventStream"]

T = TypeVar("T")

HEARTBEAT_S = 1.0
_PAUSE_S = 0.03  # calls of this time are looked at together: each change of threads costs as much as some of them
_BURST = 64  # calls whose batches are made, then sent
_PIECE = 8  # nodes of the tree

_log = logging.getLogger(__name__)


Sink: TypeAlias = Callable[[EventBatch], object]
Encode: TypeAlias = Callable[[list[Event], Callable[[], object] | None], bytes]
Cut: TypeAlias = Callable[[list[Event]], Iterable[list[Event]]]


@dataclass(frozen=True, slots=True)
class EventFigures:
    """Batches published and queued, calls whose changes were dropped, and what was sent again."""

    num_batches: int = 0
    num_queued: int = 0
    num_dropped: int = 0
    num_replays: int = 0
    num_snapshots: int = 0
    num_watchers: int = 0


class EventStream:
    """The events of ``cache``, which nobody else may listen to. epoch: of this stream, random.

    max_queued: calls whose changes may wait. num_kept: batches that can be asked for again. encode: makes a payload of
    a batch's events, once; where these are many, it gets what to call now and then. cut: divides what is much into
    several batches; None: a call is one, whatever it changed. clock: seconds, for heartbeats. numbers: of the batches.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_queued: int = 8192,
        num_kept: int = 8192,
        encode: Encode | None = None,
        cut: Cut | None = None,
        clock: Callable[[], float] = time.monotonic,
        numbers: Numbers | None = None,
    ) -> None:
        self.epoch = os.urandom(8).hex()
        self._numbers = numbers or Numbers()
        self.last_seq = self._numbers.start
        self._cache = cache
        said = cache.describe()
        self._hashes = BlockHashes(said.num_blocks, said.block_size)
        self._encode = encode
        self._clock = clock
        self._cut = cut or (lambda events: (events,))
        self._queue: deque[list[Change]] = deque()
        self._max_queued = max_queued
        self._is_lost = True  # nothing is known of the cache yet
        self._requests: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._kept = KeptBatches(num_kept)
        self._newest_snapshot: EventBatch | None = None  # until the next batch: those who ask together share it
        self._sinks: list[Sink] = []
        self._woken = threading.Event()
        self._is_closed = False
        self._turns = Turns()
        self._num_batches = self._num_dropped = self._num_replays = self._num_snapshots = 0
        self._thread = threading.Thread(target=self._run, name="radix-cache events", daemon=True)

    def start(self) -> None:
        """Begin to listen and to publish."""
        self._cache.subscribe(self._listen)
        self._thread.start()

    def close(self) -> None:
        """Publish what is queued, and end."""
        self._is_closed = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        self._cache.unsubscribe()

    def figures(self) -> EventFigures:
        """Return the counters of now. O(1)."""
        return EventFigures(
            num_batches=self._num_batches,
            num_queued=len(self._queue),
            num_dropped=self._num_dropped,
            num_replays=self._num_replays,
            num_snapshots=self._num_snapshots,
            num_watchers=len(self._sinks),
        )

    def replay(self, start_seq: int) -> Future[list[EventBatch]]:
        """Ask for what was published from ``start_seq`` on: as it was, or one batch that begins from nothing.

        The latter has the number of the newest batch: what is published next goes on from there.
        """
        return self._ask(lambda: self._again(start_seq))

    def join(self, sink: Sink, start_seq: int | None = None, epoch: str = "") -> Future[list[EventBatch]]:
        """Let ``sink`` have, in the stream's thread, all that is published from now on.

        With ``start_seq``, the answer is what came from there on until now, as `replay` has it; of another epoch than
        this stream's, it begins from nothing.
        """

        def join() -> list[EventBatch]:
            missed = [] if start_seq is None else self._again(start_seq if epoch in {"", self.epoch} else -1)
            self._sinks.append(sink)
            return missed

        return self._ask(join)

    def leave(self, sink: Sink) -> None:
        """Let a sink have no more."""
        self._ask(lambda: self._sinks.remove(sink))

    def _ask(self, request: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._requests.append((request, future))
        self._woken.set()
        return future

    # In the calls' threads, under the lock of the cache.

    def _listen(self, changes: list[Change]) -> None:
        if len(self._queue) >= self._max_queued:
            self._is_lost = True  # before the queue is emptied: what comes after is looked at with this known
            self._num_dropped += len(self._queue)
            self._queue.clear()
        self._queue.append(changes)
        if not self._woken.is_set():
            self._woken.set()

    # In the stream's thread.

    def _run(self) -> None:
        self._answer_all()  # who asked before the start misses nothing
        due = self._clock()
        while not self._is_closed:
            self._woken.wait(max(due - self._clock(), 0))
            time.sleep(_PAUSE_S)
            self._woken.clear()
            is_due = self._clock() >= due
            if is_due:
                due = self._clock() + HEARTBEAT_S
            self._turn(is_due=is_due)
        self._turn(is_due=False)

    def _turn(self, *, is_due: bool) -> None:
        try:
            self._catch_up()
            self._answer_all()
            if is_due:
                self._publish([])
        except Exception as error:  # noqa: BLE001 - the next turn begins anew
            _log.error("events could not be published: %s", type(error).__name__)
            self._is_lost = True

    def _catch_up(self) -> None:
        """Publish what is queued by now."""
        for at in range(0, len(self._queue), _BURST):
            if at:
                self._turns.rest()
            self._publish_burst()
        if self._is_lost:
            self._begin_anew()

    def _publish_burst(self) -> None:
        """Publish up to so many calls: sending lets go of the interpreter, so it comes after all else."""
        burst: list[EventBatch] = []
        try:
            for _ in range(min(len(self._queue), _BURST)):
                changes = self._next()
                if changes is None:
                    break
                if not self._is_lost:  # else they are part of what is published anew
                    burst.extend(self._made(self._hashes.events(changes)))
        finally:
            self._send(burst)

    def _next(self) -> list[Change] | None:
        try:
            return self._queue.popleft()
        except IndexError:  # it was emptied meanwhile
            return None

    def _begin_anew(self) -> list[EventBatch]:
        """Publish the whole tree."""
        said = self._cache.describe()
        self._hashes = BlockHashes(said.num_blocks, said.block_size)
        grafts = self._list(self._forget_queue)
        return self._publish(self._whole(grafts, self._hashes.events), is_reset=True)

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._is_lost = False

    def _publish(self, events: list[Event], *, is_reset: bool = False) -> list[EventBatch]:
        batches: list[EventBatch] = []
        for batch in self._made(events, is_reset=is_reset):
            self._send([batch])
            batches.append(batch)
        return batches

    def _made(self, events: list[Event], *, is_reset: bool = False) -> Iterator[EventBatch]:
        """Yield the next batches, numbered and kept: of those that are kept none is missing."""
        for at, piece in enumerate(self._cut(events)):
            batch = self._batch(self._numbers.after(self.last_seq), piece, is_reset and at == 0)
            self.last_seq = batch.seq
            self._num_batches += 1
            self._newest_snapshot = None
            self._kept.add(batch)
            yield batch

    def _send(self, batches: list[EventBatch]) -> None:
        for batch in batches:
            for sink in self._sinks:
                sink(batch)

    def _answer_all(self) -> None:
        while self._requests:
            request, future = self._requests.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(request())
                except Exception as error:  # noqa: BLE001 - whoever asked is told
                    self._is_lost = True  # it may have taken what is queued
                    future.set_exception(error)

    def _again(self, start_seq: int) -> list[EventBatch]:
        self._num_replays += 1
        missed = self._kept.since(start_seq, self.last_seq)
        return self._snapshot() if missed is None else missed

    def _snapshot(self) -> list[EventBatch]:
        """Return all that is cached, under the number of the newest batch."""
        self._num_snapshots += 1
        if self._newest_snapshot is not None:
            return [self._newest_snapshot]
        queued: list[list[Change]] = []

        def take() -> None:
            queued.extend(self._queue)
            self._queue.clear()

        grafts = self._list(take)
        if self._is_lost:
            return self._begin_anew()
        for changes in queued:
            self._publish(self._hashes.events(changes))
        self._newest_snapshot = self._batch(self.last_seq, self._whole(grafts, self._hashes.known), is_reset=True)
        return [self._newest_snapshot]

    def _list(self, stamp: Callable[[], object]) -> list[Change]:
        settle_gc()  # else a full collection may come while the lock is held
        return self._cache.snapshot(stamp)

    def _whole(self, grafts: list[Change], events_of: Callable[[list[Change]], list[Event]]) -> list[Event]:
        """Return the events that begin from nothing, made piece by piece."""
        events: list[Event] = [AllBlocksCleared()]
        for at in range(0, len(grafts), _PIECE):
            events += events_of(grafts[at : at + _PIECE])
            self._turns.after_a_piece()
        return events

    def _batch(self, seq: int, events: list[Event], is_reset: bool) -> EventBatch:
        rest = self._turns.rest if is_reset else None
        payload = b"" if self._encode is None else self._encode(events, rest)
        return EventBatch(seq, events, is_reset, payload, num_bytes_of(events, payload))
