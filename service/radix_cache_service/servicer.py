"""The RPCs: each hands its message to `radix_cache_service.runner` and answers with what comes of it, or a status.

Handlers are coroutines on one event loop, and none awaits between two steps of one change: the loop is the only lock
that the tree needs, and a stream costs a task, not a thread. (A thread pool does half as many calls/s again at 16 in
flight; it pays for that with a thread for each open session, and with calls that wait for each other in the lock
instead.)

Nothing holds the loop for long: evictions and resets of very much give way.

A reply that is lost (the deadline passed on its way, the client is gone) can't be told from one that arrived: the
handler has returned by then, and its context says neither "cancelled" nor an error. So nothing is undone here. The
client named the lease, and can ask for it again or release it; a client that is gone lets it expire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.rpc.status_pb2 import Status
from grpc.aio import ServicerContext

import radix_cache
from radix_cache_service.config import ServerConfig
from radix_cache_service.convert import node_of, stats_of
from radix_cache_service.errors import LayoutMismatch, to_status
from radix_cache_service.metrics import CallMetrics
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc
from radix_cache_service.runner import Runner
from radix_cache_service.streams import OpenStreams

__all__ = ["Servicer"]

_DUMPED_AT_ONCE = 256
_MAX_DUMPED_NODES = 100_000
_MAX_DUMPED_SPAN = 1024  # tokens: with as many ids at block size 1, a piece has 2 MiB at most


class Servicer(pb_grpc.PrefixCacheServiceServicer):
    """Serves one cache."""

    def __init__(self, config: ServerConfig) -> None:
        self.metrics = CallMetrics()
        self.runner = Runner(config, self.metrics)
        self.cache = self.runner.cache
        self.streams = OpenStreams(config.max_streams)
        self._config = config
        self._started = time.monotonic()

    def drain(self) -> None:
        """End all open streams and all waiting; their clients find another server, or this one later."""
        self.streams.end()
        self.runner.line.close()

    # Every unary call goes through here.

    async def _answer(self, method: str, context: ServicerContext[Any, Any], make: Callable[[], Awaitable[Any]]) -> Any:
        """Return what ``make`` returns, or abort with the status of its error."""
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        try:
            remaining = context.time_remaining()
            if remaining is not None and remaining <= 0:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                await context.abort(code, "the call's deadline had passed when it arrived")
            try:
                return await make()
            except Exception as error:  # noqa: BLE001 - the boundary: nothing but a status leaves here
                status = to_status(error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # by the caller; the context doesn't tell
                    code = grpc.StatusCode.CANCELLED
                    raise
                status = Status(code=grpc.StatusCode.ABORTED.value[0], message="cancelled by the server: try again")
            code = _code(status)
            await context.abort(code, status.message, (("grpc-status-details-bin", status.SerializeToString()),))
        finally:
            self.metrics.record(method, code.name, time.perf_counter() - started)
            self.runner.after_call()

    async def _verb(self, method: str, request: Any, context: ServicerContext[Any, Any]) -> Any:
        """Serve a verb that is one operation and does not wait."""

        async def run() -> Any:
            return self.runner.verb(request)

        return await self._answer(method, context, run)

    async def _patient_verb(self, method: str, request: Any, context: ServicerContext[Any, Any]) -> Any:
        """Serve a verb that waits for blocks if it is asked to."""
        if not request.wait:
            return await self._verb(method, request, context)
        run = partial(self.runner.verb_with_patience, request, context.time_remaining())
        return await self._answer(method, context, run)

    async def MatchPrefix(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._patient_verb("MatchPrefix", request, context)

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._patient_verb("Allocate", request, context)

    async def Insert(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._verb("Insert", request, context)

    async def Free(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._verb("Free", request, context)

    async def Release(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._verb("Release", request, context)

    async def Probe(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._verb("Probe", request, context)

    async def Renew(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        if request.lease_id:
            return await self._verb("Renew", request, context)

        async def run() -> Any:
            return self.runner.heartbeat(request.engine_id)

        return await self._answer("Renew", context, run)

    async def Evict(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._answer("Evict", context, partial(self.runner.evict, request))

    async def Reset(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._answer("Reset", context, partial(self.runner.reset, request))

    # Many operations at once.

    async def Batch(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        async def run() -> Any:
            return self.runner.batch(request)

        return await self._answer("Batch", context, run)

    async def Session(  # type: ignore[override]  # noqa: N802 - the stubs know of generators only
        self, request_iterator: Any, context: Any
    ) -> None:
        """Answer batches in order until the client ends the stream, or the server drains."""
        async with self.streams.opened(context):
            while (request := await self.streams.read(context)) is not grpc.aio.EOF:
                await context.write(self._answer_batch(request.batch))

    def _answer_batch(self, batch: pb.BatchRequest) -> pb.SessionResponse:
        """Run a batch of a stream; one that is refused as a whole does not end it."""
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        try:
            return pb.SessionResponse(batch=self.runner.batch(batch))
        except Exception as error:  # noqa: BLE001 - the boundary: nothing but a status leaves here
            status = to_status(error)
            code = _code(status)
            return pb.SessionResponse(error=status)
        finally:
            self.metrics.record("Session", code.name, time.perf_counter() - started)
            self.runner.after_call()

    # What the server says of itself.

    async def GetStats(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        async def run() -> Any:
            said = stats_of(self.cache.stats())
            said.state.CopyFrom(self.runner.state())
            said.uptime_s = time.monotonic() - self._started
            said.num_calls.update(self.metrics.num_calls)
            for method, latency in self.metrics.latencies().items():
                said.latencies[method].CopyFrom(latency)
            return said

        return await self._answer("GetStats", context, run)

    async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        async def run() -> Any:
            self._check_layout(request)
            said = self.cache.describe()
            return pb.DescribeResponse(
                state=self.runner.state(),
                block_size=said.block_size,
                num_blocks=said.num_blocks,
                num_reserved_blocks=said.num_reserved_blocks,
                policy=said.policy,
                lease_ttl_s=said.lease_ttl_s,
                growth_share=said.growth_share,
                max_tokens=self._config.max_tokens,
                max_operations=self._config.max_operations,
                layout_fingerprint=self._config.layout_fingerprint,
                version=radix_cache.__version__,
            )

        return await self._answer("Describe", context, run)

    def _check_layout(self, request: pb.DescribeRequest) -> None:
        for name in ("block_size", "layout_fingerprint"):
            wanted, here = getattr(request, name), getattr(self._config, name)
            if request.HasField(name) and wanted != here:
                raise LayoutMismatch(f"{name} is {here!r} here, the client was built for {wanted!r}")

    async def DumpTree(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send the rows in pieces. They are of one moment."""

        async def run() -> Any:
            return self.cache.dump(
                tuple(request.namespace),
                min(request.max_nodes or _MAX_DUMPED_NODES, _MAX_DUMPED_NODES),
                min(request.max_span_tokens, _MAX_DUMPED_SPAN),
            )

        rows = await self._answer("DumpTree", context, run)
        for start in range(0, len(rows), _DUMPED_AT_ONCE):
            yield pb.DumpTreeResponse(nodes=map(node_of, rows[start : start + _DUMPED_AT_ONCE]))

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Not served yet."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server publishes no events")
        yield  # a generator, like the other streams

    async def expire(self, interval_s: float) -> None:
        """Let leases run out although no call comes; never returns."""
        while True:
            await asyncio.sleep(interval_s)
            self.cache.stats()
            self.runner.line.stir()


def _code(status: Status) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == status.code)
