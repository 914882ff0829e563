"""A mirror of the tree: who watches the events all the while must know, at rest, exactly what is cached.

It is a quick reader, resumes after each break where it left off, and says at once if an event cannot be: a block stored
twice or behind none, one removed that was not there, a number left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from typing import Any

import grpc

from radix_cache.tokens import unpack_tokens
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

from .memory import first_digest, next_digest
from .request import Violation

_LATE_S = 60.0


class Mirror(threading.Thread):
    """say: told of violations. num_events: seen so far. gone: digests of blocks removed since it was last cleared."""

    def __init__(self, address: str, block_size: int, say: Callable[[Violation], object]) -> None:
        super().__init__(name="mirror", daemon=True)
        self.num_events = 0
        self.gone: set[bytes] = set()
        self._address = address
        self._size = block_size
        self._say = say
        self._digests: dict[int, bytes] = {}  # by the events' own hashes
        self._epoch, self._seq = "", 0
        self._is_partial = False
        self._has_missed = False  # a server was killed: what it stored last, and removed soon after, nobody was told
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._call: Any = None

    def run(self) -> None:
        """Watch until stopped, through all breaks."""
        with grpc.insecure_channel(self._address, [("grpc.max_reconnect_backoff_ms", 200)]) as channel:
            stub = pb_grpc.PrefixCacheServiceStub(channel)
            while not self._ended.is_set():
                try:
                    self._watch(stub)
                except grpc.RpcError:
                    self._ended.wait(0.05)
                except Violation as violation:
                    self._say(violation)
                    return

    def _watch(self, stub: pb_grpc.PrefixCacheServiceStub) -> None:
        request = pb.WatchEventsRequest(after_seq=self._seq, epoch=self._epoch, snapshot=not self._seq)
        self._is_partial = False
        self._call = stub.WatchEvents(request)
        for message in self._call:
            with self._lock:
                self._take(message)

    def _take(self, message: pb.WatchEventsResponse) -> None:
        if message.is_reset:
            self._has_missed = True
            self.gone.update(self._digests.values())
            self._digests.clear()
        elif message.epoch != self._epoch or message.seq != self._seq + (not self._is_partial):
            raise Violation("events were left out", seq=message.seq, seq_before=self._seq, epoch=message.epoch)
        for event in message.events:
            getattr(self, "_" + event.WhichOneof("event"))(event)
        self.num_events += len(message.events)
        self._epoch, self._seq, self._is_partial = message.epoch, message.seq, message.is_partial

    def _stored(self, event: pb.BlockEvent) -> None:
        stored = event.stored
        if stored.HasField("parent_hash") and stored.parent_hash not in self._digests:
            raise Violation("a block is stored behind one that is not there", seq=self._seq)
        digest = self._digests[stored.parent_hash] if stored.HasField("parent_hash") else first_digest(stored.namespace)
        tokens = unpack_tokens(stored.tokens)
        for at, number in enumerate(stored.block_hashes):
            digest = next_digest(digest, tokens[at * self._size : (at + 1) * self._size])
            if number in self._digests:
                raise Violation("a block is stored twice", seq=self._seq)
            self._digests[number] = digest

    def _removed(self, event: pb.BlockEvent) -> None:
        for number in event.removed.block_hashes:
            if number not in self._digests:
                raise Violation("a block is removed that was not stored", seq=self._seq)
            self.gone.add(self._digests.pop(number))

    def _cleared(self, _: pb.BlockEvent) -> None:
        self.gone.update(self._digests.values())
        self._digests.clear()

    def compare(self, cached: Set[bytes], published: Sequence[bytes]) -> None:
        """Wait until the mirror shows just what is cached; what was ``published`` and is not must be known as gone,
        unless a server was killed meanwhile, since events leave a little later than answers.
        """
        deadline = time.monotonic() + _LATE_S
        while (shown := self._shown()) != cached:
            if time.monotonic() > deadline:
                facts = {"only_cached": len(cached - shown), "only_in_events": len(shown - cached), "seq": self._seq}
                raise Violation("the events do not tell what is cached", **facts)
            time.sleep(0.02)
        lost = [digest for digest in published if digest not in cached and digest not in self.gone]
        if lost and not self._has_missed:
            raise Violation("inserts were answered that no event tells of", num_blocks=len(lost))
        self.gone.clear()
        self._has_missed = False

    def _shown(self) -> Set[bytes]:
        with self._lock:
            return set(self._digests.values())

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._call is not None:
            self._call.cancel()
        if self.is_alive():
            self.join()
