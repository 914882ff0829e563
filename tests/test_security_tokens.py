"""Bearer tokens: who is let in, to which methods and namespaces, alone, in batches and in streams."""

from __future__ import annotations

import hashlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from client_help import wait_until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kept import Engine, Kept
from routes import FileClock
from security_help import (
    ALICE,
    BOB,
    DEADLINE_S,
    ENTRIES,
    MINE,
    READER,
    ROOT,
    THEIRS,
    Tenant,
    refusal,
    said,
    tenant_of,
    write_tokens,
)
from service_process import ServerProcess, StartFailed, pack, reason_in

from radix_cache.errors import InvalidArgument
from radix_cache_service.access.rules import RULES
from radix_cache_service.access.tokens import TokenFile
from radix_cache_service.config import ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb

PROMPT = (1, 2, 3, 4)
UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", {})
RENEWED = "alice-new-0123456789"
DENIED = (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", {})


def unknown(lease_id: str) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    return grpc.StatusCode.NOT_FOUND, "UNKNOWN_LEASE", {"lease_id": lease_id}


def opens(lease_id: str, namespace: tuple[str, ...] = MINE, **more: Any) -> pb.MatchPrefixRequest:
    return pb.MatchPrefixRequest(tokens=pack(*PROMPT), lease_id=lease_id, namespace=namespace, **more)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = write_tokens(tmp_path_factory.mktemp("tokens") / "tokens.toml", ENTRIES)
    with ServerProcess(num_blocks=64, lease_ttl_s=1000, tokens_file=path) as server:
        yield server.address


def caches(tenant: Tenant, namespace: tuple[str, ...], lease_id: str = "a") -> None:
    """Have the prompt cached in a namespace, and a lease on it open."""
    tenant.MatchPrefix(opens(lease_id, namespace, num_tokens=6))
    tenant.Insert(pb.InsertRequest(lease_id=lease_id, tokens=pack(*PROMPT)))


# Who is let in.

REQUESTS: dict[str, Any] = {
    "MatchPrefix": opens("x"),
    "Allocate": pb.AllocateRequest(lease_id="x", num_blocks=1),
    "Insert": pb.InsertRequest(lease_id="x"),
    "Free": pb.FreeRequest(lease_id="x"),
    "Release": pb.ReleaseRequest(lease_id="x"),
    "Renew": pb.RenewRequest(lease_id="x"),
    "Probe": pb.ProbeRequest(namespace=MINE),
    "Evict": pb.EvictRequest(),
    "Reset": pb.ResetRequest(namespace=MINE),
    "Batch": pb.BatchRequest(),
    "Session": iter([pb.SessionRequest()]),
    "GetStats": pb.GetStatsRequest(),
    "Describe": pb.DescribeRequest(),
    "DumpTree": pb.DumpTreeRequest(),
    "WatchEvents": pb.WatchEventsRequest(),
    "ListLeases": pb.ListLeasesRequest(),
    "ReleaseEngine": pb.ReleaseEngineRequest(engine_id="x"),
}


def test_every_method_has_a_rule_and_is_tried_here() -> None:
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["PrefixCacheService"].methods}
    assert methods == RULES.keys() - {"Pin", "ServerReflectionInfo"}
    assert methods == REQUESTS.keys()


def test_the_documented_table_is_the_one_in_force() -> None:
    text = (Path(__file__).parent.parent / "docs" / "security.md").read_text()
    rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|$", text, re.MULTILINE)
    for method, rule in RULES.items():
        found = [row for row in rows if method in re.findall(r"\w+", row[0]) and (rule.right or "any") in row[1]]
        assert found, method
        assert all((where.strip() == "everywhere") is rule.everywhere for _, _, where in found), method


@pytest.mark.parametrize("token", [None, "nobody-0123456789abcdef", ALICE[:-1], ALICE.upper(), ""])
def test_nothing_is_answered_without_a_token_that_is_known(address: str, token: str | None) -> None:
    with tenant_of(address, token) as tenant:
        for method, request in REQUESTS.items():
            assert refusal(lambda m=method, r=request: getattr(tenant, m)(r)) == UNAUTHENTICATED, method


