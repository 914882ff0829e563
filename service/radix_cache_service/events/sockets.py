"""The ZeroMQ sockets of the events: one publishes, one sends again what was missed.

A message is three frames: topic, sequence number (8 bytes, big-endian), payload. A subscriber that does not read loses
messages, which it sees by the numbers, and costs nothing more. It asks for what it missed by the first number; the
answer is messages, each after an empty frame, and one with the number -1 at the end. What is no longer kept is answered
with one batch of all that is cached, under the newest number.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from socket import SOCK_STREAM, getaddrinfo

import zmq
from zmq.auth.thread import ThreadAuthenticator

from radix_cache_service.events.batches import EventBatch
from radix_cache_service.events.curve import Curve, Readers
from radix_cache_service.events.stream import EventStream

__all__ = ["EventSockets"]

_POLL_MS = 100
_ANSWER_S = 30.0
_END = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger(__name__)


class EventSockets:
    """Publishes ``stream`` at ``address``, and answers at ``replay_address``; both ``host:port``, port 0 for any.

    Raises `OSError` for an address that can't be listened on. addresses: of both, with the real ports. num_waiting: the
    most messages that wait for one subscriber. curve: whose keys to take; None: everything is in the clear.
    """

    def __init__(
        self,
        stream: EventStream,
        address: str,
        replay_address: str,
        topic: str = "kv",
        num_waiting: int = 8192,
        curve: Curve | None = None,
    ) -> None:
        self._stream = stream
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._curve = curve
        self._authenticator = ThreadAuthenticator(self._context)
        try:
            if curve is not None and curve.readers_dir is not None:
                self._authenticator.configure_curve_callback(credentials_provider=Readers(curve.readers_dir))
                self._authenticator.start()
            self._publisher = self._socket(zmq.PUB, num_waiting)
            self._replayer = self._socket(zmq.ROUTER, num_waiting + 2)  # an answer fits, with its end
            self._replayer.setsockopt(zmq.ROUTER_MANDATORY, 1)  # one that doesn't is noticed
            self.addresses = [_bind(self._publisher, address), _bind(self._replayer, replay_address)]
        except BaseException:
            self._end()
            raise
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, name="radix-cache event replay", daemon=True)

    def _socket(self, kind: int, num_waiting: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, num_waiting)
        if self._curve is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret)
        return socket

    def start(self) -> None:
        """Begin; the stream need not have begun."""
        self._stream.join(self._send)
        self._thread.start()

    def close(self) -> None:
        """Close both. The stream has ended."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end()

    def _end(self) -> None:
        self._authenticator.stop()
        self._context.destroy(linger=0)

    def _send(self, batch: EventBatch) -> None:
        """Publish, in the stream's thread."""
        self._send_on(self._publisher, batch)

    def _send_on(self, socket: zmq.Socket[bytes], batch: EventBatch, flags: int = 0) -> None:
        """Send the frames of a batch: by themselves, since `send_multipart` looks at each one twice."""
        more = flags | zmq.SNDMORE
        socket.send(self._topic, more)
        socket.send(batch.seq.to_bytes(8, "big"), more)
        socket.send(batch.payload, flags, copy=len(batch.payload) < zmq.COPY_THRESHOLD)

    def _answer_all(self) -> None:
        while not self._is_closed.is_set():
            if self._replayer.poll(_POLL_MS):
                peer, *request = self._replayer.recv_multipart()
                if len(request) == 2 and len(request[1]) == 8:
                    with suppress(FutureTimeout, zmq.ZMQError):  # it asks again
                        self._answer(peer, int.from_bytes(request[1], "big"))

    def _answer(self, peer: bytes, start_seq: int) -> None:
        for batch in self._stream.replay(start_seq).result(_ANSWER_S):
            self._replayer.send_multipart([peer, b""], zmq.NOBLOCK | zmq.SNDMORE)
            self._send_on(self._replayer, batch, zmq.NOBLOCK)
        self._replayer.send_multipart([peer, b"", b"", _END, b""], zmq.NOBLOCK)


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    host, _, port = address.rpartition(":")
    *_, place = getaddrinfo(host.strip("[]"), int(port), type=SOCK_STREAM)[0]
    is_v6 = ":" in str(place[0])
    socket.setsockopt(zmq.IPV6, int(is_v6))
    numeric = f"[{place[0]}]" if is_v6 else place[0]
    try:
        socket.bind(f"tcp://{numeric}:{port}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
