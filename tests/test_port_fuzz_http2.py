"""Bytes that are no calls, sent to the port over bare sockets: the server goes on answering, and nothing is left.

What the transport makes of them (`raw_http2` draws them) is grpc's business. Ours is that no handler fails, that the
calls among them leave no more than their leases, and that neither memory nor open files grow.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client_help import wait_until
from helpers import counters
from hypothesis import given
from hypothesis import strategies as st
from raw_http2 import (
    END_STREAM,
    HELLO,
    PREFACE,
    call,
    connections,
    data_frame,
    frame,
    headers_frame,
    headers_of,
    match,
    message,
)
from raw_port import LEASE_IDS
from service_process import ServerProcess, pack, stub_to

from radix_cache_service.pb import prefix_cache_pb2 as pb

DEADLINE_S = 60
ANSWER_S = 60
QUIET_S = 0.02
NUM_BLOCKS = 64
MOST_GROWTH_BYTES = 16 * 2**20
MOST_BYTES = 512 * 2**20
ONE_MESSAGE = message(match("lease-0").SerializeToString())


class Port:
    """A server, a stub to it, and bare sockets."""

    def __init__(self, server: ServerProcess, stub: Any) -> None:
        self.process = server.process
        self.stub = stub
        host, _, port = server.address.rpartition(":")
        self._address = host, int(port)

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a new connection."""
        return socket.create_connection(self._address, timeout=timeout_s)

    def send(self, sent: bytes, *, is_patient: bool = False) -> bytes:
        """Send over a connection of its own; return all that is answered.

        A patient client hangs up when it has heard nothing for a moment, another says at once that no more comes.
        """
        answered = b""
        with self.connect(QUIET_S if is_patient else ANSWER_S) as connection:
            try:
                connection.sendall(sent)
                if not is_patient:
                    connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(65536):
                    answered += piece
            except TimeoutError:
                assert is_patient, "the server does not hang up"
            except OSError:  # it has hung up in the middle
                pass
        return answered

    def check(self) -> None:
        """A good call is answered; the leases of all calls can be released, and then nothing is left."""
        assert self.stub.Probe(pb.ProbeRequest(tokens=pack(1)), timeout=DEADLINE_S).num_cached_tokens == 0
        wait_until(self.release)  # a call may be served after its connection is gone
        stats = self.stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S)
        assert not [key for key in stats.num_calls if key.endswith(("/INTERNAL", "/UNKNOWN"))]
        assert self.process.poll() is None

    def release(self) -> bool:
        """Release the leases that calls may have opened; tell whether nothing is left."""
        items = [pb.Operation(release=pb.ReleaseRequest(lease_id=each)) for each in LEASE_IDS]
        self.stub.Batch(pb.BatchRequest(operations=items), timeout=DEADLINE_S)
        stats = self.stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S)
        return stats.num_leases == 0 and counters(stats) == (NUM_BLOCKS, 0, 0, 0, 0)

    def num_leases(self) -> int:
        return self.stub.GetStats(pb.GetStatsRequest(), timeout=DEADLINE_S).num_leases

    def num_resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGESIZE"
        )

    def num_open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@pytest.fixture(scope="module")
def port() -> Iterator[Port]:
    with ServerProcess(num_blocks=NUM_BLOCKS) as server, stub_to(server.address) as stub:
        yield Port(server, stub)


def test_a_call_in_bare_bytes_is_a_call(port: Port) -> None:
    """So that the test below is about calls at all."""
    with port.connect(ANSWER_S) as connection:
        connection.sendall(HELLO + call("MatchPrefix", match("lease-0")))
        wait_until(lambda: port.num_leases() == 1)
    port.check()


@given(st.lists(st.tuples(connections(), st.booleans()), min_size=1, max_size=4))
def test_what_is_no_call_changes_nothing(port: Port, sent: list[tuple[bytes, bool]]) -> None:
    for each, is_patient in sent:
        port.send(each, is_patient=is_patient)
    port.check()


