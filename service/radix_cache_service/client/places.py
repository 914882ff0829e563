"""What a router says: of a prompt, where it goes, and of its nodes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from radix_cache.errors import RadixCacheError
from radix_cache_service.pb import router_pb2 as pb

__all__ = ["AsyncRouted", "NodeInfo", "NodeScore", "Place", "Routed", "read_info", "read_place"]

_log = logging.getLogger(__name__)


class NodeScore(NamedTuple):
    """What a node has of a prompt, and its requests in flight."""

    node: str
    num_cached_tokens: int
    num_requests: int


class NodeInfo(NamedTuple):
    """A node of the router's. state: ``connecting``, ``serving``, ``draining``, ``down`` or ``refused``; reason: why it
    is sent nothing. num_requests: in flight; num_routed_requests: since the router started. num_pending_tokens: of
    their prompts, yet to be computed. events_problem: why the router does not hear what it caches, though it serves.
    """

    node: str
    address: str
    state: str
    reason: str
    num_requests: int
    num_routed_requests: int
    num_pending_tokens: int
    events_problem: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes."""

    node: str
    address: str
    num_cached_tokens: int
    request_id: str
    nodes: tuple[NodeScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Routed(Place):
    """Where a request goes: as a context manager, it is finished at the end of the block, if the router can be told.

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
        try:
            self.finish()
        except RadixCacheError as error:
            _log_unfinished(error)


@dataclass(frozen=True, slots=True)
class AsyncRouted(Place):
    """The same for `AsyncRouter`, as an asynchronous context manager."""

    _finish: Callable[[str], Awaitable[None]] | None = field(repr=False, compare=False, default=None)

    async def finish(self) -> None:
        """Tell the router that the request is over. A second time does nothing."""
        if self.request_id and self._finish is not None:
            await self._finish(self.request_id)

    async def __aenter__(self) -> AsyncRouted:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.finish()
        except RadixCacheError as error:
            _log_unfinished(error)


def _log_unfinished(error: RadixCacheError) -> None:
    """The request itself is done: what it was done for must not fail over this."""
    _log.warning("a request is load of its node until its time is up: its end was not told", extra={"reason": error})


def read_place(said: pb.RouteResponse) -> tuple[str, str, int, str, tuple[NodeScore, ...]]:
    """Return what a `Place` is made of."""
    nodes = tuple(NodeScore(each.node, each.num_cached_tokens, each.num_requests) for each in said.nodes)
    return said.node, said.address, said.num_cached_tokens, said.request_id, nodes


def read_info(said: pb.NodeInfo) -> NodeInfo:
    """Return what was said of a node."""
    state = pb.NodeState.Name(said.state).removeprefix("NODE_STATE_").lower()
    return NodeInfo(
        said.node,
        said.address,
        state,
        said.reason,
        said.num_requests,
        said.num_routed_requests,
        said.num_pending_tokens,
        said.events_problem,
    )
