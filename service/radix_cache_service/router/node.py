"""One node: whether it serves, and what it is, asked again each time it begins to.

Two things are looked at. A watch on its health says at once that it drains, or that its process has ended. A call each
half heartbeat notices what says nothing: a network that is gone, a process that hangs. Whatever happens, the node is
tried again soon, for as long as the router has it. While it serves, its events' ports are looked at now and then: where
they can't be reached, it is sent requests all the same, but what it has is not known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radix_cache.errors import InvalidArgument
from radix_cache_service.client.connection import authorization
from radix_cache_service.errors import from_call_error
from radix_cache_service.pb import prefix_cache_pb2, prefix_cache_pb2_grpc
from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.router.config import NodeName, RouterConfig
from radix_cache_service.router.reach import why_unheard

__all__ = ["Link", "Node"]

_SERVICE = prefix_cache_pb2.DESCRIPTOR.services_by_name["PrefixCacheService"].full_name
_ASKED = health_pb2.HealthCheckRequest(service=_SERVICE)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_PAUSE_S = 0.2  # before a node that is gone is tried again
_HEARTBEATS = 5  # between two looks at events that can be heard
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]

_log = logging.getLogger(__name__)


class Link:
    """How nodes are connected to: TLS, token, patience. The files are read anew for each connection."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._read()
        self._is_read = True
        self.heartbeat_s = config.heartbeat_s
        self.patience_s = config.heartbeat_s / 2

    def _read(self) -> None:
        tls, token = self._config.make_node_tls(), self._config.make_node_token()
        self._credentials = None if tls is None else tls.credentials()
        self.metadata = None if token is None else authorization(token)  # what calls say of the router

    def _refresh(self) -> None:
        """Read the files; where one can't be used, go on with what was read last."""
        try:
            self._read()
            self._is_read = True
        except InvalidArgument as error:
            if self._is_read:
                _log.warning("files of node_tls or node_token_file were not read anew", extra={"reason": str(error)})
            self._is_read = False

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel, which connects when it is used."""
        self._refresh()
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, _OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, _OPTIONS)


class Node:
    """A node of the router's. join: told what it says of itself when it begins to serve; sets ``worker`` and
    ``places``, or raises `InvalidArgument` why it does not fit. pause: told that number when it serves no more, though
    it may again. leave: when that life of the node is over.

    worker: the number of this life of the node, up to its end. places: where its events are. state, reason,
    events_problem: as in the schema. has_fit: it has served some time. num_routed: requests that were sent there.
    num_prompt_tokens, num_cached_tokens: of those. was_asked: set once the first try has come to something.
    """

    def __init__(
        self,
        name: NodeName,
        link: Link,
        join: Callable[[Node, prefix_cache_pb2.DescribeResponse], Awaitable[None]],
        pause: Callable[[int], None],
        leave: Callable[[int], None],
    ) -> None:
        self.name, self.address = name
        self.worker: int | None = None
        self.places: tuple[str, ...] = ()
        self.state: pb.NodeState.ValueType = pb.NODE_STATE_CONNECTING
        self.reason = "it was not heard of yet"
        self.events_problem = ""
        self.was_asked = asyncio.Event()
        self.has_fit = False
        self.num_routed = self.num_prompt_tokens = self.num_cached_tokens = 0
        self._link = link
        self._join = join
        self._pause = pause
        self._leave = leave
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name=f"node {self.name}")

    async def close(self) -> None:
        """Look no more, and let it go."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._end()
        self._is_now(pb.NODE_STATE_DOWN, "it was removed", logging.INFO)

    async def _run(self) -> None:
        while not self._is_closed:  # a task group whose child fails keeps a cancellation of that moment to itself
            pause_s = _PAUSE_S
            try:  # on a new connection: one that lost packets would wait the longer, the longer nothing came through
                async with self._link.channel(self.address) as channel, asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._follow(channel))
                    tasks.create_task(self._beat(channel))
                    tasks.create_task(self._look_at_events())
            except* InvalidArgument as group:  # it does not fit, which may change: it is asked again, without haste
                pause_s = self._link.patience_s
                self._end()
                self._is_now(pb.NODE_STATE_REFUSED, str(group.exceptions[0]), logging.WARNING)
            except* Exception as group:  # noqa: BLE001 - whatever it was, the node is tried again
                self._fail(group.exceptions[0])
            await asyncio.sleep(pause_s)

    def _fail(self, error: Exception) -> None:
        if self.worker is not None and _is_silence(error):  # it may be at work all the same
            self._pause(self.worker)
        else:
            self._end()
        self._is_now(pb.NODE_STATE_DOWN, _reason_of(error), logging.WARNING)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Do what the node's health says, until it says nothing more."""
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for said in stub.Watch(_ASKED):
            if said.status == _SERVING:
                await self._come(channel)
            else:
                if self.worker is not None:
                    self._pause(self.worker)
                self._is_now(pb.NODE_STATE_DRAINING, "it says that it is to be sent nothing", logging.INFO)
        raise _Ended

    async def _beat(self, channel: grpc.aio.Channel) -> None:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            await stub.Check(_ASKED, timeout=self._link.patience_s)
            await asyncio.sleep(self._link.patience_s)

    async def _look_at_events(self) -> None:
        """See whether they can be heard. Once is chance: it is said after the second time in a row that they can't."""
        now, num_heartbeats = "", 1
        while True:
            await asyncio.sleep(num_heartbeats * self._link.heartbeat_s)
            before, now = now, await self._why_unheard()
            self._events_are(now if before else "")
            num_heartbeats = 1 if now else _HEARTBEATS

    async def _why_unheard(self) -> str:
        found = await asyncio.gather(*(why_unheard(place, self._link.heartbeat_s) for place in self.places))
        return "; ".join(filter(None, found)) if self.state == pb.NODE_STATE_SERVING else ""

    def _events_are(self, problem: str) -> None:
        if bool(problem) != bool(self.events_problem):
            level, said = (logging.WARNING, "not heard") if problem else (logging.INFO, "heard again")
            extra = {"node": self.name, "address": self.address, "reason": problem}
            _log.log(level, "the node's events are %s", said, extra=extra)
        self.events_problem = problem

    async def _come(self, channel: grpc.aio.Channel) -> None:
        stub: Any = prefix_cache_pb2_grpc.PrefixCacheServiceStub(channel)
        request = prefix_cache_pb2.DescribeRequest()
        said = await stub.Describe(request, timeout=self._link.patience_s, metadata=self._link.metadata)
        await self._join(self, said)
        self._is_now(pb.NODE_STATE_SERVING, "", logging.INFO)

    def _end(self) -> None:
        """Let go of what was known of this life of the node."""
        worker, self.worker = self.worker, None
        if worker is not None:
            self._leave(worker)

    def _is_now(self, state: pb.NodeState.ValueType, reason: str, level: int) -> None:
        if state != self.state:
            said = pb.NodeState.Name(state).removeprefix("NODE_STATE_").lower()
            _log.log(level, "node is %s", said, extra={"node": self.name, "address": self.address, "reason": reason})
        self.state, self.reason = state, reason
        if state != pb.NODE_STATE_SERVING:
            self.events_problem = ""
        self.was_asked.set()


class _Ended(Exception):
    """The watch on a node's health ended in good order."""


def _reason_of(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return str(from_call_error(error))
    if not isinstance(error, _Ended):
        _log.error("a node could not be looked at", exc_info=error)
    return "its health is not told" if isinstance(error, _Ended) else type(error).__name__


def _is_silence(error: BaseException) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
