"""The RPCs over raw stubs, as a client in any language sees them: forms of ids, statuses, limits, batches, retries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import faulty
import grpc
import pytest
from service_process import ServerProcess, pack, reason_in, reason_of, stub_to, unpack

from radix_cache_service.pb import prefix_cache_pb2 as pb

Stub = Any
DEADLINE_S = 60
PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(max_tokens=1000, max_operations=8, layout_fingerprint="fp8-tp2") as process:
        yield process


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Stub]:
    """A stub to a server that is empty before and after."""
    with stub_to(server.address) as stub:
        yield Timed(stub)
        client = Timed(stub)
        for lease_id in ("a", "b", "c"):
            client.Batch(pb.BatchRequest(operations=[pb.Operation(release=pb.ReleaseRequest(lease_id=lease_id))]))
        client.Reset(pb.ResetRequest())
        stats = client.GetStats(pb.GetStatsRequest())
        assert (stats.num_free_blocks, stats.num_leases) == (8, 0)


class Timed:
    """A stub whose unary calls have a deadline."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    def __getattr__(self, method: str) -> Callable[[Any], Any]:
        return lambda request: getattr(self._stub, method)(request, timeout=DEADLINE_S)


def match(lease_id: str = "a", tokens: tuple[int, ...] = PROMPT, **more: Any) -> pb.MatchPrefixRequest:
    return pb.MatchPrefixRequest(tokens=pack(*tokens), lease_id=lease_id, **more)


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Make a call that is refused; return the code, the reason and its numbers."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return reason_of(caught.value)


# The verbs.


def test_a_request_from_match_to_release(stub: Stub) -> None:
    opened = stub.MatchPrefix(match(num_tokens=5))
    table = unpack(opened.block_table)
    assert (opened.lease_id, opened.num_cached_tokens, len(table)) == ("a", 0, 3)
    assert opened.state.num_available_blocks == 5
    assert len(opened.state.epoch) == 16
    inserted = stub.Insert(pb.InsertRequest(lease_id="a", tokens=pack(*PROMPT)))
    assert (inserted.num_cached_tokens, unpack(inserted.blocks), inserted.redundant_blocks) == (0, table[:2], b"")
    added = stub.Allocate(pb.AllocateRequest(lease_id="a", num_tokens=9))
    assert len(added.added_blocks) == 2 * 4
    stub.Free(pb.FreeRequest(lease_id="a", blocks=added.added_blocks))
    stub.Renew(pb.RenewRequest(lease_id="a", ttl_s=5))
    assert stub.Probe(pb.ProbeRequest(tokens=pack(1, 2, 3, 9))).num_cached_tokens == 2
    stub.Release(pb.ReleaseRequest(lease_id="a"))
    assert stub.Evict(pb.EvictRequest(num_blocks=1)).num_evicted_blocks == 1
    assert stub.Probe(pb.ProbeRequest(tokens=pack(*PROMPT))).num_cached_tokens == 2


def test_ids_one_by_one(stub: Stub) -> None:
    opened = stub.MatchPrefix(pb.MatchPrefixRequest(token_ids=PROMPT, lease_id="a", num_tokens=5))
    assert (len(opened.block_table_ids), opened.block_table) == (3, b"")
    other = stub.MatchPrefix(pb.MatchPrefixRequest(token_ids=PROMPT, lease_id="b", num_tokens=4))
    stub.Insert(pb.InsertRequest(lease_id="a", token_ids=PROMPT))
    inserted = stub.Insert(pb.InsertRequest(lease_id="b", token_ids=PROMPT[:4]))
    assert inserted.block_ids == opened.block_table_ids[:2]
    assert inserted.redundant_block_ids == other.block_table_ids
    assert (inserted.blocks, inserted.redundant_blocks) == (b"", b"")
    stub.Free(pb.FreeRequest(lease_id="b", block_ids=other.block_table_ids[::-1]))
    assert stub.Probe(pb.ProbeRequest(token_ids=PROMPT)).num_cached_tokens == 4
    stub.Reset(pb.ResetRequest(token_ids=PROMPT[:2]))
    assert stub.Probe(pb.ProbeRequest(token_ids=PROMPT)).num_cached_tokens == 2


