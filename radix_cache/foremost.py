"""Which of many orders has the most urgent leaf, without a look at each.

For each order a bound is kept, in a heap: no first leaf of that order is more urgent. A bound is lowered when a leaf
comes that is more urgent, and looked at, and raised, only when it comes up; so a search costs O(log orders) for each
order whose first leaf has changed since.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from radix_cache.frozen_nodes import tupled

__all__ = ["Foremost"]

_NUM_SPARE_ENTRIES = 64


class Foremost:
    """Orders by number, each with a bound; `first` finds the one whose first leaf has the smallest urgency.

    look: returns the urgency of an order's first leaf, None where it has none.
    """

    def __init__(self, look: Callable[[int], Any]) -> None:
        self._look = look
        self._bounds: dict[int, Any] = {}
        self._heap: list[tuple[Any, int]] = []  # every bound, and some that have been replaced

    def __contains__(self, number: int) -> bool:
        return number in self._bounds

    def lower(self, number: int, urgency: Any) -> None:
        """The order may have a leaf this urgent. O(log orders), amortised."""
        known = self._bounds.get(number)
        if known is None or urgency < known:
            self._bounds[number] = urgency
            heapq.heappush(self._heap, (urgency, number))
            if len(self._heap) > 2 * len(self._bounds) + _NUM_SPARE_ENTRIES:
                self._heap = [(bound, each) for each, bound in self._bounds.items()]
                heapq.heapify(self._heap)

    def leave_out(self, number: int) -> Any:
        """Forget the order, and return its bound."""
        return self._bounds.pop(number)

    def saved(self) -> list[tuple[int, Any]]:
        """Return the bounds."""
        return list(self._bounds.items())

    def restore(self, saved: Iterable[tuple[int, Any]]) -> None:
        """Take up what `saved` returned."""
        for number, bound in saved:
            self.lower(number, tupled(bound))

    def first(self) -> tuple[Any, int] | None:
        """Return the smallest urgency and its order, the lower number of equals; None where no order has a leaf."""
        while self._heap:
            bound, number = self._heap[0]
            urgency = None
            if self._bounds.get(number) == bound:
                urgency = self._look(number)
                if urgency == bound:
                    return bound, number
                del self._bounds[number]
            heapq.heappop(self._heap)
            if urgency is not None:
                self.lower(number, urgency)
        return None
