"""Requests whose caller gave up, went away or can't reach the router: none is load that nobody can end."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest
from client_help import Proxy, wait_until
from router_help import NODE, SOON_S, prompt
from service_process import RouterProcess, ServerProcess
from test_client_life import in_a_fork

from radix_cache.errors import DeadlineExceeded, InvalidArgument, ServiceUnavailable
from radix_cache_service import AsyncRouter, Router
from radix_cache_service.client.router import AsyncRouted

if find_spec("dynamo") is None:
    pytest.skip("ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'", allow_module_level=True)

from radix_cache_service.router.config import RouterConfig
from radix_cache_service.router.routing import Routing
from radix_cache_service.router.server import RouterServer


@pytest.fixture(scope="module")
def node() -> Iterator[ServerProcess]:
    """One server for all."""
    with ServerProcess(**NODE) as server:
        yield server


@pytest.fixture
def process(node: ServerProcess) -> Iterator[RouterProcess]:
    """A router of it."""
    router = RouterProcess(node=f"a={node.address}")
    yield router
    router.stop()


def load(router: Router) -> tuple[int, int]:
    """Requests and tokens that the node has yet to do."""
    (info,) = router.nodes()
    return info.num_requests, info.num_pending_tokens


# Calls that wait for their turn.


@asynccontextmanager
async def held_up(node: ServerProcess) -> AsyncIterator[tuple[Routing, AsyncRouter]]:
    """A router in this process that chooses nobody while the block lasts, and its client. Then it chooses, and nothing
    of that is load.
    """
    server = RouterServer(RouterConfig(listen=("127.0.0.1:0",), nodes=(f"a={node.address}",), heartbeat_s=20))
    await server.start()
    routing = server.servicer.routing
    async with AsyncRouter(server.addresses[0], timeout_s=SOON_S) as router:
        async with routing.fleet.turn:
            yield routing, router
        async with routing.fleet.turn:  # after all who waited for it
            assert {routing.flights.num_at(worker) for worker in routing.fleet.serving} == {0}
            assert set(routing.pending_tokens().values()) == {0}
    await server.stop()


async def until(holds: Callable[[], object]) -> None:
    """Let others run until it holds."""
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110 - of what a server does, nobody sets an event
            await asyncio.sleep(0.01)


def test_a_call_whose_time_is_up_before_there_is_a_node_leaves_no_load(node: ServerProcess) -> None:
    async def play() -> None:
        async with held_up(node) as (routing, router):
            router.timeout_s = 0.2
            with pytest.raises(DeadlineExceeded):
                await router.route(prompt(1), request_id="r")
            await until(lambda: routing.flights.get("r") is None)

    asyncio.run(play())


def test_a_call_that_is_cancelled_before_there_is_a_node_leaves_no_load(node: ServerProcess) -> None:
    async def play() -> None:
        async with held_up(node) as (routing, router):
            call = asyncio.create_task(router.route(prompt(1), request_id="r"))
            await until(lambda: routing.flights.get("r"))
            call.cancel()
            await until(lambda: routing.flights.get("r") is None)

    asyncio.run(play())


def test_a_request_that_is_finished_before_there_is_a_node_is_no_load(node: ServerProcess) -> None:
    async def play() -> None:
        async with held_up(node) as (routing, router):
            call = asyncio.create_task(router.route(prompt(1), request_id="r"))
            await until(lambda: routing.flights.get("r"))
            await router.finish("r")
            assert routing.flights.get("r") is None
            routing.fleet.turn.release()
            with pytest.raises(ServiceUnavailable, match="was finished before a node was chosen"):
                await call
            await routing.fleet.turn.acquire()

    asyncio.run(play())


def test_of_two_calls_for_one_request_one_may_be_cancelled(node: ServerProcess) -> None:
    async def play() -> None:
        async with held_up(node) as (routing, router):
            calls = [asyncio.create_task(router.route(prompt(1), request_id="r")) for _ in range(2)]
            await until(lambda: (flight := routing.flights.get("r")) and flight.num_waiting == 2)
            calls[0].cancel()
            await until(lambda: (flight := routing.flights.get("r")) and flight.num_waiting == 1)
            routing.fleet.turn.release()
            routed = await calls[1]
            assert [(info.node, info.num_requests) for info in await router.nodes()] == [("a", 1)]
            await routed.finish()
            await routing.fleet.turn.acquire()

    asyncio.run(play())


# Answers that are lost.


def test_what_is_routed_and_interrupted_is_finished_by_its_client(process: RouterProcess) -> None:
    with Proxy(process.address) as proxy, Router(proxy.address, timeout_s=60) as router:
        router.nodes()
        proxy.is_deaf.set()
        main = threading.get_ident()

        def interrupt() -> None:
            wait_until(lambda: load(other) == (1, 64), SOON_S)
            signal.pthread_kill(main, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        with Router(process.address) as other:
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                router.route(prompt(1))
            interrupting.join()
            wait_until(lambda: load(other) == (0, 0), SOON_S)


def test_what_is_routed_and_cancelled_is_finished_by_its_asyncio_client(process: RouterProcess) -> None:
    async def play(address: str) -> None:
        async with AsyncRouter(address, timeout_s=60) as router:
            await router.nodes()
            proxy.is_deaf.set()
            call = asyncio.create_task(router.route(prompt(1)))
            await until(lambda: load(other) == (1, 64))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: load(other) == (0, 0))

    with Proxy(process.address) as proxy, Router(process.address) as other:
        asyncio.run(play(proxy.address))


def test_many_threads_that_give_up_leave_nothing(process: RouterProcess) -> None:
    with Router(process.address, timeout_s=0.01) as hasty, Router(process.address) as other:
        hasty_ends: list[str] = []

        def ask() -> None:
            for _ in range(20):
                try:
                    other.finish(hasty.route(range(20_000)).request_id)
                    hasty_ends.append("answered")
                except DeadlineExceeded:
                    hasty_ends.append("gave up")

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(hasty_ends) == 160
        wait_until(lambda: load(other) == (0, 0), SOON_S)


# A router that is away.


def test_the_end_of_a_block_fails_over_no_router(process: RouterProcess, caplog: pytest.LogCaptureFixture) -> None:
    with Router(process.address) as router:
        with router.route(prompt(1)) as served, router.route(prompt(2)):
            process.stop()
        assert served.node == "a"
        with pytest.raises(ServiceUnavailable):
            served.finish()
    assert [(record.levelno, "its end was not told" in record.message) for record in caplog.records] == [
        (logging.WARNING, True)
    ] * 2


def test_an_error_in_a_block_is_not_replaced_by_that_of_its_end(process: RouterProcess) -> None:
    def fail() -> None:
        with router.route(prompt(1)):
            process.stop()
            raise ZeroDivisionError

    with Router(process.address) as router, pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert caught.value.__context__ is None


def test_the_end_of_an_asyncio_block_fails_over_no_router(process: RouterProcess) -> None:
    async def play() -> None:
        async with AsyncRouter(process.address) as router:
            async with await router.route(prompt(1)):
                await asyncio.to_thread(process.stop)
            with pytest.raises(ZeroDivisionError):
                async with AsyncRouted("a", "", 0, "r", (), router.finish):
                    raise ZeroDivisionError

    asyncio.run(play())


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_connection_of_its_own(process: RouterProcess) -> None:
    with Router(process.address) as router, router.route(prompt(1)):
        inherited = router._channel

        def work() -> Any:
            with router.route(prompt(2)) as routed:
                loads = load(router)
            is_own = router._channel is not inherited
            router.close()
            return routed.node, loads, is_own

        assert in_a_fork(work) == ("a", (2, 128), True)
        assert load(router) == (1, 64)


# Names and arguments.


def test_the_name_of_one_request_is_not_that_of_another(process: RouterProcess) -> None:
    with Router(process.address) as router:
        first = router.route(prompt(1), ("t",), request_id="0")
        for tokens, namespace in ((prompt(2), ("t",)), (prompt(1), ()), (prompt(1)[:-1], ("t",))):
            with pytest.raises(InvalidArgument, match="request_id is that of another prompt, which is not finished"):
                router.route(tokens, namespace, request_id="0")
        assert router.route(prompt(1), ("t",), request_id="0").node == "a"
        assert load(router) == (1, 64)
        first.finish()
        router.route(prompt(2), request_id="0").finish()
        assert load(router) == (0, 0)


def test_messages_of_the_client_have_the_length_that_was_said(process: RouterProcess) -> None:
    with Router(process.address, max_message_bytes=100) as router:
        with pytest.raises(InvalidArgument, match="a message has at most 100 bytes here, not 4"):
            router.route(range(1000))
        router.route(range(10), peek=True)
    with pytest.raises(InvalidArgument, match="max_message_bytes"):
        Router(process.address, max_message_bytes=0)
