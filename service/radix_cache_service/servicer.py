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
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from types import CoroutineType
from typing import Any

import grpc
from google.rpc.status_pb2 import Status
from grpc.aio import ServicerContext

import radix_cache
from radix_cache.errors import InvalidArgument, RadixCacheError
from radix_cache_service.config import ServerConfig
from radix_cache_service.convert import lease_info_of, namespace_stats_of, node_of, stats_of
from radix_cache_service.errors import LayoutMismatch, abort, code_of, to_status
from radix_cache_service.events.service import EventService
from radix_cache_service.events.watching import watch
from radix_cache_service.intake import MALFORMED
from radix_cache_service.pb import prefix_cache_pb2 as pb
from radix_cache_service.pb import prefix_cache_pb2_grpc as pb_grpc
from radix_cache_service.runner import Runner
from radix_cache_service.streams import OpenStreams
from radix_cache_service.telemetry.metrics import Call, CallMetrics

__all__ = ["Servicer"]

_UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED.value[0]
_log = logging.getLogger(__name__)

_DUMPED_AT_ONCE = 256
_LISTED_AT_ONCE = 256
_MAX_NAMESPACES = 10_000
_MAX_DUMPED_NODES = 100_000
_MAX_DUMPED_SPAN = 1024  # tokens: with as many ids at block size 1, a piece has 2 MiB at most


