"""Clients across a restart of their server: what was never sent is certain, and costs no lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import ServerProcess

from radix_cache.errors import InvalidArgument, NotConnected
from radix_cache_service import Client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], ServerProcess]]:
    """Start a server on the same socket and the same state each time."""
    started: list[ServerProcess] = []

    def start_one() -> ServerProcess:
        started.append(
            ServerProcess(
                f"unix:{tmp_path}/s.sock", num_blocks=32, block_size=2, state_dir=tmp_path / "state", grace_s=0.1
            )
        )
        return started[-1]

    yield start_one
    started[-1].stop()


def when_it_is_back(call: Callable[[], Any]) -> Any:
    """Make a call again until there is a connection: that is what the error allows."""
    deadline = time.monotonic() + 20
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
