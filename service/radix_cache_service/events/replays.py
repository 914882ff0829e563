"""The ZeroMQ port that sends again what was missed.

A peer asks by the first number that it has not. The answer is messages as they were published, each after an empty
frame, and one with the number -1 at the end. What is no longer kept is answered with one batch of all that is cached,
under the newest number.

A peer has one answer at a time. What it asks for while it has not taken that one waits, and several requests that wait
are one: from the lowest number on. So a peer that asks and does not read costs one answer, whatever it asks for.
"""

from __future__ import annotations

import threading
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

import zmq

from radix_cache_service.events.batches import EventBatch
from radix_cache_service.events.stream import EventStream

__all__ = ["Replays", "send_batch"]

_POLL_MS = 50
_ANSWER_S = 30.0
_MOST_AT_ONCE = 1000
_END = (-1).to_bytes(8, "big", signed=True)


class Replays:
    """Answers what comes in at ``socket``, a ROUTER, in a thread of its own."""

    def __init__(self, stream: EventStream, socket: zmq.Socket[bytes], topic: bytes) -> None:
        self._stream = stream
        self._socket = socket
        self._socket.setsockopt(zmq.SNDHWM, 0)  # an answer always fits, and there is one of each peer
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who has gone is noticed
        self._topic = topic
        self._asked: dict[bytes, int] = {}  # by peer: from which number on
        self._sent: dict[bytes, zmq.MessageTracker] = {}  # by peer: whether its answer's end has left
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="radix-cache event replay", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more. The stream still runs: else an answer that is under way is waited for in vain."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if self._socket.poll(_POLL_MS):
                self._take()
            self._answer()

    def _take(self) -> None:
        """Note what is asked."""
        with suppress(zmq.Again):
            for _ in range(_MOST_AT_ONCE):
                peer, *request = self._socket.recv_multipart(zmq.NOBLOCK)
                if len(request) == 2 and len(request[1]) == 8:
                    start_seq = int.from_bytes(request[1], "big")
                    self._asked[peer] = min(start_seq, self._asked.get(peer, start_seq))

    def _answer(self) -> None:
        """Answer those who have taken what they were sent before."""
        self._sent = {peer: end for peer, end in self._sent.items() if not end.done}
        ready = [peer for peer in self._asked if peer not in self._sent]
        answers = {peer: self._stream.replay(self._asked.pop(peer)) for peer in ready}
        for peer, answer in answers.items():
            with suppress(FutureTimeout, zmq.ZMQError):  # it has gone, or asks again
                self._send(peer, answer.result(_ANSWER_S))

    def _send(self, peer: bytes, batches: list[EventBatch]) -> None:
        end = zmq.Frame(b"", track=True, copy=False)  # made first: the end goes out right after the rest
        for batch in batches:
            self._socket.send_multipart([peer, b""], zmq.SNDMORE)
            send_batch(self._socket, self._topic, batch)
        self._socket.send_multipart([peer, b"", b"", _END], zmq.SNDMORE)
        self._socket.send(end, copy=False)
        self._sent[peer] = end.tracker


def send_batch(socket: zmq.Socket[bytes], topic: bytes, batch: EventBatch) -> None:
    """Send the frames of a batch: by themselves, since `send_multipart` looks at each one twice."""
    socket.send(topic, zmq.SNDMORE)
    socket.send(batch.seq.to_bytes(8, "big"), zmq.SNDMORE)
    socket.send(batch.payload, 0, copy=len(batch.payload) < zmq.COPY_THRESHOLD)
