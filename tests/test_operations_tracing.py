"""Spans, as a collector receives them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from faulty import RAISES, provoke
from service_process import ServerProcess, pack, stub_to

from radix_cache.errors import InvalidArgument
from radix_cache_service import ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb

collector_pb = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
collector_grpc = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")

DEADLINE_S = 60
SERVER, ERROR = 2, 2  # kind of span, code of status
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(collector_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.service_names: set[str] = set()

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            named = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.service_names.add(named["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return collector_pb.ExportTraceServiceResponse()

    def named(self, method: str) -> list[Any]:
        return [span for span in self.spans if span.name == f"radixcache.v1.PrefixCacheService/{method}"]


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Run a collector; yield it and its endpoint."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    collector_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def traced(flags: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a caller that is in a trace."""
    return (("traceparent", f"00-{TRACE}-{PARENT}-{flags}"),)


def attributes(span: Any) -> dict[str, Any]:
    values = {item.key: (item.value.WhichOneof("value"), item.value) for item in span.attributes}
    return {key: getattr(value, kind) for key, (kind, value) in values.items()}


def test_a_span_for_each_call_and_each_batch_of_a_session() -> None:
    with collecting() as (collector, endpoint):
        with ServerProcess(otlp_endpoint=endpoint, trace_share=1) as server, stub_to(server.address) as stub:
            request = pb.MatchPrefixRequest(tokens=pack(31337, 31338), namespace=["tenant"], num_tokens=2, lease_id="l")
            stub.MatchPrefix(request, timeout=DEADLINE_S)
            with pytest.raises(grpc.RpcError):
                stub.Release(pb.ReleaseRequest(lease_id="nobody"), timeout=DEADLINE_S)
            batches = [pb.SessionRequest(batch=pb.BatchRequest()) for _ in range(3)]
            assert len(list(stub.Session(iter(batches), timeout=DEADLINE_S))) == 3
        (match,) = collector.named("MatchPrefix")
        (release,) = collector.named("Release")
        sessions = collector.named("Session")
    assert collector.service_names == {"radix-cache"}
    assert (match.kind, match.parent_span_id, match.status.code) == (SERVER, b"", 0)
    assert attributes(match) == {
        "rpc.system": "grpc",
        "rpc.service": "radixcache.v1.PrefixCacheService",
        "rpc.method": "MatchPrefix",
        "rpc.grpc.status_code": 0,
    }
    assert 0 < match.end_time_unix_nano - match.start_time_unix_nano < 60e9
    assert (attributes(release)["rpc.grpc.status_code"], release.status.code) == (5, 0), "no fault of the server"
    assert len(sessions) == 3
    for span in collector.spans:
        assert not {"31337", "tenant", "nobody"} & {*str(span).split('"')}
        assert not span.events


def test_a_call_belongs_to_the_trace_of_its_caller() -> None:
    with collecting() as (collector, endpoint):
        with ServerProcess(otlp_endpoint=endpoint, trace_share=0) as server, stub_to(server.address) as stub:
            stub.Probe(pb.ProbeRequest(), timeout=DEADLINE_S)
            stub.Probe(pb.ProbeRequest(), timeout=DEADLINE_S, metadata=traced("01"))
            stub.Probe(pb.ProbeRequest(), timeout=DEADLINE_S, metadata=traced("00"))
            stub.Probe(
                pb.ProbeRequest(), timeout=DEADLINE_S, metadata=(("traceparent", "nonsense"), ("x-bin", b"\xff"))
            )
            list(stub.Session(iter([pb.SessionRequest()]), timeout=DEADLINE_S, metadata=traced("01")))
        (probe,) = collector.named("Probe")
        (session,) = collector.named("Session")
    for span in (probe, session):
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


def test_the_wait_for_blocks_is_in_the_span_and_a_fault_is_an_error() -> None:
    with collecting() as (collector, endpoint):
        settings = {"otlp_endpoint": endpoint, "trace_share": 1, "policy": "faulty:Faulty", "log_level": "error"}
        with ServerProcess(**settings) as server, stub_to(server.address) as stub:
            stub.MatchPrefix(pb.MatchPrefixRequest(lease_id="a", num_blocks=8), timeout=DEADLINE_S)
            with pytest.raises(grpc.RpcError):
                stub.Allocate(pb.AllocateRequest(lease_id="a", num_blocks=1, wait=True), timeout=3)
            stub.Release(pb.ReleaseRequest(lease_id="a"), timeout=DEADLINE_S)
            with pytest.raises(grpc.RpcError):
                provoke(stub, RAISES, 31337, timeout=DEADLINE_S)
        (allocate,) = collector.named("Allocate")
        (evict,) = collector.named("Evict")
    assert 0.2 < attributes(allocate)["radix_cache.waited_s"] < 60
    assert (attributes(evict)["rpc.grpc.status_code"], evict.status.code, evict.status.message) == (13, ERROR, "")
    assert "31337" not in str(evict)


def test_a_collector_that_is_gone_holds_up_nobody() -> None:
    server = ServerProcess(otlp_endpoint="http://127.0.0.1:1", trace_share=1, log_level="error")
    with stub_to(server.address) as stub:
        for _ in range(10):
            stub.Probe(pb.ProbeRequest(), timeout=DEADLINE_S)
    assert server.stop()[0] == 0


def test_what_is_not_installed_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "radix_cache_service.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(
        InvalidArgument, match=r"otlp_endpoint is set, and opentelemetry\.sdk\.trace is not installed: pip"
    ):
        ServerConfig(otlp_endpoint="http://127.0.0.1:1")
