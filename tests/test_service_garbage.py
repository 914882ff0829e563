"""A call leaves no circle of objects: `settle_gc` may look away from one at any time, and then nobody frees it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from radix_cache import DeadlineExceeded, PoolExhausted, UnknownLease
from radix_cache_service import Client
from radix_cache_service.config import ServerConfig
from radix_cache_service.server import Server


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What nobody refers to goes at once, and circles stay until they are asked for."""
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()  # the server froze all that there was
    gc.enable()


def refused_match(client: Client) -> None:
    with pytest.raises(PoolExhausted):
        client.match_prefix([1], num_tokens=100)


def refused_wait(client: Client) -> None:
    with pytest.raises((PoolExhausted, DeadlineExceeded)):  # the latter where the machine is busy
        client.match_prefix([1], num_tokens=4, wait_s=0.5)


def refused_release(client: Client) -> None:
    with pytest.raises(UnknownLease):
        client.release("nobody's")


def batch_with_errors(client: Client) -> None:
    with client.batch() as batch:
        batch.match_prefix([1], num_tokens=100)
        batch.release("nobody's")


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("call", [refused_match, refused_wait, refused_release, batch_with_errors])
def test_a_refused_call_leaves_no_frame_of_the_server_behind(call: Callable[[Client], None]) -> None:
    def calls(address: str) -> None:
        with Client(address) as client:
            client.match_prefix([9], num_tokens=6)  # three of four blocks
            for _ in range(5):
                call(client)

    async def serve() -> None:
        server = Server(ServerConfig(listen=("127.0.0.1:0",), num_blocks=4, block_size=2))
        await server.start()
        try:
            await asyncio.to_thread(calls, server.addresses[0])
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            frames = [found for found in gc.garbage if isinstance(found, FrameType)]
        finally:
            await server.stop()
        left = {frame.f_code.co_qualname for frame in frames if "servicer" in frame.f_code.co_filename}
        assert left == set()

    asyncio.run(serve())
