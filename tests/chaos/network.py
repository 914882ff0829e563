"""A proxy before the server, whose connections can be cut, and whose replies can be held back and then lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any


class Proxy(threading.Thread):
    """An event loop of its own in a thread. port: where it listens. server_port: where it goes."""

    def __init__(self, server_port: int) -> None:
        super().__init__(name="proxy", daemon=True)
        self._server_port = server_port
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._hearing: asyncio.Event | None = None
        self._is_listening = threading.Event()
        self.port = 0

    def run(self) -> None:
        """Serve until stopped."""
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        self._loop.run_until_complete(_end_all())
        self._loop.close()

    def start(self) -> None:
        """Start, and wait until it listens."""
        super().start()
        self._is_listening.wait()

    async def _listen(self) -> None:
        self._hearing = asyncio.Event()
        self._hearing.set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_listening.set()

    async def _connected(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        try:
            far_in, far_out = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            near_out.transport.abort()
            return
        self._writers |= {near_out, far_out}
        assert self._hearing is not None
        await asyncio.gather(_pump(near_in, far_out, None), _pump(far_in, near_out, self._hearing.wait))
        for writer in (near_out, far_out):
            self._writers.discard(writer)
            writer.transport.abort()

    def cut(self) -> None:
        """Break all connections of now; what was held back is lost."""
        self._call(self._cut)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def deafen(self) -> None:
        """Hold back what the server says, until the connections are cut or `hear` is called."""
        assert self._hearing is not None
        self._call(self._hearing.clear)

    def hear(self) -> None:
        """Let replies through again."""
        assert self._hearing is not None
        self._call(self._hearing.set)

    def stop(self) -> None:
        """Break everything and end."""
        self._call(self._cut)
        self._call(self._loop.stop)
        self.join()

    def _call(self, function: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(function)


async def _pump(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, allowed: Callable[[], Awaitable[Any]] | None
) -> None:
    """Copy until one side ends, then end the other."""
    try:
        while data := await source.read(65536):
            if allowed is not None:
                await allowed()
            target.write(data)
            await target.drain()
    except OSError:
        pass
    target.transport.abort()


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
