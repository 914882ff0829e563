"""What the client's tests share: a server for all tests of a file, and ways to lose answers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from helpers import counters

from radix_cache.errors import DeadlineExceeded, NotConnected, PoolExhausted, ServiceUnavailable
from radix_cache_service import Client

_numbers = itertools.count()


def new_engine() -> str:
    """Return an engine id that no test before has used, on a server that remembers what each engine sent last."""
    return f"engine-{next(_numbers)}"


def assert_all_returned(address: str) -> None:
    """Nothing is leased or protected, so that every block can be had back."""
    with Client(address) as client:
        description = client.describe()
        stats = client.stats()
        assert (stats.num_leases, counters(stats).leased, counters(stats).protected) == (0, 0, 0)
        client.reset()
        assert client.stats().num_free_blocks == description.num_blocks - description.num_reserved_blocks


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Look again and again; fail if it takes too long."""
    clock = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if holds():
            return
        clock.wait(0.02)
    raise AssertionError(f"still not after {seconds} s")


def wait_in_vain(call: Callable[[], Any]) -> float:
    """Make a call that waits for blocks until the server says that there are none; return how long that took.

    It says so a quarter of a second before the deadline, which a busy machine may miss: then it is asked again.
    """
    for _ in range(20):
        began = time.monotonic()
        try:
            call()
        except DeadlineExceeded:
            continue
        except PoolExhausted:
            return time.monotonic() - began
        raise AssertionError("it got what is not there")
    raise AssertionError("the server never said so")


def wait_until_gone(client: Client) -> None:
    """Wait until the client knows that nobody is there: what it sends before that may have arrived."""

    def finds_nobody() -> bool:
        try:
            client.describe()
        except NotConnected:
            return True
        except ServiceUnavailable:
            return False
        raise AssertionError("somebody is there")

    wait_until(finds_nobody)


@contextmanager
def losing_answers(client: Any, *, is_served: bool = True, times: int = 99, is_late: bool = True) -> Iterator[None]:
    """Let the server do what is asked (or not), and the client never hear of it, ``times`` times."""
    send_once, left = client._send_once, times

    def send_and_forget(call: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            return send_once(call)
        if is_served:
            send_once(call)
        raise DeadlineExceeded("lost by the test") if is_late else ServiceUnavailable("lost by the test")

    client._send_once = send_and_forget
    try:
        yield
    finally:
        del client._send_once


class Proxy:
    """A TCP proxy in front of a server, whose connections a test can cut.

    While ``is_stopped`` is set nothing passes, while ``is_deaf`` is, nothing that the server says.
    """

    def __init__(self, address: str, listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.is_stopped = threading.Event()
        self.is_deaf = threading.Event()
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self.listener = socket.create_server(listen, family=family)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        """Take connections until closed."""
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            self.sockets.append(near)
            try:
                far = socket.create_connection((self.host, self.port))
            except OSError:  # there is no server now
                near.close()
                continue
            self.sockets.append(far)
            for source, target, is_held in (
                (near, far, self.is_stopped.is_set),
                (far, near, lambda: self.is_stopped.is_set() or self.is_deaf.is_set()),
            ):
                self.threads.append(threading.Thread(target=pump, args=(source, target, is_held)))
                self.threads[-1].start()

    def cut(self) -> None:
        """Break all connections of now. What was held is lost."""
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        for thread in self.threads:
            thread.join()
        for each in self.sockets:
            each.close()


def pump(source: socket.socket, target: socket.socket, is_held: Callable[[], bool]) -> None:
    """Copy until one side ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            while is_held():
                if is_cut(target):
                    return
                time.sleep(0.01)
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def is_cut(target: socket.socket) -> bool:
    """Tell whether the test has cut the connection."""
    try:
        target.getpeername()
    except OSError:
        return True
    return False
