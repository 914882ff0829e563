"""Numbered batches, and leases named by object and by id."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from client_help import assert_all_returned, new_engine, wait_until
from service_process import ServerProcess

from radix_cache.errors import BatchNotRun, InvalidArgument, OldSeq, ServiceUnavailable, UnknownLease
from radix_cache_service import AsyncClient, Client


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for all tests here."""
    with ServerProcess(num_blocks=64, block_size=2, lease_ttl_s=60) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client with an engine of its own; in the end nothing is left of it."""
    with Client(server.address, engine_id=new_engine()) as opened:
        yield opened
    assert_all_returned(server.address)


# Batches.


def test_a_batch_again_gets_the_same_answers_and_changes_nothing(client: Client) -> None:
    lease = client.match_prefix([1, 2, 3, 4], num_tokens=4)

    def send() -> tuple[Any, ...]:
        with client.batch(seq=1) as batch:
            added = batch.allocate(lease, num_blocks=2)
            inserted = batch.insert(lease, [1, 2])
            opened = batch.match_prefix([1, 2, 9], num_tokens=4)
            grown = batch.allocate(opened, num_blocks=1)
            freed = batch.free(lease, [])
        freed.result()
        other = opened.result()
        assert other.lease_id == opened.lease_id
        answers = list(added.result()), list(inserted.result().block_ids), list(grown.result())
        return answers, list(lease.block_table), list(other.block_table), other.lease_id

    first = send()
    assert send() == first
    assert client.stats().num_leases == 2
    client.release(first[-1])
    assert send() == first, "the answer of then, though the lease is gone"
    with client.batch(seq=1) as batch:
        others = [batch.probe([]) for _ in range(5)]
    with pytest.raises(InvalidArgument, match="another"):
        others[0].result()


def test_what_a_batch_found_unknown_may_be_there_when_it_is_repeated(client: Client) -> None:
    """The same answer again is about the moment of the first one."""
    for _ in range(2):
        with client.batch(seq=1) as batch:
            refused = batch.release("a")
            opened = batch.match_prefix([1], num_tokens=2, lease_id="a")
        with pytest.raises(UnknownLease):
            refused.result()
        client.allocate(opened.result(), num_tokens=4)
    assert len(opened.result().block_table) == 2
    assert client.stats().num_leases == 1, "and a close gives it back"


def test_a_name_that_was_unknown_and_is_opened_in_the_same_batch(client: Client) -> None:
    """What failed for want of it, and what failed for that, say nothing of the lease that has the name now."""
    with client.batch() as batch:
        fork = batch.match_prefix([1], parent="late")
        late = batch.match_prefix([1], num_tokens=2, lease_id="late")
        ended = batch.release(fork)
    for refused in (fork, ended):
        with pytest.raises(UnknownLease, match="late"):
            refused.result()
    assert len(client.allocate(late.result(), num_blocks=1)) == 1
    client.release(late.result())


def test_an_old_number_is_refused_whatever_is_in_the_batch(client: Client) -> None:
    with client.batch(seq=5) as batch:
        batch.probe([1])
    for seq in (4, 1, 0):
        with pytest.raises(InvalidArgument), client.batch(seq=seq) as batch:
            late = batch.match_prefix([1], num_tokens=2)
        with pytest.raises(InvalidArgument):
            late.result()
    with client.batch() as batch:
        probed = batch.probe([1])
    assert probed.result() == 0, "the client's own numbers go on from the caller's"
    assert client.stats().num_leases == 0


def test_a_clock_that_went_back_costs_no_batch(client: Client, server: ServerProcess) -> None:
    """The engine's earlier life has numbered its batches higher. The caller's own numbers are the caller's business."""
    ahead = 2**63
    with client.batch(seq=ahead) as batch:
        batch.probe([])
    with Client(server.address, engine_id=client.engine_id) as again:
        with pytest.raises(OldSeq), again.batch(seq=5) as batch:
            batch.probe([])
        for _ in range(2):
            with again.batch() as batch:
                batch.match_prefix([1], num_tokens=2)
        assert again.stats().num_leases == 2

    async def run() -> int:
        async with AsyncClient(server.address, engine_id=client.engine_id) as other:
            async with other.batch() as batch:
                batch.match_prefix([1], num_tokens=2)
            return (await other.stats()).num_leases

    with client.batch(seq=ahead + 10) as batch:
        batch.probe([])
    assert asyncio.run(run()) == 1
    with client.batch(seq=2**64 - 1) as batch:
        batch.probe([])
    with pytest.raises(OldSeq), Client(server.address, engine_id=client.engine_id).batch() as batch:
        batch.probe([])


