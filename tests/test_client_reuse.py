"""A name that is used again, over the wire: the object of the lease that had it before acts on nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from client_help import assert_all_returned, losing_answers, new_engine, wait_until
from helpers import Clock
from routes import FileClock
from service_process import ServerProcess

from radix_cache.errors import InvalidArgument, LeaseExpired, OldSeq, ServiceUnavailable, StaleLease, UnknownLease
from radix_cache_service import Client

TTL_S = 10.0


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> FileClock:
    return FileClock(tmp_path_factory.mktemp("time") / "clock")


@pytest.fixture(scope="module")
def server(clock: FileClock) -> Iterator[ServerProcess]:
    with ServerProcess(num_blocks=32, block_size=2, lease_ttl_s=TTL_S, test_clock=clock.path) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as client:  # without an engine, so without heartbeats
        yield client
    assert_all_returned(server.address)


def test_a_lease_that_ran_out_unnoticed(client: Client, clock: FileClock) -> None:
    old = client.match_prefix([1, 2, 3, 4], num_tokens=4, lease_id="a")
    clock.advance(2 * TTL_S)
    new = client.match_prefix([9, 9], num_tokens=2, lease_id="a")
    before = list(old.block_table), list(new.block_table)
    for verb in (lambda: client.allocate(old, num_blocks=1), lambda: client.release(old)):
        with pytest.raises(LeaseExpired):
            verb()
    assert (list(old.block_table), list(new.block_table)) == before
    client.release(new)


def test_a_promise_ends_with_its_lease(client: Client, server: ServerProcess, clock: FileClock) -> None:
    with Client(server.address) as other:
        client_lease = other.match_prefix([1, 2], num_tokens=2, lease_id="b")
        other.renew(client_lease, ttl_s=5.0)
        clock.advance(2 * TTL_S)
        other.match_prefix([9, 9], num_tokens=2, lease_id="b")
    assert client.stats().num_leases == 0, "an orderly close gives the new one back"


def test_a_numbered_batch_and_an_ended_object(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine()) as client:
        old = client.match_prefix([1, 2, 3, 4], num_tokens=4, lease_id="f")
        client.release(old)
        new = client.match_prefix([5, 6], num_tokens=2, lease_id="f")
        before = list(old.block_table), list(new.block_table)
        with client.batch(seq=3) as batch:
            grown = batch.allocate(old, num_blocks=2)
        with pytest.raises(UnknownLease, match="'f'"):
            grown.result()
        assert (list(old.block_table), list(new.block_table)) == before
    assert_all_returned(server.address)


def test_a_release_whose_answer_was_lost(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine()) as client:
        client._books.clock = now = Clock(1000.0)
        old = client.match_prefix([1, 2], num_tokens=2, lease_id="g")
        with losing_answers(client), pytest.raises(ServiceUnavailable):
            client.release(old)

        def is_settled() -> bool:
            now.advance(client.timeout_s)
            client.probe([1])
            return not list(client._books._losses.orphans)

        wait_until(is_settled)
        new = client.match_prefix([9, 9], num_tokens=2, lease_id="g")
        with pytest.raises(UnknownLease, match="'g'"):
            client.allocate(old, num_blocks=1)
        assert len(new.block_table) == 1
    assert_all_returned(server.address)


def test_what_an_unanswered_message_ends(server: ServerProcess) -> None:
    """The next one was under way before anybody knew: what it did is the new lease's, and so is its block."""
    with Client(server.address, engine_id=new_engine()) as client, client.session() as session:
        old = session.match_prefix([3, 4], num_tokens=2, lease_id="h")
        with session.submit() as step:
            step.release(old)
            opened = step.match_prefix([5, 6], num_tokens=2, lease_id="h")
        with session.submit() as step:
            grown = step.allocate(old, num_blocks=1)
        added = list(grown.result())
        assert len(old.block_table) == 1
        assert list(opened.result().block_table)[1:] == added
    assert_all_returned(server.address)


def test_the_largest_number_is_the_last(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine()) as client:
        with client.batch(seq=2**64 - 1) as batch:
            batch.probe([1])
        for _ in range(2):
            with (
                pytest.raises(InvalidArgument, match="seq of the next batch is at least 1 and at most"),
                client.batch(),
            ):
                pass
    assert_all_returned(server.address)


def test_a_number_that_the_client_gave_away_is_not_the_caller_s_any_more(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine()) as client:
        lease = client.match_prefix([1, 2], num_tokens=2)
        with client.batch(seq=1) as batch:
            batch.probe([1])
        with client.batch() as batch:
            batch.allocate(lease, num_blocks=1)  # numbered 2 here
        table = list(lease.block_table)
        with pytest.raises(OldSeq, match="seq 2 is not above 2, this client's own"), client.batch(seq=2) as batch:
            batch.allocate(lease, num_blocks=1)
        assert list(lease.block_table) == table
        with client.batch(seq=3) as batch:
            batch.allocate(lease, num_blocks=1)
        assert len(lease.block_table) == len(table) + 1
    assert_all_returned(server.address)


def test_a_match_under_a_name_in_use_whose_answer_is_lost(server: ServerProcess) -> None:
    """It was refused, or got the lease that is there: nothing that a client has is released behind its back."""
    with Client(server.address, engine_id=new_engine()) as client, Client(server.address) as other:
        client._books.clock = now = Clock(1000.0)
        lease = client.match_prefix([1, 2], num_tokens=2, lease_id="held")
        with losing_answers(client), pytest.raises(ServiceUnavailable):
            client.match_prefix([3, 4], num_tokens=2, lease_id="held")
        now.advance(100.0)
        client.probe([1])
        assert [info.lease_id for info in other.leases(client.engine_id)] == ["held"]
        with pytest.raises(StaleLease, match="it can only be released"):
            client.allocate(lease, num_blocks=1)
        client.release(lease)
    assert_all_returned(server.address)
