"""What is asyncio's own: cancelled calls, tasks side by side, and ends that leave nothing behind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from client_help import assert_all_returned, new_engine
from helpers import Clock
from service_process import ServerProcess

from radix_cache.errors import (
    BatchNotRun,
    DeadlineExceeded,
    InvalidArgument,
    PoolExhausted,
    ServiceUnavailable,
    StaleLease,
)
from radix_cache_service import AsyncClient, LayoutMismatch


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for all tests here."""
    with ServerProcess(num_blocks=512, block_size=2, lease_ttl_s=600) as process:
        yield process


@pytest.fixture
def run(server: ServerProcess) -> Callable[..., None]:
    """A function that runs a test's coroutine with a client, then looks whether all was given back."""

    def run_one(test: Callable[[AsyncClient], Awaitable[None]], **settings: Any) -> None:
        asyncio.run(with_client(server, test, **settings))
        assert_all_returned(server.address)

    return run_one


async def with_client(server: ServerProcess, test: Callable[[AsyncClient], Awaitable[None]], **settings: Any) -> None:
    async with AsyncClient(server.address, engine_id=new_engine(), **settings) as client:
        await test(client)
    async with asyncio.timeout(60):
        while asyncio.all_tasks() != {asyncio.current_task()}:  # noqa: ASYNC110 - those that are cancelled take a moment
            await asyncio.sleep(0)


def test_the_verbs_and_a_batch(run: Callable[..., None]) -> None:
    async def test(client: AsyncClient) -> None:
        with pytest.raises(ServiceUnavailable, match="block size"):
            print(client.block_size)
        lease = await client.match_prefix([1, 2, 3], num_tokens=4)
        assert client.block_size == 2
        async with client.batch() as batch:
            inserted = batch.insert(lease, [1, 2])
            forked = batch.match_prefix([], parent=lease)
        assert len(inserted.result().block_ids) == 1
        assert forked.result().num_cached_tokens == 2
        await client.free(lease, list(lease.block_table)[1:])
        await client.renew(lease)
        await client.release(forked.result())
        assert await client.probe([1, 2]) == 2
        assert [node.depth for node in await client.dump()] == [0, 1]
        assert (await client.stats()).num_leases == 1
        assert (await client.describe()).epoch == client.epoch
        await client.heartbeat()
        await client.release(lease)
        assert await client.evict(5) == 1
        await client.reset()

    run(test)


def test_tasks_side_by_side(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, number: int) -> None:
        lease = await client.match_prefix([number], num_tokens=2)
        for _ in range(10):
            async with client.batch() as batch:
                batch.allocate(lease, num_blocks=1)
        assert len(lease.block_table) == 11
        await client.release(lease)

    async def test(client: AsyncClient) -> None:
        await asyncio.gather(*(work(client, number) for number in range(20)))

    run(test)


def test_a_cancelled_match_leaves_nothing(run: Callable[..., None], server: ServerProcess) -> None:
    async def test(client: AsyncClient) -> None:
        kept = await client.match_prefix([1], num_tokens=2)
        cancelled = 0
        clock = client._books.clock = Clock(1000.0)
        for number in range(60):
            task = asyncio.create_task(client.match_prefix([1], num_tokens=2))
            await asyncio.sleep(0.0001 * (number % 20))
            task.cancel()
            cancelled += isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert cancelled
        for _ in range(3000):
            await client.probe([])
            if not list(client._books._losses.orphans):
                break
            clock.advance(client.timeout_s)
            await asyncio.sleep(0.02)
        assert (await client.stats()).num_leases == 61 - cancelled
        assert kept.lease_id in client._books._tables.leases

    run(test)


def test_a_cancelled_allocation_leaves_the_table_in_doubt(run: Callable[..., None]) -> None:
    async def test(client: AsyncClient) -> None:
        lease = await client.match_prefix([1], num_blocks=512)
        waiting = asyncio.create_task(client.allocate(lease, num_blocks=1, wait_s=30))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(StaleLease):
            await client.allocate(lease, num_blocks=1)

    run(test)


def test_a_match_waits_for_blocks(run: Callable[..., None]) -> None:
    async def test(client: AsyncClient) -> None:
        lease = await client.match_prefix([1], num_blocks=512)
        with pytest.raises(PoolExhausted):
            await client.match_prefix([2], num_blocks=9)
        waiting = asyncio.create_task(client.match_prefix([2], num_blocks=9, wait_s=30))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await client.release(lease)
        assert len((await waiting).block_table) == 9

    run(test)


def test_numbers_of_the_callers(run: Callable[..., None]) -> None:
    async def test(client: AsyncClient) -> None:
        lease = await client.match_prefix([1], num_tokens=2)
        for _ in range(2):
            async with client.batch(seq=1) as batch:
                batch.allocate(lease, num_blocks=1)
        assert len(lease.block_table) == 2
        with pytest.raises(InvalidArgument):
            async with client.batch(seq=0) as batch:
                batch.allocate(lease, num_blocks=1)
        with pytest.raises(KeyError):  # noqa: PT012 - the block is what is tested
            async with client.batch() as batch:
                never = batch.allocate(lease, num_blocks=1)
                raise KeyError
        with pytest.raises(BatchNotRun):
            never.result()

    run(test)


def test_a_closed_client_says_so(server: ServerProcess) -> None:
    async def test() -> None:
        client = AsyncClient(server.address)
        await client.stats()
        await client.close()
        await client.close()
        with pytest.raises(ServiceUnavailable, match="closed"):
            await client.stats()
        await AsyncClient(server.address).close()

    asyncio.run(test())


def test_a_server_of_another_layout_is_refused(server: ServerProcess) -> None:
    async def test() -> None:
        async with AsyncClient(server.address, block_size=16) as client:
            with pytest.raises(LayoutMismatch):
                await client.match_prefix([1])

    asyncio.run(test())


def test_a_server_that_never_answers_costs_the_timeout() -> None:
    async def test(address: str) -> None:
        async with AsyncClient(address, timeout_s=0.2) as client:
            with pytest.raises(DeadlineExceeded):
                await client.probe([1])

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(test(f"127.0.0.1:{silent.getsockname()[1]}"))