def test_a_batch_that_may_have_run_gets_no_other_number(client: Client, server: ServerProcess) -> None:
    """Its answer was lost, and somebody else under the engine's name came before the second try."""
    client.probe([])
    send_once = client._send_once

    def send_and_be_overtaken(call: Any) -> Any:
        client._send_once = send_once  # type: ignore[method-assign]
        send_once(call)
        with Client(server.address, engine_id=client.engine_id) as other, other.batch(seq=2**63) as batch:
            batch.probe([])
        raise ServiceUnavailable("lost by the test")

    client._send_once = send_and_be_overtaken  # type: ignore[method-assign]
    with pytest.raises(OldSeq), client.batch() as batch:
        batch.match_prefix([1], num_tokens=2)
    wait_until(lambda: client.stats().num_leases == 0)


def test_a_batch_that_is_left_by_an_exception_is_not_sent(client: Client) -> None:
    with pytest.raises(KeyError), client.batch() as batch:  # noqa: PT012 - the block is what is tested
        never = batch.match_prefix([1], num_tokens=2)
        raise KeyError
    with pytest.raises(BatchNotRun):
        never.result()
    assert client.stats().num_leases == 0


def test_an_engine_that_starts_again_is_ahead_of_its_old_numbers(server: ServerProcess) -> None:
    engine = new_engine()
    for _ in range(3):
        with Client(server.address, engine_id=engine) as client:
            for _ in range(2):
                with client.batch() as batch:
                    probed = batch.probe([1])
                assert probed.result() == 0


# Names and objects.


def test_a_verb_that_gets_an_id_changes_the_lease_too(client: Client) -> None:
    lease = client.match_prefix([1, 2, 3], num_tokens=4, lease_id="mine")
    client.allocate("mine", num_tokens=6)
    assert len(lease.block_table) == 3
    with client.batch() as batch:
        batch.insert("mine", [1, 2])
    assert lease.num_published_tokens == 2
    client.free("mine", list(lease.block_table)[-1:])
    assert len(lease.block_table) == 2
    with pytest.raises(InvalidArgument):
        client.match_prefix([1, 2, 3], num_tokens=4, lease_id="mine")
    client.release("mine")
    with pytest.raises(UnknownLease):
        client.release(lease)


def test_a_lease_of_another_client_can_be_worked_on(client: Client, server: ServerProcess) -> None:
    with Client(server.address) as other:
        lease = other.match_prefix([1, 2, 3], num_tokens=4)
        added = client.allocate(lease.lease_id, num_tokens=6)
        assert len(added) == 1
        assert len(lease.block_table) == 2, "nobody told its client"
        result = client.insert(lease.lease_id, [1, 2])
        assert len(result.block_ids) == 1
        fork = client.match_prefix([3], parent=lease.lease_id, num_tokens=4)
        assert fork.num_cached_tokens == 2
        client.release(lease.lease_id)
        client.release(fork)


def test_a_fork_lives_in_the_namespace_of_its_parent(client: Client) -> None:
    lease = client.match_prefix([1, 2], ("m", "w7"), num_tokens=2)
    assert client.match_prefix([], parent=lease.lease_id).namespace == ("m", "w7")
