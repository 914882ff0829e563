"""Requests that were routed and are not finished: the load of each node, which no client that died may leave behind.

A request is there from the moment that it is asked for, so that it can be ended before a node was found for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radix_cache.errors import LimitExceeded

__all__ = ["Flight", "Flights"]


@dataclass(slots=True, eq=False)
class Flight:
    """One request. owner: whose. prompt: a hash of what it asks for. placing: what finds it a node.

    booking, worker, num_cached_tokens: its name in the selection, the life of a node that it went to, and what that has
    of the prompt; empty until there is one. num_waiting: calls that wait for it. is_answered: one of them was told.
    """

    request_id: str
    owner: str
    prompt: int
    ends_at: float
    placing: asyncio.Task[Any] | None = None
    booking: str = ""
    worker: int = 0
    num_cached_tokens: int = 0
    num_waiting: int = 0
    is_answered: bool = False


class Flights:
    """All of them, the oldest first. ttl_s: how long one counts that is not finished. most: that an owner may have."""

    def __init__(self, ttl_s: float, most: int, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._clock = clock
        self._by_id: OrderedDict[str, Flight] = OrderedDict()
        self._by_worker: Counter[int] = Counter()
        self._by_owner: Counter[str] = Counter()

    def get(self, request_id: str) -> Flight | None:
        """Return a request."""
        return self._by_id.get(request_id)

    def has(self, flight: Flight) -> bool:
        """Tell whether it is not over yet."""
        return self._by_id.get(flight.request_id) is flight

    def num_at(self, worker: int) -> int:
        """Return how many a worker has. O(1)."""
        return self._by_worker[worker]

    def add(self, request_id: str, owner: str, prompt: int) -> Flight:
        """Note a request that is not there. Raises `LimitExceeded` for one too many."""
        if self._by_owner[owner] >= self._most:
            raise LimitExceeded("max_requests", self._most)
        flight = self._by_id[request_id] = Flight(request_id, owner, prompt, self._clock() + self._ttl_s)
        self._by_owner[owner] += 1
        return flight

    def place(self, flight: Flight, booking: str, worker: int, num_cached_tokens: int) -> bool:
        """Note where a request goes, unless it is over: then return False."""
        if not self.has(flight):
            return False
        flight.booking, flight.worker, flight.num_cached_tokens = booking, worker, num_cached_tokens
        self._by_worker[worker] += 1
        return True

    def pop(self, request_id: str) -> Flight | None:
        """Forget a request; return it if it was there."""
        flight = self._by_id.pop(request_id, None)
        if flight is not None:
            _less(self._by_owner, flight.owner)
            if flight.booking:
                _less(self._by_worker, flight.worker)
        return flight

    def pop_expired(self) -> list[Flight]:
        """Forget those whose time is up; return them."""
        now = self._clock()
        expired = []
        for flight in self._by_id.values():
            if flight.ends_at > now:
                break
            expired.append(flight)
        for flight in expired:
            self.pop(flight.request_id)
        return expired

    def drop(self, worker: int) -> None:
        """Forget all that a worker has: it is gone."""
        for flight in [each for each in self._by_id.values() if each.booking and each.worker == worker]:
            self.pop(flight.request_id)


def _less(counts: Counter[Any], key: Any) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
