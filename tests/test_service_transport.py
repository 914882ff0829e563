"""What the transport does to calls: deadlines, cancellations, lost answers, large messages, pings, idle connections."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_help import wait_until
from routes import FileClock
from service_process import ServerProcess, pack, stub_to

from radix_cache_service.config import ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.runner import Runner
from radix_cache_service.servicer import Servicer
from radix_cache_service.telemetry.metrics import CallMetrics

DEADLINE_S = 60
NUM_ROUNDS = 1000
TTL_S = 4
MANY = ServerConfig().max_tokens


def stats_of(stub: Any) -> pb.GetStatsResponse:
    return stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S)


def wait_for(stub: Any, reached: Callable[[pb.GetStatsResponse], bool]) -> pb.GetStatsResponse:
    """Ask for the stats until they are as wanted."""
    deadline = time.monotonic() + DEADLINE_S
    while not reached(stats := stats_of(stub)):
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)
    return stats


def refused_code(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


# Calls that end before their answer.


@pytest.fixture
def clock(tmp_path: Path) -> FileClock:
    """The clock that leases live by."""
    return FileClock(tmp_path / "clock")


@pytest.fixture
def cached(clock: FileClock) -> Iterator[Any]:
    """A stub to a server with one cached prefix of three blocks, whose leases run out when the test says so."""
    settings = {"num_blocks": 4096, "lease_ttl_s": TTL_S, "test_clock": clock.path}
    with ServerProcess(**settings) as server, stub_to(server.address) as stub:
        stub.MatchPrefix(pb.MatchPrefixRequest(lease_id="first", num_tokens=6), timeout=DEADLINE_S)
        stub.Insert(pb.InsertRequest(lease_id="first", tokens=pack(*range(6))), timeout=DEADLINE_S)
        stub.Release(pb.ReleaseRequest(lease_id="first"), timeout=DEADLINE_S)
        yield stub


def has_none_later(stats: pb.GetStatsResponse, clock: FileClock) -> bool:
    """Tell whether there are no leases; if there are, let them run out: calls that were given up may come late."""
    if stats.num_leases:
        clock.advance(TTL_S + 1)
    return not stats.num_leases


def no_drift(stub: Any, clock: FileClock) -> None:
    """In the end every lease is gone and every block can be had."""
    stats = wait_for(stub, lambda stats: has_none_later(stats, clock))
    assert (stats.num_free_blocks, stats.num_evictable_blocks, stats.num_protected_blocks) == (4093, 3, 0)
    assert stub.Evict(pb.EvictRequest(num_blocks=3), timeout=DEADLINE_S).num_evicted_blocks == 3


def test_matches_cut_by_their_deadline_leak_nothing(cached: Any, clock: FileClock) -> None:
    num_answered = 0
    for number in range(NUM_ROUNDS):
        request = pb.MatchPrefixRequest(tokens=pack(*range(6)), lease_id=str(number), num_tokens=8)
        try:
            cached.MatchPrefix(request, timeout=0.0002 + number * 1e-6)
        except grpc.RpcError:
            continue
        num_answered += 1
        cached.Release(pb.ReleaseRequest(lease_id=str(number)), timeout=DEADLINE_S)
    assert num_answered < NUM_ROUNDS
    no_drift(cached, clock)


def test_cancelled_matches_leak_nothing_and_answered_ones_keep_their_lease(cached: Any, clock: FileClock) -> None:
    answered = []
    for start in range(0, NUM_ROUNDS, 50):
        calls = {
            str(number): cached.MatchPrefix.future(
                pb.MatchPrefixRequest(tokens=pack(*range(6)), lease_id=str(number), num_tokens=8, engine_id="E"),
                timeout=DEADLINE_S,
            )
            for number in range(start, start + 50)
        }
        calls[str(start)].result()
        answered += [lease_id for lease_id, call in calls.items() if not call.cancel() and call.done()]
    for lease_id in answered:
        cached.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=DEADLINE_S)
    no_drift(cached, clock)


def test_an_answer_the_client_cannot_take_costs_a_lease_until_it_expires(clock: FileClock) -> None:
    request = pb.MatchPrefixRequest(lease_id="large", num_tokens=4000)
    with ServerProcess(num_blocks=4096, lease_ttl_s=TTL_S, test_clock=clock.path) as server:
        with stub_to(server.address, ("grpc.max_receive_message_length", 1024)) as small:
            code = refused_code(lambda: small.MatchPrefix(request, timeout=DEADLINE_S))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        with stub_to(server.address) as stub:
            assert stats_of(stub).num_free_blocks == 2096
            clock.advance(TTL_S + 1)
            wait_for(stub, lambda stats: not stats.num_leases and stats.num_free_blocks == 4096)


class TooLate:
    """The context of a call whose deadline passed before its handler began."""

    def time_remaining(self) -> float:
        return 0.0

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise TimeoutError(code, details)


def test_a_call_that_comes_too_late_changes_nothing() -> None:
    async def call() -> None:
        servicer = Servicer(ServerConfig(num_blocks=8))
        with pytest.raises(TimeoutError) as caught:
            await servicer.MatchPrefix(pb.MatchPrefixRequest(lease_id="a", num_tokens=2), TooLate())
        assert caught.value.args[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert servicer.cache.stats().num_leases == 0
        assert servicer.metrics.num_calls == {"MatchPrefix/DEADLINE_EXCEEDED": 1}

    asyncio.run(call())


# Large messages.


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_longest_prompt_fits_both_ways(is_packed: bool) -> None:
    tokens = range(100_000, 100_000 + MANY)
    form = {"tokens": pack(*tokens)} if is_packed else {"token_ids": tokens}
    with ServerProcess(num_blocks=MANY + 8, block_size=1) as server, stub_to(server.address) as stub:
        request = pb.MatchPrefixRequest(**form, lease_id="a", num_tokens=MANY)
        opened = stub.MatchPrefix(request, timeout=DEADLINE_S)
        assert max(len(opened.block_table) // 4, len(opened.block_table_ids)) == MANY
        inserted = stub.Insert(pb.InsertRequest(**form, lease_id="a"), timeout=DEADLINE_S)
        assert max(len(inserted.blocks) // 4, len(inserted.block_ids)) == MANY
        again = stub.MatchPrefix(pb.MatchPrefixRequest(**form, lease_id="b"), timeout=DEADLINE_S)
        assert again.num_cached_tokens == MANY
        assert (again.block_table, again.block_table_ids) == (opened.block_table, opened.block_table_ids)


def test_one_token_more_is_refused_with_words_and_far_more_without() -> None:
    with ServerProcess() as server, stub_to(server.address) as stub:
        with pytest.raises(grpc.RpcError, match=f"{MANY} tokens here, not {MANY + 1}") as caught:
            stub.Probe(pb.ProbeRequest(tokens=bytes(4 * (MANY + 1))), timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        huge = bytes(ServerConfig().max_message_bytes)
        assert refused_code(lambda: stub.Probe(pb.ProbeRequest(tokens=huge), timeout=DEADLINE_S)) is (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        assert stub.Probe(pb.ProbeRequest(tokens=pack(1)), timeout=DEADLINE_S).num_cached_tokens == 0


def test_large_calls_do_not_starve_small_ones() -> None:
    """While one client sends the longest prompts without a pause, another is answered in between."""
    with ServerProcess(num_blocks=MANY // 16, block_size=16) as server:
        ended = threading.Event()
        large = pb.ProbeRequest(tokens=bytes(4 * MANY))
        num_large = 0

        def flood() -> None:
            nonlocal num_large
            with stub_to(server.address) as stub:
                while not ended.is_set():
                    stub.Probe(large, timeout=DEADLINE_S)
                    num_large += 1

        flooding = threading.Thread(target=flood)
        flooding.start()
        with stub_to(server.address) as stub:
            wait_until(lambda: num_large > 1)
            passed = []  # by how many large ones, each
            for _ in range(100):
                before = num_large
                stub.Probe(pb.ProbeRequest(tokens=pack(1)), timeout=DEADLINE_S)
                passed.append(num_large - before)
        ended.set()
        flooding.join()
    assert sorted(passed)[50] <= 3, "a small one is not passed by large ones again and again"


NUM_LEAVES = 24_000


@pytest.fixture
def leafy() -> Iterator[Any]:
    """A stub to a server whose pool is full of leaves of one block."""
    settings = {"num_blocks": NUM_LEAVES, "block_size": 1, "max_operations": 6000}
    with ServerProcess(**settings) as server, stub_to(server.address) as stub:
        for start in range(0, NUM_LEAVES, 2000):
            operations = [operation for leaf in range(start, start + 2000) for operation in _leaf(leaf)]
            stub.Batch(pb.BatchRequest(operations=operations), timeout=DEADLINE_S)
        assert stats_of(stub).num_evictable_blocks == NUM_LEAVES
        yield stub


def _leaf(number: int) -> Iterator[pb.Operation]:
    lease_id = str(number)
    yield pb.Operation(match_prefix=pb.MatchPrefixRequest(lease_id=lease_id, num_tokens=1))
    yield pb.Operation(insert=pb.InsertRequest(lease_id=lease_id, tokens=pack(number)))
    yield pb.Operation(release=pb.ReleaseRequest(lease_id=lease_id))


def test_eviction_and_reset_of_very_much_give_way(leafy: Any) -> None:
    """Other calls are answered meanwhile."""
    evicting = leafy.Evict.future(pb.EvictRequest(num_blocks=NUM_LEAVES // 2), timeout=DEADLINE_S)
    assert leafy.Probe(pb.ProbeRequest(tokens=pack(1)), timeout=DEADLINE_S).num_cached_tokens in {0, 1}
    assert evicting.result().num_evicted_blocks == NUM_LEAVES // 2
    leafy.Reset(pb.ResetRequest(), timeout=DEADLINE_S)
    assert stats_of(leafy).num_free_blocks == NUM_LEAVES


def test_they_let_others_in_again_and_again() -> None:
    """As often as they have pieces."""

    async def turns_during(call: Coroutine[Any, Any, Any]) -> int:
        task, turns = asyncio.ensure_future(call), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        await task
        return turns

    async def run() -> None:
        runner = Runner(ServerConfig(num_blocks=NUM_LEAVES, block_size=1, max_operations=6000), CallMetrics())
        for start in range(0, NUM_LEAVES, 2000):
            operations = [operation for leaf in range(start, start + 2000) for operation in _leaf(leaf)]
            runner.batch(pb.BatchRequest(operations=operations), pb.BatchResponse())
        assert await turns_during(runner.evict(pb.EvictRequest(num_blocks=NUM_LEAVES - 2000))) > 2
        assert await turns_during(runner.reset(pb.ResetRequest())) > 1
        assert runner.cache.num_available_blocks == runner.cache.stats().num_free_blocks == NUM_LEAVES

    asyncio.run(run())


def test_a_reset_goes_on_to_its_end_although_the_caller_leaves(leafy: Any) -> None:
    last = pb.ProbeRequest(tokens=pack(NUM_LEAVES - 1))
    resetting = leafy.Reset.future(pb.ResetRequest(), timeout=DEADLINE_S)
    while leafy.Probe(last, timeout=DEADLINE_S).num_cached_tokens:
        pass
    resetting.cancel()
    wait_for(leafy, lambda stats: stats.num_free_blocks == NUM_LEAVES)


# Pings.


def test_a_client_that_pings_each_second_keeps_its_connection() -> None:
    """Over eight pings, with a call that sends no data and then with no call at all."""
    pings = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 30_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with ServerProcess() as server, stub_to(server.address, *pings) as stub:
        goes_on = threading.Event()
        session = stub.Session(_two_messages(goes_on), timeout=60)
        assert next(session).batch.results
        assert not goes_on.wait(8.5)
        goes_on.set()
        assert next(session).batch.results
        assert list(session) == []
        assert session.code() is grpc.StatusCode.OK


def _two_messages(goes_on: threading.Event) -> Iterator[pb.SessionRequest]:
    probe = pb.SessionRequest(batch=pb.BatchRequest(operations=[pb.Operation(probe=pb.ProbeRequest())]))
    yield probe
    goes_on.wait()
    yield probe
