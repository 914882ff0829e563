"""How a client reaches its server, whatever it asks there: where, how long, whom to trust, what to show."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from radix_cache.errors import InvalidArgument, ServiceUnavailable
from radix_cache.operations import check_count, check_seconds
from radix_cache.tokens import shown
from radix_cache_service.access.addresses import is_local
from radix_cache_service.access.tokens import is_token
from radix_cache_service.client.tls import Tls

__all__ = ["MAX_MESSAGE_BYTES", "RECONNECT_S", "Connection", "authorization"]

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_BACKOFF_MS = 1000
RECONNECT_S = 1.5 * _MAX_BACKOFF_MS / 1000  # a server that is back is connected to within this time
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_inherited: list[Any] = []  # channels of the parent process: closing one here could hang, so they are kept


class Connection:
    """A client's settings, and its channel once there is one. `Remote` says what the arguments are.

    Nothing is sent before the first call. A forked child gets a channel of its own.
    """

    def __init__(
        self,
        target: str,
        timeout_s: float,
        tls: Tls | None,
        channel_credentials: grpc.ChannelCredentials | None,
        token: str | Callable[[], str] | None,
        allow_plaintext_token: bool,
        max_message_bytes: int,
    ) -> None:
        if not isinstance(target, str) or not target:
            raise InvalidArgument(f"target is an address, as in 127.0.0.1:50051, not {shown(target)}")
        self.target = target
        self.timeout_s = check_seconds(timeout_s, "timeout_s")
        if tls is not None and channel_credentials is not None:
            raise InvalidArgument("tls and channel_credentials are two ways to say the same: give one of them")
        self._credentials = channel_credentials if tls is None else tls.credentials()
        if token is not None and self._credentials is None and not allow_plaintext_token and not is_local(target):
            raise InvalidArgument(f"the token would go to {target} in the clear: use tls, or set allow_plaintext_token")
        self._token = token
        if token is not None and not callable(token):
            authorization(token)  # checks it
        self._max_message_bytes = check_count(max_message_bytes, "max_message_bytes", 1)
        self._is_closed = False
        self._channel: Any = None
        self._reset()
        _connections.add(self)

    def _reset(self) -> None:
        """Begin as a client that has done nothing yet."""
        if self._channel is not None:
            _inherited.append(self._channel)
        self._channel = self._stub = None

    def _open(self, library: Any, make_stub: Callable[[Any], Any]) -> Any:
        """Return the stub, on a channel that is opened now if there is none. library: ``grpc`` or ``grpc.aio``."""
        self._check_open()
        if self._stub is None:
            if self._credentials is None:
                self._channel = library.insecure_channel(self.target, self._options)
            else:
                self._channel = library.secure_channel(self.target, self._credentials, self._options)
            self._stub = make_stub(self._channel)
        return self._stub

    @property
    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_send_message_length", self._max_message_bytes),
            ("grpc.max_receive_message_length", self._max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", _MAX_BACKOFF_MS),
            ("grpc.use_local_subchannel_pool", 1),  # a connection of one's own
            ("grpc.enable_http_proxy", 0),
        ]

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...] | None:
        """What each call says of its caller."""
        if self._token is None:
            return None
        return authorization(self._token() if callable(self._token) else self._token)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ServiceUnavailable(f"the client of {self.target} is closed")

    def _check_size(self, request: Message) -> None:
        num_bytes = request.ByteSize()
        if num_bytes > self._max_message_bytes:
            raise InvalidArgument(f"a message has at most {self._max_message_bytes} bytes here, not {num_bytes}")


def authorization(token: str) -> tuple[tuple[str, str], ...]:
    """Return what a call says of its caller. Raises `InvalidArgument` for what is no token, and does not quote it."""
    if not is_token(token):
        raise InvalidArgument("token has 16 to 512 letters, digits and -._~+/ (=, at the end)")
    return (("authorization", f"Bearer {token}"),)


def _after_fork() -> None:
    for connection in list(_connections):
        connection._reset()


os.register_at_fork(after_in_child=_after_fork)
