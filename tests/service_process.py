"""A server in a process of its own, as a user starts it, and the raw stubs to call it with."""

from __future__ import annotations

import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

READY = "listening on "
METRICS = "metrics on "
START_S = 60  # more than a busy machine takes; nothing waits for it to pass
SERVE = ("-m", "radix_cache_service")
ROUTE = ("-c", "from radix_cache.cli import main; main()", "route")
DEFAULTS = {"num_blocks": 8, "block_size": 2, "growth_share": 0, "log_level": "warning"}
UNLIMITED = [("grpc.max_receive_message_length", 2**30), ("grpc.max_send_message_length", 2**30)]


class ServerProcess:
    """``python -m radix_cache_service`` with a flag for each keyword; ``addresses`` are there once it serves.

    environ: more environment variables. metrics_address: where it is scraped, with ``metrics_listen=``. command,
    defaults: for another one that is started alike.
    """

    command: Sequence[str] = SERVE
    defaults: Mapping[str, Any] = DEFAULTS

    def __init__(self, *listen: str, environ: Mapping[str, str] | None = None, **settings: Any) -> None:
        flags = [part for address in listen or ("127.0.0.1:0",) for part in ("--listen", address)]
        for name, value in {**self.defaults, **settings}.items():
            for each in value if isinstance(value, list) else [value]:
                flags += ["--" + name.replace("_", "-"), str(each)]
        self.process = subprocess.Popen(
            [sys.executable, *self.command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The path is for policies of the tests.
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **(environ or {})},
        )
        self.metrics_address: str | None = None
        self._output: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_output, self._read_errors)]
        for reader in self._readers:
            reader.start()
        self.addresses = self._wait_until_ready(len(listen) or 1)

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._output.put(line)
        self._output.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line)

    def _wait_until_ready(self, num_addresses: int) -> list[str]:
        found: list[str] = []
        while len(found) < num_addresses:
            line = self._output.get(timeout=START_S)
            if line is None:
                raise StartFailed(*self.finish())
            if line.startswith(METRICS):
                self.metrics_address = line.split()[-1]
            if line.startswith(READY):
                found.append(line.removeprefix(READY).split()[0])
        return found

    def has_logged(self, text: str) -> bool:
        """Tell whether this stands in what was written to stderr until now."""
        return any(text in line for line in self._errors)

    @property
    def address(self) -> str:
        """The first address."""
        return self.addresses[0]

    def finish(self, timeout_s: float = 60) -> tuple[int, str]:
        """Wait for the end; return the exit status and what was written to stderr."""
        status = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
        return status, "".join(self._errors)

    def stop(self, name: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Signal the process, if it still runs, and wait for its end."""
        if self.process.poll() is None:
            self.process.send_signal(name)
        return self.finish()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        status, errors = self.stop()
        assert status in {0, -signal.SIGKILL}, errors


class RouterProcess(ServerProcess):
    """The same for ``radix-cache route``."""

    command = ROUTE
    # Nodes that end are noticed at once; one that is slow on a busy machine is not one that hangs.
    defaults: Mapping[str, Any] = {"log_level": "warning", "heartbeat": 20}


class StartFailed(Exception):
    """The server ended before it was ready; ``status`` and ``errors`` say how."""

    def __init__(self, status: int, errors: str) -> None:
        super().__init__(f"exit status {status}: {errors}")
        self.status = status
        self.errors = errors


@contextmanager
def stub_to(address: str, *options: tuple[str, Any]) -> Iterator[pb_grpc.PrefixCacheServiceStub]:
    """Yield a stub on a connection of its own."""
    own = ("grpc.use_local_subchannel_pool", 1)
    with grpc.insecure_channel(address, [*options, own, *UNLIMITED]) as channel:
        yield pb_grpc.PrefixCacheServiceStub(channel)


def reason_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Return the code, and the reason and the numbers of the error's details."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return error.code(), *reason_in(Status.FromString(value))
    return error.code(), "", {}


def reason_in(status: Status) -> tuple[str, dict[str, str]]:
    """Return the reason and the numbers of a status."""
    info = ErrorInfo()
    assert [detail.Unpack(info) for detail in status.details] == [True]
    assert info.domain == "radixcache.v1"
    return info.reason, dict(info.metadata)


def own_addresses(number: int) -> list[str]:
    """Return addresses that are free, and that nobody gets who does not ask for them by number: one who listens there
    can end, and come back.
    """
    addresses: set[str] = set()
    while len(addresses) < number:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            addresses.add(f"127.0.0.1:{port}")
    return sorted(addresses)


def own_address() -> str:
    """Return one of them."""
    (address,) = own_addresses(1)
    return address


def pack(*tokens: int) -> bytes:
    """Return tokens in the packed form."""
    return array("I", tokens).tobytes()


def unpack(ids: bytes) -> list[int]:
    """Return packed ids as a list."""
    return array("I", ids).tolist()
