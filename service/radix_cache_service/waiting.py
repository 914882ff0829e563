"""Calls that wait for blocks, first come, first served.

Waiting allocations go before waiting matches: a running request that gets its blocks ends and gives back all it has,
while a new one only takes. Among equals the first in line is not passed, so that small requests don't starve a large
one; only a call whose time is up tries once more, whatever its place. Calls that don't ask to wait know no line.

Nothing is held while waiting: each attempt is a call like any other, made when something has happened that may have
returned blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from radix_cache.errors import PoolExhausted

__all__ = ["WaitingLine"]


class WaitingLine:
    """The calls that wait. ``num_usable_blocks``: what needs more can't ever have it, and isn't kept waiting."""

    def __init__(self, num_usable_blocks: int) -> None:
        self._num_usable_blocks = num_usable_blocks
        self._first: deque[asyncio.Event] = deque()
        self._second: deque[asyncio.Event] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def stir(self) -> None:
        """Blocks may have come back: let the head of the line try again. O(1)."""
        if self._first:
            self._first[0].set()
        elif self._second:
            self._second[0].set()

    def close(self) -> None:
        """Nobody waits any longer: each call tries once more."""
        self._is_closed = True
        for turn in (*self._first, *self._second):
            turn.set()

    async def run(self, attempt: Callable[[], Any], timeout_s: float | None, *, goes_first: bool) -> Any:
        """Return what ``attempt`` returns, once there are blocks for it; None for ``timeout_s``: however long it takes.

        Raises what it raises; `PoolExhausted` only when the time is up, or when the whole pool would not do.
        """
        line = self._first if goes_first else self._second
        turn = asyncio.Event()
        line.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._take_turns(attempt, turn, line)
        except TimeoutError:
            return attempt()
        finally:
            line.remove(turn)
            self.stir()

    async def _take_turns(self, attempt: Callable[[], Any], turn: asyncio.Event, line: deque[asyncio.Event]) -> Any:
        while not self._is_closed:
            if line[0] is turn and not (line is self._second and self._first):
                try:
                    return attempt()
                except PoolExhausted as error:
                    if error.needed > self._num_usable_blocks:
                        raise
            await turn.wait()
            turn.clear()
        return attempt()
