"""Long work in a thread beside those that answer calls: in pieces, with the interpreter let go of in between.

Left alone, a thread that computes gives way every 5 ms only, and each call needs the interpreter several times. And
what it makes sets off collections of garbage that walk over all of it, while everybody waits.
"""

from __future__ import annotations

import time

from radix_cache import settle_gc

__all__ = ["Turns"]

_WORK_S = 0.001
_REST_S = 0.00005
_SETTLED = 512  # pieces, each of a few objects


class Turns:
    """Gives others their turn. Not thread-safe."""

    def __init__(self) -> None:
        self._is_due = 0.0
        self._num_pieces = 0

    def rest(self) -> None:
        """Let others run, if this thread has run for a while."""
        now = time.monotonic()
        if now > self._is_due:
            time.sleep(_REST_S)
            self._is_due = time.monotonic() + _WORK_S

    def after_a_piece(self) -> None:
        """Rest, after a piece of what is kept for long, and now and then hide these from the collector."""
        self._num_pieces += 1
        if not self._num_pieces % _SETTLED:
            settle_gc()
        self.rest()
