"""Requests that were routed and are not finished: the load of each node, which no client that died may leave behind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Flight", "Flights"]


@dataclass(frozen=True, slots=True)
class Flight:
    """One request. booking: its name in the selection. worker: the life of a node that it went to."""

    booking: str
    worker: int
    num_cached_tokens: int
    ends_at: float


class Flights:
    """All of them, the oldest first. ttl_s: how long one counts that is not finished."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._by_id: OrderedDict[str, Flight] = OrderedDict()
        self._by_worker: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> Flight | None:
        """Return a request."""
        return self._by_id.get(request_id)

    def num_at(self, worker: int) -> int:
        """Return how many a worker has. O(1)."""
        return self._by_worker.get(worker, 0)

    def add(self, request_id: str, booking: str, worker: int, num_cached_tokens: int) -> None:
        """Note a request that is not there."""
        ends_at = self._clock() + self._ttl_s
        self._by_id[request_id] = Flight(booking, worker, num_cached_tokens, ends_at)
        self._by_worker[worker] = self.num_at(worker) + 1

    def pop(self, request_id: str) -> Flight | None:
        """Forget a request; return it if it was there."""
        flight = self._by_id.pop(request_id, None)
        if flight is not None:
            self._by_worker[flight.worker] -= 1
        return flight

    def pop_expired(self) -> list[Flight]:
        """Forget those whose time is up; return them."""
        expired: list[Flight] = []
        now = self._clock()
        while self._by_id and next(iter(self._by_id.values())).ends_at <= now:
            _, flight = self._by_id.popitem(last=False)
            self._by_worker[flight.worker] -= 1
            expired.append(flight)
        return expired

    def drop(self, worker: int) -> None:
        """Forget all that a worker has: it is gone."""
        if self._by_worker.pop(worker, 0):
            self._by_id = OrderedDict((each, flight) for each, flight in self._by_id.items() if flight.worker != worker)