def test_one_token_in_one_form(address: str) -> None:
    with tenant_of(address, None) as tenant:
        for values in ([f"Basic {ALICE}"], [ALICE], ["Bearer"], [f"Bearer {ALICE}", f"Bearer {ALICE}"]):
            tenant.metadata = tuple(("authorization", value) for value in values)
            assert refusal(lambda: tenant.Describe(pb.DescribeRequest())) == UNAUTHENTICATED
        tenant.metadata = (("authorization", f"bearer {ALICE}"),)
        assert tenant.Describe(pb.DescribeRequest()).block_size == 2


def test_an_unknown_caller_s_message_is_not_read(address: str) -> None:
    """The refusal comes although the message never does."""
    with tenant_of(address, None) as tenant:
        stream = tenant.stub.Session(iter(lambda: time.sleep(60), None), timeout=DEADLINE_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_refusals_are_counted(root: Tenant, address: str) -> None:
    with tenant_of(address, None) as nobody:
        refusal(lambda: nobody.Probe(pb.ProbeRequest()))
    assert root.GetStats(pb.GetStatsRequest()).num_calls["Probe/UNAUTHENTICATED"] >= 1


def test_health_is_open_and_reflection_is_not(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "radixcache.v1.PrefixCacheService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

        def listed(**options: Any) -> Any:
            wanted = reflection_pb2.ServerReflectionRequest(list_services="")
            return next(reflection.ServerReflectionInfo(iter([wanted]), timeout=DEADLINE_S, **options))

        assert refusal(listed) == UNAUTHENTICATED
        found = listed(metadata=(("authorization", f"Bearer {READER}"),))
        assert "radixcache.v1.PrefixCacheService" in [each.name for each in found.list_services_response.service]


# Rights.


def test_a_reader_may_ask_and_nothing_else(address: str, alice: Tenant) -> None:
    caches(alice, MINE)
    with tenant_of(address, READER) as reader:
        assert reader.Probe(pb.ProbeRequest(tokens=pack(*PROMPT), namespace=MINE)).num_cached_tokens == 4
        assert reader.Describe(pb.DescribeRequest()).block_size == 2
        for method, rule in RULES.items():
            if rule.right not in {"read", None} and method != "Pin":
                assert refusal(lambda m=method: getattr(reader, m)(REQUESTS[m])) == DENIED, method
        batch = pb.BatchRequest(
            operations=[
                pb.Operation(match_prefix=opens("x")),
                pb.Operation(release=pb.ReleaseRequest(lease_id="a")),
                pb.Operation(probe=pb.ProbeRequest(tokens=pack(*PROMPT), namespace=MINE)),
                pb.Operation(evict=pb.EvictRequest(num_blocks=9)),
                pb.Operation(reset=pb.ResetRequest(namespace=MINE)),
            ]
        )
        refused = [result.error.code for result in reader.Batch(batch).results]
        assert refused == [7, 7, 0, 7, 7]


def test_a_pin_needs_a_right_of_its_own(tmp_path: Path) -> None:
    entry = {**ENTRIES[0], "rights": ["write"]}
    path = write_tokens(tmp_path / "tokens.toml", [entry])
    with ServerProcess(tokens_file=path) as server, tenant_of(server.address, ALICE) as alice:
        caches(alice, MINE)
        assert refusal(lambda: alice.MatchPrefix(opens("b", pin_s=5))) == DENIED
        write_tokens(path, [{**entry, "rights": ["write", "admin"]}])
        wait_until(lambda: _is_pinned(alice))


def _is_pinned(tenant: Tenant) -> bool:
    try:
        return tenant.MatchPrefix(opens("b", pin_s=5)).num_cached_tokens == 4
    except grpc.RpcError:
        return False


def test_what_concerns_everybody_needs_a_token_for_everything(alice: Tenant, root: Tenant) -> None:
    for call in (
        lambda tenant: tenant.GetStats(pb.GetStatsRequest()),
        lambda tenant: tenant.Evict(pb.EvictRequest(num_blocks=1)),
        lambda tenant: tenant.Reset(pb.ResetRequest()),
        lambda tenant: tenant.Reset(pb.ResetRequest(namespace=MINE[:1])),
    ):
        assert refusal(lambda c=call: c(alice)) == DENIED
        call(root)


# Namespaces.


def test_a_namespace_is_the_token_s_or_is_refused(alice: Tenant, bob: Tenant) -> None:
    """Whether anything is cached there or not, in the same words; and nothing is changed."""
    caches(bob, THEIRS)
    for name in (THEIRS, ("m", "nobody"), (), MINE[:1], ("m", "alice2"), ("m", "ali", "ce"), ("", *MINE)):
        for call in (
            lambda n: alice.MatchPrefix(opens("b", n)),
            lambda n: alice.Probe(pb.ProbeRequest(tokens=pack(*PROMPT), namespace=n)),
            lambda n: alice.Reset(pb.ResetRequest(namespace=n, tokens=pack(1, 2))),
        ):
            found = said(lambda c=call, n=name: c(n))
            assert found == said(lambda c=call: c(("m", "never used")))
            assert found[0] == "StatusCode.PERMISSION_DENIED"
    assert bob.Probe(pb.ProbeRequest(tokens=pack(*PROMPT), namespace=THEIRS)).num_cached_tokens == 4
    below = (*MINE, "w7")
    alice.MatchPrefix(opens("b", below))
    assert alice.Probe(pb.ProbeRequest(tokens=pack(*PROMPT), namespace=below)).num_cached_tokens == 0


ON_A_LEASE: dict[str, Callable[[str], Any]] = {
    "Allocate": lambda name: pb.AllocateRequest(lease_id=name, num_blocks=1),
    "Insert": lambda name: pb.InsertRequest(lease_id=name, tokens=pack(9, 9)),
    "Free": lambda name: pb.FreeRequest(lease_id=name, block_ids=[2]),
    "Release": lambda name: pb.ReleaseRequest(lease_id=name),
    "Renew": lambda name: pb.RenewRequest(lease_id=name),
    "MatchPrefix": lambda name: pb.MatchPrefixRequest(lease_id="b", parent_lease_id=name),
}


@pytest.mark.parametrize("method", ON_A_LEASE)
def test_a_lease_of_others_is_as_unknown_as_one_that_never_was(method: str, alice: Tenant, bob: Tenant) -> None:
    caches(bob, THEIRS, "theirs")
    for name in ("theirs", "never0"):
        request = ON_A_LEASE[method](name)
        assert refusal(lambda r=request: getattr(alice, method)(r)) == unknown(name)
    theirs, never = (said(lambda n=n: getattr(alice, method)(ON_A_LEASE[method](n))) for n in ("theirs", "never0"))
    assert [part.replace("never0", "theirs") for part in never] == list(theirs)
    bob.Release(pb.ReleaseRequest(lease_id="theirs"))


def test_the_same_in_a_batch_and_in_a_session(alice: Tenant, bob: Tenant) -> None:
    caches(bob, THEIRS, "theirs")
    fields = {"Allocate": "allocate", "Insert": "insert", "Free": "free", "Release": "release", "Renew": "renew"}
    items = [pb.Operation(**{fields.get(m, "match_prefix"): make("theirs")}) for m, make in ON_A_LEASE.items()]
    batch = pb.BatchRequest(operations=[*items, pb.Operation(match_prefix=opens("a", THEIRS))])
    stream = alice.stub.Session(iter([pb.SessionRequest(batch=batch)]), timeout=DEADLINE_S, metadata=alice.metadata)
    for results in (alice.Batch(batch).results, next(stream).batch.results):
        assert [reason_in(result.error) for result in results] == [
            *[("UNKNOWN_LEASE", {"lease_id": "theirs"})] * len(items),
            ("PERMISSION_DENIED", {}),
        ]
    bob.Release(pb.ReleaseRequest(lease_id="theirs"))


def test_an_operation_on_a_lease_that_its_batch_opens(alice: Tenant, bob: Tenant) -> None:
    """What is refused at the opening is refused with the same words afterwards; what is the token's goes through."""
    found = alice.Batch(
        pb.BatchRequest(
            operations=[
                pb.Operation(match_prefix=opens("a", num_tokens=2)),
                pb.Operation(match_prefix=pb.MatchPrefixRequest(lease_id="b", parent_lease_id="a")),
                pb.Operation(insert=pb.InsertRequest(lease_id="a", tokens=pack(1, 2))),
                pb.Operation(match_prefix=opens("c", THEIRS)),
                pb.Operation(release=pb.ReleaseRequest(lease_id="c")),
                pb.Operation(release=pb.ReleaseRequest(lease_id="a")),
            ]
        )
    ).results
    assert [result.error.code for result in found] == [0, 0, 0, 7, 7, 0]


def test_the_name_of_a_lease_of_others_is_in_use_and_stays_theirs(alice: Tenant, bob: Tenant) -> None:
    """Also for a request that is theirs to the last bit, which would get the lease if they sent it again."""
    request = opens("a", THEIRS, num_tokens=2)
    bob.MatchPrefix(request)
    mine = opens("a", num_tokens=2)
    assert refusal(lambda: alice.MatchPrefix(mine))[1] == "INVALID_ARGUMENT"
    assert refusal(lambda: alice.MatchPrefix(request)) == DENIED
    results = alice.Batch(
        pb.BatchRequest(
            operations=[
                pb.Operation(match_prefix=mine),
                pb.Operation(release=pb.ReleaseRequest(lease_id="a")),
            ]
        )
    ).results
    assert [result.error.code for result in results] == [3, 3]
    assert bob.MatchPrefix(request).lease_id == "a"


def test_an_expired_lease_of_others_is_unknown_and_one_s_own_is_expired(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with (
        ServerProcess(lease_ttl_s=0.2, tokens_file=path) as server,
        tenant_of(server.address, ALICE) as alice,
        tenant_of(server.address, BOB) as bob,
    ):
        bob.MatchPrefix(opens("theirs", THEIRS))
        alice.MatchPrefix(opens("mine"))
        time.sleep(0.5)
        assert refusal(lambda: alice.Release(pb.ReleaseRequest(lease_id="theirs"))) == unknown("theirs")
        assert refusal(lambda: alice.Release(pb.ReleaseRequest(lease_id="mine")))[1] == "LEASE_EXPIRED"
        assert refusal(lambda: bob.Release(pb.ReleaseRequest(lease_id="theirs")))[1] == "LEASE_EXPIRED"


def test_the_tree_is_shown_as_far_as_it_is_the_token_s(address: str, alice: Tenant, bob: Tenant, root: Tenant) -> None:
    caches(alice, MINE, "a")
    caches(alice, (*MINE, "w7"), "b")
    caches(bob, THEIRS, "c")

    def shown(tenant: Tenant, *namespace: str, max_nodes: int = 0) -> list[tuple[str, ...]]:
        pieces = tenant.DumpTree(pb.DumpTreeRequest(namespace=namespace, max_nodes=max_nodes, max_span_tokens=4))
        return sorted({tuple(node.namespace) for piece in pieces for node in piece.nodes})

    assert shown(root) == [MINE, (*MINE, "w7"), THEIRS]
    for tenant, wanted in ((alice, [MINE, (*MINE, "w7")]), (bob, [THEIRS])):
        assert shown(tenant) == shown(tenant, "m") == wanted
    assert shown(alice, *MINE, "w7") == [(*MINE, "w7")]
    assert shown(alice, max_nodes=1) == [MINE]
    for name in (THEIRS, ("nobody",)):
        assert refusal(lambda n=name: shown(alice, *n)) == DENIED
    with tenant_of(address, READER) as reader:
        assert refusal(lambda: shown(reader)) == DENIED


def test_leases_are_shown_and_ended_as_far_as_they_are_the_token_s(alice: Tenant, bob: Tenant, root: Tenant) -> None:
    """Also those of an engine that another token names, as far as they are in the same namespace."""
    alice.MatchPrefix(opens("a", engine_id="e"))
    bob.MatchPrefix(opens("b", THEIRS, engine_id="e"))
    root.MatchPrefix(opens("c", MINE, engine_id="e"))
    root.MatchPrefix(opens("d", THEIRS, engine_id="e"))

    def shown(tenant: Tenant) -> list[str]:
        return [info.lease_id for piece in tenant.ListLeases(pb.ListLeasesRequest()) for info in piece.leases]

    assert (shown(root), shown(alice), shown(bob)) == (["a", "b", "c", "d"], ["a", "c"], ["b", "d"])
    for engine_id, num_released in (("e", 0), ("bob/e", 0), ("root/e", 1), ("alice/e", 1)):
        request = pb.ReleaseEngineRequest(engine_id=engine_id)
        assert alice.ReleaseEngine(request).num_released_leases == num_released
    assert shown(root) == ["b", "d"]


# Engines.


def test_nobody_gets_the_answers_to_another_s_batch(alice: Tenant, bob: Tenant) -> None:
    """Although the engine has the same name and the batch the same number; nor is anybody's numbering disturbed."""
    batch = pb.BatchRequest(
        operations=[pb.Operation(match_prefix=opens("a", num_tokens=8))], engine_id="engine-0", seq=5
    )
    first = alice.Batch(batch)
    other = pb.BatchRequest(operations=[pb.Operation(probe=pb.ProbeRequest(namespace=THEIRS))], engine_id="engine-0")
    other.seq = 5
    assert bob.Batch(other).results[0].HasField("probe")
    other.seq = 2**60
    bob.Batch(other)
    assert alice.Batch(batch).results == first.results
    batch.seq = 6
    assert alice.Batch(batch).seq == 6


def test_nobody_keeps_another_s_leases_alive(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with (
        ServerProcess(lease_ttl_s=0.3, tokens_file=path) as server,
        tenant_of(server.address, ALICE) as alice,
        tenant_of(server.address, BOB) as bob,
        tenant_of(server.address, ROOT) as root,
    ):
        alice.MatchPrefix(opens("a", engine_id="engine-0", num_tokens=2))
        for _ in range(10):
            bob.Renew(pb.RenewRequest(engine_id="engine-0"))
            time.sleep(0.05)
        assert root.GetStats(pb.GetStatsRequest()).num_leases == 0


def test_an_engine_s_name_has_room_for_the_token_s(alice: Tenant) -> None:
    room = 256 - len("alice/")
    alice.Renew(pb.RenewRequest(engine_id="e" * room))
    error = said(lambda: alice.Renew(pb.RenewRequest(engine_id="e" * (room + 1))))
    assert f"at most {room} characters" in error[1]


# The file.


def test_a_changed_file_counts_from_the_next_call_on(tmp_path: Path) -> None:
    """Also in a session that was open before; and who is left keeps the leases."""
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    with (
        ServerProcess(tokens_file=path) as server,
        tenant_of(server.address, ALICE) as alice,
        tenant_of(server.address, BOB) as bob,
    ):
        alice.MatchPrefix(opens("a", engine_id="e"))
        messages: SimpleQueue[Any] = SimpleQueue()
        session = alice.stub.Session(iter(messages.get, None), metadata=alice.metadata, timeout=DEADLINE_S)
        asks = pb.SessionRequest(batch=pb.BatchRequest(operations=[pb.Operation(probe=_probe(MINE))]))
        messages.put(asks)
        assert next(session).batch.results[0].HasField("probe")
        digest = hashlib.sha256(RENEWED.encode()).hexdigest()
        write_tokens(path, [{**ENTRIES[0], "sha256": digest}, *ENTRIES[2:]])
        wait_until(lambda: _is_refused(bob))
        alice.MatchPrefix(opens("a", engine_id="e"))
        write_tokens(path, [{"name": "alice", "sha256": digest, "namespaces": [MINE], "rights": ["write"]}])
        wait_until(lambda: _is_refused(alice))
        messages.put(asks)
        assert refusal(lambda: next(session)) == UNAUTHENTICATED
        messages.put(None)
        with tenant_of(server.address, RENEWED) as again:
            again.MatchPrefix(opens("a", engine_id="e"))
            assert refusal(lambda: again.Probe(_probe(MINE))) == DENIED


def test_a_restart_with_state_gives_nobody_anything_of_others(tmp_path: Path) -> None:
    """What was refused before it stays refused, and leases are whose they were."""
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    settings = {"tokens_file": path, "state_dir": tmp_path / "state", "lease_ttl_s": 1000}
    steps = pb.BatchRequest(operations=[pb.Operation(match_prefix=opens("a", name)) for name in (THEIRS, MINE)])
    steps.engine_id, steps.seq = "engine", 1
    server = ServerProcess(**settings)
    with tenant_of(server.address, ALICE) as alice:
        before = alice.Batch(steps)
        assert [result.error.code for result in before.results] == [7, 0]
    server.stop(signal.SIGKILL)
    with (
        ServerProcess(**settings) as server,
        tenant_of(server.address, ALICE) as alice,
        tenant_of(server.address, BOB) as bob,
    ):
        assert alice.Batch(steps).results == before.results
        assert bob.Batch(pb.BatchRequest(engine_id="engine", seq=1)).results == []
        assert refusal(lambda: bob.Release(pb.ReleaseRequest(lease_id="a"))) == unknown("a")
        alice.Release(pb.ReleaseRequest(lease_id="a"))


@pytest.mark.parametrize(
    ("before", "after", "engine_id"),
    [
        (ALICE, ALICE, "e"),
        (ALICE, None, "e"),
        (None, ALICE, "e"),
        (None, ALICE, "host/e"),
        (None, ALICE, "carol/e"),
        (None, ALICE, "bob/e"),
    ],
    ids=["renamed", "none any more", "only now", "id with a slash", "its token's name in the id", "another's in it"],
)
def test_an_engine_under_another_name_than_its_leases_is_refused_until_they_ran_out(
    tmp_path: Path, before: str | None, after: str | None, engine_id: str
) -> None:
    """Its token was renamed, or tokens were begun or ended with, while the server was down: it could not keep them
    alive, and would believe so. Whoever else calls goes on.
    """
    clock = FileClock(tmp_path / "clock")
    settings = {"state_dir": tmp_path / "state", "lease_ttl_s": 10, "test_clock": clock.path}
    tokens = {"tokens_file": write_tokens(tmp_path / "tokens.toml", ENTRIES)}
    server = ServerProcess(**settings, **(tokens if before else {}))
    with tenant_of(server.address, before) as alice:
        alice.MatchPrefix(opens("a", engine_id=engine_id))
    server.stop(signal.SIGKILL)
    write_tokens(tmp_path / "tokens.toml", [{**ENTRIES[0], "name": "carol"}, *ENTRIES[1:]])
    with ServerProcess(**settings, **(tokens if after else {})) as server, tenant_of(server.address, after) as alice:
        beat = pb.RenewRequest(engine_id=engine_id)
        for _ in range(2):
            assert refusal(lambda: alice.Renew(beat)) == DENIED
            assert refusal(lambda: alice.Batch(pb.BatchRequest(engine_id=engine_id))) == DENIED
            alice.Renew(pb.RenewRequest(engine_id="f"))
            clock.advance(6)
        wait_until(lambda: _is_answered(lambda: alice.Renew(beat)))
        expired = (grpc.StatusCode.NOT_FOUND, "LEASE_EXPIRED", {"lease_id": "a"})
        assert refusal(lambda: alice.Release(pb.ReleaseRequest(lease_id="a"))) == expired


@pytest.mark.parametrize("engine_id", ["e", "host/e"])
def test_without_tokens_an_engine_keeps_its_leases_whatever_its_name(tmp_path: Path, engine_id: str) -> None:
    """Nor is one refused that is called like the end of another's id."""
    settings = {"state_dir": tmp_path / "state", "lease_ttl_s": 1000}
    for _ in range(2):
        server = ServerProcess(**settings)
        with tenant_of(server.address, None) as engine:
            engine.Renew(pb.RenewRequest(engine_id="e"))
            engine.MatchPrefix(opens("a", engine_id=engine_id))
        server.stop(signal.SIGKILL)


def test_an_engine_goes_on_though_another_tenant_s_of_its_id_lost_its_token(tmp_path: Path) -> None:
    """It has leases of its own, so it is not that one under another name."""
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    settings = {"state_dir": tmp_path / "state", "lease_ttl_s": 1000, "tokens_file": path}
    server = ServerProcess(**settings)
    with tenant_of(server.address, ALICE) as alice, tenant_of(server.address, BOB) as bob:
        alice.MatchPrefix(opens("a", engine_id="e"))
        bob.MatchPrefix(opens("b", THEIRS, engine_id="e"))
    server.stop(signal.SIGKILL)
    write_tokens(path, ENTRIES[1:])
    beat = pb.RenewRequest(engine_id="e")
    with (
        ServerProcess(**settings) as server,
        tenant_of(server.address, BOB) as bob,
        tenant_of(server.address, ROOT) as root,
    ):
        bob.Renew(beat)
        bob.Release(pb.ReleaseRequest(lease_id="b"))
        bob.Renew(beat)
        assert refusal(lambda: root.Renew(beat)) == DENIED


def test_an_engine_that_goes_on_with_another_token_is_refused_until_its_leases_ran_out(tmp_path: Path) -> None:
    """Its token was taken out while the server runs: under the next one's name it could not keep them alive."""
    clock = FileClock(tmp_path / "clock")
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    beat = pb.RenewRequest(engine_id="e")
    with (
        ServerProcess(tokens_file=path, lease_ttl_s=10, test_clock=clock.path) as server,
        tenant_of(server.address, ALICE) as alice,
        tenant_of(server.address, BOB) as bob,
        tenant_of(server.address, RENEWED) as alicia,
    ):
        alice.MatchPrefix(opens("a", engine_id="e"))
        bob.MatchPrefix(opens("b", THEIRS, engine_id="e"))
        write_tokens(path, [{**ENTRIES[0], "name": "alicia", "token": RENEWED}, *ENTRIES[1:]])
        wait_until(lambda: _is_refused(alice))
        for _ in range(2):
            assert refusal(lambda: alicia.Renew(beat)) == DENIED
            bob.Renew(beat)
            clock.advance(6)
        wait_until(lambda: _is_answered(lambda: alicia.Renew(beat)))
        bob.Release(pb.ReleaseRequest(lease_id="b"))


def test_whether_tokens_were_asked_for_is_known_over_several_starts(tmp_path: Path) -> None:
    """As long as leases are open that were opened one way and others the other."""
    tokens = str(write_tokens(tmp_path / "tokens.toml", ENTRIES))
    kept = Kept(tmp_path / "state")
    engine = Engine(kept, "e")

    def had_tokens(tokens_file: str | None) -> bool | None:
        kept.config = replace(kept.config, tokens_file=tokens_file)
        kept.restart()
        return kept.keeper.had_tokens

    assert had_tokens(None) is False
    assert had_tokens(tokens) is False
    assert had_tokens(tokens) is True
    engine.match_prefix([], lease_id="a")
    assert had_tokens(None) is True
    assert had_tokens(None) is None
    kept.compact()
    assert had_tokens(None) is None
    engine.release("a")
    assert had_tokens(None) is None
    assert had_tokens(None) is False


def test_a_token_keeps_its_name_while_the_server_runs(tmp_path: Path) -> None:
    """Its engines' leases are known by it. A new token may have any name that is free."""
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    tokens = TokenFile(str(path))
    known = tokens.find(hashlib.sha256(ALICE.encode()).digest())
    write_tokens(path, [{**ENTRIES[0], "name": "alicia"}, *ENTRIES[1:]])
    tokens.refresh()
    assert tokens.find(hashlib.sha256(ALICE.encode()).digest()) == known
    assert (tokens.number, "alice" in tokens.names) == (0, True)
    write_tokens(path, [{**ENTRIES[0], "name": "alicia", "token": RENEWED}, *ENTRIES[1:]])
    tokens.refresh()
    assert (tokens.number, "alicia" in tokens.names, "alice" in tokens.names) == (1, True, False)


def _is_answered(call: Callable[[], Any]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def _probe(namespace: tuple[str, ...]) -> pb.ProbeRequest:
    return pb.ProbeRequest(tokens=pack(*PROMPT), namespace=namespace)


def _is_refused(tenant: Tenant) -> bool:
    try:
        tenant.Describe(pb.DescribeRequest())
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


def test_a_file_that_is_no_good_leaves_the_old_one_in_force(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", ENTRIES)
    server = ServerProcess(tokens_file=path)
    with tenant_of(server.address, ALICE) as alice, tenant_of(server.address, "carol-0123456789abcdef") as carol:
        bad = tmp_path / "bad"
        bad.write_text('[[token]]\nname = "carol"\ntoken = "carol-0123456789abcdef"\nnamespaces = [["m"]]\n')
        bad.replace(path)  # at once: half of it would be no good for another reason
        wait_until(lambda: server.has_logged("the tokens of before stay in force"))
        assert alice.Describe(pb.DescribeRequest()).block_size == 2
        assert _is_refused(carol)
        write_tokens(
            path, [{"name": "carol", "token": "carol-0123456789abcdef", "namespaces": [()], "rights": ["read"]}]
        )
        wait_until(lambda: not _is_refused(carol))
    _, errors = server.stop()
    assert errors.count("the tokens of before stay in force") == 1
    assert f"tokens_file {path}: token 1: rights is a list" in errors
    assert "carol" not in errors


GOOD = {"name": "a", "token": ALICE, "namespaces": [["m"]], "rights": ["read"]}


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([], "one at least"),
        ([{**GOOD, "name": "a/b"}], "token 1: name is"),
        ([{**GOOD, "name": ""}], "token 1: name is"),
        ([{**GOOD, "token": "short"}], "token 1: token has 16 to 512"),
        ([{**GOOD, "token": "with a space in the middle"}], "token 1: token has"),
        ([{"name": "a", "namespaces": [["m"]], "rights": ["read"]}], "token or sha256"),
        ([{**GOOD, "sha256": "abc"}], "sha256 has 64 hex digits"),
        ([{**GOOD, "rights": ["read", "sudo"]}], "rights is a list of some of read, write, admin"),
        ([{**GOOD, "rights": []}], "rights is a list"),
        ([{**GOOD, "namespaces": []}], r"namespaces is a list of lists"),
        ([{**GOOD, "namespaces": ["m"]}], r"namespaces is a list of lists"),
        ([{**GOOD, "namespaces": [["m"] * 99]}], "namespace has at most 32 parts"),
        ([{**GOOD, "colour": "red"}], "token 1: its keys are"),
        ([GOOD, {**GOOD, "name": "b"}], "token 2: another one is the same token"),
        ([GOOD, {**GOOD, "token": BOB}], "token 2: another one has the name 'a'"),
    ],
)
def test_a_file_that_is_no_good_is_refused_with_the_fault(
    tmp_path: Path, entries: list[dict[str, Any]], fault: str
) -> None:
    path = write_tokens(tmp_path / "tokens.toml", entries)
    with pytest.raises(InvalidArgument, match=fault) as caught:
        TokenFile(str(path))
    assert str(caught.value).startswith(f"tokens_file {path}: ")
    assert ALICE not in str(caught.value)


@pytest.mark.parametrize("data", [b"[[token]\n", b'x = "\xff"', b"[token]\n", b"[[token]]\n[other]\n"])
def test_what_is_no_token_file_at_all(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(InvalidArgument, match="tokens_file"):
        TokenFile(str(tmp_path / "t"))
    with pytest.raises(InvalidArgument, match="No such file"):
        TokenFile(str(tmp_path / "nowhere"))


def test_a_server_does_not_start_without_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"tokens_file .*nowhere: No such file") as caught:
        ServerProcess(tokens_file=tmp_path / "nowhere")
    assert caught.value.status != 0


# In the clear.


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1:0", True),
        ("127.1.2.3:0", True),
        ("localhost:0", True),
        ("[::1]:0", True),
        ("unix:/run/x.sock", True),
        ("0.0.0.0:0", False),
        ("[::]:0", False),
        ("10.0.0.1:0", False),
        ("cache.internal:0", False),
        ("localhost.evil.example:0", False),
    ],
)
def test_tokens_are_refused_over_plaintext_beyond_this_machine(tmp_path: Path, address: str, is_local: bool) -> None:
    path = str(write_tokens(tmp_path / "tokens.toml", ENTRIES))
    ServerConfig(listen=(address,), num_blocks=8)
    ServerConfig(listen=(address,), num_blocks=8, tokens_file=path, allow_plaintext_tokens=True)
    if is_local:
        ServerConfig(listen=(address,), num_blocks=8, tokens_file=path)
        return
    with pytest.raises(InvalidArgument, match=r"tokens_file.*in the clear.*allow_plaintext_tokens") as caught:
        ServerConfig(listen=("127.0.0.1:0", address), num_blocks=8, tokens_file=path)
    assert address in str(caught.value)
