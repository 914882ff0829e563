"""Session over a raw stub: answers in order, batches that fail, many streams, the end of either side."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc
import pytest
from service_process import ServerProcess, pack, reason_in, stub_to

from radix_cache_service.pb import prefix_cache_pb2 as pb

DEADLINE_S = 60


class Stream:
    """One session; `send` does not wait, `receive` does."""

    def __init__(self, stub: Any) -> None:
        self._requests: queue.Queue[pb.SessionRequest | None] = queue.Queue()
        self.call = stub.Session(iter(self._requests.get, None), timeout=60)

    def send(self, *operations: pb.Operation, **more: Any) -> None:
        self._requests.put(pb.SessionRequest(batch=pb.BatchRequest(operations=operations, **more)))

    def receive(self) -> pb.SessionResponse:
        return next(self.call)

    def ask(self, *operations: pb.Operation, **more: Any) -> pb.SessionResponse:
        self.send(*operations, **more)
        return self.receive()

    def end(self) -> None:
        """Say that no more batches come."""
        self._requests.put(None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end()
        self.call.cancel()


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(num_blocks=64, max_streams=3, max_operations=4) as process:
        yield process


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Any]:
    with stub_to(server.address) as stub:
        yield stub


def match(lease_id: str, num_tokens: int = 2) -> pb.Operation:
    return pb.Operation(match_prefix=pb.MatchPrefixRequest(lease_id=lease_id, num_tokens=num_tokens))


def release(lease_id: str) -> pb.Operation:
    return pb.Operation(release=pb.ReleaseRequest(lease_id=lease_id))


def probe() -> pb.Operation:
    return pb.Operation(probe=pb.ProbeRequest(tokens=pack(1, 2)))


def num_leases(stub: Any) -> int:
    return stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S).num_leases


def test_answers_come_in_order_although_nobody_waited(stub: Any) -> None:
    with Stream(stub) as stream:
        for number in range(1, 200):
            stream.send(match(str(number)), release(str(number)), engine_id="E", seq=number)
        answers = [stream.receive().batch for _ in range(1, 200)]
    assert [answer.seq for answer in answers] == list(range(1, 200))
    assert [answer.results[0].match_prefix.lease_id for answer in answers] == [str(n) for n in range(1, 200)]
    assert all(answer.results[1].HasField("release") for answer in answers)


def test_a_batch_that_is_refused_does_not_end_the_stream(stub: Any) -> None:
    with Stream(stub) as stream:
        assert stream.ask(probe(), engine_id="E", seq=5).HasField("batch")
        for refused in (
            stream.ask(probe(), engine_id="E", seq=4),
            stream.ask(*[probe()] * 5),
            stream.ask(probe(), seq=1),
            stream.ask(probe(), engine_id="x" * 999),
        ):
            assert reason_in(refused.error)[0] == "INVALID_ARGUMENT"
        assert reason_in(stream.ask(release("nobody")).batch.results[0].error)[0] == "UNKNOWN_LEASE"
        assert stream.ask().batch.results == []
        assert stream.ask(probe()).batch.results[0].probe.num_cached_tokens == 0
        stream.end()
        assert list(stream.call) == []
        assert stream.call.code() is grpc.StatusCode.OK


def test_a_number_is_known_on_any_connection(server: ServerProcess, stub: Any) -> None:
    """The stream broke after the batch was sent: over another one it gets the same answer."""
    with Stream(stub) as stream:
        first = stream.ask(match("a"), engine_id="E", seq=1).batch
    with stub_to(server.address) as other, Stream(other) as stream:
        again = stream.ask(match("a"), engine_id="E", seq=1).batch
    unary = pb.BatchRequest(operations=[match("a")], engine_id="E", seq=1)
    for answer in (again, stub.Batch(unary, timeout=DEADLINE_S)):
        assert list(answer.results) == list(first.results)
    assert num_leases(stub) == 1


def test_a_broken_stream_moves_nothing(stub: Any) -> None:
    with Stream(stub) as stream:
        stream.ask(match("a"))
        stream.call.cancel()
    assert num_leases(stub) == 1


def test_streams_are_counted_and_given_back(stub: Any) -> None:
    """One more than the limit is refused; cancelled ones make room, and unary calls never wait for a stream."""
    for _ in range(20):
        streams = _as_many_as_may_be(stub)
        with Stream(stub) as late, pytest.raises(grpc.RpcError, match="max_streams is 3 here") as caught:
            late.ask(probe())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert num_leases(stub) == 0
        for stream in streams:
            with stream:
                stream.call.cancel()


def _as_many_as_may_be(stub: Any) -> list[Stream]:
    """Return three open streams; the server hears of a cancellation a moment later."""
    for _ in range(1000):
        streams = [Stream(stub) for _ in range(3)]
        try:
            for stream in streams:
                stream.ask(probe())
        except grpc.RpcError:
            for stream in streams:
                stream.end()
                stream.call.cancel()
        else:
            return streams
    raise AssertionError("the streams were not given back")


def test_the_end_of_the_server_ends_idle_streams() -> None:
    server = ServerProcess(grace_s=60)
    with stub_to(server.address) as stub, Stream(stub) as stream:
        stream.ask(probe())
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            stream.receive()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.finish()[0] == 0
