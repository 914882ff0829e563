"""Prometheus metrics over HTTP, on a port of their own.

Each scrape is a thread. It asks the event loop for a copy of the counters, which costs the loop some ten microseconds,
and makes the text by itself. A scraper that is slow, wrong or gone is cut off and holds up nobody. If the loop does not
come to it, the scrape fails, and Prometheus says that the server is down.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from socketserver import TCPServer, ThreadingMixIn
from time import perf_counter
from typing import Any, Generic, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["Scrapes"]

F = TypeVar("F")

_ANSWER_S = 5.0  # for the loop to come to it
_SILENCE_S = 10.0  # of a scraper

_log = logging.getLogger(__name__)


class Scrapes:
    """Serves metrics at ``address``, ``host:port``. figures: called on the running event loop, with the loop's delay.

    families: makes metrics of them, off the loop. Raises `OSError` where it can't listen. address: with the real port.
    """

    def __init__(self, address: str, figures: Callable[[float], F], families: Callable[[F], Iterable[Metric]]) -> None:
        registry = CollectorRegistry()
        registry.register(_Reader(figures, families, asyncio.get_running_loop()))
        ProcessCollector(registry=registry)
        host, _, port = address.rpartition(":")
        self._server = _server(host, int(port))
        self._server.set_app(_guarded(make_wsgi_app(registry)))
        self.address = f"{host}:{self._server.server_address[1]}"
        serve = partial(self._server.serve_forever, poll_interval=0.2)  # how soon `close` is noticed
        threading.Thread(target=serve, name="radix-cache-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop listening; what is being answered is cut off when the process ends."""
        self._server.shutdown()
        self._server.server_close()


class _Reader(Collector, Generic[F]):
    """Reads the figures anew at each scrape."""

    def __init__(
        self,
        figures: Callable[[float], F],
        families: Callable[[F], Iterable[Metric]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._figures = figures
        self._families = families
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Raises `TimeoutError` if the loop does not answer."""
        asked = perf_counter()

        async def read() -> F:
            return self._figures(perf_counter() - asked)

        yield from self._families(asyncio.run_coroutine_threadsafe(read(), self._loop).result(_ANSWER_S))


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 16

    def server_bind(self) -> None:
        """Bind, without asking a name server for a name that nobody needs."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that left early is no news."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is its base's
        """Log nothing of scrapes that went well."""


def _server(host: str, port: int) -> _Server:
    family, *_, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    kind: type[_Server] = type("_FamilyServer", (_Server,), {"address_family": family})
    return kind((str(place[0]), port), _Handler)


def _guarded(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except Exception as error:  # noqa: BLE001 - the scraper is told that it failed, the log why
            _log.error("a scrape failed", exc_info=error)
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"the metrics could not be read\n"]

    return answer
