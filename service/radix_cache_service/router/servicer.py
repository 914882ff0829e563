"""The router's RPCs: messages in, messages out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import grpc
from google.rpc.status_pb2 import Status

from radix_cache import PrefixCache
from radix_cache.errors import InvalidTokens, ServiceUnavailable
from radix_cache.operations import Namespace, Probe, check_name, check_namespace
from radix_cache.tokens import TOKEN_BYTES
from radix_cache_service.access.guard import Guard
from radix_cache_service.access.limits import ClientLimits
from radix_cache_service.access.rules import Rule
from radix_cache_service.errors import LayoutMismatch, abort, code_of, to_status
from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.pb import router_pb2_grpc as pb_grpc
from radix_cache_service.router.config import RouterConfig, check_node
from radix_cache_service.router.node import Node
from radix_cache_service.router.routing import Routed, Routing
from radix_cache_service.telemetry.metrics import CallMetrics
from radix_cache_service.wire import read_tokens

__all__ = ["RULES", "RouterServicer"]

RULES: Final = {
    "Route": Rule("read"),
    "FinishPrefill": Rule("read"),
    "Finish": Rule("read"),
    "ListNodes": Rule("read", everywhere=True),
    "AddNode": Rule("admin", everywhere=True),
    "RemoveNode": Rule("admin", everywhere=True),
    "ServerReflectionInfo": Rule(),
}
"""What each method needs of a token: `radix_cache_service.access.rules`."""


class RouterServicer(pb_grpc.RouterServiceServicer):
    """Serves one `Routing`. guard: None where everybody may do everything."""

    def __init__(self, config: RouterConfig, changed: Callable[[], None]) -> None:
        self.metrics = CallMetrics()
        self.routing = Routing(config, changed)
        self.guard: Guard | None = None
        tokens = config.make_tokens()
        if tokens is not None:  # a guard stands before a cache; here it has leases to look after that nobody opens
            self.guard = Guard(tokens, ClientLimits(), PrefixCache(num_blocks=1, block_size=1), RULES)
        self._max_tokens = config.max_tokens

    async def _answer(self, method: str, context: Any, make: Callable[[], Awaitable[Any]]) -> Any:
        with self.metrics.call(method, context) as call:
            try:
                return await make()
            except ServiceUnavailable as error:
                status = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message=str(error))
            except Exception as error:  # noqa: BLE001 - the boundary: nothing but a status leaves here
                status = to_status(error)
            except asyncio.CancelledError:
                call.code = "CANCELLED"
                raise
            call.code = code_of(status.code).name
        return await abort(context, status)

    # Requests.

    async def Route(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        return await self._answer("Route", context, partial(self._route, request))

    async def _route(self, request: pb.RouteRequest) -> pb.RouteResponse:
        tokens, namespace = self._read_prompt(request)
        if request.peek:
            return await self._place(await self.routing.peek(tokens, namespace), request, tokens, namespace)
        if not request.request_id:
            request.request_id = os.urandom(16).hex()
        key = self._key(request.request_id)
        async with self.routing.route(tokens, namespace, key, key.removesuffix(request.request_id)) as routed:
            return await self._place(routed, request, tokens, namespace)

    async def _place(
        self, routed: Routed, request: pb.RouteRequest, tokens: bytes, namespace: Namespace
    ) -> pb.RouteResponse:
        return pb.RouteResponse(
            node=routed.node.name,
            address=routed.node.address,
            num_cached_tokens=routed.num_cached_tokens,
            request_id="" if request.peek else request.request_id,
            nodes=await self._scores(tokens, namespace) if request.with_nodes else (),
        )

    def _read_prompt(self, request: pb.RouteRequest) -> tuple[bytes, Namespace]:
        num_tokens = max(len(request.tokens) // TOKEN_BYTES, len(request.token_ids))
        if num_tokens > self._max_tokens:
            raise InvalidTokens(f"a prompt has at most {self._max_tokens} tokens here, not {num_tokens}")
        tokens = read_tokens(request.tokens, request.token_ids)
        namespace = check_namespace(tuple(request.namespace))
        if self.guard is not None:
            self.guard.check(Probe(tokens, namespace))  # who is routed is told as much as by a probe
        return tokens, namespace

    def _key(self, request_id: str) -> str:
        """Return what a request is known by here: nobody ends those of another token."""
        check_name(request_id, "request_id")
        return request_id if self.guard is None else self.guard.engine(request_id)

    async def _scores(self, tokens: bytes, namespace: Namespace) -> list[pb.NodeScore]:
        scores = await self.routing.scores(tokens, namespace)
        said = [(self.routing.fleet.node_of(worker), worker, num_tokens) for worker, num_tokens in scores.items()]
        return [
            pb.NodeScore(node=node.name, num_cached_tokens=num_tokens, num_requests=self.routing.flights.num_at(worker))
            for node, worker, num_tokens in sorted(said, key=lambda each: each[0].name if each[0] else "")
            if node is not None
        ]

    async def FinishPrefill(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        async def run() -> pb.FinishPrefillResponse:
            await self.routing.prefilled(self._key(request.request_id))
            return pb.FinishPrefillResponse()

        return await self._answer("FinishPrefill", context, run)

    async def Finish(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        async def run() -> pb.FinishResponse:
            await self.routing.finish(self._key(request.request_id))
            return pb.FinishResponse()

        return await self._answer("Finish", context, run)

    # Nodes.

    async def ListNodes(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        async def run() -> pb.ListNodesResponse:
            nodes = sorted(self.routing.fleet.by_name.values(), key=lambda node: node.name)
            pending = self.routing.pending_tokens()
            return pb.ListNodesResponse(nodes=[self._info_of(node, pending) for node in nodes])

        return await self._answer("ListNodes", context, run)

    async def AddNode(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        async def run() -> pb.AddNodeResponse:
            is_new = request.node not in self.routing.fleet.by_name
            node = self.routing.fleet.add(check_node(request.node, request.address))
            await node.was_asked.wait()
            if node.state == pb.NODE_STATE_REFUSED:
                reason = node.reason
                if is_new and self.routing.fleet.by_name.get(node.name) is node:
                    await self.routing.fleet.remove(node.name)
                raise LayoutMismatch(f"node {node.name} at {node.address} does not fit: {reason}")
            return pb.AddNodeResponse(node=self._info_of(node, {}))

        return await self._answer("AddNode", context, run)

    async def RemoveNode(self, request: Any, context: Any) -> Any:  # noqa: N802, D102
        async def run() -> pb.RemoveNodeResponse:
            await self.routing.fleet.remove(request.node)
            return pb.RemoveNodeResponse()

        return await self._answer("RemoveNode", context, run)

    def _info_of(self, node: Node, pending: Mapping[int, int]) -> pb.NodeInfo:
        worker = 0 if node.worker is None else node.worker  # of none
        return pb.NodeInfo(
            node=node.name,
            address=node.address,
            state=node.state,
            reason=node.reason,
            num_requests=self.routing.flights.num_at(worker),
            num_routed_requests=node.num_routed,
            num_pending_tokens=pending.get(worker, 0),
            events_problem=node.events_problem,
        )

    async def tend(self) -> None:
        """To be called every now and then: requests end that nobody finished, and tokens may have changed."""
        await self.routing.expire()
        if self.guard is not None:
            self.guard.refresh()