def test_the_form_can_be_asked_for(stub: Stub) -> None:
    stub.MatchPrefix(match())
    added = stub.Allocate(pb.AllocateRequest(lease_id="a", num_blocks=1, id_format=pb.ID_FORMAT_REPEATED))
    assert (len(added.added_block_ids), added.added_blocks) == (1, b"")
    packed = stub.MatchPrefix(
        pb.MatchPrefixRequest(token_ids=PROMPT, lease_id="b", num_blocks=1, id_format=pb.ID_FORMAT_PACKED)
    )
    assert (len(packed.block_table), list(packed.block_table_ids)) == (4, [])


def test_packed_tokens_count_where_both_are_set(stub: Stub) -> None:
    stub.MatchPrefix(match(num_tokens=2))
    stub.Insert(pb.InsertRequest(lease_id="a", tokens=pack(1, 2)))
    both = pb.ProbeRequest(tokens=pack(1, 2), token_ids=[3, 4])
    assert stub.Probe(both).num_cached_tokens == 2


def test_extreme_token_ids(stub: Stub) -> None:
    edge = (0, 2**31, 2**32 - 1, 5)
    stub.MatchPrefix(pb.MatchPrefixRequest(token_ids=edge, lease_id="a", num_tokens=4))
    stub.Insert(pb.InsertRequest(lease_id="a", tokens=pack(*edge)))
    assert stub.Probe(pb.ProbeRequest(token_ids=edge)).num_cached_tokens == 4
    with pytest.raises(ValueError):
        pb.ProbeRequest(token_ids=[2**32])


def test_the_server_names_a_lease_where_the_client_does_not(stub: Stub) -> None:
    first, second = (stub.MatchPrefix(match("")).lease_id for _ in range(2))
    assert len(first) == 32
    assert first != second
    for lease_id in (first, second):
        stub.Release(pb.ReleaseRequest(lease_id=lease_id))


def test_a_fork_says_its_namespace(stub: Stub) -> None:
    opened = stub.MatchPrefix(match(namespace=["m", "w7"], num_tokens=4))
    stub.Insert(pb.InsertRequest(lease_id="a", tokens=pack(1, 2, 3, 4)))
    fork = stub.MatchPrefix(pb.MatchPrefixRequest(lease_id="b", parent_lease_id="a"))
    assert (fork.num_cached_tokens, list(fork.namespace)) == (4, ["m", "w7"])
    assert fork.block_table == opened.block_table


def test_dump_comes_in_pieces_and_bounded(server: ServerProcess, stub: Stub) -> None:
    stub.MatchPrefix(match(num_tokens=4))
    stub.Insert(pb.InsertRequest(lease_id="a", tokens=pack(1, 2, 3, 4)))
    with stub_to(server.address) as raw:
        pieces = list(raw.DumpTree(pb.DumpTreeRequest(max_span_tokens=2**40), timeout=DEADLINE_S))
        assert [(n.depth, n.num_tokens, n.tokens) for p in pieces for n in p.nodes] == [
            (0, 0, b""),
            (1, 4, pack(1, 2, 3, 4)),
        ]
        assert [len(p.nodes) for p in raw.DumpTree(pb.DumpTreeRequest(max_nodes=1), timeout=DEADLINE_S)] == [1]
        bad = pb.DumpTreeRequest(namespace=["x"] * 99)
        assert refusal(lambda: list(raw.DumpTree(bad, timeout=DEADLINE_S)))[1] == "INVALID_ARGUMENT"


def test_events_are_not_served(server: ServerProcess) -> None:
    with stub_to(server.address) as raw, pytest.raises(grpc.RpcError) as caught:
        list(raw.WatchEvents(pb.WatchEventsRequest(), timeout=DEADLINE_S))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_describe_and_layout(stub: Stub) -> None:
    said = stub.Describe(pb.DescribeRequest(block_size=2, layout_fingerprint="fp8-tp2"))
    assert (said.block_size, said.num_blocks, said.num_reserved_blocks, said.policy) == (2, 8, 0, "lru")
    assert (said.max_tokens, said.max_operations, said.lease_ttl_s, said.growth_share) == (1000, 8, 60, 0)
    assert said.version
    for wrong in ({"block_size": 16}, {"layout_fingerprint": "bf16"}, {"layout_fingerprint": "x" * 100_000}):
        code, reason, _ = refusal(lambda wrong=wrong: stub.Describe(pb.DescribeRequest(**wrong)))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH")


