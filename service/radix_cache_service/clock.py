"""The time that leases live by, such that a call can be made again: it stands still while the call runs."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CallClock"]


class CallClock:
    """Seconds, never going back, that move only when they are told to.

    Whatever reads it between two moves reads the same, so a call that is made again at the same reading finds the same
    leases expired. source: where the seconds come from. now: what is read.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self.now = 0.0
        self._source = source
        self._ahead = -source()

    def __call__(self) -> float:
        """Return the reading of the last move."""
        return self.now

    def tick(self) -> float:
        """Move to the present; return the reading."""
        self.now = max(self.now, self._source() + self._ahead)
        return self.now

    def resume(self, now: float) -> None:
        """Go on from ``now`` as if no time had passed since it was read."""
        self.now = now
        self._ahead = now - self._source()