class Servicer(pb_grpc.PrefixCacheServiceServicer):
    """Serves one cache."""

    def __init__(self, config: ServerConfig) -> None:
        self.metrics = CallMetrics()
        self.runner = Runner(config, self.metrics)
        self.cache = self.runner.cache
        self.streams = OpenStreams(config.max_streams)
        self.events = EventService(config, self.cache)
        self._config = config
        self._started = time.monotonic()

    def drain(self) -> None:
        """End all open streams and all waiting; their clients find another server, or this one later."""
        self.streams.end()
        self.runner.line.close()

    # Every unary call goes through here.

    def _answer(self, method: str, context: ServicerContext[Any, Any], make: Callable[[], Any]) -> Awaitable[Any]:
        """Return what ``make`` returns, or the coroutine that it returns; or, with the status of its error set, None,
        which grpc does not send.
        """
        return self._answer_call(self.metrics.call(method, context, self.runner.after_call), context, make)

    async def _answer_call(self, call: Call, context: ServicerContext[Any, Any], make: Callable[[], Any]) -> Any:
        """Do the same, and note it in ``call``."""
        with call:
            remaining = context.time_remaining()
            if remaining is not None and remaining <= 0:
                call.code = "DEADLINE_EXCEEDED"
                text = "the call's deadline had passed when it arrived"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
            try:
                made = make()
                return await made if type(made) is CoroutineType else made
            except Exception as error:  # noqa: BLE001 - the boundary: nothing but a status leaves here
                status = to_status(error)
                error.__traceback__ = None  # its frames hold it
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # by the caller; the context doesn't tell
                    call.code = "CANCELLED"
                    raise
                status = Status(code=grpc.StatusCode.ABORTED.value[0], message="cancelled by the server: try again")
            code = code_of(status.code)
            call.code = code.name
            # Not `abort`: what that raises is kept by the call which its traceback keeps. Once `settle_gc` has looked
            # away from such a circle, nobody frees it.
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.set_code(code)
            context.set_details(status.message)
            return None

    def _verb(self, method: str, request: Any, context: ServicerContext[Any, Any]) -> Awaitable[Any]:
        """Serve a verb that is one operation and does not wait."""
        return self._answer(method, context, partial(self.runner.verb, request))

    def _patient_verb(self, method: str, request: Any, context: ServicerContext[Any, Any]) -> Awaitable[Any]:
        """Serve a verb that waits for blocks if it is asked to."""
        if not request.wait:
            return self._verb(method, request, context)
        call = self.metrics.call(method, context, self.runner.after_call)
        run = partial(self.runner.verb_with_patience, request, context.time_remaining(), call.waited)
        return self._answer_call(call, context, run)

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
        return await self._answer("Renew", context, partial(self.runner.heartbeat, request.engine_id))

    async def Evict(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._answer("Evict", context, partial(self.runner.evict, request))

    async def Reset(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._answer("Reset", context, partial(self.runner.reset, request))

    # Many operations at once.

    async def Batch(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        def run() -> Any:
            response = pb.BatchResponse()
            self.runner.batch(request, response)
            return response

        return await self._answer("Batch", context, run)

    async def Session(  # type: ignore[override]  # noqa: N802 - the stubs know of generators only
        self, request_iterator: Any, context: Any
    ) -> None:
        """Answer batches in order until the client ends the stream, or the server drains."""
        async with self.streams.opened(context):
            while (request := await self.streams.read(context)) is not grpc.aio.EOF:
                response = self._answer_batch(request, context)
                if self.runner.guard is not None and response.error.code == _UNAUTHENTICATED:
                    await abort(context, response.error)  # the next stream comes with another token
                try:
                    await context.write(response)
                except Exception as error:  # noqa: BLE001 - whatever gRPC makes of a client that has left
                    _log.debug("a session's client has left: %s", type(error).__name__)
                    return

    def _answer_batch(self, request: Any, context: ServicerContext[Any, Any]) -> pb.SessionResponse:
        """Run a batch of a stream; one that is refused as a whole does not end it."""
        with self.metrics.call("Session", context, self.runner.after_call) as call:
            try:
                if request is MALFORMED:
                    raise InvalidArgument("the bytes are no SessionRequest")
                response = pb.SessionResponse()
                self.runner.batch(request.batch, response.batch)
                return response
            except Exception as error:  # noqa: BLE001 - the boundary: nothing but a status leaves here
                status = to_status(error)
                call.code = code_of(status.code).name
                return pb.SessionResponse(error=status)

    # What the server says of itself.

    async def GetStats(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        def run() -> Any:
            self.runner.tick()
            said = stats_of(self.cache.stats())
            if request.max_namespaces:
                found = self.cache.namespace_stats(tuple(request.namespace))
                most = min(request.max_namespaces, _MAX_NAMESPACES)
                said.namespaces.extend(map(namespace_stats_of, found[:most]))
            said.state.CopyFrom(self.runner.state())
            said.uptime_s = time.monotonic() - self._started
            said.num_calls.update(self.metrics.num_calls)
            said.num_operations.update(self.metrics.num_operations())
            said.num_waiting_calls = len(self.runner.line)
            said.num_streams = len(self.streams)
            for method, latencies in self.metrics.latencies.items():
                said.latencies[method].CopyFrom(latencies.as_message())
            return said

        return await self._answer("GetStats", context, run)

    async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        def run() -> Any:
            self._check_layout(request)
            said = self.cache.describe()
            events = self._event_addresses()
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
                pool_epoch=self._config.pool_epoch,
                pool_descriptor=self._config.pool_descriptor,
                events_address=events[0],
                events_replay_address=events[1],
                events_rank=self._config.events_rank,
                events_encrypted=self._config.events_key_file is not None,
                version=radix_cache.__version__,
            )

        return await self._answer("Describe", context, run)

    def _event_addresses(self) -> tuple[str, str]:
        """Return where the events are over ZeroMQ, to a caller who may read them: nothing there asks for a token."""
        try:
            if self.runner.guard is not None:
                self.runner.guard.check_stream("WatchEvents")
        except RadixCacheError:
            return "", ""
        publisher, replay = self.events.addresses or ("", "")
        return publisher, replay

    def _check_layout(self, request: pb.DescribeRequest) -> None:
        for name in ("block_size", "layout_fingerprint", "pool_epoch"):
            wanted, here = getattr(request, name), getattr(self._config, name)
            if request.HasField(name) and wanted != here:
                raise LayoutMismatch(f"{name} is {here!r} here, the client was built for {wanted!r}")

    async def DumpTree(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send the rows in pieces. They are of one moment."""

        def run() -> Any:
            return self.runner.dump(
                tuple(request.namespace),
                min(request.max_nodes or _MAX_DUMPED_NODES, _MAX_DUMPED_NODES),
                min(request.max_span_tokens, _MAX_DUMPED_SPAN),
            )

        rows = await self._answer("DumpTree", context, run) or ()
        for start in range(0, len(rows), _DUMPED_AT_ONCE):
            yield pb.DumpTreeResponse(nodes=map(node_of, rows[start : start + _DUMPED_AT_ONCE]))

    async def ListLeases(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send the leases in pieces. They are of one moment."""

        def run() -> Any:
            return self.runner.leases(request.engine_id)

        leases = await self._answer("ListLeases", context, run) or ()
        for start in range(0, len(leases), _LISTED_AT_ONCE):
            yield pb.ListLeasesResponse(leases=map(lease_info_of, leases[start : start + _LISTED_AT_ONCE]))

    async def ReleaseEngine(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._answer("ReleaseEngine", context, partial(self.runner.release_engine, request.engine_id))

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Send what is stored and removed until the client leaves, or the server drains."""
        stream = self.events.stream
        if stream is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server publishes no events: it needs --events")
            return
        code = "CANCELLED"
        try:
            async with (
                self.streams.opened(context),
                aclosing(
                    watch(stream, request, self._config.max_queued_events, partial(self.streams.next, context))
                ) as told,
            ):
                async for message in told:
                    if self.runner.guard is not None:
                        self.runner.guard.check_stream("WatchEvents")
                    yield message
        except RadixCacheError as error:
            status = to_status(error)
            code = code_of(status.code).name
            await abort(context, status)
        finally:
            self.metrics.count("WatchEvents", code)

    async def expire(self, interval_s: float) -> None:
        """Let leases run out although no call comes, and see whether tokens were changed; never returns."""
        while True:
            await asyncio.sleep(interval_s)
            if self.runner.guard is not None:
                self.runner.guard.refresh()
            self.runner.tick()
            self.runner.after_call()
