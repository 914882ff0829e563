"""Requests that are wrong in their bytes, at every method: each gets a status that blames the caller.

`raw_port` draws them. What the good ones among them opened is released after each example, and then no lease, no lock
and no leased block may be left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from helpers import counters
from hypothesis import given
from hypothesis import strategies as st
from raw_port import LEASE_IDS, requests
from service_process import ServerProcess, pack

from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

METHODS = list(pb.DESCRIPTOR.services_by_name["PrefixCacheService"].methods)
OTHERS = [
    method
    for file in (health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Watch"  # stays open
]
BY_NAME = {method.full_name: method for method in [*METHODS, *OTHERS]}
DEADLINE_S = 60
NUM_BLOCKS = 64
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}  # what a server says of a fault of its own
OUR_NUMBERS = {code.value[0] for code in OURS}
MOST_GROWTH_BYTES = 48 * 2**20


class Port:
    """A server and a channel to it that knows no messages, only bytes."""

    def __init__(self, server: ServerProcess, channel: grpc.Channel, clock: Path) -> None:
        self.server = server
        self.clock = clock
        self.channel = channel
        self.stub = pb_grpc.PrefixCacheServiceStub(channel)

    def send(self, method: MethodDescriptor, data: list[bytes]) -> Iterable[bytes]:
        """Call a method with one message, or with several where it takes a stream; return or raise what it answers."""
        kind = "stream" if method.client_streaming else "unary"
        answers = "stream" if method.server_streaming else "unary"
        call = getattr(self.channel, f"{kind}_{answers}")(f"/{method.containing_service.full_name}/{method.name}")
        answer = call(iter(data) if method.client_streaming else data[0], timeout=DEADLINE_S)
        return answer if method.server_streaming else [answer]

    def open(self) -> None:
        """Open two leases, one of which publishes two blocks and could publish a third."""
        items = [
            *(pb.Operation(match_prefix=pb.MatchPrefixRequest(lease_id=each, num_tokens=6)) for each in LEASE_IDS[:2]),
            pb.Operation(insert=pb.InsertRequest(lease_id=LEASE_IDS[0], tokens=pack(0, 1, 1, 0))),
        ]
        answer = self.stub.Batch(pb.BatchRequest(operations=items), timeout=DEADLINE_S)
        assert not [result for result in answer.results if result.HasField("error")]

    def release(self, lease_ids: Iterable[str]) -> None:
        """End the leases that there are of these names."""
        items = [pb.Operation(release=pb.ReleaseRequest(lease_id=lease_id)) for lease_id in lease_ids]
        self.stub.Batch(pb.BatchRequest(operations=items), timeout=DEADLINE_S)

    def expire(self) -> None:
        """Let all leases run out, whatever they were promised."""
        self.clock.write_text(str(float(self.clock.read_text()) + 1e10))
        self.stats()

    def stats(self) -> pb.GetStatsResponse:
        return self.stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S)

    def num_resident_bytes(self) -> int:
        text = Path(f"/proc/{self.server.process.pid}/statm").read_text(encoding="ascii")
        return int(text.split()[1]) * 4096


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    clock = tmp_path_factory.mktemp("clock") / "now"
    clock.write_text("0")
    with ServerProcess(num_blocks=NUM_BLOCKS, max_tokens=4096, max_operations=16, test_clock=clock) as server:
        with grpc.insecure_channel(server.address) as channel:
            yield Port(server, channel, clock)
        assert server.process.poll() is None


class Answer(NamedTuple):
    """What a call came to, with the leases that it opened."""

    code: grpc.StatusCode
    lease_ids: list[str]


def ask(port: Port, method: MethodDescriptor, data: list[bytes]) -> Answer:
    """Call; every answer must be a message of its type, every status one that the caller could deserve."""
    lease_ids: list[str] = []
    code, text = grpc.StatusCode.OK, ""
    try:
        for answer in port.send(method, data):
            lease_ids += opened(GetMessageClass(method.output_type).FromString(answer))
    except grpc.RpcError as error:
        code, text = error.code(), error.details()
    assert code not in OURS, text
    assert "Error" not in text, "the name of an exception"
    return Answer(code, lease_ids)


def opened(answer: Any) -> Iterator[str]:
    """Yield the ids of the leases that an answer opened; no status in it may be the server's fault."""
    if isinstance(answer, pb.SessionResponse):
        assert answer.error.code not in OUR_NUMBERS
        answer = answer.batch
    if isinstance(answer, pb.MatchPrefixResponse):
        yield answer.lease_id
    if isinstance(answer, pb.BatchResponse):
        for result in answer.results:
            assert result.error.code not in OUR_NUMBERS
            if result.HasField("match_prefix"):
                yield result.match_prefix.lease_id


def _call(method: MethodDescriptor) -> st.SearchStrategy[tuple[str, list[bytes]]]:
    data = st.lists(requests(method.input_type), min_size=1, max_size=4 if method.client_streaming else 1)
    return st.tuples(st.just(method.full_name), data)


@given(st.lists(st.one_of([_call(method) for method in BY_NAME.values()]), min_size=1, max_size=10))
def test_no_request_is_the_servers_fault_or_leaves_a_lease(port: Port, sent: list[tuple[str, list[bytes]]]) -> None:
    port.open()
    lease_ids = set(LEASE_IDS)
    try:
        for name, data in sent:
            lease_ids.update(ask(port, BY_NAME[name], data).lease_ids)
        port.release(lease_ids)
        assert_nothing_left(port)
    finally:
        port.expire()  # the next example begins with no lease, whatever became of this one


def assert_nothing_left(port: Port) -> None:
    stats = port.stats()
    free, leased, cached, _, protected = counters(stats)
    assert (stats.num_leases, leased, protected) == (0, 0, 0)
    assert free + cached == NUM_BLOCKS
    assert not [key for key in stats.num_calls if key.endswith(("/INTERNAL", "/UNKNOWN"))]


@pytest.mark.parametrize("method", BY_NAME.values(), ids=BY_NAME)
def test_bytes_that_are_no_message(port: Port, method: MethodDescriptor) -> None:
    before = Counter(port.stats().num_calls)
    answer = ask(port, method, [b"\xff\xff\xff"])
    counted = Counter(port.stats().num_calls) - before
    if method.name == "Session":
        assert answer.code is grpc.StatusCode.OK
    else:
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    if method in METHODS and method.name != "GetStats":
        assert counted == {f"{method.name}/INVALID_ARGUMENT": 1, "GetStats/OK": 1}


def test_a_session_goes_on_past_bytes_that_are_no_message(port: Port) -> None:
    (session,) = (method for method in METHODS if method.name == "Session")
    good = pb.SessionRequest(batch=pb.BatchRequest(operations=[pb.Operation(probe=pb.ProbeRequest())]))
    answers = [pb.SessionResponse.FromString(each) for each in port.send(session, [b"\xff", good.SerializeToString()])]
    assert [answer.WhichOneof("result") for answer in answers] == ["error", "batch"]


def test_the_server_does_not_grow(port: Port) -> None:
    """The same spoiled requests again and again: what is kept of them is bounded."""
    spoiled = [b"\xff\xff\xff", b"\x0a\x03abc", b"\x3a\x80\x80\x80\x80\x10"]
    sent = [(method, [data]) for method in METHODS for data in spoiled]
    for method, data in sent * 2:
        ask(port, method, data)
    before = port.num_resident_bytes()
    for method, data in sent * 20:
        ask(port, method, data)
    assert port.num_resident_bytes() - before < MOST_GROWTH_BYTES
    port.release(LEASE_IDS)
    assert_nothing_left(port)
