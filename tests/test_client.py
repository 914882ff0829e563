"""What a client adds to the verbs: whom it talks to, deadlines, closing, numbers, large messages."""

from __future__ import annotations

import socket
import time
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from client_help import Proxy, assert_all_returned, new_engine, wait_in_vain
from service_process import ServerProcess

from radix_cache.errors import (
    DeadlineExceeded,
    InvalidArgument,
    InvalidTokens,
    NotConnected,
    PoolExhausted,
    RadixCacheError,
    ServiceUnavailable,
)
from radix_cache_service import Client, LayoutMismatch

TTL_S = 60
DEFAULT_TIMEOUT_S = Client("127.0.0.1:1").timeout_s  # which `conftest.patience` makes longer when the tests begin


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for all tests here."""
    with ServerProcess(num_blocks=64, block_size=2, lease_ttl_s=TTL_S, layout_fingerprint="bf16") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client with an engine of its own; in the end nothing is left of it."""
    with Client(server.address, engine_id=new_engine()) as opened:
        yield opened
    assert_all_returned(server.address)


# Whom it talks to.


def test_it_says_what_the_server_is(client: Client) -> None:
    said = client.describe()
    assert (said.block_size, said.num_blocks, said.lease_ttl_s, said.layout_fingerprint) == (2, 64, TTL_S, "bf16")
    assert (said.max_tokens, said.epoch) == (1_048_576, client.epoch)
    assert client.block_size == 2


def test_nothing_is_sent_before_the_first_call() -> None:
    client = Client("127.0.0.1:1")
    assert client.epoch is client.valid_until is client.num_available_blocks is None
    client.close()


@pytest.mark.parametrize("wanted", [{"block_size": 16}, {"layout_fingerprint": "fp8"}])
@pytest.mark.parametrize("verb", ["stats", "batch", "match", "block_size"])
def test_a_server_of_another_layout_is_refused(server: ServerProcess, wanted: dict[str, Any], verb: str) -> None:
    with Client(server.address, **wanted) as client:
        for _ in range(2):
            with pytest.raises(LayoutMismatch):
                call(client, verb)


def call(client: Client, verb: str) -> None:
    if verb == "batch":
        with client.batch() as batch:
            batch.evict(1)
    elif verb == "match":
        client.match_prefix([1, 2])
    elif verb == "stats":
        client.stats()
    else:
        print(client.block_size)


def test_a_server_of_the_same_layout_is_not(server: ServerProcess) -> None:
    with Client(server.address, block_size=2, layout_fingerprint="bf16") as client:
        assert client.stats().num_leases == 0


@pytest.mark.parametrize(
    "wrong",
    [{"timeout_s": 0}, {"block_size": 0}, {"engine_id": ""}, {"heartbeat_interval_s": -1}, {"max_message_bytes": 0}],
)
def test_senseless_settings_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Client("127.0.0.1:1", **wrong)


# Deadlines.


def test_a_server_that_never_answers_costs_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Client(address_of(silent), timeout_s=0.3) as client:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.match_prefix([1])
        assert time.monotonic() - began > 0.2
    assert DEFAULT_TIMEOUT_S == 5


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_no_server_is_known_at_once() -> None:
    with Client("127.0.0.1:1", timeout_s=100) as client, pytest.raises(NotConnected):
        client.stats()


def test_waiting_for_blocks(client: Client, server: ServerProcess) -> None:
    lease = client.match_prefix([1], num_blocks=60)
    for verb in (lambda: client.match_prefix([2], num_blocks=9), lambda: client.allocate(lease, num_blocks=9)):
        with pytest.raises(PoolExhausted):
            verb()
    for verb in (
        lambda: client.match_prefix([2], num_blocks=9, wait_s=2.5),
        lambda: client.allocate(client.match_prefix([3]), num_blocks=9, wait_s=2.5),
    ):
        assert wait_in_vain(verb) > 1
    client.release(lease)
    assert len(client.match_prefix([2], num_blocks=9, wait_s=60).block_table) == 9


# Until when.


def test_valid_until_is_the_ttl_after_the_last_answered_call_was_sent(client: Client) -> None:
    assert client.valid_until is None
    before = time.monotonic()
    lease = client.match_prefix([1, 2, 3], num_tokens=4)
    after = time.monotonic()
    assert client.valid_until is not None
    assert before + TTL_S <= client.valid_until <= after + TTL_S

    before = time.monotonic()
    with pytest.raises(PoolExhausted):
        client.allocate(lease, num_blocks=1000)
    assert client.valid_until >= before + TTL_S, "the server heard of the engine, and said no"
    known = client.valid_until
    client.stats()
    assert client.valid_until == known, "it does not say which engine asks"
    with client.batch() as batch:
        batch.probe([1])
    assert client.valid_until > known


def test_without_an_engine_each_lease_has_its_own_time(server: ServerProcess) -> None:
    with Client(server.address) as client:
        assert client.valid_until is None
        first = client.match_prefix([1], num_tokens=2)
        until = client.valid_until
        assert until is not None
        client.match_prefix([2], num_tokens=2)
        client.probe([2])
        assert client.valid_until == until
        client.allocate(first, num_tokens=4)
        assert client.valid_until > until
        client.renew(first, ttl_s=900)
        assert client.valid_until < time.monotonic() + TTL_S
    assert_all_but(server, first)


