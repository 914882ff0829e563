"""Clients across a restart of their server: what was never sent is certain, and costs no lease."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from client_help import wait_in_vain, wait_until, wait_until_gone
from service_process import ServerProcess

from radix_cache.errors import InvalidArgument, NotConnected, PoolExhausted, ServiceUnavailable, StaleLease
from radix_cache_service import AsyncClient, Client

PATIENCE_S = 60


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], ServerProcess]]:
    """Start a server on the same socket and the same state each time."""
    started: list[ServerProcess] = []
    settings = {"num_blocks": 32, "block_size": 2, "state_dir": tmp_path / "state", "lease_ttl_s": 600}

    def start_one() -> ServerProcess:
        started.append(ServerProcess(f"unix:{tmp_path}/s.sock", **settings))
        return started[-1]

    yield start_one
    started[-1].stop()


def when_it_is_back(call: Callable[[], Any]) -> Any:
    """Make a call again until there is a connection: that is what the error allows."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return call()
        except NotConnected:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_call_while_the_server_is_away_costs_no_lease(start: Callable[[], ServerProcess]) -> None:
    """It never left: each verb says so, and works again when the server is back."""
    server = start()
    with Client(server.address, engine_id="E") as client:
        leases = [client.match_prefix([n, n, n, n], num_tokens=4) for n in range(4)]
        server.stop()
        wait_until_gone(client)
        for call in (
            lambda: client.allocate(leases[0], num_tokens=8),
            lambda: client.insert(leases[1], [1, 1]),
            lambda: client.free(leases[2], leases[2].block_table[-1:]),
            lambda: client.release(leases[3]),
            lambda: client.match_prefix([9], num_tokens=2, lease_id="new"),
        ):
            with pytest.raises(NotConnected):
                call()
        with pytest.raises(NotConnected), client.batch() as batch:
            batch.allocate(leases[0], num_tokens=10)
        start()
        assert len(when_it_is_back(lambda: client.allocate(leases[0], num_tokens=8))) == 2
        assert client.insert(leases[1], [1, 1]).num_cached_tokens == 0
        client.free(leases[2], leases[2].block_table[-1:])
        client.release(leases[3])
        assert client.match_prefix([9], num_tokens=2, lease_id="new").num_cached_tokens == 0
        with client.batch() as batch:
            grown = batch.allocate(leases[0], num_tokens=10)
        assert len(grown.result()) == 1
        assert client.stats().num_leases == 4


def test_a_session_that_finds_no_server_loses_nothing(start: Callable[[], ServerProcess]) -> None:
    server = start()
    with Client(server.address, engine_id="E") as client:
        lease = client.match_prefix([1, 2], num_tokens=2)
        server.stop()
        wait_until_gone(client)
        with client.session() as session, pytest.raises(NotConnected):
            session.allocate(lease, num_tokens=4)
        start()
        when_it_is_back(client.describe)
        with client.session() as session:
            assert len(session.allocate(lease, num_tokens=4)) == 1


def test_a_renewal_has_an_end(start: Callable[[], ServerProcess]) -> None:
    """Whoever may write must not hold blocks for years."""
    with Client(start().address) as client:
        lease = client.match_prefix([1, 2], num_tokens=2)
        client.renew(lease, ttl_s=86_400)
        with pytest.raises(InvalidArgument, match="ttl_s is at most 86400 here, not 86401"):
            client.renew(lease, ttl_s=86_401)


# Waiting for blocks across a restart.


def match(client: Client) -> Any:
    return client.match_prefix([7], num_tokens=4, wait_s=PATIENCE_S)


def match_asyncio(client: Client) -> Any:
    async def run() -> Any:
        async with AsyncClient(client.target) as other:
            lease = await other.match_prefix([7], num_tokens=4, wait_s=PATIENCE_S)
            await other.release(lease)
            return lease

    return asyncio.run(run())


def is_waiting(client: Client) -> bool:
    return client.stats().num_waiting_calls == 1


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("call", [match, match_asyncio])
def test_a_match_waits_on_when_the_server_is_back(
    start: Callable[[], ServerProcess], name: signal.Signals, call: Callable[[Client], Any]
) -> None:
    """However it ended: killed, or drained, which refuses those who wait a last time."""
    server = start()
    with Client(server.address, engine_id="E") as client, ThreadPoolExecutor() as threads:
        full = client.match_prefix([1], num_tokens=64)
        waiting = threads.submit(call, client)
        wait_until(lambda: is_waiting(client))
        server.stop(name)
        start()
        wait_until(lambda: when_it_is_back(lambda: is_waiting(client)))
        client.release(full)
        assert waiting.result(PATIENCE_S).num_blocks == 2


def test_an_allocation_waits_on_after_a_drain(start: Callable[[], ServerProcess]) -> None:
    """The server has refused it, so it can be asked for again. Of one that was cut off nobody knows."""
    for name in (signal.SIGTERM, signal.SIGKILL):
        server = start()
        with Client(server.address, engine_id="E") as client, ThreadPoolExecutor() as threads:
            full, small = client.match_prefix([1], num_tokens=62), client.match_prefix([2], num_tokens=2)
            waiting = threads.submit(client.allocate, small, num_tokens=6, wait_s=PATIENCE_S)
            wait_until(lambda client=client: is_waiting(client))
            server.stop(name)
            server = start()
            if name is signal.SIGKILL:
                with pytest.raises(ServiceUnavailable):
                    waiting.result(PATIENCE_S)
                with pytest.raises(StaleLease, match="lost"):
                    client.allocate(small, num_tokens=6)
            else:
                wait_until(lambda client=client: when_it_is_back(lambda: is_waiting(client)))
                client.release(full)
                assert len(waiting.result(PATIENCE_S)) == 2
        server.stop()


def test_nobody_waits_for_longer_than_asked(start: Callable[[], ServerProcess]) -> None:
    """Nor for what the pool can never have, nor for a server that does not come back."""
    server = start()
    with Client(server.address, engine_id="E") as client:
        full = client.match_prefix([1], num_tokens=64)
        wait_in_vain(lambda: client.match_prefix([2], num_blocks=1, wait_s=2.5))
        with pytest.raises(PoolExhausted):
            client.match_prefix([2], num_blocks=33, wait_s=PATIENCE_S)
        server.stop()
        wait_until_gone(client)
        with pytest.raises(NotConnected):
            client.allocate(full, num_tokens=66, wait_s=1)
        start()
        when_it_is_back(lambda: client.allocate(full, num_tokens=64))


# The end of a client.


@pytest.mark.parametrize("is_asyncio", [False, True])
def test_an_end_right_after_a_restart_gives_all_back(
    start: Callable[[], ServerProcess], is_asyncio: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is gone, and the client has just found that there is none to be had."""
    for module in ("blocking", "aio"):  # else it has no time for a machine that is busy
        monkeypatch.setattr(f"radix_cache_service.client.{module}.RECONNECT_S", 60.0)
    server = start()

    async def hold() -> None:
        async with AsyncClient(server.address, engine_id="E") as client:
            await client.match_prefix([1], num_tokens=2)
            server.stop(signal.SIGKILL)
            with pytest.raises(ServiceUnavailable):
                await client.probe([1])
            start()

    if is_asyncio:
        asyncio.run(hold())
    else:
        with Client(server.address, engine_id="E") as client:
            client.match_prefix([1], num_tokens=2)
            server.stop(signal.SIGKILL)
            with pytest.raises(ServiceUnavailable):
                client.probe([1])
            start()
    with Client(server.address) as client:
        assert client.stats().num_leases == 0
