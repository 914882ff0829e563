"""Rates of events that come at exponential intervals, fitted to the last hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["Rate"]

_SLICE_S = 300.0
_NUM_SLICES = 12


class Rate:
    """Events for each second of waiting, over the last hour in slices of five minutes: at most 13 of them are kept.

    Waiting counts whether or not it ended in an event, so what never comes lowers the rate.
    """

    def __init__(self, slices: Iterable[tuple[int, int, float]] = ()) -> None:
        self._slices = deque((int(number), int(events), float(waited_s)) for number, events, waited_s in slices)

    def add(self, now: float, num_events: int, waited_s: float) -> None:
        """Note ``waited_s`` seconds of waiting that ended in so many events, at ``now``."""
        number = self._forget(now)
        if self._slices and self._slices[-1][0] == number:
            _, events, seconds = self._slices.pop()
            num_events, waited_s = num_events + events, waited_s + seconds
        self._slices.append((number, num_events, waited_s))

    def at(self, now: float, guess_s: float) -> float:
        """Return events per second; one event in ``guess_s`` is counted in, all there is at the beginning."""
        self._forget(now)
        num_events = sum(events for _, events, _ in self._slices)
        return (num_events + 1) / (sum(waited_s for *_, waited_s in self._slices) + guess_s)

    def is_empty(self, now: float) -> bool:
        """Tell whether nothing was noted in the last hour."""
        self._forget(now)
        return not self._slices

    def _forget(self, now: float) -> int:
        number = int(now // _SLICE_S)
        while self._slices and self._slices[0][0] < number - _NUM_SLICES:
            self._slices.popleft()
        return number

    def saved(self) -> list[tuple[int, int, float]]:
        """Return what the constructor takes."""
        return list(self._slices)
