"""A server's life: addresses that are taken, stale or wrong, health, reflection, the end."""

from __future__ import annotations

import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from service_process import ServerProcess, StartFailed, own_address, stub_to

from radix_cache.errors import InvalidArgument
from radix_cache_service.config import ServerConfig
from radix_cache_service.pb import prefix_cache_pb2 as pb

DEADLINE_S = 60
SERVICE = "radixcache.v1.PrefixCacheService"
States = health_pb2.HealthCheckResponse


def opens(server: ServerProcess, address: str, lease_id: str) -> None:
    """The server answers at the address."""
    with stub_to(address) as stub:
        answer = stub.MatchPrefix(pb.MatchPrefixRequest(lease_id=lease_id, num_tokens=2), timeout=DEADLINE_S)
        assert len(answer.block_table) == 4


# Addresses.


def test_a_second_server_on_the_port_fails_and_names_it() -> None:
    with ServerProcess() as first:
        with pytest.raises(StartFailed, match=re.escape(first.address)) as caught:
            ServerProcess(first.address)
        assert caught.value.status == 1
        assert "Traceback" not in caught.value.errors
        opens(first, first.address, "a")


def test_another_name_for_the_port_is_no_way_in() -> None:
    with ServerProcess() as first:
        port = first.address.rpartition(":")[2]
        for host in ("localhost", "0.0.0.0", "[::]"):
            with pytest.raises(StartFailed, match=re.escape(f"{host}:{port}")):
                ServerProcess(f"{host}:{port}")


def test_a_host_by_name() -> None:
    with ServerProcess("localhost:0") as server:
        assert server.address.startswith("localhost:")
        opens(server, server.address, "a")
    with pytest.raises(StartFailed, match=re.escape("no.such.host.invalid:1")):
        ServerProcess("no.such.host.invalid:1")


def test_all_addresses_or_none(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    with ServerProcess() as first:
        with pytest.raises(StartFailed):
            ServerProcess(f"unix:{path}", first.address)
        assert not path.exists()
        with ServerProcess(f"unix:{path}") as second:
            opens(second, second.address, "a")


def test_a_second_server_on_the_socket_fails_and_the_first_goes_on(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/cache.sock"
    with ServerProcess(address) as first:
        with pytest.raises(StartFailed, match=re.escape(address)) as caught:
            ServerProcess(address)
        assert caught.value.status == 1
        opens(first, address, "a")


def test_why_an_address_cannot_be_used_is_said() -> None:
    with pytest.raises(StartFailed, match=r"cannot listen on 203\.0\.113\.9:0: Cannot assign requested address"):
        ServerProcess("203.0.113.9:0")
    with ServerProcess() as first, pytest.raises(StartFailed, match=f"{first.address}: another server is using it"):
        ServerProcess(first.address)


def test_a_socket_whose_lock_was_removed_is_not_taken_over(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/cache.sock"
    with ServerProcess(address) as server:
        for _ in range(2):  # nor did the first attempt harm it
            (tmp_path / "cache.sock.lock").unlink(missing_ok=True)
            with pytest.raises(StartFailed, match="another server is using it"):
                ServerProcess(address)
        opens(server, address, "a")


def test_a_socket_left_by_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    killed = ServerProcess(f"unix:{path}")
    killed.stop(signal.SIGKILL)
    assert path.is_socket()
    with ServerProcess(f"unix:{path}") as server:
        opens(server, server.address, "a")
    assert not path.exists()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(StartFailed, match="precious"):
        ServerProcess(f"unix:{path}")
    assert path.read_text() == "data"


def test_several_addresses_one_cache(tmp_path: Path) -> None:
    with ServerProcess("127.0.0.1:0", f"unix:{tmp_path}/cache.sock", "127.0.0.1:0") as server:
        assert len(set(server.addresses)) == 3
        for number, address in enumerate(server.addresses):
            opens(server, address, str(number))
        with stub_to(server.address) as stub:
            assert stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S).num_leases == 3


@pytest.mark.parametrize(("mode", "wanted"), [(None, 0o660), ("600", 0o600), ("666", 0o666)])
def test_the_mode_of_the_socket(tmp_path: Path, mode: str | None, wanted: int) -> None:
    path = tmp_path / "cache.sock"
    settings = {} if mode is None else {"uds_mode": mode}
    with ServerProcess(f"unix:{path}", **settings):
        assert stat.S_IMODE(path.stat().st_mode) == wanted


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="nowhere"):
        ServerProcess(f"unix:{tmp_path}/nowhere/cache.sock")


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(StartFailed, match=re.escape("192.0.2.1:50051")):
        ServerProcess("192.0.2.1:50051")


# Settings.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("listen", ()),
        ("listen", ("50051",)),
        ("listen", ("host:99999",)),
        ("listen", ("unix:relative",)),
        ("num_blocks", 0),
        ("num_blocks", -1),
        ("block_size", 0),
        ("policy", "best"),
        ("num_reserved_blocks", -1),
        ("growth_share", 1.0),
        ("lease_ttl_s", 0.0),
        ("lease_ttl_s", float("inf")),
        ("max_tokens", 0),
        ("max_operations", 0),
        ("max_streams", 0),
        ("uds_mode", 0o1000),
        ("drain_delay_s", -1.0),
        ("grace_s", float("nan")),
    ],
)
def test_bad_settings_name_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig(**{field: value})
    assert field in str(caught.value)
    shown = value[0] if isinstance(value, tuple) and value else value
    assert str(shown) in str(caught.value) or not value


