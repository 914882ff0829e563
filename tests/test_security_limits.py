"""What one client may have open at most: refused with the limit's name and value, and nothing changed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import trustme
from client_help import wait_until
from routes import FileClock
from security_help import (
    ALICE,
    DEADLINE_S,
    ENTRIES,
    MINE,
    ROOT,
    THEIRS,
    Issued,
    Tenant,
    refusal,
    root_of,
    tenant_of,
    write_tokens,
)
from service_process import ServerProcess, pack, reason_in, stub_to

from radix_cache.errors import InvalidArgument, LimitExceeded
from radix_cache_service import Client, Tls
from radix_cache_service.config import ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb

NUM_LEASES, NUM_NAMESPACES = 3, 2


def limit(name: str, value: int) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    return grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED", {"limit": name, "value": str(value)}


LEASES = limit("max_leases_per_client", NUM_LEASES)
NAMESPACES = limit("max_namespaces_per_client", NUM_NAMESPACES)


def opens(lease_id: str, namespace: tuple[str, ...] = MINE, **more: Any) -> pb.MatchPrefixRequest:
    return pb.MatchPrefixRequest(lease_id=lease_id, namespace=namespace, num_tokens=2, **more)


def batch(*requests: Any, **more: Any) -> pb.BatchRequest:
    fields = {pb.MatchPrefixRequest: "match_prefix", pb.ReleaseRequest: "release", pb.InsertRequest: "insert"}
    operations = [pb.Operation(**{fields[type(request)]: request}) for request in requests]
    return pb.BatchRequest(operations=operations, **more)


def gives_back(lease_id: str) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(lease_id=lease_id)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = write_tokens(tmp_path_factory.mktemp("tokens") / "tokens.toml", ENTRIES)
    limits = {
        "max_calls_per_client": 2,
        "max_streams_per_client": 2,
        "max_leases_per_client": NUM_LEASES,
        "max_namespaces_per_client": NUM_NAMESPACES,
    }
    with ServerProcess(num_blocks=16, lease_ttl_s=1000, tokens_file=path, **limits) as server:
        yield server.address


def num_leases(root: Tenant) -> int:
    return int(root.GetStats(pb.GetStatsRequest()).num_leases)


# Leases.


def test_one_lease_too_many(alice: Tenant, bob: Tenant, root: Tenant) -> None:
    """Nothing is changed by it, others are not concerned, and each way out of a lease makes room."""
    for name in "abc":
        alice.MatchPrefix(opens(name))
    before = root.GetStats(pb.GetStatsRequest()).counters
    assert refusal(lambda: alice.MatchPrefix(opens("d"))) == LEASES
    assert refusal(lambda: alice.MatchPrefix(pb.MatchPrefixRequest(lease_id="d", parent_lease_id="a"))) == LEASES
    assert root.GetStats(pb.GetStatsRequest()).counters == before
    bob.MatchPrefix(opens("e", THEIRS))
    root.Release(gives_back("a"))
    alice.MatchPrefix(opens("d"))
    assert refusal(lambda: alice.MatchPrefix(opens("f"))) == LEASES


def test_the_same_lease_again_is_no_further_one(alice: Tenant) -> None:
    for name in "abc":
        alice.MatchPrefix(opens(name))
    assert alice.MatchPrefix(opens("c")).lease_id == "c"


def test_leases_of_a_batch_are_counted_before_it_runs(alice: Tenant, root: Tenant) -> None:
    """With those that the batch gives back on the way."""
    alice.MatchPrefix(opens("a"))
    found = alice.Batch(batch(*map(opens, "bcd"), gives_back("a"), opens("e"), gives_back("e"), opens("f"), opens("g")))
    assert [result.error.code for result in found.results] == [0, 0, 8, 0, 0, 0, 0, 8]
    assert reason_in(found.results[2].error) == LEASES[1:]
    assert num_leases(root) == NUM_LEASES


def test_what_fails_in_a_batch_makes_no_room(alice: Tenant, root: Tenant) -> None:
    """A name in use, a release that fails with it, a release of what never was, and one twice."""
    for name in "abc":
        alice.MatchPrefix(opens(name))
    for trick in (
        [opens("a"), gives_back("a")],
        [opens("a", THEIRS), gives_back("a")],
        [gives_back("never"), gives_back("never")],
        [pb.MatchPrefixRequest(lease_id="a", parent_lease_id="never"), gives_back("a")],
    ):
        found = alice.Batch(batch(*trick, opens("d"), opens("e"))).results
        assert [result.error.code for result in found[-2:]] == [8, 8], trick
        assert num_leases(root) == NUM_LEASES
    found = alice.Batch(batch(gives_back("a"), gives_back("a"), opens("d"), opens("e"))).results
    assert [result.error.code for result in found] == [0, 5, 0, 8]


def test_a_lease_that_expires_makes_room(tmp_path: Path) -> None:
    with ServerProcess(lease_ttl_s=0.3, max_leases_per_client=1) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(opens("a"), timeout=DEADLINE_S)
        wait_until(lambda: _is_answered(stub, opens("b")))


def _is_answered(stub: Any, request: Any) -> bool:
    try:
        stub.MatchPrefix(request, timeout=DEADLINE_S)
    except grpc.RpcError:
        return False
    return True


@pytest.mark.parametrize("tokens", [True, False])
def test_leases_that_a_restart_brings_back_count(tmp_path: Path, tokens: bool) -> None:
    """For the client whose they were: by its token, or once its engine is heard of or a lease is named again."""
    settings: dict[str, Any] = {"state_dir": tmp_path / "state", "max_leases_per_client": NUM_LEASES}
    if tokens:
        settings["tokens_file"] = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    for is_first in (True, False):
        server = ServerProcess(**settings)
        with tenant_of(server.address, ALICE if tokens else None) as alice:
            if is_first:
                alice.MatchPrefix(opens("a", engine_id="E"))
                alice.Batch(batch(opens("b"), engine_id="E"))
                alice.MatchPrefix(opens("c"))
            else:
                alice.Renew(pb.RenewRequest(engine_id="E"))
                alice.Renew(pb.RenewRequest(lease_id="c"))
            assert refusal(lambda t=alice: t.MatchPrefix(opens("d", engine_id="E"))) == LEASES
            alice.Release(gives_back("c"))
            alice.MatchPrefix(opens("c"))
            assert refusal(lambda t=alice: t.MatchPrefix(opens("d", engine_id="new"))) == LEASES
        if tokens:
            with tenant_of(server.address, ROOT) as root:
                root.MatchPrefix(opens("other", THEIRS))
                root.Release(gives_back("other"))
        server.stop(signal.SIGKILL)


def test_a_lease_of_before_a_restart_counts_no_more_when_its_name_is_another_s(tmp_path: Path) -> None:
    clock = FileClock(tmp_path / "clock")
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    settings = {"state_dir": tmp_path / "state", "lease_ttl_s": 10, "test_clock": clock.path}
    server = ServerProcess(**settings, tokens_file=path, max_leases_per_client=1)
    with tenant_of(server.address, ALICE) as alice:
        alice.MatchPrefix(opens("a", engine_id="E"))
    server.stop(signal.SIGKILL)
    with (
        ServerProcess(**settings, tokens_file=path, max_leases_per_client=1) as server,
        tenant_of(server.address, ALICE) as alice,
        tenant_of(server.address, ROOT) as root,
    ):
        clock.advance(11)
        wait_until(lambda: num_leases(root) == 0)
        root.MatchPrefix(opens("a"))
        alice.MatchPrefix(opens("b"))
        assert refusal(lambda: root.MatchPrefix(opens("c"))) == limit("max_leases_per_client", 1)


def test_a_repeated_batch_gets_its_answer_at_the_limit(alice: Tenant) -> None:
    """Although its matches would be too many if it ran."""
    step = batch(*map(opens, "abc"), engine_id="engine", seq=1)
    first = alice.Batch(step)
    assert alice.Batch(step).results == first.results


# Namespaces.


def test_one_namespace_too_many(alice: Tenant, bob: Tenant, root: Tenant) -> None:
    """One counts as long as there is anything in it, of a lease or cached."""
    first, second, third = ((*MINE, part) for part in ("x", "y", "z"))
    alice.MatchPrefix(opens("a", first))
    alice.Insert(pb.InsertRequest(lease_id="a", tokens=pack(1, 2)))
    alice.Release(gives_back("a"))
    alice.MatchPrefix(opens("b", second))
    assert refusal(lambda: alice.MatchPrefix(opens("c", third))) == NAMESPACES
    found = alice.Batch(batch(opens("c", first), opens("d", third))).results
    assert [result.error.code for result in found] == [0, 8]
    bob.MatchPrefix(opens("e", THEIRS))
    alice.Batch(batch(gives_back("c"), gives_back("b")))
    alice.MatchPrefix(opens("b", third))
    assert refusal(lambda: alice.MatchPrefix(opens("c", second))) == NAMESPACES
    alice.Reset(pb.ResetRequest(namespace=first))
    alice.MatchPrefix(opens("c", second))


def test_namespaces_of_one_batch(alice: Tenant) -> None:
    found = alice.Batch(batch(*(opens(name, (*MINE, name)) for name in "abc"))).results
    assert [result.error.code for result in found] == [0, 0, 8]
    assert reason_in(found[2].error) == NAMESPACES[1:]


# Streams and calls.


def test_one_stream_too_many(alice: Tenant, bob: Tenant) -> None:
    """Of this client; and one that ends makes room."""
    ends: list[SimpleQueue[Any]] = []

    def opened(tenant: Tenant) -> Any:
        messages: SimpleQueue[Any] = SimpleQueue()
        messages.put(pb.SessionRequest())
        ends.append(messages)
        session = tenant.stub.Session(iter(messages.get, None), metadata=tenant.metadata, timeout=DEADLINE_S)
        assert next(session).HasField("batch")
        return session

    first, _ = opened(alice), opened(alice)
    assert refusal(lambda: opened(alice)) == limit("max_streams_per_client", 2)
    opened(bob)
    ends[0].put(None)
    assert list(first) == []
    opened(alice)
    for messages in ends:
        messages.put(None)


def test_one_call_too_many(alice: Tenant, bob: Tenant, root: Tenant) -> None:
    """Calls that wait for blocks are in flight all the while."""
    root.MatchPrefix(pb.MatchPrefixRequest(lease_id="a", num_blocks=16))
    waits = [
        alice.stub.MatchPrefix.future(opens(name, wait=True), timeout=DEADLINE_S, metadata=alice.metadata)
        for name in "bc"
    ]
    wait_until(lambda: root.GetStats(pb.GetStatsRequest()).num_waiting_calls == 2)
    assert refusal(lambda: alice.Describe(pb.DescribeRequest())) == limit("max_calls_per_client", 2)
    bob.Describe(pb.DescribeRequest())
    root.Release(gives_back("a"))
    assert [call.result().lease_id for call in waits] == ["b", "c"]
    alice.Describe(pb.DescribeRequest())


# Who counts as one client, where there are no tokens.


def test_without_tokens_a_host_is_one_client(tmp_path: Path) -> None:
    """Whatever its connections, and whatever it calls its engines; all on unix sockets are another one."""
    with ServerProcess("127.0.0.1:0", f"unix:{tmp_path}/s.sock", max_leases_per_client=1) as server:
        for address in server.addresses:
            with stub_to(address) as one, stub_to(address) as other:
                one.MatchPrefix(opens(address[:8], engine_id="one"), timeout=DEADLINE_S)
                request = opens("late", engine_id="other")
                found = refusal(lambda s=other, r=request: s.MatchPrefix(r, timeout=DEADLINE_S))
                assert found == limit("max_leases_per_client", 1)


def test_without_tokens_a_certificate_is_one_client(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = Issued(tmp_path, authority, "127.0.0.1")
    root = root_of(tmp_path, "root", authority)
    files = {"tls_certificate": issued.certificate, "tls_private_key": issued.private_key, "tls_client_ca": root}
    with ServerProcess(max_leases_per_client=1, **files) as server:
        for name in ("engine-0.example", "engine-1.example"):
            shown = Issued(tmp_path, authority, name)
            tls = Tls(root, shown.certificate, shown.private_key)
            with Client(server.address, name, tls=tls) as one, Client(server.address, "other", tls=tls) as other:
                one.match_prefix([1, 2], num_tokens=2)
                with pytest.raises(LimitExceeded) as caught:
                    other.match_prefix([1, 2], num_tokens=2)
                assert (caught.value.limit, caught.value.value) == ("max_leases_per_client", 1)
                assert isinstance(caught.value, RuntimeError)


# Settings.


@pytest.mark.parametrize("name", ["calls", "streams", "leases", "namespaces"])
def test_limits_that_cannot_be(name: str) -> None:
    field = f"max_{name}_per_client"
    for value in (0, -1, 1.5, "3", True):
        with pytest.raises(InvalidArgument, match=field):
            ServerConfig(**{"num_blocks": 8, field: value})
