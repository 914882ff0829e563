"""Metrics that fail, are slow, or are not asked for: the calls never notice."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from scraping import read_text, samples
from service_process import ServerProcess, StartFailed, pack

from radix_cache_service import AsyncClient, Client, Server, ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.servicer import Servicer
from radix_cache_service.telemetry import scrape
from radix_cache_service.telemetry.figures import take_figures
from radix_cache_service.telemetry.metrics import CallMetrics, Latencies

METRICS = "127.0.0.1:0"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server that is scraped."""
    with ServerProcess(metrics_listen=METRICS) as process:
        yield process


async def in_process(config: ServerConfig) -> tuple[Server, AsyncClient]:
    server = Server(config)
    await server.start()
    return server, AsyncClient(server.addresses[0])


def test_a_failure_in_metrics_never_reaches_a_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoTracing:
        def begin(self, *_: object) -> Any:
            raise RuntimeError("no span")

        def close(self) -> None:
            pass

    def fail(*_: object) -> None:
        raise RuntimeError("no count")

    async def main() -> tuple[int, str]:
        server, client = await in_process(ServerConfig(listen=(METRICS,), metrics_listen=METRICS, num_blocks=8))
        async with client:
            server.servicer.metrics.tracing = NoTracing()  # type: ignore[assignment]
            monkeypatch.setattr(Latencies, "add", fail)
            assert await client.probe([1]) == 0
            assert await client.probe([1]) == 0
        monkeypatch.undo()
        text = await asyncio.to_thread(read_text, server.metrics_address)
        await server.stop()
        return server.servicer.metrics.num_failures, text

    num_failures, text = asyncio.run(main())
    assert num_failures >= 4
    assert "radix_cache_telemetry_failures_total" in text
    assert [record.levelname for record in caplog.records if record.name.endswith("metrics")] == ["ERROR"], "once"


def test_a_span_that_does_not_end_is_no_failure_of_the_call() -> None:
    class Span:
        def finish(self, *_: object) -> None:
            raise RuntimeError("no end")

    class Tracing:
        def begin(self, *_: object) -> Span:
            return Span()

    metrics = CallMetrics()
    metrics.tracing = Tracing()  # type: ignore[assignment]
    with metrics.call("Probe"):
        pass
    assert (metrics.num_calls["Probe/OK"], metrics.num_failures) == (1, 1)


def test_a_scrape_that_fails_says_so_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_failed = threading.Event()

    def scrape_until_it_fails(address: str | None) -> None:
        try:
            for _ in range(1000):
                read_text(address)
        finally:
            has_failed.set()

    async def main() -> None:
        server, client = await in_process(ServerConfig(listen=(METRICS,), metrics_listen=METRICS, num_blocks=8))
        async with client:
            monkeypatch.setattr(scrape, "_ANSWER_S", 0.1)
            asyncio.get_running_loop().call_later(0.05, has_failed.wait, 60)  # nor does the loop do anything else
            with pytest.raises(urllib.error.HTTPError, match="500") as caught:
                await asyncio.to_thread(scrape_until_it_fails, server.metrics_address)
            caught.value.close()
            assert await client.probe([1]) == 0
            monkeypatch.undo()
            assert "radix_cache_serving 1.0" in await asyncio.to_thread(read_text, server.metrics_address)
        await server.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert [record.message for record in caplog.records] == ["a scrape failed"]


def test_a_scraper_that_says_nothing_holds_up_nobody(server: ServerProcess) -> None:
    host, _, port = server.metrics_address.rpartition(":")
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as rude:
        silent.sendall(b"GET /metr")
        rude.sendall(b"\x00\xff\r\n\r\n")
        assert samples(server.metrics_address)["radix_cache_serving",] == 1
        with Client(server.address) as client:
            assert client.probe([1]) == 0


def test_a_port_that_is_taken_is_named_and_nothing_stays_bound(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    with pytest.raises(
        StartFailed, match=f"cannot listen on {server.metrics_address}: Address already in use"
    ) as caught:
        ServerProcess(f"unix:{path}", metrics_listen=server.metrics_address)
    assert caught.value.status == 1
    assert "Traceback" not in caught.value.errors
    assert not path.exists()


def test_it_is_off_unless_asked_for() -> None:
    with ServerProcess() as server:
        assert server.metrics_address is None
        assert listening_ports(server.process.pid) == [int(server.address.rpartition(":")[2])]
    with ServerProcess(metrics_listen=METRICS) as server:
        assert server.metrics_address.startswith("127.0.0.1:")
        assert len(listening_ports(server.process.pid)) == 2
    loaded = "import sys, radix_cache_service.server; print({'prometheus_client', 'opentelemetry'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "set()\n"


def listening_ports(pid: int) -> list[int]:
    own = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    rows = [line.split() for line in lines]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def test_the_loop_is_not_held_for_long() -> None:
    """Also where there are many leases and every method has been called with every status."""
    servicer = Servicer(ServerConfig(num_blocks=20_000, block_size=1))
    for number in range(5000):
        request = pb.MatchPrefixRequest(lease_id=str(number), tokens=pack(number), num_tokens=2)
        servicer.runner.verb(request)
    for method in pb.DESCRIPTOR.services_by_name["PrefixCacheService"].methods:
        for code in grpc.StatusCode:
            servicer.metrics.record(method.name, code.name, 0.001)
    took = []
    for _ in range(20):
        began = time.thread_time()
        figures = take_figures(servicer, is_serving=True, loop_delay_s=0)
        took.append(time.thread_time() - began)
    assert figures.stats.num_leases == 5000
    assert sorted(took)[10] < 0.002
