"""The ZeroMQ sockets of the events: one publishes, one sends again what was missed.

A message is three frames: topic, sequence number (8 bytes, big-endian), payload. For a subscriber that does not read
``num_waiting`` messages wait, and it loses the others, which it sees by the numbers. `Replays` sends them again.
"""

from __future__ import annotations

from socket import SOCK_STREAM, getaddrinfo

import zmq
from zmq.auth.thread import ThreadAuthenticator

from radix_cache_service.events.batches import EventBatch
from radix_cache_service.events.curve import Curve, Readers
from radix_cache_service.events.replays import Replays, send_batch
from radix_cache_service.events.stream import EventStream

__all__ = ["EventSockets"]

_MAX_ASKED_BYTES = 4096  # of a frame: more than a handshake, a topic or a number takes


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
        num_waiting: int = 1024,
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
            self._publisher, replayer = self._socket(zmq.PUB), self._socket(zmq.ROUTER)
            self._publisher.setsockopt(zmq.SNDHWM, num_waiting)
            self._replays = Replays(stream, replayer, self._topic)
            self.addresses = [_bind(self._publisher, address), _bind(replayer, replay_address)]
        except BaseException:
            self._end()
            raise

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ASKED_BYTES)
        if self._curve is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret)
        return socket

    def start(self) -> None:
        """Begin; the stream need not have begun."""
        self._stream.join(self._send)
        self._replays.start()

    def close_replays(self) -> None:
        """Answer no more, while the stream still runs."""
        self._replays.close()

    def close(self) -> None:
        """Close both. The stream has ended."""
        self._replays.close()
        self._end()

    def _end(self) -> None:
        self._authenticator.stop()
        self._context.destroy(linger=0)

    def _send(self, batch: EventBatch) -> None:
        """Publish, in the stream's thread."""
        send_batch(self._publisher, self._topic, batch)


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
