"""A node that is cut off from the router, and back: the router knows again what the node has, and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import event_router
import pytest
from client_help import wait_until
from helpers import cached
from networks import HERE, two_networks

from radix_cache_service import Client

PROMPTS = [[number, 1, number, 2, number, 3] for number in range(12)]
OLD, NEW = PROMPTS[:6], PROMPTS[6:]
CONVERGED_S = 60.0  # a connection that was cut tries again at growing intervals


class RouterElsewhere:
    """A router in a process that is in another network."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Let it do that; return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, *arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def scores(self) -> list[int]:
        """How much it thinks that the node has of each prompt."""
        return [self("score", tokens, []) for tokens in PROMPTS]


@contextmanager
def router_in(network: str) -> Iterator[RouterElsewhere]:
    """Start one."""
    command = ["ip", "netns", "exec", network, sys.executable, event_router.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield RouterElsewhere(process)
        finally:
            process.kill()


@pytest.mark.parametrize("num_kept", [8192, 2], ids=["shorter", "longer"])
def test_a_node_that_is_cut_off_and_back(tmp_path: Path, num_kept: int) -> None:
    settings = {"events_listen": f"{HERE}:5557", "max_kept_events": num_kept, "num_blocks": 64}
    environ = {"RADIX_CACHE_ALLOW_PLAINTEXT_EVENTS": "true"}
    address = f"unix:{tmp_path}/cache.sock"
    with (
        two_networks() as networks,
        router_in(networks.there) as router,
        networks.server(address, environ=environ, **settings),
        Client(address) as client,
    ):
        for tokens in OLD:
            cached(client, tokens)
        router("add", 1, f"{HERE}:5557", f"{HERE}:6557")
        wait_until(lambda: router.scores() == [6] * 6 + [0] * 6, CONVERGED_S)
        networks.cut()
        client.reset()
        for tokens in NEW:
            cached(client, tokens)
        assert router.scores() == [6] * 6 + [0] * 6  # it can't know better
        networks.mend()
        wait_until(lambda: router.scores() == [0] * 6 + [6] * 6, CONVERGED_S)
        client.evict(18)
        wait_until(lambda: router.scores() == [client.probe(tokens) for tokens in PROMPTS], CONVERGED_S)


def test_a_machine_that_is_replaced(tmp_path: Path) -> None:
    settings = {"events_listen": f"{HERE}:5557", "num_blocks": 64}
    environ = {"RADIX_CACHE_ALLOW_PLAINTEXT_EVENTS": "true"}
    address = f"unix:{tmp_path}/cache.sock"
    with two_networks() as networks, router_in(networks.there) as router:
        with networks.server(address, environ=environ, **settings) as server, Client(address) as client:
            for tokens in OLD[:5]:
                cached(client, tokens)
            router("add", 1, f"{HERE}:5557", f"{HERE}:6557")
            wait_until(lambda: router.scores() == [6] * 5 + [0] * 7, CONVERGED_S)
            cached(client, OLD[5])  # heard of after the end of what it asked for: it would wait for that for ever
            wait_until(lambda: router.scores() == [6] * 6 + [0] * 6, CONVERGED_S)
            networks.cut()
            server.stop(signal.SIGKILL)
        networks.replace()
        with networks.server(address, environ=environ, **settings), Client(address) as client:
            for tokens in NEW:
                cached(client, tokens)
            wait_until(lambda: router.scores() == [0] * 6 + [6] * 6, CONVERGED_S)
