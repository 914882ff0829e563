"""Routing, without its messages: requests are sent to nodes, are their load, and end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from radix_cache.errors import LimitExceeded, ServiceUnavailable
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
        self.flights = Flights(config.request_ttl_s, clock)
        self.fleet = Fleet(config, self.flights, changed)
        self.latencies = Latencies()
        self.num_expired = 0
        self._max_requests = config.max_requests

    async def route(self, tokens: bytes, namespace: Namespace, request_id: str = "") -> Routed:
        """Choose a node for a prompt. A request that has an id is its load from now on.

        Raises `ServiceUnavailable` where no node serves, `LimitExceeded` for one request too many.
        """
        prompt = Prompt(unpack_tokens(tokens), lora_name_of(namespace))
        routing = asyncio.create_task(self._route(prompt, request_id))
        routing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(routing)  # who leaves meanwhile leaves a request that can be asked for again

    async def _route(self, prompt: Prompt, request_id: str) -> Routed:
        async with self.fleet.turn:
            again = self._again(request_id)
            if again is not None:
                return again
            if request_id and len(self.flights) >= self._max_requests:
                raise LimitExceeded("max_requests", self._max_requests)
            began = time.perf_counter()
            node, choice, booking = await self._choose(prompt, is_booked=bool(request_id))
            self.latencies.add(time.perf_counter() - began)
            if not request_id:
                return Routed(node, choice.num_cached_tokens)
            self.flights.add(request_id, booking, *choice)
        node.num_routed += 1
        node.num_prompt_tokens += len(prompt.tokens)
        node.num_cached_tokens += choice.num_cached_tokens
        return Routed(node, choice.num_cached_tokens)

    def _again(self, request_id: str) -> Routed | None:
        """Return what the same request was answered before, if its node still serves."""
        flight = self.flights.get(request_id)
        node = None if flight is None else self.fleet.node_of(flight.worker)
        return None if flight is None or node is None else Routed(node, flight.num_cached_tokens)

    async def _choose(self, prompt: Prompt, *, is_booked: bool) -> tuple[Node, Choice, str]:
        """Choose again if the node that was chosen has just ceased to serve: what is booked there goes with it."""
        for _ in range(_MOST_TRIES):
            booking = os.urandom(8).hex() if is_booked else ""
            in_reach = self.fleet.in_reach()
            assert self.fleet.selection is not None
            choice = await self.fleet.selection.choose(prompt, in_reach, booking)
            node = None if choice is None else self.fleet.node_of(choice.number)
            if choice is not None and node is not None:
                return node, choice, booking
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
        if flight is not None and self.fleet.selection is not None:
            await self.fleet.selection.prefilled(flight.booking)

    async def finish(self, request_id: str) -> None:
        """A request is over; nothing happens to one that is not there."""
        await self._free(self.flights.pop(request_id))

    async def _free(self, flight: Flight | None) -> None:
        if flight is not None and self.fleet.selection is not None:
            await self.fleet.selection.free(flight.booking)

    async def expire(self) -> None:
        """End the requests whose time is up."""
        for flight in self.flights.pop_expired():
            self.num_expired += 1
            await self._free(flight)

    def pending_tokens(self) -> dict[int, int]:
        """Return how many tokens of their prompts each node's requests have not computed, by its number."""
        return {} if self.fleet.selection is None else self.fleet.selection.pending_tokens()
