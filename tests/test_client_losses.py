"""Lost answers: what they leave behind, and that it is cleared up while the engine lives on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from client_help import Proxy, assert_all_returned, losing_answers, new_engine, wait_until
from helpers import Clock
from service_process import ServerProcess

from radix_cache.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotConnected,
    ServiceUnavailable,
    StaleLease,
    UnknownLease,
)
from radix_cache_service import Client
from radix_cache_service.client.losses import LATE_S


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for all tests here; no lease runs out while they run."""
    with ServerProcess(num_blocks=512, block_size=2, lease_ttl_s=600) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client with an engine of its own, whose clock is moved by hand; in the end nothing is left of it.

    Its heart has stopped: what is given back, and when, is up to the calls of the test.
    """
    with Client(server.address, engine_id=new_engine()) as opened:
        opened._books.clock = Clock(1000.0)
        opened._prepare()
        assert opened._heart is not None
        opened._heart.stop()
        yield opened
    assert_all_returned(server.address)


def num_leases(client: Client) -> int:
    return client.stats().num_leases


def pass_the_time(client: Client, seconds: float) -> None:
    client._books.clock.advance(seconds)


def is_settled(client: Client) -> bool:
    """Tell whether nothing is left to be given back; asking is a call that carries releases."""
    client.probe([])
    return not list(client._books._losses.orphans)


# Matches.


def test_deadlines_that_cut_matches_leave_nothing(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine()) as client, Client(server.address) as other:
        kept = client.match_prefix([1, 2, 3], num_tokens=4)
        client.timeout_s, num_lost = 0.0001, 0
        for number in range(200):
            if number % 2:
                num_lost += is_lost(lambda: client.match_prefix([1, 2, 3], num_tokens=4))
            else:
                num_lost += is_lost(lambda: match_in_batch(client))
        assert num_lost
        client.timeout_s = 5.0
        opened = client._books._tables.leases
        wait_until(lambda: is_settled(client))
        assert kept.lease_id in opened
        assert other.stats().num_leases == len(opened) == 201 - num_lost
        assert other.stats().num_leased_blocks == 2 * len(opened)
    assert_all_returned(server.address)


def is_lost(act: Any) -> bool:
    try:
        act()
    except DeadlineExceeded:
        return True
    return False


def match_in_batch(client: Client) -> None:
    with client.batch() as batch:
        batch.match_prefix([1, 2, 3], num_tokens=4)


@pytest.mark.parametrize("is_served", [True, False])
def test_the_lease_of_a_lost_match_is_given_back(client: Client, is_served: bool) -> None:
    client.probe([])
    with losing_answers(client, is_served=is_served), pytest.raises(DeadlineExceeded):
        client.match_prefix([1, 2, 3], num_tokens=4)
    client.probe([])
    wait_until(lambda: num_leases(client) == 0)
    if not is_served:
        assert not is_settled(client), "the match may still arrive"
        pass_the_time(client, client.timeout_s + LATE_S)
    wait_until(lambda: is_settled(client))


def test_a_match_that_is_served_late_is_found(client: Client, server: ServerProcess) -> None:
    with losing_answers(client, is_served=False), pytest.raises(DeadlineExceeded):
        client.match_prefix([1, 2, 3], num_tokens=4, lease_id="late")
    assert not is_settled(client)
    wait_until(lambda: not client._books._losses._orphans["late"].is_in_flight)  # its release has found nothing
    with Client(server.address, engine_id=client.engine_id) as wire:
        wire.match_prefix([1, 2, 3], num_tokens=4, lease_id="late")
        wire._books._tables.forget("late")
    client.probe([])
    assert num_leases(client) == 1
    pass_the_time(client, client.timeout_s + LATE_S)
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 0


def test_a_lost_match_can_be_asked_for_again(client: Client) -> None:
    for _ in range(2):
        with losing_answers(client), pytest.raises(DeadlineExceeded):
            client.match_prefix([1, 2, 3], num_tokens=4, lease_id="again")
    lease = client.match_prefix([1, 2, 3], num_tokens=4, lease_id="again")
    assert is_settled(client)
    assert num_leases(client) == 1
    client.allocate(lease, num_tokens=6)
    with pytest.raises(InvalidArgument, match="in use"):
        client.match_prefix([1, 2, 3], num_tokens=4, lease_id="again")
    assert len(lease.block_table) == 3


def test_another_match_under_the_name_of_a_lost_one_is_refused_and_the_lease_given_back(client: Client) -> None:
    with losing_answers(client), pytest.raises(DeadlineExceeded):
        client.match_prefix([1, 2, 3], num_tokens=4, lease_id="x")
    with pytest.raises(InvalidArgument):
        client.match_prefix([4, 5, 6], num_tokens=4, lease_id="x")
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 0


def lose_a_match(client: Client, lease_id: str) -> None:
    with losing_answers(client), pytest.raises(DeadlineExceeded):
        client.match_prefix([1, 2, 3], num_tokens=4, lease_id=lease_id)


def test_a_batch_that_names_a_lease_being_released_loses_that_match_only(client: Client) -> None:
    """And what needs that lease. The release is on its way, and may come before the match or after it."""
    lose_a_match(client, "again")
    assert client._books.due_orphans() == ["again"]
    with client.batch() as batch:
        refused = batch.match_prefix([1, 2, 3], num_tokens=4, lease_id="again")
        needing = batch.allocate(refused, num_tokens=6)
        other = batch.match_prefix([1, 2, 3], num_tokens=4, lease_id="other")
    for answer in (refused, needing):
        with pytest.raises(InvalidArgument, match="being released"):
            answer.result()
    assert other.result().lease_id == "other"
    client._books.settle("again", ServiceUnavailable("lost by the test"), client._books.clock())
    pass_the_time(client, 2)
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 1


def test_a_lost_match_is_not_released_while_a_batch_asks_for_it_again(client: Client) -> None:
    client.probe([])
    lose_a_match(client, "again")
    with client.batch() as batch:
        again = batch.match_prefix([1, 2, 3], num_tokens=4, lease_id="again")
        client.probe([])  # a call, with which orphans are released
        assert num_leases(client) == 1
    with pytest.raises(InvalidArgument, match="in use"):
        again.result()  # in a batch, the name of a live lease is taken: its answer was lost, so it is given back
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 0


def test_an_orphan_that_a_batch_named_and_never_asked_for_is_given_back(client: Client) -> None:
    client.probe([])
    lose_a_match(client, "again")
    with pytest.raises(KeyError), client.batch() as batch:  # noqa: PT012 - the block is what is tested
        batch.match_prefix([1, 2, 3], num_tokens=4, lease_id="again")
        raise KeyError
    pass_the_time(client, 3600)
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 0


def test_what_is_cut_off_is_tried_once_more_if_it_may_be(client: Client) -> None:
    client.probe([])
    with losing_answers(client, times=1, is_late=False):
        lease = client.match_prefix([1, 2, 3], num_tokens=4)
    assert (len(lease.block_table), num_leases(client)) == (2, 1)
    with losing_answers(client, times=1, is_late=False), client.batch() as batch:
        added = batch.allocate(lease, num_blocks=3)
    assert len(added.result()) == 3
    assert len(lease.block_table) == 5
    with losing_answers(client, times=1, is_late=False):
        client.release(lease)
    assert num_leases(client) == 0
    with pytest.raises(UnknownLease), losing_answers(client, times=1, is_served=False, is_late=True):
        client.release(lease) if is_lost(lambda: client.release(lease)) else None


def test_it_is_tried_once_more_only(client: Client) -> None:
    client.probe([])
    with losing_answers(client, times=2, is_served=False, is_late=False), pytest.raises(ServiceUnavailable):
        client.probe([])


# What changes a table.


@pytest.mark.parametrize("verb", ["allocate", "insert", "free"])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_lease_whose_table_is_not_known_can_only_be_released(client: Client, verb: str, is_late: bool) -> None:
    lease = client.match_prefix([1, 2, 3], num_tokens=4)
    arguments = {"allocate": (6,), "insert": ([1, 2],), "free": (list(lease.block_table)[1:],)}
    with losing_answers(client, is_late=is_late), pytest.raises(ServiceUnavailable):
        getattr(client, verb)(lease, *arguments[verb])
    for other, given in arguments.items():
        with pytest.raises(StaleLease, match="lost"):
            getattr(client, other)(lease, *given)
    with client.batch() as batch:
        refused, probed = batch.allocate(lease.lease_id, num_tokens=9), batch.probe([1])
    assert probed.result() == 0
    with pytest.raises(StaleLease):
        refused.result()
    client.renew(lease)
    fork = client.match_prefix([], parent=lease)
    client.release(lease)
    client.release(fork)
    with pytest.raises(UnknownLease):
        client.allocate(lease, num_tokens=6)


@pytest.mark.parametrize("is_served", [True, False])
def test_a_lost_release_is_repeated_until_it_is_certain(client: Client, is_served: bool) -> None:
    lease = client.match_prefix([1, 2, 3], num_tokens=4)
    with losing_answers(client, is_served=is_served), pytest.raises(DeadlineExceeded):
        client.release(lease)
    client.probe([])
    wait_until(lambda: num_leases(client) == 0)
    with pytest.raises(UnknownLease):
        client.release(lease)


# Batches with a number of the caller's.


def lose_a_batch(client: Client, seq: int, lease: Any, is_served: bool) -> None:
    with losing_answers(client, is_served=is_served), pytest.raises(DeadlineExceeded):
        send(client, seq, lease)


def send(client: Client, seq: int, lease: Any, lease_id: str | None = None) -> Any:
    with client.batch(seq=seq) as batch:
        batch.allocate(lease, num_blocks=1)
        return batch.match_prefix([1, 2, 3], num_tokens=4, lease_id=lease_id)


@pytest.mark.parametrize("is_served", [True, False])
def test_a_lost_batch_that_is_sent_again_is_whole(client: Client, is_served: bool) -> None:
    lease = client.match_prefix([5], num_tokens=2)
    for _ in range(2):
        lose_a_batch(client, 1, lease, is_served)
    client.probe([])
    assert is_settled(client), "nothing is given back: it may be sent again"
    opened = send(client, 1, lease)
    assert num_leases(client) == 2
    assert opened.lease_id == opened.result().lease_id
    assert (len(lease.block_table), len(opened.result().block_table)) == (2, 2)
    client.allocate(lease, num_blocks=1)
    assert len(lease.block_table) == 3
    pass_the_time(client, client.timeout_s + LATE_S)
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 2


def test_a_lost_batch_that_is_not_sent_again_is_given_up(client: Client) -> None:
    lease = client.match_prefix([5], num_tokens=2)
    lose_a_batch(client, 1, lease, is_served=True)
    with pytest.raises(StaleLease):
        client.allocate(lease, num_blocks=1)
    with client.batch(seq=2) as batch:
        batch.probe([])
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 1
    with pytest.raises(StaleLease):
        client.allocate(lease, num_blocks=1)


def test_a_lost_batch_is_not_waited_for_too_long(client: Client) -> None:
    lease = client.match_prefix([5], num_tokens=2)
    lose_a_batch(client, 1, lease, is_served=True)
    pass_the_time(client, 3600)
    client.probe([])
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 1
    with pytest.raises(UnknownLease, match="given up"):
        send(client, 1, lease).result()
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 1


def test_a_close_gives_back_what_is_in_doubt(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine()) as client:
        lease = client.match_prefix([5], num_tokens=2)
        lose_a_batch(client, 1, lease, is_served=True)
        with losing_answers(client), pytest.raises(DeadlineExceeded):
            client.match_prefix([1], num_tokens=2)
    assert_all_returned(server.address)


# Other servers.


def test_what_was_of_another_server_is_forgotten() -> None:
    settings = {"num_blocks": 8, "block_size": 2, "lease_ttl_s": 600}
    first, second = ServerProcess(**settings), ServerProcess(**settings)
    with Proxy(first.address) as proxy, Client(proxy.address, engine_id="E") as client:
        lease = client.match_prefix([1, 2, 3], num_tokens=4)
        epoch = client.epoch
        with losing_answers(client), pytest.raises(DeadlineExceeded):
            client.match_prefix([1, 2, 3], num_tokens=4)
        proxy.port = int(second.address.rpartition(":")[2])
        proxy.cut()
        wait_until(lambda: not is_lost_to_the_cut(client))
        assert client.epoch != epoch
        assert is_settled(client)
        with pytest.raises(UnknownLease):
            client.allocate(lease, num_blocks=1)
        new = client.match_prefix([1, 2, 3], num_tokens=4)
        assert list(new.block_table) == [0, 1]
    for server in (first, second):
        assert server.stop()[0] == 0


def test_a_new_server_that_is_gone_before_it_says_what_it_is_may_have_served(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The match was answered; that nobody can be asked which server it was does not undo it."""
    description = client.describe()
    client._books.description = replace(description, epoch="of the one before")

    def nobody_is_there() -> None:
        raise NotConnected("lost by the test")

    with monkeypatch.context() as patched:
        patched.setattr(client, "describe", nobody_is_there)
        with pytest.raises(NotConnected):
            client.match_prefix([1, 2, 3], num_tokens=4)
    client._books.description = description
    wait_until(lambda: is_settled(client))
    assert num_leases(client) == 0


def is_lost_to_the_cut(client: Client) -> bool:
    try:
        client.stats()
    except ServiceUnavailable:
        return True
    return False
