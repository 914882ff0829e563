"""``valid_until`` after a silence: a late answer proves nothing for leases that its call did not name.

Server and clients go by one clock, which the test moves.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from client_help import Proxy, assert_all_returned, losing_answers, new_engine, wait_until
from routes import FileClock
from service_process import ServerProcess

from radix_cache.errors import LeaseExpired, ServiceUnavailable
from radix_cache_service import AsyncClient, Client

TTL_S = 10.0
LATE_S = TTL_S * 1.2


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> FileClock:
    """The clock of the server, and of the clients made here."""
    return FileClock(tmp_path_factory.mktemp("time") / "clock")


@pytest.fixture(scope="module")
def server(clock: FileClock) -> Iterator[ServerProcess]:
    """One server for all tests here."""
    with ServerProcess(num_blocks=16, block_size=2, lease_ttl_s=TTL_S, test_clock=clock.path) as process:
        yield process


def silent_client(address: str, clock: FileClock) -> Client:
    """Return an engine that sends no heartbeat by itself, as one that is paused."""
    client = Client(address, engine_id=new_engine(), heartbeat_interval_s=1e6, timeout_s=60)
    client._books.clock = clock
    return client


def is_valid(client: Client | AsyncClient) -> bool:
    """What an engine asks before it launches anything."""
    return client.valid_until is not None and client._books.clock() < client.valid_until


def test_a_heartbeat_after_a_silence_does_not_bring_back_what_ran_out(server: ServerProcess, clock: FileClock) -> None:
    with silent_client(server.address, clock) as client:
        first, second = (client.match_prefix([token], num_tokens=2) for token in (1, 2))
        assert is_valid(client)
        clock.advance(LATE_S)
        client.heartbeat()
        assert not is_valid(client)
        with pytest.raises(LeaseExpired):
            client.renew(first)
        assert not is_valid(client), "the other one was not asked for"
        with pytest.raises(LeaseExpired):
            client.release(second)
        assert is_valid(client)
    assert_all_returned(server.address)


def test_nor_does_a_call_for_another_lease(server: ServerProcess, clock: FileClock) -> None:
    with silent_client(server.address, clock) as client:
        old = client.match_prefix([1], num_tokens=2)
        clock.advance(LATE_S)
        new = client.match_prefix([2], num_tokens=2)
        assert not is_valid(client)
        with client.batch() as batch:
            gone, grown = batch.renew(old), batch.allocate(new, num_tokens=4)
        with pytest.raises(LeaseExpired):
            gone.result()
        assert len(grown.result()) == 1
        assert is_valid(client)
    assert_all_returned(server.address)


def test_an_answer_held_up_on_its_way_proves_only_what_its_call_named(server: ServerProcess, clock: FileClock) -> None:
    with Proxy(server.address) as proxy, silent_client(proxy.address, clock) as client, Client(server.address) as other:
        named, unnamed = (client.match_prefix([token], num_tokens=2) for token in (1, 2))
        proxy.is_deaf.set()
        before = num_renewals(other)
        renewal = threading.Thread(target=client.renew, args=(named,))
        renewal.start()
        wait_until(lambda: num_renewals(other) > before)
        for _ in range(10):
            clock.advance(LATE_S / 10)
            other.heartbeat(client.engine_id)  # so the leases live on, but this client cannot know
        proxy.is_deaf.clear()
        renewal.join()
        assert not is_valid(client), "the renewal is answered, but its time is over too"
        client.renew(unnamed)
        assert not is_valid(client)
        client.renew(named)
        assert is_valid(client)
    assert_all_returned(server.address)


def num_renewals(client: Client) -> int:
    return client.stats().num_calls.get("Renew/OK", 0)


def test_a_lease_promised_a_time_of_its_own_does_not_count(server: ServerProcess, clock: FileClock) -> None:
    with silent_client(server.address, clock) as client:
        handed_over = client.match_prefix([1], num_tokens=2)
        client.renew(handed_over, ttl_s=60)
        clock.advance(LATE_S)
        client.heartbeat()
        assert is_valid(client)
        client.release(handed_over)
    assert_all_returned(server.address)


def test_the_kept_answer_to_a_repeated_batch_is_no_proof(server: ServerProcess, clock: FileClock) -> None:
    with silent_client(server.address, clock) as client:
        old = client.match_prefix([1], num_tokens=2)
        with losing_answers(client), suppress(ServiceUnavailable), client.batch(seq=2**62) as batch:
            batch.allocate(old, num_tokens=4)
            batch.match_prefix([2], num_tokens=2, lease_id="opened-at-first")
        clock.advance(LATE_S)
        client.heartbeat()
        with client.batch(seq=2**62) as batch:
            grown = batch.allocate(old, num_tokens=4)
            opened = batch.match_prefix([2], num_tokens=2, lease_id="opened-at-first")
        assert len(grown.result()) == 1
        assert not is_valid(client)
        for lease in (old, opened.result()):
            with pytest.raises(LeaseExpired):
                client.renew(lease)
        assert is_valid(client)
    assert_all_returned(server.address)


def test_an_answer_that_was_read_late_is_no_proof(server: ServerProcess, clock: FileClock) -> None:
    other = Client(server.address)
    with other, silent_client(server.address, clock) as client, client.session() as session:
        lease = client.match_prefix([1], num_tokens=2)
        with session.submit() as batch:
            grown = batch.allocate(lease, num_tokens=4)
            opened = batch.match_prefix([2], num_tokens=2)
        wait_until(lambda: other.stats().num_leases == 2)
        clock.advance(LATE_S)
        client.heartbeat()
        assert len(grown.result()) == 1
        assert not is_valid(client)
        for each in (lease, opened.result()):
            with pytest.raises(LeaseExpired):
                client.renew(each)
        assert is_valid(client)
    assert_all_returned(server.address)


def test_what_a_lost_batch_was_to_release_waits_for_its_second_try(server: ServerProcess, clock: FileClock) -> None:
    with silent_client(server.address, clock) as client, Client(server.address) as other:
        lease = client.match_prefix([7, 8], num_tokens=2)
        with losing_answers(client, is_served=False), suppress(ServiceUnavailable), client.batch(seq=2**62) as batch:
            batch.insert(lease, [7, 8])
            batch.release(lease)
        client.heartbeat()  # takes along the releases that are due
        with client.batch(seq=2**62) as batch:
            inserted, released = batch.insert(lease, [7, 8]), batch.release(lease)
        assert inserted.result().num_cached_tokens == 0
        assert released.result() is None
        assert other.probe([7, 8]) == 2
    assert_all_returned(server.address)


def test_the_same_for_an_asynchronous_client(server: ServerProcess, clock: FileClock) -> None:
    async def check() -> None:
        async with AsyncClient(server.address, engine_id=new_engine(), heartbeat_interval_s=1e6) as client:
            client._books.clock = clock
            lease = await client.match_prefix([1], num_tokens=2)
            clock.advance(LATE_S)
            await client.heartbeat()
            assert not is_valid(client)
            with pytest.raises(LeaseExpired):
                await client.renew(lease)
            assert is_valid(client)

    asyncio.run(check())
    assert_all_returned(server.address)
