"""The nodes of a router: who fits, who serves, who has least to do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from radix_cache.errors import InvalidArgument, ServiceUnavailable
from radix_cache.tokens import shown
from radix_cache_service.access.addresses import is_local
from radix_cache_service.pb import prefix_cache_pb2
from radix_cache_service.pb import router_pb2 as pb
from radix_cache_service.router.config import NodeName, RouterConfig, check_distinct
from radix_cache_service.router.flights import Flights
from radix_cache_service.router.node import Link, Node
from radix_cache_service.router.selection import Selection, Worker

__all__ = ["Fleet"]

_Life = tuple[str, str, str, str, int]
"""Epochs of a server and of its pool, and where its events are: while they stay the same, it is the same process."""

_FEW = 4  # requests in flight that any node may have
_ANYWHERE = {"0.0.0.0", "[::]", "::"}  # noqa: S104 - nothing is bound here


class Fleet:
    """Nodes by name. changed: called when one begins or ceases to serve.

    selection: who of them has what; None before the first has said how long its blocks are. turn: to be held while it
    chooses, since it would fail over a worker that comes or goes meanwhile, and does not see what is booked meanwhile.

    What is done to the selection is done to the end, though whoever waits for it be cancelled: the service does it all
    the same, and a worker that came after its removal would be there for ever.
    """

    def __init__(self, config: RouterConfig, flights: Flights, changed: Callable[[], None]) -> None:
        self.by_name: dict[str, Node] = {}
        self.selection: Selection | None = None
        self.turn = asyncio.Lock()
        self._config = config
        self._flights = flights
        self._changed = changed
        self._link = Link(config)
        self._numbers = itertools.count(1)
        self._serving: dict[int, Node] = {}
        self._lives: dict[int, _Life] = {}
        self._layout = ""
        self._doing: set[asyncio.Task[None]] = set()

    # Coming and going.

    def add(self, name: NodeName) -> Node:
        """Add a node and begin to look for it; return it, if it is there already. Raises `InvalidArgument` for a name
        or an address that is another one's.
        """
        known = self.by_name.get(name.name)
        if known is not None and known.address == name.address:
            return known
        check_distinct([*(NodeName(node.name, node.address) for node in self.by_name.values()), name])
        self._config.check_node_secrecy(name)
        node = self.by_name[name.name] = Node(name, self._link, self._join, self._pause, self._leave)
        node.start()
        return node

    async def remove(self, name: str) -> None:
        """Remove a node; from now on it is sent nothing. Raises `InvalidArgument` for one that is not there."""
        node = self.by_name.pop(name, None)
        if node is None:
            raise InvalidArgument(f"there is no node {shown(name)}")
        if node.worker is not None:
            self._pause(node.worker)
        await asyncio.shield(self._kept(node.close()))

    async def close(self) -> None:
        """Let all of them go."""
        await asyncio.gather(*(self.remove(name) for name in list(self.by_name)))
        while self._doing:
            await asyncio.wait(self._doing)  # a gather of what is done would not let the loop forget it, from 3.12 on
        if self.selection is not None:
            await self.selection.close()

    async def _join(self, node: Node, said: prefix_cache_pb2.DescribeResponse) -> None:
        for other in list(self.by_name.values()):
            if other is node:
                break
            await other.was_asked.wait()  # what all have to be like is up to the first in order, not to the quickest
        life = (said.state.epoch, said.pool_epoch, *_places(node.address, said), said.events_rank)
        self._check_places(node, life[2:4])
        await self._check_likeness(node, said)
        assert self.selection is not None
        if node.worker is None or self._lives.get(node.worker) != life:
            await self._begin(node, life, self.selection)
        else:  # a connection of before the silence might be of no use for long
            await asyncio.shield(self._in_turn(self.selection.listen_anew(Worker(node.worker, *life[2:]))))
        assert node.worker is not None
        self._check_places(node, life[2:4])  # again: another may have begun to serve meanwhile
        node.places = life[2:4]
        self._serving[node.worker] = node
        self._changed()

    async def _begin(self, node: Node, life: _Life, selection: Selection) -> None:
        """Make a worker of a node that is not the one that it was: what was booked there is done by nobody."""
        if node.worker is not None:
            self._leave(node.worker)
        node.worker = next(self._numbers)  # before it is added: whatever comes in between, it is removed again
        await asyncio.shield(self._in_turn(selection.add(Worker(node.worker, *life[2:]))))
        self._lives[node.worker] = life

    def _check_places(self, node: Node, places: tuple[str, ...]) -> None:
        """Raise `InvalidArgument` where another one's events are: it would seem to have what that one has."""
        for other in self._serving.values():
            for place in set(places) & set(other.places):
                if other is not node:
                    raise InvalidArgument(f"its events are at {place}, where those of node {other.name} are")

    async def _check_likeness(self, node: Node, said: prefix_cache_pb2.DescribeResponse) -> None:
        if not any(other.has_fit for other in self.by_name.values() if other is not node):
            await self._forget_likeness(said.block_size)
        if self.selection is None:
            size = self._config.block_size or said.block_size
            config = self._config
            self.selection = Selection(size, config.prefill_weight, config.request_weight, config.request_ttl_s)
        if said.block_size != self.selection.block_size:
            raise InvalidArgument(f"block_size is {said.block_size} there, and {self.selection.block_size} here")
        if said.layout_fingerprint and self._layout and said.layout_fingerprint != self._layout:
            raise InvalidArgument(
                f"layout_fingerprint is {said.layout_fingerprint!r} there, and {self._layout!r} at the others"
            )
        self._layout = self._layout or said.layout_fingerprint
        node.has_fit = True

    async def _forget_likeness(self, block_size: int) -> None:
        """There is no other node to be like."""
        self._layout = ""
        selection = self.selection
        if selection is not None and self._config.block_size is None and selection.block_size != block_size:
            async with self.turn:
                self.selection = None
            await selection.close()

    def _pause(self, worker: int) -> None:
        """Send it nothing more; what it has to do remains known, since it may go on with it."""
        self._serving.pop(worker, None)
        self._changed()

    def _leave(self, worker: int) -> None:
        self._pause(worker)
        self._lives.pop(worker, None)
        self._flights.drop(worker)
        if self.selection is not None:
            self._in_turn(self.selection.remove(worker))

    def _in_turn(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something to the selection, in the order of these calls."""

        async def do() -> None:
            async with self.turn:
                await doing

        return self._kept(do())

    def _kept(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(doing)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)
        return task

    # Who serves.

    def node_of(self, worker: int) -> Node | None:
        """Return the node that has this number now."""
        return self._serving.get(worker)

    def all_serving(self) -> list[int]:
        """Return the numbers of those that serve: one at least. Raises `ServiceUnavailable`."""
        if not self._serving or self.selection is None:
            raise ServiceUnavailable(f"no node serves now: {self._states() or 'there is none'}")
        return list(self._serving)

    @property
    def serving(self) -> dict[int, Node]:
        """The nodes that serve, by their numbers."""
        return self._serving

    def in_reach(self) -> list[int]:
        """Return the numbers of those that may be sent one more: one at least. Raises `ServiceUnavailable`."""
        loads = {worker: self._flights.num_at(worker) for worker in self.all_serving()}
        most = max(_FEW, self._config.max_load * (sum(loads.values()) + 1) / len(loads))
        return [worker for worker, load in loads.items() if load < most]

    def _states(self) -> str:
        states = [pb.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower() for node in self.by_name.values()]
        return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _places(address: str, said: prefix_cache_pb2.DescribeResponse) -> tuple[str, str]:
    """Return where a node's events are, as seen from here. Raises `InvalidArgument`."""
    if not said.events_address:
        raise InvalidArgument(
            "it tells of no events over ZeroMQ: it needs --events-listen, and the router a token that may read them"
        )
    if said.events_encrypted:
        raise InvalidArgument(
            "its events are encrypted, and the selection service has no keys: leave events_key_file out"
        )
    return _place(address, said.events_address), _place(address, said.events_replay_address)


def _place(address: str, events: str) -> str:
    host, _, port = events.rpartition(":")
    if host in _ANYWHERE:
        host = "127.0.0.1" if address.startswith("unix:") else address.rpartition(":")[0]
    elif is_local(events) and not is_local(address):
        raise InvalidArgument(f"its events are at {events}, which only its own machine can reach")
    return f"{host}:{port}"