def test_stats_count_calls_and_time(stub: Stub) -> None:
    before = stub.GetStats(pb.GetStatsRequest())
    stub.MatchPrefix(match(num_tokens=5))
    refusal(lambda: stub.Release(pb.ReleaseRequest(lease_id="nobody")))
    stats = stub.GetStats(pb.GetStatsRequest())
    assert (stats.num_free_blocks, stats.num_leased_blocks, stats.num_leases) == (5, 3, 1)
    for call in ("MatchPrefix/OK", "Release/NOT_FOUND"):
        assert stats.num_calls[call] == before.num_calls[call] + 1
    assert stats.counters["num_lookups"] == before.counters["num_lookups"] + 1
    spent = stats.latencies["MatchPrefix"]
    assert 0 < spent.p50_s <= spent.p99_s <= spent.max_s < DEADLINE_S
    assert 0 < before.uptime_s < stats.uptime_s


# Errors.

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
PRECONDITION, EXHAUSTED = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED
REFUSED = {
    "ragged tokens": ("Probe", pb.ProbeRequest(tokens=b"abc"), INVALID, "INVALID_TOKENS", {}),
    "ragged blocks": ("Free", pb.FreeRequest(lease_id="a", blocks=b"abc"), PRECONDITION, "INVALID_BLOCKS", {}),
    "large block": ("Free", pb.FreeRequest(lease_id="a", block_ids=[2**31]), PRECONDITION, "INVALID_BLOCKS", None),
    "not its block": (
        "Free",
        pb.FreeRequest(lease_id="a", block_ids=[77]),
        PRECONDITION,
        "INVALID_BLOCKS",
        {"block_id": "77"},
    ),
    "contradiction": (
        "Insert",
        pb.InsertRequest(lease_id="a", tokens=pack(1, 9)),
        INVALID,
        "INVALID_TOKENS",
        {"index": "1"},
    ),
    "odd offset": ("Insert", pb.InsertRequest(lease_id="a", offset=1), INVALID, "INVALID_ARGUMENT", {}),
    "no target": ("Allocate", pb.AllocateRequest(lease_id="a"), INVALID, "INVALID_ARGUMENT", {}),
    "too much": (
        "Allocate",
        pb.AllocateRequest(lease_id="a", num_tokens=99),
        EXHAUSTED,
        "POOL_EXHAUSTED",
        {"needed": "48", "available": "6"},
    ),
    "far too much": ("Allocate", pb.AllocateRequest(lease_id="a", num_tokens=2**62), EXHAUSTED, "POOL_EXHAUSTED", None),
    "absurd": ("Allocate", pb.AllocateRequest(lease_id="a", num_tokens=2**63), INVALID, "INVALID_ARGUMENT", {}),
    "no lease": ("Release", pb.ReleaseRequest(lease_id="x"), MISSING, "UNKNOWN_LEASE", {"lease_id": "x"}),
    "no name": ("Release", pb.ReleaseRequest(), MISSING, "UNKNOWN_LEASE", {"lease_id": ""}),
    "long name": ("Release", pb.ReleaseRequest(lease_id="x" * 99_999), INVALID, "INVALID_ARGUMENT", {}),
    "long engine": ("Probe", pb.ProbeRequest(engine_id="x" * 99_999), INVALID, "INVALID_ARGUMENT", {}),
    "nobody's heartbeat": ("Renew", pb.RenewRequest(), INVALID, "INVALID_ARGUMENT", {}),
    "bad promise": ("Renew", pb.RenewRequest(lease_id="a", ttl_s=float("nan")), INVALID, "INVALID_ARGUMENT", {}),
    "large namespace": ("Probe", pb.ProbeRequest(namespace=["x" * 9999]), INVALID, "INVALID_ARGUMENT", {}),
    "other request, same name": ("MatchPrefix", match("a", (1, 2)), INVALID, "INVALID_ARGUMENT", {}),
    "fork elsewhere": (
        "MatchPrefix",
        match("b", parent_lease_id="a", namespace=["secret salt"]),
        INVALID,
        "INVALID_ARGUMENT",
        {},
    ),
    "long prompt": ("Probe", pb.ProbeRequest(tokens=bytes(4 * 1001)), INVALID, "INVALID_TOKENS", {}),
    "long prompt, listed": ("MatchPrefix", pb.MatchPrefixRequest(token_ids=[7] * 1001), INVALID, "INVALID_TOKENS", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_their_reason_and_change_nothing(stub: Stub, case: str) -> None:
    method, request, code, reason, numbers = REFUSED[case]
    stub.MatchPrefix(match(num_tokens=4))
    stub.Insert(pb.InsertRequest(lease_id="a", tokens=pack(1, 2)))
    before = stub.GetStats(pb.GetStatsRequest())
    found = refusal(lambda: getattr(stub, method)(request))
    assert found[:2] == (code, reason)
    assert numbers is None or found[2] == numbers
    after = stub.GetStats(pb.GetStatsRequest())
    assert after.counters == before.counters
    assert (after.num_free_blocks, after.num_leases) == (before.num_free_blocks, 1)


def test_the_limit_is_named(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError, match="1000 tokens here, not 1001"):
        stub.MatchPrefix(match("a", tokens=(7,) * 1001))
    stub.MatchPrefix(match("a", tokens=(7,) * 1000))
    with pytest.raises(grpc.RpcError, match="at most 8 operations, not 9"):
        stub.Batch(pb.BatchRequest(operations=[pb.Operation(probe=pb.ProbeRequest())] * 9))


def test_a_stale_lease(stub: Stub) -> None:
    stub.MatchPrefix(match(num_tokens=4))
    stub.Reset(pb.ResetRequest())
    found = refusal(lambda: stub.Insert(pb.InsertRequest(lease_id="a", tokens=pack(1, 2))))
    assert found == (PRECONDITION, "STALE_LEASE", {"lease_id": "a"})
    found = refusal(lambda: stub.MatchPrefix(pb.MatchPrefixRequest(parent_lease_id="a", lease_id="b")))
    assert found == (PRECONDITION, "STALE_LEASE", {"lease_id": "a"})


# Retries.


def test_an_equal_match_gets_the_lease_as_it_is_now(stub: Stub) -> None:
    request = match(num_tokens=3, engine_id="E")
    first = stub.MatchPrefix(request)
    assert unpack(stub.MatchPrefix(request).block_table) == unpack(first.block_table)
    added = stub.Allocate(pb.AllocateRequest(lease_id="a", num_tokens=5))
    again = stub.MatchPrefix(request)
    assert (again.lease_id, unpack(again.block_table)) == ("a", unpack(first.block_table + added.added_blocks))
    stats = stub.GetStats(pb.GetStatsRequest())
    assert (stats.num_leases, stats.num_free_blocks) == (1, 5)


def test_an_equal_match_after_the_release_is_a_new_one(stub: Stub) -> None:
    request = match(num_tokens=4)
    stub.MatchPrefix(request)
    stub.Insert(pb.InsertRequest(lease_id="a", tokens=pack(1, 2, 3, 4)))
    stub.Release(pb.ReleaseRequest(lease_id="a"))
    assert stub.MatchPrefix(request).num_cached_tokens == 4


def test_any_difference_makes_it_another_match(stub: Stub) -> None:
    asked = {"num_tokens": 3, "max_tokens": 4, "num_blocks": 1, "namespace": ["m"], "engine_id": "E"}
    stub.MatchPrefix(match(**asked))
    others = {"num_tokens": 4, "max_tokens": 3, "num_blocks": 0, "namespace": ["n"], "engine_id": "F"}
    for name, other in others.items():
        code, _, _ = refusal(lambda name=name, other=other: stub.MatchPrefix(match(**{**asked, name: other})))
        assert code is INVALID
    refusal(lambda: stub.MatchPrefix(match(tokens=(*PROMPT[:4], 6), **asked)))


def test_a_name_that_was_taken_over_in_a_batch(stub: Stub) -> None:
    """The digest belongs to the lease, not to its name."""
    request = match(num_tokens=2)
    stub.MatchPrefix(request)
    stub.Release(pb.ReleaseRequest(lease_id="a"))
    answer = stub.Batch(pb.BatchRequest(operations=[pb.Operation(match_prefix=match(num_tokens=5))]))
    assert len(unpack(answer.results[0].match_prefix.block_table)) == 3
    assert refusal(lambda: stub.MatchPrefix(request))[0] is INVALID


def batch(seq: int = 0, **more: Any) -> pb.BatchRequest:
    """Open, grow and refuse, all in one."""
    operations = [
        pb.Operation(match_prefix=match(num_tokens=4)),
        pb.Operation(allocate=pb.AllocateRequest(lease_id="a", num_tokens=6, id_format=pb.ID_FORMAT_REPEATED)),
        pb.Operation(match_prefix=match("b", num_tokens=99)),
        pb.Operation(release=pb.ReleaseRequest(lease_id="b")),
        pb.Operation(match_prefix=pb.MatchPrefixRequest(tokens=b"abc", lease_id="c")),
        pb.Operation(insert=pb.InsertRequest(lease_id="c", tokens=pack(1, 2))),
        pb.Operation(),
        pb.Operation(allocate=pb.AllocateRequest(lease_id="a", num_blocks=1)),
    ]
    return pb.BatchRequest(operations=operations, seq=seq, **more)


def test_each_operation_of_a_batch_has_its_own_end(stub: Stub) -> None:
    answer = stub.Batch(batch())
    results = answer.results
    assert len(results[0].match_prefix.block_table) == 2 * 4
    assert len(results[1].allocate.added_block_ids) == 1
    reasons = [reason_in(result.error)[0] for result in results[2:7]]
    assert reasons == ["POOL_EXHAUSTED"] * 2 + ["INVALID_TOKENS"] * 2 + ["INVALID_ARGUMENT"]
    assert len(results[7].allocate.added_blocks) == 4
    assert answer.state.num_available_blocks == 4
    assert not any(result.match_prefix.HasField("state") for result in results)


def test_strict_refuses_all_that_need_blocks_after_the_first(stub: Stub) -> None:
    last = stub.Batch(batch(strict=True)).results[7]
    assert reason_in(last.error)[0] == "POOL_EXHAUSTED"


def test_the_same_number_gets_the_same_answer(stub: Stub) -> None:
    first = stub.Batch(batch(5, engine_id="numbered"))
    stub.Allocate(pb.AllocateRequest(lease_id="a", num_blocks=1))
    before = stub.GetStats(pb.GetStatsRequest())
    again = stub.Batch(batch(5, engine_id="numbered"))
    assert (again.seq, list(again.results)) == (5, list(first.results))
    after = stub.GetStats(pb.GetStatsRequest())
    assert (after.counters, after.num_free_blocks) == (before.counters, before.num_free_blocks)
    for older in (batch(4, engine_id="numbered"), batch(5)):
        assert refusal(lambda older=older: stub.Batch(older))[:2] == (INVALID, "INVALID_ARGUMENT")
    assert len(stub.Batch(pb.BatchRequest(seq=6, engine_id="numbered")).results) == 0


def test_an_answer_that_would_be_too_long_is_refused_beforehand() -> None:
    """Done but not said is the worst of all: the client would never learn of its leases."""
    with ServerProcess(num_blocks=3_000_000, block_size=1) as server, stub_to(server.address) as stub:
        opened = [pb.Operation(match_prefix=match(str(i), (), num_tokens=1_000_000)) for i in range(20)]
        code, reason, _ = refusal(lambda: stub.Batch(pb.BatchRequest(operations=opened), timeout=DEADLINE_S))
        assert (code, reason) == (INVALID, "INVALID_ARGUMENT")
        too_long = match("a", (), num_tokens=2_000_000)
        assert refusal(lambda: stub.MatchPrefix(too_long, timeout=DEADLINE_S))[:2] == (INVALID, "INVALID_ARGUMENT")
        assert stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S).num_leases == 0


# Bugs of the server's own.


def test_what_is_not_in_the_table_is_masked_logged_and_counted() -> None:
    server = ServerProcess(policy="faulty:Faulty")
    with stub_to(server.address) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            faulty.provoke(stub, faulty.RAISES, 31337, timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert caught.value.details() == "internal error"
        assert "31337" not in str(caught.value)
        assert stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S).num_calls["Evict/INTERNAL"] == 1
    status, errors = server.stop()
    assert status == 0
    assert "ValueError" in errors


def test_a_cancellation_from_within_becomes_a_status() -> None:
    server = ServerProcess(policy="faulty:Faulty")
    with stub_to(server.address) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            faulty.provoke(stub, faulty.CANCELS, 1, timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S)
    server.stop()
