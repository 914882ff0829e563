"""Two networks of their own, joined by a cable that a test can pull: nobody else is on them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from service_process import ServerProcess

HERE, THERE = "10.213.0.1", "10.213.0.2"
_ENTER = "import os, sys; os.execvp('ip', ['ip', 'netns', 'exec', sys.argv[1], sys.executable, *sys.argv[2:]])"


class Networks:
    """Their names; the hosts in them are `HERE` and `THERE`."""

    def __init__(self) -> None:
        self.here, self.there = (f"radix-{os.getpid()}-{name}" for name in ("here", "there"))

    def cut(self) -> None:
        """Nothing passes any more."""
        _ip("-n", self.here, "link", "set", "cable", "down")

    def mend(self) -> None:
        """It does again."""
        _ip("-n", self.here, "link", "set", "cable", "up")

    def replace(self) -> None:
        """Put another machine in the place of the first, with its address: of connections to that it knows nothing."""
        _ip("netns", "delete", self.here)
        subprocess.run(["ip", "-n", self.there, "link", "delete", "cable"], check=False, capture_output=True)
        self.join()

    def join(self) -> None:
        """Make the first network, and the cable."""
        _ip("netns", "add", self.here)
        into = ("netns", self.there)
        _ip("-n", self.here, "link", "add", "cable", "type", "veth", "peer", "name", "cable", *into)
        for name, address in ((self.here, HERE), (self.there, THERE)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")

    def server(self, *listen: str, **settings: object) -> ServerProcess:
        """A server in the first of them."""

        class Server(ServerProcess):
            command = ("-c", _ENTER, self.here, *ServerProcess.command)

        return Server(*listen, **settings)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_networks() -> Iterator[Networks]:
    """Yield them; skip the test where they can't be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("networks of their own take root and the command ip")
    networks = Networks()
    try:
        try:
            _ip("netns", "add", networks.there)
            networks.join()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"networks of their own can't be made here: {error.stderr.decode().strip()}")
        yield networks
    finally:
        for name in (networks.here, networks.there):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
