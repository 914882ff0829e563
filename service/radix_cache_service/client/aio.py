"""The client for asyncio: `radix_cache_service.Client` with ``await`` before each verb, and nothing else new."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import grpc

from radix_cache.errors import RadixCacheError, ServiceUnavailable, UnknownLease
from radix_cache.leases import Lease
from radix_cache.operations import Operation, Outcome
from radix_cache.stats import Description, LeaseInfo, NamespaceStats, TreeNode
from radix_cache_service.calls import ServerStats, read_leases, read_namespace_stats, read_nodes, read_stats
from radix_cache_service.client.batches import AsyncBatch
from radix_cache_service.client.connection import RECONNECT_S
from radix_cache_service.client.exchange import TRANSIENT, Call, Exchange
from radix_cache_service.client.remote import Remote
from radix_cache_service.client.verbs import AsyncVerbs
from radix_cache_service.client.watches import Assembly, WatchedEvents, silence_s, too_quiet, watch_request
from radix_cache_service.errors import from_call_error
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc

__all__ = ["AsyncClient"]

_log = logging.getLogger(__name__)


class AsyncClient(Remote, AsyncVerbs):
    """A remote `radix_cache.PrefixCache` for one event loop, the one of its first call.

    ``async with client.batch() as step:`` sends a batch; the verbs of ``step`` are plain calls. A lease is for one task
    at a time. See `Remote` for the arguments.
    """

    def _reset(self) -> None:
        super()._reset()
        self._batch_lock = asyncio.Lock()  # numbers must arrive in order
        self._heart: asyncio.Task[None] | None = None
        self._releasing: set[asyncio.Task[None]] = set()

    # Calls.

    async def _do(self, operation: Operation, lease: object = None, wait_s: float | None = None) -> Any:
        await self._prepare()
        exchange = Exchange.of_verb(self._books, operation, lease, self.timeout_s, wait_s)
        try:
            with exchange:
                return exchange.value(await self._send(exchange))
        except UnknownLease as error:
            if not exchange.is_success(error):
                raise

    async def _prepare(self) -> None:
        """Know the server, and begin to keep the engine alive: before each call."""
        self._check_open()
        if self._books.description is None:
            await self.describe()
        if self._heart is None and self._interval_s is not None:
            woken = asyncio.Event()
            self._books.wake = woken.set
            beating = _beat_on(weakref.ref(self), woken, self._until_beat_s)
            self._heart = asyncio.create_task(beating, name="radix-cache heartbeat")

    async def _send(self, call: Call) -> Any:
        """Return the answer, of a later try if need be; raise the library's errors."""
        self._check_size(call.request)
        self._release_orphans()
        answer = await self._try(call)
        if call.method != "Describe" and self._is_news(call, answer.state):
            await self.describe()
        return answer

    async def _try(self, call: Call) -> Any:
        while True:
            try:
                return await self._send_once(call)
            except TRANSIENT as error:
                self._check_open()
                pause_s = call.repeat_after(error)
            await asyncio.sleep(pause_s)

    async def _send_once(self, call: Call) -> Any:
        try:
            method = getattr(self._connected(), call.method)
            return await method(call.request, timeout=call.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    def _connected(self) -> Any:
        """Return the stub, on a channel that is opened now if there is none."""
        return self._open(grpc.aio, pb_grpc.PrefixCacheServiceStub)

    # Many at once.

    def batch(self, seq: int | None = None, strict: bool = False) -> AsyncBatch:
        """Return an asynchronous context manager whose verbs go to the server as one message when it ends.

        As `radix_cache_service.Client.batch`.
        """
        self._check_seq(seq)
        return AsyncBatch(partial(self._books.check, seq=seq), partial(self._run, seq=seq, strict=strict), seq)

    async def _run(
        self, operations: Sequence[Operation], given: dict[str, Lease], seq: int | None, strict: bool
    ) -> list[Outcome]:
        await self._prepare()
        async with self._batch_lock:
            with self._batch_exchange(operations, given, seq, strict) as exchange:
                return exchange.answered(await self._send(exchange))

    # What the server says of itself.

    @property
    def block_size(self) -> int:
        """Tokens in a block, as soon as any call was answered; before, ``(await client.describe()).block_size``."""
        if self._books.description is None:
            raise ServiceUnavailable(f"{self.target} was not asked for its block size yet")
        return self._books.description.block_size

    async def describe(self) -> Description:
        """Ask the server what it was started with. Raises `LayoutMismatch` if that is not what this client wants."""
        self._check_open()
        return self._described(await self._send(self._ask("Describe", self._wanted)))

    async def stats(self) -> ServerStats:
        """Ask for blocks by state, leases and counters, and how the server does."""
        await self._prepare()
        return read_stats(await self._send(self._ask("GetStats", pb.GetStatsRequest())))

    async def namespace_stats(self, namespace: Iterable[str] = (), max_namespaces: int = 1000) -> list[NamespaceStats]:
        """Return what each namespace that begins with ``namespace`` has: `radix_cache.PrefixCache.namespace_stats`."""
        request = self._ask_for_namespaces(namespace, max_namespaces)
        return read_namespace_stats(await self._send(request))

    async def dump(
        self, namespace: Iterable[str] = (), max_nodes: int = 1000, max_span_tokens: int = 16
    ) -> list[TreeNode]:
        """Return up to ``max_nodes`` rows of the tree, parents first: `radix_cache.PrefixCache.dump`."""
        call = self._ask_for_tree(namespace, max_nodes, max_span_tokens)
        await self._prepare()
        try:
            parts = self._connected().DumpTree(call.request, timeout=call.timeout_s, metadata=self._metadata)
            return [node async for part in parts for node in read_nodes(part)][:max_nodes]
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    async def leases(self, engine_id: str | None = None) -> list[LeaseInfo]:
        """Return all leases of the server, or those of one engine: `radix_cache.PrefixCache.leases`."""
        call = self._ask_for_leases(engine_id)
        await self._prepare()
        try:
            parts = self._connected().ListLeases(call.request, timeout=call.timeout_s, metadata=self._metadata)
            return [info async for part in parts for info in read_leases(part)]
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    async def release_engine(self, engine_id: str) -> int:
        """End all leases of an engine that is dead: `radix_cache.PrefixCache.release_engine`."""
        call = self._ask_to_release(engine_id)
        await self._prepare()
        answer = await self._send(call)
        num_released: int = answer.num_released_leases
        return num_released

    async def watch_events(
        self, after: WatchedEvents | None = None, snapshot: bool = True
    ) -> AsyncGenerator[WatchedEvents]:
        """Yield the events of the server's cache, a batch for each call that changes any, and a heartbeat each second.

        It begins with all that is cached; without ``snapshot``, with what comes. ``after``: with what came behind the
        last batch that was seen, or, if that is no longer there or the server was started anew, with all again
        (`WatchedEvents.is_reset`). Raises `LimitExceeded` where the caller was too slow, `ServiceUnavailable` and
        `DeadlineExceeded` where nothing more is heard; each time, ``after`` the last batch goes on from there.
        """
        request = watch_request(after, snapshot)
        await self._prepare()
        call = self._connected().WatchEvents(request, metadata=self._metadata)
        assembly, limit_s = Assembly(), silence_s(self.timeout_s)
        try:
            while True:
                async with asyncio.timeout(limit_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                batch = assembly.read(message)
                if batch is not None:
                    yield batch
        except TimeoutError:
            raise too_quiet(limit_s) from None
        except grpc.RpcError as error:
            raise from_call_error(error) from None
        finally:
            call.cancel()

    # Life and death.

    async def heartbeat(self, engine_id: str | None = None) -> None:
        """Renew all leases of an engine, this one by default. Done in the background when no call has come for long."""
        self._check_open()
        call = self._heartbeat(engine_id)
        await self._send(call)
        self._beaten(call)

    async def _beat(self) -> float:
        """Say that the engine lives if nothing else has; return seconds until the next look."""
        try:
            if self._is_idle:
                await self.heartbeat()
            self._release_orphans()
        except RadixCacheError as error:
            _log.debug("no heartbeat to %s: %s", self.target, error)
        return self._until_beat_s

    def _release_orphans(self) -> None:
        """Send the releases that are due, and don't wait for the answer."""
        lease_ids = self._books.due_orphans()
        if lease_ids:
            task = asyncio.create_task(self._release(lease_ids))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    async def _release(self, lease_ids: list[str]) -> None:
        call, answer = self._releases(lease_ids), None
        try:
            with contextlib.suppress(RadixCacheError):
                answer = await self._send_once(call)
        finally:
            self._settle(lease_ids, call, answer)

    async def close(self) -> None:
        """Give back this client's leases, less those that were promised a time of their own, and hang up.

        If the server can't be reached, they run out there. A second close does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        tasks = [task for task in (self._heart, *self._releasing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._stub is None:
            return
        try:
            for lease_ids in self._to_give_back():
                await self._give_back(self._stub, self._releases(lease_ids))
        except grpc.RpcError as error:
            _log.info("leases were left to run out: %s", from_call_error(error))
        finally:
            await self._channel.close()

    async def _give_back(self, stub: Any, call: Call) -> None:
        """Release at the end; where there is no connection, to a server that was just restarted, with a new one."""
        try:
            await stub.Batch(call.request, timeout=call.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if not isinstance(from_call_error(error), ServiceUnavailable):
                raise
            await stub.Batch(call.request, timeout=RECONNECT_S, metadata=self._metadata, wait_for_ready=True)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _beat_on(ref: weakref.ref[AsyncClient], woken: asyncio.Event, wait_s: float) -> None:
    """Beat for a client until that is closed or forgotten."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await woken.wait()
        woken.clear()
        client = ref()
        if client is None:
            return
        wait_s = await client._beat()
        del client