HEADERS = headers_frame(headers_of("MatchPrefix"))
SESSION = headers_frame(headers_of("Session"))
PAIRS = [(f"x-{number}", "y" * 1000) for number in range(40)]
BY_HAND = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
    "zeros": bytes(100_000),
    "data before headers": HELLO + data_frame(ONE_MESSAGE),
    "headers twice": HELLO + HEADERS + HEADERS,
    "no settings": PREFACE + HEADERS + data_frame(ONE_MESSAGE, 1, END_STREAM),
    "half a message": HELLO + HEADERS + data_frame(ONE_MESSAGE[:-2], 1, END_STREAM),
    "two messages for one": HELLO + HEADERS + data_frame(2 * ONE_MESSAGE, 1, END_STREAM),
    "no message": HELLO + HEADERS + data_frame(b"", 1, END_STREAM),
    "a message of 4 GiB, it says": HELLO + HEADERS + data_frame(message(b"", length=2**32 - 1)),
    "a frame that is longer than it says": HELLO + frame(1, 4, 1, bytes(100), length=3),
    "a frame of 16 MiB, it says": HELLO + HEADERS + frame(0, 0, 1, bytes(100), length=2**24 - 1),
    "a header block that never ends": HELLO
    + frame(1, 0, 1, b"\x10\x01x\x01y")
    + frame(9, 0, 1, b"\x10\x01x\x01y") * 500,
    "large headers": HELLO
    + headers_frame([*headers_of("MatchPrefix"), *PAIRS])
    + data_frame(ONE_MESSAGE, 1, END_STREAM),
    "a window of nothing": HELLO + HEADERS + frame(8, 0, 1, bytes(4)),
    "a window too large": HELLO + HEADERS + 3 * frame(8, 0, 1, b"\x7f\xff\xff\xff"),
    "a reset of a stream that is not there": HELLO + frame(3, 0, 9, bytes(4)),
    "a call that is reset": HELLO + call("MatchPrefix", match("lease-0")) + frame(3, 0, 1, bytes(4)),
    "pings": HELLO + 200 * frame(6, 0, 0, bytes(8)),
    "settings": HELLO + 200 * frame(4, 0, 0, b"\x00\x04\x7f\xff\xff\xff"),
    "good-bye first": HELLO + frame(7, 0, 0, bytes(8)) + call("MatchPrefix", match("lease-0")),
    "an open session that says nothing": HELLO + SESSION,
    "a session cut off": HELLO + SESSION + data_frame(ONE_MESSAGE[:3]),
    "a thousand streams": HELLO + b"".join(headers_frame(headers_of("Session"), 2 * n + 1) for n in range(1000)),
    "streams opened and reset": HELLO
    + b"".join(
        headers_frame(headers_of("Session"), 2 * n + 1) + frame(3, 0, 2 * n + 1, b"\0\0\0\x08") for n in range(500)
    ),
}


FLOODS = ("a thousand streams", "streams opened and reset")


@pytest.mark.parametrize("is_patient", [True, False], ids=["patient", "hasty"])
@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(port: Port, name: str, is_patient: bool) -> None:
    port.send(BY_HAND[name], is_patient=is_patient)
    port.check()


def test_what_peers_send_is_not_logged() -> None:
    """The transport would write out the text of a good-bye as it comes, line breaks included."""
    with ServerProcess(num_blocks=NUM_BLOCKS) as server, stub_to(server.address) as stub:
        port = Port(server, stub)
        port.send(HELLO + frame(7, 0, 0, bytes(8) + b"\na line of the log"), is_patient=True)
        port.send(HELLO + headers_frame([*headers_of("Probe"), ("grpc-timeout", "soon")]), is_patient=True)
        port.check()
        _, errors = server.stop()
    assert "a line of the log" not in errors
    assert "grpc-timeout" not in errors


def test_a_burst_is_served_to_the_last_call(port: Port) -> None:
    """gRPC's own limit would cancel some, of whichever client."""
    request = pb.ProbeRequest(tokens=pack(1))
    calls = [port.stub.Probe.future(request, timeout=60) for _ in range(3000)]
    assert {call.code() for call in calls} == {grpc.StatusCode.OK}


def test_neither_memory_nor_files_grow(port: Port) -> None:
    """What one round takes is enough for all that follow. Floods come below: they take what their peak takes."""

    def send_all() -> None:
        for sent in 4 * [sent for name, sent in BY_HAND.items() if name not in FLOODS]:
            port.send(sent)
        port.check()

    send_all()
    num_bytes, num_files = port.num_resident_bytes(), port.num_open_files()
    for _ in range(4):
        send_all()
    assert port.num_resident_bytes() - num_bytes < MOST_GROWTH_BYTES
    wait_until(lambda: port.num_open_files() <= num_files)


def test_floods_of_streams_have_a_bound(port: Port) -> None:
    for _ in range(3):
        for name in FLOODS:
            port.send(BY_HAND[name])
        port.check()
    assert port.num_resident_bytes() < MOST_BYTES
