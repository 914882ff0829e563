"""Nodes that come and go while those who asked for it go away: nobody is left behind whom no one looks at."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from grpc_health.v1 import health_pb2
from router_help import BLOCK_SIZE, NODE, SOON_S, prompt
from service_process import ServerProcess, stub_to

if find_spec("dynamo") is None:
    pytest.skip("ai-dynamo-runtime is not installed: pip install 'radix-cache[router]'", allow_module_level=True)

from radix_cache.errors import InvalidArgument
from radix_cache_service.pb import prefix_cache_pb2
from radix_cache_service.router.config import NodeName, RouterConfig
from radix_cache_service.router.fleet import Fleet
from radix_cache_service.router.flights import Flights
from radix_cache_service.router.node import Node
from radix_cache_service.router.selection import Prompt, Selection, Worker
from radix_cache_service.router.server import SERVICE_NAME, RouterServer

NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(**NODE) as started:
        yield started


def new_fleet() -> Fleet:
    return Fleet(RouterConfig(heartbeat_s=20), Flights(600, 100, lambda: 0.0), lambda: None)


def workers_of(fleet: Fleet) -> set[int]:
    """The workers that the selection listens to."""
    assert fleet.selection is not None
    return {each["worker_id"] for each in fleet.selection._service.list_workers()}


async def give_up_after(num_steps: int, doing: asyncio.Future[None]) -> None:
    """Cancel it when others have run so many times."""
    for _ in range(num_steps):
        await asyncio.sleep(0)
    doing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await doing


async def joined(fleet: Fleet, name: NodeName) -> None:
    """Add a node, and wait until it serves."""
    node = fleet.add(name)
    async with asyncio.timeout(SOON_S):
        await node.was_asked.wait()
    assert fleet.node_of(node.worker or 0) is node, node.reason


def test_a_node_that_is_let_go_of_while_it_joins_is_listened_to_no_more(server: ServerProcess) -> None:
    async def play() -> None:
        fleet = new_fleet()
        await joined(fleet, NodeName("a", server.address))
        assert fleet.selection is not None
        before = workers_of(fleet)
        for at in range(200):  # the service goes on with what is cancelled, and now and then ends it late
            number = 1000 + at
            adding = asyncio.shield(fleet._in_turn(fleet.selection.add(Worker(number, NOWHERE, NOWHERE, 0))))
            await give_up_after(1 + at % 6, adding)
            fleet._leave(number)
        await asyncio.gather(*fleet._doing)
        assert workers_of(fleet) == before
        await fleet.close()

    asyncio.run(play())


@pytest.mark.parametrize("is_held", [False, True], ids=["at once", "after others"])
def test_a_removal_that_nobody_waits_for_any_more_is_done_all_the_same(server: ServerProcess, is_held: bool) -> None:
    name = NodeName("a", server.address)

    async def play(num_steps: int) -> None:
        fleet = new_fleet()
        await joined(fleet, name)
        async with contextlib.AsyncExitStack() as stack:
            if is_held:
                await stack.enter_async_context(fleet.turn)
            await give_up_after(num_steps, asyncio.create_task(fleet.remove("a")))
        with contextlib.suppress(InvalidArgument):
            await fleet.remove("a")  # where it was given up before it began
        async with asyncio.timeout(SOON_S):
            while fleet.serving or workers_of(fleet):  # noqa: ASYNC110 - nobody waits for it any more
                await asyncio.sleep(0.01)
        await joined(fleet, name)
        await fleet.close()

    for num_steps in range(6):
        asyncio.run(play(num_steps))


def test_a_node_is_sent_nothing_from_the_moment_that_it_is_removed(server: ServerProcess) -> None:
    async def play() -> None:
        fleet = new_fleet()
        await joined(fleet, NodeName("a", server.address))
        removing = asyncio.create_task(fleet.remove("a"))
        await asyncio.sleep(0)  # it begins
        assert not fleet.by_name
        assert not fleet.serving, "another node may say by now how long blocks are"
        await removing
        await fleet.close()

    asyncio.run(play())


def test_of_two_that_join_at_once_with_their_events_at_one_place_one_is_refused(server: ServerProcess) -> None:
    with stub_to(server.address) as stub:
        said = stub.Describe(prefix_cache_pb2.DescribeRequest())

    async def play() -> None:
        fleet = new_fleet()
        names = NodeName("a", server.address), NodeName("b", server.address)
        nodes = [Node(name, fleet._link, fleet._join, fleet._pause, fleet._leave) for name in names]
        async with fleet.turn:
            joining = [asyncio.create_task(fleet._join(node, said)) for node in nodes]
            async with asyncio.timeout(SOON_S):
                while None in {node.worker for node in nodes}:  # noqa: ASYNC110 - until both wait for their turn
                    await asyncio.sleep(0)
        first, second = await asyncio.gather(*joining, return_exceptions=True)
        assert first is None
        assert isinstance(second, InvalidArgument)
        assert list(fleet.serving.values()) == nodes[:1]
        for node in nodes:
            await node.close()
        await fleet.close()

    asyncio.run(play())


def test_where_the_last_worker_has_just_gone_nobody_has_anything() -> None:
    async def play() -> None:
        selection = Selection(BLOCK_SIZE, 1, 0, 1)
        wanted = Prompt(array("I", prompt(1)), None)
        await selection.add(Worker(1, NOWHERE, NOWHERE, 0))
        assert await selection.scores(wanted) == {1: 0}
        await selection.remove(1)
        assert await selection.scores(wanted) == {}
        assert await selection.choose(wanted, [1], "b") is None
        await selection.close()

    asyncio.run(play())


def test_readiness_is_what_holds_though_to_say_it_takes_a_while(server: ServerProcess) -> None:
    async def play() -> None:
        router = RouterServer(RouterConfig(listen=("127.0.0.1:0",), nodes=(f"a={server.address}",), heartbeat_s=20))
        await router.start()
        health, fleet = router._health, router.servicer.routing.fleet
        assert fleet.serving
        async with health._server_watchers[""]:  # who watches is just being told
            router._changed()
            await asyncio.sleep(0)  # it begins to say that a node serves
            await fleet.remove("a")
        await asyncio.gather(*(task for task in router._tasks if task.get_coro().__name__ == "_say_health"))
        assert health._server_status[SERVICE_NAME] == health_pb2.HealthCheckResponse.NOT_SERVING
        await router.stop()

    asyncio.run(play())


def test_the_end_waits_for_removals_that_nobody_waits_for(server: ServerProcess) -> None:
    async def play() -> None:
        fleet = new_fleet()
        await joined(fleet, NodeName("a", server.address))
        async with fleet.turn:
            await give_up_after(3, asyncio.create_task(fleet.remove("a")))
            closing = asyncio.create_task(fleet.close())
            await asyncio.sleep(0.05)
            assert not closing.done()
        await closing
        assert not fleet.serving

    asyncio.run(play())


def test_the_end_does_not_wait_for_what_is_just_done() -> None:
    async def play() -> None:
        fleet = new_fleet()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        fleet._doing.add(done)  # type: ignore[arg-type] # as a task is that has ended in this turn of the loop
        done.add_done_callback(fleet._doing.discard)  # type: ignore[arg-type] # see above
        await fleet.close()
        assert not fleet._doing

    asyncio.run(play())