def assert_all_but(server: ServerProcess, promised: Any) -> None:
    """Only the promised lease was left; give it back, too."""
    with Client(server.address) as client:
        assert client.stats().num_leases == 1
        client.release(promised)
    assert_all_returned(server.address)


# Closing.


def test_an_orderly_close_gives_back_what_was_opened_here(server: ServerProcess) -> None:
    engine = new_engine()
    with Client(server.address, engine_id=engine) as client, Client(server.address) as other:
        kept = other.match_prefix([7], num_tokens=2)
        for number in range(5):
            client.match_prefix([number], num_tokens=2)
        released = client.match_prefix([9], num_tokens=2)
        other.release(released.lease_id)
        assert other.stats().num_leases == 6
        client.allocate(kept, num_tokens=4)
        client.close()
        assert other.stats().num_leases == 1
    assert_all_returned(server.address)


def test_a_close_leaves_what_was_promised_to_live(server: ServerProcess) -> None:
    with Client(server.address, engine_id=new_engine()) as client:
        lease = client.match_prefix([1, 2], num_tokens=2)
        client.renew(lease, ttl_s=100)
        client.match_prefix([3, 4], num_tokens=2)
    assert_all_but(server, lease)


def test_a_closed_client_says_so(server: ServerProcess) -> None:
    client = Client(server.address, engine_id=new_engine())
    client.stats()
    client.close()
    client.close()
    for verb in (client.stats, client.describe, client.heartbeat, lambda: client.probe([1])):
        with pytest.raises(ServiceUnavailable, match="closed"):
            verb()


def test_a_broken_connection_moves_no_lease(server: ServerProcess) -> None:
    with (
        Client(server.address) as other,
        Proxy(server.address) as proxy,
        Client(proxy.address, engine_id=new_engine()) as client,
    ):
        lease = client.match_prefix([1, 2, 3], num_tokens=6)
        client.insert(lease, [1, 2])
        proxy.cut()
        assert other.stats().num_leases == 1
        assert client.probe([1, 2, 3]) == 2, "what may be done twice is"
        client.allocate(lease, num_tokens=8)
        assert len(lease.block_table) == 4
        assert other.stats().num_leases == 1
    assert_all_returned(server.address)


def test_a_client_that_vanishes_gives_nothing_back(server: ServerProcess) -> None:
    client = Client(server.address, engine_id=new_engine())
    lease = client.match_prefix([1], num_tokens=2)
    client._channel.close()
    with Client(server.address) as other:
        assert other.stats().num_leases == 1
        other.release(lease)


# Large and small.


def test_a_million_tokens_there_and_back() -> None:
    count = 1_048_576
    tokens = array("I", range(count)).tobytes()
    with ServerProcess(num_blocks=count, block_size=1) as server, Client(server.address, timeout_s=60) as client:
        lease = client.match_prefix(tokens, num_tokens=count)
        assert len(lease.block_table) == count
        result = client.insert(lease, tokens)
        assert (len(result.block_ids), lease.num_published_tokens) == (count, count)
        twin = client.match_prefix(tokens)
        assert twin.block_table == lease.block_table
        client.release(lease)
        with client.batch() as batch:
            again = batch.match_prefix(tokens)
        assert again.result().num_cached_tokens == count
        with client.session() as session:
            assert session.match_prefix(tokens).block_table == twin.block_table
        with pytest.raises(InvalidTokens, match="1048576"):
            client.probe(tokens + b"more")


def test_a_message_that_is_too_long_is_not_sent(server: ServerProcess) -> None:
    with Client(server.address, max_message_bytes=1000) as client:
        with pytest.raises(InvalidArgument, match="1000 bytes"):
            client.match_prefix(bytes(2000), num_tokens=2)
        with pytest.raises(InvalidArgument, match="1000 bytes"), client.batch() as batch:
            batch.match_prefix(bytes(2000), num_tokens=2)
    assert_all_returned(server.address)


def test_an_answer_that_is_too_long_leaves_nothing_behind(server: ServerProcess) -> None:
    client = Client(server.address, engine_id=new_engine(), max_message_bytes=300)
    with client, pytest.raises(RadixCacheError, match="larger than max"):
        client.match_prefix([], num_blocks=64)
    assert_all_returned(server.address)


def test_the_tree_can_be_looked_at(client: Client) -> None:
    lease = client.match_prefix([1, 2, 3, 4], ("m",), num_tokens=4)
    client.insert(lease, [1, 2, 3, 4])
    root, node = client.dump(("m",))
    assert (root.namespace, root.depth, node.num_tokens, node.num_locks) == (("m",), 0, 4, 1)
    assert node.block_ids == lease.block_table.tobytes()
    assert client.dump(("m",), max_nodes=1) == [root]
    assert client.dump(max_nodes=0) == []
    with pytest.raises(InvalidArgument):
        client.dump("m")


def test_stats_tell_of_the_server_too(client: Client) -> None:
    client.probe([1])
    stats = client.stats()
    assert stats.num_calls["Probe/OK"] >= 1
    assert stats.latencies["Probe"].num_samples >= 1
    assert stats.uptime_s > 0
    assert client.num_available_blocks == 64
