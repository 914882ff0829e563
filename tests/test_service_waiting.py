"""Unary calls that wait for blocks: order, deadlines, cancellation, the end of the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from client_help import wait_until
from service_process import ServerProcess, reason_of, stub_to

from radix_cache_service.pb import prefix_cache_pb2 as pb

DEADLINE_S = 60


@pytest.fixture
def full() -> Iterator[Any]:
    """A stub to a server whose eight blocks are leased: seven to "large", one to "small"."""
    with ServerProcess(lease_ttl_s=600) as server, stub_to(server.address) as stub:
        for lease_id, num_blocks in (("large", 7), ("small", 1)):
            stub.MatchPrefix(pb.MatchPrefixRequest(lease_id=lease_id, num_blocks=num_blocks), timeout=DEADLINE_S)
        yield stub


def matching(stub: Any, lease_id: str, num_blocks: int) -> Any:
    """Start a match that waits."""
    request = pb.MatchPrefixRequest(lease_id=lease_id, num_blocks=num_blocks, wait=True)
    return begun(stub, stub.MatchPrefix, request)


def allocating(stub: Any, lease_id: str, num_blocks: int) -> Any:
    """Start an allocation that waits."""
    request = pb.AllocateRequest(lease_id=lease_id, num_blocks=num_blocks, wait=True)
    return begun(stub, stub.Allocate, request)


def begun(stub: Any, method: Any, request: Any) -> Any:
    """Start a call, and let it come into the line."""
    before = stats_of(stub).num_waiting_calls
    call = method.future(request, timeout=DEADLINE_S)
    wait_until(lambda: stats_of(stub).num_waiting_calls == before + 1)
    return call


def still_waits(stub: Any, call: Any) -> None:
    """Whatever came back before has not been for this call."""
    stub.Probe(pb.ProbeRequest(), timeout=DEADLINE_S)
    assert stats_of(stub).num_waiting_calls
    assert not call.done()


def release(stub: Any, lease_id: str) -> None:
    stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=DEADLINE_S)


def stats_of(stub: Any) -> pb.GetStatsResponse:
    return stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S)


def code_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return reason_of(caught.value)


def test_a_call_gets_its_blocks_when_they_come_back(full: Any) -> None:
    waiting = matching(full, "new", 3)
    release(full, "small")
    still_waits(full, waiting)  # one is not enough
    release(full, "large")
    assert len(waiting.result().block_table) == 3 * 4
    assert (stats_of(full).num_free_blocks, stats_of(full).num_leases) == (5, 1)


def test_without_the_wish_nothing_waits(full: Any) -> None:
    started = time.monotonic()
    request = pb.MatchPrefixRequest(num_blocks=1)
    assert code_of(lambda: full.MatchPrefix(request, timeout=DEADLINE_S))[1] == "POOL_EXHAUSTED"
    assert time.monotonic() - started < DEADLINE_S / 2


def test_first_come_first_served(full: Any) -> None:
    many, few = matching(full, "many", 6), matching(full, "few", 1)
    release(full, "small")
    still_waits(full, few)  # the one that is free is kept for the first
    release(full, "large")
    assert len(many.result().block_table) == 6 * 4
    assert len(few.result().block_table) == 1 * 4


def test_allocations_go_before_matches(full: Any) -> None:
    new, grown = matching(full, "new", 6), allocating(full, "small", 3)
    release(full, "large")
    assert len(grown.result().added_blocks) == 3 * 4
    still_waits(full, new)
    release(full, "small")
    assert len(new.result().block_table) == 6 * 4


def test_just_before_the_deadline_it_says_what_is_missing(full: Any) -> None:
    """A quarter of a second: where the machine is busy just then, it is asked again."""
    request = pb.MatchPrefixRequest(lease_id="new", num_blocks=2, wait=True)
    for _ in range(10):
        found = code_of(lambda: full.MatchPrefix(request, timeout=4))
        if found[0] is not grpc.StatusCode.DEADLINE_EXCEEDED:
            break
    assert found == (grpc.StatusCode.RESOURCE_EXHAUSTED, "POOL_EXHAUSTED", {"needed": "2", "available": "0"})
    release(full, "large")
    assert stats_of(full).num_leases == 1


def test_what_the_pool_can_never_have_is_not_waited_for(full: Any) -> None:
    request = pb.MatchPrefixRequest(num_blocks=9, wait=True)
    assert code_of(lambda: full.MatchPrefix(request, timeout=DEADLINE_S))[2] == {"needed": "9", "available": "0"}


def test_a_caller_that_leaves_takes_nothing_and_holds_up_nobody(full: Any) -> None:
    first, second = matching(full, "first", 7), matching(full, "second", 2)
    first.cancel()
    wait_until(lambda: stats_of(full).num_waiting_calls == 1)
    release(full, "large")
    assert len(second.result().block_table) == 2 * 4
    stats = stats_of(full)
    assert (stats.num_free_blocks, stats.num_leases) == (5, 2)
    assert stats.num_calls["MatchPrefix/CANCELLED"] == 1


def test_a_lease_that_goes_while_it_waits(full: Any) -> None:
    waiting = allocating(full, "small", 5)
    release(full, "small")
    assert code_of(waiting.result)[1] == "UNKNOWN_LEASE"


def test_leases_that_run_out_let_the_others_on() -> None:
    with ServerProcess(lease_ttl_s=0.4) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(pb.MatchPrefixRequest(num_blocks=8), timeout=DEADLINE_S)
        request = pb.MatchPrefixRequest(lease_id="new", num_blocks=8, wait=True)
        assert len(stub.MatchPrefix(request, timeout=DEADLINE_S).block_table) == 8 * 4


def test_the_end_of_the_server_ends_the_waiting() -> None:
    server = ServerProcess(grace_s=60)
    with stub_to(server.address) as stub:
        stub.MatchPrefix(pb.MatchPrefixRequest(num_blocks=8), timeout=DEADLINE_S)
        waiting = matching(stub, "new", 1)
        server.process.terminate()
        assert code_of(waiting.result)[1] == "POOL_EXHAUSTED"
    assert server.finish()[0] == 0


def test_many_waiting_calls_all_get_their_turn() -> None:
    with ServerProcess() as server, stub_to(server.address) as stub:
        stub.MatchPrefix(pb.MatchPrefixRequest(lease_id="0", num_blocks=8), timeout=DEADLINE_S)
        waiting = [matching(stub, str(number), 8) for number in range(1, 20)]
        for number, call in enumerate(waiting):
            release(stub, str(number))
            assert call.result().lease_id == str(number + 1)


def test_who_waits_for_its_own_limit_holds_up_nobody() -> None:
    """A tenant at its limit keeps its place at the head; those behind it get what the pool has."""
    with ServerProcess(namespace_limits=["namespace=a max_blocks=2"]) as server, stub_to(server.address) as stub:
        for lease_id, namespace, num_blocks in (("mine", "a", 2), ("other", "b", 6)):
            request = pb.MatchPrefixRequest(lease_id=lease_id, namespace=[namespace], num_blocks=num_blocks)
            stub.MatchPrefix(request, timeout=DEADLINE_S)
        request = pb.MatchPrefixRequest(lease_id="limited", namespace=["a"], num_blocks=2, wait=True)
        limited = begun(stub, stub.MatchPrefix, request)
        behind = matching(stub, "behind", 3)
        release(stub, "other")
        assert len(behind.result().block_table) == 3 * 4
        assert not limited.done()
        release(stub, "mine")
        assert len(limited.result().block_table) == 2 * 4


def test_no_more_wait_than_may() -> None:
    with ServerProcess(max_waiting_calls=2) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(pb.MatchPrefixRequest(lease_id="all", num_blocks=8), timeout=DEADLINE_S)
        waiting = [matching(stub, f"{number}", 1) for number in range(2)]
        request = pb.MatchPrefixRequest(lease_id="third", num_blocks=1, wait=True)
        code, reason, details = code_of(lambda: stub.MatchPrefix(request, timeout=DEADLINE_S))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
        assert details == {"limit": "max_waiting_calls", "value": "2"}
        release(stub, "all")
        assert [call.result().lease_id for call in waiting] == ["0", "1"]


def test_what_waiting_does_not_help_is_answered_on_arrival(full: Any) -> None:
    """Behind somebody who waits: what needs no blocks, what can't ever be had, and what is wrong for another reason."""
    first = matching(full, "first", 7)

    def waits(request: Any) -> Any:
        call = full.Allocate if isinstance(request, pb.AllocateRequest) else full.MatchPrefix
        started = time.monotonic()
        try:
            return call(request, timeout=DEADLINE_S)
        finally:
            assert time.monotonic() - started < DEADLINE_S / 2

    again = waits(pb.MatchPrefixRequest(lease_id="large", num_blocks=7, wait=True))
    assert len(again.block_table) == 7 * 4
    assert len(waits(pb.MatchPrefixRequest(lease_id="nothing", num_blocks=0, wait=True)).block_table) == 0
    assert len(waits(pb.AllocateRequest(lease_id="large", num_tokens=2, wait=True)).added_blocks) == 0
    for request, reason in (
        (pb.MatchPrefixRequest(lease_id="huge", num_blocks=9, wait=True), "POOL_EXHAUSTED"),
        (pb.MatchPrefixRequest(lease_id="large", num_blocks=6, wait=True), "INVALID_ARGUMENT"),
        (pb.MatchPrefixRequest(lease_id="child", parent_lease_id="nobody", num_blocks=1, wait=True), "UNKNOWN_LEASE"),
        (pb.AllocateRequest(lease_id="nobody", num_blocks=1, wait=True), "UNKNOWN_LEASE"),
    ):
        code, found, details = code_of(lambda request=request: waits(request))
        assert found == reason, code
        assert reason != "POOL_EXHAUSTED" or details == {"needed": "9", "available": "0"}
    assert not first.done()
    release(full, "large")
    assert len(first.result().block_table) == 7 * 4


def test_whoever_may_not_wait_gets_what_there_is() -> None:
    """With no room in the line, a call that wishes to wait is one that does not."""
    with ServerProcess(max_waiting_calls=0) as server, stub_to(server.address) as stub:
        request = pb.MatchPrefixRequest(lease_id="all", num_blocks=8, wait=True)
        assert len(stub.MatchPrefix(request, timeout=DEADLINE_S).block_table) == 8 * 4
        request = pb.MatchPrefixRequest(lease_id="more", num_blocks=1, wait=True)
        assert code_of(lambda: stub.MatchPrefix(request, timeout=DEADLINE_S))[1] == "LIMIT_EXCEEDED"
