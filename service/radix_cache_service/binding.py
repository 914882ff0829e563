"""The addresses of a server, bound and nobody else's, and what gRPC is told of its connections.

Two servers must never share an address: each would have half of the traffic and half of the cache. So ports are bound
without SO_REUSEPORT, and a unix socket is guarded by a lock on a file beside it, which dies with its holder; whoever
holds the lock may take over a socket that a killed server left behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO, TYPE_CHECKING

import grpc

from radix_cache.errors import RadixCacheError

if TYPE_CHECKING:
    from radix_cache_service.access.certificates import Certificates

__all__ = ["BindError", "Binder", "server_options"]


class BindError(RadixCacheError, OSError):
    """An address cannot be listened on: another server has it, or it may not be used."""


class Binder:
    """Binds what ``server`` listens on. certificates: of TCP ports that speak TLS. uds_mode: of unix sockets."""

    def __init__(self, server: grpc.aio.Server, certificates: Certificates | None, uds_mode: int) -> None:
        self._server = server
        self._certificates = certificates
        self._uds_mode = uds_mode
        self._locks: list[tuple[Path, IO[str]]] = []

    def bind(self, address: str) -> str:
        """Bind an address; return it with its real port. Raises `BindError` that names it."""
        if not address.startswith("unix:"):
            return self._bind_port(address)
        path = Path(address.removeprefix("unix:"))
        if _is_heard(path):  # somebody may have removed the lock
            raise BindError(f"cannot listen on {address}: another server is using it")
        self._lock(path)
        if path.is_socket():
            path.unlink()  # of a server that is dead, or it would hold the lock
        elif path.exists():
            raise BindError(f"cannot listen on {address}: there is something else than a socket")
        before = os.umask(0o777 & ~self._uds_mode)  # nobody may connect before the mode is set
        try:
            self._add(address, address)
        finally:
            os.umask(before)
        path.chmod(self._uds_mode)
        return address

    def _bind_port(self, address: str) -> str:
        """Bind every address that the host has; grpc would be content with one of them, and share the name."""
        host, _, port = address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise BindError(f"cannot listen on {address}: {error.strerror}") from error
        for number in dict.fromkeys(str(place[0]) for *_, place in found):
            numeric = f"[{number}]" if ":" in number else number
            port = str(self._add(f"{numeric}:{port}", address))
        return f"{host}:{port}"

    def _add(self, place: str, address: str) -> int:
        try:
            if self._certificates is None or place.startswith("unix:"):
                port = self._server.add_insecure_port(place)
            else:
                port = self._server.add_secure_port(place, self._certificates.credentials())
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: {_why_not(place)}") from error
        if not port:
            raise BindError(f"cannot listen on {address}")
        return port

    def _lock(self, path: Path) -> None:
        """Lock ``<path>.lock`` for as long as this process lives."""
        guard = path.with_name(path.name + ".lock")
        try:
            file = guard.open("a")
            self._locks.append((path, file))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._locks.pop()[1].close()
            raise BindError(f"cannot listen on unix:{path}: another server is using it") from error
        except OSError as error:
            raise BindError(f"cannot listen on unix:{path}: {error.strerror} ({guard})") from error

    def unlock(self) -> None:
        """Let go of the unix sockets. The server has ended."""
        for path, file in self._locks:
            if path.is_socket():
                path.unlink()
            file.close()
        self._locks.clear()


def _why_not(place: str) -> str:
    """Return why nothing can be bound to a place, which gRPC does not tell."""
    if place.startswith("unix:"):
        return "no socket can be made there"
    host, _, port = place.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host.strip("[]"), int(port)))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return os.strerror(error.errno or 0)
    return "another server is using it"


def _is_heard(path: Path) -> bool:
    """Tell whether a process listens at a unix socket."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except BlockingIOError:
            return True  # it has more to do than to answer
        except OSError:
            return False
        return True


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return grpc's options for a server whose messages have so many bytes at most."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # While more than 1,000 calls have not reached their handlers, gRPC would cancel some: a burst has as many.
        ("grpc.server.max_pending_requests", 16_384),
        ("grpc.server.max_pending_requests_hard_limit", 32_768),
        # Clients may ping an idle connection every 10 s, and one with a call every half second, without being cut off.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # A peer that vanished without a word is noticed within a minute.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
