"""Events that a router can't hear: it says so, and says when it can."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from importlib.util import find_spec

import pytest
from client_help import Proxy
from helpers import cached
from router_help import NODE, SOON_S, prompt
from scraping import samples
from service_process import ServerProcess, stub_to

from radix_cache_service import AsyncRouter, Client
from radix_cache_service.pb import prefix_cache_pb2
from radix_cache_service.router.reach import why_unheard

PATIENCE_S = 60.0
needs_dynamo = pytest.mark.skipif(
    find_spec("dynamo") is None, reason="ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'"
)


def places_of(server: ServerProcess) -> list[str]:
    """Where it says that its events are."""
    with stub_to(server.address) as stub:
        said = stub.Describe(prefix_cache_pb2.DescribeRequest())
    return [said.events_address, said.events_replay_address]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port that takes connections; what it says is up to the test."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def place_of(listening: socket.socket) -> str:
    return f"127.0.0.1:{listening.getsockname()[1]}"


def test_both_ports_of_a_node_can_be_heard() -> None:
    with ServerProcess(**NODE) as server:
        places = places_of(server)
        assert len(set(places)) == 2
        for place in places:
            assert asyncio.run(why_unheard(place, PATIENCE_S)) == ""


def test_where_nothing_listens_nothing_is_heard(listener: socket.socket) -> None:
    place = place_of(listener)
    listener.close()
    assert asyncio.run(why_unheard(place, PATIENCE_S)) == f"{place} can't be reached: ConnectionRefusedError"


def test_who_says_nothing_is_not_heard(listener: socket.socket) -> None:
    place = place_of(listener)
    assert asyncio.run(why_unheard(place, 0.2)) == f"{place} can't be reached: TimeoutError"


def test_who_hangs_up_is_not_heard(listener: socket.socket) -> None:
    assert said_by(listener, b"\xff") == f"{place_of(listener)} can't be reached: IncompleteReadError"


def test_who_speaks_something_else_is_not_heard(listener: socket.socket) -> None:
    assert said_by(listener, b"HTTP/1.1 400 Bad Request") == f"{place_of(listener)} does not speak ZeroMQ"


def said_by(listener: socket.socket, text: bytes) -> str:
    """What is found where somebody says ``text`` and hangs up."""

    async def play() -> str:
        looking = asyncio.create_task(why_unheard(place_of(listener), PATIENCE_S))
        connection, _ = await asyncio.to_thread(listener.accept)
        with connection:
            connection.sendall(text)
        return await looking

    return asyncio.run(play())


@pytest.mark.parametrize("place", ["..:5557", "a" * 300 + ":5557", "127.0.0.1:99999", "127.0.0.1:", "127.0.0.1"])
def test_a_place_that_nobody_can_have_is_not_heard(place: str) -> None:
    assert asyncio.run(why_unheard(place, PATIENCE_S)).startswith(f"{place} can't be reached: ")


@needs_dynamo
def test_a_node_whose_events_are_not_heard_is_shown_until_they_are(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"RADIX_CACHE_ALLOW_PLAINTEXT_EVENTS": "true"}
    far = ServerProcess("[::1]:0", environ=environ, **{**NODE, "events_listen": "0.0.0.0:0"})
    with far, ServerProcess(**NODE) as near:
        with Client(far.address) as client:
            cached(client, prompt(1))
        ports = [int(place.rpartition(":")[2]) for place in places_of(far)]
        asyncio.run(look_at(far, near, ports))
    assert "the node's events are not heard" in caplog.text


async def look_at(far: ServerProcess, near: ServerProcess, ports: list[int]) -> None:
    """Route over both, where the events of one can be heard after a while only, at these ports."""
    async with routing_over(far=far, near=near) as (router, metrics):

        async def shown() -> dict[str, tuple[str, str]]:
            return {info.node: (info.state, info.events_problem) for info in await router.nodes()}

        async def scraped() -> dict[str, float]:
            found = await asyncio.to_thread(samples, metrics)
            return {node: found["radix_cache_router_events_unheard", node] for node in ("far", "near")}

        async def known() -> int:
            routed = await router.route(prompt(1), peek=True, with_nodes=True)
            return {each.node: each.num_cached_tokens for each in routed.nodes}["far"]

        said = "; ".join(f"[::1]:{port} can't be reached: ConnectionRefusedError" for port in ports)
        await until(shown, {"far": ("serving", said), "near": ("serving", "")})
        await until(scraped, {"far": 1, "near": 0})
        assert await known() == 0
        with ExitStack() as stack:
            for port in ports:
                stack.enter_context(Proxy(f"127.0.0.1:{port}", ("::1", port)))
            await until(shown, {"far": ("serving", ""), "near": ("serving", "")})
            await until(scraped, {"far": 0, "near": 0})
            await until(known, 64)


@asynccontextmanager
async def routing_over(**servers: ServerProcess) -> AsyncIterator[tuple[AsyncRouter, str | None]]:
    """A router in this process that is patient, but looks at events often; and where it is scraped."""
    from radix_cache_service.router.config import RouterConfig
    from radix_cache_service.router.server import RouterServer

    nodes = tuple(f"{name}={server.address}" for name, server in servers.items())
    config = RouterConfig(listen=("127.0.0.1:0",), nodes=nodes, heartbeat_s=20, metrics_listen="127.0.0.1:0")
    server = RouterServer(config)
    server.servicer.routing.fleet._link.heartbeat_s = 0.5
    await server.start()
    async with AsyncRouter(server.addresses[0], timeout_s=SOON_S) as router:
        yield router, server.metrics_address
    await server.stop()


async def until(look: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Look again and again until it is so."""
    async with asyncio.timeout(2 * SOON_S):
        while await look() != wanted:  # noqa: ASYNC110 - of what a router finds out, nobody sets an event
            await asyncio.sleep(0.05)
