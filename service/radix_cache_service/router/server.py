"""A router's life: bind, find the nodes, say that it serves while one of them does, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from radix_cache_service.access.gate import Gate
from radix_cache_service.binding import Binder, BindError, server_options
from radix_cache_service.health import Health
from radix_cache_service.intake import Registry
from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.pb import router_pb2_grpc as pb_grpc
from radix_cache_service.router.config import RouterConfig
from radix_cache_service.router.servicer import RouterServicer
from radix_cache_service.streams import OpenStreams
from radix_cache_service.symbols import Symbols
from radix_cache_service.telemetry.logs import log_loop_error, set_up_logging

if TYPE_CHECKING:
    from radix_cache_service.telemetry.scrape import Scrapes

__all__ = ["RouterServer", "route"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["RouterService"].full_name
_TEND_S = 1.0
_MOST_STREAMS = 1024  # none but watches on its health, which do not count

_log = logging.getLogger(__name__)


class RouterServer:
    """A router on the running event loop. addresses: what it listens on once started, with the real ports.

    metrics_address: where it is scraped, once started; None unless the settings ask for it.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.addresses: list[str] = []
        self.metrics_address: str | None = None
        self.servicer = RouterServicer(config, self._changed)
        self._config = config
        self._streams = OpenStreams(_MOST_STREAMS)
        self._health = Health(SERVICE_NAME, self._streams)
        self._saying = asyncio.Lock()
        self._is_draining = False
        self._scrapes: Scrapes | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        guard, count = self.servicer.guard, self.servicer.metrics.count
        gates = () if guard is None else (Gate(guard, count),)
        self._server = grpc.aio.server(interceptors=gates, options=server_options(config.max_message_bytes))
        self._binder = Binder(self._server, config.make_certificates(), config.uds_mode)
        ours: Any = Registry(self._server, count)
        others: Any = Registry(self._server)
        pb_grpc.add_RouterServiceServicer_to_server(self.servicer, ours)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, others)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflected = reflection.aio.ReflectionServicer(names, pool=Symbols())
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, others)  # type: ignore[no-untyped-call]

    async def start(self) -> None:
        """Bind every address and serve, with all nodes asked once. Raises `BindError` that names the address."""
        await self._health.start()
        try:
            self._start_metrics()
            self.addresses = [self._binder.bind(address) for address in self._config.listen]
            await self._ask_nodes()
            await self._server.start()
        except BaseException:
            await self._server.stop(None)
            await self._close()
            raise
        await self._health.alive()
        self._changed()
        self._spawn(self._tend())
        _log.info("routing", extra={"addresses": self.addresses, "metrics": self.metrics_address})

    def _start_metrics(self) -> None:
        if self._config.metrics_listen is None:
            return
        from radix_cache_service.router.figures import families, take_figures  # noqa: PLC0415 - only where it is wanted
        from radix_cache_service.telemetry.scrape import Scrapes  # noqa: PLC0415 - see above

        try:
            self._scrapes = Scrapes(self._config.metrics_listen, lambda _: take_figures(self.servicer), families)
        except OSError as error:
            raise BindError(f"cannot listen on {self._config.metrics_listen}: {error.strerror}") from error
        self.metrics_address = self._scrapes.address

    async def _ask_nodes(self) -> None:
        """Hear of each node once, but of one that says nothing not for longer than a heartbeat."""
        nodes = [self.servicer.routing.fleet.add(name) for name in self._config.node_names()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.heartbeat_s):
                for node in nodes:
                    await node.was_asked.wait()

    def _changed(self) -> None:
        """A node has begun or ceased to serve, or the router."""
        self._spawn(self._say_health())

    async def _say_health(self) -> None:
        async with self._saying:  # what is said last is what holds last
            if self.servicer.routing.fleet.serving and not self._is_draining:
                await self._health.ready()
            else:
                await self._health.unready()

    def _spawn(self, doing: Any) -> None:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(_TEND_S)
            await self.servicer.tend()

    async def stop(self) -> None:
        """Say NOT_SERVING, wait for that to be seen, let calls in flight finish, and end."""
        _log.info("draining: not ready, still serving", extra={"drain_delay_s": self._config.drain_delay_s})
        self._is_draining = True
        await self._say_health()
        await asyncio.sleep(self._config.drain_delay_s)
        self._streams.end()
        await self._server.stop(self._config.grace_s)
        await self._close()
        _log.info("ended")

    async def _close(self) -> None:
        await self.servicer.routing.fleet.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._scrapes is not None:
            await asyncio.to_thread(self._scrapes.close)
        self._binder.unlock()


def route(config: RouterConfig) -> None:
    """Run a router until SIGTERM, SIGINT or SIGHUP. Prints where it listens once it serves. Raises `BindError`."""
    set_up_logging(config.log_format, config.log_level)
    asyncio.run(_route(config))


async def _route(config: RouterConfig) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(name, ended.set)
    loop.set_exception_handler(log_loop_error)
    server = RouterServer(config)
    await server.start()
    if server.metrics_address is not None:
        print(f"metrics on {server.metrics_address}", flush=True)  # noqa: T201 - see below
    for address in server.addresses:
        print(f"listening on {address}", flush=True)  # noqa: T201 - the one line that a starter waits for
    await ended.wait()
    await server.stop()
