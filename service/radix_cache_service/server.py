"""A server's life: bind, say that it serves, drain, end.

Two servers must never share an address: each would have half of the traffic and half of the cache. So ports are bound
without SO_REUSEPORT, and a unix socket is guarded by a lock on a file beside it, which dies with its holder; whoever
holds the lock may take over a socket that a killed server left behind.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
from pathlib import Path
from typing import IO, Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from radix_cache import settle_gc
from radix_cache.errors import RadixCacheError
from radix_cache_service.access.gate import Gate
from radix_cache_service.config import ServerConfig
from radix_cache_service.events.settings import replay_address_of
from radix_cache_service.health import Health
from radix_cache_service.intake import Registry
from radix_cache_service.owner import check_owner, end_with_owner
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc
from radix_cache_service.servicer import Servicer
from radix_cache_service.symbols import Symbols
from radix_cache_service.telemetry.logs import log_loop_error, set_up_logging
from radix_cache_service.telemetry.service import Telemetry

__all__ = ["SERVICE_NAME", "BindError", "Server", "serve"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PrefixCacheService"].full_name

_log = logging.getLogger(__name__)


class BindError(RadixCacheError, OSError):
    """An address cannot be listened on: another server has it, or it may not be used."""


class Server:
    """A server on the running event loop.

    addresses: what it listens on once started, with the real ports.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._locks: list[tuple[Path, IO[str]]] = []
        self.servicer = Servicer(config)
        self._health = Health(SERVICE_NAME, self.servicer.streams)
        self._certificates = config.make_certificates()
        guard, metrics = self.servicer.runner.guard, self.servicer.metrics
        gates = () if guard is None else (Gate(guard, metrics.count),)
        self._server = grpc.aio.server(interceptors=gates, options=_options(config))
        ours: Any = Registry(self._server, metrics.count)
        others: Any = Registry(self._server)
        pb_grpc.add_PrefixCacheServiceServicer_to_server(self.servicer, ours)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, others)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflected = reflection.aio.ReflectionServicer(names, pool=Symbols())
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, others)  # type: ignore[no-untyped-call]
        self._telemetry = Telemetry(config, self.servicer)
        self.addresses: list[str] = []

    @property
    def metrics_address(self) -> str | None:
        """Where it is scraped, once started; None unless the settings ask for it."""
        return self._telemetry.metrics_address

    async def start(self) -> None:
        """Bind every address and serve. Raises `BindError` that names the address, with nothing left bound."""
        await self._health.start()
        try:
            self._start_telemetry()
            self._start_events()
            self.addresses = [self._bind(address) for address in self._config.listen]
            await self._server.start()
        except BaseException:
            await self._server.stop(None)
            await asyncio.to_thread(self.servicer.events.close)
            await self.servicer.runner.close()
            await self._telemetry.close()
            self._unlock()
            raise
        self._expiry = asyncio.create_task(self.servicer.expire(min(self._config.lease_ttl_s / 4, 1.0)))
        settle_gc()
        await self._health.ready()
        self._telemetry.is_serving = True
        _log.info("serving", extra={"addresses": self.addresses, "metrics": self.metrics_address})

    def _start_telemetry(self) -> None:
        try:
            self._telemetry.start()
        except OSError as error:
            raise BindError(f"cannot listen on {self._config.metrics_listen}: {error.strerror}") from error

    def _start_events(self) -> None:
        try:
            self.servicer.events.start()
        except OSError as error:
            places = f"{self._config.events_listen} and {replay_address_of(self._config)}"
            raise BindError(f"cannot publish events at {places}: {error.strerror}") from error

    def _bind(self, address: str) -> str:
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
        before = os.umask(0o777 & ~self._config.uds_mode)  # nobody may connect before the mode is set
        try:
            self._add(address, address)
        finally:
            os.umask(before)
        path.chmod(self._config.uds_mode)
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
            taken = "another server is using it, or it is no address of this machine"
            raise BindError(f"cannot listen on {address}: {taken}") from error
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

    def _unlock(self) -> None:
        for path, file in self._locks:
            if path.is_socket():
                path.unlink()
            file.close()
        self._locks.clear()

    async def stop(self) -> None:
        """Say NOT_SERVING, wait for that to be seen, end the streams, let calls in flight finish, and end."""
        delay_s, grace_s = self._config.drain_delay_s, self._config.grace_s
        _log.info("draining: not ready, still serving", extra={"drain_delay_s": delay_s})
        self._telemetry.is_serving = False
        await self._health.unready()
        await asyncio.sleep(delay_s)
        left = {"streams": len(self.servicer.streams), "waiting_calls": len(self.servicer.runner.line)}
        _log.info("draining: streams and waiting calls end, calls in flight finish", extra={**left, "grace_s": grace_s})
        self.servicer.drain()
        await self._server.stop(grace_s)
        self._expiry.cancel()
        await asyncio.to_thread(self.servicer.events.close)
        await self.servicer.runner.close()
        await self._telemetry.close()
        self._unlock()
        _log.info("ended")


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


def serve(config: ServerConfig) -> None:
    """Run a server until SIGTERM, SIGINT or SIGHUP. Prints where it listens once it serves. Raises `BindError`."""
    set_up_logging(config.log_format, config.log_level)
    asyncio.run(_serve(config))


async def _serve(config: ServerConfig) -> None:
    server = Server(config)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(name, ended.set)
    loop.set_exception_handler(log_loop_error)
    if config.pool is not None:
        check_owner(config.pool)
    await server.start()
    if server.metrics_address is not None:
        print(f"metrics on {server.metrics_address}", flush=True)  # noqa: T201 - see below
    if server.servicer.events.addresses:
        print("events on {}, replay on {}".format(*server.servicer.events.addresses), flush=True)  # noqa: T201 - see below
    for address in server.addresses:
        print(f"listening on {address}", flush=True)  # noqa: T201 - the one line that a starter waits for
    watch = None if config.pool is None else asyncio.create_task(end_with_owner(config.pool, ended))
    await ended.wait()
    await server.stop()
    if watch is not None and watch.done():
        await watch


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
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
