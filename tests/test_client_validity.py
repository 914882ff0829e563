"""``valid_until`` after a silence: a late answer proves nothing for leases that its call did not name."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from client_help import Proxy, assert_all_returned, losing_answers, new_engine
from service_process import ServerProcess

from radix_cache.errors import LeaseExpired, ServiceUnavailable
from radix_cache_service import AsyncClient, Client

TTL_S = 0.5
LATE_S = TTL_S * 1.2


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server whose leases run out soon."""
    with ServerProcess(num_blocks=16, block_size=2, lease_ttl_s=TTL_S) as process:
        yield process


def silent_client(address: str) -> Client:
    """Return an engine that sends no heartbeat by itself, as one that is paused."""
    return Client(address, engine_id=new_engine(), heartbeat_interval_s=60)


def is_valid(client: Client | AsyncClient) -> bool:
    """What an engine asks before it launches anything."""
    return client.valid_until is not None and time.monotonic() < client.valid_until


def test_a_heartbeat_after_a_silence_does_not_bring_back_what_ran_out(server: ServerProcess) -> None:
    with silent_client(server.address) as client:
        first, second = (client.match_prefix([token], num_tokens=2) for token in (1, 2))
        assert is_valid(client)
        time.sleep(LATE_S)
        client.heartbeat()
        assert not is_valid(client)
        with pytest.raises(LeaseExpired):
            client.renew(first)
        assert not is_valid(client), "the other one was not asked for"
        with pytest.raises(LeaseExpired):
            client.release(second)
        assert is_valid(client)
    assert_all_returned(server.address)


def test_nor_does_a_call_for_another_lease(server: ServerProcess) -> None:
    with silent_client(server.address) as client:
        old = client.match_prefix([1], num_tokens=2)
        time.sleep(LATE_S)
        new = client.match_prefix([2], num_tokens=2)
        assert not is_valid(client)
        with client.batch() as batch:
            gone, grown = batch.renew(old), batch.allocate(new, num_tokens=4)
        with pytest.raises(LeaseExpired):
            gone.result()
        assert len(grown.result()) == 1
        assert is_valid(client)
    assert_all_returned(server.address)


def test_an_answer_held_up_on_its_way_proves_only_what_its_call_named(server: ServerProcess) -> None:
    with Proxy(server.address) as proxy, silent_client(proxy.address) as client, Client(server.address) as other:
        named, unnamed = (client.match_prefix([token], num_tokens=2) for token in (1, 2))
        proxy.is_deaf.set()
        renewal = threading.Thread(target=client.renew, args=(named,))
        renewal.start()
        for _ in range(10):
            time.sleep(LATE_S / 10)
            other.heartbeat(client.engine_id)  # so the leases live on, but this client cannot know
        proxy.is_deaf.clear()
        renewal.join()
        assert not is_valid(client), "the renewal is answered, but its time is over too"
        client.renew(unnamed)
        assert not is_valid(client)
        client.renew(named)
        assert is_valid(client)
    assert_all_returned(server.address)


def test_a_lease_promised_a_time_of_its_own_does_not_count(server: ServerProcess) -> None:
    with silent_client(server.address) as client:
        handed_over = client.match_prefix([1], num_tokens=2)
        client.renew(handed_over, ttl_s=60)
        time.sleep(LATE_S)
        client.heartbeat()
        assert is_valid(client)
        client.release(handed_over)
    assert_all_returned(server.address)


def test_the_kept_answer_to_a_repeated_batch_is_no_proof(server: ServerProcess) -> None:
    with silent_client(server.address) as client:
        old = client.match_prefix([1], num_tokens=2)
        with losing_answers(client), suppress(ServiceUnavailable), client.batch(seq=2**62) as batch:
            batch.allocate(old, num_tokens=4)
            batch.match_prefix([2], num_tokens=2, lease_id="opened-at-first")
        time.sleep(LATE_S)
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


def test_an_answer_that_was_read_late_is_no_proof(server: ServerProcess) -> None:
    with silent_client(server.address) as client, client.session() as session:
        lease = client.match_prefix([1], num_tokens=2)
        with session.submit() as batch:
            grown = batch.allocate(lease, num_tokens=4)
            opened = batch.match_prefix([2], num_tokens=2)
        time.sleep(LATE_S)
        client.heartbeat()
        assert len(grown.result()) == 1
        assert not is_valid(client)
        for each in (lease, opened.result()):
            with pytest.raises(LeaseExpired):
                client.renew(each)
        assert is_valid(client)
    assert_all_returned(server.address)


def test_what_a_lost_batch_was_to_release_waits_for_its_second_try(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine()) as client, Client(server.address) as other:
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


def test_the_same_for_an_asynchronous_client(server: ServerProcess) -> None:
    async def check() -> None:
        async with AsyncClient(server.address, engine_id=new_engine(), heartbeat_interval_s=60) as client:
            lease = await client.match_prefix([1], num_tokens=2)
            await asyncio.sleep(LATE_S)
            await client.heartbeat()
            assert not is_valid(client)
            with pytest.raises(LeaseExpired):
                await client.renew(lease)
            assert is_valid(client)

    asyncio.run(check())
    assert_all_returned(server.address)
