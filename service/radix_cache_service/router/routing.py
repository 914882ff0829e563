"""Routing, without its messages: requests are sent to nodes, are their load, and end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from radix_cache.errors import InvalidArgument, ServiceUnavailable
from radix_cache.operations import Namespace
from radix_cache.tokens import unpack_tokens
from radix_cache_service.events.names import lora_name_of
from radix_cache_service.router.config import RouterConfig
from radix_cache_service.router.fleet import Fleet
from radix_cache_service.router.flights import Flight, Flights
from radix_cache_service.router.node import Node
from radix_cache_service.router.selection import Choice, Prompt
from radix_cache_service.telemetry.metrics import Latencies

__all__ = ["Routed", "Routing"]

_MOST_TRIES = 10


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a request goes."""

    node: Node
    num_cached_tokens: int


class Routing:
    """Sends requests to the nodes of ``fleet``. To be used on one event loop.

    latencies: of selections. num_expired: requests that nobody finished.
    """

    def __init__(
        self,
        config: RouterConfig,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.flights = Flights(config.request_ttl_s, config.max_requests, clock)
        self.fleet = Fleet(config, self.flights, changed)
        self.latencies = Latencies()
        self.num_expired = 0
        self._freeing: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def route(self, tokens: bytes, namespace: Namespace, request_id: str, owner: str) -> AsyncIterator[Routed]:
        """Choose a node for a prompt, while the block lasts that answers. The request is its load until it is finished.

        The same id again joins the request that is there. If no call for it gets to the end of its block, nobody was
        told where it goes, and it is over.

        Raises `ServiceUnavailable` where no node serves, `LimitExceeded` for one request too many, `InvalidArgument`
        where the id is that of another prompt.
        """
        await self._finish_gone(request_id)
        flight = self._joined(tokens, namespace, request_id, owner)
        assert flight.placing is not None
        flight.num_waiting += 1
        try:
            node = await asyncio.shield(flight.placing)
            yield Routed(node, flight.num_cached_tokens)
            flight.is_answered = True
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting and not flight.is_answered and self.flights.has(flight):
                await self.finish(request_id)

    async def peek(self, tokens: bytes, namespace: Namespace) -> Routed:
        """Choose a node for a prompt, and count nothing. Raises `ServiceUnavailable`."""
        prompt = Prompt(unpack_tokens(tokens), lora_name_of(namespace))
        async with self.fleet.turn:
            node, choice = await self._choose(prompt)
        return Routed(node, choice.num_cached_tokens)

    async def _finish_gone(self, request_id: str) -> None:
        """End a request whose node serves no more: it is to go to another one."""
        flight = self.flights.get(request_id)
        if flight is not None and flight.booking and self.fleet.node_of(flight.worker) is None:
            await self.finish(request_id)

    def _joined(self, tokens: bytes, namespace: Namespace, request_id: str, owner: str) -> Flight:
        digest = hash((tokens, namespace))
        flight = self.flights.get(request_id)
        if flight is None:
            flight = self.flights.add(request_id, owner, digest)
            prompt = Prompt(unpack_tokens(tokens), lora_name_of(namespace))
            flight.placing = asyncio.create_task(self._place(flight, prompt))
            flight.placing.add_done_callback(lambda done: done.cancelled() or done.exception())
        elif flight.prompt != digest:
            raise InvalidArgument("request_id is that of another prompt, which is not finished")
        return flight

    async def _place(self, flight: Flight, prompt: Prompt) -> Node:
        """Find a node for a request. Not to be cancelled: what is booked is known here alone."""
        async with self.fleet.turn:
            if not self.flights.has(flight):
                raise ServiceUnavailable("the request was finished before a node was chosen")
            booking = os.urandom(8).hex()
            node, choice = await self._choose(prompt, booking)
            if not self.flights.place(flight, booking, *choice):
                await self._free(booking)
        node.num_routed += 1
        node.num_prompt_tokens += len(prompt.tokens)
        node.num_cached_tokens += choice.num_cached_tokens
        return node

    async def _choose(self, prompt: Prompt, booking: str = "") -> tuple[Node, Choice]:
        """Choose again, among all, if the node that was chosen has just ceased to serve."""
        allowed = self.fleet.in_reach()
        began = time.perf_counter()
        for _ in range(_MOST_TRIES):
            assert self.fleet.selection is not None
            choice = await self.fleet.selection.choose(prompt, allowed, booking)
            node = None if choice is None else self.fleet.node_of(choice.number)
            if choice is not None and node is not None:
                self.latencies.add(time.perf_counter() - began)
                return node, choice
            await self._free(booking)
            allowed = self.fleet.all_serving()
        raise ServiceUnavailable("each node that was chosen ceased to serve meanwhile")

    async def scores(self, tokens: bytes, namespace: Namespace) -> dict[int, int]:
        """Return how many tokens of a prompt each node has that serves, by their numbers."""
        if self.fleet.selection is None:
            return {}
        found = await self.fleet.selection.scores(Prompt(unpack_tokens(tokens), lora_name_of(namespace)))
        return {worker: found.get(worker, 0) for worker in self.fleet.serving}

    async def prefilled(self, request_id: str) -> None:
        """The prompt of a request is computed; nothing happens to one that is not there."""
        flight = self.flights.get(request_id)
        if flight is not None and flight.booking and self.fleet.selection is not None:
            await self.fleet.selection.prefilled(flight.booking)

    async def finish(self, request_id: str) -> None:
        """A request is over; nothing happens to one that is not there. One that has no node yet will be none's load."""
        flight = self.flights.pop(request_id)
        if flight is not None:
            await self._free(flight.booking)

    async def _free(self, booking: str) -> None:
        """Count no more what is booked, though the caller be cancelled. An empty name is that of nothing."""
        if booking and self.fleet.selection is not None:
            freeing = asyncio.ensure_future(self.fleet.selection.free(booking))
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)
            await asyncio.shield(freeing)

    async def expire(self) -> None:
        """End the requests whose time is up."""
        for flight in self.flights.pop_expired():
            self.num_expired += 1
            await self._free(flight.booking)

    def pending_tokens(self) -> dict[int, int]:
        """Return how many tokens of their prompts each node's requests have not computed, by its number."""
        return {} if self.fleet.selection is None else self.fleet.selection.pending_tokens()