def test_a_bad_setting_opens_no_port(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    with pytest.raises(StartFailed, match="block_size") as caught:
        ServerProcess(f"unix:{path}", block_size=0)
    assert "Traceback" not in caught.value.errors
    assert not path.exists()


def test_message_limits_are_never_unlimited() -> None:
    for max_tokens in (1, 2**20, 2**28):
        assert 0 < ServerConfig(max_tokens=max_tokens).max_message_bytes < 2**31


# What it says of itself.


def test_health_knows_itself_and_nobody_else() -> None:
    with ServerProcess() as server, grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
            assert answer.status == States.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watched = health.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=DEADLINE_S)
        assert next(watched).status == States.SERVICE_UNKNOWN
        with stub_to(server.address) as stub:
            stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S)
        assert watched.is_active()
        watched.cancel()


def test_reflection_describes_what_it_lists() -> None:
    with ServerProcess() as server, grpc.insecure_channel(server.address) as channel:
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        request = reflection_pb2.ServerReflectionRequest
        questions = [
            request(list_services=""),
            request(file_containing_symbol=SERVICE),
            request(file_containing_symbol=f"{SERVICE}.MatchPrefix"),
        ]
        answers = list(ask(iter(questions), timeout=DEADLINE_S))
    listed = {service.name for service in answers[0].list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= listed
    for answer in answers[1:]:
        assert b"MatchPrefix" in answer.file_descriptor_response.file_descriptor_proto[0]


# The end.


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_does_not_wait_for_calls(name: signal.Signals) -> None:
    """It would have longer than the test has."""
    assert ServerProcess(grace_s=1000).stop(name) == (0, "")


def test_readiness_goes_first(tmp_path: Path) -> None:
    """And for as long as the delay is, everything else goes on."""
    server = ServerProcess(f"unix:{tmp_path}/cache.sock", drain_delay_s=1000)
    with grpc.insecure_channel(server.address) as channel, stub_to(server.address) as stub:
        health = health_pb2_grpc.HealthStub(channel)
        readiness = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=DEADLINE_S)
        assert next(readiness).status == States.SERVING
        more = threading.Event()
        session = stub.Session(_messages(more), timeout=DEADLINE_S)
        assert next(session).batch.results[0].probe.num_cached_tokens == 0

        server.process.send_signal(signal.SIGTERM)
        assert next(readiness).status == States.NOT_SERVING
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=DEADLINE_S)
        assert answer.status == States.NOT_SERVING
        opens(server, server.address, "late")  # the delay is there for those who have not noticed yet
        more.set()
        assert next(session).batch.results
    server.stop(signal.SIGKILL)


def test_then_streams_and_calls_end(tmp_path: Path) -> None:
    server = ServerProcess(f"unix:{tmp_path}/cache.sock", drain_delay_s=0.1)
    with grpc.insecure_channel(server.address) as channel, stub_to(server.address) as stub:
        readiness = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=DEADLINE_S
        )
        assert next(readiness).status == States.SERVING
        session = stub.Session(_messages(threading.Event()), timeout=DEADLINE_S)
        assert next(session).batch.results
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            next(session)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError):
            list(readiness)
    assert server.finish()[0] == 0
    assert not Path(server.address.removeprefix("unix:")).exists()


def _messages(more: threading.Event) -> Any:
    probe = pb.SessionRequest(batch=pb.BatchRequest(operations=[pb.Operation(probe=pb.ProbeRequest())]))
    yield probe
    more.wait(DEADLINE_S)
    yield probe
    time.sleep(DEADLINE_S)  # in a daemon thread of the client: the stream stays open on this side


def test_the_port_is_free_again_after_the_end() -> None:
    address = own_address()
    with ServerProcess(address):
        pass
    with ServerProcess(address) as second:
        opens(second, address, "a")
        assert second.address == address


def test_a_client_does_not_load_the_server_nor_the_other_way() -> None:
    code = "import sys, radix_cache_service.{}; print([n for n in {!r} if 'radix_cache_service.' + n in sys.modules])"
    for module, others in (("client", ["server", "servicer"]), ("server", ["client", "aio"])):
        command = [sys.executable, "-c", code.format(module, others)]
        assert subprocess.check_output(command, text=True).strip() == "[]"


def test_a_killed_client_costs_nothing_but_its_lease() -> None:
    """The process dies between request and answer; its lease runs out, and the others never notice."""
    with ServerProcess(lease_ttl_s=0.5, num_blocks=8) as server, stub_to(server.address) as stub:
        host, _, port = server.address.rpartition(":")
        code = (
            "import os, grpc, threading\n"
            "from radix_cache_service.pb import prefix_cache_pb2 as pb, prefix_cache_pb2_grpc as g\n"
            f"channel = grpc.insecure_channel('{host}:{port}')\n"
            "stub = g.PrefixCacheServiceStub(channel)\n"
            "stub.GetStats(pb.GetStatsRequest())\n"
            "requests = [pb.MatchPrefixRequest(lease_id=str(i), num_tokens=2) for i in range(8)]\n"
            "calls = [stub.MatchPrefix.future(request) for request in requests]\n"
            "calls[0].result()\n"
            "os.kill(os.getpid(), 9)\n"
        )
        killed = subprocess.run([sys.executable, "-c", code], check=False)
        assert killed.returncode == -signal.SIGKILL
        deadline = time.monotonic() + DEADLINE_S
        while (stats := stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S)).num_leases:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert stats.num_free_blocks == 8
        assert stats.counters["num_expired_leases"] >= 1


def test_ports_are_bound_exclusively() -> None:
    """Not even a socket that asks to share gets in."""
    with ServerProcess() as server, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        host, _, port = server.address.rpartition(":")
        with pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
