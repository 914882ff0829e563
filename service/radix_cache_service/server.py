"""A server's life: bind, say that it serves, drain, end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from radix_cache import settle_gc
from radix_cache_service.access.gate import Gate
from radix_cache_service.binding import Binder, BindError, server_options
from radix_cache_service.config import ServerConfig
from radix_cache_service.events.settings import replay_address_of
from radix_cache_service.health import Health
from radix_cache_service.intake import Registry
from radix_cache_service.owner import end_with_owner
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc
from radix_cache_service.recording import open_recording
from radix_cache_service.servicer import Servicer
from radix_cache_service.symbols import Symbols
from radix_cache_service.telemetry.logs import log_loop_error, set_up_logging
from radix_cache_service.telemetry.service import Telemetry

__all__ = ["SERVICE_NAME", "BindError", "Server", "serve"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PrefixCacheService"].full_name

_log = logging.getLogger(__name__)

_NUM_YOUNG = 5000  # objects that wake the collector, and not 700 or 2,000: most are gone by then by themselves


class Server:
    """A server on the running event loop.

    addresses: what it listens on once started, with the real ports.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.servicer = Servicer(config)
        self._health = Health(SERVICE_NAME, self.servicer.streams)
        guard, metrics = self.servicer.runner.guard, self.servicer.metrics
        gates = () if guard is None else (Gate(guard, metrics.count),)
        self._server = grpc.aio.server(interceptors=gates, options=server_options(config.max_message_bytes))
        self._binder = Binder(self._server, config.make_certificates(), config.uds_mode)
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
        """Bind every address and serve. Raises `BindError` that names the address, and `RecordError`, with nothing left
        bound.
        """
        await self._health.start()
        try:
            self._start_telemetry()
            self._start_events()
            self.addresses = [self._binder.bind(address) for address in self._config.listen]
            self.servicer.runner.recording = open_recording(self._config, self.servicer.cache)
            await self._server.start()
        except BaseException:
            await self._server.stop(None)
            await asyncio.to_thread(self.servicer.events.close)
            await self.servicer.runner.close()
            await self._telemetry.close()
            self._binder.unlock()
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
        self._binder.unlock()
        _log.info("ended")


def serve(config: ServerConfig) -> None:
    """Run a server until SIGTERM, SIGINT or SIGHUP. Prints where it listens once it serves. Raises `BindError`,
    `RecordError`.
    """
    set_up_logging(config.log_format, config.log_level)
    gc.set_threshold(_NUM_YOUNG)
    asyncio.run(_serve(config))


async def _serve(config: ServerConfig) -> None:
    server = Server(config)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(name, ended.set)
    loop.set_exception_handler(log_loop_error)
    if config.pool is not None:
        config.pool.check_owner()
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
