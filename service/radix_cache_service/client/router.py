"""The clients of a router, blocking and asyncio: which node to ask, and when a request is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from radix_cache.errors import InvalidArgument, ServiceUnavailable
from radix_cache.operations import check_name, check_namespace, check_seconds
from radix_cache.tokens import TokenIds, pack_tokens, shown
from radix_cache_service.access.addresses import is_local
from radix_cache_service.client.remote import authorization
from radix_cache_service.client.tls import Tls
from radix_cache_service.errors import from_call_error
from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.pb import router_pb2_grpc as pb_grpc

__all__ = ["AsyncRouted", "AsyncRouter", "NodeInfo", "NodeScore", "Routed", "Router"]

_OPTIONS = [
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of one's own
    ("grpc.enable_http_proxy", 0),
]


class NodeScore(NamedTuple):
    """What a node has of a prompt, and its requests in flight."""

    node: str
    num_cached_tokens: int
    num_requests: int


class NodeInfo(NamedTuple):
    """A node of the router's. state: ``connecting``, ``serving``, ``draining``, ``down`` or ``refused``; reason: why it
    is sent nothing. num_requests: in flight; num_routed_requests: since the router started. num_pending_tokens: of
    their prompts, yet to be computed.
    """

    node: str
    address: str
    state: str
    reason: str
    num_requests: int
    num_routed_requests: int
    num_pending_tokens: int


@dataclass(frozen=True, slots=True)
class _Place:
    node: str
    address: str
    num_cached_tokens: int
    request_id: str
    nodes: tuple[NodeScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Routed(_Place):
    """Where a request goes: as a context manager, it is finished at the end of the block.

    num_cached_tokens: what the node has of the prompt, as far as is known. request_id: empty for one that only asked.
    nodes: what each node has, where that was asked.
    """

    _finish: Callable[[str], None] = field(repr=False, compare=False, default=lambda _: None)

    def finish(self) -> None:
        """Tell the router that the request is over. A second time does nothing."""
        if self.request_id:
            self._finish(self.request_id)

    def __enter__(self) -> Routed:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


@dataclass(frozen=True, slots=True)
class AsyncRouted(_Place):
    """The same for `AsyncRouter`, as an asynchronous context manager."""

    _finish: Callable[[str], Awaitable[None]] | None = field(repr=False, compare=False, default=None)

    async def finish(self) -> None:
        """Tell the router that the request is over. A second time does nothing."""
        if self.request_id and self._finish is not None:
            await self._finish(self.request_id)

    async def __aenter__(self) -> AsyncRouted:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()


class _Link:
    """What both clients have in common: settings, requests, answers.

    target: where the router listens. tls, token, allow_plaintext_token: as `Client` has them. Nothing is sent before
    the first call. Calls raise the library's errors: `ServiceUnavailable` where no node serves, or the router can't be
    reached.
    """

    def __init__(
        self,
        target: str,
        timeout_s: float = 5.0,
        tls: Tls | None = None,
        token: str | None = None,
        allow_plaintext_token: bool = False,
    ) -> None:
        if not isinstance(target, str) or not target:
            raise InvalidArgument(f"target is an address, as in 127.0.0.1:50050, not {shown(target)}")
        self.target = target
        self.timeout_s = check_seconds(timeout_s, "timeout_s")
        if token is not None and tls is None and not allow_plaintext_token and not is_local(target):
            raise InvalidArgument(f"the token would go to {target} in the clear: use tls, or set allow_plaintext_token")
        self._options = {"timeout": self.timeout_s, "metadata": None if token is None else authorization(token)}
        self._credentials = None if tls is None else tls.credentials()
        self._is_closed = False
        self._channel: Any = None
        self._stub: Any = None
        self._open()

    def _open(self) -> None:
        """Open the channel, if that is to be done before the first call."""

    def _opened(self, library: Any) -> Any:
        """Return a channel. library: ``grpc`` or ``grpc.aio``."""
        if self._credentials is None:
            return library.insecure_channel(self.target, _OPTIONS)
        return library.secure_channel(self.target, self._credentials, _OPTIONS)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ServiceUnavailable(f"the client of {self.target} is closed")


class Router(_Link):
    """A client of the router at ``target``. Thread-safe. See `_Link` for the arguments."""

    def _open(self) -> None:
        self._channel = self._opened(grpc)
        self._stub = pb_grpc.RouterServiceStub(self._channel)

    def _call(self, method: str, request: Any) -> Any:
        self._check_open()
        try:
            return getattr(self._stub, method)(request, **self._options)
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

        request_id: the router chooses one unless it is given; the same again, as in a retry, gets the same node. peek:
        nothing is counted, and there is nothing to finish. with_nodes: also what each node has. O(tokens).
        """
        said = self._call("Route", _route_request(tokens, namespace, request_id, peek, with_nodes))
        return Routed(*_place_of(said), self.finish)

    def finish_prefill(self, request_id: str) -> None:
        """The prompt of a request is computed: it is less of a load from now on."""
        self._call("FinishPrefill", pb.FinishPrefillRequest(request_id=request_id))

    def finish(self, request_id: str) -> None:
        """A request is over, and no load any more. One that is not known is no error."""
        self._call("Finish", pb.FinishRequest(request_id=request_id))

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, by name."""
        return [_info(each) for each in self._call("ListNodes", pb.ListNodesRequest()).nodes]

    def add_node(self, node: str, address: str) -> NodeInfo:
        """Add a node, and return what came of asking it. Raises `LayoutMismatch` for one that does not fit."""
        return _info(self._call("AddNode", pb.AddNodeRequest(node=node, address=address)).node)

    def remove_node(self, node: str) -> None:
        """Remove a node: no more requests are sent there."""
        self._call("RemoveNode", pb.RemoveNodeRequest(node=node))

    def close(self) -> None:
        """Hang up. Requests in flight are load until their time is up."""
        self._is_closed = True
        self._channel.close()

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncRouter(_Link):
    """`Router` for one event loop, the one of its first call, with ``await`` before each call.

    ``async with await router.route(prompt) as routed:`` finishes the request at the end of the block.
    """

    async def _call(self, method: str, request: Any) -> Any:
        self._check_open()
        if self._stub is None:
            self._channel = self._opened(grpc.aio)
            self._stub = pb_grpc.RouterServiceStub(self._channel)
        try:
            return await getattr(self._stub, method)(request, **self._options)
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
        said = await self._call("Route", _route_request(tokens, namespace, request_id, peek, with_nodes))
        return AsyncRouted(*_place_of(said), self.finish)

    async def finish_prefill(self, request_id: str) -> None:
        """`Router.finish_prefill`."""
        await self._call("FinishPrefill", pb.FinishPrefillRequest(request_id=request_id))

    async def finish(self, request_id: str) -> None:
        """`Router.finish`."""
        await self._call("Finish", pb.FinishRequest(request_id=request_id))

    async def nodes(self) -> list[NodeInfo]:
        """`Router.nodes`."""
        return [_info(each) for each in (await self._call("ListNodes", pb.ListNodesRequest())).nodes]

    async def add_node(self, node: str, address: str) -> NodeInfo:
        """`Router.add_node`."""
        return _info((await self._call("AddNode", pb.AddNodeRequest(node=node, address=address))).node)

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
    return pb.RouteRequest(
        tokens=pack_tokens(tokens),
        namespace=check_namespace(namespace),
        request_id="" if request_id is None else check_name(request_id, "request_id"),
        peek=peek,
        with_nodes=with_nodes,
    )


def _place_of(said: pb.RouteResponse) -> tuple[str, str, int, str, tuple[NodeScore, ...]]:
    nodes = tuple(NodeScore(each.node, each.num_cached_tokens, each.num_requests) for each in said.nodes)
    return said.node, said.address, said.num_cached_tokens, said.request_id, nodes


def _info(said: pb.NodeInfo) -> NodeInfo:
    state = pb.NodeState.Name(said.state).removeprefix("NODE_STATE_").lower()
    return NodeInfo(
        said.node,
        said.address,
        state,
        said.reason,
        said.num_requests,
        said.num_routed_requests,
        said.num_pending_tokens,
    )
