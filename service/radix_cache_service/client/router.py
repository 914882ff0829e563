"""The clients of a router, blocking and asyncio: which node to ask, and when a request is over."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import Message

from radix_cache.operations import check_name, check_namespace
from radix_cache.tokens import TokenIds, pack_tokens
from radix_cache_service.client.connection import MAX_MESSAGE_BYTES, Connection
from radix_cache_service.client.places import AsyncRouted, NodeInfo, NodeScore, Routed, read_info, read_place
from radix_cache_service.client.tls import Tls
from radix_cache_service.errors import from_call_error
from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.pb import router_pb2_grpc as pb_grpc

__all__ = ["AsyncRouted", "AsyncRouter", "NodeInfo", "NodeScore", "Routed", "Router"]

_GIVE_UP_S = 10.0  # nobody waits for it


class _Link(Connection):
    """What both clients have in common: settings, requests, answers.

    target: where the router listens. The others are as in `Client`. Nothing is sent before the first call. Calls raise
    the library's errors: `ServiceUnavailable` where no node serves, or the router can't be reached.
    """

    def __init__(
        self,
        target: str,
        timeout_s: float = 5.0,
        tls: Tls | None = None,
        token: str | Callable[[], str] | None = None,
        allow_plaintext_token: bool = False,
        channel_credentials: grpc.ChannelCredentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._given_up: set[Any] = set()  # calls: one that nobody holds is cancelled
        super().__init__(target, timeout_s, tls, channel_credentials, token, allow_plaintext_token, max_message_bytes)


class Router(_Link):
    """A client of the router at ``target``. Thread-safe. See `_Link` for the arguments."""

    def _reset(self) -> None:
        super()._reset()
        self._lock = threading.Lock()

    def _method(self, name: str) -> Any:
        with self._lock:
            return getattr(self._open(grpc, pb_grpc.RouterServiceStub), name)

    def _call(self, method: str, request: Message) -> Any:
        self._check_size(request)
        try:
            return self._method(method)(request, timeout=self.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    def route(
        self,
        tokens: TokenIds,
        namespace: Iterable[str] = (),
        request_id: str | None = None,
        *,
        peek: bool = False,
        with_nodes: bool = False,
    ) -> Routed:
        """Return which node to ask for a prompt; the request is its load until it is finished, or its time is up.

        request_id: a new one unless it is given; the same again for the same prompt, as in a retry, gets the same node.
        No other request that is in flight may have it, whoever's it is. peek: nothing is counted, and there is nothing
        to finish. with_nodes: also what each node has. O(tokens).
        """
        request = _route_request(tokens, namespace, request_id, peek, with_nodes)
        try:
            return Routed(*read_place(self._call("Route", request)), self.finish)
        except BaseException:
            if request_id is None and not peek:
                self._give_up(request.request_id)
            raise

    def _give_up(self, request_id: str) -> None:
        """End a request that nobody else can, whose answer may be lost, if that is possible. Waits for nothing."""
        with contextlib.suppress(Exception):
            request = pb.FinishRequest(request_id=request_id)
            call = self._method("Finish").future(
                request, timeout=_GIVE_UP_S, metadata=self._metadata, wait_for_ready=True
            )
            self._given_up.add(call)
            call.add_done_callback(self._given_up.discard)

    def finish_prefill(self, request_id: str) -> None:
        """The prompt of a request is computed: it is less of a load from now on."""
        self._call("FinishPrefill", pb.FinishPrefillRequest(request_id=request_id))

    def finish(self, request_id: str) -> None:
        """A request is over, and no load any more. One that is not known is no error."""
        self._call("Finish", pb.FinishRequest(request_id=request_id))

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, by name."""
        return [read_info(each) for each in self._call("ListNodes", pb.ListNodesRequest()).nodes]

    def add_node(self, node: str, address: str) -> NodeInfo:
        """Add a node, and return what came of asking it, which takes up to half of the router's heartbeat.

        One that is there already is not added again. Raises `LayoutMismatch` for one that does not fit.
        """
        return read_info(self._call("AddNode", pb.AddNodeRequest(node=node, address=address)).node)

    def remove_node(self, node: str) -> None:
        """Remove a node: no more requests are sent there."""
        self._call("RemoveNode", pb.RemoveNodeRequest(node=node))

    def close(self) -> None:
        """Hang up. Requests in flight are load until their time is up."""
        with self._lock:
            self._is_closed = True
            channel = self._channel
        if channel is not None:
            channel.close()

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncRouter(_Link):
    """`Router` for one event loop, the one of its first call, with ``await`` before each call.

    ``async with await router.route(prompt) as routed:`` finishes the request at the end of the block.
    """

    async def _call(self, method: str, request: Message) -> Any:
        self._check_size(request)
        stub = self._open(grpc.aio, pb_grpc.RouterServiceStub)
        try:
            return await getattr(stub, method)(request, timeout=self.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_call_error(error) from None

    async def route(
        self,
        tokens: TokenIds,
        namespace: Iterable[str] = (),
        request_id: str | None = None,
        *,
        peek: bool = False,
        with_nodes: bool = False,
    ) -> AsyncRouted:
        """`Router.route`."""
        request = _route_request(tokens, namespace, request_id, peek, with_nodes)
        try:
            return AsyncRouted(*read_place(await self._call("Route", request)), self.finish)
        except BaseException:
            if request_id is None and not peek:
                self._give_up(request.request_id)
            raise

    def _give_up(self, request_id: str) -> None:
        """`Router._give_up`."""
        with contextlib.suppress(Exception):
            request = pb.FinishRequest(request_id=request_id)
            call = self._open(grpc.aio, pb_grpc.RouterServiceStub).Finish(
                request, timeout=_GIVE_UP_S, metadata=self._metadata, wait_for_ready=True
            )
            self._given_up.add(call)
            call.add_done_callback(self._given_up.discard)

    async def finish_prefill(self, request_id: str) -> None:
        """`Router.finish_prefill`."""
        await self._call("FinishPrefill", pb.FinishPrefillRequest(request_id=request_id))

    async def finish(self, request_id: str) -> None:
        """`Router.finish`."""
        await self._call("Finish", pb.FinishRequest(request_id=request_id))

    async def nodes(self) -> list[NodeInfo]:
        """`Router.nodes`."""
        return [read_info(each) for each in (await self._call("ListNodes", pb.ListNodesRequest())).nodes]

    async def add_node(self, node: str, address: str) -> NodeInfo:
        """`Router.add_node`."""
        return read_info((await self._call("AddNode", pb.AddNodeRequest(node=node, address=address))).node)

    async def remove_node(self, node: str) -> None:
        """`Router.remove_node`."""
        await self._call("RemoveNode", pb.RemoveNodeRequest(node=node))

    async def close(self) -> None:
        """`Router.close`."""
        self._is_closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> AsyncRouter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _route_request(
    tokens: TokenIds, namespace: Iterable[str], request_id: str | None, peek: bool, with_nodes: bool
) -> pb.RouteRequest:
    new = "" if peek else os.urandom(16).hex()
    return pb.RouteRequest(
        tokens=pack_tokens(tokens),
        namespace=check_namespace(namespace),
        request_id=new if request_id is None else check_name(request_id, "request_id"),
        peek=peek,
        with_nodes=with_nodes,
    )
