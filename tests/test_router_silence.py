"""A node that says nothing: the router lets go of it within a heartbeat, by what it waits for and not by a watch.

How long it takes in seconds is up to the machine. What is up to the router is what it waits for between the node's last
answer and the moment when the node is sent nothing more: pauses, and deadlines of calls. These are added up here.
"""

from __future__ import annotations

import asyncio
import os
import signal
from importlib.util import find_spec
from typing import Any

import grpc
import pytest
from router_help import NODE, SOON_S
from service_process import ServerProcess

if find_spec("dynamo") is None:
    pytest.skip("ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'", allow_module_level=True)

from radix_cache_service.router.config import NodeName, RouterConfig
from radix_cache_service.router.node import Link, Node

HEARTBEAT_S = 4.0


class Waits(grpc.aio.UnaryUnaryClientInterceptor):
    """What a node's beat has waited for since its last answer, in seconds; for each silence, the sum."""

    def __init__(self) -> None:
        self.since_answer = 0.0
        self.silences: list[float] = []
        self.really_sleep = asyncio.sleep

    async def sleep(self, seconds: float) -> None:
        """Do as `asyncio.sleep`."""
        task = asyncio.current_task()
        assert task is not None
        if getattr(task.get_coro(), "__name__", "") == "_beat":
            self.since_answer += seconds
        await self.really_sleep(seconds)

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        call = await continuation(details, request)
        if details.method.endswith(b"/Check"):
            assert details.timeout is not None
            if await call.code() == grpc.StatusCode.OK:
                self.since_answer = 0.0
            else:
                self.since_answer += details.timeout
        return call

    def end(self, _: object = None) -> None:
        """The node is sent nothing more."""
        self.silences.append(self.since_answer)
        self.since_answer = 0.0


class WatchedLink(Link):
    """Notes what its channels wait for."""

    def __init__(self, config: RouterConfig, waits: Waits) -> None:
        super().__init__(config)
        self.waits = waits

    def channel(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, interceptors=[self.waits])


async def silences_of(server: ServerProcess, waits: Waits) -> list[float]:
    """Let a server say nothing more, and return what was waited for each time, up to when it is sent nothing more."""
    has_joined, has_paused = asyncio.Event(), asyncio.Event()

    async def join(node: Node, _: object) -> None:
        node.worker = 1
        has_joined.set()

    def pause(_: int) -> None:
        waits.end()
        has_paused.set()

    node = Node(
        NodeName("a", server.address), WatchedLink(RouterConfig(heartbeat_s=HEARTBEAT_S), waits), join, pause, waits.end
    )
    node.start()
    async with asyncio.timeout(2 * SOON_S):
        await has_joined.wait()
        has_paused.clear()
        os.kill(server.process.pid, signal.SIGSTOP)
        await has_paused.wait()
    silences = list(waits.silences)
    await node.close()
    return silences


def test_a_node_that_says_nothing_is_sent_nothing_within_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits()
    monkeypatch.setattr(asyncio, "sleep", waits.sleep)
    server = ServerProcess(**NODE)
    try:
        silences = asyncio.run(silences_of(server, waits))
    finally:
        server.stop(signal.SIGKILL)
    assert 0 < max(silences) <= HEARTBEAT_S
